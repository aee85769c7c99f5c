"""Reassignment: dead tasks get a new slot.

The causes come from :func:`storm_dagster.core.liveness.detection.observe`. The observer is the
heartbeat sensor (through a run), or the leader while no sensor is armed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.reassignment import (
    assignment_of,
    causes_still_true,
    monitor_batch,
    same_workers,
)
from storm_dagster.core.scheduling.obstacles import closed_hosts
from storm_dagster.core.transitions import HEALED
from storm_dagster.model import paths
from storm_dagster.model.errors import Fenced, StormDagsterError, Unavailable
from storm_dagster.model.healing_pause import HealingPause
from storm_dagster.model.multimap import multimap
from storm_dagster.model.placement import PlacementBatch, PlacementResult, TopologyPlacement
from storm_dagster.model.records import HEALING, Assignment
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext, load_runnable
from storm_dagster.operations.planning import write_reasons
from storm_dagster.operations.results import ReassignResult
from storm_dagster.operations.steps import operation
from storm_dagster.operations.submit.continuing import continue_under_leaders
from storm_dagster.operations.transactions import (
    ReplyLost,
    append_assignment,
    commit,
    retry_on_conflict,
    with_change,
)
from storm_dagster.operations.upgrade import roll_back_if_upgraded

REASSIGN = operation("reassign", "reassign", "store.placement.json")
_PAUSE_GRACE_MS = 60_000
"""Time that a leader has to end a pause that is over."""


def reassign(
    ctx: OperationsContext, causes: Iterable[Cause], *, despite_pause: bool = False
) -> list[ReassignResult]:
    """Reassign the tasks of the causes.

    One result and one transaction per topology, in topology id order; empty without causes. A cause
    of an older assignment is ``void``, and so is one whose worker came back. An unchanged placement
    is not written. If the leader changes, the topology is planned once more under the next one; a
    leader's own call ends with :class:`Fenced`. Each topology fails alone with any other error
    (``failed``, with the reason). PySpark plans; if it is unreachable the local planner does, and
    the result names it. While operators have paused healing each topology is ``paused``, unless an
    operator asks (``despite_pause``).
    """
    by_topology = multimap((cause.topology_id, cause) for cause in causes)
    if not by_topology:
        return []
    epoch = ctx.current_epoch()

    def follow(next_epoch: int) -> None:
        """Continue under the next leader: each attempt plans on the current view."""
        nonlocal epoch
        epoch = next_epoch

    def reassign_one(topology_id: str, own_causes: list[Cause]) -> ReassignResult:
        return continue_under_leaders(
            ctx,
            lambda: _Reassignment(ctx, topology_id, own_causes, despite_pause, epoch).run(),
            follow,
        )

    reports: list[ReassignResult] = []
    for topology_id, own_causes in sorted(by_topology.items()):
        try:
            reports.append(reassign_one(topology_id, own_causes))
        except Fenced:
            raise
        except StormDagsterError as error:
            ctx.log.warning("reassigning %s failed: %s", topology_id, error.message)
            keys = tuple(cause.key for cause in own_causes)
            name = own_causes[0].name
            reports.append(ReassignResult(topology_id, name, "failed", keys, error=error.message))
    return reports


def plan_or_fall_back(
    ctx: OperationsContext, batch: PlacementBatch
) -> tuple[PlacementResult, str | None]:
    """Plan the batch, with the local planner if PySpark is unreachable.

    Returns the placement, and the reason why the local planner made it (``None`` if PySpark did).
    """
    try:
        return ctx.planner(batch), None
    except Unavailable as error:
        ctx.log.warning("placing with the plain-Python planner: %s", error.message)
        return ctx.fallback(batch), error.message


def _is_in_force(ctx: OperationsContext, pause: HealingPause | None) -> bool:
    """True for a pause by operators that is not over for a minute.

    The clock is that of this machine, because without a leader no other process ends a pause.
    """
    return pause is not None and ctx.now_secs() * 1000 < pause.until_ms + _PAUSE_GRACE_MS


@dataclass
class _Reassignment:
    """Reassignment of the dead tasks of one topology."""

    ctx: OperationsContext
    topology_id: str
    causes: list[Cause]
    despite_pause: bool
    """As for :func:`reassign`."""
    epoch: int
    """Epoch under which it writes."""
    committed: ReassignResult | None = None
    """Report of the newest attempt whose reply was lost."""
    planned: PlacementResult | None = None
    """Result of the planner for the newest attempt to commit."""

    def run(self) -> ReassignResult:
        """Reassign the tasks of those of the causes that still hold.

        An upgraded worker among them rolls the gray upgrade back. The reasons of the placement are
        stored after its commit.
        """
        ctx = self.ctx
        if not self.despite_pause and _is_in_force(ctx, ctx.cluster.healing_pause()):
            return self._report(self.causes[0].name, "paused")
        # Before the placement, so that the reassigned tasks run the former code.
        roll_back_if_upgraded(ctx, self.topology_id, self.causes)
        report = retry_on_conflict(ctx, f"reassigning {self.topology_id}", self.attempt)
        if report.status == "assigned" and self.planned is not None:
            write_reasons(ctx, self.topology_id, self.planned, report.name)
        return report

    def attempt(self, view: ClusterView) -> ReassignResult:
        """Plan on this view, and commit the placement if it differs from the current one."""
        ctx = self.ctx
        topology = view.topologies.get(self.topology_id)
        if topology is None or topology.base.status not in HEALED:
            return self._report(self.causes[0].name, "gone")
        is_paused = not self.despite_pause and _is_in_force(ctx, view.healing_pause)
        if is_paused and self.committed is None:
            return self._report(self.causes[0].name, "paused")
        name = topology.base.name
        true_causes = causes_still_true(view, topology, self.causes)
        if not true_causes or topology.tasks is None or topology.assignment is None:
            if self.committed is not None and topology.assignment == self.committed.assignment:
                return self.committed  # The reply of our own commit was lost.
            return self._report(name, "void")
        runnable = load_runnable(ctx, topology)
        batch = monitor_batch(view, topology, runnable, topology.tasks, true_causes)
        result, fallback_reason = plan_or_fall_back(ctx, batch)
        placement = result.placement(name)
        report = replace(
            self._report(name, "unchanged"),
            planner=result.planner,
            why_planner=fallback_reason,
            placement=placement,
        )
        if placement.status == "failed":
            # As for a submission, the error names the topologies that are in the way.
            closed = closed_hosts(view, [topology.id], ())
            error = "; ".join(text for text in (placement.error, closed) if text)
            return replace(report, status="failed", error=error)
        if placement.status == "unchanged" or same_workers(topology.assignment, placement):
            return replace(report, assignment=topology.assignment)
        assignment = _assignment_after(ctx, topology, placement, true_causes)
        report = replace(report, assignment=assignment, assign_secs=result.assign_secs)
        self.planned = result
        return self._commit(view, topology, placement, report)

    def _commit(
        self,
        view: ClusterView,
        topology: TopologyView,
        placement: TopologyPlacement,
        report: ReassignResult,
    ) -> ReassignResult:
        """Store the assignment of the ``report``; return the report of the commit."""
        assert topology.assignment_at is not None and report.assignment is not None
        # The plan was made from the numbers and the status in the base.
        transaction = self.ctx.cluster.fenced(self.epoch).check(
            paths.topology(topology.id), topology.base_at.version
        )
        append_assignment(self.ctx, transaction, view, report.name, report.assignment)
        report = replace(
            report,
            status="assigned",
            moved=placement.moved,
            version=topology.assignment_at.version + 1,
        )
        try:
            commit(self.ctx, transaction, "reassign")
        except ReplyLost:
            self.committed = report
            raise
        self.ctx.log.info("reassigned %d tasks of %s", placement.moved, topology.id)
        return report

    def _report(self, name: str, status: str) -> ReassignResult:
        """The report of a reassignment without an effect."""
        keys = tuple(cause.key for cause in self.causes)
        return ReassignResult(self.topology_id, name, status, keys)


def _assignment_after(
    ctx: OperationsContext,
    topology: TopologyView,
    placement: TopologyPlacement,
    causes: list[Cause],
) -> Assignment:
    """The assignment of the placement, with the causes in its history.

    The tasks of the causes start now, also those that stay in their slot.
    """
    dead_tasks: set[int] = set()
    for cause in causes:
        dead_tasks.update(cause.tasks)
    assignment = assignment_of(
        placement,
        topology_id=topology.id,
        previous=topology.assignment,
        now_secs=ctx.now_secs(),
        restarted=frozenset(dead_tasks),
    )
    reasons = dict.fromkeys(cause.words() for cause in causes)
    return with_change(
        ctx,
        assignment,
        HEALING,
        "; ".join(reasons),
        moved=placement.moved,
        outage_secs=round(max(cause.silent_secs for cause in causes)),
    )
