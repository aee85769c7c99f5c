"""Rules of scheduled rebalances: steady topologies, counted hosts, and gains that are worth it.

A schedule judges a topology when it asks for the run, and the run judges it once more when it
begins: in between a host may have been lost, or a healing may have moved tasks.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from storm_dagster.core.liveness.causes import SPREAD_PAUSE_SECS
from storm_dagster.core.transitions import STEADY
from storm_dagster.model.view import ClusterView, TopologyView


def new_supervisors(view: ClusterView, quiet_secs: float) -> frozenset[str]:
    """Ids of the supervisors that registered less than ``quiet_secs`` ago.

    A scheduled rebalance does not count them, because a host that just came may go again. A
    supervisor of a release that does not state its time counts at once.
    """
    return frozenset(
        supervisor_id
        for supervisor_id, info in view.supervisors.items()
        if 0 <= info.present_secs < quiet_secs
    )


def unsteady_reason(
    view: ClusterView, topology: TopologyView, *, now_secs: int, quiet_secs: float
) -> str:
    """Reason why no schedule must rebalance the topology now; empty if it may.

    ``quiet_secs`` is ``nimbus.rebalance.quiet.secs``.
    """
    base = topology.base
    assignment = topology.assignment
    if base.status not in STEADY or base.wanted_status != base.status:
        return f"it is {base.status}, wanted {base.wanted_status}"
    if assignment is None or topology.assignment_at is None:
        return "it has no assignment"
    if topology.missing_workers:
        # Dead workers are healed first: a rebalance would move tasks that are about to move anyway.
        return f"{len(topology.missing_workers)} of its workers do not live, healing comes first"
    age = now_secs - assignment.timestamp_ms // 1000
    if topology.assignment_at.version and 0 <= age < SPREAD_PAUSE_SECS:
        return f"it was placed {age} s ago: it is rebalanced again after {SPREAD_PAUSE_SECS:g} s"
    if view.supervisors and new_supervisors(view, quiet_secs) == view.supervisors.keys():
        return (
            f"every supervisor registered less than {quiet_secs:g} s ago "
            "(nimbus.rebalance.quiet.secs)"
        )
    return ""


class Spread(NamedTuple):
    """Unevenness of the tasks of a topology, by two measures; 0 is even."""

    fullest_worker: float
    """Tasks of the fullest worker beyond its fair share, in fair shares."""
    deviation: float
    """Standard deviation of the numbers of workers of all supervisors, in their mean.

    Unlike the excess of the fullest supervisor, it counts one that is empty while the fullest is
    as full as it must be.
    """


def spread_of(
    workers: Iterable[tuple[str, int]], *, target_workers: int, supervisors: int
) -> Spread:
    """Spread of a placement.

    ``workers`` are (supervisor id, number of tasks) of each slot, ``target_workers`` is the number
    of workers that the tasks should be spread over, ``supervisors`` the number of usable ones.
    """
    used = [(node, tasks) for node, tasks in workers if tasks > 0]
    total = sum(tasks for _, tasks in used)
    if not total:
        return Spread(0.0, 0.0)
    # The fair share is rounded up: with it no spread of whole tasks can be better.
    fair_tasks = -(-total // max(1, min(target_workers, total)))
    fullest = max(tasks for _, tasks in used)
    counts = list(Counter(node for node, _ in used).values())
    counts += [0] * (supervisors - len(counts))
    mean = len(used) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    return Spread(
        fullest_worker=fullest / fair_tasks - 1.0,
        deviation=variance**0.5 / mean,
    )


def largest_gain(current: Spread, planned: Spread) -> tuple[float, float]:
    """Values before and after of the measure that gains most by the plan."""
    return max(zip(current, planned, strict=True), key=lambda pair: pair[0] - pair[1])
