"""Worlds: a real cluster state and a local blob store for each test."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.world import World

# Scenes assert what they promise: failures show both sides, as in a test.
pytest.register_assert_rewrite("storm_rigs.scenes")


@pytest.fixture
def zk_worlds(zookeeper_server: str, tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes clusters with a leader and two supervisors of four slots each."""
    host, _, port = zookeeper_server.rpartition(":")
    opened: list[StormClusterState] = []

    def make(more: Mapping[str, Any] | None = None) -> World:
        conf: dict[str, Any] = {
            "storm.zookeeper.servers": [host],
            "storm.zookeeper.port": int(port),
            "storm.zookeeper.root": f"/t-{uuid.uuid4().hex[:12]}",
            "storm.zookeeper.session.timeout": 4000,
            **(more or {}),
        }
        # What it writes for supervisors and workers lives as long as its session.
        lasting = {"storm.zookeeper.session.timeout": 30_000}
        opened.append(StormClusterState.open({**conf, **lasting}, create_root=True))
        blobs = LocalBlobStore(tmp_path / f"blobs-{len(opened)}")
        made = World(opened[-1], blobs, {**conf, "task.cleanup.timeout.sec": 0})
        made.lead()
        made.supervisor("s1")
        made.supervisor("s2")
        return made

    yield make
    for cluster in opened:
        cluster.disconnect()


@pytest.fixture
def world(zk_worlds: Callable[[], World]) -> World:
    """One of these clusters."""
    return zk_worlds()
