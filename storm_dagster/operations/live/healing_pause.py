"""Pause of healing: operators stop all reassignments of dead tasks for a while.

Supervisors still restart workers in place, and rebalances that operators ask for move tasks.
"""

from storm_dagster.model import paths
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.healing_pause import MAX_PAUSE_SECS, HealingPause
from storm_dagster.model.records import decode_record, encode_record
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.steps import operation
from storm_dagster.operations.transactions import (
    bump_assignments_version,
    commit,
    retry_on_conflict,
)

PAUSE_HEALING = operation("pause_healing", "healing_pause")
RESUME_HEALING = operation("resume_healing", "resumed_healing")


def pause_healing(ctx: OperationsContext, *, secs: int, user: str = "") -> HealingPause:
    """Pause healing for ``secs`` from now on, in one fenced transaction; return the record.

    It replaces a pause that is in force, also by a shorter one. The transaction raises the version
    of ``/assignments``: a reassignment that was planned before is not committed after it.
    :class:`InvalidRequest` for a length that is not 1 s to a day.
    """
    if not 1 <= secs <= MAX_PAUSE_SECS:
        raise InvalidRequest(f"a pause of healing of {secs} s: choose 1 to {MAX_PAUSE_SECS} s")
    epoch = ctx.current_epoch()
    now_ms = ctx.now_secs() * 1000
    record = HealingPause(since_ms=now_ms, until_ms=now_ms + secs * 1000, user=user[:200])

    def attempt(view: ClusterView) -> HealingPause:
        stored = ctx.cluster.state.get_data_with_version(paths.HEALING_PAUSE)
        transaction = ctx.cluster.fenced(epoch)
        if stored is None:
            transaction.create(paths.HEALING_PAUSE, encode_record(record))
        else:
            raw, node = stored
            if decode_record(HealingPause, raw, paths.HEALING_PAUSE) == record:
                return record  # The reply to the own commit was lost.
            transaction.set(paths.HEALING_PAUSE, encode_record(record), node.version)
        bump_assignments_version(transaction, view, {})
        commit(ctx, transaction, "healing_pause")
        ctx.log.warning("healing is paused for %d s by %s", secs, record.user or "an operator")
        return record

    return retry_on_conflict(ctx, "pausing healing", attempt)


def resume_healing(ctx: OperationsContext, *, until_ms: int | None = None) -> bool:
    """End the pause of healing in one fenced transaction; false if there is none.

    With ``until_ms`` only the pause with that end: another one, which has replaced it, stays.
    """
    epoch = ctx.current_epoch()

    def attempt(_: ClusterView) -> bool:
        stored = ctx.cluster.state.get_data_with_version(paths.HEALING_PAUSE)
        if stored is None:
            return False
        raw, node = stored
        if until_ms is not None:
            pause = decode_record(HealingPause, raw, paths.HEALING_PAUSE)
            if pause.until_ms != until_ms:
                return False
        transaction = ctx.cluster.fenced(epoch).delete(paths.HEALING_PAUSE, node.version)
        commit(ctx, transaction, "resumed_healing")
        ctx.log.warning("healing continues")
        return True

    return retry_on_conflict(ctx, "resuming healing", attempt)
