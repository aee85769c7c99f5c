"""Keyed state of a component: format of its log, and partitioning over tasks.

Pure. A log is a sequence of checkpoints, each framed by its length and checksum. A checkpoint that
a process was writing when it died is at the end, incomplete, and is ignored: its tuples were not
acked.

Checkpoints are measured (``benchmarks/dataplane.py``): functions that run for every value or tuple
use comprehensions and avoid calls.
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields, is_dataclass
from decimal import Decimal
from io import BytesIO
from itertools import chain, islice
from typing import Any, BinaryIO, TypeVar

import msgspec

from storm_dagster.core.dataplane.window_state import (
    HeldTuple,
    WindowPosition,
    entries_for_other_windows,
    in_order,
    join_positions,
)
from storm_dagster.model.errors import Corrupt, InvalidRequest
from storm_dagster.model.groupings import stable_hash
from storm_dagster.model.numbers import is_nan
from storm_dagster.model.values import ATOMIC, decode_extension, decode_value
from storm_dagster.model.values import encode_value as encode_any

_HEAD = struct.Struct("<II")
"""Length and CRC-32 of a checkpoint, before its bytes."""
_PART = 1000
"""Keys or ids in one checkpoint of a snapshot."""
_MAPS = 67
"""Parts of a :class:`LargeMap`; a prime, so that keys with a regular step use all of them."""
_MAX_IN_ONE_MAP = 20_000
"""Entries above which a map is divided into parts."""
ID_FORM = 1
"""Form of the ids of ``context.state`` as text: that of ``model.identities.identity_text``.

0 is the form of earlier releases, ``str()``.
"""
_Item = TypeVar("_Item")
_PLAIN_ID_TYPES = frozenset((str, int, bytes))
"""Types of ids that are hashable and equal to themselves."""
_encode = msgspec.msgpack.Encoder().encode


class Checkpoint(msgspec.Struct, omit_defaults=True):
    """Changes of one checkpoint."""

    values: list[tuple[Any, msgspec.Raw]] = []
    """(key, encoded value) of values that were set."""
    removed: list[Any] = []
    """Keys whose values were removed."""
    ids: list[tuple[int, Any]] = []
    """(hash of the grouping key, id) of tuples that were applied."""
    rotated: bool = False
    """The ids that are older than the newest generation are forgotten."""
    full: bool = False
    """All earlier checkpoints are dropped."""
    old_ids: list[tuple[int, Any]] = []
    """With ``full``: ids of the older generation, as in ``ids``."""
    held: list[tuple[int, int, msgspec.Raw]] = []
    """(number, hash of the grouping key, encoded entry) of tuples that entered windows."""
    finished: list[int] = []
    """Numbers of tuples that no window still needs."""
    windows: WindowPosition | None = None
    """State of the windows beside their tuples; ``None``: as before."""
    results: list[tuple[int, msgspec.Raw]] = []
    """(number, tuples that a window emitted)."""
    confirmed: list[int] = []
    """Numbers of results whose trees are complete."""
    batches: list[tuple[str, int, list[tuple[int, Any]]]] = []
    """(owner, token, ids as in ``ids``) of batches that are written to a sink from now on.

    An owner has one batch: a new one replaces it, and one without ids removes it.
    """
    forgotten: list[Any] = []
    """Ids, older ones and those of this checkpoint, that no longer count as applied."""
    id_form: int = 0
    """:data:`ID_FORM` if all ids of this log, from here on, have that form; 0: as before."""


# Tuples in keys are lists after it (:func:`key_of`); values stay encoded.
_decoder = msgspec.msgpack.Decoder(Checkpoint, ext_hook=decode_extension)


def encode_value(value: Any, key: Any) -> msgspec.Raw:
    """Encode a value; ``InvalidRequest`` for a type that is not serializable."""
    try:
        return msgspec.Raw(encode_any(value))
    except TypeError as error:
        raise InvalidRequest(f"the state of {key!r:.80} cannot be saved: it is {error}") from None


def stored_key(key: Any, beyond_msgpack: bool = False) -> Any:
    """Convert a key or an id to its form in a log.

    Tuples become arrays there, as in the logs of every release; :func:`key_of` restores them. With
    ``beyond_msgpack`` the key has integers or text that MessagePack cannot hold. Raises
    ``InvalidRequest`` for a key that cannot be saved.
    """
    if type(key) is tuple:
        return [stored_key(part, beyond_msgpack) for part in key]
    if type(key) in ATOMIC and not beyond_msgpack:
        return key
    try:
        return msgspec.Raw(encode_any(key))
    except TypeError as error:
        raise InvalidRequest(f"the key {key!r:.80} cannot be saved: it is {error}") from None


def _encode_checkpoint(record: Checkpoint, beyond_msgpack: bool) -> bytes:
    """Encode a checkpoint; ``beyond_msgpack`` is that of :func:`stored_key`."""
    return _encode(
        msgspec.structs.replace(
            record,
            values=[(stored_key(key, beyond_msgpack), raw) for key, raw in record.values],
            removed=[stored_key(key, beyond_msgpack) for key in record.removed],
            ids=_stored_ids(record.ids, beyond_msgpack),
            old_ids=_stored_ids(record.old_ids, beyond_msgpack),
            batches=[
                (owner, token, _stored_ids(ids, beyond_msgpack))
                for owner, token, ids in record.batches
            ],
            forgotten=[stored_key(tuple_id, beyond_msgpack) for tuple_id in record.forgotten],
        )
    )


def _stored_ids(ids: Iterable[tuple[int, Any]], beyond_msgpack: bool) -> list[tuple[int, Any]]:
    return [(key_hash, stored_key(tuple_id, beyond_msgpack)) for key_hash, tuple_id in ids]


def join_encoded(parts: list[Any]) -> msgspec.Raw:
    """Encode a list of encoded parts, numbers and ``None``."""
    return msgspec.Raw(_encode(parts))


def encode_entry(entry: HeldTuple) -> msgspec.Raw:
    """Encode a tuple of a window.

    Raises ``InvalidRequest`` if it holds a value that is not serializable.
    """
    item = encode_value(entry.item, entry.key)
    key = encode_value(entry.key, entry.key)
    return join_encoded([entry.stamp, item, key, entry.evaluated_until])


def key_of(key: Any) -> Any:
    """Convert a key to its hashable form: lists become tuples."""
    if isinstance(key, list | tuple):
        return tuple([key_of(part) for part in key])
    return key


def id_key(value: Any) -> Any:
    """Convert an id, or a part of one, to its hashable form, which a log can hold.

    Equal ids have equal forms: maps and sets in any order, and NaN, which is not equal to itself.
    """
    kind = type(value)
    if kind in _PLAIN_ID_TYPES:
        return value
    if isinstance(value, list | tuple):
        return tuple([id_key(part) for part in value])
    if (kind is float or kind is Decimal) and is_nan(value):
        return ("\0nan",)
    if isinstance(value, dict):
        return ("\0map", frozenset([(id_key(key), id_key(part)) for key, part in value.items()]))
    if isinstance(value, set | frozenset):
        return frozenset(map(id_key, value))
    if isinstance(value, bytearray):
        return bytes(value)
    if is_dataclass(value) and not _is_hashable(value):
        # One that is hashable is its own id, as in the logs of every release.
        parts = [id_key(getattr(value, part.name)) for part in fields(value)]
        return ("\0object", f"{kind.__module__}:{kind.__qualname__}", *parts)
    return value


def _is_hashable(value: Any) -> bool:
    """True if the value and all its parts have a hash."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def frame(record: Checkpoint) -> bytes:
    """Bytes of the checkpoint in a log, its length and checksum first.

    Raises ``InvalidRequest`` for a key that cannot be saved.
    """
    try:
        payload = _encode_checkpoint(record, beyond_msgpack=False)
    except (OverflowError, UnicodeEncodeError):
        # An integer of more than 64 bits, or text with a lone surrogate, in a key.
        payload = _encode_checkpoint(record, beyond_msgpack=True)
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def read_log(source: bytes | BinaryIO, name: str) -> Iterator[Checkpoint]:
    """Yield the checkpoints of a log, without an incomplete one at the end.

    Raises :class:`Corrupt` if a part before the end is damaged.
    """
    file = BytesIO(source) if isinstance(source, bytes) else source
    offset = 0
    while True:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return
        size, checksum = _HEAD.unpack(head)
        payload = file.read(size)
        if len(payload) < size:
            return
        try:
            if zlib.crc32(payload) != checksum:
                raise ValueError("the checksum is wrong")
            record = _decoder.decode(payload)
        except (ValueError, msgspec.MsgspecError) as error:
            tail = file.read()
            if not tail or not any(head + payload + tail):
                # The last write is incomplete. After a power cut its bytes may be zeros.
                return
            raise Corrupt(
                f"the state in {name} is damaged at byte {offset} ({error}): restore the file, or "
                "move it away to start this task without state"
            ) from None
        yield record
        offset += _HEAD.size + size


def _parts(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    iterator = iter(items)
    while part := list(islice(iterator, _PART)):
        yield part


class LargeMap(MutableMapping[Any, Any]):
    """A map in parts.

    No part is so large that its growth holds the interpreter's lock for long.
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
        """Remove an entry and return it; ``KeyError`` if there is none."""
        for part in self._maps:
            if part:
                return part.popitem()
        raise KeyError("the map is empty")

    def clear(self) -> None:
        """Remove all entries one by one: a whole part would hold the lock for long."""
        for part in self._maps:
            while part:
                part.popitem()

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._maps)

    def __len__(self) -> int:
        return sum(map(len, self._maps))


def _in_parts(table: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """The table, or a :class:`LargeMap` of it if it is large."""
    if type(table) is dict and len(table) > _MAX_IN_ONE_MAP:
        return LargeMap(table.items())
    return table


@dataclass
class Contents:
    """Keyed values of one task, and the ids of the tuples applied to them."""

    values: MutableMapping[Any, Any] = field(default_factory=dict)
    """Read from a log; a :class:`LargeMap` if there are many."""
    ids: MutableMapping[Any, int] = field(default_factory=dict)
    """Id -> hash of the grouping key, newest generation."""
    old_ids: MutableMapping[Any, int] = field(default_factory=dict)
    """The same of the generation before; older ids are forgotten."""
    held: MutableMapping[int, tuple[int, msgspec.Raw]] = field(default_factory=dict)
    """Number -> (hash of the grouping key, encoded entry) of the tuples in windows."""
    windows: WindowPosition | None = None
    """State of the windows beside their tuples; ``None`` if none was stored."""
    results: dict[int, msgspec.Raw] = field(default_factory=dict)
    """Number -> tuples that a window emitted, until their trees are complete."""
    batches: dict[str, tuple[int, dict[Any, int]]] = field(default_factory=dict)
    """Owner -> (token, id -> hash of the grouping key) of the batch that it was writing to a sink.

    Only the sink knows if the batch has been written.
    """
    encoded: bool = False
    """True if values stay encoded, which is enough to rewrite the log."""
    id_form: int = 0
    """:data:`ID_FORM`, or 0 if an id may have the form of an earlier release."""

    def entries(self) -> Iterator[HeldTuple]:
        """The tuples in windows."""
        for number, (_, raw) in self.held.items():
            stamp, item, key, evaluated_until = decode_value(raw)
            yield HeldTuple(stamp, number, item, key_of(key), evaluated_until)

    def apply(self, record: Checkpoint) -> None:
        """Apply a checkpoint.

        Removals come before values, and finished or confirmed numbers before new ones: what a
        checkpoint adds stays.
        """
        if record.full:
            self.values.clear()
            self.ids.clear()
            self.old_ids = {key_of(tuple_id): key_hash for key_hash, tuple_id in record.old_ids}
            self.held.clear()
            self.results.clear()
            self.batches.clear()
            self.id_form = 0
        if record.rotated:
            self.rotate_ids()
        self.id_form = record.id_form or self.id_form
        for key in record.removed:
            self.values.pop(key_of(key), None)
        for key, raw in record.values:
            # A raw value is a view of the whole checkpoint: the copy lets that be freed.
            self.values[key_of(key)] = raw.copy() if self.encoded else decode_value(raw)
        self.values = _in_parts(self.values)
        self.held = _in_parts(self.held)
        self.apply_ids(record)
        for number in record.finished:
            self.held.pop(number, None)
        for number, owner, raw in record.held:
            self.held[number] = (owner, raw.copy())
        for number in record.confirmed:
            self.results.pop(number, None)
        for number, raw in record.results:
            self.results[number] = raw.copy()
        self.windows = record.windows or self.windows

    def rotate_ids(self) -> MutableMapping[Any, int]:
        """Begin a new generation of ids.

        Returns the ids that are no longer remembered, for the caller to remove.
        """
        expired = self.old_ids
        self.old_ids = self.ids
        self.ids = LargeMap(()) if len(self.old_ids) > _MAX_IN_ONE_MAP else {}
        return expired

    def apply_ids(self, record: Checkpoint) -> None:
        """Apply the ids and batches of a checkpoint.

        Forgotten ids are removed last, since they may be among those of the checkpoint.
        """
        self.ids.update({key_of(tuple_id): key_hash for key_hash, tuple_id in record.ids})
        self.ids = _in_parts(self.ids)
        for tuple_id in record.forgotten:
            self.ids.pop(key_of(tuple_id), None)
            self.old_ids.pop(key_of(tuple_id), None)
        for owner, token, ids in record.batches:
            if ids:
                key_hash_of = {key_of(tuple_id): key_hash for key_hash, tuple_id in ids}
                self.batches[owner] = (token, key_hash_of)
            else:
                self.batches.pop(owner, None)

    def snapshot(self) -> Iterator[Checkpoint]:
        """Yield the contents as checkpoints, the first of which is full.

        The checkpoints are small, since decoding one holds the interpreter's lock.
        """
        yield Checkpoint(full=True, windows=self.windows, id_form=self.id_form)
        # The older generation is added like new ids, and then becomes the older one.
        for part in _parts(self.old_ids.items()):
            yield Checkpoint(ids=[(key_hash, tuple_id) for tuple_id, key_hash in part])
        if self.old_ids:
            yield Checkpoint(rotated=True)
        for part in _parts(self.ids.items()):
            yield Checkpoint(ids=[(key_hash, tuple_id) for tuple_id, key_hash in part])
        for part in _parts(self.values.items()):
            values = part
            if not self.encoded:
                values = [(key, encode_value(value, key)) for key, value in part]
            yield Checkpoint(values=values)
        for part in _parts(self.held.items()):
            yield Checkpoint(held=[(number, owner, raw) for number, (owner, raw) in part])
        for part in _parts(self.results.items()):
            yield Checkpoint(results=part)
        for owner, (token, key_hash_of) in self.batches.items():
            ids = [(key_hash, tuple_id) for tuple_id, key_hash in key_hash_of.items()]
            yield Checkpoint(batches=[(owner, token, ids)])


@dataclass(frozen=True)
class Partitioning:
    """Partitioning of a component's state over ``tasks`` tasks.

    It is ``by_key``, as in fields grouping, or each task has its own state.
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
        """Contents of task ``index``, from the tasks of the previous partitioning.

        ``old`` are (index, contents) of those tasks. Values that several of them had under one key
        are merged. Ids of a batch that was being written go where their tuples go. Tuples of
        windows go where their keys go. The task of the same index (modulo the number of tasks) is
        the successor of an old one: it sends the tuples that windows have emitted, and without
        ``by_key`` gets the whole state. Raises the errors of ``merge`` and of
        :func:`encode_entry`.
        """
        share = Contents()
        several: dict[Any, list[Any]] = {}
        """Key of more than one task -> its values."""
        positions: list[WindowPosition] = []
        window_tuples: list[tuple[HeldTuple, int]] = []
        for old_index, contents in old:
            is_successor = old_index % self.tasks == index
            if is_successor:
                for raw in contents.results.values():
                    share.results[len(share.results)] = raw
            if not self.by_key and not is_successor:
                continue
            if contents.windows is not None:
                # Of every old task, even one without a tuple for this task: the watermark must be
                # the earliest of all.
                positions.append(contents.windows)
                for entry in entries_for_other_windows(contents.windows, contents.entries()):
                    owner = contents.held[entry.number][0]
                    if not self.by_key or owner % self.tasks == index:
                        window_tuples.append((entry, owner))
            self._add_values(index, contents, share, several)
            self._add_ids(index, contents, share)
        # By identity: the sort mixes the tuples of several tasks, and numbers them once more.
        owners = {id(entry): owner for entry, owner in window_tuples}
        for number, entry in enumerate(in_order(entry for entry, _ in window_tuples)):
            share.held[number] = (owners[id(entry)], encode_entry(entry))
        share.windows = join_positions(positions)
        for key, values in several.items():
            share.values[key] = merge(key, values)
        return share

    def _add_values(
        self, index: int, contents: Contents, share: Contents, several: dict[Any, list[Any]]
    ) -> None:
        """Add the values of task ``index`` to ``share``.

        ``several`` collects all values of a key that more than one task has.
        """
        # Where one source is large, the share may become large, too.
        if type(contents.values) is LargeMap:
            share.values = LargeMap(share.values.items())
        for key, value in contents.values.items():
            if self.by_key and self.owner(key) != index:
                continue
            if key in share.values:
                several.setdefault(key, [share.values[key]]).append(value)
            else:
                share.values[key] = value

    def _add_ids(self, index: int, contents: Contents, share: Contents) -> None:
        """Add the ids and the batches of task ``index`` to ``share``."""
        if type(contents.ids) is LargeMap:
            share.ids = LargeMap(share.ids.items())
        if type(contents.old_ids) is LargeMap:
            share.old_ids = LargeMap(share.old_ids.items())
        share.ids.update(self._own_ids(index, contents.ids))
        share.old_ids.update(self._own_ids(index, contents.old_ids))
        for owner, (token, ids) in contents.batches.items():
            own_ids = dict(self._own_ids(index, ids))
            if own_ids:
                share.batches.setdefault(owner, (token, {}))[1].update(own_ids)

    def _own_ids(self, index: int, ids: Mapping[Any, int]) -> Iterator[tuple[Any, int]]:
        """(id, hash of the grouping key) of the ids that belong to task ``index``."""
        for tuple_id, key_hash in ids.items():
            if not self.by_key or key_hash % self.tasks == index:
                yield tuple_id, key_hash
