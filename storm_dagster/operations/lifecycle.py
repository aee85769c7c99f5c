"""Activate, deactivate, kill, remove, restart; and what is due because its delay has passed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from storm_dagster.blobstore.store import BlobStore
from storm_dagster.core.submission import message_timeout_secs
from storm_dagster.core.transitions import DueMemory, Event, apply_event, delay_of, due_actions
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Fenced, KeyNotFound, NotAlive, StormDagsterError
from storm_dagster.model.names import (
    ACKER,
    code_key,
    conf_key,
    jar_key,
    placement_key,
)
from storm_dagster.model.records import StormBase, encode_record
from storm_dagster.model.topology import decode_topology
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext, load_runnable, topology_by_name
from storm_dagster.operations.documents import decode_json, encode_json
from storm_dagster.operations.publishing import (
    activate_topology,
    finish_activation,
    publish_assignment,
    stage_assignment,
)
from storm_dagster.operations.rebalance import finish_rebalance
from storm_dagster.operations.reports import LifecycleReport
from storm_dagster.operations.staging import (
    StagingRecord,
    newest_token_key,
    read_token,
    staging_key,
    write_part,
)
from storm_dagster.operations.submission import stage_code, stage_conf, stage_tasks
from storm_dagster.operations.turnstile import commit, delete_tree, fenced, raise_turnstile, take_turns

__all__ = [
    "FinishReport",
    "activate",
    "deactivate",
    "delete_blobs",
    "finish_due",
    "kill",
    "remove",
    "restart",
]

_WORKER_POLL_SECS = 0.1


def activate(ctx: OperationsContext, name: str) -> LifecycleReport:
    """Make the topology's spouts run. Active already: nothing is written.

    :class:`NotAlive` for an unknown name, :class:`Conflict` when its status does not allow it.
    """
    return _change(ctx, name, "activate")


def deactivate(ctx: OperationsContext, name: str) -> LifecycleReport:
    """Make the topology's spouts pause; its workers stay. Inactive already: nothing is written."""
    return _change(ctx, name, "deactivate")


def kill(ctx: OperationsContext, name: str, wait_secs: int | None = None) -> LifecycleReport:
    """Mark the topology KILLED, so that its spouts stop; after the delay it is removed.

    The delay is ``wait_secs``, else (also when negative) the topology's message timeout. With a delay of 0
    it is removed before this returns; otherwise :func:`finish_due` or :func:`remove` does it. Allowed in
    every status; killing again stores the new delay.
    """

    def delay(topology: TopologyView) -> int:
        if wait_secs is not None and wait_secs >= 0:
            return wait_secs
        return delay_of(wait_secs, _message_timeout(ctx, topology.id))

    report = _change(ctx, name, "kill", delay)
    return remove(ctx, report.topology_id) if report.delay_secs == 0 else report


def _message_timeout(ctx: OperationsContext, topology_id: str) -> int:
    try:
        return message_timeout_secs(load_runnable(ctx, topology_id).conf)
    except StormDagsterError:
        # A topology whose blobs are lost or damaged can still be killed.
        return message_timeout_secs(ctx.values())


def _change(
    ctx: OperationsContext, name: str, event: Event, delay: Callable[[TopologyView], int] | None = None
) -> LifecycleReport:
    """One fenced transaction on the base, or none when nothing changes."""
    epoch = ctx.current_epoch()
    chosen: dict[str, int] = {}

    def attempt(view: ClusterView) -> LifecycleReport:
        topology = topology_by_name(view, name)
        before: StormBase = topology.base
        if delay is not None and topology.id not in chosen:
            chosen[topology.id] = delay(topology)
        delay_secs = chosen.get(topology.id)
        after = apply_event(before, event, delay_secs=delay_secs)
        if after is not before:
            transaction = fenced(ctx, epoch)
            transaction.set(paths.topology(topology.id), encode_record(after), topology.base_at.version)
            commit(ctx, transaction, event)
            ctx.log.info("%s: %s -> %s", topology.id, before.status, after.status)
        return LifecycleReport(
            topology_id=topology.id,
            name=before.name,
            status=after.status,
            changed=after is not before,
            delay_secs=delay_secs,
            previous=before.status,
        )

    return take_turns(ctx, f"{event} {name}", attempt)


def remove(ctx: OperationsContext, topology_id: str) -> LifecycleReport:
    """Remove a killed topology for good: assignment first, base last, so that a crash leaves it removable.

    Waits up to ``task.cleanup.timeout.sec`` for its workers to end. The token and the backup of the
    assignment stay. Gone already: nothing is written. :class:`Conflict` when it is not KILLED.
    """
    epoch = ctx.current_epoch()

    def unassign(view: ClusterView) -> TopologyView | None:
        topology = view.topologies.get(topology_id)
        if topology is None:
            return None
        if topology.base.status != "KILLED":
            raise Conflict(
                f"topology {topology.base.name!r} is {topology.base.status} and cannot be removed: kill it first"
            )
        if ctx.cluster.state.exists(paths.assignment(topology_id)):
            transaction = raise_turnstile(fenced(ctx, epoch), view)
            transaction.check(paths.topology(topology_id), topology.base_at.version)
            ctx.cluster.delete_assignment_ops(transaction, topology_id)
            commit(ctx, transaction, "unassign")
        return topology

    topology = take_turns(ctx, f"removing {topology_id}", unassign)
    if topology is None:
        return LifecycleReport(topology_id, topology_id.rsplit("-", 2)[0], None, changed=False)
    _await_workers(ctx, topology_id, float(ctx.conf.get("task.cleanup.timeout.sec", 10)))
    for path in (
        paths.tasks(topology_id),
        paths.taskbeats(topology_id),
        paths.task_errors(topology_id),
        paths.gray_upgrade(topology_id),
        paths.metrics(topology_id),
    ):
        delete_tree(ctx, epoch, path, "remove")
    if not ctx.cluster.state.find_children(paths.workers(topology_id)):
        # A worker that is still there keeps its node: the cleaner takes the parent once it is gone.
        delete_tree(ctx, epoch, paths.workers(topology_id), "remove")
    _check_epoch(ctx, epoch)
    delete_blobs(ctx.blobs, topology_id, topology.base)
    ctx.checkpoint("after.delete_blobs")
    delete_tree(ctx, epoch, paths.topology(topology_id), "remove_base")
    ctx.log.info("removed %s", topology_id)
    return LifecycleReport(topology_id, topology.base.name, None, changed=True, previous="KILLED")


def _await_workers(ctx: OperationsContext, topology_id: str, wait_secs: float) -> None:
    deadline = ctx.monotonic() + wait_secs
    while ctx.cluster.state.find_children(paths.workers(topology_id)):
        if ctx.monotonic() >= deadline:
            ctx.log.warning("workers of %s did not end within %g s", topology_id, wait_secs)
            return
        ctx.sleep(_WORKER_POLL_SECS)


def _check_epoch(ctx: OperationsContext, epoch: int) -> None:
    """Blobs are not in ZooKeeper, so their deletion is preceded by a look at the epoch."""
    found = ctx.cluster.epoch()
    if found is None or found[0] != epoch:
        raise Fenced(
            f"leadership epoch {epoch} is over, nothing was deleted: stop acting, ask the new leader"
        )


def delete_blobs(blobs: BlobStore, topology_id: str, base: StormBase) -> None:
    """Delete the topology's blobs and its staging; those that are gone already do not matter."""
    keys = [
        jar_key(topology_id),
        conf_key(topology_id),
        code_key(topology_id),
        placement_key(topology_id),
        *blobs.keys(staging_key(base.token, "")),
    ]
    newest = newest_token_key(base.name)
    try:
        if blobs.read(newest) == base.token.encode():
            keys.append(newest)
    except KeyNotFound:
        pass
    for key in keys:
        try:
            blobs.delete(key)
        except KeyNotFound:
            continue


def restart(ctx: OperationsContext, name: str, *, token: str | None = None) -> LifecycleReport:
    """Start the topology anew from its own stored code, with the parallelism that it has now, under a new id.

    Everything is validated, stored and planned first; then one transaction replaces the old one (J5). Its
    status stays ACTIVE or INACTIVE as it was. ``token`` makes a repetition after a crash finish the same
    restart; without one it is made from the id that is replaced.
    """
    view = ctx.cluster.load_view()
    known = read_token(ctx, token) if token is not None else None
    if token is None or known is None or not known[0].published:
        topology = topology_by_name(view, name)
        if topology.base.status not in ("ACTIVE", "INACTIVE"):
            raise Conflict(
                f"topology {name!r} is {topology.base.status} and cannot be restarted: wait until that has ended"
            )
        token = token or f"restart-{topology.id}"
        _stage_copy(ctx, topology, token)
        stage_conf(
            ctx,
            name=topology.base.name,
            token=token,
            handle=None,
            inactive=topology.base.wanted_status == "INACTIVE",
            replaces=topology.id,
        )
        stage_code(ctx, token=token)
        stage_tasks(ctx, token=token)
        stage_assignment(ctx, token=token)
    published = publish_assignment(ctx, token=token)
    report = activate_topology(ctx, token=token)
    if published.replaced is not None:
        _delete_replaced(ctx, published.replaced)
    return LifecycleReport(report.topology_id, report.name, report.status, changed=True)


def _stage_copy(ctx: OperationsContext, topology: TopologyView, token: str) -> None:
    """Stage the running topology's conf and code, its present parallelism laid over, as if they were uploaded."""
    conf = decode_json(ctx.blobs.read(conf_key(topology.id)), conf_key(topology.id))
    spec = decode_topology(ctx.blobs.read(code_key(topology.id)))
    executors = topology.base.executors
    conf = {
        **conf,
        "topology.workers": topology.base.workers,
        "topology.acker.executors": executors.get(ACKER, 0),
        "topology.bolt.parallelism": {
            component: count for component, count in executors.items() if component in spec.bolts
        },
        "topology.spout.parallelism": {
            component: count for component, count in executors.items() if component in spec.spouts
        },
    }
    head = StagingRecord(
        topology_id=topology.id, name=topology.base.name, epoch=0, archive=jar_key(topology.id)
    )
    ctx.blobs.put(staging_key(token, "conf"), encode_json(conf))
    ctx.blobs.put(staging_key(token, "topology"), spec.to_json())
    write_part(ctx, token, "record", head)


def _delete_replaced(ctx: OperationsContext, topology_id: str) -> None:
    """What is left of a replaced topology once its workers have ended; the cleaner finishes what fails here."""
    _await_workers(ctx, topology_id, float(ctx.conf.get("task.cleanup.timeout.sec", 10)))
    epoch = ctx.current_epoch()
    for path in (
        paths.tasks(topology_id),
        paths.taskbeats(topology_id),
        paths.task_errors(topology_id),
        paths.gray_upgrade(topology_id),
        paths.metrics(topology_id),
    ):
        delete_tree(ctx, epoch, path, "remove")
    if not ctx.cluster.state.find_children(paths.workers(topology_id)):
        delete_tree(ctx, epoch, paths.workers(topology_id), "remove")
    _check_epoch(ctx, epoch)
    for key in (jar_key, conf_key, code_key, placement_key):
        try:
            ctx.blobs.delete(key(topology_id))
        except KeyNotFound:
            continue


@dataclass(frozen=True)
class FinishReport:
    """What was due and is done, what failed (topology id -> message), and what to remember."""

    done: tuple[str, ...]
    """``"remove wc-1-..."`` and the like."""
    failed: dict[str, str]
    memory: DueMemory


def finish_due(
    ctx: OperationsContext,
    memory: DueMemory | None = None,
    *,
    boot_id: str = "",
    boot_now: float | None = None,
) -> FinishReport:
    """Do what is due: removals, rebalances, unfinished activations. For the leader and ``lifecycle_sensor``.

    Hand the report's memory in again next time: delays run on the caller's boot clock (``boot_now``,
    default: the context's monotonic clock) from when it first saw the status. Each topology fails alone;
    only :class:`Fenced` ends the whole call.
    """
    now = ctx.monotonic() if boot_now is None else boot_now
    due, remembered = due_actions(
        ctx.cluster.load_view(), memory or DueMemory(), boot_id=boot_id, boot_now=now
    )
    done: list[str] = []
    failed: dict[str, str] = {}
    for action in due:
        try:
            if action.action == "remove":
                remove(ctx, action.topology_id)
            elif action.action == "finish_rebalance":
                finish_rebalance(ctx, action.topology_id)
            else:
                finish_activation(ctx, action.topology_id, ctx.current_epoch())
            done.append(f"{action.action} {action.topology_id}")
        except Fenced:
            raise
        except NotAlive:
            continue  # Somebody else was faster.
        except StormDagsterError as error:
            failed[action.topology_id] = error.message
            ctx.log.warning("%s of %s failed: %s", action.action, action.topology_id, error.message)
    return FinishReport(tuple(done), failed, remembered)
