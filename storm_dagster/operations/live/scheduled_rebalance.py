"""Rebalances that schedules ask for: the one judgment for all of them.

A schedule asks by :func:`scheduled_gain` whether a topology gains enough to be rebalanced, and the
run that it requests asks by :func:`unsteady_now` once more when it begins.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from storm_dagster.core.rebalancing import Spread, largest_gain, new_supervisors, spread_of
from storm_dagster.core.usable_slots import usable_slots
from storm_dagster.model.records import WorkerSlot
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext, load_runnable
from storm_dagster.operations.live.rebalance import rebalance


@dataclass(frozen=True)
class ScheduledGain:
    """Judgment of a schedule about one topology."""

    moved: int
    """Number of tasks that a rebalance moves; 0 if none is worth a run."""
    reason: str
    """The gain in words, or the reason why no run is worth it."""


def scheduled_gain(
    ctx: OperationsContext, view: ClusterView, topology: TopologyView
) -> ScheduledGain:
    """The fewest moves that restore balance, and their gain.

    No move if the topology is not steady, or if the gain is at most
    ``topology.rebalance.threshold``. Hosts that registered less than
    ``nimbus.rebalance.quiet.secs`` ago do not count. Raises the planner's error if the topology
    does not fit.
    """
    report = rebalance(ctx, topology.id, dry_run=True, scheduled=True, view=view)
    if report.reason:
        return ScheduledGain(0, report.reason)
    if not report.moved or report.assignment is None or report.placement is None:
        limits = f" ({report.limits})" if report.limits else ""
        return ScheduledGain(0, f"it is balanced, no plan would change it{limits}")
    threshold = float(load_runnable(ctx, topology).conf["topology.rebalance.threshold"])
    quiet_secs = float(ctx.conf["nimbus.rebalance.quiet.secs"])
    usable = usable_slots(view, placing=[topology.id], avoid=new_supervisors(view, quiet_secs))
    supervisors = sum(1 for supervisor in usable.confined if supervisor.info.ports)

    def spread(workers: Iterable[WorkerSlot]) -> Spread:
        sizes = [(worker.node, len(worker.ids)) for worker in workers]
        return spread_of(sizes, target_workers=report.workers, supervisors=supervisors)

    current, planned = largest_gain(
        spread(report.assignment.workers), spread(report.placement.workers)
    )
    text = f"{report.moved} tasks would move, imbalance {current:.2f} would become {planned:.2f}"
    if current - planned > threshold:
        return ScheduledGain(report.moved, text)
    return ScheduledGain(
        0, f"{text}, which gains no more than topology.rebalance.threshold {threshold:g}"
    )


def unsteady_now(ctx: OperationsContext, name: str) -> str:
    """Reason why a schedule's run must not rebalance the topology now; empty if it may.

    Since the schedule's tick a host may have been lost, or a healing may have moved tasks.
    """
    return rebalance(ctx, name, dry_run=True, scheduled=True).reason
