"""The local planner keeps every rule on generated clusters, whatever the order of its input."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model.placement import PlacementBatch
from storm_rigs.placement.placement_clusters import generated_batch
from storm_rigs.placement.placement_invariants import placement_faults


@given(seed=st.integers(0, 2**32))
def test_every_placement_keeps_the_rules(seed: int) -> None:
    batch = generated_batch(random.Random(seed))
    assert placement_faults(batch, plan_placement(batch)) == []


@given(seed=st.integers(0, 2**32), shuffle=st.randoms(use_true_random=False))
def test_the_order_of_the_input_decides_nothing(seed: int, shuffle: random.Random) -> None:
    batch = generated_batch(random.Random(seed))
    supervisors, topologies = list(batch.supervisors), list(batch.topologies)
    shuffle.shuffle(supervisors)
    shuffle.shuffle(topologies)
    mixed = []
    for topology in topologies:
        tasks, old = list(topology.tasks.items()), list(topology.old)
        shuffle.shuffle(tasks)
        shuffle.shuffle(old)
        mixed.append(topology.model_copy(update={"tasks": dict(tasks), "old": tuple(old)}))
    other = PlacementBatch(supervisors=tuple(supervisors), topologies=tuple(mixed))
    assert plan_placement(other) == plan_placement(batch)


@given(seed=st.integers(0, 2**32))
def test_a_rebalance_of_a_fresh_placement_changes_nothing(seed: int) -> None:
    batch = generated_batch(random.Random(seed))
    for topology in batch.topologies:
        fresh = topology.model_copy(
            update={"event": "new", "old": (), "dead": (), "unstopped": (), "user_workers": ()}
        )
        alone = PlacementBatch(supervisors=batch.supervisors, topologies=(fresh,))
        first = plan_placement(alone).placements[0]
        if first.status == "failed":
            continue
        again = fresh.model_copy(
            update={"event": "rebalance", "reassign": False, "old": first.workers}
        )
        second = plan_placement(PlacementBatch(supervisors=batch.supervisors, topologies=(again,)))
        assert second.placements[0].status == "unchanged"
        assert second.placements[0].workers == first.workers
        assert second.placements[0].kept == tuple(worker.slot.key for worker in first.workers)
