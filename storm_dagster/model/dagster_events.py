"""Asset events that components report to Dagster, validated where they are made, and again by
nimbus.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from storm_dagster.model.errors import InvalidRequest

MOST_METADATA_BYTES = 16_384
"""Most bytes of an event's metadata as JSON."""
_LONGEST = {"key": 512, "partition": 512, "data_version": 256, "description": 2048}
_CHECK = re.compile(r"[A-Za-z0-9_]{1,128}")
_ID = re.compile(r"[0-9a-f]{32}")
_CONTROL = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_LONE = re.compile("[\ud800-\udfff]")
"""Halves of characters, which UTF-8 cannot hold."""
_DEEPEST = 8


class DagsterEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One materialization, observation or check of an asset. Made by :meth:`make`, which checks
    it.
    """

    id: str
    """32 hex digits of topology, component and contents: an event that is reported again has the
    same.
    """
    kind: Literal["materialization", "observation", "check"]
    key: tuple[str, ...]
    partition: str | None = None
    metadata: dict[str, Any] = {}
    description: str | None = None
    data_version: str | None = None
    check: str | None = None
    """Name of a check."""
    passed: bool | None = None
    severity: Literal["ERROR", "WARN"] = "ERROR"

    @property
    def asset(self) -> str:
        """The key as people write it: ``lake/clicks``."""
        return "/".join(self.key)

    @staticmethod
    def make(origin: str, kind: Any, key: str | Sequence[str], **given: Any) -> "DagsterEvent":
        """A checked event of ``origin`` (topology and component); ``None`` among the values is
        none.

        Raises :class:`InvalidRequest` for what Dagster would not take. Scalars of numpy become
        plain numbers.
        """
        what = f"{kind} of asset {key!r:.100}"
        parts = (
            key.split("/")
            if isinstance(key, str)
            else [*key]
            if isinstance(key, list | tuple)
            else []
        )
        if not parts or not all(isinstance(part, str) and part for part in parts):
            raise InvalidRequest(
                f"{what}: the key must be a string such as 'lake/clicks', or a list of its parts"
            )
        values = {name: _scalar(value) for name, value in given.items() if value is not None}
        for name, value in {**values, "key": "/".join(parts)}.items():
            longest = _LONGEST.get(name)
            control = _LONE if name == "description" else _CONTROL
            if longest and (
                not isinstance(value, str) or not 0 < len(value) <= longest or control.search(value)
            ):
                raise InvalidRequest(
                    f"{what}: {name} must be a string of 1 to {longest} characters without control characters, got "
                    f"{value!r:.100} ({type(value).__name__})"
                )
        if kind == "check" and not _CHECK.fullmatch(str(values.get("check"))):
            raise InvalidRequest(
                f"{what}: a check's name has letters, digits and _ only: {given.get('check')!r:.100}"
            )
        if kind == "check" and not isinstance(values.get("passed"), bool):
            raise InvalidRequest(
                f"{what}: passed must be True or False, got {given.get('passed')!r:.100}"
            )
        if values.get("severity", "ERROR") not in ("ERROR", "WARN"):
            raise InvalidRequest(
                f"{what}: severity must be 'ERROR' or 'WARN', got {values['severity']!r:.100}"
            )
        metadata = values.pop("metadata", {})
        if not isinstance(metadata, Mapping):
            raise InvalidRequest(f"{what}: metadata must be a map, got {metadata!r:.100}")
        values["metadata"] = _plain(metadata, what, "metadata", 0)
        if (size := len(json.dumps(values["metadata"]).encode())) > MOST_METADATA_BYTES:
            raise InvalidRequest(
                f"{what}: its metadata has {size} bytes, the limit is {MOST_METADATA_BYTES}: write it to the lake, and "
                "give its path"
            )
        contents = json.dumps([origin, kind, parts, values], sort_keys=True, separators=(",", ":"))
        number = hashlib.sha256(contents.encode()).hexdigest()[:32]
        return DagsterEvent(id=number, kind=kind, key=tuple(parts), **values)


def decode_event(document: Any) -> "DagsterEvent":
    """The event in a document of a worker, checked; it keeps its id. :class:`InvalidRequest` for
    anything else.
    """
    try:
        found = msgspec.convert(document, DagsterEvent)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"this is not a valid event: {error}") from None
    if not _ID.fullmatch(found.id):
        raise InvalidRequest(f"{found.id!r:.40} is not the id of an event: an id has 32 hex digits")
    given = {name: getattr(found, name) for name in DagsterEvent.__struct_fields__[3:]}
    return msgspec.structs.replace(
        DagsterEvent.make("", found.kind, found.key, **given), id=found.id
    )


def _scalar(value: Any) -> Any:
    """A scalar of numpy as Python's own; anything else as it is."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return value


def _plain(value: Any, what: str, where: str, depth: int) -> Any:
    value = _scalar(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str) and not _LONE.search(value):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth < _DEEPEST and isinstance(value, list | tuple):
        return [_plain(item, what, f"{where}[{at}]", depth + 1) for at, item in enumerate(value)]
    if (
        depth < _DEEPEST
        and isinstance(value, Mapping)
        and all(isinstance(key, str) and key for key in value)
    ):
        return {
            key: _plain(item, what, f"{where}[{key!r:.40}]", depth + 1)
            for key, item in value.items()
        }
    raise InvalidRequest(
        f"{what}: {where} is {value!r:.60} ({type(value).__name__}), which JSON cannot hold: give strings, finite numbers, "
        f"booleans, None, lists or maps with strings as keys, at most {_DEEPEST} deep (a datetime as .isoformat(), an array "
        "as .tolist())"
    )
