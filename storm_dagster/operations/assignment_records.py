"""Assignments and their backups in transactions; large ones are written in parts."""

from __future__ import annotations

from storm_dagster.model import paths
from storm_dagster.model.records import Assignment, AssignmentChange, decode_record, encode_record
from storm_dagster.model.view import Versioned
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.inimbus import notify_new_slots
from storm_dagster.zk.cluster_state import Transaction
from storm_dagster.zk.shards import put_ops, read_sharded

MAX_WHY = 300
_KEPT_CHANGES = 20


def with_change(
    ctx: OperationsContext,
    assignment: Assignment,
    action: str,
    why: str = "",
    *,
    moved: int = 0,
    outage_secs: float = 0,
) -> Assignment:
    """The assignment with one more entry in its history, which keeps the newest 20: the page of the topology shows it."""
    change = AssignmentChange(
        at_secs=ctx.now_secs(),
        action=action,
        why=why[:MAX_WHY],
        moved=moved,
        outage_secs=round(outage_secs),
        run=ctx.run,
    )
    return assignment.model_copy(update={"history": (change, *assignment.history)[:_KEPT_CHANGES]})


def append_assignment(
    ctx: OperationsContext, transaction: Transaction, name: str, assignment: Assignment, at: Versioned | None
) -> None:
    """Append what creates the assignment (``at`` is ``None``) or replaces the one read at ``at``.

    It is also kept under the topology's name, where it survives a kill. A scheduling plug-in is notified of its new
    slots once the transaction is committed.
    """
    raw = encode_record(assignment, limit=None)
    plugin = ctx.inimbus
    if plugin is not None:
        before = None if at is None else ctx.cluster.assignment_info(assignment.topology_id)
        transaction.afterwards.append(lambda: notify_new_slots(plugin, before, assignment))
    put_ops(ctx.cluster.state, transaction, paths.assignment(assignment.topology_id), raw, at)
    backup = paths.assignment_backup(name)
    found = ctx.cluster.state.get_data_with_version(backup)
    put_ops(ctx.cluster.state, transaction, backup, raw, found[1] if found is not None and found[0] else None)


def read_backup(ctx: OperationsContext, name: str) -> tuple[Assignment | None, Versioned | None]:
    """The newest assignment that a topology of that name had, and the version of its node."""
    path = paths.assignment_backup(name)
    found = read_sharded(ctx.cluster.state, path)
    return (None, None) if found is None else (decode_record(Assignment, found[0], path), found[1])
