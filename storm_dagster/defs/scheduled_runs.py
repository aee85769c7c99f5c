"""Runs of schedules that rebalance: one for an assignment, and another one an hour later.

Dagster compares the run keys of a schedule within one tick only. Without a limit a run that fails,
or that finds the topology not steady, would be requested again by every tick.
"""

import time

import dagster as dg

from storm_dagster.defs.keys import run_under_way
from storm_dagster.model.view import TopologyView

_ASSIGNMENT_TAG = "storm/rebalanced_assignment"
"""Run tag: topology id and version of the assignment that the run is to improve."""
_RETRY_SECS = 3600.0
"""Time after a request in which no other run is requested for the same assignment."""


def assignment_tags(topology: TopologyView) -> dict[str, str]:
    """Tags of a run that is requested for the assignment of this topology."""
    version = -1 if topology.assignment_at is None else topology.assignment_at.version
    return {_ASSIGNMENT_TAG: f"{topology.id}:{version}"}


def earlier_request(
    instance: dg.DagsterInstance, topology: TopologyView, now: float | None = None
) -> str:
    """Reason why no run must be requested for the assignment now; empty if one may.

    ``now`` is epoch seconds. A run that changes the assignment is no longer counted.
    """
    tags = assignment_tags(topology)
    if run_under_way(instance, now, tags=tags):
        return "a run for this assignment is under way already"
    newest = instance.get_run_records(dg.RunsFilter(tags=tags), limit=1)
    if not newest:
        return ""
    age_secs = (now or time.time()) - newest[0].create_timestamp.timestamp()
    if age_secs >= _RETRY_SECS:
        return ""
    return (
        f"run {newest[0].dagster_run.run_id} for this assignment has not changed it: another one "
        f"is requested {_RETRY_SECS / 60:.0f} minutes after it"
    )
