"""A cluster that was saved by copying its folders is the same cluster on the copies
(docs/backup.md).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.api import Bolt, StatefulBolt, Topology, Tuple
from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.model import paths
from storm_dagster.model.names import jar_key
from storm_dagster.operations.live import lifecycle
from storm_dagster.testing import TopologyHarness, run_topology
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.components import Words
from storm_rigs.operations import mixed_cluster
from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper
from storm_rigs.stage.records import World

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(120)]

EPHEMERAL = ("/supervisors/", "/workers/")


def kept_of(documents: dict[str, Any]) -> dict[str, Any]:
    """What does not belong to a session."""
    return {
        path: document for path, document in documents.items() if not path.startswith(EPHEMERAL)
    }


def test_a_cluster_comes_back_from_copies_of_its_folders(tmp_path: Path) -> None:
    def world_on(server: EmbeddedZooKeeper, blobs: Path, create: bool = False) -> Any:
        conf = {
            "storm.zookeeper.servers": [server.host],
            "storm.zookeeper.port": server.port,
            "storm.zookeeper.root": "/storm",
            "storm.zookeeper.session.timeout": patience(10_000),
        }
        cluster = StormClusterState.open(conf, create_root=create)
        return World(cluster, LocalBlobStore(blobs), conf)

    with EmbeddedZooKeeper(tmp_path / "zookeeper", durable=False) as server:
        world = world_on(server, tmp_path / "blobs", create=True)
        mixed_cluster.build(world)
        saved, view = mixed_cluster.documents(world.cluster.state), world.cluster.load_view()
        # As docs/backup.md has it: ZooKeeper first, then the blobs; both run on.
        shutil.copytree(tmp_path / "zookeeper", tmp_path / "saved" / "zookeeper")
        shutil.copytree(tmp_path / "blobs", tmp_path / "saved" / "blobs")
        # What comes after the copy is lost.
        world.submit("later")
        lifecycle.deactivate(world.context(), "wc")
        world.cluster.disconnect()
    shutil.rmtree(tmp_path / "zookeeper")
    shutil.rmtree(tmp_path / "blobs")

    with EmbeddedZooKeeper(tmp_path / "saved" / "zookeeper") as server:
        restored = world_on(server, tmp_path / "saved" / "blobs")
        assert restored.cluster.cluster_id() == view.cluster_id
        assert kept_of(mixed_cluster.documents(restored.cluster.state)) == kept_of(saved)
        # Sessions of before end by their timeout, and take supervisors and workers with them.
        eventually(lambda: not restored.cluster.load_view().supervisors, 90)
        assert not restored.cluster.live_workers(next(iter(view.topologies)))
        again = restored.cluster.load_view()
        assert (again.epoch, again.assignments_version) == (view.epoch, view.assignments_version)
        assert again.corrupt == {} and again.blacklist == view.blacklist
        (before,), (after,) = view.topologies.values(), again.topologies.values()
        assert (after.base, after.tasks, after.assignment) == (
            before.base,
            before.tasks,
            before.assignment,
        )
        assert (after.base_at, after.assignment_at) == (before.base_at, before.assignment_at)
        assert restored.blobs.read(jar_key(after.code_dir))
        # And it goes on.
        restored.lead()
        for supervisor in ("s1", "s2"):
            restored.supervisor(supervisor)
        mixed_cluster.change(restored)
        assert mixed_cluster.seen(restored)["topologies"]["wc"]["executors"]["split"] == 4
        assert restored.cluster.state.get_version(paths.EPOCH) == view.epoch + 1
        restored.cluster.disconnect()


class Counts(StatefulBolt):
    def process(self, tup: Tuple) -> None:
        self.state[tup.values[0]] = self.state.get(tup.values[0], 0) + 1


class Saves(Bolt):
    def process(self, tup: Tuple) -> None:
        self.context.state.save({tup.values[0]: True})
        self.ack(tup)


class Stateful(Topology):
    name = "stateful"
    words = Words.spec()
    count = Counts.spec(inputs=[words])
    save = Saves.spec(inputs=[words])


def test_state_of_components_comes_back_from_a_copy_of_its_folder(tmp_path: Path) -> None:
    run_topology(Stateful, {"words": [["a"], ["b"], ["a"]]}, state_dir=tmp_path / "state")
    shutil.copytree(tmp_path / "state", tmp_path / "saved")
    shutil.rmtree(tmp_path / "state")
    with TopologyHarness(Stateful, {"words": [["b"]]}, state_dir=tmp_path / "saved") as harness:
        harness.run()
        assert dict(harness.tasks("count")[0].state.items()) == {"a": 2, "b": 2}
        assert dict(harness.tasks("save")[0].context.state.items()) == {"a": True, "b": True}
