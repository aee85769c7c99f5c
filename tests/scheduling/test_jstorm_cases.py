"""Placements that JStorm's own scheduler gives, without its quirks
(``docs/decisions.md#supervisor-choice``).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.core.scheduling.selectors import fair_share
from storm_dagster.core.scheduling.units import worker_count
from storm_dagster.model.placement import (
    PlacementBatch,
    SupervisorSlots,
    TopologyPlacement,
    TopologyToPlace,
    UserWorker,
)
from storm_rigs.placement.placement_clusters import small_topology, supervisor

WORD_COUNT: dict[str, Any] = {
    "bolts": {"split": (2, ["spout"]), "count": (2, ["split"])},
    "spouts": {"spout": 1},
}
BIG_COUNT: dict[str, Any] = {
    "bolts": {"split": (4, ["spout"]), "count": (4, ["split"])},
    "spouts": {"spout": 2},
}
FOUR = range(6900, 6904)


def fan(bolts: int, spouts: int, **more: Any) -> TopologyToPlace:
    """One bolt ``b`` behind one spout, without ackers."""
    return small_topology(
        bolts={"b": (bolts, ["spout"])}, spouts={"spout": spouts}, ackers=0, **more
    )


def place(supervisors: list[SupervisorSlots], topology: TopologyToPlace) -> TopologyPlacement:
    result = plan_placement(PlacementBatch(supervisors=tuple(supervisors), topologies=(topology,)))
    return result.placement(topology.name)


def tasks_by_slot(placement: TopologyPlacement) -> dict[str, list[int]]:
    return {worker.slot.key: list(worker.ids) for worker in placement.workers}


def shapes(topology: TopologyToPlace, slots: dict[str, list[int]]) -> tuple[set[str], list[Any]]:
    """What is fixed where several placements are equally good: the slots, and the component counts
    of the workers.
    """
    counts = [
        tuple(sorted(Counter(topology.tasks[task] for task in tasks).items()))
        for tasks in slots.values()
    ]
    return set(slots), sorted(counts)


def test_one_worker_takes_all_tasks() -> None:
    placement = place(
        [supervisor(1, FOUR), supervisor(2, FOUR)], small_topology(workers=1, **WORD_COUNT)
    )
    assert tasks_by_slot(placement) == {"s1:6900": [1, 2, 3, 4, 5, 6, 7]}
    assert placement.status == "assigned"


def test_two_workers_share_seven_tasks_four_to_three() -> None:
    placement = place(
        [supervisor(1, FOUR), supervisor(2, FOUR)], small_topology(workers=2, **WORD_COUNT)
    )
    assert tasks_by_slot(placement) == {"s1:6900": [1, 3, 6, 7], "s2:6900": [2, 4, 5]}
    assert placement.reasons[1] == "the first of equally good workers"
    assert placement.reasons[2] == "the worker had the fewest tasks of its component"
    assert placement.reasons[5] == "the worker had the fewest tasks"
    assert (
        placement.worker_reasons["s2:6900"]
        == "the supervisor had the most free ports: 4, next is s1 with 3"
    )


def test_four_workers_share_thirteen_tasks_evenly() -> None:
    topology = small_topology(workers=4, ackers=2, **BIG_COUNT)
    placement = place([supervisor(1, FOUR), supervisor(2, FOUR)], topology)
    assert tasks_by_slot(placement) == {
        "s1:6900": [1, 5, 11, 12],
        "s1:6901": [3, 7, 9],
        "s2:6900": [2, 6, 13],
        "s2:6901": [4, 8, 10],
    }


def test_too_few_free_ports_fail_and_place_nothing() -> None:
    placement = place([supervisor(1, [6900, 6901])], small_topology(workers=4, **BIG_COUNT))
    assert (placement.status, placement.error_type) == ("failed", "Unavailable")
    assert placement.error == (
        "topology 'wc' needs 4 slots, 2 are free (s1: 2): add a supervisor or set topology.workers=2"
    )
    assert placement.workers == ()
    assert set(placement.unassigned) == set(range(1, 13))


def test_the_message_names_the_free_slots_of_each_supervisor() -> None:
    placement = place(
        [supervisor(1, [6900]), supervisor(2, [6900, 6901])], small_topology(workers=4, **BIG_COUNT)
    )
    assert placement.error == (
        "topology 'wc' needs 4 slots, 3 are free (s1: 1, s2: 2): add a supervisor or set topology.workers=3"
    )


def test_there_are_no_more_workers_than_tasks() -> None:
    placement = place([supervisor(1, FOUR), supervisor(2, FOUR)], fan(2, 1, workers=8))
    assert tasks_by_slot(placement) == {"s1:6900": [1], "s1:6901": [4], "s2:6900": [2, 3]}


def test_a_topology_master_asked_to_be_alone_is_alone() -> None:
    topology = small_topology(workers=3, single_master=True, master_memory_bytes=77, **BIG_COUNT)
    placement = place([supervisor(1, FOUR), supervisor(2, FOUR)], topology)
    assert tasks_by_slot(placement) == {
        "s1:6900": [10],
        "s1:6901": [2, 4, 6, 8],
        "s2:6900": [1, 5, 9, 11],
        "s2:6901": [3, 7, 12],
    }
    assert [worker.memory_bytes for worker in placement.workers] == [77, 2**31, 2**31, 2**31]
    assert placement.reasons[10] == "the topology master has a worker of its own"


SIX = range(6900, 6906)
ALONE_FROM_TEN = {
    "s1:6900": [16],
    "s1:6901": [2, 12],
    "s1:6902": [4, 14],
    "s1:6903": [6, 18],
    "s1:6904": [8, 20],
    "s1:6905": [10, 21],
    "s2:6900": [1, 11],
    "s2:6901": [3, 13],
    "s2:6902": [5, 15],
    "s2:6903": [7, 17],
    "s2:6904": [9, 19],
}
NOT_ALONE_OF_TEN = {
    "s1:6900": [1, 11, 16],
    "s1:6901": [3, 13],
    "s1:6902": [5, 15],
    "s1:6903": [7, 18],
    "s1:6904": [9, 20],
    "s2:6900": [2, 12],
    "s2:6901": [4, 14],
    "s2:6902": [6, 17],
    "s2:6903": [8, 19],
    "s2:6904": [10, 21],
}
NOT_ALONE_OF_NINE = {
    "s1:6900": [1, 11, 16],
    "s1:6901": [3, 13],
    "s1:6902": [5, 15],
    "s1:6903": [7, 18],
    "s1:6904": [9, 19],
    "s2:6900": [2, 10, 20],
    "s2:6901": [4, 12, 21],
    "s2:6902": [6, 14],
    "s2:6903": [8, 17],
}


@pytest.mark.parametrize(
    ("workers", "single_master", "expected"),
    [(10, None, ALONE_FROM_TEN), (10, False, NOT_ALONE_OF_TEN), (9, None, NOT_ALONE_OF_NINE)],
    ids=["ten workers", "ten workers, not alone by conf", "nine workers"],
)
def test_the_topology_master_is_alone_from_ten_workers_on(
    workers: int, single_master: bool | None, expected: dict[str, list[int]]
) -> None:
    topology = fan(15, 5, workers=workers, single_master=single_master)
    placement = place([supervisor(1, SIX), supervisor(2, SIX)], topology)
    assert shapes(topology, tasks_by_slot(placement)) == shapes(topology, expected)


def test_a_loaded_supervisor_is_left_alone() -> None:
    eight = range(6900, 6908)
    supervisors = [
        supervisor(1, eight, used=range(6900, 6906)),
        supervisor(2, eight),
        supervisor(3, eight),
    ]
    placement = place(supervisors, fan(6, 2, workers=4))
    assert tasks_by_slot(placement) == {
        "s2:6900": [1, 5, 7],
        "s2:6901": [3, 8],
        "s3:6900": [2, 6],
        "s3:6901": [4, 9],
    }


def test_a_nearly_full_supervisor_comes_last() -> None:
    topology = fan(6, 2, workers=4)
    placement = place([supervisor(1, FOUR, used=[6900, 6901, 6902]), supervisor(2, FOUR)], topology)
    expected = {"s1:6903": [2, 5, 9], "s2:6900": [1, 6], "s2:6901": [3, 8], "s2:6902": [4, 7]}
    assert tasks_by_slot(placement).keys() == expected.keys()
    assert sorted(map(len, tasks_by_slot(placement).values())) == [2, 2, 2, 3]
    assert (
        placement.worker_reasons["s1:6903"]
        == "of equally loaded supervisors it has the lowest id: next is s2"
    )


def test_the_most_free_ports_win() -> None:
    supervisors = [
        supervisor(1, [6900, 6901]),
        supervisor(2, FOUR),
        supervisor(3, range(6900, 6908)),
    ]
    placement = place(supervisors, fan(8, 3, workers=6))
    assert sorted(tasks_by_slot(placement)) == [
        "s2:6900",
        "s3:6900",
        "s3:6901",
        "s3:6902",
        "s3:6903",
        "s3:6904",
    ]


@pytest.mark.parametrize(
    ("ports", "slots"),
    [
        ((1, 2, 2, 2), ["s1:6900", "s2:6900", "s2:6901", "s3:6900", "s3:6901", "s4:6900"]),
        ((2, 2, 2), ["s1:6900", "s1:6901", "s2:6900", "s2:6901", "s3:6900", "s3:6901"]),
    ],
    ids=["one has a single port", "every port is used"],
)
def test_no_supervisor_is_skipped(ports: tuple[int, ...], slots: list[str]) -> None:
    supervisors = [
        supervisor(number, range(6900, 6900 + count)) for number, count in enumerate(ports, 1)
    ]
    topology = fan(6, 1, workers=6)
    placement = place(supervisors, topology)
    assert sorted(tasks_by_slot(placement)) == slots
    assert sorted(map(len, tasks_by_slot(placement).values())) == [1, 1, 1, 1, 2, 2]


def test_reserved_slots_stay_free() -> None:
    supervisors = [supervisor(1, [6900, 6901]), supervisor(2, [6900, 6901])]
    placement = place(supervisors, fan(6, 1, workers=3, reserve=2))
    assert placement.status == "failed"
    assert placement.error == (
        "topology 'wc' needs 3 slots, 4 are free (s1: 2, s2: 2) and 2 of them must stay free: "
        "add a supervisor, lower jstorm.reserve.workers or set topology.workers=2"
    )


def test_enough_slots_beside_the_reserve_are_used() -> None:
    supervisors = [supervisor(1, [6900, 6901]), supervisor(2, [6900, 6901])]
    placement = place(supervisors, fan(6, 1, workers=3, reserve=1))
    assert tasks_by_slot(placement) == {
        "s1:6900": [1, 5, 7],
        "s1:6901": [3, 6],
        "s2:6900": [2, 4, 8],
    }


@pytest.mark.parametrize(
    ("workers", "executors", "single", "expected"),
    [
        (1, 7, None, (1, False)),
        (8, 3, None, (3, False)),
        (9, 20, None, (9, False)),
        (10, 20, None, (11, True)),
        (10, 9, None, (9, False)),
        (10, 20, False, (10, False)),
        (3, 11, True, (4, True)),
        (3, 1, True, (2, True)),
        (None, 12, None, (13, True)),
        (20, 10, None, (11, True)),
    ],
)
def test_the_number_of_workers_and_whether_the_master_is_alone(
    workers: int | None, executors: int, single: bool | None, expected: tuple[int, bool]
) -> None:
    assert worker_count(workers, executors, single) == expected


@pytest.mark.parametrize(
    ("tasks", "workers", "expected"),
    [
        (7, 2, (3, 1)),
        (13, 4, (3, 1)),
        (8, 4, (2, 0)),
        (11, 3, (3, 2)),
        (21, 9, (2, 3)),
        (4, 3, (1, 1)),
        (2, 3, (0, 2)),
    ],
)
def test_average_and_remainder_of_tasks_over_workers(
    tasks: int, workers: int, expected: tuple[int, int]
) -> None:
    assert fair_share([0] * workers, tasks) == expected


def test_the_local_strategy_uses_one_slot_of_the_only_supervisor() -> None:
    topology = small_topology(workers=3, strategy="local", **WORD_COUNT)
    placement = place([supervisor(1, FOUR, used=[6900])], topology)
    assert tasks_by_slot(placement) == {"s1:6901": [1, 2, 3, 4, 5, 6, 7]}
    two = place([supervisor(1, FOUR), supervisor(2, FOUR)], topology)
    assert (two.status, two.error_type) == ("failed", "InvalidRequest")
    full = place([supervisor(1, [6900], used=[6900])], topology)
    assert (full.status, full.error_type) == ("failed", "Unavailable")


def test_the_local_strategy_names_the_requests_that_it_ignores() -> None:
    worker = UserWorker(host="h1", components={"count": 1})
    topology = small_topology(strategy="local", user_workers=(worker,), **WORD_COUNT)
    placement = place([supervisor(1, FOUR)], topology)
    assert placement.warnings == ("the local strategy knows no use.userdefine.assignment: ignored",)


def test_without_a_live_supervisor_nothing_is_placed() -> None:
    placement = place([], small_topology(**WORD_COUNT))
    assert placement.error == "topology 'wc' cannot be placed, no supervisor is alive: start one"


def even(tasks: int, **more: Any) -> TopologyToPlace:
    """A topology of ``tasks`` tasks, the topology master among them."""
    return fan(tasks - 2, 1, strategy="even", **more)


def test_even_deals_more_tasks_than_slots_round_robin() -> None:
    placement = place([supervisor(1, [1]), supervisor(2, [1])], even(4, workers=2))
    assert tasks_by_slot(placement) == {"s1:1": [1, 3], "s2:1": [2, 4]}


def test_even_spreads_fewer_tasks_than_slots_over_hosts_first() -> None:
    placement = place([supervisor(1, [1, 2]), supervisor(2, [1, 2])], even(3, workers=4))
    assert tasks_by_slot(placement) == {"s1:1": [1], "s1:2": [3], "s2:1": [2]}


def test_storms_example_of_the_even_scheduler() -> None:
    supervisors = [
        supervisor(1, [6700, 6701]),
        supervisor(2, [6700, 6701, 6702]),
        supervisor(3, [6700, 6701, 6702, 6703]),
    ]
    placement = place(supervisors, even(7, workers=3))
    assert tasks_by_slot(placement) == {"s1:6700": [3, 6], "s2:6700": [2, 5], "s3:6700": [1, 4, 7]}
    assert placement.reasons[1] == "dealt round robin over the slots of the even strategy"


def test_even_uses_what_there_is() -> None:
    placement = place([supervisor(1, [6700])], even(7, workers=3))
    assert placement.status == "assigned"
    assert tasks_by_slot(placement) == {"s1:6700": [1, 2, 3, 4, 5, 6, 7]}
    nothing = place([supervisor(1, [6700], used=[6700])], even(7, workers=3))
    assert (nothing.status, nothing.error_type) == ("failed", "Unavailable")
