"""Rebalance of a running topology: another parallelism, another spread.

Begin: one transaction makes the base REBALANCING with the delay, and stores the request in a node
below it. Finish: plan, then one transaction with tasks and assignment, which deletes the request.
End: the former status returns when every worker applies the assignment, so that no spout sends
tuples to a task that has moved (``docs/decisions.md#moves-without-replay``).
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from storm_dagster.core.reassignment import (
    Runnable,
    assignment_of,
    offered_supervisors,
    same_workers,
)
from storm_dagster.core.rebalancing import new_supervisors, unsteady_reason
from storm_dagster.core.scheduling.obstacles import closed_hosts
from storm_dagster.core.submission.conf import message_timeout_secs, with_base_conf
from storm_dagster.core.submission.kept_sizes import with_rebalanced_sizes
from storm_dagster.core.transitions import apply_event, delay_of
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, InvalidRequest, StormDagsterError, Unavailable
from storm_dagster.model.placement import PlacementBatch, PlacementResult, TopologyPlacement
from storm_dagster.model.records import (
    Assignment,
    StormBase,
    TaskTable,
    decode_record,
    encode_record,
)
from storm_dagster.model.verbs import VERBS
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import (
    OperationsContext,
    Planner,
    load_runnable,
    topology_by_name,
)
from storm_dagster.operations.live.change_records import PlannedOn, take_over_change
from storm_dagster.operations.live.rebalance_end import END_REBALANCE, end_rebalance
from storm_dagster.operations.live.rebalance_plan import (
    RebalancePlan,
    moves_input,
    plan_request,
    report_of_plan,
    unchanged_result,
)
from storm_dagster.operations.live.rebalance_request import (
    PendingRebalance,
    check_rebalance,
    describe_rebalance,
    pending_path,
)
from storm_dagster.operations.live.spout_pause import (
    ABANDONED_SECS,
    MAX_IDLE_SECS,
    RESUME_SECS,
    killed_meanwhile,
    wait_for_delay,
    wait_until_idle,
)
from storm_dagster.operations.planning import write_reasons
from storm_dagster.operations.results import RebalanceResult
from storm_dagster.operations.steps import operation, shared_steps
from storm_dagster.operations.submit.continuing import continue_under_leaders
from storm_dagster.operations.transactions import (
    ReplyLost,
    announce,
    append_assignment,
    check_assignments,
    commit,
    retry_on_conflict,
    with_change,
)
from storm_dagster.zk.cluster_state import Transaction
from storm_dagster.zk.transaction import conflict

FINISH_REBALANCE = shared_steps(
    "finish_rebalance", "finish_rebalance", END_REBALANCE, "store.placement.json"
)
ABANDON_REBALANCE = shared_steps("abandon_rebalance", "abandon_rebalance")
REBALANCE = operation("rebalance", "rebalance", FINISH_REBALANCE)


@dataclass(frozen=True)
class _Moved:
    """Outcome of a move of tasks; with the status REBALANCING its spouts have to resume."""

    report: RebalanceResult
    write_explanation: Callable[[], None] = lambda: None
    """Stores the reasons of the placement, if this process has moved the tasks."""


def rebalance(
    ctx: OperationsContext,
    name: str,
    workers: int | None = None,
    executors: Mapping[str, int] | None = None,
    reassign: bool = False,
    wait_secs: int | None = None,
    dry_run: bool = False,
    *,
    waits_for_delay: bool = True,
    scheduled: bool = False,
    drains: bool = False,
    view: ClusterView | None = None,
    request_id: str = "",
) -> RebalanceResult:
    """Change the number of workers or executors, or only restore balance.

    ``reassign`` moves every task to a new slot. The change is planned before the topology is
    touched: a request that does not fit, or has no effect, never disturbs it.

    The tasks move after a delay: ``wait_secs``, by default the message timeout; none if no task
    moves. This call sleeps for the delay and then finishes the rebalance. With a delay and without
    ``waits_for_delay`` it returns, and the leader finishes the rebalance later (``finish_due``
    calls :func:`finish_rebalance`). If the leader changes, the call continues under the next one,
    and takes over the record of ``request_id``, the request for which a leader launched this run.
    It ends if the topology was changed or killed since it was planned.

    A ``scheduled`` rebalance, which no user asked for, has no effect unless the topology is steady
    when it begins (``reason`` names why), and does not move tasks to a supervisor that registered
    less than ``nimbus.rebalance.quiet.secs`` ago.

    With ``drains`` it moves tasks off hosts that drain. The delay is at most 30 s, and ends as soon
    as no tuple is under way. If too few slots are free elsewhere, some workers stay.

    The outcome is ``unchanged`` if the request has no effect, ``waiting`` if the leader finishes
    it, ``planned`` for a ``dry_run``. ``view`` is used by a ``dry_run`` only, so that many of them
    read the cluster once. Raises :class:`InvalidRequest` for a wrong component or number,
    :class:`NotAlive`, :class:`Conflict` in a status that does not allow a rebalance, or the
    planner's error.
    """
    run = _Rebalance(
        ctx,
        name,
        workers=workers,
        executors=dict(executors or {}),
        reassign=reassign,
        wait_secs=wait_secs,
        dry_run=dry_run,
        waits_for_delay=waits_for_delay,
        scheduled=scheduled,
        drains=drains,
        request_id=request_id,
        epoch=ctx.current_epoch(),
    )
    if view is not None and dry_run:
        return run.begin(view)
    return run.run()


@dataclass
class _Rebalance:
    """A call of :func:`rebalance`; the first fields are its arguments."""

    ctx: OperationsContext
    name: str
    workers: int | None
    executors: dict[str, int]
    reassign: bool
    wait_secs: int | None
    dry_run: bool
    waits_for_delay: bool
    scheduled: bool
    drains: bool
    request_id: str
    epoch: int
    """Epoch under which the call writes."""
    attempted: tuple[bytes, RebalanceResult] | None = None
    """The request that the newest attempt has stored, and its report; the reply may be lost."""
    planned_on: PlannedOn | None = None
    """The state on which the newest attempt was planned."""

    def run(self) -> RebalanceResult:
        """Begin the rebalance, and finish it after its delay unless the leader does."""
        ctx = self.ctx
        report = continue_under_leaders(ctx, self._store, self._take_over)
        if report.outcome != "waiting" or (report.delay_secs and not self.waits_for_delay):
            return report
        if self.drains and report.delay_secs:
            max_secs = report.delay_secs - ABANDONED_SECS
            wait_until_idle(ctx, report.topology_id, max_secs, except_lost=True)
        else:
            wait_for_delay(ctx, report.topology_id, report.delay_secs)
        self.planned_on = PlannedOn(report.topology_id, None)
        moved = continue_under_leaders(
            ctx, lambda: _move_tasks(ctx, report.topology_id), self._take_over
        )
        ended = continue_under_leaders(
            ctx, lambda: end_rebalance(ctx, moved.report), self._take_over
        )
        moved.write_explanation()
        return ended

    def begin(self, view: ClusterView) -> RebalanceResult:
        """Plan the request on this view, and store it unless it has no effect."""
        topology = topology_by_name(view, self.name)
        stored_report = self._stored_report(topology)
        if stored_report is not None:
            return stored_report
        self.planned_on = PlannedOn(topology.id, topology.base_at.version)
        avoid: frozenset[str] = frozenset()
        if self.scheduled:
            reason, avoid = self._scheduled_limits(view, topology)
            if reason:
                return replace(unchanged_result(topology), reason=reason)
        require_offered_host(view, topology)
        runnable = load_runnable(self.ctx, topology)
        delay = self._delay_secs(runnable)
        # Before the plan, because a status that does not allow it is refused here.
        waiting_base = apply_event(topology.base, "rebalance", delay_secs=delay)
        request = check_rebalance(topology, runnable, self.workers, self.executors, self.reassign)
        request = request.model_copy(update={"avoid": tuple(sorted(avoid)), "drains": self.drains})
        plan = plan_request(self.ctx, view, topology, runnable, request)
        if not plan.disturbs:
            # No spout has to pause before a change of the base alone.
            delay = 0
            waiting_base = apply_event(topology.base, "rebalance", delay_secs=0)
        if self.dry_run or not plan.changed:
            outcome = "planned" if plan.changed else "unchanged"
            return report_of_plan(topology, topology.base, plan, outcome, delay=delay)
        report = report_of_plan(topology, waiting_base, plan, "waiting", delay=delay)
        self._store_request(view, topology, waiting_base, request, report)
        return report

    def _store(self) -> RebalanceResult:
        """Plan and store the request on the current view; retry after lost races."""
        return retry_on_conflict(self.ctx, f"rebalancing {self.name}", self.begin)

    def _take_over(self, next_epoch: int) -> None:
        """Continue under the next leader; its errors end the rebalance."""
        if self.planned_on is not None:
            take_over_change(self.ctx, self.request_id, self.planned_on, next_epoch)
        self.epoch = next_epoch

    def _stored_report(self, topology: TopologyView) -> RebalanceResult | None:
        """The report of an earlier attempt that took effect although its reply was lost."""
        if self.attempted is None:
            return None
        raw, report = self.attempted
        pending = self.ctx.cluster.state.get_data(pending_path(topology.id))
        return report if pending == raw and report.topology_id == topology.id else None

    def _scheduled_limits(
        self, view: ClusterView, topology: TopologyView
    ) -> tuple[str, frozenset[str]]:
        """Limits of a rebalance that no user asked for.

        They are the reason why it has no effect now, or ``""``, and the supervisors to avoid.
        """
        ctx = self.ctx
        quiet_secs = float(ctx.conf.get("nimbus.rebalance.quiet.secs", 0))
        reason = unsteady_reason(view, topology, now_secs=ctx.now_secs(), quiet_secs=quiet_secs)
        return reason, new_supervisors(view, quiet_secs)

    def _delay_secs(self, runnable: Runnable) -> int:
        """Seconds between the pause of the spouts and the move of the tasks."""
        delay = delay_of(self.wait_secs, message_timeout_secs(runnable.conf))
        if self.drains:
            delay = min(delay, int(MAX_IDLE_SECS)) + ABANDONED_SECS
        return delay

    def _store_request(
        self,
        view: ClusterView,
        topology: TopologyView,
        waiting_base: StormBase,
        request: PendingRebalance,
        report: RebalanceResult,
    ) -> None:
        """Store the request with the base that waits for its delay, in one transaction."""
        raw = encode_record(request)
        transaction = self.ctx.cluster.fenced(self.epoch)
        transaction.set(
            paths.topology(topology.id), encode_record(waiting_base), topology.base_at.version
        )
        transaction.create(pending_path(topology.id), raw)
        # A healing since the plan makes it void: then no spout pauses before it is planned again.
        check_assignments(transaction, view)
        announce(self.ctx, transaction, topology.id, VERBS["rebalance"].action)
        self.attempted = (raw, report)
        commit(self.ctx, transaction, "rebalance")


def require_offered_host(view: ClusterView, topology: TopologyView) -> None:
    """Raise :class:`Unavailable` if no host may take a task.

    A rebalance would then have no effect.
    """
    if offered_supervisors(view, placing=[topology.id]):
        return
    reason = closed_hosts(view, [topology.id], ()) or "no supervisor is registered: start one"
    raise Unavailable(
        f"topology {topology.base.name!r} is not changed, because no host may take its tasks: "
        f"{reason}"
    )


def finish_rebalance(ctx: OperationsContext, topology_id: str) -> RebalanceResult:
    """Apply the pending rebalance of a REBALANCING topology.

    Then, once its workers apply the new assignment, the topology gets its former status; if this
    process cannot do that, another one does, five seconds later. If the rebalance no longer fits,
    the former status returns with the former placement, and the planner's error is raised. While
    its code cannot be read or the planner does not respond, the topology stays REBALANCING, to be
    finished later. If another process has finished it already, the outcome is ``unchanged``.
    :class:`NotAlive` if the topology was killed.
    """
    moved = _move_tasks(ctx, topology_id)
    ended = end_rebalance(ctx, moved.report)
    moved.write_explanation()
    return ended


def _move_tasks(ctx: OperationsContext, topology_id: str) -> _Moved:
    """Apply the pending rebalance, up to the move of the tasks."""
    move = _Move(ctx, topology_id, ctx.current_epoch())
    result = retry_on_conflict(ctx, f"finishing the rebalance of {topology_id}", move.attempt)
    # Only the process whose commit took effect stores the reasons.
    if move.attempted is not None and move.attempted.report is result:
        return move.attempted
    return _Moved(result)


@dataclass
class _NotedPlanner:
    """Planner that notes if it has responded."""

    planner: Planner
    has_responded: bool = False

    def __call__(self, batch: PlacementBatch) -> PlacementResult:
        """The result of the planner."""
        result = self.planner(batch)
        self.has_responded = True
        return result


@dataclass
class _Move:
    """Move of the tasks of one pending rebalance."""

    ctx: OperationsContext
    topology_id: str
    epoch: int
    attempted: _Moved | None = None
    """Outcome of the newest attempt; the reply to its commit may be lost."""
    abandoned: StormDagsterError | None = None
    """Error with which an attempt has abandoned the rebalance; the reply was lost."""

    def attempt(self, view: ClusterView) -> RebalanceResult:
        """Plan the pending request on this view, and commit it or its abandonment."""
        ctx = self.ctx
        topology = view.topologies.get(self.topology_id)
        if topology is None or topology.base.status == "KILLED":
            raise killed_meanwhile(self.topology_id)
        path = pending_path(self.topology_id)
        is_pending = topology.base.status == "REBALANCING"
        node = ctx.cluster.state.get_data_with_version(path) if is_pending else None
        if node is None:
            return self._result_without_request(topology)
        raw, at = node
        request = decode_record(PendingRebalance, raw, path)
        transaction = ctx.cluster.fenced(self.epoch)
        transaction.delete(path, at.version)
        planner = _NotedPlanner(ctx.planner)
        planning = replace(ctx, planner=planner)
        try:
            plan = plan_request(planning, view, topology, load_runnable(ctx, topology), request)
        except (Unavailable, InvalidRequest, Conflict) as error:
            if isinstance(error, Unavailable) and not planner.has_responded:
                # The code or the planner is unreachable: it was not decided that the rebalance does
                # not fit, so that it stays pending.
                raise
            self._abandon(transaction, view, topology, error)
            raise
        after = _base_after(topology, request, plan)
        transaction.set(paths.topology(topology.id), encode_record(after), topology.base_at.version)
        return self._apply(transaction, view, topology, after, plan)

    def _result_without_request(self, topology: TopologyView) -> RebalanceResult:
        """The result if the tasks have moved, or will not move.

        At most the spouts have to resume.
        """
        if self.attempted is not None and self.attempted.report.assignment == topology.assignment:
            return self.attempted.report  # The reply of our own commit was lost.
        if self.abandoned is not None and topology.base.status != "REBALANCING":
            raise self.abandoned  # The reply of our own commit was lost.
        return unchanged_result(topology)  # Another process finished it.

    def _abandon(
        self,
        transaction: Transaction,
        view: ClusterView,
        topology: TopologyView,
        error: StormDagsterError,
    ) -> None:
        """Commit ``transaction`` with the former status, because of ``error``."""
        after = apply_event(topology.base, "finish_rebalance")
        transaction.set(paths.topology(topology.id), encode_record(after), topology.base_at.version)
        check_assignments(transaction, view)
        try:
            commit(self.ctx, transaction, "abandon_rebalance")
        except ReplyLost:
            self.abandoned = error
            raise

    def _apply(
        self,
        transaction: Transaction,
        view: ClusterView,
        topology: TopologyView,
        after: StormBase,
        plan: RebalancePlan,
    ) -> RebalanceResult:
        """Commit ``transaction``, which writes the base ``after``, with the plan's changes.

        :class:`Conflict`, a lost race, if the tasks have changed since the view was read.
        """
        ctx = self.ctx
        report = report_of_plan(topology, after, plan, "assigned" if plan.changed else "unchanged")
        placement = plan.result.placement(after.name)
        is_same = plan.table == topology.tasks and same_workers(topology.assignment, placement)
        if is_same and not plan.resizes:
            check_assignments(transaction, view)
            self.attempted = _Moved(report)
        else:
            assignment = self._write_tasks(transaction, topology, plan, placement)
            append_assignment(ctx, transaction, view, after.name, assignment)
            version = 0 if report.version is None else report.version + 1
            report = replace(report, assignment=assignment, version=version)
            moves = moves_input(view, topology, plan)
            write_explanation = functools.partial(
                write_reasons, ctx, topology.id, plan.result, after.name, moves
            )
            self.attempted = _Moved(report, write_explanation)
        commit(ctx, transaction, "finish_rebalance")
        return report

    def _write_tasks(
        self,
        transaction: Transaction,
        topology: TopologyView,
        plan: RebalancePlan,
        placement: TopologyPlacement,
    ) -> Assignment:
        """Add the tasks of the plan to ``transaction``; return the new assignment."""
        ctx = self.ctx
        path = paths.tasks(topology.id)
        # The view has no version of the tasks, so that they are read again.
        node = ctx.cluster.state.get_data_with_version(path)
        if node is None or decode_record(TaskTable, node[0]) != topology.tasks:
            raise conflict(f"the tasks of {topology.id} changed while it was rebalanced", path)
        if plan.table == topology.tasks:
            kind = "Assign"
        else:
            kind = "ScaleTopology"
            _, tasks_at = node
            transaction.set(path, encode_record(plan.table), tasks_at.version)
        assignment = assignment_of(
            placement,
            topology_id=topology.id,
            previous=topology.assignment,
            now_secs=ctx.now_secs(),
            kind=kind,
        )
        return with_change(
            ctx,
            assignment,
            "rebalanced",
            describe_rebalance(topology.base, plan.request, resizes=plan.resizes),
            moved=placement.moved,
        )


def _base_after(
    topology: TopologyView, request: PendingRebalance, plan: RebalancePlan
) -> StormBase:
    """The base with the requested numbers; REBALANCING if the spouts have to resume."""
    after = apply_event(topology.base, "finish_rebalance")
    after = with_rebalanced_sizes(after, request.workers, request.executors)
    after = with_base_conf(after, plan.base_conf)
    if plan.disturbs and after.status == "ACTIVE":
        # The spouts resume when the workers know the new places.
        paused = {"status": "REBALANCING", "previous_status": "ACTIVE"}
        after = after.model_copy(update={**paused, "delay_secs": RESUME_SECS})
    return after
