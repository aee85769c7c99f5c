"""Operation of each verb, and the transitions whose delay has passed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from storm_dagster.core.submission.conf import message_timeout_secs
from storm_dagster.core.transitions import DueMemory, apply_event, due_actions
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Fenced, NotAlive, StormDagsterError
from storm_dagster.model.records import StormBase, encode_record
from storm_dagster.model.verbs import VERBS, StatusEvent
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext, load_runnable, topology_by_name
from storm_dagster.operations.live.cancelling import cancel_submissions, drop_submission
from storm_dagster.operations.live.deploy import restart, update
from storm_dagster.operations.live.rebalance import (
    ABANDON_REBALANCE,
    FINISH_REBALANCE,
    finish_rebalance,
    rebalance,
)
from storm_dagster.operations.results import LifecycleResult
from storm_dagster.operations.steps import operation, shared_steps
from storm_dagster.operations.submit.publishing import ACTIVATE_TOPOLOGY, finish_activation
from storm_dagster.operations.submit.sweeping import DELETE_BLOBS, SWEEP, delete_blobs, sweep
from storm_dagster.operations.transactions import (
    announce,
    bump_assignments_version,
    commit,
    delete_tree,
    note_change,
    retry_on_conflict,
)
from storm_dagster.operations.upgrade import (
    COMPLETE_UPGRADE,
    FINISH_ROLLBACK,
    ROLL_BACK,
    UpgradeResult,
    advance_upgrades,
    complete_upgrade,
    gray_upgrade,
    roll_back,
)
from storm_dagster.zk.shards import delete_ops

ACTIVATE = operation("activate", "activate")
DEACTIVATE = operation("deactivate", "deactivate")
REMOVE = shared_steps("remove", "unassign", SWEEP, DELETE_BLOBS, "remove_base")
KILL = operation("kill", "kill", REMOVE)
FINISH_DUE = operation(
    "finish_due",
    *(REMOVE, FINISH_REBALANCE, ABANDON_REBALANCE, ACTIVATE_TOPOLOGY),
    *(COMPLETE_UPGRADE, ROLL_BACK, FINISH_ROLLBACK),
)


def activate(ctx: OperationsContext, name: str) -> LifecycleResult:
    """Resume the topology's spouts; an active topology is not written.

    :class:`NotAlive` for an unknown name, :class:`Conflict` if its status does not allow it.
    """
    return _change(ctx, name, "activate")


def deactivate(ctx: OperationsContext, name: str) -> LifecycleResult:
    """Pause the topology's spouts; its workers stay.

    An inactive topology is not written.
    """
    return _change(ctx, name, "deactivate")


def kill(ctx: OperationsContext, name: str, wait_secs: int | None = None) -> LifecycleResult:
    """Mark the topology KILLED (:func:`mark_killed`); without a delay, remove it.

    With a delay of 0 it is removed before this returns. The staged parts of a submission that it
    cancels are deleted as well.
    """
    report = mark_killed(ctx, name, wait_secs)
    for submission in report.cancelled:
        drop_submission(ctx, submission)
    if report.delay_secs == 0:
        return remove(ctx, report.topology_id)
    return report


def mark_killed(ctx: OperationsContext, name: str, wait_secs: int | None = None) -> LifecycleResult:
    """Mark the topology KILLED, so that its spouts stop.

    After the delay :func:`finish_due` or :func:`remove` removes it. The delay is ``wait_secs``,
    else (also if that is negative) the topology's message timeout. Allowed in every status; a
    second kill stores the new delay. A topology that is being submitted is never published:
    its submission is cancelled, and the result names it. :class:`NotAlive` without either.
    """

    def delay(topology: TopologyView) -> int:
        """Seconds between the kill and the removal."""
        if wait_secs is not None and wait_secs >= 0:
            return wait_secs
        try:
            conf = load_runnable(ctx, topology).conf
        except StormDagsterError:
            # A topology whose blobs are lost or damaged can still be killed.
            conf = ctx.values()
        return message_timeout_secs(conf)

    try:
        return _change(ctx, name, "kill", delay)
    except NotAlive:
        cancelled = cancel_submissions(ctx, name)
    if not cancelled:
        # It may have been published between the two reads.
        return _change(ctx, name, "kill", delay)
    newest = cancelled[-1]
    return LifecycleResult(newest.topology_id, newest.name, None, changed=True, cancelled=cancelled)


def _change(
    ctx: OperationsContext,
    name: str,
    event: StatusEvent,
    delay: Callable[[TopologyView], int] | None = None,
) -> LifecycleResult:
    """Change the status in one fenced transaction, by the verb's event of its name.

    ``delay`` returns the seconds that the event stores in the base. If the base stays as it is, no
    transaction is made.
    """
    epoch = ctx.current_epoch()
    # Topology id -> delay: it may need the code's conf, which only the first attempt reads.
    delays: dict[str, int] = {}

    def attempt(view: ClusterView) -> LifecycleResult:
        topology = topology_by_name(view, name)
        before: StormBase = topology.base
        if delay is not None and topology.id not in delays:
            delays[topology.id] = delay(topology)
        delay_secs = delays.get(topology.id)
        after = apply_event(before, event, delay_secs=delay_secs)
        changed = after is not before
        if changed:
            transaction = ctx.cluster.fenced(epoch)
            transaction.set(
                paths.topology(topology.id), encode_record(after), topology.base_at.version
            )
            announce(ctx, transaction, topology.id, VERBS[event].action)
            note_change(
                ctx,
                transaction,
                topology.id,
                before.name,
                previous=before.status,
                status=after.status,
            )
            commit(ctx, transaction, event)
            ctx.log.info("%s: %s -> %s", topology.id, before.status, after.status)
        return LifecycleResult(
            topology.id,
            before.name,
            after.status,
            changed,
            delay_secs=delay_secs,
            previous=before.status,
        )

    return retry_on_conflict(ctx, f"{event} {name}", attempt)


def remove(ctx: OperationsContext, topology_id: str) -> LifecycleResult:
    """Remove a killed topology permanently.

    The assignment is removed first, the base last, so that a crash leaves the topology removable.
    Waits up to ``task.cleanup.timeout.sec`` for its workers to end. The token and the backup of the
    assignment stay. A topology that no longer exists is not written. :class:`Conflict` if it is not
    KILLED.
    """
    epoch = ctx.current_epoch()

    def unassign(view: ClusterView) -> TopologyView | None:
        """Remove the assignment, if any; the topology, ``None`` if it no longer exists."""
        topology = view.topologies.get(topology_id)
        if topology is None:
            return None
        if topology.base.status != "KILLED":
            raise Conflict(
                f"topology {topology.base.name!r} is {topology.base.status} and cannot be removed: "
                "kill it first"
            )
        if ctx.cluster.state.exists(paths.assignment(topology_id)):
            transaction = bump_assignments_version(
                ctx.cluster.fenced(epoch), view, {topology_id: None}
            )
            transaction.check(paths.topology(topology_id), topology.base_at.version)
            delete_ops(ctx.cluster.state, transaction, paths.assignment(topology_id))
            commit(ctx, transaction, "unassign")
        return topology

    topology = retry_on_conflict(ctx, f"removing {topology_id}", unassign)
    if topology is None:
        return LifecycleResult(topology_id, topology_id.rsplit("-", 2)[0], None, changed=False)
    sweep(ctx, epoch, topology_id)
    delete_blobs(ctx, topology_id, topology.base.name, topology.base.token)
    delete_tree(ctx, epoch, paths.topology(topology_id), "remove_base")
    ctx.log.info("removed %s", topology_id)
    return LifecycleResult(topology_id, topology.base.name, None, changed=True, previous="KILLED")


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "activate": activate,
    "deactivate": deactivate,
    "kill": kill,
    "restart": restart,
    "rebalance": rebalance,
    "update": update,
    "gray-upgrade": gray_upgrade,
    "complete-upgrade": complete_upgrade,
    "rollback": roll_back,
}
"""Verb -> its operation, which takes the context, the topology's name and the fields of the
request.
"""

LEADER_OPERATIONS: Mapping[str, Callable[..., LifecycleResult | UpgradeResult]] = {
    "activate": activate,
    "deactivate": deactivate,
    # The leader's duties remove the topology later: its workers may need their time to end.
    "kill": mark_killed,
    "complete-upgrade": complete_upgrade,
    "rollback": roll_back,
}
"""Verb that the leader executes -> the one transaction that it makes."""


@dataclass(frozen=True)
class DoneAction:
    """A due transition that was executed."""

    action: Literal["remove", "finish_rebalance", "activate", "upgrade"]
    topology_id: str
    name: str
    outcome: str = ""
    """Of an upgrade: ``completed``, ``expired``, ``rolled back`` ..."""

    def describe(self) -> str:
        """The action for logs and reports."""
        if self.action == "upgrade":
            return f"{self.outcome}: upgrade of {self.topology_id}"
        return f"{self.action} {self.topology_id}"


@dataclass(frozen=True)
class DueResult:
    """Executed and failed due transitions, and the memory for the next call."""

    done: tuple[DoneAction, ...]
    failed: dict[str, str]
    """Topology id -> message."""
    memory: DueMemory


def finish_due(
    ctx: OperationsContext,
    memory: DueMemory | None = None,
    *,
    boot_id: str = "",
    boot_now: float | None = None,
    view: ClusterView | None = None,
    late_secs: float = 0.0,
    start_removal: Callable[[str, str], object] | None = None,
) -> DueResult:
    """Execute the due transitions, for the leader and ``lifecycle_sensor``.

    They are removals, rebalances, unfinished activations and the ends of upgrades. Pass the
    result's memory to the next call: delays run on the caller's boot clock (``boot_now``, default:
    the context's monotonic clock) from its first view of the status on. ``view`` spares a read of
    the cluster; each transition is decided by a fresh view. With ``late_secs`` only removals are
    executed, and transitions that another process should have executed by then. ``start_removal``
    (id and name of the topology) begins a removal elsewhere, which is then not among the results;
    without it removals are made here, one after the other. Each topology fails alone; only
    :class:`Fenced` ends the whole call.
    """
    now = ctx.monotonic() if boot_now is None else boot_now
    view = view or ctx.cluster.load_view()
    due, next_memory = due_actions(
        view, memory or DueMemory(), boot_id=boot_id, boot_now=now, late_secs=late_secs
    )
    actions: list[DoneAction] = []
    failed: dict[str, str] = {}
    for action in due:
        try:
            if action.action == "remove" and start_removal is not None:
                start_removal(action.topology_id, action.name)
                continue
            if action.action == "remove":
                remove(ctx, action.topology_id)
            elif action.action == "finish_rebalance":
                finish_rebalance(ctx, action.topology_id)
            else:
                finish_activation(ctx, action.topology_id, ctx.current_epoch())
            actions.append(DoneAction(action.action, action.topology_id, action.name))
        except Fenced:
            raise
        except NotAlive:
            continue  # Another process has removed it.
        except (StormDagsterError, OSError) as error:
            failed[action.topology_id] = str(error)
            ctx.log.warning("%s of %s failed: %s", action.action, action.topology_id, error)
    # With ``late_secs`` upgrades are left to the other process.
    upgrades = [] if late_secs else advance_upgrades(ctx, view=view)
    actions += [
        DoneAction("upgrade", upgrade.topology_id, upgrade.name, upgrade.outcome)
        for upgrade in upgrades
    ]
    return DueResult(tuple(actions), failed, next_memory)
