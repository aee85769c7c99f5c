"""A nimbus that copies a blob while the leader removes it: the copy goes, too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.model.conf import default_conf
from storm_dagster.nimbus.blobs.registry import BlobRegistry, Registered
from storm_dagster.nimbus.blobs.replicated_store import NimbusBlobStore
from storm_dagster.nimbus.blobs.sync import BlobSync
from storm_rigs.stage.records import World

KEY = "gone-1-1600000000-stormjar.jar"
SAME = "upload.handle-archive"
"""Of the same content, which therefore stays on the disk."""


@pytest.mark.parametrize(
    "when",
    ["before it is stored again", "before it is registered", "while it is registered", "never"],
)
def test_a_blob_removed_during_its_copy_does_not_come_back(
    world: World, tmp_path: Path, when: str
) -> None:
    registry, store = BlobRegistry(world.cluster, "127.0.0.1:1"), LocalBlobStore(tmp_path)
    blobs = NimbusBlobStore.__new__(NimbusBlobStore)
    blobs.base, blobs.shared = store, False
    apart = {
        "cluster": world.cluster,
        "registry": registry,
        "status": SimpleNamespace(me="127.0.0.1:1"),
        "peers": list,
    }
    nimbus: Any = SimpleNamespace(**apart, blobs=blobs, conf=default_conf())
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
    copies = BlobSync(nimbus)
    assert copies._fetch_needed(entry)
    copies.close()
    assert store.keys() == ([KEY, SAME] if when == "never" else [SAME])
    assert registry.keys() == ([KEY] if when == "never" else [])
