"""A rebalance moves as few tasks as the best of all balanced placements, found by trying them all.

Balanced are the sizes of workers, and the number of workers on each supervisor.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model.placement import PlacementBatch, TopologyToPlace
from storm_rigs.placement.placement_clusters import placed_worker, small_topology, supervisor

MASTER = 1
SUPERVISORS = 3


def fewest(
    executors: Sequence[tuple[int, ...]],
    home: dict[tuple[int, ...], int],
    slots: int,
    workers: int,
    alone: bool,
) -> int:
    """Tasks that move in the best placement of ``executors`` on ``workers``: every choice of old
    slots that are used on, and of those that hold one executor more, is tried; the largest
    executors stay.
    """
    shared = [group for group in executors if not (alone and group == (MASTER,))]
    count = workers - alone
    average, remainder = divmod(len(shared), count)
    most = 0
    for used in _subsets(range(slots), count):
        master_stays = alone and home.get((MASTER,)) is not None and home[MASTER,] not in used
        if not _even([*used, *([home[MASTER,]] if master_stays else [])], workers):
            # The master may go elsewhere, where it is in nobody's way.
            master_stays = False
            if not _even(used, workers):
                continue
        for fuller in _subsets(used, remainder):
            stay = int(master_stays)
            for slot in used:
                here = sorted(
                    (len(group) for group in shared if home.get(group) == slot), reverse=True
                )
                stay += sum(here[: average + (slot in fuller)])
            most = max(most, stay)
    return sum(len(group) for group in executors if group in home) - most


def _even(used: Iterable[int], workers: int) -> bool:
    """Whether these slots can be part of ``workers`` ones that are spread evenly over the
    supervisors.
    """
    share, extra = divmod(workers, SUPERVISORS)
    over = [
        number - share
        for number in Counter(slot % SUPERVISORS for slot in used).values()
        if number > share
    ]
    return sum(over) <= extra and max(over, default=0) <= 1


def _subsets(items: Iterable[int], most: int) -> Iterable[tuple[int, ...]]:
    items = tuple(items)
    return (part for size in range(min(most, len(items)) + 1) for part in combinations(items, size))


def drawn(
    rng: random.Random, several: bool
) -> tuple[TopologyToPlace, dict[tuple[int, ...], int], int]:
    """A small topology with an assignment; where its executors are; how many slots that assignment
    has.
    """
    total = rng.randint(1, 8)
    alone = rng.random() < 0.5
    topology = small_topology(
        bolts={}, spouts={"spout": total}, ackers=0, workers=rng.randint(1, 4), single_master=alone,
        strategy="balanced" if alone else rng.choice(("balanced", "even")), event="rebalance",
    )  # fmt: skip
    executors: list[tuple[int, ...]] = [(MASTER,)]
    ids = list(range(2, total + 2))
    while ids:
        size = rng.randint(1, 3) if several else 1
        executors.append(tuple(ids[:size]))
        ids = ids[size:]
    slots = rng.randint(1, 6)
    home = {group: rng.randrange(slots) for group in executors if rng.random() < 0.95}
    old = tuple(
        placed_worker(
            node=f"s{slot % SUPERVISORS}",
            host=f"h{slot % SUPERVISORS}",
            port=6900 + slot // SUPERVISORS,
            tasks=tuple(task for group, at in home.items() if at == slot for task in group),
        )
        for slot in sorted(set(home.values()))
    )
    more: dict[str, Any] = {"old": old, "parallelism": {"spout": len(executors) - 1}}
    if several:
        more["executors"] = tuple(executors)
    return topology.model_copy(update=more), home, slots


@given(seed=st.integers(0, 2**32), several=st.booleans())
def test_no_placement_moves_fewer(seed: int, several: bool) -> None:
    topology, home, slots = drawn(random.Random(seed), several)
    supervisors = tuple(supervisor(number, range(6900, 6910)) for number in range(SUPERVISORS))
    batch = PlacementBatch(supervisors=supervisors, topologies=(topology,))
    (placement,) = plan_placement(batch).placements
    executors = topology.executors or tuple((task,) for task in topology.tasks)
    alone = bool(topology.single_master)
    spouts = len(executors) - 1
    workers = (
        min(topology.workers, len(executors) if topology.strategy == "even" else spouts) + alone
    )
    assert placement.status in ("assigned", "unchanged")
    assert len(placement.workers) == workers
    assert placement.moved == fewest(executors, home, slots, workers, alone)


def test_the_topology_master_stays_when_that_saves_a_move() -> None:
    old = (
        placed_worker("s0", "h0", 6900, (1, 6, 7, 8)),
        placed_worker("s1", "h1", 6900, (2, 4, 5)),
    )
    topology = small_topology(
        bolts={},
        spouts={"spout": 7},
        ackers=0,
        workers=1,
        single_master=True,
        event="rebalance",
        old=old,
    )
    supervisors = tuple(supervisor(number, range(6900, 6910)) for number in range(SUPERVISORS))
    (placement,) = plan_placement(
        PlacementBatch(supervisors=supervisors, topologies=(topology,))
    ).placements
    assert {worker.slot.key: worker.ids for worker in placement.workers} == {
        "s0:6900": (1,),
        "s1:6900": (2, 3, 4, 5, 6, 7, 8),
    }


def test_of_executors_of_different_size_the_larger_stay() -> None:
    old = (placed_worker("s0", "h0", 6900, (1, 2, 3, 4, 5, 6)),)
    topology = small_topology(
        bolts={},
        spouts={"spout": 5},
        ackers=0,
        workers=2,
        single_master=False,
        event="rebalance",
        old=old,
    ).model_copy(update={"executors": ((1,), (2, 3, 4), (5, 6)), "parallelism": {"spout": 2}})
    supervisors = tuple(supervisor(number, range(6900, 6910)) for number in range(SUPERVISORS))
    (placement,) = plan_placement(
        PlacementBatch(supervisors=supervisors, topologies=(topology,))
    ).placements
    assert placement.moved == 1
    assert sorted(worker.ids for worker in placement.workers) == [(1,), (2, 3, 4, 5, 6)]


@pytest.mark.parametrize("strategy", ["balanced", "even"])
def test_a_new_supervisor_takes_a_crowded_ones_tasks_and_no_others(strategy: str) -> None:
    places = [("s0", 6900), ("s0", 6901), ("s1", 6900), ("s2", 6900)]
    old = tuple(
        placed_worker(
            node=node,
            host=f"h{node[1]}",
            port=port,
            tasks=tuple(range(4 * number + 1, 4 * number + 5)),
        )
        for number, (node, port) in enumerate(places)
    )
    topology = small_topology(
        bolts={}, spouts={"spout": 15}, ackers=0, workers=4, single_master=False, strategy=strategy,
        event="rebalance", old=old,
    )  # fmt: skip
    for supervisors, moved in ((3, 0), (4, 4)):
        batch = PlacementBatch(
            supervisors=tuple(
                supervisor(number, range(6900, 6904)) for number in range(supervisors)
            ),
            topologies=(topology,),
        )
        (placement,) = plan_placement(batch).placements
        assert placement.moved == moved
        assert len({worker.node for worker in placement.workers}) == supervisors
