"""Keyed state of a component: format of its log, and partitioning over the component's tasks.

Pure. A log is a sequence of checkpoints, each framed by its length and checksum. A checkpoint that a process
was writing when it died is at the end, cut short, and is ignored: its tuples were not acked.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from storm_dagster.model.errors import Corrupt, InvalidRequest
from storm_dagster.model.groupings import stable_hash
from storm_dagster.model.values import ATOMIC, decode_extension, decode_value
from storm_dagster.model.values import encode_value as encode_any

_HEAD = struct.Struct("<II")
_encode = msgspec.msgpack.Encoder().encode


class Checkpoint(msgspec.Struct, omit_defaults=True):
    """Changes of one checkpoint."""

    values: list[tuple[Any, msgspec.Raw]] = []
    """(key, encoded value) of values that were set."""
    removed: list[Any] = []
    ids: list[tuple[int, Any]] = []
    """(hash of the grouping key, id) of tuples that were applied."""
    rotated: bool = False
    """The ids that were known before the newest ones are forgotten."""
    full: bool = False
    """Everything before is dropped."""
    old_ids: list[tuple[int, Any]] = []


_decoder = msgspec.msgpack.Decoder(Checkpoint, ext_hook=decode_extension)


def encode_value(value: Any, key: Any) -> msgspec.Raw:
    """Encoded value; ``InvalidRequest`` for a type that is not serializable."""
    try:
        return msgspec.Raw(encode_any(value))
    except TypeError as error:
        raise InvalidRequest(f"the state of {key!r:.80} cannot be saved: it is {error}") from None


def stored_key(key: Any, odd: bool = False) -> Any:
    """A key or an id as a log has it; ``InvalidRequest`` for one that cannot be saved.

    Tuples are arrays there, as in the logs of every release: :func:`key_of` restores them. ``odd``: with integers and
    text that MessagePack cannot hold.
    """
    if type(key) is tuple:
        return [stored_key(part, odd) for part in key]
    if type(key) in ATOMIC and not odd:
        return key
    try:
        return msgspec.Raw(encode_any(key))
    except TypeError as error:
        raise InvalidRequest(f"the key {key!r:.80} cannot be saved: it is {error}") from None


def _stored(record: Checkpoint, odd: bool) -> bytes:
    return _encode(
        Checkpoint(
            values=[(stored_key(key, odd), raw) for key, raw in record.values],
            removed=[stored_key(key, odd) for key in record.removed],
            ids=[(number, stored_key(name, odd)) for number, name in record.ids],
            rotated=record.rotated,
            full=record.full,
            old_ids=[(number, stored_key(name, odd)) for number, name in record.old_ids],
        )
    )


def key_of(key: Any) -> Any:
    """Hashable form of a key: lists become tuples."""
    return tuple([key_of(part) for part in key]) if isinstance(key, list | tuple) else key


def frame(record: Checkpoint) -> bytes:
    """Bytes of the checkpoint in a log."""
    try:
        payload = _stored(record, odd=False)
    except (OverflowError, UnicodeEncodeError):
        payload = _stored(record, odd=True)
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def read_log(raw: bytes, name: str) -> Iterator[Checkpoint]:
    """Checkpoints of a log, without an incomplete one at the end.

    :class:`Corrupt` when anything before the end is damaged.
    """
    at = 0
    while at + _HEAD.size <= len(raw):
        size, checksum = _HEAD.unpack_from(raw, at)
        payload = raw[at + _HEAD.size : at + _HEAD.size + size]
        after = at + _HEAD.size + size
        if len(payload) < size:
            return
        try:
            if zlib.crc32(payload) != checksum:
                raise ValueError("the checksum is wrong")
            record = _decoder.decode(payload)
        except (ValueError, msgspec.MsgspecError) as error:
            if after == len(raw):
                return
            raise Corrupt(
                f"the state in {name} is damaged at byte {at} ({error}): restore the file, or move it away to start "
                "this task with nothing"
            ) from None
        yield record
        at = after


@dataclass
class Contents:
    """Keyed values of one task, and the ids of the tuples that were applied to them."""

    values: dict[Any, Any] = field(default_factory=dict)
    ids: dict[Any, int] = field(default_factory=dict)
    """Id -> hash of the grouping key, newest generation."""
    old_ids: dict[Any, int] = field(default_factory=dict)

    def apply(self, record: Checkpoint) -> None:
        """Apply a checkpoint."""
        if record.full:
            self.values.clear()
            self.ids.clear()
            self.old_ids = {key_of(name): number for number, name in record.old_ids}
        if record.rotated:
            self.old_ids, self.ids = self.ids, {}
        for key in record.removed:
            self.values.pop(key_of(key), None)
        for key, raw in record.values:
            self.values[key_of(key)] = decode_value(raw)
        for number, name in record.ids:
            self.ids[key_of(name)] = number

    def snapshot(self) -> Checkpoint:
        """Everything as one full checkpoint."""
        return Checkpoint(
            values=[(key, encode_value(value, key)) for key, value in self.values.items()],
            ids=[(number, name) for name, number in self.ids.items()],
            old_ids=[(number, name) for name, number in self.old_ids.items()],
            full=True,
        )


@dataclass(frozen=True)
class Partitioning:
    """Partitioning of a component's state over ``tasks`` tasks: ``by_key`` as fields grouping does it, or each
    task has its own."""

    tasks: int
    by_key: bool

    def owner(self, key: Any) -> int:
        """Index of the task that has this key."""
        return stable_hash(key) % self.tasks

    def share(
        self, index: int, old: Iterable[tuple[int, Contents]], merge: Callable[[Any, list[Any]], Any]
    ) -> Contents:
        """Contents of task ``index``, taken from the tasks of the partitioning before, given as (index, contents).

        Values that several of them had under one key are merged.
        """
        found = Contents()
        several: dict[Any, list[Any]] = {}
        for before, contents in old:
            if not self.by_key and before % self.tasks != index:
                continue
            for key, value in contents.values.items():
                if not self.by_key or self.owner(key) == index:
                    several.setdefault(key, []).append(value)
            for ids, mine in ((contents.ids, found.ids), (contents.old_ids, found.old_ids)):
                mine.update(
                    {name: number for name, number in ids.items() if not self.by_key or number % self.tasks == index}
                )
        found.values = {key: values[0] if len(values) == 1 else merge(key, values) for key, values in several.items()}
        return found
