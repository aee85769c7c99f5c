"""Rebalance of a running topology: other parallelism, other spread.

Begin: the base becomes REBALANCING with the delay, and the request is stored in a node below it by
the same transaction. Finish: plan, then one transaction with tasks, assignment and the former
status.
"""

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from storm_dagster.core.reassignment import (
    Runnable,
    assignment_of,
    offered_supervisors,
    rebalance_batch,
    same_workers,
)
from storm_dagster.core.submission.conf import message_timeout_secs
from storm_dagster.core.submission.tasks import fixed_task_components, rescale
from storm_dagster.core.transitions import apply_event, delay_of
from storm_dagster.model import paths
from storm_dagster.model.conf import check_value
from storm_dagster.model.errors import (
    Conflict,
    InvalidRequest,
    NotAlive,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.placement import PlacementBatch, PlacementResult
from storm_dagster.model.records import Record, StormBase, TaskTable, decode_record, encode_record
from storm_dagster.model.slot import Slot
from storm_dagster.model.verbs import VERBS
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext, load_runnable, topology_by_name
from storm_dagster.operations.results import RebalanceResult
from storm_dagster.operations.steps import operation, shared_steps
from storm_dagster.operations.submit.publishing import plan_or_raise, write_reasons
from storm_dagster.operations.transactions import (
    ReplyLost,
    announce,
    append_assignment,
    commit,
    retry_on_conflict,
    with_change,
)
from storm_dagster.zk.cluster_state import Transaction
from storm_dagster.zk.transaction import conflict

FINISH_REBALANCE = shared_steps("finish_rebalance", "finish_rebalance", "store.placement.json")
ABANDON_REBALANCE = shared_steps("abandon_rebalance", "abandon_rebalance")
REBALANCE = operation("rebalance", "rebalance", FINISH_REBALANCE)


class PendingRebalance(Record):
    """A requested rebalance, stored at ``/topology/<id>/rebalance`` while it waits for its
    delay.
    """

    workers: int
    executors: dict[str, int]
    reassign: bool = False


@dataclass(frozen=True)
class _Plan:
    wanted: PendingRebalance
    table: TaskTable
    result: PlacementResult
    changed: bool
    disturbs: bool
    """Whether tasks move, come or go; else only the base changes, and no spout has to pause."""
    bound: bool
    """Whether more than sizes decides what moves: a user-defined assignment, isolation, tasks apart
    or together.
    """


def _pending_path(topology_id: str) -> str:
    return f"{paths.topology(topology_id)}/rebalance"


def rebalance(
    ctx: OperationsContext,
    name: str,
    workers: int | None = None,
    executors: Mapping[str, int] | None = None,
    reassign: bool = False,
    wait_secs: int | None = None,
    dry_run: bool = False,
    *,
    stay: bool = True,
    view: ClusterView | None = None,
) -> RebalanceResult:
    """Change the number of workers or executors, or only restore balance; ``reassign`` places every
    task again.

    It is planned before anything changes: what does not fit, or changes nothing, never disturbs the
    topology. The delay is ``wait_secs``, else the message timeout; with ``stay`` this waits for it
    and finishes, without it :func:`finish_rebalance` does (``finish_due`` calls it). Raises
    :class:`InvalidRequest`, :class:`NotAlive`, :class:`Conflict`, or :class:`Unavailable` with the
    planner's message; a run never uses the local planner in place of PySpark. A ``dry_run`` may be
    given the ``view`` to plan with, so that many of them read the cluster once.
    """
    epoch = ctx.current_epoch()
    sent: list[tuple[bytes, RebalanceResult]] = []

    def begin(view: ClusterView) -> RebalanceResult:
        topology = topology_by_name(view, name)
        for raw, asked in sent:  # Its reply was lost.
            if (
                ctx.cluster.state.get_data(_pending_path(topology.id)) == raw
                and asked.topology_id == topology.id
            ):
                return asked
        require_offered_host(view, topology)
        runnable = load_runnable(ctx, topology)
        delay = delay_of(wait_secs, message_timeout_secs(runnable.conf))
        marked = apply_event(topology.base, "rebalance", delay_secs=delay)
        wanted = _check_request(topology, runnable, workers, dict(executors or {}), reassign)
        plan = _plan(ctx, view, topology, runnable, wanted)
        if not plan.disturbs:
            marked, delay = apply_event(topology.base, "rebalance", delay_secs=0), 0
        if dry_run or not plan.changed:
            outcome = "planned" if plan.changed else "unchanged"
            return _report(topology, topology.base, plan, outcome, delay=delay)
        transaction = ctx.cluster.fenced(epoch)
        transaction.set(
            paths.topology(topology.id), encode_record(marked), topology.base_at.version
        )
        transaction.create(_pending_path(topology.id), encode_record(wanted))
        announce(ctx, transaction, topology.id, VERBS["rebalance"].action)
        report = _report(topology, marked, plan, "waiting", delay=delay)
        sent[:] = [(encode_record(wanted), report)]
        commit(ctx, transaction, "rebalance")
        return report

    if view is not None and dry_run:
        return begin(view)
    report = retry_on_conflict(ctx, f"rebalancing {name}", begin)
    if report.outcome != "waiting" or (report.delay_secs and not stay):
        return report
    if report.delay_secs:
        ctx.sleep(report.delay_secs)
    return finish_rebalance(ctx, report.topology_id)


def require_offered_host(view: ClusterView, topology: TopologyView) -> None:
    """:class:`Unavailable` when no host may take a task: then a rebalance could change nothing."""
    if offered_supervisors(view, placing=[topology.id]):
        return
    hosts = sorted({info.host for info in view.supervisors.values()})
    why = "no supervisor is registered: start one"
    if hosts:
        why = f"every host is blacklisted ({', '.join(hosts):.200}): `storm-dagster blacklist remove HOST`"
    raise Unavailable(
        f"topology {topology.base.name!r} stays as it is, no host may take its tasks: {why}"
    )


def _check_request(
    topology: TopologyView,
    runnable: Runnable,
    workers: int | None,
    executors: dict[str, int],
    reassign: bool,
) -> PendingRebalance:
    name = topology.base.name
    wrong = None if workers is None else check_value("topology.workers", workers)
    if wrong:
        raise InvalidRequest(f"rebalance of {name!r}: {wrong}")
    known = topology.base.executors.keys() - {TOPOLOGY_MASTER}
    most = runnable.conf.get("topology.max.task.parallelism")
    for component, count in executors.items():
        if component not in known:
            near = difflib.get_close_matches(component, known, n=1, cutoff=0.5)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"components are {', '.join(sorted(known))}"
            )
            raise InvalidRequest(
                f"topology {name!r} has no component {component!r} to rebalance: {hint}"
            )
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidRequest(
                f"rebalance of {name!r}: {component!r} cannot have {count!r} executors: give at least 1"
            )
        part = runnable.spec.component(component)
        own = part.conf.get("topology.max.task.parallelism") if part else None
        limit = most if own is None else own
        if limit is not None and count > limit:
            raise InvalidRequest(
                f"rebalance of {name!r}: {component!r} cannot have {count} executors, "
                f"topology.max.task.parallelism is {limit}"
            )
    chosen = topology.base.workers if workers is None else workers
    return PendingRebalance(
        workers=chosen, executors={**topology.base.executors, **executors}, reassign=reassign
    )


def _plan(
    ctx: OperationsContext,
    view: ClusterView,
    topology: TopologyView,
    runnable: Runnable,
    wanted: PendingRebalance,
) -> _Plan:
    if topology.tasks is None or topology.assignment is None:
        raise Unavailable(
            f"topology {topology.base.name!r} has no assignment yet: wait until it is healed"
        )
    present = topology.base.executors
    changed = {
        component: n for component, n in wanted.executors.items() if n != present.get(component)
    }
    table = rescale(topology.tasks, changed, fixed_task_components(runnable.spec))
    batch = rebalance_batch(
        view,
        topology,
        runnable,
        table,
        executors=wanted.executors,
        workers=wanted.workers,
        reassign=wanted.reassign,
    )
    result = plan_or_raise(ctx, batch, topology.base.name)
    placement = result.placement(topology.base.name)
    disturbs = not same_workers(topology.assignment, placement) or table != topology.tasks
    differs = (
        disturbs
        or wanted.workers != topology.base.workers
        or wanted.executors != topology.base.executors
    )
    (asked,) = batch.topologies
    bound = bool(asked.user_workers or asked.differ_node or asked.isolation or asked.executors)
    return _Plan(wanted, table, result, differs, disturbs, bound)


def _report(
    topology: TopologyView, base: StormBase, plan: _Plan, outcome: str, *, delay: int = 0
) -> RebalanceResult:
    before = topology.tasks.component_of() if topology.tasks else {}
    after = plan.table.component_of()
    placement = plan.result.placement(base.name)
    return replace(
        _unchanged(topology),
        status=base.status,
        outcome=outcome,
        workers=plan.wanted.workers,
        executors=plan.wanted.executors,
        moved=placement.moved,
        delay_secs=delay,
        planner=plan.result.planner,
        placement=placement,
        tasks_added=tuple(sorted(after.keys() - before.keys())),
        tasks_removed=tuple(sorted(before.keys() - after.keys())),
        components={**before, **after},
        assign_secs=plan.result.assign_secs,
    )


def finish_rebalance(ctx: OperationsContext, topology_id: str) -> RebalanceResult:
    """Apply the rebalance that a REBALANCING topology waits for, and give it its former status
    back.

    When it does not fit any more the former status returns with the former placement, and the
    planner's error is raised. While its code cannot be read or the planner does not answer it stays
    REBALANCING, to be finished later. Finished by somebody else already: ``unchanged``.
    """
    epoch = ctx.current_epoch()
    sent: list[tuple[RebalanceResult, Callable[[], None] | None]] = []
    abandoned: list[StormDagsterError] = []

    def attempt(view: ClusterView) -> RebalanceResult:
        topology = view.topologies.get(topology_id)
        if topology is None:
            raise NotAlive(f"topology {topology_id} is gone: there is nothing to rebalance")
        if topology.base.status != "REBALANCING":
            for error in abandoned:
                raise error
            done = [report for report, _ in sent if report.assignment == topology.assignment]
            return (
                done[0] if done else _unchanged(topology)
            )  # The reply was lost, or somebody else finished it.
        path = _pending_path(topology_id)
        found = ctx.cluster.state.get_data_with_version(path)
        wanted = (
            decode_record(PendingRebalance, found[0], path)
            if found is not None
            else PendingRebalance(workers=topology.base.workers, executors=topology.base.executors)
        )
        after = apply_event(topology.base, "finish_rebalance")
        transaction = ctx.cluster.fenced(epoch)
        if found is not None:
            transaction.delete(path, found[1].version)
        answers: list[PlacementResult] = []

        def planner(batch: PlacementBatch) -> PlacementResult:
            answers.append(ctx.planner(batch))
            return answers[0]

        try:
            plan = _plan(
                replace(ctx, planner=planner), view, topology, load_runnable(ctx, topology), wanted
            )
        except (Unavailable, InvalidRequest, Conflict) as error:
            if isinstance(error, Unavailable) and not answers:
                raise  # Nobody said that it does not fit.
            transaction.set(
                paths.topology(topology_id), encode_record(after), topology.base_at.version
            )
            try:
                commit(ctx, transaction, "abandon_rebalance")
            except ReplyLost:
                abandoned[:] = [error]
                raise
            raise
        after = after.model_copy(update={"workers": wanted.workers, "executors": wanted.executors})
        transaction.set(paths.topology(topology_id), encode_record(after), topology.base_at.version)
        return _apply(ctx, transaction, view, topology, after, plan, sent)

    found = retry_on_conflict(ctx, f"finishing the rebalance of {topology_id}", attempt)
    for report, explain in sent:
        if report is found and explain is not None:
            explain()
    return found


def _unchanged(topology: TopologyView) -> RebalanceResult:
    base = topology.base
    return RebalanceResult(
        topology_id=topology.id,
        name=base.name,
        status=base.status,
        outcome="unchanged",
        workers=base.workers,
        executors=base.executors,
        assignment=topology.assignment,
        version=topology.assignment_at.version if topology.assignment_at else None,
    )


def _asked(base: StormBase, wanted: PendingRebalance) -> str:
    changes = (
        [f"{wanted.workers} workers instead of {base.workers}"]
        if wanted.workers != base.workers
        else []
    )
    changes += [
        f"{name} with {count} executors instead of {base.executors.get(name, 0)}"
        for name, count in wanted.executors.items()
        if count != base.executors.get(name)
    ]
    return ", ".join(changes) or (
        "every task was placed again" if wanted.reassign else "balance was restored"
    )


def _moves(view: ClusterView, topology: TopologyView, plan: _Plan) -> dict[str, Any]:
    """Input of the asset check ``fewest_moves``; empty where every task was placed again.

    A topology master that is alone may move beside. Where more than sizes decides, nothing is
    recorded.
    """
    if plan.wanted.reassign or topology.assignment is None or plan.bound:
        return {}
    offered = {
        Slot(part.id, port).key
        for part in offered_supervisors(view, placing=[topology.id])
        for port in part.info.ports
    }
    before = {worker.slot.key: worker.tasks for worker in topology.assignment.workers}
    return {"moves": {"before": before, "slack": 1}} if before.keys() <= offered else {}


def _apply(
    ctx: OperationsContext,
    transaction: Transaction,
    view: ClusterView,
    topology: TopologyView,
    after: StormBase,
    plan: _Plan,
    sent: list[tuple[RebalanceResult, Callable[[], None] | None]],
) -> RebalanceResult:
    """Commit ``transaction``, which restores the status, together with the changes of the plan.

    ``sent`` gets the report as it will be, and what stores the reasons for it.
    """
    report = _report(topology, after, plan, "assigned" if plan.changed else "unchanged")
    placement = plan.result.placement(after.name)
    if plan.table != topology.tasks or not same_workers(topology.assignment, placement):
        tasks = ctx.cluster.state.get_data_with_version(paths.tasks(topology.id))
        if tasks is None or decode_record(TaskTable, tasks[0]) != topology.tasks:
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
            ctx, assignment, "rebalanced", _asked(topology.base, plan.wanted), moved=placement.moved
        )
        if plan.table != topology.tasks:
            transaction.set(paths.tasks(topology.id), encode_record(plan.table), tasks[1].version)
        append_assignment(ctx, transaction, view, after.name, assignment)
        report = replace(
            report,
            assignment=assignment,
            version=(report.version if report.version is not None else -1) + 1,
        )
    moves = _moves(view, topology, plan)
    changed = report.assignment is not topology.assignment
    explain = functools.partial(write_reasons, ctx, topology.id, plan.result, after.name, moves)
    sent[:] = [(report, explain if changed else None)]
    commit(ctx, transaction, "finish_rebalance")
    return report
