"""Watching an upgrade: worker by worker, until its batch is through or it has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from storm_dagster.core.gray_upgrade import upgrade_document
from storm_dagster.model.errors import Conflict, InvalidTopology, NotAlive, StormDagsterError
from storm_dagster.model.records import TopologyStatus
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.upgrade.ending import advance_upgrades
from storm_dagster.operations.upgrade.facts import UpgradeReport

__all__ = ["Progress", "await_batch", "await_rollback"]

_POLL_SECS = 0.25


@dataclass(frozen=True)
class Progress:
    """What an upgrade has come to."""

    status: TopologyStatus
    outcome: str
    """``batch done``, ``completed``, ``rolled back``, ``rolling back`` or ``under way``."""
    workers: dict[str, str]
    """``host:port`` -> ``former``, ``upgrading``, ``upgraded`` or ``rolling back``; the last that was seen."""
    reason: str = ""

    def count(self, state: str) -> int:
        """How many workers are in that state."""
        return sum(1 for each in self.workers.values() if each == state)


Tell = Callable[[str, str], object]
"""Hears (``host:port``, state) of each worker whose state changed."""


def await_batch(ctx: OperationsContext, report: UpgradeReport, *, wait_secs: float, tell: Tell) -> Progress:
    """Wait until no worker is changing its code any more; ``under way`` when ``wait_secs`` are over first.

    :class:`InvalidTopology` when the upgrade was rolled back because of what the new code did, :class:`Conflict` when
    somebody asked for that, :class:`NotAlive` when the topology was killed.
    """
    record = report.state.record if report.state is not None else None
    code_dir = record.code_dir if record is not None else ""
    progress = _watch(
        ctx,
        report,
        wait_secs,
        tell,
        lambda document: not document["asked"] and not document["upgrading"] and not document["rollback"],
    )
    if progress.outcome != "ended":
        return progress
    topology = ctx.cluster.load_view().topologies.get(report.topology_id)
    if topology is None:
        raise NotAlive(f"topology {report.name!r} was killed while it was upgraded")
    if topology.code_dir == code_dir:
        workers = dict.fromkeys(progress.workers, "upgraded") if progress.workers else {}
        return Progress(topology.base.status, "completed", workers)
    raise _rolled_back(report.name, progress.reason)


def await_rollback(
    ctx: OperationsContext, report: UpgradeReport, *, wait_secs: float, tell: Tell
) -> Progress:
    """Wait until every worker runs the former code; ``under way`` when ``wait_secs`` are over first."""
    progress = _watch(ctx, report, wait_secs, tell, lambda document: False)
    if progress.outcome != "ended":
        return progress
    topology = ctx.cluster.load_view().topologies.get(report.topology_id)
    if topology is None:
        raise NotAlive(f"topology {report.name!r} was killed while it was rolled back")
    workers = dict.fromkeys(progress.workers, "former")
    return Progress(topology.base.status, "rolled back", workers, progress.reason)


def _rolled_back(name: str, reason: str) -> StormDagsterError:
    if reason:
        return InvalidTopology(
            f"the upgrade of {name!r} was rolled back, the former code runs again: {reason}"
        )
    return Conflict(f"the upgrade of {name!r} was rolled back by somebody else: the former code runs again")


def _watch(
    ctx: OperationsContext,
    report: UpgradeReport,
    wait_secs: float,
    tell: Tell,
    done: Callable[[dict[str, Any]], bool],
) -> Progress:
    """Until ``done``, the end of the upgrade (``ended``) or of the wait. What is due is done here as well: the
    leader may be away, and a run that waits can do it as well as anybody."""
    deadline = ctx.monotonic() + wait_secs
    seen: dict[str, str] = {}
    reason = ""
    while True:
        assignment = ctx.cluster.assignment_info(report.topology_id)
        table = ctx.cluster.read_tasks(report.topology_id)
        state = ctx.cluster.read_upgrade(report.topology_id)
        document = None
        if assignment is not None and table is not None:
            document = upgrade_document(state, assignment, table)
        if document is None:
            return Progress("ACTIVE", "ended", seen, reason)
        reason = document["reason"] or reason
        for worker, now in document["workers"].items():
            if seen.get(worker, "former") != now:
                tell(worker, now)
        seen = document["workers"]
        status: TopologyStatus = "ROLLBACK" if document["rollback"] else "UPGRADING"
        whole = not document["upgrading"] and set(seen.values()) == {"upgraded"}
        if done(document) and not whole:
            return Progress(status, "batch done", seen, reason)
        if ctx.monotonic() >= deadline:
            return Progress(status, "under way", seen, reason)
        advance_upgrades(ctx)
        ctx.sleep(_POLL_SECS)
