"""Rebalance: parallelism and spread of a living topology."""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, InvalidRequest, NotAlive, Unavailable
from storm_dagster.model.names import code_key
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.rebalance import finish_rebalance, rebalance
from storm_rigs.stage.records import Crash, World

pytestmark = pytest.mark.zookeeper


def view_of(world: World, name: str = "wc") -> Any:
    return world.cluster.load_view().topology_named(name)


def test_nothing_is_disturbed_when_nothing_changes(world: World) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    before = view_of(world)
    report = rebalance(world.context(), "wc")
    assert report.outcome == "unchanged" and report.status == "ACTIVE"
    after = view_of(world)
    assert (after.base_at, after.assignment_at) == (before.base_at, before.assignment_at)


def test_more_executors_get_new_ids_above_the_highest(world: World) -> None:
    world.submit("wc")
    report = rebalance(world.context(), "wc", executors={"split": 4}, wait_secs=0)
    assert report.tasks_added == (8, 9) and report.outcome == "assigned"
    topology = view_of(world)
    assert topology.tasks.components["split"].ids == (1, 2, 8, 9)
    assert topology.base.status == "ACTIVE" and topology.base.executors["split"] == 4
    assert topology.base.delay_secs is None and topology.base.previous_status is None
    assert topology.assignment.type == "ScaleTopology"
    assert topology.assignment.task_slots().keys() == topology.tasks.component_of().keys()
    assert not world.cluster.state.exists(paths.topology(topology.id) + "/rebalance")


def test_fewer_executors_lose_the_highest_ids(world: World) -> None:
    world.submit("wc")
    rebalance(world.context(), "wc", executors={"split": 4}, wait_secs=0)
    report = rebalance(world.context(), "wc", executors={"split": 1}, wait_secs=0)
    assert report.tasks_removed == (2, 8, 9)
    assert view_of(world).tasks.components["split"].ids == (1,)


def test_more_workers_move_few_tasks(world: World) -> None:
    world.submit("wc")
    before = view_of(world).assignment.task_slots()
    report = rebalance(world.context(), "wc", workers=2, wait_secs=0)
    after = view_of(world).assignment.task_slots()
    moved = [task for task in before if before[task] != after[task]]
    assert len(set(after.values())) == 2
    assert len(moved) == report.moved <= 4
    starts = view_of(world).assignment.start_secs()
    assert len(starts) == 7


def test_tasks_of_a_renamed_host_get_its_new_name(world: World) -> None:
    world.submit("wc")
    for name in world.cluster.load_view().supervisors:
        world.supervisor(name, host=f"renamed-{name}")
    assert rebalance(world.context(), "wc", wait_secs=0).outcome == "assigned"
    workers = view_of(world).assignment.workers
    assert {(worker.node, worker.host) for worker in workers} == {
        (w.node, f"renamed-{w.node}") for w in workers
    }
    assert rebalance(world.context(), "wc", wait_secs=0).outcome == "unchanged"


def test_an_inactive_topology_stays_inactive(world: World) -> None:
    world.submit("wc", inactive=True)
    rebalance(world.context(), "wc", workers=2, wait_secs=0)
    assert view_of(world).base.status == "INACTIVE"


def test_a_dry_run_changes_nothing(world: World) -> None:
    world.submit("wc")
    before = view_of(world)
    report = rebalance(world.context(), "wc", workers=3, dry_run=True)
    assert (
        report.outcome == "planned"
        and report.placement is not None
        and len(report.placement.workers) == 3
    )
    assert view_of(world).base_at == before.base_at


def test_what_does_not_fit_never_disturbs_the_topology(world: World) -> None:
    world.submit("wc")
    before = view_of(world)
    with pytest.raises(Unavailable, match="slots"):
        rebalance(world.context(), "wc", workers=9, executors={"split": 20}, wait_secs=0)
    assert view_of(world).base_at == before.base_at


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executors": {"spilt": 2}}, "did you mean 'split'"),
        ({"executors": {"split": 0}}, "at least 1"),
        ({"executors": {"__topology_master": 2}}, "has no component"),
        ({"workers": 0}, "at least 1"),
    ],
)
def test_wrong_requests_are_refused(world: World, options: dict[str, Any], message: str) -> None:
    world.submit("wc")
    with pytest.raises(InvalidRequest, match=message):
        rebalance(world.context(), "wc", wait_secs=0, **options)


def test_a_delayed_rebalance_is_finished_by_the_leader(world: World) -> None:
    world.submit("wc")
    report = rebalance(world.context(), "wc", workers=2, wait_secs=5, waits_for_delay=False)
    assert (report.outcome, report.status) == ("waiting", "REBALANCING")
    with pytest.raises(Conflict, match="REBALANCING and cannot be rebalanced"):
        rebalance(world.context(), "wc", workers=3)
    first = lifecycle.finish_due(world.context(), boot_now=0.0)
    assert view_of(world).base.status == "REBALANCING" and first.done == ()
    lifecycle.finish_due(world.context(), first.memory, boot_now=5.0)
    assert view_of(world).base.status == "ACTIVE" and len(view_of(world).assignment.workers) == 2
    assert finish_rebalance(world.context(), view_of(world).id).outcome == "unchanged"


def test_a_rebalance_goes_on_when_its_code_and_its_planner_are_back(world: World) -> None:
    """Only a planner that answers can say that it does not fit."""
    topology_id = world.submit("wc")
    rebalance(world.context(), "wc", workers=2, wait_secs=5, waits_for_delay=False)

    def away(batch: Any) -> Any:
        raise Unavailable("Spark does not answer")

    with pytest.raises(Unavailable, match="Spark does not answer"):
        finish_rebalance(world.context(planner=away), topology_id)
    key = code_key(view_of(world).code_dir)
    code = world.blobs.read(key)
    world.blobs.delete(key)
    with pytest.raises(Unavailable, match="no nimbus holds its code"):
        finish_rebalance(world.context(), topology_id)
    waiting = lifecycle.finish_due(world.context(), boot_now=0.0).memory
    assert lifecycle.finish_due(world.context(), waiting, boot_now=5.0).done == ()
    assert view_of(world).base.status == "REBALANCING"
    world.blobs.put(key, code)
    lifecycle.finish_due(world.context(), waiting, boot_now=6.0)
    assert view_of(world).base.status == "ACTIVE" and len(view_of(world).assignment.workers) == 2


def test_a_run_that_stays_waits_for_the_delay(world: World) -> None:
    world.submit("wc")
    slept: list[float] = []
    report = rebalance(world.context(sleep=slept.append), "wc", workers=2, wait_secs=5)
    assert sum(slept) == 5 and report.outcome == "assigned"


def test_a_kill_during_a_rebalance_wins(world: World) -> None:
    topology_id = world.submit("wc")
    rebalance(world.context(), "wc", workers=2, wait_secs=5, waits_for_delay=False)
    lifecycle.kill(world.context(), "wc", 10)
    with pytest.raises(NotAlive, match="was killed while it was rebalanced"):
        finish_rebalance(world.context(), topology_id)
    assert view_of(world).base.status == "KILLED"
    lifecycle.remove(world.context(), topology_id)
    assert view_of(world) is None and world.cluster.state.get_children(paths.TOPOLOGY) == []


def test_a_rebalance_that_no_longer_fits_gives_the_status_back(world: World) -> None:
    topology_id = world.submit("wc")
    before = view_of(world)
    rebalance(world.context(), "wc", workers=3, wait_secs=5, waits_for_delay=False)
    world.cluster.state.delete_node(paths.supervisor("s1"))
    world.supervisor("s2", ports=(6900,))
    with pytest.raises(Unavailable):
        finish_rebalance(world.context(), topology_id)
    after = view_of(world)
    assert after.base.status == "ACTIVE" and after.base.workers == 1
    assert after.assignment_at == before.assignment_at
    assert not world.cluster.state.exists(paths.topology(topology_id) + "/rebalance")


def test_who_plans_while_another_one_finishes_has_nothing_left_to_do(world: World) -> None:
    """A run plans with Spark for a second; in it lifecycle_sensor may do the same rebalance."""
    topology_id = world.submit("wc")
    rebalance(
        world.context(), "wc", workers=2, executors={"split": 3}, wait_secs=5, waits_for_delay=False
    )
    others: list[Any] = []

    def planner(batch: Any) -> Any:
        if not others:
            others.append(finish_rebalance(world.context(), topology_id))
        return plan_placement(batch)

    assert finish_rebalance(world.context(planner=planner), topology_id).outcome == "unchanged"
    assert others[0].outcome == "assigned" and view_of(world).base.executors["split"] == 3


def test_tasks_that_are_fixed_are_only_regrouped(world: World) -> None:
    topology = {
        "spouts": {"s": {"object": {"python": "m:S"}, "outputs": {"default": {"fields": ["x"]}}}},
        "bolts": {
            "b": {
                "object": {"python": "m:B"},
                "parallelism": 2,
                "conf": {"topology.tasks": 4},
                "inputs": [{"component": "s", "grouping": {"type": "shuffle"}}],
            }
        },
    }
    world.submit("wc", topology=topology)
    assert view_of(world).tasks.components["b"].ids == (1, 2, 3, 4)
    report = rebalance(world.context(), "wc", executors={"b": 4}, wait_secs=0)
    assert report.tasks_added == () and view_of(world).base.executors["b"] == 4
    assert view_of(world).tasks.components["b"].ids == (1, 2, 3, 4)
    with pytest.raises(InvalidRequest, match=r"topology\.tasks"):
        rebalance(world.context(), "wc", executors={"b": 5}, wait_secs=0)


def test_interrupted_after_every_step(world: World) -> None:
    world.submit("wc")
    number = 0
    while True:
        number += 1
        left = number

        def crash(name: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Crash(name)

        wanted = 1 + number % 3
        try:
            report = rebalance(world.context(checkpoint=crash), "wc", workers=wanted, wait_secs=0)
            if report.outcome == "assigned":
                break
        except Crash:
            # The spouts of a topology whose tasks have moved resume five seconds later.
            seen = lifecycle.finish_due(world.context(), boot_now=0.0)
            lifecycle.finish_due(world.context(), seen.memory, boot_now=6.0)
        topology = view_of(world)
        assert topology.base.status == "ACTIVE"
        assert topology.base.workers == len(topology.assignment.workers)
        if topology.base.workers != wanted:
            rebalance(world.context(), "wc", workers=wanted, wait_secs=0)
    assert number >= 4


def test_more_workers_than_executors_are_kept_with_a_sentence(world: World) -> None:
    """Five of the user's and an acker."""
    world.submit("wc")
    report = rebalance(world.context(), "wc", workers=8, dry_run=True)
    (warning,) = report.warnings
    assert "'wc' keeps topology.workers 8, but has only 6 executors" in warning
    assert rebalance(world.context(), "wc", workers=8, wait_secs=0).outcome == "assigned"
    topology = view_of(world)
    assert (topology.base.workers, len(topology.assignment.workers)) == (8, 6)
    assert rebalance(world.context(), "wc", wait_secs=0).outcome == "unchanged"


@pytest.mark.parametrize(
    ("state", "workers", "message"),
    [
        ("ACTIVE", 0, "rebalance of 'wc'.*topology.workers.*at least 1"),
        ("KILLED", 3, "'wc' is KILLED"),
        ("REBALANCING", 3, "'wc' is REBALANCING"),
    ],
)
def test_a_refused_rebalance_names_the_topology_and_leaves_nothing_behind(
    world: World, state: str, workers: int, message: str
) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    if state == "KILLED":
        lifecycle.kill(world.context(), "wc", 60)
    if state == "REBALANCING":
        rebalance(world.context(), "wc", workers=4, wait_secs=60, waits_for_delay=False)
    before = view_of(world)
    children = world.cluster.state.find_children(paths.topology(before.id))
    with pytest.raises((Conflict, InvalidRequest, NotAlive), match=message):
        rebalance(world.context(), "wc", workers=workers, wait_secs=60)
    assert view_of(world) == before
    assert world.cluster.state.find_children(paths.topology(before.id)) == children
