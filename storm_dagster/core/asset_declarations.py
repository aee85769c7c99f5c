"""Decisions about the assets on which the components of a topology report to Dagster.

A component reports on assets that it declares (``topology.component.assets``), and those of a
limited user's topology are below a prefix of ``nimbus.user.asset.prefixes`` as well. Declarations
are read from the stored record of the topology, never from what a worker says. Keys of assets are
compared part by part: ``topologies/orders2`` is not below ``topologies/orders``.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from storm_dagster.core.submission.conf import OWNER_KEY
from storm_dagster.model.conf import Conf
from storm_dagster.model.conf_layers import merged_value
from storm_dagster.model.dagster_events import ASSETS_KEY, is_target_key
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.topology import TopologySpec

PREFIXES_KEY = "nimbus.user.asset.prefixes"
"""Conf key of the cluster: templates of the prefixes of a limited user's assets."""

AssetParts = tuple[str, ...]
"""Key of an asset by its parts."""

_TARGET_PREFIX = "topologies"
"""First part of the key that a code location gives a sink's table unless it chooses another."""
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_MAX_LISTED = 5
"""Declared assets that a reason names."""
_REMEDY = (
    f"list it in `assets` of the component's class, or in the component's conf key {ASSETS_KEY}, "
    "and update the topology"
)


def asset_parts(path: str) -> AssetParts:
    """The key that a declaration names, such as ``lake/clicks``.

    A declaration cannot name a key with a ``/`` within a part.
    """
    return tuple(path.split("/"))


@dataclass(frozen=True)
class DeclaredAssets:
    """Assets that the components of a topology declare, by its stored record."""

    by_component: Mapping[str, frozenset[AssetParts]]

    @staticmethod
    def of(spec: TopologySpec, conf: Conf) -> "DeclaredAssets":
        """Declarations of a stored topology.

        ``conf`` is the total conf, which counts for components without a list of their own.
        """
        of_topology = _declared(conf.get(ASSETS_KEY))
        by_component: dict[str, frozenset[AssetParts]] = {}
        for component, _, part in spec.components():
            declared = of_topology
            # Components share the list of the topology, which may be long.
            if ASSETS_KEY in part.conf:
                paths = merged_value({"total": conf, "component": part.conf}, ASSETS_KEY)
                declared = _declared(paths)
            by_component[component] = declared
        return DeclaredAssets(by_component)

    def declares(self, component: str | None, key: Sequence[str]) -> bool:
        """True if the component declares the asset of an event.

        The report of a sink on a table names the component and the table, which that component
        declares. Without a component (a worker of an earlier release) any component may declare it.
        """
        parts = tuple(key)
        if is_target_key(parts):
            owner = parts[1]
            if component is not None and component != owner:
                return False
            return parts[2:] in self.by_component.get(owner, frozenset())
        if component is not None:
            return parts in self.by_component.get(component, frozenset())
        return any(parts in declared for declared in self.by_component.values())

    def describe_declared(self, component: str | None) -> str:
        """Name the first declared assets of a component, for a reason."""
        if component is None:
            return ""
        declared = sorted(self.by_component.get(component, frozenset()))
        if not declared:
            return " (it declares none)"
        names = ", ".join(repr("/".join(parts)) for parts in declared[:_MAX_LISTED])
        more = ", ..." if len(declared) > _MAX_LISTED else ""
        return f" (it declares {names[:300]}{more})"


def _declared(paths: Any) -> frozenset[AssetParts]:
    """Keys of a list of declarations; a value of another kind declares none."""
    if not isinstance(paths, list | tuple):
        return frozenset()
    return frozenset(asset_parts(path) for path in paths if isinstance(path, str))


@dataclass(frozen=True)
class AssetPrefix:
    """A prefix of keys, by its parts."""

    parts: AssetParts
    includes_itself: bool
    """True if the asset with exactly these parts counts, too: the template ends without ``/``."""

    @staticmethod
    def of(template: str, values: Mapping[str, str]) -> "AssetPrefix":
        """The prefix of a template, whose placeholders ``{key}`` are replaced by ``values``.

        A value stays within its part, whatever characters it has. :class:`InvalidRequest` for an
        unknown placeholder, and for a template with an empty part: it would be a prefix of more
        than it seems.
        """
        parts = template.split("/")
        includes_itself = parts[-1] != ""
        if not includes_itself:
            parts.pop()
        if not parts or "" in parts:
            raise InvalidRequest(
                f"{PREFIXES_KEY} has {template!r:.100}: a prefix has parts that are not empty, "
                "such as 'lake/clicks' or 'lake/'"
            )
        filled_parts = (_fill_placeholders(part, template, values) for part in parts)
        return AssetPrefix(tuple(filled_parts), includes_itself)

    def covers(self, key: Sequence[str]) -> bool:
        """True if the key is below the prefix, or is the prefix itself if that counts."""
        length = len(self.parts)
        if tuple(key[:length]) != self.parts:
            return False
        return len(key) > length or self.includes_itself

    def __str__(self) -> str:
        return "/".join(self.parts) + ("" if self.includes_itself else "/")


def _fill_placeholders(part: str, template: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of one part of a template by their values."""

    def value(match: re.Match[str]) -> str:
        replacement = values.get(match[1])
        if replacement is None:
            placeholders = ", ".join(f"{{{name}}}" for name in values)
            raise InvalidRequest(
                f"{PREFIXES_KEY} has {template!r:.100}: {match[0]!r} is not a placeholder, these "
                f"are: {placeholders}"
            )
        return replacement

    return _PLACEHOLDER.sub(value, part)


def user_prefixes(templates: Iterable[str], name: str, user: str) -> tuple[AssetPrefix, ...]:
    """Prefixes of the assets of a limited user's topology of that name.

    :class:`InvalidRequest` for a template that is not valid.
    """
    values = {"topology.name": name, OWNER_KEY: user}
    return tuple(AssetPrefix.of(template, values) for template in templates)


def check_prefixes(conf: Conf) -> None:
    """Check the templates of a cluster's conf; :class:`InvalidRequest` names a wrong one."""
    user_prefixes(conf[PREFIXES_KEY], "name", "user")


@dataclass(frozen=True)
class LimitedUser:
    """The owner of a topology who is not an administrator, and the prefixes of its assets."""

    name: str
    prefixes: tuple[AssetPrefix, ...]


@dataclass(frozen=True)
class AssetDecision:
    """Decision about one event of a worker."""

    outcome: Literal["accepted", "warned", "refused"]
    """``warned``: it is stored now, and will be refused by the next release."""
    reason: str = ""
    """Reason and remedy; empty if it is accepted."""


_ACCEPTED = AssetDecision("accepted")


def decide_on_event(
    declared: DeclaredAssets,
    topology: str,
    component: str | None,
    key: Sequence[str],
    limited: LimitedUser | None,
) -> AssetDecision:
    """Decide about an event with that ``key``, which ``component`` reports.

    ``topology`` is the name of the topology. ``limited`` is its owner; ``None`` for an
    administrator's topology, whose undeclared assets are accepted with a warning for one release.
    """
    subject = _subject(component)
    if not declared.declares(component, key):
        declared_text = declared.describe_declared(component)
        if limited is not None:
            text = f"{subject} does not declare it{declared_text}: {_REMEDY}"
            return AssetDecision("refused", text)
        text = (
            f"is not declared by {subject}{declared_text}; it is stored, and the next release "
            f"refuses it: {_REMEDY}"
        )
        return AssetDecision("warned", text)
    if limited is None:
        return _ACCEPTED
    default_key = _default_key(topology, key)
    if any(prefix.covers(default_key) for prefix in limited.prefixes):
        return _ACCEPTED
    prefixes = ", ".join(str(prefix) for prefix in limited.prefixes) or "none"
    return AssetDecision(
        "refused",
        f"{subject} declares it, and it is not below a prefix of the assets of user "
        f"{limited.name!r} for topology {topology!r} ({PREFIXES_KEY}: {prefixes:.300}): report on "
        "an asset below one of them, or ask an administrator to add a prefix",
    )


def _subject(component: str | None) -> str:
    return "no component" if component is None else f"component {component!r}"


def _default_key(topology: str, key: Sequence[str]) -> AssetParts:
    """The key of an event, in which a sink's report has the key that its table has by default.

    A code location may give the table another key: that is a decision of the location, which no
    worker can change.
    """
    if not is_target_key(key):
        return tuple(key)
    return (_TARGET_PREFIX, topology, *key[1:])
