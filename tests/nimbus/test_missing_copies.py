"""One nimbus alive where two copies are wanted: what runs is healed and rebalanced, and a
submission can be forced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.client.http import NimbusClient
from storm_dagster.client.uploads import upload
from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model import paths
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.names import placement_key
from storm_dagster.model.topology import decode_topology
from storm_dagster.model.view import TopologyView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.healing import reassign
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.packaging.archive import Archive, hash_file
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.operations.acting import submit
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.nimbus_thread import NimbusThread
from storm_rigs.stage.records import ARCHIVE, WORD_COUNT, World

pytestmark = pytest.mark.zookeeper

WANTED = {"topology.min.replication.count": 2, "topology.max.replication.wait.time.sec": 1}


@pytest.fixture
def alone(stage: Stage) -> NimbusThread:
    return stage.nimbus(conf=WANTED).await_leading()


@pytest.fixture
def ctx(alone: NimbusThread, zk_conf: dict[str, object]) -> Iterator[OperationsContext]:
    conf = load_cluster_conf(None, {**zk_conf, **WANTED})
    cluster = StormClusterState.open(zk_conf)
    with NimbusBlobClient(alone.url, deadline_secs=0.1) as blobs:
        yield OperationsContext(cluster=cluster, blobs=blobs, conf=conf, planner=plan_placement)
    cluster.disconnect()


@pytest.fixture
def world(alone: NimbusThread, ctx: OperationsContext) -> World:
    """What a test does to the cluster; its own blob store, which nothing here uses, is the nimbus's
    folder.
    """
    from storm_dagster.blobstore.local import LocalBlobStore

    world = World(ctx.cluster, LocalBlobStore(alone.folder / "blobs"), dict(WANTED))
    for supervisor_id in ("s1", "s2"):
        world.supervisor(supervisor_id)
    return world


def handle_of(alone: NimbusThread, tmp_path: object, *, allow_degraded: bool) -> str:
    from pathlib import Path

    packed = Path(str(tmp_path)) / "archive.zip"
    packed.write_bytes(ARCHIVE)
    archive = Archive(packed, hash_file(packed), len(ARCHIVE), 0)
    with NimbusClient([alone.url]) as nimbus:
        done = upload(
            nimbus.accepting_fewer(allow_degraded),
            archive=archive,
            conf={"topology.workers": 2},
            topology=decode_topology(json.dumps(WORD_COUNT).encode()),
        )
    return done.handle


@pytest.fixture
def topology(
    alone: NimbusThread, ctx: OperationsContext, world: World, tmp_path: object
) -> TopologyView:
    submit(
        ctx,
        name="wc",
        token="t",
        handle=handle_of(alone, tmp_path, allow_degraded=True),
        allow_degraded=True,
    )
    world.run_workers(world.named().id)
    return world.named()


def test_a_submission_reaches_its_end_only_when_degraded_is_allowed(
    alone: NimbusThread, ctx: OperationsContext, world: World, tmp_path: object
) -> None:
    with pytest.raises(Unavailable, match="2 were asked for"):
        handle_of(alone, tmp_path, allow_degraded=False)
    handle = handle_of(alone, tmp_path, allow_degraded=True)
    with pytest.raises(Unavailable, match="2 were asked for"):
        submit(ctx, name="wc", token="strict", handle=handle)
    assert world.find() is None
    submit(ctx, name="wc", token="lenient", handle=handle, allow_degraded=True)
    assert world.named().base.status == "ACTIVE"


def test_a_lost_host_is_healed(
    ctx: OperationsContext, world: World, topology: TopologyView
) -> None:
    lost = next(worker for worker in world.assignment().workers if worker.node == "s2")
    world.cluster.state.delete_node(paths.supervisor("s2"))
    world.stop_worker(topology.id, *lost.slot)
    assert topology.assignment_at is not None
    cause = Cause(
        topology.id,
        "wc",
        topology.assignment_at.version,
        "lost_host",
        "s2",
        "s2",
        lost.port,
        lost.ids,
    )
    (report,) = reassign(ctx, [cause])
    assert (report.status, report.error) == ("assigned", None)
    explained = json.loads(ctx.blobs.read(placement_key(topology.id)))
    assert {worker["node"] for worker in explained["workers"]} == {"s1"}


def test_a_rebalance_ends(ctx: OperationsContext, world: World, topology: TopologyView) -> None:
    report = rebalance(ctx, "wc", workers=1, wait_secs=0)
    assert (report.outcome, world.named().base.status) == ("assigned", "ACTIVE")
    assert len(world.assignment().workers) == 1
