"""Rules asked of an assignment that stands: what a planner makes keeps them, what is bent is
named.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.scheduling.assignment_checks import (
    differ_node_faults,
    isolation_faults,
    move_faults,
    quota_faults,
)
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model.placement import PlacementBatch
from storm_dagster.model.records import WorkerSlot
from storm_rigs.placement.placement_clusters import generated_batch, placed_worker, small_topology


def worker(node: int, port: int, *tasks: int) -> WorkerSlot:
    return placed_worker(f"s{node}", f"h{node}", port, tasks)


def standing(*old: WorkerSlot, **more: Any) -> Any:
    """split 1-2, count 3-4, acker 5, topology master 6, spout 7."""
    return small_topology(
        bolts={"split": (2, ["spout"]), "count": (2, ["split"])},
        spouts={"spout": 1},
        event="rebalance",
        old=old,
        **more,
    )


@given(seed=st.integers(0, 2**32))
def test_a_new_placement_keeps_them(seed: int) -> None:
    batch = generated_batch(random.Random(seed))
    hosts = {node.info.host for node in batch.supervisors}
    for topology in batch.topologies:
        fresh = topology.model_copy(update={"event": "new", "old": (), "dead": (), "unstopped": ()})
        alone = PlacementBatch(supervisors=batch.supervisors, topologies=(fresh,))
        (placement,) = plan_placement(alone).placements
        if placement.status == "failed" or topology.user_workers:
            continue
        placed = fresh.model_copy(update={"event": "rebalance", "old": placement.workers})
        assert not list(quota_faults(placed))
        assert not list(isolation_faults(placed, hosts))
        assert not list(differ_node_faults(placed))


def test_uneven_workers_and_a_shared_topology_master_are_faults() -> None:
    uneven = standing(worker(1, 6900, 1, 2, 3, 4, 5), worker(2, 6900, 6, 7), workers=2)
    assert list(quota_faults(uneven)) == ["wc: workers hold 2 to 5 executors"]
    many = standing(worker(1, 6900, 1, 2, 3, 4), worker(2, 6900, 5, 6, 7), workers=1)
    assert list(quota_faults(many)) == ["wc has 2 workers and wants 1"]
    master = standing(
        worker(1, 6900, 1, 2, 3), worker(2, 6900, 4, 5, 6, 7), workers=1, single_master=True
    )
    assert "wc: the topology master is not alone in its worker" in list(quota_faults(master))


def test_a_worker_off_its_isolation_hosts_is_a_fault() -> None:
    apart = standing(
        worker(1, 6900, 1, 2, 3, 4), worker(2, 6900, 5, 6, 7), workers=2, isolation=("h1", "h9")
    )
    assert list(isolation_faults(apart, {"h1", "h2"})) == [
        "wc: s2:6900 is on h2, not on its isolation hosts"
    ]
    assert list(isolation_faults(apart, {"h2"})) == []


def test_tasks_that_share_a_node_and_must_not_are_a_fault() -> None:
    together = standing(
        worker(1, 6900, 1, 3, 5), worker(1, 6901, 2, 4, 6, 7), differ_node=("split",)
    )
    assert list(differ_node_faults(together)) == ["wc: 2 executors of 'split' are on s1"]


def test_more_moves_than_needed_are_a_fault() -> None:
    moves = {"before": {"s1:1": "1-4", "s2:1": "5-8"}, "slack": 0}
    fair = {"s1:1": [1, 2, 3], "s2:1": [5, 6, 7], "s3:1": [4, 8]}
    assert list(move_faults("wc", moves, fair)) == []
    wasteful = {"s1:1": [5, 6, 7], "s2:1": [1, 2, 3], "s3:1": [4, 8]}
    assert list(move_faults("wc", moves, wasteful)) == [
        "wc: the last rebalance moved 8 tasks where 2 were enough"
    ]


@given(seed=st.integers(0, 2**32), workers=st.integers(1, 6))
def test_no_rebalance_of_the_planner_is_wasteful(seed: int, workers: int) -> None:
    batch = generated_batch(random.Random(seed))
    for topology in batch.topologies:
        plain = topology.model_copy(
            update={
                "event": "new", "old": (), "dead": (), "unstopped": (), "user_workers": (), "differ_node": (),
                "isolation": (), "executors": (), "reserve": 0,
            }
        )  # fmt: skip
        alone = PlacementBatch(supervisors=batch.supervisors, topologies=(plain,))
        (first,) = plan_placement(alone).placements
        changes = {
            "event": "rebalance",
            "reassign": False,
            "workers": workers,
            "old": first.workers,
        }
        again = PlacementBatch(
            supervisors=batch.supervisors, topologies=(plain.model_copy(update=changes),)
        )
        (second,) = plan_placement(again).placements
        if "failed" in (first.status, second.status):
            continue
        before = {part.slot.key: part.tasks for part in first.workers}
        after = {part.slot.key: part.ids for part in second.workers}
        assert not list(move_faults(plain.name, {"before": before, "slack": 1}, after))
