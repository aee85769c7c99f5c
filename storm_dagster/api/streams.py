"""Output streams of components, and groupings of the tasks that read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.names import check_stream_id
from storm_dagster.model.topology import DEFAULT_STREAM, FIELD_TYPES, GroupingSpec, StreamSpec

__all__ = ["Grouping", "Outputs", "Stream", "code_name", "stream_specs"]


Outputs = Sequence[Any] | Mapping[str, Any] | None
"""Field names, a map from field names to types (of one default stream), or streams."""


def code_name(target: Any, what: str) -> str:
    """``"module:QualName"`` of a class or function that a worker can import.

    :class:`InvalidTopology` for a lambda, for anything defined inside a function, and for what lives in
    ``__main__``: a worker could not import it.
    """
    if isinstance(target, str):
        module, colon, name = target.partition(":")
        if not (module and colon and name):
            raise InvalidTopology(f"{what} {target!r} must be of the form 'module:name'")
    else:
        module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
        if not module or not name:
            raise InvalidTopology(f"{what} {target!r:.80} must be a class or function of a module")
    if "<lambda>" in name:
        raise InvalidTopology(f"{what} is a lambda: workers import code by name, define it in a module")
    if "<locals>" in name:
        raise InvalidTopology(
            f"{what} {name!r} is defined inside a function: move it to the top of its module, workers import it by name"
        )
    if module == "__main__":
        raise InvalidTopology(
            f"{what} {name!r} lives in __main__: submit the file as a TARGET, or move it to a module that can be imported"
        )
    return f"{module}:{name}"


class Stream:
    """One output stream: its fields, its name, and whether the emitter chooses the receiving task."""

    __slots__ = ("direct", "fields", "name", "types")

    def __init__(
        self,
        fields: Iterable[str] | Mapping[str, Any] = (),
        name: str = DEFAULT_STREAM,
        direct: bool = False,
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
        raise InvalidTopology(f"{owner}: outputs must be a list of names or streams, got the text {outputs!r}")
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


class Grouping:
    """Groupings, which distribute a stream over the tasks of a reader: constants and three methods."""

    SHUFFLE: ClassVar[GroupingSpec] = GroupingSpec(type="shuffle")
    """Evenly, in turn."""
    ALL: ClassVar[GroupingSpec] = GroupingSpec(type="all")
    """A copy to every task."""
    GLOBAL: ClassVar[GroupingSpec] = GroupingSpec(type="global")
    """Everything to the task with the lowest id."""
    NONE: ClassVar[GroupingSpec] = GroupingSpec(type="none")
    """No preference; as shuffle."""
    DIRECT: ClassVar[GroupingSpec] = GroupingSpec(type="direct")
    """To the task that the emitter names."""
    LOCAL_OR_SHUFFLE: ClassVar[GroupingSpec] = GroupingSpec(type="local_or_shuffle")
    """Among the tasks in the emitter's own worker when it has any, else like shuffle."""

    @staticmethod
    def fields(*names: str) -> GroupingSpec:
        """Equal values of these fields always reach the same task, across restarts and machines."""
        return GroupingSpec(type="fields", fields=_names(names, "fields"))

    @staticmethod
    def partial_key(*names: str) -> GroupingSpec:
        """As :meth:`fields`, but each key has two tasks, and goes to the less loaded one."""
        return GroupingSpec(type="partial_key", fields=_names(names, "partial_key"))

    @staticmethod
    def custom(function: str | Callable[..., Any], **args: Any) -> GroupingSpec:
        """A function of yours, ``"module:function"``.

        It is called once per emitting task as ``function(context, component, stream, tasks, **args)``
        and returns the chooser: a callable from a tuple's values to the task ids that get it.
        """
        try:
            json.dumps(args)
        except (TypeError, ValueError):
            raise InvalidTopology(f"arguments of a custom grouping must be JSON values, got {args!r:.80}") from None
        return GroupingSpec(type="custom", object=code_name(function, "custom grouping"), args=args)


def _names(names: tuple[Any, ...], what: str) -> tuple[str, ...]:
    if len(names) == 1 and isinstance(names[0], list | tuple):
        names = tuple(names[0])
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidTopology(f"Grouping.{what} needs at least one field name")
    return names
