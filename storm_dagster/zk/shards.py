"""Records that may be larger than a transaction can carry, in parts
(``docs/decisions.md#bounded-nodes``).

A small record is in its node. A large one is cut: the parts are written first as children
``<generation>-<n>`` that nothing refers to, and the transaction then writes the *head*, which names
their generation, number and hash. A reader therefore sees the old record or the new one, and knows.
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
MAX_SHARDS = 64
"""So 16 MiB are the most that one record may take."""

_HEAD_START = b'{"v":1,"generation":'
_ATTEMPTS = 5


class ShardHead(Record):
    """Content of the node of a record that was cut."""

    generation: str
    """Name of this writing of the record."""
    count: int
    size: int
    """Bytes in all."""
    sha256: str
    """Hash of the whole record, hexadecimal."""


def put_ops(
    state: ClusterState, transaction: Transaction, path: str, raw: bytes, at: Versioned | None
) -> None:
    """Append operations to the transaction that write ``raw`` to ``path``.

    ``at`` is the version of the node as read, ``None`` when the record must not exist yet. The
    parts of a large record are written at once; the parts of the former record, and of writers that
    never committed, are deleted by the transaction. Raises ``InvalidTopology`` before any write
    when the record is larger than 16 MiB.
    """
    if len(raw) > MAX_SHARDS * SHARD_BYTES:
        raise InvalidTopology(
            f"{path} would take {len(raw)} bytes, {MAX_SHARDS * SHARD_BYTES} are allowed: "
            "use fewer workers, or fewer tasks"
        )
    former = state.find_children(path) if at is not None or len(raw) > INLINE_BYTES else None
    base = at
    if len(raw) > INLINE_BYTES:
        data = _write_parts(state, path, raw)
        if base is None:
            # The parts need their parent, which is no record while it is empty.
            found = state.get_data_with_version(path)
            if found is None or found[0]:
                raise conflict(f"{path} was changed meanwhile: read again", path)
            base = found[1]
    else:
        data = raw
        if base is None:
            # So may an earlier attempt have left it.
            found = state.get_data_with_version(path)
            if found is not None and not found[0]:
                base, former = found[1], state.find_children(path)
    transaction.put(path, data, None if base is None else base.version)
    for name in former or ():
        transaction.delete(f"{path}/{name}")


def _write_parts(state: ClusterState, path: str, raw: bytes) -> bytes:
    # A random name: a part whose answer was lost is never mistaken for one of another writer.
    generation = uuid.uuid4().hex
    count = -(-len(raw) // SHARD_BYTES)
    for number in range(count):
        state.create_node(
            f"{path}/{generation}-{number}", raw[number * SHARD_BYTES : (number + 1) * SHARD_BYTES]
        )
    head = ShardHead(
        generation=generation, count=count, size=len(raw), sha256=hashlib.sha256(raw).hexdigest()
    )
    return encode_record(head)


def delete_ops(state: ClusterState, transaction: Transaction, path: str) -> bool:
    """Append operations that delete the record and its parts; ``False``, and nothing appended, when
    there is none.
    """
    children = state.find_children(path)
    if children is None:
        return False
    for name in children:
        transaction.delete(f"{path}/{name}")
    transaction.delete(path)
    return True


def resolve(state: ClusterState, path: str, raw: bytes) -> bytes | None:
    """The record whose node holds ``raw``: itself, or its parts put together.

    ``None`` when the parts are gone, because the record was replaced after ``raw`` had been read.
    Raises ``Corrupt`` when the parts differ from the head.
    """
    if not raw.startswith(_HEAD_START):
        return raw
    head = decode_record(ShardHead, raw, path)
    if not 0 < head.count <= MAX_SHARDS or "/" in head.generation:
        raise Corrupt(
            f"{path} names {head.count} parts of {head.generation!r:.40}: it was damaged or forged"
        )
    parts = state.get_many([f"{path}/{head.generation}-{number}" for number in range(head.count)])
    if any(part is None for part in parts):
        return None
    whole = b"".join(part[0] for part in parts if part is not None)
    if len(whole) != head.size or hashlib.sha256(whole).hexdigest() != head.sha256:
        raise Corrupt(
            f"the parts of {path} do not have the hash that its head names: they were damaged"
        )
    return whole


def read_sharded(
    state: ClusterState, path: str, watch: bool = False
) -> tuple[bytes, Versioned] | None:
    """The record at ``path`` and the version of its node; ``None`` when there is none (or an empty
    node).
    """
    seen: Versioned | None = None
    for _ in range(_ATTEMPTS):
        found = state.get_data_with_version(path, watch)
        if found is None or not found[0]:
            return None
        if (whole := resolve(state, path, found[0])) is not None:
            return whole, found[1]
        if seen == found[1]:
            raise Corrupt(
                f"parts of {path} are missing although its head names them: they were deleted"
            )
        seen = found[1]
    raise conflict(f"{path} is replaced again and again while it is read: try again", path)
