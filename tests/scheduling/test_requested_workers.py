"""Wishes that cannot be followed, Storm's bad slots with their start times, and healing without
slots.
"""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.core.reassignment import assignment_of
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model.placement import (
    PlacementBatch,
    SupervisorSlots,
    TopologyPlacement,
    TopologyToPlace,
    UserWorker,
)
from storm_rigs.placement.placement_clusters import placed_worker, small_topology, supervisor

FOUR = range(6900, 6904)
TWO = (
    placed_worker("s1", "h1", 6900, (1, 3, 6, 7)),
    placed_worker("s2", "h2", 6900, (2, 4, 5)),
)


def word_count(**more: Any) -> TopologyToPlace:
    """split 1-2, count 3-4, acker 5, topology master 6, spout 7."""
    return small_topology(
        bolts={"split": (2, ["spout"]), "count": (2, ["split"])}, spouts={"spout": 1}, **more
    )


def place(supervisors: list[SupervisorSlots], topology: TopologyToPlace) -> TopologyPlacement:
    batch = PlacementBatch(supervisors=tuple(supervisors), topologies=(topology,))
    return plan_placement(batch).placement("wc")


def two_nodes() -> list[SupervisorSlots]:
    return [supervisor(1, FOUR), supervisor(2, FOUR)]


def test_user_defined_workers_alone_above_the_number_are_dropped_with_a_warning() -> None:
    workers = tuple(UserWorker(host="h2", components={"split": 1}) for _ in range(2))
    placement = place(two_nodes(), word_count(workers=1, user_workers=workers))
    assert placement.status == "assigned"
    assert placement.warnings == (
        "use.userdefine.assignment asks for 2 workers, 1 can be had: none of them is followed; "
        "raise topology.workers or ask for fewer",
    )


def test_user_defined_workers_beside_kept_old_ones_above_the_number_fail() -> None:
    wanted = UserWorker(host="h2", port=6903, components={"split": 1})
    topology = word_count(event="rebalance", workers=2, old=TWO, user_workers=(wanted,))
    placement = place(two_nodes(), topology)
    assert (placement.status, placement.error_type) == ("failed", "InvalidRequest")
    assert placement.error == (
        "topology 'wc' places 2 workers, but use.userdefine.assignment asks for 1 and 2 old workers would be kept "
        "beside: raise topology.workers, ask for fewer workers, or place all again (rebalance with reassign, or "
        "without use.old.assignment)"
    )
    assert place(two_nodes(), topology.model_copy(update={"workers": 3})).status == "assigned"
    assert place(two_nodes(), topology.model_copy(update={"reassign": True})).status == "assigned"


def test_a_user_defined_worker_that_has_its_slot_is_kept() -> None:
    wanted = UserWorker(host="h2", components={"split": 1})
    first = place(two_nodes(), word_count(workers=2, user_workers=(wanted,)))
    again = word_count(event="rebalance", workers=2, old=first.workers, user_workers=(wanted,))
    assert place(two_nodes(), again).status == "unchanged"


def test_user_defined_workers_and_the_backups_above_the_number_fail() -> None:
    wanted = UserWorker(host="h2", components={"spout": 1})
    old = (
        placed_worker("s1", "h1", 6900, (1, 3)),
        placed_worker("s2", "h2", 6900, (2, 4)),
    )
    topology = word_count(workers=2, use_old=True, old=old, user_workers=(wanted,))
    placement = place(two_nodes(), topology)
    assert (placement.status, placement.error_type) == ("failed", "InvalidRequest")
    alone = place(two_nodes(), topology.model_copy(update={"user_workers": (), "workers": 1}))
    assert alone.status == "assigned"
    assert alone.warnings[0].startswith("use.old.assignment asks for 2 workers, 1 can be had")


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (
            {"user_workers": (UserWorker(host="h1", components={"split": 1}),)},
            "use.userdefine.assignment",
        ),
        ({"differ_node": ("split",)}, "task.on.differ.node (split)"),
        ({"single_master": True}, "topology.master.single.worker"),
    ],
)
def test_even_refuses_what_it_cannot_keep(wanted: dict[str, Any], named: str) -> None:
    placement = place(two_nodes(), word_count(strategy="even", workers=2, **wanted))
    assert (placement.status, placement.error_type) == ("failed", "InvalidRequest")
    assert placement.error == (
        f"topology 'wc' uses the even strategy, which knows no {named}: remove that, or set "
        "topology.scheduler.strategy=balanced"
    )
    # One that runs already is healed all the same.
    healed = place(
        two_nodes(),
        word_count(strategy="even", workers=2, event="monitor", old=TWO, dead=(2, 4, 5), **wanted),
    )
    assert healed.status == "assigned"
    assert healed.warnings == (f"the even strategy knows no {named}: ignored",)


def test_even_says_that_it_leaves_the_backup_aside() -> None:
    placement = place(two_nodes(), word_count(strategy="even", workers=2, use_old=True, old=TWO))
    assert placement.status == "assigned"
    assert placement.warnings == ("the even strategy knows no use.old.assignment: ignored",)


def test_storms_bad_slots_keep_the_start_times_of_what_stays() -> None:
    """Nine executors on one slot, two slots appear, then eight more."""
    nine = small_topology(
        bolts={"b": (7, ["spout"])},
        spouts={"spout": 1},
        ackers=0,
        strategy="even",
        event="monitor",
        workers=4,
    )
    old = (placed_worker("s1", "h1", 6900, tuple(range(1, 10))),)

    def record(placement: TopologyPlacement, previous: Any, now: int) -> Any:
        return assignment_of(placement, topology_id="wc-1-1", previous=previous, now_secs=now)

    one = place([supervisor(1, [6900])], nine.model_copy(update={"workers": 1, "event": "new"}))
    first = record(one, None, 100)
    three = place(
        [supervisor(1, [6900]), supervisor(2, [6900, 6901])], nine.model_copy(update={"old": old})
    )
    assert sorted(len(worker.ids) for worker in three.workers) == [3, 3, 3]
    second = record(three, first, 200)
    wide = [supervisor(1, [6900]), supervisor(2, [6900, 6901]), supervisor(3, range(6900, 6908))]
    four = place(wide, nine.model_copy(update={"old": three.workers}))
    assert sorted(len(worker.ids) for worker in four.workers) == [2, 2, 2, 3]
    third = record(four, second, 300)
    (stayed,) = [worker for worker in four.workers if len(worker.ids) == 3]
    assert stayed.tasks in [worker.tasks for worker in three.workers]
    starts = third.start_secs()
    assert {starts[task] for task in stayed.ids} == {
        second.start_secs()[task] for task in stayed.ids
    }
    was, now = second.task_slots(), third.task_slots()
    moved = {task for task in now if was[task] != now[task]}
    assert len(moved) == four.moved > 0
    assert {task for task, start in starts.items() if start == 300} == moved


def test_balanced_healing_without_enough_slots_leaves_the_dead_waiting_with_the_reason() -> None:
    old = (*TWO[:1], *(TWO[1].model_copy(update={"tasks": "2,4"}),), placed_worker("s3", "h3", 1, (5,)))  # fmt: skip
    topology = word_count(event="monitor", workers=3, old=old, dead=(2, 4, 5))
    placement = place([supervisor(1, [6900, 6901])], topology)
    assert placement.status == "failed"
    assert placement.error == (
        "topology 'wc' needs 2 slots, 1 is free (s1: 1): add a supervisor or set topology.workers=2"
    )
    assert placement.unassigned == dict.fromkeys(
        (2, 4, 5), "its topology needs more slots than are free"
    )
    later = place([supervisor(1, [6900, 6901]), supervisor(4, [6900])], topology)
    assert later.status == "assigned"
    assert later.moved == 3
