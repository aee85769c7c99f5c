"""Stored memory of a sensor between its ticks, and its form in JSON.

Memory that grows with the cluster is stored here: Dagster stores a cursor with every tick, so a
cursor only names a record. A record never changes: a tick that is repeated from an older cursor
finds the memory of that time. The newest eight records of a sensor are kept; a lost one costs an
observer at most one full timeout.
"""

import hashlib
import logging
import re
from contextlib import suppress
from typing import TypeVar

import msgspec

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt, Fenced, InvalidTopology
from storm_dagster.zk.shards import delete_ops, put_ops, read_sharded
from storm_dagster.zk.storm_cluster_state import StormClusterState

M = TypeVar("M")

_log = logging.getLogger(__name__)
_KEPT_RECORDS = 8
"""Records of a sensor that are kept, for ticks that Dagster repeats from an older cursor."""
_NAME = re.compile(r"[0-9]{1,10}-[0-9a-f]{16}")
"""Name of a record: number of the write, and :func:`_digest` of the content."""


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def load_memory(cluster: StormClusterState, sensor: str, name: str | None) -> bytes | None:
    """The record that a cursor names.

    ``None`` if the record is gone or damaged, or :func:`store_memory` never returned the name.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    try:
        record = read_sharded(cluster.state, paths.sensor_memory(sensor, name))
    except (Corrupt, Conflict) as error:
        _log.warning("the memory of %s is lost: %s", sensor, error.message)
        return None
    if record is None:
        return None
    raw, _ = record
    if _digest(raw) != name.partition("-")[2]:
        return None
    return raw


def store_memory(
    cluster: StormClusterState, sensor: str, raw: bytes, name: str | None, *, epoch: int
) -> str | None:
    """Store ``raw``, and return the name of its record, for the cursor.

    If the record ``name`` has the same content, there is no write. Otherwise the record is written
    by compare and set, and only while ``epoch`` (of the view that it was made from; below 0 before
    any leader) is the leadership epoch. If that fails, or ``raw`` is larger than 16 MiB, the result
    is ``name``, and the next tick tries to store its memory.
    """
    digest = _digest(raw)
    if isinstance(name, str) and name.partition("-")[2] == digest:
        return name
    parent = paths.sensor_memory(sensor)
    cluster.state.mkdirs(parent)
    version = cluster.state.get_version(parent) or 0
    number = version + 1
    new_name = f"{number}-{digest}"
    # Before any leader the version of /epoch is 0.
    transaction = cluster.fenced(max(epoch, 0)).set(parent, b"", version)
    for old_name in cluster.state.find_children(parent) or ():
        old_number = int(old_name.partition("-")[0])
        if old_number <= number - _KEPT_RECORDS:
            delete_ops(cluster.state, transaction, f"{parent}/{old_name}")
    try:
        put_ops(cluster.state, transaction, paths.sensor_memory(sensor, new_name), raw, None)
        transaction.commit()
    except (Conflict, Fenced, InvalidTopology) as error:
        _log.info("the memory of %s was not stored: %s", sensor, error.message)
        return name
    return new_name


def encode_memory(memory: object) -> bytes:
    """Encode the memory as JSON with sorted keys.

    Equal memories give equal bytes. A ``msgspec.Struct`` is an object of its fields, a named tuple
    an array, a field that is ``msgspec.UNSET`` is absent.
    """
    return msgspec.json.encode(memory, order="sorted")


def decode_memory(kind: type[M], raw: bytes | str | None) -> M:
    """Decode the result of :func:`encode_memory`.

    Any other value gives an empty memory, with which the timeouts start from the beginning.
    """
    with suppress(msgspec.MsgspecError, UnicodeError):
        memory = msgspec.json.decode(raw or b"", type=kind)
        # The document must have every field and no other: the default of an absent part must not
        # pass for an observation.
        if msgspec.json.decode(encode_memory(memory)) == msgspec.json.decode(raw or b""):
            return memory
    return kind()
