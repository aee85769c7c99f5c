"""How an upgrade ends: completed, expired, rolled back; asked for, or due."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from storm_dagster.core.gray_upgrade import Due, due
from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.reassignment import causes_still_true
from storm_dagster.core.transitions import apply_event
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Fenced, NotAlive, StormDagsterError
from storm_dagster.model.records import encode_record
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.actions import announce
from storm_dagster.operations.assignment_records import append_assignment, append_backup
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.steps import operation
from storm_dagster.operations.transactions import bump_assignments_version, commit, fenced_transaction
from storm_dagster.operations.upgrade.facts import UpgradeFacts, UpgradeReport, clear_lists_ops, with_facts
from storm_dagster.zk.gray_upgrades import put_record_ops

__all__ = ["advance_upgrades", "complete_upgrade", "roll_back", "roll_back_if_upgraded"]

COMPLETE_UPGRADE = operation("complete_upgrade", "complete_upgrade")
ROLL_BACK = operation("roll_back", "roll_back")
FINISH_ROLLBACK = operation("finish_rollback", "finish_rollback")


def complete_upgrade(ctx: OperationsContext, name: str) -> UpgradeReport:
    """End the upgrade here: its code is the topology's from now on, and its record goes.

    Workers that were not upgraded keep their process and get the new code at their next start. :class:`Conflict` when
    no upgrade is under way, or when it is being rolled back.
    """
    return _end(ctx, name, "completed", "it was asked for")


def _end(ctx: OperationsContext, name: str, outcome: str, reason: str) -> UpgradeReport:
    epoch = ctx.current_epoch()
    made: list[str] = []

    def attempt(view: ClusterView, now: UpgradeFacts) -> UpgradeReport:
        topology, record = now.topology, now.state.record
        if made and topology.code_dir == made[0] and topology.base.status == "ACTIVE":
            return now.report(outcome, reason=reason)
        if record is not None and record.rollback:
            raise Conflict(f"the upgrade of {name!r} is being rolled back: wait until that has ended")
        if topology.base.status != "UPGRADING":
            raise Conflict(f"topology {name!r} is {topology.base.status}: no upgrade is under way")
        if record is None:
            return _close(ctx, epoch, now, "abandoned", reason)
        after = apply_event(topology.base, "end_upgrade")
        assert topology.assignment_at is not None
        assignment = now.assignment.model_copy(
            update={"code_dir": record.code_dir, "timestamp_ms": ctx.now_secs() * 1000, "type": "Assign"}
        )
        made[:] = [record.code_dir]
        transaction = bump_assignments_version(fenced_transaction(ctx, epoch), view)
        transaction.set(paths.topology(topology.id), encode_record(after), topology.base_at.version)
        append_assignment(ctx, transaction, assignment, topology.assignment_at)
        append_backup(ctx, transaction, topology.base.name, assignment)
        put_record_ops(transaction, topology.id, now.state, None)
        clear_lists_ops(ctx, transaction, topology.id)
        announce(ctx, transaction, topology.id, "completeUpgrade")
        commit(ctx, transaction, "complete_upgrade")
        ctx.log.info("the upgrade of %s to %s is %s: %s", topology.id, record.code_dir, outcome, reason)
        return replace(
            now.report(outcome, status=after.status, reason=reason, state=None), assignment=assignment
        )

    return with_facts(ctx, name, f"ending the upgrade of {name}", attempt)


def roll_back(ctx: OperationsContext, name: str, reason: str | None = None) -> UpgradeReport:
    """Take every worker that was picked back to the former code. :func:`advance_upgrades` ends it.

    Nothing is stored or fetched: the former code was never replaced. Rolling back what is being rolled back changes
    nothing. :class:`Conflict` when no upgrade is under way.
    """
    epoch = ctx.current_epoch()

    def attempt(view: ClusterView, now: UpgradeFacts) -> UpgradeReport:
        topology, record = now.topology, now.state.record
        if topology.base.status == "ROLLBACK":
            return now.report("rolling back", changed=False, reason=(record and record.reason) or "")
        if topology.base.status != "UPGRADING":
            raise Conflict(
                f"topology {name!r} is {topology.base.status}, no upgrade is under way: there is nothing to roll back"
            )
        if record is None:
            return _close(ctx, epoch, now, "abandoned", "its upgrade record is gone")
        base = apply_event(topology.base, "rollback")
        after = record.model_copy(
            update={"rollback": True, "continue_": False, "workers": (), "reason": reason}
        )
        transaction = fenced_transaction(ctx, epoch)
        transaction.set(paths.topology(topology.id), encode_record(base), topology.base_at.version)
        put_record_ops(transaction, topology.id, now.state, after)
        announce(ctx, transaction, topology.id, "rollbackTopology")
        commit(ctx, transaction, "roll_back")
        ctx.log.info("the upgrade of %s is rolled back: %s", topology.id, reason or "it was asked for")
        return now.report(
            "rolling back",
            status=base.status,
            reason=reason or "",
            state=replace(now.state, record=after),
        )

    return with_facts(ctx, name, f"rolling {name} back", attempt)


def _close(ctx: OperationsContext, epoch: int, now: UpgradeFacts, outcome: str, reason: str) -> UpgradeReport:
    """The record goes, the status is ACTIVE again, the code stays what it was."""
    topology = now.topology
    after = apply_event(topology.base, "end_upgrade")
    transaction = fenced_transaction(ctx, epoch)
    transaction.set(paths.topology(topology.id), encode_record(after), topology.base_at.version)
    if now.state.record is not None:
        put_record_ops(transaction, topology.id, now.state, None)
    clear_lists_ops(ctx, transaction, topology.id)
    commit(ctx, transaction, "finish_rollback")
    ctx.log.info("the upgrade of %s is %s: %s", topology.id, outcome, reason)
    return now.report(outcome, status=after.status, reason=reason, state=None)


def _finish_rollback(ctx: OperationsContext, topology_id: str) -> UpgradeReport:
    epoch = ctx.current_epoch()

    def attempt(view: ClusterView, now: UpgradeFacts) -> UpgradeReport:
        found = due(now.state, now.assignment, now.table, now_secs=ctx.now_secs())
        if found is None or found.action not in ("finish_rollback", "abandon"):
            return now.report("unchanged", changed=False)
        return _close(ctx, epoch, now, "rolled back", found.reason)

    return with_facts(ctx, topology_id, f"ending the rollback of {topology_id}", attempt)


def roll_back_if_upgraded(
    ctx: OperationsContext, topology_id: str, causes: Iterable[Cause]
) -> UpgradeReport | None:
    """Roll the upgrade back when a worker that it took was judged dead; ``None`` when there is none."""
    topology = ctx.cluster.load_view().topologies.get(topology_id)
    if topology is None or topology.base.status != "UPGRADING" or topology.assignment is None:
        return None
    state = ctx.cluster.read_upgrade(topology_id)
    taken = state.upgrading.keys() | state.upgraded.keys()
    true = {(cause.node, cause.port): cause for cause in causes_still_true(topology, causes)}
    lost = [w for w in topology.assignment.workers if w.slot in true and w.address in taken]
    if state.record is None or not lost:
        return None
    try:
        return roll_back(ctx, topology_id, true[lost[0].slot].describe())
    except (Conflict, NotAlive):
        return None  # It ended meanwhile.


def advance_upgrades(ctx: OperationsContext, view: ClusterView | None = None) -> list[UpgradeReport]:
    """Do what is due about every upgrade; the reports of those that it changed. For the leader and the sensor.

    Complete when all workers are upgraded, expire, roll back when an upgraded worker failed, end a rollback. Each
    topology fails alone; only :class:`Fenced` ends the whole call.
    """
    reports: list[UpgradeReport] = []
    for topology in (view or ctx.cluster.load_view()).topologies.values():
        if topology.base.status not in ("UPGRADING", "ROLLBACK"):
            continue
        if topology.assignment is None or topology.tasks is None:
            continue
        try:
            state = ctx.cluster.read_upgrade(topology.id)
            found = due(state, topology.assignment, topology.tasks, now_secs=ctx.now_secs())
            if found is not None:
                reports.append(_do(ctx, topology.id, found))
        except Fenced:
            raise
        except (Conflict, NotAlive) as error:
            ctx.log.info("upgrade of %s: %s", topology.id, error.message)
        except StormDagsterError as error:
            ctx.log.warning("upgrade of %s: %s", topology.id, error.message)
    return [report for report in reports if report.changed]


def _do(ctx: OperationsContext, topology_id: str, found: Due) -> UpgradeReport:
    if found.action in ("finish_rollback", "abandon"):
        return _finish_rollback(ctx, topology_id)
    if found.action == "roll_back":
        return roll_back(ctx, topology_id, found.reason)
    return _end(ctx, topology_id, "expired" if found.action == "expire" else "completed", found.reason)
