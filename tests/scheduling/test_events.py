"""Monitor and rebalance events, requested workers, isolation, several topologies."""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model.placement import (
    PlacementBatch,
    SupervisorSlots,
    TopologyPlacement,
    TopologyToPlace,
    UserWorker,
)
from storm_dagster.model.records import WorkerSlot
from storm_rigs.placement.placement_clusters import placed_worker, small_topology, supervisor

FOUR = range(6900, 6904)


def word_count(**more: Any) -> TopologyToPlace:
    """split 1-2, count 3-4, acker 5, topology master 6, spout 7."""
    return small_topology(
        bolts={"split": (2, ["spout"]), "count": (2, ["split"])}, spouts={"spout": 1}, **more
    )


def worker(node: int, port: int, *tasks: int, host: str | None = None, **more: Any) -> WorkerSlot:
    return placed_worker(f"s{node}", host or f"h{node}", port, tasks, **more)


def place(supervisors: list[SupervisorSlots], *topologies: TopologyToPlace) -> TopologyPlacement:
    result = plan_placement(PlacementBatch(supervisors=tuple(supervisors), topologies=topologies))
    return result.placement("wc")


def slots(placement: TopologyPlacement) -> dict[str, list[int]]:
    return {worker.slot.key: list(worker.ids) for worker in placement.workers}


TWO = (worker(1, 6900, 1, 3, 6, 7), worker(2, 6900, 2, 4, 5))


def test_nothing_dead_leaves_all_as_it_is() -> None:
    placement = place(
        [supervisor(1, FOUR), supervisor(2, FOUR)], word_count(event="monitor", workers=2, old=TWO)
    )
    assert placement.status == "unchanged"
    assert slots(placement) == {"s1:6900": [1, 3, 6, 7], "s2:6900": [2, 4, 5]}
    assert placement.kept == tuple(worker.slot.key for worker in placement.workers)
    assert placement.reasons[2] == "its worker is alive and was left alone"


def test_one_dead_task_moves_its_whole_worker_to_another_port() -> None:
    topology = word_count(event="monitor", workers=2, old=TWO, dead=(4,))
    placement = place([supervisor(1, FOUR), supervisor(2, FOUR)], topology)
    # The dead worker's port is not offered in this round.
    assert slots(placement) == {"s1:6900": [1, 3, 6, 7], "s1:6901": [2, 4, 5]}
    assert placement.moved == 3
    assert placement.kept == (placement.workers[0].slot.key,)


def test_unstopped_tasks_stay_although_their_supervisor_is_gone() -> None:
    topology = word_count(event="monitor", workers=2, old=TWO, unstopped=(2, 4, 5))
    placement = place([supervisor(1, FOUR)], topology)
    assert placement.status == "unchanged"
    assert placement.reasons[4] == "its worker still beats although its supervisor is gone"


def test_the_dead_tasks_of_a_lost_supervisor_go_to_another() -> None:
    topology = word_count(event="monitor", workers=2, old=TWO, dead=(2, 4, 5))
    placement = place([supervisor(1, FOUR)], topology)
    assert slots(placement) == {"s1:6900": [1, 3, 6, 7], "s1:6901": [2, 4, 5]}


def test_healing_without_a_free_slot_fails_and_names_only_dead_tasks() -> None:
    topology = word_count(event="monitor", workers=2, old=TWO, dead=(2,))
    placement = place([supervisor(1, [6900])], topology)
    assert (placement.status, placement.error_type) == ("failed", "Unavailable")
    assert placement.error == (
        "topology 'wc' needs 1 slot, 0 are free (s1: 0): add a supervisor or set topology.workers=1"
    )
    assert set(placement.unassigned) == {2, 4, 5}


def test_tasks_that_never_had_a_slot_are_placed_too() -> None:
    topology = word_count(event="monitor", workers=2, old=(worker(1, 6900, 1, 3, 6, 7),))
    assert slots(place([supervisor(1, FOUR)], topology)) == {
        "s1:6900": [1, 3, 6, 7],
        "s1:6901": [2, 4, 5],
    }


def test_even_frees_live_workers_that_fit_no_share() -> None:
    def nine(workers: int, *old: WorkerSlot) -> TopologyToPlace:
        return small_topology(
            bolts={"b": (7, ["spout"])}, spouts={"spout": 1}, ackers=0, strategy="even",
            event="monitor", workers=workers, old=old,
        )  # fmt: skip

    first = place(
        [supervisor(1, [6900]), supervisor(2, [6900, 6901])],
        nine(4, worker(1, 6900, *range(1, 10))),
    )
    assert sorted(map(len, slots(first).values())) == [3, 3, 3]
    second = place(
        [supervisor(1, [6900]), supervisor(2, [6900, 6901]), supervisor(3, range(6900, 6908))],
        nine(4, *first.workers),
    )
    assert sorted(map(len, slots(second).values())) == [2, 2, 2, 3]
    assert list(second.worker_reasons.values()).count("the worker is alive and was left alone") == 1


def test_a_rebalance_to_more_workers_moves_the_fewest() -> None:
    topology = word_count(event="rebalance", workers=3, old=TWO)
    placement = place([supervisor(1, FOUR), supervisor(2, FOUR)], topology)
    assert placement.moved == 2
    assert sorted(map(len, slots(placement).values())) == [2, 2, 3]
    assert placement.reasons[1] == "it stays where it was: moving it would not improve the balance"


def test_a_rebalance_to_one_worker_keeps_the_fuller_slot() -> None:
    placement = place(
        [supervisor(1, FOUR), supervisor(2, FOUR)],
        word_count(event="rebalance", workers=1, old=TWO),
    )
    assert slots(placement) == {"s1:6900": [1, 2, 3, 4, 5, 6, 7]}
    assert placement.moved == 3


def test_reassign_places_all_anew() -> None:
    old = (worker(1, 6902, 1, 3, 6, 7), worker(1, 6903, 2, 4, 5))
    topology = word_count(event="rebalance", reassign=True, workers=2, old=old)
    placement = place([supervisor(1, FOUR), supervisor(2, FOUR)], topology)
    assert slots(placement) == {"s1:6900": [1, 3, 6, 7], "s2:6900": [2, 4, 5]}
    assert placement.moved == 7


def test_new_tasks_of_a_rebalance_go_where_there_is_room() -> None:
    topology = word_count(event="rebalance", workers=2, old=TWO)
    topology = topology.model_copy(
        update={
            "tasks": {**topology.tasks, 8: "split", 9: "split"},
            "parallelism": {**topology.parallelism, "split": 4},
        }
    )
    placement = place([supervisor(1, FOUR), supervisor(2, FOUR)], topology)
    assert slots(placement) == {"s1:6900": [1, 3, 6, 7, 9], "s2:6900": [2, 4, 5, 8]}
    assert placement.moved == 0


def test_the_topology_master_stays_alone_through_a_rebalance() -> None:
    old = (worker(1, 6900, 6), worker(1, 6901, 1, 3, 7), worker(2, 6900, 2, 4, 5))
    topology = word_count(event="rebalance", workers=3, single_master=True, old=old)
    placement = place([supervisor(1, FOUR), supervisor(2, FOUR)], topology)
    assert slots(placement)["s1:6900"] == [6]
    assert placement.moved == 2
    assert sorted(map(len, slots(placement).values())) == [1, 2, 2, 2]


def test_rebalance_leaves_unstopped_workers_alone() -> None:
    old = (*TWO, worker(9, 6900, 8, host="h9"))
    topology = word_count(event="rebalance", workers=3, old=old, unstopped=(8,))
    topology = topology.model_copy(update={"tasks": {**topology.tasks, 8: "split"}})
    placement = place([supervisor(1, FOUR), supervisor(2, FOUR)], topology)
    assert slots(placement)["s9:6900"] == [8]
    assert placement.status == "unchanged"


def test_a_user_defined_worker_gets_host_port_and_lowest_ids() -> None:
    wanted = UserWorker(
        host="h2", port=6902, memory_bytes=5, cpu=2, components={"split": 1, "count": 2}
    )
    placement = place(
        [supervisor(1, FOUR), supervisor(2, FOUR)], word_count(workers=2, user_workers=(wanted,))
    )
    mine = placement.workers[1]
    assert (mine.node, mine.port, mine.memory_bytes, mine.cpu) == ("s2", 6902, 5, 2)
    assert set(mine.ids) >= {1, 3, 4}
    assert placement.reasons[3] == "use.userdefine.assignment asks for it"


def test_a_user_defined_worker_avoids_a_busy_port_of_its_host() -> None:
    wanted = UserWorker(host="h2", port=6900, components={"split": 2})
    supervisors = [supervisor(1, FOUR), supervisor(2, FOUR, used=[6900])]
    placement = place(supervisors, word_count(workers=2, user_workers=(wanted,)))
    assert set(slots(placement)["s2:6901"]) >= {1, 2}


def test_a_user_defined_worker_on_an_unknown_host_is_placed_normally() -> None:
    wanted = UserWorker(host="nowhere", components={"split": 2})
    placement = place(
        [supervisor(1, FOUR), supervisor(2, FOUR)], word_count(workers=2, user_workers=(wanted,))
    )
    assert set(slots(placement)["s1:6900"]) >= {1, 2}
    assert placement.worker_reasons["s1:6900"] == (
        "of equally loaded supervisors it has the lowest id: next is s2"
    )


def test_more_wishes_than_workers_are_all_dropped() -> None:
    workers = tuple(UserWorker(host="h2", components={"split": 1}) for _ in range(2))
    placement = place(
        [supervisor(1, FOUR), supervisor(2, FOUR)], word_count(workers=1, user_workers=workers)
    )
    assert slots(placement) == {"s1:6900": [1, 2, 3, 4, 5, 6, 7]}


def test_use_old_assignment_takes_up_the_backup() -> None:
    old = (worker(2, 6903, 1, 2, 3), worker(2, 6901, 4, 5, 6, 7, memory_bytes=9))
    placement = place(
        [supervisor(1, FOUR), supervisor(2, FOUR)], word_count(workers=2, use_old=True, old=old)
    )
    assert slots(placement) == {"s2:6901": [4, 5, 6, 7], "s2:6903": [1, 2, 3]}
    assert (placement.status, placement.moved, placement.workers[0].memory_bytes) == (
        "assigned",
        0,
        9,
    )


def test_isolation_confines_a_topology_to_hosts_that_are_there() -> None:
    supervisors = [supervisor(1, FOUR), supervisor(2, [6900])]
    placement = place(supervisors, word_count(workers=1, isolation=("h2", "h7")))
    assert slots(placement) == {"s2:6900": [1, 2, 3, 4, 5, 6, 7]}
    short = place(supervisors, word_count(workers=2, isolation=("h2",)))
    assert short.error == (
        "topology 'wc' needs 2 slots, 1 is free on its isolation.scheduler.machines (s2: 1): "
        "add a supervisor there or set topology.workers=1"
    )
    nobody = place(supervisors, word_count(workers=1, isolation=("h7",)))
    assert slots(nobody) == {"s1:6900": [1, 2, 3, 4, 5, 6, 7]}


@pytest.mark.parametrize("strategy", ["balanced", "even"])
def test_others_get_no_work_on_isolation_hosts(strategy: str) -> None:
    supervisors = (supervisor(1, [6900]), supervisor(2, FOUR))
    apart = word_count(name="apart", workers=1, isolation=("h2",), priority=50)
    other = word_count(name="other", workers=2, strategy=strategy)
    result = plan_placement(PlacementBatch(supervisors=supervisors, topologies=(apart, other)))
    assert list(slots(result.placement("apart"))) == ["s2:6900"]
    first = result.placement("other")
    if strategy == "even":
        assert list(slots(first)) == ["s1:6900"]
    else:
        assert first.error is not None and first.error.startswith(
            "topology 'other' needs 2 slots, 1 is free (s1: 1)"
        )


def test_tasks_on_different_nodes_outrank_the_most_free_ports() -> None:
    supervisors = [supervisor(1, range(6900, 6908)), supervisor(2, [6900]), supervisor(3, [6900])]
    topology = small_topology(
        bolts={"b": (3, ["spout"])}, spouts={"spout": 1}, ackers=0, workers=3, differ_node=("b",)
    )
    placement = place(supervisors, topology)
    assert sorted(slots(placement)) == ["s1:6900", "s2:6900", "s3:6900"]
    assert placement.worker_reasons["s2:6900"].startswith("task.on.differ.node")


def test_too_few_supervisors_for_tasks_on_different_nodes() -> None:
    topology = small_topology(
        bolts={"b": (3, ["spout"])}, spouts={"spout": 1}, ackers=0, workers=3, differ_node=("b",)
    )
    placement = place([supervisor(1, FOUR), supervisor(2, FOUR)], topology)
    assert (placement.status, placement.error_type) == ("failed", "Unavailable")
    assert "wants 3 tasks of component 'b' on different supervisors" in (placement.error or "")


def test_a_dead_task_does_not_join_its_sibling_on_one_supervisor() -> None:
    supervisors = [supervisor(1, range(6900, 6908)), supervisor(2, FOUR), supervisor(3, FOUR)]
    old = (worker(1, 6900, 1, 4, 5), worker(2, 6900, 2), worker(3, 6900, 3))
    topology = small_topology(
        bolts={"b": (3, ["spout"])}, spouts={"spout": 1}, ackers=0, workers=3, differ_node=("b",),
        event="monitor", old=old, dead=(3,),
    )  # fmt: skip
    assert slots(place(supervisors, topology)) == {
        "s1:6900": [1, 4, 5],
        "s2:6900": [2],
        "s3:6901": [3],
    }


def test_executors_of_several_tasks_stay_together() -> None:
    groups = ((1, 2), (3, 4), (5,), (6,), (7,))
    topology = word_count(workers=2, executors=groups)
    placement = place([supervisor(1, FOUR), supervisor(2, FOUR)], topology)
    held = list(slots(placement).values())
    assert any({1, 2} <= set(tasks) for tasks in held)
    assert any({3, 4} <= set(tasks) for tasks in held)


def test_topologies_are_served_by_priority_then_name_and_share_no_slot() -> None:
    late = word_count(name="a", workers=2, priority=50)
    first = word_count(workers=2, priority=1)
    held = word_count(
        name="z", workers=1, event="monitor", old=(worker(1, 6900, 1, 2, 3, 4, 5, 6, 7),)
    )
    batch = PlacementBatch(supervisors=(supervisor(1, FOUR),), topologies=(late, held, first))
    result = plan_placement(batch)
    assert [placement.name for placement in result.placements] == ["wc", "z", "a"]
    assert set(slots(result.placement("wc"))) == {"s1:6901", "s1:6902"}
    assert set(slots(result.placement("z"))) == {"s1:6900"}
    assert result.placement("a").status == "failed"
