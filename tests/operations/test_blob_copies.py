"""A nimbus that copies a blob while the leader removes or replaces it: the newest state stays."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storm_dagster.blobstore import BlobMeta
from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.model.conf import default_conf
from storm_dagster.nimbus.blobs import sync
from storm_dagster.nimbus.blobs.registry import BlobRegistry, Registered
from storm_dagster.nimbus.blobs.replicated_store import NimbusBlobStore
from storm_dagster.nimbus.blobs.replication import NimbusPeer
from storm_dagster.nimbus.blobs.sync import BlobSync
from storm_dagster.nimbus.keyed_locks import KeyedLocks
from storm_dagster.nimbus.leader_status import LeadershipSnapshot
from storm_dagster.testing.waiting import eventually
from storm_rigs.servers.blob_server import serve_blobs
from storm_rigs.stage.records import World

KEY = "gone-1-1600000000-stormjar.jar"
SAME = "upload.handle-archive"
"""Of the same content, which therefore stays on the disk."""
LEADER = "127.0.0.1:2"


def sync_of(
    world: World, registry: BlobRegistry, store: LocalBlobStore, leader_http: str | None = None
) -> BlobSync:
    """Copies of a nimbus whose only peer is the leader with that URL, or that has none."""
    blobs = NimbusBlobStore.__new__(NimbusBlobStore)
    blobs.base = store
    blobs.shared = False
    blobs.changes = KeyedLocks()
    blobs._registry = registry
    peers = [NimbusPeer(LEADER, leader_http)] if leader_http else []
    snapshot = LeadershipSnapshot(leader=LEADER, leader_http=leader_http)
    nimbus: Any = SimpleNamespace(
        cluster=world.cluster,
        registry=registry,
        status=SimpleNamespace(me="127.0.0.1:1", snapshot=snapshot),
        peers=lambda: peers,
        blobs=blobs,
        inbox=store.directory,
        conf=default_conf(),
    )
    return BlobSync(nimbus)


@pytest.mark.parametrize(
    "when",
    ["before it is stored again", "before it is registered", "while it is registered", "never"],
)
def test_a_blob_removed_during_its_copy_does_not_come_back(
    world: World, tmp_path: Path, when: str
) -> None:
    registry = BlobRegistry(world.cluster, "127.0.0.1:1")
    store = LocalBlobStore(tmp_path)
    copies = sync_of(world, registry, store)
    store.put(SAME, b"code")
    registry.register_written(store.put(KEY, b"code"), epoch=world.epoch())
    entry = registry.read([KEY])[KEY]
    store.delete(KEY)
    read, register = registry.read, registry.register_held

    def removed_after_reading(keys: Any, state: Any = None) -> dict[str, Registered]:
        found = read(keys, state)
        registry.forget(KEY, epoch=world.epoch())
        return found

    def removed_before(*given: Any) -> bool:
        registry.forget(KEY, epoch=world.epoch())
        return register(*given)

    if when == "before it is stored again":
        registry.forget(KEY, epoch=world.epoch())
    elif when == "before it is registered":
        registry.register_held = removed_before  # type: ignore[method-assign]
    elif when == "while it is registered":
        registry._own.clear()
        registry.read = removed_after_reading  # type: ignore[method-assign]
    copies._fetch_needed(entry)
    copies.close()
    assert store.keys() == ([KEY, SAME] if when == "never" else [SAME])
    assert registry.keys() == ([KEY] if when == "never" else [])


def test_a_write_that_is_not_registered_yet_is_not_undone(world: World, tmp_path: Path) -> None:
    """Another key has the former content, so that the copy needs no other nimbus."""
    registry = BlobRegistry(world.cluster, "127.0.0.1:1")
    store = LocalBlobStore(tmp_path)
    copies = sync_of(world, registry, store)
    store.put(SAME, b"former")
    registry.register_written(store.put(KEY, b"former"), epoch=world.epoch())
    entry = registry.read([KEY])[KEY]
    look = threading.Thread(target=copies._fetch_needed, args=(entry,))
    with copies._blobs.changes.hold(KEY):
        meta = store.put(KEY, b"new")
        look.start()
        look.join(0.5)
        assert look.is_alive(), "it waits for the write"
        registry.register_written(meta, epoch=world.epoch())
    look.join(20)
    assert not look.is_alive()
    assert store.read(KEY) == b"new"
    record = registry.read([KEY])[KEY].record
    assert record is not None and record.sha256 == meta.sha256
    copies.close()


def test_a_write_does_not_wait_for_a_slow_peer(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's content, which is the former one when it arrives, does not replace the new one."""
    monkeypatch.setattr(sync, "SILENT_SECS", 60.0)
    leader = BlobRegistry(world.cluster, LEADER)
    leader.register_written(BlobMeta(KEY, 6, sha256(b"former")), epoch=world.epoch())
    registry = BlobRegistry(world.cluster, "127.0.0.1:1")
    store = LocalBlobStore(tmp_path)
    with serve_blobs() as server:
        server.blobs[KEY] = b"former"
        server.gate = threading.Event()
        copies = sync_of(world, registry, store, server.url)
        entry = registry.read([KEY])[KEY]
        fetching = threading.Thread(target=copies._fetch_needed, args=(entry,))
        fetching.start()
        eventually(lambda: server.gets(KEY) == 1, what="the request for the content")
        with copies._blobs.changes.hold(KEY):
            assert fetching.is_alive(), "the content has not arrived"
            registry.register_written(store.put(KEY, b"new"), epoch=world.epoch())
        server.gate.set()
        fetching.join(20)
        assert not fetching.is_alive()
        copies.close()
    assert store.read(KEY) == b"new"
    assert list(tmp_path.glob("part-*")) == [], "the received file is removed"


def test_a_late_removal_does_not_cost_a_newer_copy(world: World, tmp_path: Path) -> None:
    """The leader removed the blob, and stored it again before the removal reached this nimbus."""
    registry = BlobRegistry(world.cluster, "127.0.0.1:1")
    store = LocalBlobStore(tmp_path)
    copies = sync_of(world, registry, store)
    registry.register_written(store.put(KEY, b"again"), epoch=world.epoch())
    copies._blobs.drop_replica(KEY)
    assert store.read(KEY) == b"again"
    registry.forget(KEY, epoch=world.epoch())
    copies._blobs.drop_replica(KEY)
    assert not store.exists(KEY)
    copies.close()


def test_a_blob_that_the_leader_has_again_is_not_dropped(world: World, tmp_path: Path) -> None:
    """The leader stores it after it was found missing in the list of the leader's blobs."""
    store = LocalBlobStore(tmp_path)
    store.put(SAME, b"part")
    with serve_blobs() as server:
        copies = sync_of(world, BlobRegistry(world.cluster, "127.0.0.1:1"), store, server.url)
        copies._keep_secs = -1
        server.blobs[SAME] = b"part"
        copies._drop_unneeded({SAME}, server.url)
        assert store.exists(SAME)
        del server.blobs[SAME]
        copies._drop_unneeded({SAME}, "http://127.0.0.1:3")
        assert store.exists(SAME), "another nimbus leads now"
        copies._drop_unneeded({SAME}, server.url)
        assert not store.exists(SAME)
        copies.close()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
