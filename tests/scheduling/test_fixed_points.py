"""Plans of rebalances are fixed points, and reach the spread of a new placement at once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model.placement import (
    PlacementBatch,
    SupervisorSlots,
    TopologyPlacement,
    TopologyToPlace,
)
from storm_dagster.model.strategies import STRATEGIES
from storm_rigs.placement.placement_clusters import small_topology, supervisor

Supervisors = Sequence[SupervisorSlots]


def place(supervisors: Supervisors, topology: TopologyToPlace) -> TopologyPlacement:
    """The placement of the topology, alone in its batch."""
    batch = PlacementBatch(supervisors=tuple(supervisors), topologies=(topology,))
    return plan_placement(batch).placements[0]


def rebalanced(topology: TopologyToPlace, current: TopologyPlacement) -> TopologyToPlace:
    """A rebalance of the topology, which is placed like that now."""
    return topology.model_copy(update={"event": "rebalance", "old": current.workers})


def draw_supervisors(rng: random.Random) -> list[SupervisorSlots]:
    """Hosts of different sizes; other topologies hold some of their slots."""
    supervisors: list[SupervisorSlots] = []
    for number in range(rng.randint(1, 6)):
        ports = range(6900, 6900 + rng.randint(1, 8))
        used = tuple(port for port in ports if rng.random() < 0.2)
        supervisors.append(supervisor(number, ports).model_copy(update={"used": used}))
    return supervisors


def draw_topology(rng: random.Random, strategy: str) -> TopologyToPlace:
    """A topology of that strategy, of any size."""
    bolts = {"bolt": (rng.randint(1, 8), ["spout"])} if rng.random() < 0.7 else {}
    return small_topology(
        bolts=bolts,
        spouts={"spout": rng.randint(1, 14)},
        ackers=rng.randint(0, 2),
        workers=rng.randint(1, 12),
        single_master=strategy == "balanced" and rng.random() < 0.3,
        strategy=strategy,
    )


def loads(supervisors: Supervisors, placement: TopologyPlacement) -> list[tuple[int, int]]:
    """(free slots, used slots) of each supervisor after the placement, sorted.

    Supervisors of equal load are equally good for a worker, so that their ids do not count.
    """
    workers = Counter(worker.node for worker in placement.workers)
    result: list[tuple[int, int]] = []
    for entry in supervisors:
        free = len(entry.unused) - workers[entry.id]
        result.append((free, len(entry.info.ports) - free))
    return sorted(result)


def sizes(placement: TopologyPlacement) -> list[int]:
    """Tasks of each worker, sorted."""
    return sorted(len(worker.ids) for worker in placement.workers)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@given(seed=st.integers(0, 2**32))
def test_one_rebalance_reaches_the_spread_of_a_placement_from_nothing(
    strategy: str, seed: int
) -> None:
    """After hosts have joined, and after workers were added or removed."""
    rng = random.Random(seed)
    supervisors = draw_supervisors(rng)
    topology = draw_topology(rng, strategy)
    known = supervisors[: rng.randint(1, len(supervisors))]
    before = place(known, topology)
    if before.status == "failed":
        return
    wanted = topology
    if rng.random() < 0.3:
        wanted = topology.model_copy(update={"workers": rng.randint(1, 12)})
    from_nothing = place(supervisors, wanted)
    if from_nothing.status == "failed":
        return
    after = place(supervisors, rebalanced(wanted, before))
    assert loads(supervisors, after) == loads(supervisors, from_nothing)
    assert sizes(after) == sizes(from_nothing)
    again = place(supervisors, rebalanced(wanted, after))
    assert (again.status, again.moved, again.workers) == ("unchanged", 0, after.workers)


def test_one_even_rebalance_fills_a_host_that_joined_empty() -> None:
    """Twelve workers on three hosts of four slots, and a fourth host of eight."""
    topology = small_topology(bolts={}, spouts={"spout": 23}, ackers=0, workers=12, strategy="even")
    former = [supervisor(number, range(6900, 6904)) for number in range(3)]
    joined = [*former, supervisor(3, range(6900, 6908))]
    after = place(joined, rebalanced(topology, place(former, topology)))
    assert sorted(Counter(worker.node for worker in after.workers).values()) == [3, 3, 3, 3]
    # Three workers of two tasks.
    assert after.moved == 6


def test_one_balanced_rebalance_uses_the_emptier_of_two_equal_hosts() -> None:
    """Of hosts with as many free slots, the one with fewer used ones gets the worker."""
    topology = small_topology(
        bolts={}, spouts={"spout": 9}, ackers=0, workers=5, single_master=False
    )
    former = [supervisor(0, range(6900, 6905))]
    joined = [*former, supervisor(1, range(6900, 6901))]
    after = place(joined, rebalanced(topology, place(former, topology)))
    assert sorted(Counter(worker.node for worker in after.workers).values()) == [1, 4]
