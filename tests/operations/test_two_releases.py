"""A daemon of the next release beside one of this: a copy of this tree, with one field more in
every record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.operations import mixed_cluster
from storm_rigs.operations.releases import ADDED, OtherRelease, copy_release
from storm_rigs.stage.records import World

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(120)]


@pytest.fixture
def here(zk_cluster: StormClusterState, zk_conf: dict[str, Any], tmp_path: Path) -> World:
    """The cluster as this release has it."""
    return World(zk_cluster, LocalBlobStore(tmp_path / "blobs"), zk_conf)


@pytest.fixture
def newer(
    here: World, zk_conf: dict[str, Any], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Any]]:
    """Runs a step in a process of the next release, on the same cluster."""
    release = OtherRelease(copy_release(tmp_path_factory.mktemp("release"), drop=False))
    yield lambda step: release.ask(
        "storm_rigs.operations.mixed_cluster:in_other_release",
        step,
        zk_conf,
        str(tmp_path / "blobs"),
    )
    release.close()


def test_what_newer_daemons_wrote_is_read_changed_and_kept_by_this_release(
    here: World, newer: Callable[[str], Any]
) -> None:
    newer("build")
    before = mixed_cluster.documents(here.cluster.state)
    marked = {path for path, document in before.items() if ADDED in document}
    assert {path.split("/")[1] for path in marked} >= {
        "assignments", "assignments_bak", "blacklist", "epoch", "metrics", "supervisors", "taskbeats", "taskerrors", "tasks",
        "tokens", "topology", "unreported", "workers",
    }  # fmt: skip
    assert mixed_cluster.seen(here)["corrupt"] == {}
    mixed_cluster.change(here)
    after = mixed_cluster.documents(here.cluster.state)
    assert {path for path in marked if ADDED not in after[path]} == set()
    changed = {path.split("/")[1] for path in marked if before[path] != after[path]}
    assert changed >= {"assignments", "blacklist", "metrics", "tasks", "topology", "unreported"}
    for path in (each for each in marked if each.startswith("/assignments/")):
        kept = {(worker["node"], worker["port"]) for worker in before[path]["workers"]}
        assert kept
        slots = {(worker["node"], worker["port"]): worker for worker in after[path]["workers"]}
        assert all(ADDED in slots[slot] for slot in kept & slots.keys())
    newer_view, view = newer("seen"), mixed_cluster.seen(here)
    assert newer_view == view and view["corrupt"] == {}
    assert view["supervisors"].keys() == {"s1", "s2"} and view["hosts"] == ["h8", "h9"]
    topology = view["topologies"]["wc"]
    assert topology["executors"]["split"] == 4 and topology["workers"] == 4
    assert topology["errors"] == ["trace"] and topology["loggers"] == ["a", "b"]


def test_what_this_release_wrote_is_read_and_changed_by_newer_daemons(
    here: World, newer: Callable[[str], Any]
) -> None:
    mixed_cluster.build(here)
    assert newer("seen") == mixed_cluster.seen(here)
    newer("change")
    after = mixed_cluster.documents(here.cluster.state)
    assert {path.split("/")[1] for path, document in after.items() if ADDED in document} >= {
        "assignments", "blacklist", "metrics", "tasks", "topology", "unreported"
    }  # fmt: skip
    view = mixed_cluster.seen(here)
    assert newer("seen") == view and view["corrupt"] == {}
    assert view["topologies"]["wc"]["executors"]["split"] == 4 and view["hosts"] == ["h8", "h9"]
    assert view["deeds"] == ["d", "e"]
    mixed_cluster.rebalance(here.context(), "wc", executors={"split": 3}, wait_secs=0)
    assert newer("seen") == mixed_cluster.seen(here)
