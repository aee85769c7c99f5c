"""A pause of healing: what it stops, what it does not, and who ends it."""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.core.liveness.causes import Cause, LivenessMemory
from storm_dagster.core.liveness.detection import observe
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model import paths
from storm_dagster.model.errors import Fenced, InvalidRequest
from storm_dagster.model.placement import PlacementBatch, PlacementResult
from storm_dagster.operations.context import load_runnable
from storm_dagster.operations.live.healing import reassign
from storm_dagster.operations.live.healing_pause import pause_healing, resume_healing
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.read.explaining import problems
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


def lose_host(world: World) -> tuple[str, list[Cause]]:
    """A topology that has lost the host s2, and the causes."""
    topology_id = world.submit("wc", conf={"topology.workers": 2})
    world.run_workers(topology_id)
    limits = LivenessLimits()
    seen = observe(
        world.cluster.load_view(), LivenessMemory(), limits, boot_id="b", boot_now=1000.0
    )
    world.cluster.state.delete_node(paths.supervisor("s2"))
    view = world.cluster.load_view()
    for worker in view.topologies[topology_id].workers:
        if worker.node == "s2":
            world.stop_worker(topology_id, "s2", worker.port)
    view = world.cluster.load_view()
    seen = observe(view, seen.memory, limits, boot_id="b", boot_now=1001.0)
    assert seen.causes
    return topology_id, list(seen.causes)


def hosts(world: World, topology_id: str) -> set[str]:
    return {worker.node for worker in world.cluster.load_view().topologies[topology_id].workers}


def test_in_a_pause_a_run_moves_nothing_and_a_person_may(world: World) -> None:
    topology_id, causes = lose_host(world)
    record = pause_healing(world.context(), secs=600, user="ann")
    assert world.cluster.load_view().healing_pause == record
    assert record.until_ms - record.since_ms == 600_000
    (result,) = reassign(world.context(), causes)
    assert result.status == "paused" and hosts(world, topology_id) == {"s1", "s2"}
    (by_hand,) = reassign(world.context(), causes, despite_pause=True)
    assert by_hand.status == "assigned" and hosts(world, topology_id) == {"s1"}


def test_a_rebalance_in_a_pause_moves_dead_tasks(world: World) -> None:
    topology_id, _ = lose_host(world)
    pause_healing(world.context(), secs=600)
    rebalance(world.context(), "wc", wait_secs=0)
    assert hosts(world, topology_id) == {"s1"}


def test_a_reassignment_planned_before_a_pause_is_not_committed(world: World) -> None:
    topology_id, causes = lose_host(world)
    pauses: list[Any] = []

    def plan(batch: PlacementBatch) -> PlacementResult:
        if not pauses:
            pauses.append(pause_healing(world.context(), secs=600))
        return plan_placement(batch)

    (result,) = reassign(world.context(planner=plan), causes)
    assert pauses and result.status == "paused"
    assert hosts(world, topology_id) == {"s1", "s2"}


def test_a_pause_is_replaced_and_only_the_judged_one_ends(world: World) -> None:
    first = pause_healing(world.context(), secs=600)
    second = pause_healing(world.context(), secs=60)
    assert not resume_healing(world.context(), until_ms=first.until_ms)
    assert world.cluster.healing_pause() == second
    assert resume_healing(world.context(), until_ms=second.until_ms)
    assert world.cluster.load_view().healing_pause is None
    assert not resume_healing(world.context())


def test_a_pause_is_refused_beyond_a_day_and_to_a_former_leader(world: World) -> None:
    for secs in (0, 86_401):
        with pytest.raises(InvalidRequest, match="choose 1 to 86400 s"):
            pause_healing(world.context(), secs=secs)
    with pytest.raises(Fenced):
        pause_healing(world.context(epoch=0), secs=60)
    assert not world.cluster.state.exists(paths.HEALING_PAUSE)


def test_a_task_that_waits_for_the_end_of_a_pause_says_so(world: World) -> None:
    topology_id, causes = lose_host(world)
    pause_healing(world.context(), secs=600, user="ann")
    view = world.cluster.load_view()
    topology = view.topologies[topology_id]
    dead = [task for cause in causes for task in cause.tasks]
    (sentence,) = problems(view, topology, load_runnable(world.context(), topology), dead)
    assert "but healing is paused by ann until " in sentence
    assert "`storm-dagster resume-healing`" in sentence
