"""Stored memory of a sensor between its ticks, where it grows with the cluster, and its form in
JSON.

Dagster stores a cursor with every tick, so a cursor only names a record here. A record never
changes: a tick that is repeated from an older cursor finds what it knew then. The newest eight of a
sensor are kept; one that is lost costs an observer no more than one full timeout.
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
_KEPT = 8
_NAME = re.compile(r"[0-9]{1,10}-[0-9a-f]{16}")


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def load_memory(cluster: StormClusterState, sensor: str, name: str | None) -> bytes | None:
    """The record that a cursor names; ``None`` when it is gone, damaged, or the name is not one of
    ours.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    try:
        found = read_sharded(cluster.state, paths.sensor_memory(sensor, name))
    except (Corrupt, Conflict) as error:
        _log.warning("the memory of %s is lost: %s", sensor, error.message)
        return None
    return found[0] if found is not None and _digest(found[0]) == name.partition("-")[2] else None


def store_memory(
    cluster: StormClusterState, sensor: str, raw: bytes, name: str | None, *, epoch: int
) -> str | None:
    """Keep ``raw``; returns the name of its record, for the cursor.

    Nothing is written when ``name`` holds it already. Otherwise it lands by compare and set, and
    only while ``epoch`` (of the view that it was made from; below 0 before any leader) is the
    leadership epoch: else the result is ``name``, and the next tick has its turn. The same when it
    is larger than 16 MiB.
    """
    digest = _digest(raw)
    if isinstance(name, str) and name.partition("-")[2] == digest:
        return name
    parent = paths.sensor_memory(sensor)
    cluster.state.mkdirs(parent)
    version = cluster.state.get_version(parent) or 0
    made = f"{version + 1}-{digest}"
    # Before any leader the version of /epoch is 0.
    transaction = cluster.fenced(max(epoch, 0)).set(parent, b"", version)
    for old in cluster.state.find_children(parent) or ():
        if int(old.partition("-")[0]) <= version + 1 - _KEPT:
            delete_ops(cluster.state, transaction, f"{parent}/{old}")
    try:
        put_ops(cluster.state, transaction, paths.sensor_memory(sensor, made), raw, None)
        transaction.commit()
    except (Conflict, Fenced, InvalidTopology) as error:
        _log.info("the memory of %s was not stored: %s", sensor, error.message)
        return name
    return made


def encode_memory(memory: object) -> bytes:
    """The memory as JSON with sorted keys: equal memories give equal bytes.

    A ``msgspec.Struct`` is an object of its fields, a named tuple an array, a field that is
    ``msgspec.UNSET`` is absent.
    """
    return msgspec.json.encode(memory, order="sorted")


def decode_memory(kind: type[M], raw: bytes | str | None) -> M:
    """The memory of :func:`encode_memory`; anything else is an empty memory, which only grants
    time.
    """
    with suppress(msgspec.MsgspecError, UnicodeError):
        found = msgspec.json.decode(raw or b"", type=kind)
        # A part that is absent must not pass for one that was seen: the document has every field,
        # and no other.
        if msgspec.json.decode(encode_memory(found)) == msgspec.json.decode(raw or b""):
            return found
    return kind()
