"""Wait for the end of a batch, of a gray upgrade or of its rollback."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from storm_dagster.core.upgrade import machine
from storm_dagster.core.upgrade.selection import UpgradeSnapshot
from storm_dagster.model.errors import Conflict, InvalidTopology, NotAlive
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.upgrade import UpgradeResult, advance_upgrades

_POLL_SECS = 0.25
"""Pause between two polls of an upgrade."""


def await_upgrade(
    ctx: OperationsContext,
    request: UpgradeResult,
    *,
    wait_secs: float,
    on_worker: Callable[[str, str], object],
    back: bool = False,
) -> UpgradeResult:
    """Wait until no worker is changing its code.

    That is the end of the requested batch (outcome ``batch done``) or of the upgrade
    (``completed``). With ``back``, wait until every worker runs the former code (``rolled back``).
    The outcome is ``under way`` if ``wait_secs`` are over first. ``on_worker`` is called with
    ``host:port`` and phase of each worker whose phase changed. :class:`InvalidTopology` if the
    upgrade was rolled back because of a failure of the new code, :class:`Conflict` if a rollback
    was requested, :class:`NotAlive` if the topology was killed. Due transitions are executed here
    as well, because the leader may be away.
    """
    deadline = ctx.monotonic() + wait_secs
    # ``host:port`` -> phase at the last poll.
    # Before the first poll each counts as ``former``.
    workers: Mapping[str, str] = {}
    reason = request.reason

    def notify(phases: Mapping[str, str]) -> None:
        """Report the workers whose phase changed since the last poll."""
        for worker, phase in phases.items():
            if workers.get(worker, "former") != phase:
                on_worker(worker, phase)

    while True:
        assignment = ctx.cluster.assignment_info(request.topology_id)
        table = ctx.cluster.read_tasks(request.topology_id)
        state = ctx.cluster.read_upgrade(request.topology_id)
        if assignment is None or table is None or state.record is None:
            last = replace(request, workers=workers, reason=reason)
            result = _end_result(ctx, last, back)
            # The upgrade may end between two polls, together with the last changes of workers.
            notify(result.workers)
            return result
        base = ctx.cluster.storm_base(request.topology_id)
        if base is None or base.status == "KILLED":
            raise _killed(request.name, back)
        snapshot = UpgradeSnapshot(state, assignment, table)
        reason = state.record.reason or reason
        notify(snapshot.workers)
        workers = snapshot.workers
        outcome = "under way" if ctx.monotonic() >= deadline else ""
        if not back and snapshot.phase == "paused" and not snapshot.complete:
            outcome = "batch done"
        if outcome:
            status = "ROLLBACK" if snapshot.phase == "rolling back" else "UPGRADING"
            return replace(request, status=status, outcome=outcome, workers=workers, reason=reason)
        if machine.due(snapshot) is not None:
            advance_upgrades(ctx)
        ctx.sleep(_POLL_SECS)


def _end_result(ctx: OperationsContext, last: UpgradeResult, back: bool) -> UpgradeResult:
    """Result of an upgrade that has ended; ``last`` is its state at the last poll.

    With ``back`` the caller waited for a rollback. Raises the errors of :func:`await_upgrade`.
    """
    topology = ctx.cluster.load_view().topologies.get(last.topology_id)
    if topology is None or topology.base.status == "KILLED":
        raise _killed(last.name, back)
    status = topology.base.status
    record = last.state.record if last.state is not None else None
    if back:
        workers = dict.fromkeys(last.workers, "former")
        return replace(last, status=status, outcome="rolled back", workers=workers)
    if topology.code_dir == (record.code_dir if record is not None else ""):
        workers = dict.fromkeys(last.workers, "upgraded")
        return replace(last, status=status, outcome="completed", workers=workers, reason="")
    if last.reason:
        raise InvalidTopology(
            f"the upgrade of {last.name!r} was rolled back, "
            f"the former code runs again: {last.reason}"
        )
    raise Conflict(
        f"the upgrade of {last.name!r} was rolled back by another request: "
        "the former code runs again"
    )


def _killed(name: str, back: bool) -> NotAlive:
    """The error of a wait for an upgrade, or with ``back`` a rollback, of a killed topology."""
    change = "rolled back" if back else "upgraded"
    return NotAlive(f"topology {name!r} was killed while it was {change}: submit it again")
