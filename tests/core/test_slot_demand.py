"""Slots that topologies want and hold: what a cluster is scaled by."""

from __future__ import annotations

from typing import Any

from storm_dagster.core.snapshot.demand import SlotDemand, slot_demands
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StormBase,
    TaskTable,
    WorkerSlot,
)
from storm_dagster.model.view import ClusterView, TopologyView, Versioned

TABLE = TaskTable(
    components={
        "b": ComponentTasks(type="bolt", tasks="1-4"),
        "__topology_master": ComponentTasks(type="bolt", tasks="5"),
    }
)


def demand(workers: int, *slots: str, status: Any = "ACTIVE") -> list[SlotDemand]:
    """Demand of a topology that asks for ``workers`` and has these tasks in its slots."""
    assignment = Assignment(
        topology_id="t-1-1",
        code_dir="t-1-1",
        node_host={"s": "h"} if slots else {},
        workers=tuple(
            WorkerSlot(node="s", host="h", port=6900 + number, tasks=tasks)
            for number, tasks in enumerate(slots)
        ),
        task_start_secs={},
        timestamp_ms=0,
    )
    base = StormBase(
        name="t",
        launch_time_secs=0,
        status=status,
        workers=workers,
        executors={"b": 4, "__topology_master": 1},
        token="k",
    )
    topology = TopologyView(
        id="t-1-1", base=base, base_at=Versioned(1, 1), tasks=TABLE, assignment=assignment
    )
    return slot_demands(
        ClusterView(
            cluster_id="c",
            epoch=1,
            assignments_version=1,
            supervisors={},
            topologies={"t-1-1": topology},
        )
    )


def test_a_cluster_that_is_too_small_shows_in_wanted_and_held() -> None:
    assert demand(3, "1,3,5", "2,4") == [
        SlotDemand("t", requested=3, assigned=2, has_unplaced=False)
    ]


def test_a_task_without_a_slot_is_unplaced() -> None:
    assert demand(3, "1,3,5", "2") == [SlotDemand("t", requested=3, assigned=2, has_unplaced=True)]
    assert demand(3) == [SlotDemand("t", requested=3, assigned=0, has_unplaced=True)]


def test_workers_that_would_stay_empty_are_not_wanted() -> None:
    assert demand(40, "1", "2", "3", "4-5") == [
        SlotDemand("t", requested=4, assigned=4, has_unplaced=False)
    ]


def test_a_topology_master_that_is_alone_wants_a_worker_of_its_own() -> None:
    assert demand(2, "1-2", "3-4", "5") == [
        SlotDemand("t", requested=3, assigned=3, has_unplaced=False)
    ]
    # With a slot less, the demand does not shrink.
    assert demand(2, "1-4", "5") == [SlotDemand("t", requested=3, assigned=2, has_unplaced=False)]


def test_a_killed_topology_wants_nothing() -> None:
    assert demand(3, "1-5", status="KILLED") == []
