"""Joins of streams over fields, per window."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from storm_dagster.api.specs import Inputs, Spec
from storm_dagster.api.tuples import Tuple
from storm_dagster.api.windows import TupleWindow, Window, WindowedBolt
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.multimap import multimap


class Join:
    """Definition of a join, in the order of the calls (as Storm's JoinBolt)::

        Join("orders", "customer")
            .inner("customers", "id", "orders")
            .left("ratings", "customer", "orders")
            .select("customer", "orders:item", "customers:name", "ratings:stars as rating")

    A stream is named by its component, or with ``by="stream"`` by its own name. It is always joined
    by the same field, and must be grouped by that field if the bolt has several tasks. A field may
    reach into maps: ``"user.address.city"``.
    """

    def __init__(
        self, stream: str, key: str, by: Literal["component", "stream"] = "component"
    ) -> None:
        self.by = by
        self.parts: list[dict[str, str]] = [
            {"kind": "from", "stream": stream, "key": key, "with": ""}
        ]
        self.fields: list[tuple[str, str, str]] = []
        """(stream or ``""``, field, output name)."""

    def _join(self, kind: str, stream: str, key: str, other: str) -> Join:
        joined = [part["stream"] for part in self.parts]
        if other not in joined:
            raise InvalidTopology(
                f"join of {stream!r} with {other!r}, which is not joined before: {joined}"
            )
        if stream in joined:
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

        A value is ``"field"`` (of the first stream that has it) or ``"stream:field"``, with
        ``" as name"`` if its output has another name.
        """
        for text in fields:
            source, _, name = text.partition(" as ")
            name = name.strip()
            stream, colon, field = source.strip().rpartition(":")
            if colon and stream not in [part["stream"] for part in self.parts]:
                raise InvalidTopology(f"select {text!r}: {stream!r} is not joined")
            self.fields.append((stream, field, name or field.rpartition(".")[2]))
        names = [name for _, _, name in self.fields]
        for name in names:
            if names.count(name) > 1:
                raise InvalidTopology(
                    f"two selected fields are called {name!r}: rename one with ' as other_name'"
                )
        return self


class JoinBolt(WindowedBolt):
    """Bolt that emits the joined rows of each window, anchored to all its tuples."""

    def __init__(self, by: str, parts: list[dict[str, str]], fields: list[list[str]]) -> None:
        self._by_component = by == "component"
        self._parts = parts
        self._keys = {part["stream"]: part["key"] for part in parts}
        self._fields = [(stream, field) for stream, field, _ in fields]

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
        fields = [list(field) for field in join.fields]
        args = {"by": join.by, "parts": join.parts, "fields": fields}
        outputs = [output for _, _, output in join.fields]
        return super().spec(name, inputs, par, config, outputs, args, window)

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Read the fields of every input.

        Raises :class:`InvalidTopology` for a joined or selected field that is missing.
        """
        self._places: dict[tuple[str, str], dict[str, int]] = {}
        owner = f"bolt {context.component!r}"
        several_tasks = len(context.component_tasks(context.component)) > 1
        part = context.spec.component(context.component)
        for source in part.inputs if part else ():
            fields = context.source_fields(source.component, source.stream)
            stream = self._stream(source.component, source.stream)
            key = self._keys.get(stream)
            if key is None:
                raise InvalidTopology(
                    f"{owner} reads {stream!r}, which its join does not name: "
                    f"{', '.join(self._keys)}"
                )
            root = key.partition(".")[0]
            if root not in fields:
                raise InvalidTopology(
                    f"{owner} joins {stream!r} by {key!r}, but it has: {', '.join(fields)}"
                )
            if several_tasks and source.grouping.fields != (root,):
                raise InvalidTopology(
                    f"{owner} has several tasks: group its input {stream!r} by the join's field, "
                    f"Grouping.fields({root!r}), or partners would not meet"
                )
            places = {field: index for index, field in enumerate(fields)}
            self._places[(source.component, source.stream)] = places
        inputs = {self._stream(*source) for source in self._places}
        for stream in self._keys:
            if stream not in inputs:
                raise InvalidTopology(
                    f"{owner} joins {stream!r}, which is none of its inputs: {', '.join(inputs)}"
                )
        for stream, field in self._fields:
            self._check_selected(owner, stream, field)

    def _check_selected(self, owner: str, stream: str, field: str) -> None:
        """Check that a stream has the field: it would be ``None`` in every row."""
        root, _, path = field.partition(".")
        candidates: dict[str, list[str]] = {}
        for source, places in self._places.items():
            name = self._stream(*source)
            if stream in ("", name):
                candidates[name] = list(places)
        if any(root in fields for fields in candidates.values()):
            return
        streams = "; ".join(f"{name}: {', '.join(fields)}" for name, fields in candidates.items())
        hint = ""
        if path and root in candidates:
            hint = f"; a field of a stream is written {root}:{path}"
        raise InvalidTopology(
            f"{owner} selects {field!r}, which no stream of its join has ({streams}){hint}"
        )

    def _stream(self, component: str, stream: str) -> str:
        return component if self._by_component else stream

    def _value(self, tup: Tuple | None, field: str) -> Any:
        """The value of a field, or ``None`` without a tuple or such a field."""
        root, *path = field.split(".")
        value: Any = None
        if tup is not None:
            index = self._places[(tup.component, tup.stream)].get(root)
            if index is not None:
                value = tup.values[index]
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def process_window(self, window: TupleWindow) -> None:
        """Emit the joined rows of the window."""
        tuples = multimap((self._stream(tup.component, tup.stream), tup) for tup in window)
        first, *others = self._parts
        rows: list[dict[str, Tuple | None]] = [
            {first["stream"]: tup} for tup in tuples.get(first["stream"], [])
        ]
        for part in others:
            rows = self._join(part, rows, tuples.get(part["stream"], []))
        for row in rows:
            self.emit([self._selected(row, stream, field) for stream, field in self._fields])

    def _join(
        self,
        part: Mapping[str, str],
        rows: Iterable[dict[str, Tuple | None]],
        tuples: Iterable[Tuple],
    ) -> list[dict[str, Tuple | None]]:
        """Join the rows with the tuples of one more stream."""
        partners_of = multimap((_hashable(self._value(tup, part["key"])), tup) for tup in tuples)
        joined: list[dict[str, Tuple | None]] = []
        for row in rows:
            value = _hashable(self._value(row[part["with"]], self._keys[part["with"]]))
            partners: Iterable[Tuple | None] = ()
            if value is not None:
                partners = partners_of.get(value, ())
            if not partners and part["kind"] == "left":
                partners = (None,)
            joined += [{**row, part["stream"]: tup} for tup in partners]
        return joined

    def _selected(self, row: Mapping[str, Tuple | None], stream: str, field: str) -> Any:
        if stream:
            return self._value(row[stream], field)
        root = field.partition(".")[0]
        for tup in row.values():
            if tup is not None and root in self._places[(tup.component, tup.stream)]:
                return self._value(tup, field)
        return None


def _hashable(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple([_hashable(part) for part in value])
    if isinstance(value, Mapping):
        return tuple(sorted((key, _hashable(part)) for key, part in value.items()))
    return value
