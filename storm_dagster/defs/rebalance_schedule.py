"""`rebalance_schedule`: every 10 minutes, a run for each topology whose placement has a better one.

Looking costs no run: the plain-Python planner says whether the plan would change (it agrees with the
PySpark planner task for task); only then `rebalance_topology` plans with PySpark and moves tasks.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import logging

import dagster as dg

from storm_dagster.core.scheduling import plan_placement
from storm_dagster.defs.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.keys import PARTITIONS_NAME, REBALANCE_JOB, topology_tags
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.rebalance import rebalance

__all__ = ["rebalance_schedule"]

_log = logging.getLogger(__name__)


def _unsettled(view: ClusterView) -> dict[str, int]:
    """Names of topologies that a rebalance may touch now, with the version of their assignment."""
    return {
        topology.base.name: topology.assignment_at.version
        for topology in view.topologies.values()
        if topology.base.status in ("ACTIVE", "INACTIVE")
        and topology.base.wanted_status == topology.base.status
        and topology.assignment is not None
        and topology.assignment_at is not None
        # What is dead is healed first: a rebalance would move tasks that are about to move anyway.
        and all(worker.slot in topology.live_workers for worker in topology.assignment.workers)
    }


@dg.schedule(
    name="rebalance_schedule",
    job_name=REBALANCE_JOB,
    cron_schedule="*/10 * * * *",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="Every 10 minutes: rebalances each topology whose plan would change, else launches nothing.",
)
def rebalance_schedule(
    context: dg.ScheduleEvaluationContext, zookeeper: ZooKeeperResource, blobstore: BlobStoreResource
) -> list[dg.RunRequest] | dg.SkipReason:
    """Plan every settled topology with what it has, and ask for a run where tasks would move."""
    requests: list[dg.RunRequest] = []
    settled = 0
    try:
        with zookeeper.cluster() as cluster, blobstore.blobs(cluster) as blobs:
            ops = OperationsContext(
                cluster=cluster, blobs=blobs, conf=zookeeper.conf(), planner=plan_placement, log=_log
            )
            view = cluster.load_view()
            for name, version in sorted(_unsettled(view).items()):
                try:
                    report = rebalance(ops, name, dry_run=True)
                except StormDagsterError as error:
                    context.log.info(f"{name} is left alone: {error.message}")
                    continue
                settled += report.outcome == "unchanged"
                if report.outcome != "planned" or not report.moved:
                    continue
                if not context.instance.has_dynamic_partition(PARTITIONS_NAME, name):
                    context.log.info(f"{name} has no partition key yet: lifecycle_sensor adds it")
                    continue
                requests.append(
                    dg.RunRequest(
                        run_key=f"{report.topology_id}:{version}",
                        partition_key=name,
                        tags={**topology_tags(name), "storm/moved_tasks": str(report.moved)},
                    )
                )
    except StormDagsterError as error:
        return dg.SkipReason(error.message)
    return requests or dg.SkipReason(f"{settled} topologies are balanced, no plan would change")
