"""Rebalance of a running topology: another parallelism, another spread.

Begin: one transaction makes the base REBALANCING with the delay, and stores the request in a node
below it. Finish: plan, then one transaction with tasks and assignment, which deletes the request.
End: the former status returns when every worker applies the assignment, so that no spout sends
tuples to a task that has moved (``docs/decisions.md#moves-without-replay``).
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from storm_dagster.core.reassignment import assignment_of, offered_supervisors, same_workers
from storm_dagster.core.rebalancing import new_supervisors, unsteady_reason
from storm_dagster.core.scheduling.obstacles import closed_hosts
from storm_dagster.core.submission.conf import message_timeout_secs, with_base_conf
from storm_dagster.core.transitions import apply_event, delay_of
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, InvalidRequest, StormDagsterError, Unavailable
from storm_dagster.model.placement import PlacementBatch, PlacementResult
from storm_dagster.model.records import StormBase, TaskTable, decode_record, encode_record
from storm_dagster.model.verbs import VERBS
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext, load_runnable, topology_by_name
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
from storm_dagster.operations.results import RebalanceResult
from storm_dagster.operations.steps import operation, shared_steps
from storm_dagster.operations.submit.continuing import continue_under_leaders
from storm_dagster.operations.submit.publishing import write_reasons
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


_Attempt = tuple[RebalanceResult, Callable[[], None] | None]
"""Report of a commit, and the function that then stores its reasons, if any."""


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
    epoch = ctx.current_epoch()
    # The request that the newest attempt has stored, and its report; the reply may be lost.
    attempted: list[tuple[bytes, RebalanceResult]] = []
    # The state on which the newest attempt was planned.
    planned: list[PlannedOn] = []

    def take_over(next_epoch: int) -> None:
        nonlocal epoch
        for state in planned:
            take_over_change(ctx, request_id, state, next_epoch)
        epoch = next_epoch

    def begin(current_view: ClusterView) -> RebalanceResult:
        """Plan the request on this view, and store it unless it has no effect."""
        topology = topology_by_name(current_view, name)
        for raw, attempted_report in attempted:  # The reply of our own commit was lost.
            pending = ctx.cluster.state.get_data(pending_path(topology.id))
            if pending == raw and attempted_report.topology_id == topology.id:
                return attempted_report
        planned[:] = [PlannedOn(topology.id, topology.base_at.version)]
        avoid: frozenset[str] = frozenset()
        if scheduled:
            quiet_secs = float(ctx.conf.get("nimbus.rebalance.quiet.secs", 0))
            reason = unsteady_reason(
                current_view, topology, now_secs=ctx.now_secs(), quiet_secs=quiet_secs
            )
            if reason:
                return replace(unchanged_result(topology), reason=reason)
            avoid = new_supervisors(current_view, quiet_secs)
        require_offered_host(current_view, topology)
        runnable = load_runnable(ctx, topology)
        delay = delay_of(wait_secs, message_timeout_secs(runnable.conf))
        if drains:
            delay = min(delay, int(MAX_IDLE_SECS)) + ABANDONED_SECS
        # Before the plan, because a status that does not allow it is refused here.
        waiting_base = apply_event(topology.base, "rebalance", delay_secs=delay)
        request = check_rebalance(topology, runnable, workers, dict(executors or {}), reassign)
        request = request.model_copy(update={"avoid": tuple(sorted(avoid)), "drains": drains})
        plan = plan_request(ctx, current_view, topology, runnable, request)
        if not plan.disturbs:
            # No spout has to pause before a change of the base alone.
            delay = 0
            waiting_base = apply_event(topology.base, "rebalance", delay_secs=0)
        if dry_run or not plan.changed:
            outcome = "planned" if plan.changed else "unchanged"
            return report_of_plan(topology, topology.base, plan, outcome, delay=delay)
        transaction = ctx.cluster.fenced(epoch)
        transaction.set(
            paths.topology(topology.id), encode_record(waiting_base), topology.base_at.version
        )
        transaction.create(pending_path(topology.id), encode_record(request))
        # A healing since the plan makes it void: then no spout pauses before it is planned again.
        check_assignments(transaction, current_view)
        announce(ctx, transaction, topology.id, VERBS["rebalance"].action)
        report = report_of_plan(topology, waiting_base, plan, "waiting", delay=delay)
        attempted[:] = [(encode_record(request), report)]
        commit(ctx, transaction, "rebalance")
        return report

    if view is not None and dry_run:
        return begin(view)
    purpose = f"rebalancing {name}"
    report = continue_under_leaders(ctx, lambda: retry_on_conflict(ctx, purpose, begin), take_over)
    if report.outcome != "waiting" or (report.delay_secs and not waits_for_delay):
        return report
    if drains and report.delay_secs:
        wait_until_idle(ctx, report.topology_id, report.delay_secs - ABANDONED_SECS)
    else:
        wait_for_delay(ctx, report.topology_id, report.delay_secs)
    planned[:] = [PlannedOn(report.topology_id, None)]
    moved = continue_under_leaders(ctx, lambda: _move_tasks(ctx, report.topology_id), take_over)
    ended = continue_under_leaders(ctx, lambda: end_rebalance(ctx, moved.report), take_over)
    moved.write_explanation()
    return ended


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
    epoch = ctx.current_epoch()
    # Of the newest attempt whose reply may be lost: its report, or the error that it gave up with.
    attempted: list[_Attempt] = []
    abandoned: list[StormDagsterError] = []

    def attempt(view: ClusterView) -> RebalanceResult:
        """Plan the pending request on this view, and commit it or its abandonment."""
        topology = view.topologies.get(topology_id)
        if topology is None or topology.base.status == "KILLED":
            raise killed_meanwhile(topology_id)
        path = pending_path(topology_id)
        is_pending = topology.base.status == "REBALANCING"
        node = ctx.cluster.state.get_data_with_version(path) if is_pending else None
        if node is None:
            # Its tasks have moved, or will not move; at most the spouts have to resume.
            for report, _ in attempted:
                if report.assignment == topology.assignment:
                    return report  # The reply of our own commit was lost.
            for error in () if is_pending else abandoned:
                raise error  # The reply of our own commit was lost.
            return unchanged_result(topology)  # Another process finished it.
        raw, at = node
        request = decode_record(PendingRebalance, raw, path)
        after = apply_event(topology.base, "finish_rebalance")
        transaction = ctx.cluster.fenced(epoch)
        transaction.delete(path, at.version)
        has_planned = False

        def planner(batch: PlacementBatch) -> PlacementResult:
            nonlocal has_planned
            result = ctx.planner(batch)
            has_planned = True
            return result

        planning = replace(ctx, planner=planner)
        try:
            plan = plan_request(planning, view, topology, load_runnable(ctx, topology), request)
        except (Unavailable, InvalidRequest, Conflict) as error:
            if isinstance(error, Unavailable) and not has_planned:
                # The code or the planner is unreachable: it was not decided that the rebalance does
                # not fit, so that it stays pending.
                raise
            transaction.set(
                paths.topology(topology_id), encode_record(after), topology.base_at.version
            )
            check_assignments(transaction, view)
            try:
                commit(ctx, transaction, "abandon_rebalance")
            except ReplyLost:
                abandoned[:] = [error]
                raise
            raise
        after = after.model_copy(
            update={"workers": request.workers, "executors": request.executors}
        )
        after = with_base_conf(after, plan.base_conf)
        if plan.disturbs and after.status == "ACTIVE":
            # The spouts resume when the workers know the new places.
            paused = {"status": "REBALANCING", "previous_status": "ACTIVE"}
            after = after.model_copy(update={**paused, "delay_secs": RESUME_SECS})
        transaction.set(paths.topology(topology_id), encode_record(after), topology.base_at.version)
        return _apply(ctx, transaction, view, topology, after, plan, attempted)

    result = retry_on_conflict(ctx, f"finishing the rebalance of {topology_id}", attempt)
    # Only by the process whose commit took effect.
    for report, write_explanation in attempted:
        if report is result and write_explanation is not None:
            return _Moved(result, write_explanation)
    return _Moved(result)


def _apply(
    ctx: OperationsContext,
    transaction: Transaction,
    view: ClusterView,
    topology: TopologyView,
    after: StormBase,
    plan: RebalancePlan,
    attempted: list[_Attempt],
) -> RebalanceResult:
    """Commit ``transaction``, which writes the base ``after``, with the plan's changes.

    ``attempted`` is replaced by the attempt before the commit, because its reply may be lost.
    :class:`Conflict`, a lost race, if the tasks have changed since the view was read.
    """
    report = report_of_plan(topology, after, plan, "assigned" if plan.changed else "unchanged")
    placement = plan.result.placement(after.name)
    if plan.table != topology.tasks or not same_workers(topology.assignment, placement):
        # The view has no version of the tasks, so that they are read again.
        tasks_node = ctx.cluster.state.get_data_with_version(paths.tasks(topology.id))
        if tasks_node is None or decode_record(TaskTable, tasks_node[0]) != topology.tasks:
            raise conflict(
                f"the tasks of {topology.id} changed while it was rebalanced",
                paths.tasks(topology.id),
            )
        assignment = assignment_of(
            placement,
            topology_id=topology.id,
            previous=topology.assignment,
            now_secs=ctx.now_secs(),
            kind="Assign" if plan.table == topology.tasks else "ScaleTopology",
        )
        assignment = with_change(
            ctx,
            assignment,
            "rebalanced",
            describe_rebalance(topology.base, plan.request),
            moved=placement.moved,
        )
        if plan.table != topology.tasks:
            _, tasks_at = tasks_node
            transaction.set(paths.tasks(topology.id), encode_record(plan.table), tasks_at.version)
        append_assignment(ctx, transaction, view, after.name, assignment)
        version = 0 if report.version is None else report.version + 1
        report = replace(report, assignment=assignment, version=version)
    else:
        check_assignments(transaction, view)
    moves = moves_input(view, topology, plan)
    changed = report.assignment is not topology.assignment
    write_explanation = functools.partial(
        write_reasons, ctx, topology.id, plan.result, after.name, moves
    )
    attempted[:] = [(report, write_explanation if changed else None)]
    commit(ctx, transaction, "finish_rebalance")
    return report
