"""Output streams of components, and groupings of the tasks that read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.groupings import Grouping as Grouping
from storm_dagster.model.names import check_stream_id
from storm_dagster.model.topology import DEFAULT_STREAM, FIELD_TYPES, StreamSpec

Outputs = Sequence[Any] | Mapping[str, Any] | None
"""Field names, a map from field names to types (of one default stream), or streams."""


class Stream:
    """One output stream: its fields, its name, and whether the emitter chooses the receiving task."""

    __slots__ = ("direct", "fields", "name", "types")

    def __init__(
        self, fields: Iterable[str] | Mapping[str, Any] = (), name: str = DEFAULT_STREAM, direct: bool = False
    ) -> None:
        """``fields``: names, or a map from names to types (``str``, ``int``, ``float``, ``bool``, ``bytes``,
        ``list``, ``dict``, ``datetime``, ``object`` for anything): values of typed streams are checked when
        they are emitted."""
        if isinstance(fields, str):
            raise InvalidTopology(f"stream {name!r}: fields must be a list of names, got the string {fields!r}")
        self.fields: tuple[str, ...] = tuple(fields)
        self.types: tuple[str, ...] | tuple[()] = (
            tuple(_type_name(kind, name) for kind in fields.values()) if isinstance(fields, Mapping) else ()
        )
        self.name: str = name
        self.direct: bool = bool(direct)
        wrong = [field for field in self.fields if not isinstance(field, str) or not field]
        if wrong:
            raise InvalidTopology(f"stream {name!r}: field {wrong[0]!r} must be a non-empty string")
        if len(set(self.fields)) != len(self.fields):
            raise InvalidTopology(f"stream {name!r} declares a field twice: {', '.join(self.fields)}")
        check_stream_id(name)

    def __repr__(self) -> str:
        return f"Stream(fields={list(self.fields)!r}, name={self.name!r}, direct={self.direct!r})"


def stream_specs(outputs: Iterable[Any] | None, owner: str) -> dict[str, StreamSpec]:
    """The ``outputs`` of a component, field names or :class:`Stream` objects, as specs by stream name."""
    if outputs is None:
        return {}
    if isinstance(outputs, str):
        raise InvalidTopology(f"{owner}: outputs must be a list of names or streams, got the string {outputs!r}")
    given: list[Any] = [Stream(outputs)] if isinstance(outputs, Mapping) else list(outputs)
    streams = [item for item in given if isinstance(item, Stream)]
    if given and not streams:
        streams = [Stream(fields=given)]
    elif len(streams) != len(given):
        raise InvalidTopology(f"{owner}: outputs mix field names and streams: use one of the two")
    found: dict[str, StreamSpec] = {}
    for stream in streams:
        if stream.name in found:
            raise InvalidTopology(f"{owner} declares stream {stream.name!r} twice: give each its own name")
        found[stream.name] = StreamSpec(fields=stream.fields, direct=stream.direct, types=stream.types)
    return found


def _type_name(kind: Any, stream: str) -> str:
    name = "any" if kind in (object, Any) else getattr(kind, "__name__", str(kind))
    if name not in FIELD_TYPES:
        raise InvalidTopology(
            f"stream {stream!r}: {kind!r:.60} is not a field type, use one of {', '.join(FIELD_TYPES)}"
        )
    return name
