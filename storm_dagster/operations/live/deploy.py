"""Restart of a topology's workers, and hot deploy of a successor.

See ``docs/decisions.md#hot-deploy``. The running topology is replaced only when its successor is
validated, stored, replicated and planned; then one transaction ends the former and publishes the
successor. There is never a moment without the topology.
"""

import dataclasses
from collections.abc import Sequence

from storm_dagster.core.submission.conf import message_timeout_secs, total_conf
from storm_dagster.core.transitions import apply_event
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, NotAlive, StormDagsterError, Unavailable
from storm_dagster.model.names import topology_name_of
from storm_dagster.model.placement import TopologyPlacement
from storm_dagster.model.records import encode_record
from storm_dagster.model.verbs import VERBS
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext, load_runnable, topology_by_name
from storm_dagster.operations.live.change_records import PlannedOn, take_over_change
from storm_dagster.operations.live.spout_pause import ABANDONED_SECS, MAX_IDLE_SECS, wait_until_idle
from storm_dagster.operations.results import ConfResult, LifecycleResult, TasksResult, UpdateChange
from storm_dagster.operations.steps import operation
from storm_dagster.operations.submit import submission
from storm_dagster.operations.submit.code_storage import check_uploaded_archive
from storm_dagster.operations.submit.continuing import continue_under_leaders, run_stage
from storm_dagster.operations.submit.staging import (
    read_client_token,
    read_record,
    read_topology,
    staged_replaces,
)
from storm_dagster.operations.submit.sweeping import DELETE_CODE, SWEEP, delete_code, sweep
from storm_dagster.operations.submit.targets import check_replaceable
from storm_dagster.operations.transactions import (
    announce,
    append_assignment,
    commit,
    retry_on_conflict,
    with_change,
)

DRAIN = operation("drain", "drain")
UNDO_DRAIN = operation("undo_drain", "undo_drain")
UPDATE = operation("update", submission.SUBMIT, SWEEP, DELETE_CODE)
RESTART = operation("restart", "restart")


def restart(ctx: OperationsContext, name: str, *, request_id: str = "") -> LifecycleResult:
    """Restart every worker of the topology.

    Id, slots, code, conf and status stay. The supervisors replace the processes, each in its slot;
    the spouts replay the tuples under way. The pauses after earlier crashes end. If the leader
    changes, the call continues under the next one, and takes over the record of ``request_id``, the
    request for which a leader launched this run. :class:`NotAlive`, also if the topology is killed
    or replaced at that time; :class:`Conflict` unless ACTIVE or INACTIVE, or if the topology and
    the leader were changed; :class:`Unavailable` without an assignment.
    """
    epoch = ctx.current_epoch()
    # The topology that the first attempt found, as the newest attempt found it, and its number of
    # restarts after this one.
    planned: list[PlannedOn] = []
    target_restarts = 0

    def take_over(next_epoch: int) -> None:
        nonlocal epoch
        for state in planned:
            take_over_change(ctx, request_id, state, next_epoch)
        epoch = next_epoch

    def attempt(view: ClusterView) -> LifecycleResult:
        nonlocal target_restarts
        topology = _restarted_topology(view, name, planned)
        base = topology.base
        assignment = topology.assignment
        if assignment is None:
            raise Unavailable(
                f"topology {base.name!r} has no assignment yet: wait until it is healed"
            )
        if not planned:
            target_restarts = assignment.restarts + 1
        planned[:] = [PlannedOn(topology.id, topology.base_at.version)]
        report = LifecycleResult(
            topology.id, base.name, base.status, changed=True, previous=base.status
        )
        if assignment.restarts >= target_restarts:
            return report  # The reply of our own commit was lost.
        changed = assignment.model_copy(update={"restarts": target_restarts})
        after = with_change(ctx, changed, "restarted")
        transaction = ctx.cluster.fenced(epoch).check(
            paths.topology(topology.id), topology.base_at.version
        )
        append_assignment(ctx, transaction, view, base.name, after)
        announce(ctx, transaction, topology.id, VERBS["restart"].action)
        commit(ctx, transaction, "restart")
        return report

    purpose = f"restarting {name}"
    return continue_under_leaders(ctx, lambda: retry_on_conflict(ctx, purpose, attempt), take_over)


def _restarted_topology(view: ClusterView, name: str, planned: Sequence[PlannedOn]) -> TopologyView:
    """The topology to restart: that of ``name``, for a retry the one that was ``planned`` on.

    A later topology of the name was not requested to restart, and has new workers anyway.
    """
    topology: TopologyView | None
    if planned:
        topology = view.topologies.get(planned[0].topology_id)
    else:
        topology = topology_by_name(view, name)
    if topology is None:
        raise NotAlive(
            f"topology {name!r} ({planned[0].topology_id}) was killed or replaced while it was "
            "restarted: a topology that has this name now was not restarted"
        )
    check_replaceable(topology, "restarted")
    return topology


def update(
    ctx: OperationsContext,
    name: str,
    *,
    token: str,
    handle: str | None,
    allow_degraded: bool = False,
) -> LifecycleResult:
    """Hot deploy: replace the topology of that name by the uploaded one.

    The new topology gets a new id. Every error of the new topology, its archive included, is raised
    before the old one is touched. Then the old topology's spouts pause, the tuples under way finish
    (at most the message timeout, 30 s), and one transaction swaps the topologies; if that fails the
    old one continues. If the leader changes, the update continues under the next one, unless the
    old topology was changed or killed since. :class:`NotAlive`, :class:`Conflict` in another status
    than ACTIVE and INACTIVE, and the errors of a submission.
    """
    replaced = _target(ctx, token, name)

    conf_warnings: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    changes: tuple[UpdateChange, ...] = ()

    def attempt() -> LifecycleResult:
        nonlocal replaced, conf_warnings, warnings, changes
        if not _is_published(ctx, token):
            old = topology_by_name(ctx.cluster.load_view(), replaced)
            replaced = old.id
            staged, tasks, placement = _stage(
                ctx, old, token=token, handle=handle, allow_degraded=allow_degraded
            )
            # A later attempt may find the staged parts alone, which are not checked again.
            conf_warnings = staged.warnings or conf_warnings
            warnings = (*conf_warnings, *placement.warnings)
            changes = tasks.changes
        return dataclasses.replace(_replace(ctx, token), warnings=warnings, changes=changes)

    return run_stage(ctx, token, attempt)


def _target(ctx: OperationsContext, token: str, name: str) -> str:
    """Name or id of the topology to replace.

    A repetition replaces the topology that the first attempt found, and no later one of the name.
    """
    staged_id = staged_replaces(ctx, token)
    if staged_id is None or name not in (staged_id, topology_name_of(staged_id)):
        return name
    return staged_id


def _stage(
    ctx: OperationsContext,
    old: TopologyView,
    *,
    token: str,
    handle: str | None,
    allow_degraded: bool,
) -> tuple[ConfResult, TasksResult, TopologyPlacement]:
    """Check, store and place the successor of ``old``, which is not touched."""
    check_replaceable(old)
    staged = submission.stage_conf(
        ctx,
        name=old.base.name,
        token=token,
        handle=handle,
        allow_degraded=allow_degraded,
        replaces=old.id,
    )
    submission.stage_code(ctx, token=token)
    tasks = submission.stage_tasks(ctx, token=token)
    planned = submission.stage_assignment(ctx, token=token)
    record = read_record(ctx, token)
    conf, spec = read_topology(ctx, token)
    check_uploaded_archive(ctx, record.archive, spec, total_conf(ctx.values(), conf))
    return staged, tasks, planned.placement


def _is_published(ctx: OperationsContext, token: str) -> bool:
    """True if the token's topology was published, even if it no longer exists."""
    stored = read_client_token(ctx, token)
    if stored is None:
        return False
    record, _ = stored
    return record.published


def _replace(ctx: OperationsContext, token: str) -> LifecycleResult:
    """Drain the former topology, swap it for the staged one, and delete its remains.

    If the swap fails, the spouts of the former topology resume, and the error is raised. A former
    topology without a live worker is not drained.
    """
    if _is_published(ctx, token):
        # A repetition, maybe under another leader: the remaining steps run in the current epoch.
        submission.restage_conf(ctx, token)
    former_id = read_record(ctx, token).replaces
    drain_secs = 0.0
    # After the swap the former topology is not in the view: a repetition does not drain.
    former = ctx.cluster.load_view().topologies.get(former_id) if former_id is not None else None
    try:
        if former is not None and former.live_workers:
            timeout_secs = float(message_timeout_secs(load_runnable(ctx, former).conf))
            drain_secs = drain(ctx, former.id, min(timeout_secs, MAX_IDLE_SECS))
        began = ctx.monotonic()
        published = submission.publish_assignment(ctx, token=token)
    except StormDagsterError:
        if former_id is not None:
            undo_drain(ctx, former_id)
        raise
    report = submission.activate_topology(ctx, token=token)
    # A repetition after a crash sweeps the topology that the first attempt replaced but did not
    # sweep.
    replaced = published.replaced or (former_id if published.already else None)
    if replaced is not None:
        try:
            sweep(ctx, ctx.current_epoch(), replaced)
            delete_code(ctx, replaced)
        except StormDagsterError as error:
            # The update has taken place, and the cleaner deletes the remains.
            ctx.log.warning("the remains of %s are deleted later: %s", replaced, error)
    swap_secs = ctx.monotonic() - began
    return LifecycleResult(
        report.topology_id,
        report.name,
        report.status,
        changed=True,
        drain_secs=drain_secs,
        swap_secs=swap_secs,
    )


def drain(ctx: OperationsContext, topology_id: str, max_secs: float) -> float:
    """Pause the spouts and wait until no tuple is under way, at most ``max_secs``.

    Returns the seconds that this took. If no process ends the drain, ``lifecycle_sensor`` or the
    leader makes the topology ACTIVE. The spouts replay the tuples that are under way at the end. An
    INACTIVE topology is not drained, because its spouts are paused already: 0 at once.
    :class:`NotAlive` if it was killed, :class:`Conflict` in another status.
    """
    began = ctx.monotonic()
    if not _pause_spouts(ctx, topology_id, round(max_secs) + ABANDONED_SECS):
        return 0.0
    wait_until_idle(ctx, topology_id, max_secs)
    return ctx.monotonic() - began


def _pause_spouts(ctx: OperationsContext, topology_id: str, delay_secs: int) -> bool:
    """Make the topology INACTIVE for the drain; false if it is so without a drain.

    ``delay_secs`` is the time after which another process may resume the spouts. By the same delay
    a retry recognizes its own drain, whose reply was lost.
    """
    epoch = ctx.current_epoch()

    def attempt(view: ClusterView) -> bool:
        topology = view.topologies.get(topology_id)
        if topology is None or topology.base.status == "KILLED":
            raise NotAlive(
                f"topology {topology_id} was killed while its replacement was prepared: submit it "
                "again"
            )
        if topology.base.status not in ("ACTIVE", "INACTIVE"):
            raise Conflict(f"another process changed topology {topology_id}: try again")
        if topology.base.status == "INACTIVE":
            return topology.base.delay_secs == delay_secs
        after = apply_event(topology.base, "drain", delay_secs=delay_secs)
        transaction = ctx.cluster.fenced(epoch)
        transaction.set(paths.topology(topology_id), encode_record(after), topology.base_at.version)
        commit(ctx, transaction, "drain")
        return True

    return retry_on_conflict(ctx, f"draining {topology_id}", attempt)


def undo_drain(ctx: OperationsContext, topology_id: str) -> None:
    """Resume the spouts of a topology whose successor was not published.

    A topology that is not being drained stays unchanged.
    """
    epoch = ctx.current_epoch()

    def attempt(view: ClusterView) -> None:
        topology = view.topologies.get(topology_id)
        if (
            topology is None
            or topology.base.status != "INACTIVE"
            or topology.base.delay_secs is None
        ):
            return
        after = apply_event(topology.base, "activate")
        transaction = ctx.cluster.fenced(epoch)
        transaction.set(paths.topology(topology_id), encode_record(after), topology.base_at.version)
        commit(ctx, transaction, "undo_drain")

    retry_on_conflict(ctx, f"resuming {topology_id}", attempt)
