"""Keyed state of a component: format of its log, and partitioning over the component's tasks.

Pure. A log is a sequence of checkpoints, each framed by its length and checksum. A checkpoint that
a process was writing when it died is at the end, cut short, and is ignored: its tuples were not
acked.
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain, islice
from typing import Any, BinaryIO, TypeVar

import msgspec

from storm_dagster.core.dataplane.window_state import HeldTuple, Position, detach, in_order, join
from storm_dagster.model.errors import Corrupt, InvalidRequest
from storm_dagster.model.groupings import stable_hash
from storm_dagster.model.values import ATOMIC, decode_extension, decode_value
from storm_dagster.model.values import encode_value as encode_any

_HEAD = struct.Struct("<II")
_PART = 1000
"""Keys or ids in one checkpoint of a snapshot."""
_MAPS, _MOST_IN_ONE = 67, 20_000
_Item = TypeVar("_Item")
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
    held: list[tuple[int, int, msgspec.Raw]] = []
    """(number, hash of the grouping key, encoded entry) of tuples that entered windows."""
    finished: list[int] = []
    """Numbers of tuples that no window needs any more."""
    windows: Position | None = None
    results: list[tuple[int, msgspec.Raw]] = []
    """(number, what a window emitted)."""
    confirmed: list[int] = []
    """Numbers of results whose trees are complete."""
    batches: list[tuple[str, int, list[tuple[int, Any]]]] = []
    """(owner, token, ids as in ``ids``) of batches that are written to a sink from now on. An owner
    has one: a new one replaces it, and one without ids removes it.
    """
    forgotten: list[Any] = []
    """Ids that no longer count as applied, whether they are older or of this checkpoint."""


_decoder = msgspec.msgpack.Decoder(Checkpoint, ext_hook=decode_extension)


def encode_value(value: Any, key: Any) -> msgspec.Raw:
    """Encoded value; ``InvalidRequest`` for a type that is not serializable."""
    try:
        return msgspec.Raw(encode_any(value))
    except TypeError as error:
        raise InvalidRequest(f"the state of {key!r:.80} cannot be saved: it is {error}") from None


def stored_key(key: Any, odd: bool = False) -> Any:
    """A key or an id as a log has it; ``InvalidRequest`` for one that cannot be saved.

    Tuples are arrays there, as in the logs of every release: :func:`key_of` restores them. ``odd``:
    with integers and text that MessagePack cannot hold.
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
        msgspec.structs.replace(
            record,
            values=[(stored_key(key, odd), raw) for key, raw in record.values],
            removed=[stored_key(key, odd) for key in record.removed],
            ids=[(number, stored_key(name, odd)) for number, name in record.ids],
            old_ids=[(number, stored_key(name, odd)) for number, name in record.old_ids],
            batches=[
                (owner, token, [(number, stored_key(name, odd)) for number, name in ids])
                for owner, token, ids in record.batches
            ],
            forgotten=[stored_key(name, odd) for name in record.forgotten],
        )
    )


def join_encoded(parts: list[Any]) -> msgspec.Raw:
    """A list of encoded parts, numbers and ``None``."""
    return msgspec.Raw(_encode(parts))


def encode_entry(entry: HeldTuple) -> msgspec.Raw:
    """Encoded tuple of a window; ``InvalidRequest`` if it holds a value that is not
    serializable.
    """
    item, key = encode_value(entry.item, entry.key), encode_value(entry.key, entry.key)
    return join_encoded([entry.stamp, item, key, entry.seen])


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


def read_log(source: bytes | BinaryIO, name: str) -> Iterator[Checkpoint]:
    """Checkpoints of a log, without an incomplete one at the end.

    :class:`Corrupt` when anything before the end is damaged.
    """
    file = BytesIO(source) if isinstance(source, bytes) else source
    at = 0
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        size, checksum = _HEAD.unpack(head)
        payload = file.read(size)
        if len(payload) < size:
            return
        try:
            if zlib.crc32(payload) != checksum:
                raise ValueError("the checksum is wrong")
            record = _decoder.decode(payload)
        except (ValueError, msgspec.MsgspecError) as error:
            rest = file.read()
            if not rest or not any(head + payload + rest):
                # The last write was cut off. A power cut may leave zeros where it had been.
                return
            raise Corrupt(
                f"the state in {name} is damaged at byte {at} ({error}): restore the file, or move it away to start "
                "this task with nothing"
            ) from None
        yield record
        at += _HEAD.size + size


def _parts(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    rest = iter(items)
    while part := list(islice(rest, _PART)):
        yield part


class LargeMap(MutableMapping[Any, Any]):
    """A map in parts, none of which is so large that its growth holds the interpreter's lock for
    long.
    """

    def __init__(self, items: Iterable[tuple[Any, Any]]) -> None:
        self._maps: list[dict[Any, Any]] = [{} for _ in range(_MAPS)]
        self.update(items)

    def __getitem__(self, key: Any) -> Any:
        return self._maps[hash(key) % _MAPS][key]

    def __contains__(self, key: object) -> bool:
        return key in self._maps[hash(key) % _MAPS]

    def get(self, key: Any, default: Any = None) -> Any:
        """The value, or ``default``."""
        return self._maps[hash(key) % _MAPS].get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._maps[hash(key) % _MAPS][key] = value

    def __delitem__(self, key: Any) -> None:
        del self._maps[hash(key) % _MAPS][key]

    def popitem(self) -> tuple[Any, Any]:
        """Remove an entry and return it."""
        for part in self._maps:
            if part:
                return part.popitem()
        raise KeyError("the map is empty")

    def clear(self) -> None:
        """Remove everything, one by one: a whole part would hold the lock as well."""
        for part in self._maps:
            while part:
                part.popitem()

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._maps)

    def __len__(self) -> int:
        return sum(map(len, self._maps))


def _in_parts(table: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    return LargeMap(table.items()) if type(table) is dict and len(table) > _MOST_IN_ONE else table


@dataclass
class Contents:
    """Keyed values of one task, and the ids of the tuples that were applied to them."""

    values: MutableMapping[Any, Any] = field(default_factory=dict)
    """Read from a log, a :class:`LargeMap` when there are many."""
    ids: MutableMapping[Any, int] = field(default_factory=dict)
    """Id -> hash of the grouping key, newest generation."""
    old_ids: MutableMapping[Any, int] = field(default_factory=dict)
    held: MutableMapping[int, tuple[int, msgspec.Raw]] = field(default_factory=dict)
    """Number -> (hash of the grouping key, encoded entry) of the tuples in windows."""
    windows: Position | None = None
    results: dict[int, msgspec.Raw] = field(default_factory=dict)
    """Number -> what a window emitted, until its tree is complete."""
    batches: dict[str, tuple[int, dict[Any, int]]] = field(default_factory=dict)
    """Owner -> (token, ids) of the batch that it was writing to a sink: whether it has is known by
    the sink alone.
    """
    encoded: bool = False
    """Whether values stay as they are in the log, which is enough to write it again."""

    def entries(self) -> Iterator[HeldTuple]:
        """The tuples in windows."""
        for number, (_, raw) in self.held.items():
            stamp, item, key, seen = decode_value(raw)
            yield HeldTuple(stamp, number, item, key_of(key), seen)

    def apply(self, record: Checkpoint) -> None:
        """Apply a checkpoint."""
        if record.full:
            self.values.clear()
            self.ids.clear()
            self.old_ids = {key_of(name): number for number, name in record.old_ids}
            self.held.clear()
            self.results.clear()
            self.batches.clear()
        if record.rotated:
            self.rotate_ids()
        for key in record.removed:
            self.values.pop(key_of(key), None)
        for key, raw in record.values:
            self.values[key_of(key)] = raw.copy() if self.encoded else decode_value(raw)
        self.values, self.held = _in_parts(self.values), _in_parts(self.held)
        self.apply_ids(record)
        for number in record.finished:
            self.held.pop(number, None)
        self.held.update((number, (owner, raw.copy())) for number, owner, raw in record.held)
        for number in record.confirmed:
            self.results.pop(number, None)
        self.results.update((number, raw.copy()) for number, raw in record.results)
        self.windows = record.windows or self.windows

    def rotate_ids(self) -> MutableMapping[Any, int]:
        """Begin a new generation of ids; returns the ids that are remembered no longer, for the
        caller to remove.
        """
        former, self.old_ids = self.old_ids, self.ids
        self.ids = LargeMap(()) if len(self.old_ids) > _MOST_IN_ONE else {}
        return former

    def apply_ids(self, record: Checkpoint) -> None:
        """Apply the ids and batches of a checkpoint."""
        self.ids.update({key_of(name): number for number, name in record.ids})
        self.ids = _in_parts(self.ids)
        for name in record.forgotten:
            self.ids.pop(key_of(name), None)
            self.old_ids.pop(key_of(name), None)
        for owner, token, ids in record.batches:
            self.batches[owner] = token, {key_of(name): number for number, name in ids}
            if not ids:
                del self.batches[owner]

    def snapshot(self) -> Iterator[Checkpoint]:
        """Everything as checkpoints, the first of which is full. They are small, since decoding one
        holds the interpreter's lock.
        """
        yield Checkpoint(full=True, windows=self.windows)
        for ids, newest in ((self.old_ids, False), (self.ids, True)):
            if newest and self.old_ids:
                yield Checkpoint(rotated=True)
            for part in _parts(ids.items()):
                yield Checkpoint(ids=[(number, name) for name, number in part])
        for part in _parts(self.values.items()):
            yield Checkpoint(
                values=part
                if self.encoded
                else [(key, encode_value(value, key)) for key, value in part]
            )
        for held in _parts(self.held.items()):
            yield Checkpoint(held=[(number, owner, raw) for number, (owner, raw) in held])
        for results in _parts(self.results.items()):
            yield Checkpoint(results=results)
        for owner, (token, names) in self.batches.items():
            yield Checkpoint(
                batches=[(owner, token, [(number, name) for name, number in names.items()])]
            )


@dataclass(frozen=True)
class Partitioning:
    """Partitioning of a component's state over ``tasks`` tasks: ``by_key`` as fields grouping does
    it, or each task has its own.
    """

    tasks: int
    by_key: bool

    def owner(self, key: Any) -> int:
        """Index of the task that has this key."""
        return stable_hash(key) % self.tasks

    def share(
        self,
        index: int,
        old: Iterable[tuple[int, Contents]],
        merge: Callable[[Any, list[Any]], Any],
    ) -> Contents:
        """Contents of task ``index``, taken from the tasks of the partitioning before, given as
        (index, contents).

        Values that several of them had under one key are merged. Ids of a batch that was being
        written go where their tuples go. Tuples of windows go where their keys go, and what windows
        have emitted is sent by the task of the same index.
        """

        def is_mine(item: tuple[Any, int]) -> bool:
            return not self.by_key or item[1] % self.tasks == index

        found = Contents()
        several: dict[Any, list[Any]] = {}
        """Keys of more than one task."""
        positions: list[Position] = []
        moved: list[tuple[HeldTuple, int]] = []
        for before, contents in old:
            if contents.windows is not None and (self.by_key or before % self.tasks == index):
                positions.append(contents.windows)
                for entry in detach(contents.windows, contents.entries()):
                    owner = contents.held[entry.number][0]
                    if (owner if self.by_key else before) % self.tasks == index:
                        moved.append((entry, owner))
            if before % self.tasks == index:
                for raw in contents.results.values():
                    found.results[len(found.results)] = raw
            if not self.by_key and before % self.tasks != index:
                continue
            for name in ("values", "ids", "old_ids"):
                if type(getattr(contents, name)) is LargeMap:
                    setattr(found, name, LargeMap(getattr(found, name).items()))
            for key, value in contents.values.items():
                if self.by_key and self.owner(key) != index:
                    continue
                if key in found.values:
                    several.setdefault(key, [found.values[key]]).append(value)
                else:
                    found.values[key] = value
            for ids, mine in ((contents.ids, found.ids), (contents.old_ids, found.old_ids)):
                mine.update(filter(is_mine, ids.items()))
            for owner, (token, names) in contents.batches.items():
                if mine := dict(filter(is_mine, names.items())):
                    found.batches.setdefault(owner, (token, {}))[1].update(mine)
        owners = {id(entry): owner for entry, owner in moved}
        for number, entry in enumerate(in_order(entry for entry, _ in moved)):
            found.held[number] = (owners[id(entry)], encode_entry(entry))
        found.windows = join(positions)
        for key, values in several.items():
            found.values[key] = merge(key, values)
        return found
