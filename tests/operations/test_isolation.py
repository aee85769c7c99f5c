"""Isolation and reserve of topologies on a real cluster state: refusals and warnings name topology
and key, and an isolated topology gets the slots of its hosts back.
"""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.core.liveness.causes import LivenessMemory
from storm_dagster.core.liveness.detection import observe
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.model import paths
from storm_dagster.model.errors import InvalidTopology, Unavailable
from storm_dagster.operations.live.blacklist import change_blacklist
from storm_dagster.operations.live.healing import reassign
from storm_dagster.operations.live.rebalance import rebalance
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


def isolated(*hosts: str, **more: Any) -> dict[str, Any]:
    return {"isolation.scheduler.machines": list(hosts), "topology.workers": 2, **more}


@pytest.mark.parametrize("strategy", ["even", "balanced"])
def test_a_reserve_above_the_cluster_is_refused_and_leaves_no_topology(
    world: World, strategy: str
) -> None:
    conf = {"jstorm.reserve.workers": 100, "topology.scheduler.strategy": strategy}
    with pytest.raises(Unavailable, match=r"'wc' needs .* lower jstorm\.reserve\.workers"):
        world.submit("wc", conf=conf)
    view = world.cluster.load_view()
    assert not view.topologies
    assert not view.used_ports()
    assert not world.cluster.state.get_children(paths.ASSIGNMENTS)


def test_a_submission_with_every_host_blacklisted_is_refused(world: World) -> None:
    change_blacklist(world.context(), add=["s1", "s2"])
    with pytest.raises(Unavailable, match=r"'wc' cannot be placed: every host is blacklisted"):
        world.submit("wc")
    assert not world.cluster.load_view().topologies


@pytest.mark.parametrize(
    ("hosts", "nodes", "sentence"),
    [
        (("s1", "s8", "s9"), {"s1"}, "no supervisor is registered on s8, s9"),
        (("s1", "s1"), {"s1"}, "lists s1 more than once"),
        (("s9",), {"s1", "s2"}, "so the topology is placed on any host"),
    ],
)
def test_isolation_hosts_without_effect_are_a_warning(
    world: World, hosts: tuple[str, ...], nodes: set[str], sentence: str
) -> None:
    world.submit("wc", conf=isolated(*hosts))
    assert {worker.node for worker in world.assignment().workers} == nodes
    plan = rebalance(world.context(), "wc", reassign=True, dry_run=True)
    assert plan.placement is not None
    (warning,) = plan.placement.warnings
    assert warning.startswith("topology 'wc': ")
    assert "isolation.scheduler.machines" in warning
    assert sentence in warning


@pytest.mark.parametrize(
    ("hosts", "sentence"),
    [
        (
            [f"host-{number:05}" for number in range(5000)],
            "the 5000 hosts of isolation.scheduler.machines take 70000 bytes",
        ),
        ([""], "isolation.scheduler.machines lists '', which is no host name"),
        (["s1", "s 2"], "isolation.scheduler.machines lists 's 2', which is no host name"),
        (["s1\n"], r"isolation.scheduler.machines lists 's1\\n', which is no host name"),
    ],
    ids=["many", "empty", "space", "line end"],
)
def test_isolation_hosts_that_no_record_can_hold_are_refused(
    world: World, hosts: list[str], sentence: str
) -> None:
    before = world.blobs.keys("")
    with pytest.raises(InvalidTopology, match=f"^topology 'wc': {sentence}"):
        world.submit("wc", conf=isolated(*hosts))
    assert not world.cluster.load_view().topologies
    assert [key for key in world.blobs.keys("") if not key.startswith("upload.")] == list(before)


def test_an_isolated_topology_is_spread_when_its_host_is_back(world: World) -> None:
    conf = isolated("s1", "s2", **{"topology.scheduler.strategy": "even"})
    for node in ("s1", "s2", "s3"):
        world.supervisor(node, ports=(6900,))
    topology_id = world.submit("wc", conf=conf)
    world.run_workers(topology_id)
    memory, now = LivenessMemory(), 1000.0

    def heal(after: float) -> list[str]:
        nonlocal memory, now
        now += after
        view = world.cluster.load_view()
        # No daemon of this world sends heartbeats.
        never = float("inf")
        limits = LivenessLimits(task_secs=never, launch_secs=never, supervisor_secs=never)
        result = observe(view, memory, limits, boot_id="b", boot_now=now)
        memory = result.memory
        reassign(world.context(), result.causes)
        world.run_workers(topology_id)
        return [cause.kind for cause in result.causes]

    assert heal(1) == []
    (lost,) = [worker for worker in world.assignment().workers if worker.node == "s2"]
    world.lose_supervisor("s2")
    world.stop_worker(topology_id, "s2", lost.port)
    assert heal(1) == ["lost_host"]
    assert {worker.node for worker in world.assignment().workers} == {"s1"}
    # s3 has free slots all the time, which this topology must not use.
    assert heal(700) == []
    world.supervisor("s2", ports=(6900,))
    heal(1)
    assert heal(700) == ["too_few_workers"]
    assert {worker.node for worker in world.assignment().workers} == {"s1", "s2"}
