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

        Join("orders", "customer").inner("customers", "id", "orders").left("ratings", "customer", "orders")
            .select("customer", "orders:item", "customers:name", "ratings:stars as rating")

    A stream is named by the component that it comes from (with ``by="stream"`` by its own name) and
    is always joined by one and the same field, by which it must be grouped when the bolt has
    several tasks. A field may reach into maps: ``"user.address.city"``.
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
        known = [part["stream"] for part in self.parts]
        if other not in known:
            raise InvalidTopology(
                f"join of {stream!r} with {other!r}, which is not joined before: {known}"
            )
        if stream in known:
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
        """The values to emit: ``"field"`` (of the first stream that has it), ``"stream:field"``,
        each with ``" as name"`` if its output is to be called otherwise.
        """
        for text in fields:
            source, _, name = (part.strip() for part in text.partition(" as "))
            stream, colon, field = source.rpartition(":")
            if colon and stream not in [part["stream"] for part in self.parts]:
                raise InvalidTopology(f"select {text!r}: {stream!r} is not joined")
            self.fields.append((stream, field, name or field.rpartition(".")[2]))
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
            raise InvalidTopology("a join selects nothing: call select(...)")
        args = {"by": join.by, "parts": join.parts, "fields": [list(one) for one in join.fields]}
        outputs = [output for _, _, output in join.fields]
        return super().spec(name, inputs, par, config, outputs, args, window)

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Find the fields of every input; :class:`InvalidTopology` for a joined or selected one
        that is missing.
        """
        self._places: dict[tuple[str, str], dict[str, int]] = {}
        several = len(context.component_tasks(context.component)) > 1
        part = context.spec.component(context.component)
        for item in part.inputs if part else ():
            fields = context.source_fields(item.component, item.stream)
            stream = self._stream(item.component, item.stream)
            key = self._keys.get(stream)
            if key is None:
                raise InvalidTopology(
                    f"bolt {context.component!r} reads {stream!r}, which its join does not name: {', '.join(self._keys)}"
                )
            root = key.partition(".")[0]
            if root not in fields:
                raise InvalidTopology(
                    f"bolt {context.component!r} joins {stream!r} by {key!r}, but it has: {', '.join(fields)}"
                )
            if several and item.grouping.fields != (root,):
                raise InvalidTopology(
                    f"bolt {context.component!r} has several tasks: group its input {stream!r} by the join's field, "
                    f"Grouping.fields({root!r}), or partners would not meet"
                )
            self._places[(item.component, item.stream)] = {
                field: at for at, field in enumerate(fields)
            }
        found = {self._stream(*source) for source in self._places}
        missing = [stream for stream in self._keys if stream not in found]
        if missing:
            raise InvalidTopology(
                f"bolt {context.component!r} joins {missing[0]!r}, which is none of its inputs: {', '.join(found)}"
            )
        self._check_selected(context.component)

    def _check_selected(self, component: str) -> None:
        # A field that no stream has would be None in every row, without any error.
        for stream, field in self._fields:
            root, _, rest = field.partition(".")
            known = {
                name: list(places)
                for source, places in self._places.items()
                if stream in ("", name := self._stream(*source))
            }
            if any(root in fields for fields in known.values()):
                continue
            has = "; ".join(f"{name}: {', '.join(fields)}" for name, fields in known.items())
            meant = (
                f"; a field of a stream is written {root}:{rest}" if rest and root in known else ""
            )
            raise InvalidTopology(
                f"bolt {component!r} selects {field!r}, which no stream of its join has ({has}){meant}"
            )

    def _stream(self, component: str, stream: str) -> str:
        return component if self._by_component else stream

    def _value(self, tup: Tuple | None, field: str) -> Any:
        # `None` also for a missing field.
        root, *path = field.split(".")
        at = None if tup is None else self._places[(tup.component, tup.stream)].get(root)
        value = None if tup is None or at is None else tup.values[at]
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def process_window(self, window: TupleWindow) -> None:
        """Emit the joined rows of the window."""
        tuples = multimap((self._stream(tup.component, tup.stream), tup) for tup in window)
        first, *rest = self._parts
        rows: list[dict[str, Tuple | None]] = [
            {first["stream"]: tup} for tup in tuples.get(first["stream"], [])
        ]
        for part in rest:
            stream, other = part["stream"], part["with"]
            partners = multimap(
                (_hashable(self._value(tup, part["key"])), tup) for tup in tuples.get(stream, [])
            )
            joined: list[dict[str, Tuple | None]] = []
            for row in rows:
                value = _hashable(self._value(row[other], self._keys[other]))
                found: Iterable[Tuple | None] = partners.get(value, ()) if value is not None else ()
                if not found and part["kind"] == "left":
                    found = (None,)
                joined += [{**row, stream: tup} for tup in found]
            rows = joined
        for row in rows:
            self.emit([self._selected(row, stream, field) for stream, field in self._fields])

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
