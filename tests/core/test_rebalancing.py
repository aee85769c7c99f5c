"""Scheduled rebalances: which hosts count, and which gain is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from storm_dagster.core.rebalancing import (
    Spread,
    largest_gain,
    new_supervisors,
    spread_of,
    unsteady_reason,
)
from storm_dagster.model.records import (
    Assignment,
    StormBase,
    SupervisorInfo,
    WorkerNode,
    WorkerSlot,
)
from storm_dagster.model.view import ClusterView, TopologyView, Versioned


def spread(*hosts: int, tasks: int = 1) -> Spread:
    """Spread of a topology with that many workers on each host, of ``tasks`` tasks each."""
    workers: list[tuple[str, int]] = []
    for number, count in enumerate(hosts):
        workers += [(f"s{number}", tasks)] * count
    return spread_of(workers, target_workers=len(workers), supervisors=len(hosts))


def gain(current: Spread, planned: Spread) -> float:
    before, after = largest_gain(current, planned)
    return before - after


@pytest.mark.parametrize("hosts", [(3, 3, 3, 3), (2, 2), (1,)])
def test_an_even_spread_has_no_imbalance(hosts: Sequence[int]) -> None:
    assert spread(*hosts) == Spread(0.0, 0.0)


def test_an_empty_host_counts_although_the_fullest_is_as_full_as_it_must_be() -> None:
    """Of five workers on four hosts one host has two in any case."""
    assert gain(spread(2, 2, 1, 0), spread(2, 1, 1, 1)) > 0.1
    assert gain(spread(4, 4, 4, 0), spread(3, 3, 3, 3)) > 0.1


def test_one_pair_of_workers_among_a_hundred_hosts_is_a_small_gain() -> None:
    crowded = spread(*[10] * 49, 11, 9, *[10] * 49)
    assert gain(crowded, spread(*[10] * 100)) < 0.1


def test_tasks_of_the_fullest_worker_count() -> None:
    uneven = spread_of([("s0", 6), ("s1", 2)], target_workers=2, supervisors=2)
    assert uneven == Spread(0.5, 0.0)


def test_no_task_is_no_imbalance() -> None:
    assert spread_of([], target_workers=1, supervisors=3) == Spread(0.0, 0.0)


def test_a_supervisor_is_new_for_the_quiet_time_by_its_own_boot_clock() -> None:
    """One of a release that does not state its time is not new."""
    fields = {"host": "h", "ports": (6900,), "started": 0, "count": 1, "version": ""}
    view = ClusterView(
        cluster_id="c",
        epoch=1,
        assignments_version=0,
        topologies={},
        supervisors={
            "unstated": SupervisorInfo.model_validate(fields),
            "new": SupervisorInfo.model_validate({**fields, "present_secs": 0}),
            "old": SupervisorInfo.model_validate({**fields, "present_secs": 600}),
        },
    )
    assert new_supervisors(view, 600) == {"new"}
    assert new_supervisors(view, 0) == frozenset()


NOW = 1_800_000_000
QUIET_SECS = 600


def placed_at(secs: int) -> Assignment:
    """An assignment of one worker, made at ``secs``."""
    worker = WorkerSlot(node="s1", host="h1", port=1, tasks="1")
    return Assignment(
        topology_id="t-1-1",
        code_dir="t-1-1",
        node_host={},
        workers=(worker,),
        task_start_secs={},
        timestamp_ms=secs * 1000,
    )


def steady() -> TopologyView:
    """A topology whose worker lives, on a cluster that was quiet for a day."""
    base = StormBase(
        name="t", launch_time_secs=0, status="ACTIVE", workers=1, executors={}, token="k"
    )
    node = WorkerNode(pid=1, token="x", version=4, tasks="1", started_ms=0, status="running")
    assignment = placed_at(NOW - 86_400)
    (worker,) = assignment.workers
    return TopologyView(
        id="t-1-1",
        base=base,
        base_at=Versioned(1, 1),
        assignment=assignment,
        assignment_at=Versioned(4, 1),
        live_workers={worker.slot: node},
    )


def with_base(**changes: Any) -> TopologyView:
    topology = steady()
    return replace(topology, base=topology.base.model_copy(update=changes))


def reason(topology: TopologyView, *present_secs: int, quiet_secs: float = QUIET_SECS) -> str:
    """Why a schedule leaves the topology alone, with a supervisor for each of ``present_secs``."""
    supervisors = {
        f"s{number}": SupervisorInfo(
            host=f"h{number}", ports=(1,), started=0, count=1, version="", present_secs=secs
        )
        for number, secs in enumerate(present_secs, start=1)
    }
    view = ClusterView("c", 1, 1, supervisors, {topology.id: topology})
    return unsteady_reason(view, topology, now_secs=NOW, quiet_secs=quiet_secs)


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        (with_base(status="REBALANCING", wanted_status="ACTIVE"), "it is REBALANCING"),
        (with_base(wanted_status="KILLED"), "it is ACTIVE, wanted KILLED"),
        (replace(steady(), assignment=None, assignment_at=None), "it has no assignment"),
        (replace(steady(), live_workers={}), "1 of its workers do not live, healing comes first"),
        (replace(steady(), assignment=placed_at(NOW - 599)), "it was placed 599 s ago"),
        (replace(steady(), assignment=placed_at(NOW)), "it was placed 0 s ago"),
    ],
)
def test_a_schedule_leaves_a_topology_alone_that_is_not_steady(
    topology: TopologyView, text: str
) -> None:
    assert text in reason(topology, 86_400)


@pytest.mark.parametrize(
    "topology",
    [
        steady(),
        with_base(status="INACTIVE", wanted_status="INACTIVE"),
        replace(steady(), assignment=placed_at(NOW - 600)),
        # The placement of its submission, which no rebalance made.
        replace(steady(), assignment=placed_at(NOW - 5), assignment_at=Versioned(0, 1)),
        # The clock of an earlier leader was ahead.
        replace(steady(), assignment=placed_at(NOW + 500)),
    ],
    ids=["active", "inactive", "ten minutes ago", "submitted now", "a later clock"],
)
def test_a_schedule_rebalances_a_steady_topology(topology: TopologyView) -> None:
    assert reason(topology, 86_400) == ""


def test_a_schedule_waits_while_every_supervisor_is_new() -> None:
    assert "nimbus.rebalance.quiet.secs" in reason(steady(), 0, 599)
    assert reason(steady(), 0, 600) == ""
    assert reason(steady(), 0, quiet_secs=0) == ""
