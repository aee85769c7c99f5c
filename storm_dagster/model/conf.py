"""Conf maps: keys, loading, merging, validation, the origin of each value, and what is secret
wherever one is shown.

A conf is a flat map of dotted keys. Cluster conf is the shipped ``conf_keys.yaml``, then
``storm.yaml`` of HOME or ``--conf-dir``, then ``-c KEY=VALUE``; a topology's conf is laid over it.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from storm_dagster.model.errors import InvalidRequest, InvalidTopology
from storm_dagster.model.removed_keys import take_removed_keys
from storm_dagster.model.strategies import STRATEGIES
from storm_dagster.model.tables import load_table

HIDDEN = "*****"
"""Replacement of a secret wherever a conf is shown."""
_ZOOKEEPERS = ("storm.zookeeper.auth.payload", "storm.zookeeper.ssl.keystore.password")
SECRET_KEYS = frozenset({"storm.secret", *_ZOOKEEPERS, "dagster.graphql.headers"})
"""Conf keys whose values are secrets: never shown, logged, or given on a command line."""

_TELLTALE = re.compile(
    r"secret|passw|passphrase|(?<![a-z])pwd|token|credential|payload|cookie|jaas|authorization|"
    r"(private|access|api|account|signing)[._-]?key|key[._-]pem",
    re.IGNORECASE,
)
_HARMLESS = re.compile(r"[._-](secs|ms|file|path|count|size|bytes|ttl|enabled?)$", re.IGNORECASE)
_IN_TEXT = re.compile(
    # User and password in an address, options of a Spark or database address, headers, AWS and
    # GitHub keys.
    r"(?P<login>(?<=://)[^/?#\s]*@)"
    r"|(?P<option>[;?&](?:[a-z_.-]*(?:token|password|passwd|pwd|secret|authorization|key))=)[^;&\s\"']+"
    r"|(?P<header>\b(?:Bearer|Basic)\s+)[A-Za-z0-9+/=._~-]{8,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}",
    re.IGNORECASE,
)


def is_secret_key(key: object) -> bool:
    """Whether the value under a conf key, or the name of an environment variable, is to be
    hidden.
    """
    name = str(key)
    return name in SECRET_KEYS or bool(_TELLTALE.search(name) and not _HARMLESS.search(name))


def mask_text(text: str) -> str:
    """The text with what looks like a password in it replaced."""
    return _IN_TEXT.sub(
        lambda found: (
            HIDDEN + "@" if found["login"] else (found["option"] or found["header"] or "") + HIDDEN
        ),
        text,
    )


def mask(value: Any, key: object = "") -> Any:
    """A copy of ``value`` without secrets: of every type below a telltale key, and by pattern in
    text, at any depth.
    """
    if isinstance(value, Mapping):
        hidden = is_secret_key(key)
        return {
            name: HIDDEN if hidden and item else mask(item, name) for name, item in value.items()
        }
    if is_secret_key(key) and value and not isinstance(value, bool):
        return HIDDEN
    if isinstance(value, list | tuple):
        return [mask(item) for item in value]
    return mask_text(value) if isinstance(value, str) else value


def yaml_problem(error: Exception) -> str:
    """What is wrong in a YAML text, and where, without the text itself."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or type(error).__name__
    return f"{problem} in line {mark.line + 1}, column {mark.column + 1}" if mark else str(problem)


OWNED_PREFIXES = ("topology.", "storm.", "nimbus.", "supervisor.", "worker.")
"""An unknown key below these is a mistake; all other prefixes belong to the user."""

Kind = Literal["int", "number", "bool", "str", "list[str]", "list[int]", "map", "list[map]", "path"]


@dataclass(frozen=True)
class ConfKey:
    """One known key. ``null`` is allowed exactly when the shipped default is null."""

    kind: Kind
    doc: str
    default: Any
    minimum: float | None = None
    maximum: float | None = None
    choices: Collection[str] = ()


_KINDS: dict[Kind, tuple[str, Any]] = {
    "int": ("an integer", int),
    "number": ("a number", int | float),
    "bool": ("true or false", bool),
    "str": ("a string", str),
    "path": ("a path", str),
    "list[str]": ("a list of strings", list | tuple),
    "list[int]": ("a list of integers", list | tuple),
    "map": ("a map", dict),
    "list[map]": ("a list of maps", list | tuple),
}
"""Kind -> its name for people, and its types in Python."""
_INNER: dict[Kind, Kind] = {"list[str]": "str", "list[int]": "int", "list[map]": "map"}


def _is_kind(kind: Kind, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, _KINDS[kind][1]):
        return kind == "bool" and isinstance(value, bool)
    if kind == "map":
        return all(isinstance(key, str) for key in value)
    return kind not in _INNER or all(_is_kind(_INNER[kind], item) for item in value)


def check_value(key: str, value: Any) -> str | None:
    """Reason why ``value`` is not valid for the known ``key``; ``None`` when it is."""
    spec = CONF_KEYS[key]
    if not _is_kind(spec.kind, value):
        shown = HIDDEN if is_secret_key(key) else f"{value!r:.60}"
        return f"{key} must be {_KINDS[spec.kind][0]}, got {shown} ({type(value).__name__})"
    if spec.minimum is not None and value < spec.minimum:
        return f"{key} must be at least {spec.minimum:g}, got {value!r}"
    if spec.maximum is not None and value > spec.maximum:
        return f"{key} must be at most {spec.maximum:g}, got {value!r}"
    if spec.choices and value not in spec.choices:
        return f"{key} must be one of {', '.join(spec.choices)}, got {value!r:.60}"
    return None


_ROWS = load_table(__name__, "conf_keys")
_ROWS["topology.scheduler.strategy"]["choices"] = tuple(STRATEGIES)
CONF_KEYS: dict[str, ConfKey] = {key: ConfKey(row.pop("type"), **row) for key, row in _ROWS.items()}
"""Key -> what is known of it, in the order of the file."""


Conf = Mapping[str, Any]
_JAVA_CLASSES = ("org.apache.storm.", "backtype.storm.", "com.alibaba.jstorm.")


def default_conf() -> dict[str, Any]:
    """A fresh copy of the shipped defaults."""
    return {key: known.default for key, known in CONF_KEYS.items()}


@functools.cache
def keys_without_meaning() -> dict[str, str]:
    """Keys of Storm and JStorm that are accepted and ignored, each with the reason; ``a.b.*`` is a
    family.
    """
    return {
        key: group["reason"]
        for group in load_table(__name__, "storm_keys")
        for key in group["keys"]
    }


def _reason_to_ignore(key: str, *, submitted: bool) -> str | None:
    # A topology's own conf may have keys below any prefix that is not ours: its code reads them.
    if key in CONF_KEYS or (submitted and not key.startswith(OWNED_PREFIXES)):
        return None
    reasons, parts = keys_without_meaning(), key.split(".")
    families = (".".join([*parts[:length], "*"]) for length in range(len(parts) - 1, 0, -1))
    return next((reasons[name] for name in (key, *families) if name in reasons), None)


def unknown_keys(conf: Conf) -> dict[str, str]:
    """Unknown keys below an owned prefix, each with a sentence naming the nearest known key."""
    found: dict[str, str] = {}
    for key in conf:
        if (
            key in CONF_KEYS
            or not key.startswith(OWNED_PREFIXES)
            or _reason_to_ignore(key, submitted=False)
        ):
            continue
        from difflib import get_close_matches

        near = get_close_matches(key, CONF_KEYS, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else "remove it, or use a prefix of your own"
        found[key] = f"conf key {key!r} is not known: {hint}"
    return found


def validate_conf(
    conf: Any, *, source: str, unknown: Literal["error", "warn"] = "error", submitted: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """The conf, checked, and warnings. Values that are classes of Storm or JStorm are left out.

    So are keys that went (:data:`~storm_dagster.model.removed_keys.REMOVED_KEYS`), each with a
    warning; the value of a renamed one counts under its new name.

    ``unknown`` is ``"error"`` (command line, YAML, plan files) or ``"warn"`` (Thrift). Raises
    :class:`InvalidRequest` that names every wrong key at once, and ``source``. Of a ``submitted``
    conf (a topology's or a component's) null under a key with a default means "not set", and the
    error is :class:`InvalidTopology`.
    """
    failure = InvalidTopology if submitted else InvalidRequest
    if not isinstance(conf, Mapping):
        hint = ": send a JSON object" if submitted else ""
        raise failure(
            f"{source}: the conf must be a map of keys to values, got {type(conf).__name__}{hint}"
        )
    conf, warnings = take_removed_keys(conf, source)
    problems = [f"conf key {key!r} must be a string" for key in conf if not isinstance(key, str)]
    strange = unknown_keys({key: None for key in conf if isinstance(key, str)})
    (problems if unknown == "error" else warnings).extend(strange.values())
    checked: dict[str, Any] = {}
    ignored: defaultdict[str, list[str]] = defaultdict(list)
    for key, value in conf.items():
        if isinstance(key, str) and (reason := _reason_to_ignore(key, submitted=submitted)):
            ignored[reason].append(key)
        elif key in CONF_KEYS and not (value is None and CONF_KEYS[key].default is None):
            if value is None and submitted:
                continue
            if isinstance(value, str) and value.startswith(_JAVA_CLASSES):
                ignored[f"a Java class cannot be used, {CONF_KEYS[key].default!r} is"].append(key)
                continue
            if (
                key == "isolation.scheduler.machines"
                and isinstance(value, Mapping)
                and not submitted
            ):
                ignored[
                    "numbers of machines choose no hosts: list hosts in a topology's conf"
                ].append(key)
                continue
            if CONF_KEYS[key].kind == "int" and isinstance(value, float) and value.is_integer():
                value = int(value)
            if wrong := check_value(key, value):
                problems.append(wrong)
        checked[key] = value
    if problems:
        raise failure(f"{source}: " + "; ".join(problems))
    warnings += [
        f"{source}: {', '.join(keys)} ignored: {reason}" for reason, keys in ignored.items()
    ]
    return checked, warnings


def parse_assignments(pairs: Iterable[str], *, source: str = "--conf") -> dict[str, Any]:
    """``KEY=VALUE`` strings as a conf map; VALUE is read as YAML, so ``3`` is a number and ``[a,
    b]`` a list.
    """
    conf: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise InvalidRequest(f"{source} {key!r:.80} is not of the form KEY=VALUE")
        if key.strip() in SECRET_KEYS:
            raise InvalidRequest(
                f"{source} {key.strip()}: every user of the machine can read a command line: "
                "write it into storm.yaml, or use storm.secret.file"
            )
        try:
            conf[key.strip()] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InvalidRequest(
                f"{source} {key.strip()}: the value is not valid YAML: {yaml_problem(error)}"
            ) from None
    return conf


@dataclass(frozen=True, repr=False)
class ClusterConf:
    """A merged cluster conf and the origin of each value."""

    values: dict[str, Any]
    origins: dict[str, str]
    warnings: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default`` when the key is absent (a null value is returned as
        ``None``).
        """
        return self.values.get(key, default)

    def __repr__(self) -> str:
        return f"ClusterConf({mask(self.values)!r})"

    def with_values(self, values: Conf, origin: str) -> "ClusterConf":
        """A copy with ``values`` laid over, validated."""
        checked, warnings = validate_conf(values, source=origin)
        return ClusterConf(
            {**self.values, **checked},
            {**self.origins, **dict.fromkeys(checked, origin)},
            (*self.warnings, *warnings),
        )


def seed_urls(conf: "ClusterConf") -> list[str]:
    """Base URLs of ``nimbus.seeds``: ``host`` (at ``nimbus.http.port``), ``host:port`` or a whole
    URL.
    """
    scheme, port = "https" if conf.get("storm.tls.ca") else "http", conf["nimbus.http.port"]
    urls: list[str] = []
    for seed in map(str, conf["nimbus.seeds"] or ()):
        if "://" in seed:
            urls.append(seed.rstrip("/"))
        elif ":" in seed.rpartition("]")[2]:
            urls.append(f"{scheme}://{seed}")
        elif port:
            urls.append(f"{scheme}://{seed}:{port}")
    return urls
