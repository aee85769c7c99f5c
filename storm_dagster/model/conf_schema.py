"""Every conf key that the system itself reads: type, default, bounds and meaning, from ``conf_keys.yaml`` beside this module."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from storm_dagster.model.masking import HIDDEN, is_secret_key
from storm_dagster.model.strategies import STRATEGIES
from storm_dagster.model.tables import load_table

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


def _known_keys() -> Iterator[tuple[str, ConfKey]]:
    rows = load_table(__name__, "conf_keys")
    rows["topology.scheduler.strategy"]["choices"] = tuple(STRATEGIES)
    for key, row in rows.items():
        yield key, ConfKey(row.pop("type"), **row)


CONF_KEYS: dict[str, ConfKey] = dict(_known_keys())
"""Key -> what is known of it, in the order of the file."""
