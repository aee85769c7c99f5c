"""Every conf key that the system itself reads: type, default, bounds and meaning, from ``conf_keys.yaml`` beside this module."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import yaml

from storm_dagster.model.masking import HIDDEN, is_secret_key
from storm_dagster.model.strategies import STRATEGIES

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
    choices: tuple[str, ...] = ()


def _is_kind(kind: Kind, value: Any) -> bool:
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "bool":
        return isinstance(value, bool)
    if kind in ("str", "path"):
        return isinstance(value, str)
    if kind == "map":
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if not isinstance(value, list | tuple):
        return False
    inner: dict[str, Kind] = {"list[str]": "str", "list[int]": "int", "list[map]": "map"}
    return all(_is_kind(inner[kind], item) for item in value)


_NAMES = {
    "int": "an integer",
    "number": "a number",
    "bool": "true or false",
    "str": "a string",
    "path": "a path",
    "list[str]": "a list of strings",
    "list[int]": "a list of integers",
    "map": "a map",
    "list[map]": "a list of maps",
}


def check_value(key: str, value: Any) -> str | None:
    """Reason why ``value`` is not valid for the known ``key``; ``None`` when it is."""
    spec = CONF_KEYS[key]
    if not _is_kind(spec.kind, value):
        shown = HIDDEN if is_secret_key(key) else f"{value!r:.60}"
        return f"{key} must be {_NAMES[spec.kind]}, got {shown} ({type(value).__name__})"
    if spec.minimum is not None and value < spec.minimum:
        return f"{key} must be at least {spec.minimum:g}, got {value!r}"
    if spec.maximum is not None and value > spec.maximum:
        return f"{key} must be at most {spec.maximum:g}, got {value!r}"
    if spec.choices and value not in spec.choices:
        return f"{key} must be one of {', '.join(spec.choices)}, got {value!r:.60}"
    return None


def _known_keys() -> dict[str, ConfKey]:
    text = resources.files("storm_dagster.model").joinpath("conf_keys.yaml").read_text(encoding="utf-8")
    # libyaml's parser, where PyYAML has it: every command and worker waits for this.
    rows = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    rows["topology.scheduler.strategy"]["choices"] = STRATEGIES
    return {
        key: ConfKey(
            row["type"],
            row["doc"],
            row["default"],
            row.get("minimum"),
            row.get("maximum"),
            tuple(row.get("choices", ())),
        )
        for key, row in rows.items()
    }


CONF_KEYS: dict[str, ConfKey] = _known_keys()
"""Key -> what is known of it, in the order of the file."""
