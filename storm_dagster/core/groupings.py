"""Groupings: choice of the tasks that receive a tuple.

Pure: a chooser works on opaque targets, given in the order of their task ids, and its answers depend on
nothing but its arguments and the tuples that it saw. :func:`stable_hash` is the same in every process, on
every machine and in every version, so that a key stays with its task across restarts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from storm_dagster.model.errors import InvalidRequest

T = TypeVar("T")
Choose = Callable[[Sequence[Any]], T]

_MOST_CACHED = 65_536
_encode = msgspec.msgpack.Encoder(order="sorted").encode


def _normal(value: Any) -> Any:
    # Values that are equal in Python must have equal bytes: 1 == 1.0 == True, (1, 2) is sent as [1, 2].
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, list | tuple):
        return [_normal(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_normal(item) for item in value), key=repr)
    if isinstance(value, Mapping):
        return {key: _normal(item) for key, item in value.items()}
    return value


def stable_hash(key: Any) -> int:
    """A 32-bit hash of a key: text, bytes, numbers, ``None``, and lists and maps of such.

    ``InvalidRequest`` for a value of another type, whose hash could differ between processes.
    """
    if type(key) is str:
        crc = zlib.crc32(key.encode("utf-8", "surrogatepass"))
    else:
        try:
            crc = zlib.crc32(_encode(_normal(key)), 1)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"a value of type {type(key).__name__} cannot be grouped by: {error}") from None
    # The low bits decide between few tasks, so that all bits must take part in them.
    mixed = (crc * 0x9E3779B1) & 0xFFFFFFFF
    return mixed ^ (mixed >> 15)


def _key_reader(indices: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    if len(indices) == 1:
        index = indices[0]
        return lambda values: values[index]
    chosen = tuple(indices)
    return lambda values: tuple([values[index] for index in chosen])


def fields_chooser(targets: Sequence[T], indices: Sequence[int]) -> Choose[T]:
    """Chooser of the same target for equal values at ``indices``.

    Answers are remembered for the newest keys, which makes a known key one dictionary access.
    """
    targets = tuple(targets)
    count = len(targets)
    known: dict[Any, T] = {}
    if count == 1:
        only = targets[0]
        return lambda values: only
    read = _key_reader(indices)
    lookup = known.get

    def choose(values: Sequence[Any]) -> T:
        key = read(values)
        try:
            found = lookup(key)
        except TypeError:
            return targets[stable_hash(key) % count]
        if found is None:
            if len(known) >= _MOST_CACHED:
                known.clear()
            found = known[key] = targets[stable_hash(key) % count]
        return found

    if len(indices) > 1:
        return choose
    index = indices[0]

    def choose_by_one(values: Sequence[Any]) -> T:
        try:
            return known[values[index]]
        except (KeyError, TypeError):
            return choose(values)

    return choose_by_one


def partial_key_chooser(targets: Sequence[T], indices: Sequence[int]) -> Choose[T]:
    """Chooser among two candidate targets of each key: the one that it used less so far gets the tuple."""
    targets = tuple(targets)
    count = len(targets)
    used = [0] * count
    read = _key_reader(indices)

    def choose(values: Sequence[Any]) -> T:
        key = read(values)
        first = stable_hash(key) % count
        second = stable_hash([key, "second"]) % count
        chosen = first if used[first] <= used[second] else second
        used[chosen] += 1
        return targets[chosen]

    return choose


def global_chooser(targets: Sequence[T]) -> Choose[T]:
    """Chooser of the first target: the task with the lowest id."""
    only = targets[0]
    return lambda values: only


def custom_chooser(
    by_task: Mapping[int, T], choose: Callable[[Sequence[Any]], int | Iterable[int]]
) -> Callable[[Sequence[Any]], list[T]]:
    """The user's chooser of task ids, its results checked; ``InvalidRequest`` names a task that is no target."""

    def targets_of(values: Sequence[Any]) -> list[T]:
        answer = choose(values)
        ids = [answer] if isinstance(answer, int) else list(answer)
        try:
            return [by_task[task] for task in ids]
        except (KeyError, TypeError):
            raise InvalidRequest(
                f"a custom grouping chose {ids!r:.80}, the target tasks are {sorted(by_task)}"
            ) from None

    return targets_of
