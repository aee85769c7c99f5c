"""ZooKeeper's answer to a commit is lost, whether the commit landed or not: nothing is ever
doubled.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.names import placement_key
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.rebalance import finish_rebalance, rebalance
from storm_dagster.zk.transaction import Transaction
from storm_rigs.operations.acting import submit
from storm_rigs.operations.losing import LosingCluster
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


@pytest.mark.parametrize("landed", [True, False])
def test_a_lost_reply_is_read_again_and_never_doubles_anything(world: World, landed: bool) -> None:
    assert isinstance(world.cluster.state.transaction(), Transaction)
    for number in (1, 2, 3):
        cluster = LosingCluster(world.cluster, number, landed)
        name = f"wc{number}"
        submit(
            world.context(cluster=cluster),
            name=name,
            token=f"t{number}",
            handle=world.upload(f"h{number}"),
        )
        assert cluster.state.left <= 0
        (topology,) = world.cluster.load_view().topologies.values()
        assert topology.base.status == "ACTIVE"
        assert len(world.cluster.state.get_children(paths.TOKENS)) == number
        lifecycle.kill(world.context(), name, 0)


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("away", [0, 2])
def test_a_command_outlives_an_election_of_zookeeper(world: World, landed: bool, away: int) -> None:
    """The reply is lost, then ZooKeeper is away for a moment: the command is done once, and its
    caller knows.
    """

    def losing() -> Any:
        return world.context(cluster=LosingCluster(world.cluster, 1, landed, away))

    topology_id = world.submit("wc")
    assert lifecycle.deactivate(losing(), "wc").status == "INACTIVE"
    assert lifecycle.activate(losing(), "wc").status == "ACTIVE"
    lifecycle.restart(losing(), "wc")
    assert world.assignment("wc").restarts == 1
    waiting = rebalance(losing(), "wc", workers=2, wait_secs=5, waits_for_delay=False)
    assert (waiting.outcome, waiting.status) == ("waiting", "REBALANCING")
    done = finish_rebalance(losing(), topology_id)
    assert (
        done.outcome == "assigned" and done.moved > 0 and done.assignment == world.assignment("wc")
    )
    reasons = json.loads(world.blobs.read(placement_key(topology_id)))
    assert len(reasons["workers"]) == 2, "those of the placement that was lost and found"
    assert lifecycle.kill(losing(), "wc", 60).status == "KILLED"


@pytest.mark.parametrize("away", [0, 2])
def test_a_rebalance_that_does_not_fit_fails_despite_a_lost_reply(world: World, away: int) -> None:
    topology_id = world.submit("wc")
    rebalance(world.context(), "wc", workers=3, wait_secs=5, waits_for_delay=False)
    world.cluster.state.delete_node(paths.supervisor("s1"))
    world.supervisor("s2", ports=(6900,))
    with pytest.raises(Unavailable, match="slot"):
        finish_rebalance(
            world.context(cluster=LosingCluster(world.cluster, 1, True, away)), topology_id
        )
    assert world.named().base.status == "ACTIVE" and world.named().base.workers == 1


def test_an_update_outlives_an_election_during_its_drain(world: World) -> None:
    old = world.submit("wc", conf={"topology.message.timeout.secs": 1})
    world.run_workers(old)
    world.upload("new")
    cluster = LosingCluster(world.cluster, 10**6, True, away=3)

    def sleep(seconds: float) -> None:
        if world.named().base.status == "INACTIVE":
            cluster.state.left = 0  # The old topology is being drained.
        time.sleep(seconds)

    report = lifecycle.update(
        world.context(cluster=cluster, sleep=sleep), "wc", token="t2", handle="new"
    )
    assert cluster.away == 0 and report.topology_id != old
    assert world.named().id == report.topology_id and world.named().base.status == "ACTIVE"
