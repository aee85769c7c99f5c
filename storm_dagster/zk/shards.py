"""Records that may be larger than a transaction, in parts.

A small record is in its node. A large one is cut (``docs/decisions.md#bounded-nodes``): the parts
are written first, as children ``<generation>-<n>`` to which no head refers. The transaction then
writes the *head*, which names their generation, number and hash. A reader therefore sees either the
old record or the new one, and can verify it.
"""

import hashlib
import uuid

from storm_dagster.model.errors import Corrupt, InvalidTopology
from storm_dagster.model.records import Record, decode_record, encode_record
from storm_dagster.model.view import Versioned
from storm_dagster.zk.cluster_state import ClusterState
from storm_dagster.zk.transaction import Transaction, conflict

INLINE_BYTES = 256 * 1024
"""Largest record in its own node: one transaction carries two of them and more."""
SHARD_BYTES = 256 * 1024
"""Bytes of a part; the last one may have fewer."""
MAX_SHARDS = 64
"""A record has at most 16 MiB."""

_HEAD_START = b'{"v":1,"generation":'
"""Start of every encoded head, and of no other record."""
_ATTEMPTS = 5
"""Reads of a record that is replaced while it is read."""


class ShardHead(Record):
    """Content of the node of a record that was cut."""

    generation: str
    """Name of one write of the record."""
    count: int
    """Number of parts."""
    size: int
    """Bytes of the whole record."""
    sha256: str
    """Hash of the whole record, hexadecimal."""


def put_ops(
    state: ClusterState, transaction: Transaction, path: str, raw: bytes, at: Versioned | None
) -> None:
    """Append operations to the transaction that write ``raw`` to ``path``.

    ``at`` is the version of the node as read, ``None`` if the record must not exist yet. The parts
    of a large record are written immediately; the parts of the former record, and of writers that
    never committed, are deleted by the transaction. Raises ``InvalidTopology`` before any write if
    the record is larger than 16 MiB.
    """
    if len(raw) > MAX_SHARDS * SHARD_BYTES:
        raise InvalidTopology(
            f"{path} would take {len(raw)} bytes, {MAX_SHARDS * SHARD_BYTES} are allowed: "
            "use fewer workers, or fewer tasks"
        )
    is_large = len(raw) > INLINE_BYTES
    former_parts: list[str] | None = None
    if at is not None or is_large:
        # Before the new parts are written, which must stay.
        former_parts = state.find_children(path)
    replaced = at
    data = _write_parts(state, path, raw) if is_large else raw
    if replaced is None:
        # An empty node is not a record. It is the parent of the parts written above, or was left
        # by an earlier attempt.
        node = state.get_data_with_version(path)
        is_empty = node is not None and not node[0]
        if is_large and not is_empty:
            raise conflict(f"{path} has changed: read again", path)
        if node is not None and is_empty:
            _, replaced = node
            if not is_large:
                former_parts = state.find_children(path)
    transaction.put(path, data, None if replaced is None else replaced.version)
    for name in former_parts or ():
        transaction.delete(f"{path}/{name}")


def _write_parts(state: ClusterState, path: str, raw: bytes) -> bytes:
    """Write the parts of a large record, and return its head."""
    # A random name: a part whose response was lost is never taken for a part of another writer.
    generation = uuid.uuid4().hex
    parts = [raw[start : start + SHARD_BYTES] for start in range(0, len(raw), SHARD_BYTES)]
    for number, part in enumerate(parts):
        state.create_node(f"{path}/{generation}-{number}", part)
    head = ShardHead(
        generation=generation,
        count=len(parts),
        size=len(raw),
        sha256=hashlib.sha256(raw).hexdigest(),
    )
    return encode_record(head)


def delete_ops(state: ClusterState, transaction: Transaction, path: str) -> bool:
    """Append operations that delete the record and its parts.

    Without the record, it appends no operation and returns false.
    """
    children = state.find_children(path)
    if children is None:
        return False
    for name in children:
        transaction.delete(f"{path}/{name}")
    transaction.delete(path)
    return True


def resolve(state: ClusterState, path: str, raw: bytes) -> bytes | None:
    """The record whose node holds ``raw``.

    It is ``raw`` itself, or its joined parts. ``None`` if the parts are gone, because the record
    was replaced after ``raw`` had been read. Raises ``Corrupt`` if the parts differ from the head.
    """
    if not raw.startswith(_HEAD_START):
        return raw
    head = decode_record(ShardHead, raw, path)
    if not 0 < head.count <= MAX_SHARDS or "/" in head.generation:
        raise Corrupt(
            f"{path} names {head.count} parts of {head.generation!r:.40}: it was damaged or forged"
        )
    part_paths = [f"{path}/{head.generation}-{number}" for number in range(head.count)]
    parts: list[bytes] = []
    for part in state.get_many(part_paths):
        if part is None:
            return None
        parts.append(part[0])
    record = b"".join(parts)
    if len(record) != head.size or hashlib.sha256(record).hexdigest() != head.sha256:
        raise Corrupt(
            f"the parts of {path} do not have the hash that its head names: they were damaged"
        )
    return record


def read_sharded(
    state: ClusterState, path: str, watch: bool = False
) -> tuple[bytes, Versioned] | None:
    """The record at ``path`` and the version of its node.

    ``None`` without the node, or if it is empty.
    """
    former_version: Versioned | None = None
    for _ in range(_ATTEMPTS):
        node = state.get_data_with_version(path, watch)
        if node is None:
            return None
        raw, version = node
        if not raw:
            return None
        record = resolve(state, path, raw)
        if record is not None:
            return record, version
        if version == former_version:
            raise Corrupt(
                f"parts of {path} are missing although its head names them: they were deleted"
            )
        former_version = version
    raise conflict(f"{path} is replaced all the time while it is read: retry", path)
