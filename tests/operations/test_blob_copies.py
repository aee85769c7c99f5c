"""A nimbus that copies a blob while the leader removes it: the copy goes, too."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.model.conf import default_conf
from storm_dagster.nimbus.blobs.registry import BlobRegistry, Registered
from storm_dagster.nimbus.blobs.replicated_store import NimbusBlobStore
from storm_dagster.nimbus.blobs.sync import BlobSync
from storm_dagster.nimbus.keyed_locks import KeyedLocks
from storm_rigs.stage.records import World

KEY = "gone-1-1600000000-stormjar.jar"
SAME = "upload.handle-archive"
"""Of the same content, which therefore stays on the disk."""


def sync_of(world: World, registry: BlobRegistry, store: LocalBlobStore) -> BlobSync:
    """The look for missing blobs of a nimbus without peers."""
    blobs = NimbusBlobStore.__new__(NimbusBlobStore)
    blobs.base = store
    blobs.shared = False
    blobs.changes = KeyedLocks()
    nimbus: Any = SimpleNamespace(
        cluster=world.cluster,
        registry=registry,
        status=SimpleNamespace(me="127.0.0.1:1"),
        peers=list,
        blobs=blobs,
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
    assert copies._fetch_locked(entry)
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
