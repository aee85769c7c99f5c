"""`rebalance_schedule`: every 10 minutes, a run for each topology whose placement has a clearly better one.

Looking costs no run: the plain-Python planner says what the plan would be (it agrees with the PySpark planner
task for task). Only when that improves the balance by more than ``topology.rebalance.threshold`` does
`rebalance_topology` plan with PySpark and move tasks; otherwise the tick says why not.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import logging
from dataclasses import dataclass

import dagster as dg

from storm_dagster.core.balance import imbalance
from storm_dagster.core.scheduling import plan_placement
from storm_dagster.defs.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.keys import PARTITIONS_NAME, REBALANCE_JOB, topology_tags
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext, load_runnable
from storm_dagster.operations.rebalance import rebalance

__all__ = ["rebalance_schedule"]

_REASSIGN = {"ops": {"storm__assignment": {"config": {"reassign": True}}}}

_log = logging.getLogger(__name__)


def _unsettled(view: ClusterView) -> dict[str, int]:
    """Names of topologies that a rebalance may touch now, with the version of their assignment."""
    busy = _busy(view)
    return {
        topology.base.name: topology.assignment_at.version
        for topology in view.topologies.values()
        if topology.base.name not in busy and topology.assignment_at is not None
    }


def _busy(view: ClusterView) -> dict[str, str]:
    """Names of topologies that are left alone, with the reason."""
    found: dict[str, str] = {}
    for topology in view.topologies.values():
        base, assignment = topology.base, topology.assignment
        if base.status not in ("ACTIVE", "INACTIVE") or base.wanted_status != base.status:
            found[base.name] = f"it is {base.status}, wanted {base.wanted_status}"
        elif assignment is None or topology.assignment_at is None:
            found[base.name] = "it has no assignment"
        elif missing := [worker for worker in assignment.workers if worker.slot not in topology.live_workers]:
            # What is dead is healed first: a rebalance would move tasks that are about to move anyway.
            found[base.name] = f"{len(missing)} of its workers do not live, healing comes first"
    return found


@dataclass(frozen=True)
class _Gain:
    """What a rebalance of one topology would bring."""

    topology_id: str
    moved: int
    reassign: bool
    """All is placed anew: the fewest moves would not spread the workers over the supervisors."""
    skipped: str | None
    """Why it is not worth a run; ``None`` when it is."""
    text: str


def _gain(ops: OperationsContext, view: ClusterView, name: str) -> _Gain:
    """The fewest moves when they are worth it, else everything anew, else why neither is."""
    tried = [_plan(ops, view, name, reassign) for reassign in (False, True)]
    return next((gain for gain in tried if gain.skipped is None), min(tried, key=lambda gain: not gain.text))


def _plan(ops: OperationsContext, view: ClusterView, name: str, reassign: bool) -> _Gain:
    report = rebalance(ops, name, reassign=reassign, dry_run=True)
    if not report.moved or report.assignment is None or report.placement is None:
        return _Gain(report.topology_id, 0, reassign, "it is balanced, no plan would change it", "")
    threshold = float(load_runnable(ops, report.topology_id).conf["topology.rebalance.threshold"])
    supervisors = sum(
        1 for info in view.supervisors.values() if info.ports and info.host not in view.blacklist
    )
    now, then = (
        imbalance(spread, wanted=report.workers, supervisors=supervisors)
        for spread in (
            [(worker.node, len(worker.ids)) for worker in report.assignment.workers],
            [(worker.node, len(worker.tasks)) for worker in report.placement.workers],
        )
    )
    text = f"{report.moved} tasks would move, imbalance {now:.2f} would become {then:.2f}"
    worth = now - then > threshold
    skipped = (
        None if worth else f"{text}, which gains no more than topology.rebalance.threshold {threshold:g}"
    )
    return _Gain(report.topology_id, report.moved, reassign, skipped, text)


@dg.schedule(
    name="rebalance_schedule",
    job_name=REBALANCE_JOB,
    cron_schedule="*/10 * * * *",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="Every 10 minutes: rebalances each topology whose balance gains more than "
    "topology.rebalance.threshold; else says why not.",
)
def rebalance_schedule(
    context: dg.ScheduleEvaluationContext, zookeeper: ZooKeeperResource, blobstore: BlobStoreResource
) -> list[dg.RunRequest] | dg.SkipReason:
    """Plan every settled topology with what it has, and ask for a run where tasks would move."""
    requests: list[dg.RunRequest] = []
    why: list[str] = []
    try:
        with zookeeper.cluster() as cluster, blobstore.blobs(cluster) as blobs:
            ops = OperationsContext(
                cluster=cluster, blobs=blobs, conf=zookeeper.conf(), planner=plan_placement, log=_log
            )
            view = cluster.load_view()
            for name, version in sorted(_unsettled(view).items()):
                try:
                    gain = _gain(ops, view, name)
                except StormDagsterError as error:
                    why.append(f"{name} is left alone: {error.message}")
                    continue
                if gain.skipped:
                    why.append(f"{name}: {gain.skipped}")
                elif not context.instance.has_dynamic_partition(PARTITIONS_NAME, name):
                    why.append(f"{name} has no partition key yet: lifecycle_sensor adds it")
                else:
                    context.log.info(f"{name}: {gain.text}")
                    requests.append(
                        dg.RunRequest(
                            run_key=f"{gain.topology_id}:{version}",
                            partition_key=name,
                            run_config=_REASSIGN if gain.reassign else None,
                            tags={**topology_tags(name), "storm/moved_tasks": str(gain.moved)},
                        )
                    )
    except StormDagsterError as error:
        return dg.SkipReason(error.message)
    why += [f"{name}: {reason}" for name, reason in sorted(_busy(view).items())]
    for line in why:
        context.log.info(line)
    return requests or dg.SkipReason("; ".join(why[:20]) or "no topology runs")
