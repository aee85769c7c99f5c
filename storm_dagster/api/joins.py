"""Joins of streams over fields, per window."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from storm_dagster.api.specs import Inputs, Spec
from storm_dagster.api.tuples import Tuple
from storm_dagster.api.windows import TupleWindow, Window, WindowedBolt
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.multimap import multimap

_Row = dict[str, Tuple | None]
"""A joined row: stream -> its tuple, ``None`` for a missing partner of a left join."""


class Join:
    """Definition of a join, in the order of the calls (as Storm's JoinBolt)::

        Join("orders", "customer")
            .inner("customers", "id", "orders")
            .left("ratings", "customer", "orders")
            .select("customer", "orders:item", "customers:name", "ratings:stars as rating")

    The name of a stream is the component that it comes from (with ``by="stream"`` its own name). A
    stream is always joined by the same field, by which it must be grouped when the bolt has several
    tasks. A field may be inside of maps: ``"user.address.city"``.
    """

    def __init__(
        self, stream: str, key: str, by: Literal["component", "stream"] = "component"
    ) -> None:
        self.by = by
        self.parts: list[dict[str, str]] = [
            {"kind": "from", "stream": stream, "key": key, "with": ""}
        ]
        """The first stream, and the joins: kind, stream, its field, and the stream joined with."""
        self.fields: list[tuple[str, str, str]] = []
        """(stream or ``""``, field, output name)."""

    def _join(self, kind: str, stream: str, key: str, other: str) -> Join:
        """Add a join, and return the definition itself.

        :class:`InvalidTopology` unless ``other`` is joined already, and ``stream`` is not.
        """
        streams = [part["stream"] for part in self.parts]
        if other not in streams:
            raise InvalidTopology(
                f"join of {stream!r} with {other!r}, which is not joined before: {streams}"
            )
        if stream in streams:
            raise InvalidTopology(f"stream {stream!r} is joined twice: a stream can take part once")
        self.parts.append({"kind": kind, "stream": stream, "key": key, "with": other})
        return self

    def inner(self, stream: str, key: str, other: str) -> Join:
        """Inner join: ``stream.key`` equals the key of ``other``."""
        return self._join("inner", stream, key, other)

    def left(self, stream: str, key: str, other: str) -> Join:
        """Left join: fields of a missing partner are ``None``."""
        return self._join("left", stream, key, other)

    def select(self, *fields: str) -> Join:
        """Select the values to emit.

        A field is ``"field"`` (of the first stream that has it) or ``"stream:field"``. Add
        ``" as name"`` to give its output another name.
        """
        streams = [part["stream"] for part in self.parts]
        for text in fields:
            source, _, name = text.partition(" as ")
            stream, colon, field = source.strip().rpartition(":")
            if colon and stream not in streams:
                raise InvalidTopology(f"select {text!r}: {stream!r} is not joined")
            self.fields.append((stream, field, name.strip() or field.rpartition(".")[2]))
        names = [name for _, _, name in self.fields]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise InvalidTopology(
                f"two selected fields are called {twice[0]!r}: rename one with ' as other_name'"
            )
        return self


class JoinBolt(WindowedBolt):
    """Bolt that emits the joined rows of each window, anchored to all its tuples."""

    def __init__(self, by: str, parts: list[dict[str, str]], fields: list[list[str]]) -> None:
        self._by_component = by == "component"
        self._parts = parts
        self._keys = {part["stream"]: part["key"] for part in parts}
        """Stream -> the field by which it is joined."""
        self._fields = [(stream, field) for stream, field, _ in fields]
        """The selected (stream or ``""``, field), in the order of the outputs."""

    @classmethod
    def spec(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        join: Join,
        window: Window | None = None,
        inputs: Inputs = None,
        name: str | None = None,
        par: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Spec:
        """The join as part of a topology; the selected fields are its outputs."""
        if not join.fields:
            raise InvalidTopology("a join selects no field: call select(...)")
        fields = [list(selection) for selection in join.fields]
        args = {"by": join.by, "parts": join.parts, "fields": fields}
        outputs = [output for _, _, output in join.fields]
        return super().spec(name, inputs, par, config, outputs, args, window)

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Find the fields of every input.

        Raises :class:`InvalidTopology` for a joined or selected field that is missing, an input
        that is not joined or not grouped by its field, and a joined stream without an input.
        """
        self._positions: dict[tuple[str, str], dict[str, int]] = {}
        """(component, stream) -> field -> its place in the values."""
        has_several_tasks = len(context.component_tasks(context.component)) > 1
        part = context.spec.component(context.component)
        for item in part.inputs if part else ():
            fields = context.source_fields(item.component, item.stream)
            stream = self._stream(item.component, item.stream)
            key = self._keys.get(stream)
            if key is None:
                raise InvalidTopology(
                    f"bolt {context.component!r} reads {stream!r}, which its join does not name: "
                    f"{', '.join(self._keys)}"
                )
            root = key.partition(".")[0]
            if root not in fields:
                raise InvalidTopology(
                    f"bolt {context.component!r} joins {stream!r} by {key!r}, "
                    f"but it has: {', '.join(fields)}"
                )
            if has_several_tasks and item.grouping.fields != (root,):
                raise InvalidTopology(
                    f"bolt {context.component!r} has several tasks: group its input {stream!r} by "
                    f"the join's field, Grouping.fields({root!r}), or partners would not meet"
                )
            positions = {field: position for position, field in enumerate(fields)}
            self._positions[(item.component, item.stream)] = positions
        inputs = {self._stream(*source) for source in self._positions}
        missing = [stream for stream in self._keys if stream not in inputs]
        if missing:
            raise InvalidTopology(
                f"bolt {context.component!r} joins {missing[0]!r}, which is none of its inputs: "
                f"{', '.join(inputs)}"
            )
        self._check_selected(context.component)

    def _check_selected(self, component: str) -> None:
        """Raise :class:`InvalidTopology` for a selected field that no stream has.

        It would be ``None`` in every row, without any error.
        """
        for stream, field in self._fields:
            root, _, inner = field.partition(".")
            fields_of = self._candidate_fields(stream)
            if any(root in fields for fields in fields_of.values()):
                continue
            choices = "; ".join(f"{name}: {', '.join(names)}" for name, names in fields_of.items())
            hint = ""
            if inner and root in fields_of:
                hint = f"; a field of a stream is written {root}:{inner}"
            raise InvalidTopology(
                f"bolt {component!r} selects {field!r}, which no stream of its join has "
                f"({choices}){hint}"
            )

    def _candidate_fields(self, stream: str) -> dict[str, list[str]]:
        """Stream -> its fields: of the named stream, or of all if ``stream`` is empty."""
        fields_of: dict[str, list[str]] = {}
        for source, positions in self._positions.items():
            name = self._stream(*source)
            if stream in ("", name):
                fields_of[name] = list(positions)
        return fields_of

    def _stream(self, component: str, stream: str) -> str:
        """The name of an input in the join."""
        return component if self._by_component else stream

    def _value(self, tup: Tuple | None, field: str) -> Any:
        """The value of a field, which may be inside of maps; ``None`` if it is missing."""
        if tup is None:
            return None
        root, *inner = field.split(".")
        position = self._positions[(tup.component, tup.stream)].get(root)
        if position is None:
            return None
        value = tup.values[position]
        for key in inner:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def process_window(self, window: TupleWindow) -> None:
        """Emit the joined rows of the window."""
        tuples = multimap((self._stream(tup.component, tup.stream), tup) for tup in window)
        first_stream = self._parts[0]["stream"]
        rows: list[_Row] = [{first_stream: tup} for tup in tuples.get(first_stream, [])]
        for part in self._parts[1:]:
            rows = self._join_stream(rows, part, tuples.get(part["stream"], []))
        for row in rows:
            self.emit([self._select(row, stream, field) for stream, field in self._fields])

    def _join_stream(
        self, rows: list[_Row], part: Mapping[str, str], tuples: Sequence[Tuple]
    ) -> list[_Row]:
        """Join the rows with the tuples of one more stream."""
        other = part["with"]
        partners = multimap((_hashable(self._value(tup, part["key"])), tup) for tup in tuples)
        joined: list[_Row] = []
        for row in rows:
            value = _hashable(self._value(row[other], self._keys[other]))
            matches: Iterable[Tuple | None] = ()
            # As in SQL, a missing key equals no other one.
            if value is not None:
                matches = partners.get(value, ())
            if not matches and part["kind"] == "left":
                matches = (None,)
            joined += [{**row, part["stream"]: tup} for tup in matches]
        return joined

    def _select(self, row: _Row, stream: str, field: str) -> Any:
        """The value of a selected field in a joined row."""
        if stream:
            return self._value(row[stream], field)
        root = field.partition(".")[0]
        for tup in row.values():
            if tup is not None and root in self._positions[(tup.component, tup.stream)]:
                return self._value(tup, field)
        return None


def _hashable(value: Any) -> Any:
    """A hashable form of a join's key: tuples in place of sequences and maps."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple([_hashable(part) for part in value])
    if isinstance(value, Mapping):
        return tuple(sorted((key, _hashable(part)) for key, part in value.items()))
    return value
