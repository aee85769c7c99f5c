"""Scheduled rebalances: which hosts count, and which gain is worth it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from storm_dagster.core.rebalancing import Spread, largest_gain, new_supervisors, spread_of
from storm_dagster.model.records import SupervisorInfo
from storm_dagster.model.view import ClusterView


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
