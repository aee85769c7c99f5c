"""Groupings: the choice of the tasks that receive a tuple.

:data:`GROUPINGS` has all of them. The module is pure: a chooser works on opaque targets, in the
order of their task ids. Its choices depend only on its arguments and the tuples that it got.
:func:`stable_hash` is the same in every process, on every machine and in every version, so that a
key stays with its task across restarts.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime, time
from decimal import Decimal
from enum import Enum
from operator import itemgetter
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel

from storm_dagster.model.errors import InvalidRequest, InvalidTopology
from storm_dagster.model.names import code_name

T = TypeVar("T")
Choose = Callable[[Sequence[Any]], T]

_MAX_CACHED_KEYS = 65_536
"""Number of keys whose targets a chooser keeps; one more empties its cache."""
_encode = msgspec.msgpack.Encoder(order="sorted").encode


def _normal(value: Any) -> Any:
    """A value of MessagePack that is the same for values that compare equal."""
    # Values that are equal in Python must have equal bytes: 1 == 1.0 == True == Decimal(1), b"a" ==
    # bytearray(b"a"), a str Enum and its text, aware times at one instant.
    kind = type(value)
    if isinstance(value, str):
        try:
            return value.encode().decode()
        except UnicodeEncodeError:
            return value.encode("utf-8", "surrogatepass")
    if isinstance(value, int | float | Decimal):
        return _normal_number(value)
    if isinstance(value, list | tuple):
        return [_normal(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(_normal, value), key=_encode)
    if isinstance(value, Mapping):
        items = [(_normal(key), _normal(item)) for key, item in value.items()]
        if all(type(key) is str for key, _ in items):
            return dict(items)
        return sorted(items, key=_encode)
    if isinstance(value, time) and value.utcoffset() is not None:
        return repr(datetime.combine(datetime(2000, 1, 1), value).timestamp())
    if isinstance(value, Enum):
        return [f"{kind.__module__}:{kind.__qualname__}", value.name]
    if is_dataclass(value):
        parts = [_normal(getattr(value, field.name)) for field in fields(value) if field.compare]
        return [f"{kind.__module__}:{kind.__qualname__}", *parts]
    return value


def _normal_number(value: Any) -> Any:
    """The same number for equal ones: an integer if possible, then a float, else its hash."""
    if value != value:
        # Not a number: all of them are one key.
        return float("nan")
    # The range of MessagePack's integers.
    if -(1 << 63) <= value < 1 << 64 and value == int(value):
        return int(value)
    try:
        if float(value) == value:
            return float(value)
    except OverflowError:
        pass
    # Python's hash of numbers is the same in every process.
    return ["number", hash(value)]


def stable_hash(key: Any) -> int:
    """A 32-bit hash of a key, which is the same for keys that compare equal.

    ``InvalidRequest`` for a value of a type whose hash could differ between processes.
    """
    try:
        if isinstance(key, str):
            crc = zlib.crc32(key.encode("utf-8", "surrogatepass"))
        else:
            # Another start value: the bytes of this form are not those of a text.
            crc = zlib.crc32(_encode(_normal(key)), 1)
    except (TypeError, ValueError, OverflowError, ArithmeticError, RecursionError) as error:
        raise InvalidRequest(
            f"a value of type {type(key).__name__} cannot be grouped by: {error}"
        ) from None
    # The low bits decide between few tasks: all bits must influence them. The factor is the golden
    # ratio of 32 bits, as in Knuth's multiplicative hashing.
    mixed = (crc * 0x9E3779B1) & 0xFFFFFFFF
    return mixed ^ (mixed >> 15)


def reader_of(partition: str, tasks: int) -> int:
    """Index of the task that reads a partition.

    It depends only on the name and the number of tasks. Partitions that differ in a number at the
    end go around the tasks.
    """
    head = partition.rstrip("])} ")
    stem = head.rstrip("0123456789")
    number = head[len(stem) :]
    # More digits are not the number of a partition.
    if 0 < len(number) < 19:
        return (stable_hash(stem) + int(number)) % tasks
    return stable_hash(partition) % tasks


def fields_chooser(
    targets: Sequence[T], indices: Sequence[int], remembered: dict[Any, T] | None = None
) -> Choose[T]:
    """Chooser of the same target for equal values at ``indices``.

    ``remembered`` caches the targets of keys, so that the choice for a known key is one dictionary
    access (measured by ``benchmarks/dataplane.py``).
    """
    targets = tuple(targets)
    count = len(targets)
    cache: dict[Any, T] = {} if remembered is None else remembered
    if count == 1:
        return global_chooser(targets)
    read = itemgetter(*indices)
    lookup = cache.get

    def choose(values: Sequence[Any]) -> T:
        key = read(values)
        try:
            target = lookup(key)
        except TypeError:
            # A key that is not hashable, such as a list, is not cached.
            return targets[stable_hash(key) % count]
        if target is None:
            if len(cache) >= _MAX_CACHED_KEYS:
                cache.clear()
            target = cache[key] = targets[stable_hash(key) % count]
        return target

    if len(indices) > 1:
        return choose
    index = indices[0]

    def choose_by_one(values: Sequence[Any]) -> T:
        try:
            return cache[values[index]]
        except (KeyError, TypeError):
            return choose(values)

    return choose_by_one


def partial_key_chooser(targets: Sequence[T], indices: Sequence[int]) -> Choose[T]:
    """Chooser among two candidate targets of each key.

    The candidate that the chooser has used less gets the tuple.
    """
    targets = tuple(targets)
    count = len(targets)
    used = [0] * count
    read = itemgetter(*indices)

    def choose(values: Sequence[Any]) -> T:
        key = read(values)
        first = stable_hash(key) % count
        second = stable_hash([key, "second"]) % count
        index = first if used[first] <= used[second] else second
        used[index] += 1
        return targets[index]

    return choose


def global_chooser(targets: Sequence[T], indices: Sequence[int] = ()) -> Choose[T]:
    """Chooser of the first target: the task with the lowest id."""
    only = targets[0]
    return lambda values: only


def custom_chooser(
    by_task: Mapping[int, T], choose: Callable[[Sequence[Any]], int | Iterable[int]]
) -> Callable[[Sequence[Any]], list[T]]:
    """The user's chooser of task ids, with a check of its results.

    ``InvalidRequest`` names task ids that are not targets.
    """

    def targets_of(values: Sequence[Any]) -> list[T]:
        chosen = choose(values)
        ids = [chosen] if isinstance(chosen, int) else list(chosen)
        try:
            return [by_task[task] for task in ids]
        except (KeyError, TypeError):
            raise InvalidRequest(
                f"a custom grouping chose {ids!r:.80}, the target tasks are {sorted(by_task)}"
            ) from None

    return targets_of


class GroupingRule(NamedTuple):
    """Rule of one grouping: its needs, its chooser and its name in Storm."""

    chooser: Callable[[Sequence[Any], Sequence[int]], Choose[Any]] | None = None
    """Function that makes a chooser of the targets and the indices of the key's fields. Without it,
    targets take turns by load.
    """
    many: bool = False
    """A choice is a sequence of targets, not one target."""
    local: bool = False
    """Only targets in the emitter's own worker count, if there are any."""
    needs: Literal["fields", "direct", "object", None] = None
    """Names of fields, a direct stream (the emitter chooses), or a function (it chooses)."""
    storm: str = ""
    """Member of Storm's union, or ``custom_object:<Java class>``. Without one it cannot be
    submitted over Thrift.
    """


GroupingType = Literal[
    "shuffle",
    "fields",
    "partial_key",
    "all",
    "global",
    "none",
    "direct",
    "local_or_shuffle",
    "custom",
]
GROUPINGS: dict[GroupingType, GroupingRule] = {
    "shuffle": GroupingRule(storm="shuffle"),
    "fields": GroupingRule(fields_chooser, needs="fields", storm="fields"),
    "partial_key": GroupingRule(
        partial_key_chooser,
        needs="fields",
        storm="custom_object:org.apache.storm.grouping.PartialKeyGrouping",
    ),
    "all": GroupingRule(lambda targets, indices: lambda values: targets, many=True, storm="all"),
    "global": GroupingRule(global_chooser, storm="fields"),
    "none": GroupingRule(storm="none"),
    "direct": GroupingRule(needs="direct", storm="direct"),
    "local_or_shuffle": GroupingRule(local=True, storm="local_or_shuffle"),
    "custom": GroupingRule(many=True, needs="object"),
}


class GroupingSpec(BaseModel, frozen=True, extra="forbid"):
    """Distribution of a stream's tuples over the tasks of a reader."""

    type: GroupingType
    fields: tuple[str, ...] = ()
    """For groupings that need fields: those that make the key."""
    object: str | None = None
    """For ``custom``: ``"module:function"``, called with (context, source component, stream, target
    tasks).
    """
    args: dict[str, Any] = {}


class Grouping:
    """Groupings, which distribute a stream over the tasks of a reader."""

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
        """Equal values of these fields always reach the same task.

        This holds across restarts and machines.
        """
        return GroupingSpec(type="fields", fields=_names(names, "fields"))

    @staticmethod
    def partial_key(*names: str) -> GroupingSpec:
        """As :meth:`fields`, but with two tasks for each key.

        The less loaded task gets the tuple.
        """
        return GroupingSpec(type="partial_key", fields=_names(names, "partial_key"))

    @staticmethod
    def custom(function: str | Callable[..., Any], **args: Any) -> GroupingSpec:
        """A function of yours, ``"module:function"``.

        It is called once per emitting task as ``function(context, component, stream, tasks,
        **args)`` and returns the chooser: a callable from a tuple's values to the task ids that get
        it.
        """
        try:
            json.dumps(args)
        except (TypeError, ValueError):
            raise InvalidTopology(
                f"arguments of a custom grouping must be JSON values, got {args!r:.80}"
            ) from None
        return GroupingSpec(type="custom", object=code_name(function, "custom grouping"), args=args)


def _names(names: tuple[Any, ...], grouping: str) -> tuple[str, ...]:
    if len(names) == 1 and isinstance(names[0], list | tuple):
        names = tuple(names[0])
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidTopology(
            f"Grouping.{grouping} takes one or more names of fields, got {names!r:.60}: write "
            f"Grouping.{grouping}('FIELD')"
        )
    return names
