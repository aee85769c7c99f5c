"""Plans of reassignments without an effect, before a healer tries a second time.

See ``docs/decisions.md#worthwhile-attempts``.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.liveness.retries import Outlook, plan_key
from storm_dagster.core.reassignment import Runnable, monitor_batch, same_workers
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.core.usable_slots import UserBounds
from storm_dagster.model.bounded_map import BoundedMap
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.model.view import ClusterView, TopologyView

_MAX_RESULTS = 2000
"""Results that are kept: a few for each of some hundred topologies that wait."""
_MAX_CODES = 100
"""Topologies whose code is kept."""
_MAX_AGE_SECS = 600.0
"""Time after which results and code are dropped: a conf of the cluster may have changed."""
_MAX_PLANNING_SECS = 1.0
"""Time after which a poll begins no second plan."""
_UNREADABLE_SECS = 30.0
"""Time for which a topology is not read again whose code was not in reach."""


class ReassignmentOutlook:
    """Results of plans, by everything that they were made from.

    A host that comes and goes is planned once for each of its states. A poll that has planned for a
    second leaves other topologies to the next poll, which begins with them.
    """

    def __init__(self, max_planning_secs: float = _MAX_PLANNING_SECS) -> None:
        self._max_planning_secs = max_planning_secs
        self._results: BoundedMap[tuple[Any, ...], bool] = BoundedMap(_MAX_RESULTS)
        self._codes: BoundedMap[str, Runnable] = BoundedMap(_MAX_CODES)
        self._unreadable: BoundedMap[str, float] = BoundedMap(_MAX_CODES)
        """Prefix of the code's keys -> time of the last read that failed."""
        self._begun_at = time.monotonic()
        """Time from which on results are kept."""
        self._postponed: set[str] = set()
        """Ids of the topologies that the last poll has left to the next one."""

    def poll(self, view: ClusterView, load: Callable[[TopologyView], Runnable]) -> Outlook:
        """The outlook for one poll of the cluster.

        ``load`` reads code and conf of a topology. If it raises an error of this package, the
        result is ``None``.
        """
        now = time.monotonic()
        if now - self._begun_at > _MAX_AGE_SECS:
            self._results.clear()
            self._codes.clear()
            self._begun_at = now
        first = self._postponed & view.topologies.keys()
        self._postponed = set()
        planned = 0

        def outlook(causes: Sequence[Cause]) -> bool | None:
            nonlocal planned
            topology = view.topologies[causes[0].topology_id]
            try:
                runnable = self._runnable(topology, load)
            except StormDagsterError:
                return None
            key = plan_key(view, causes, UserBounds.from_conf(runnable.conf))
            result = self._results.get(key)
            if result is not None:
                return result
            # One plan in each poll, however long it takes.
            is_late = planned > 0 and time.monotonic() - now >= self._max_planning_secs
            if is_late or (first and topology.id not in first):
                self._postponed.add(topology.id)
                return False
            planned += 1
            result = is_changed_by_plan(view, topology, runnable, causes)
            self._results[key] = result
            return result

        return outlook

    def _runnable(
        self, topology: TopologyView, load: Callable[[TopologyView], Runnable]
    ) -> Runnable:
        """Code and conf of the topology; the error of ``load`` if they are not in reach."""
        runnable = self._codes.get(topology.code_dir)
        if runnable is not None:
            return runnable
        failed_at = self._unreadable.get(topology.code_dir)
        now = time.monotonic()
        if failed_at is not None and now - failed_at < _UNREADABLE_SECS:
            raise Unavailable(f"the code of {topology.id} was not in reach a moment ago: wait")
        try:
            runnable = load(topology)
        except StormDagsterError:
            self._unreadable[topology.code_dir] = time.monotonic()
            raise
        self._codes[topology.code_dir] = runnable
        return runnable


def is_changed_by_plan(
    view: ClusterView, topology: TopologyView, runnable: Runnable, causes: Sequence[Cause]
) -> bool:
    """True if the local planner's plan for these causes changes the assignment."""
    if topology.tasks is None or topology.assignment is None:
        return False
    batch = monitor_batch(view, topology, runnable, topology.tasks, causes)
    placement = plan_placement(batch).placement(topology.base.name)
    if placement.status != "assigned":
        return False
    return not same_workers(topology.assignment, placement)
