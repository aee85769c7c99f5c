"""The sensor that finishes what waits: delayed removals and rebalances, unfinished activations.

It also keeps the partitions in step with the cluster: a topology that lives has a key, wherever it was
submitted; the key of one that was seen alive and is gone is dropped.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import json
import logging
import time

import dagster as dg

from storm_dagster.core.transitions import DueMemory
from storm_dagster.defs.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.keys import PARTITIONS, PARTITIONS_NAME, SUBMIT_JOB
from storm_dagster.defs.observation_sensors import read_cursor
from storm_dagster.defs.spark_resource import SparkResource
from storm_dagster.model.errors import Fenced, Unavailable
from storm_dagster.model.run_file import boot_id
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.lifecycle import finish_due

__all__ = ["lifecycle_sensor"]

_log = logging.getLogger(__name__)
_PARTITION_TAG = "dagster/partition"


def submitting(instance: dg.DagsterInstance, name: str) -> bool:
    """Whether a submission of the name is under way, so that its key must stay."""
    runs = instance.get_runs(
        filters=dg.RunsFilter(
            job_name=SUBMIT_JOB,
            tags={_PARTITION_TAG: name},
            statuses=[
                dg.DagsterRunStatus.NOT_STARTED,
                dg.DagsterRunStatus.QUEUED,
                dg.DagsterRunStatus.STARTING,
                dg.DagsterRunStatus.STARTED,
            ],
        ),
        limit=1,
    )
    return bool(runs)


@dg.sensor(
    name="lifecycle_sensor",
    minimum_interval_seconds=5,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Finishes delayed removals and rebalances and interrupted activations; keeps partitions in step.",
)
def lifecycle_sensor(
    context: dg.SensorEvaluationContext,
    zookeeper: ZooKeeperResource,
    blobstore: BlobStoreResource,
    spark: SparkResource,
) -> dg.SensorResult | dg.SkipReason:
    """Do what is due, and add or drop partition keys."""
    cursor = read_cursor(context.cursor)
    try:
        with zookeeper.cluster() as cluster, blobstore.blobs(cluster) as blobs:
            ops = OperationsContext(
                cluster=cluster,
                blobs=blobs,
                conf=zookeeper.conf(),
                planner=spark.planner(cluster),
                log=_log,
            )
            report = finish_due(
                ops,
                DueMemory.from_json(cursor.get("due")),
                boot_id=boot_id(),
                boot_now=time.clock_gettime(time.CLOCK_BOOTTIME),
            )
            view = cluster.load_view()
    except (Unavailable, Fenced) as error:
        return dg.SkipReason(error.message)
    alive = {topology.base.name for topology in view.topologies.values()}
    registered = set(context.instance.get_dynamic_partitions(PARTITIONS_NAME))
    known = cursor.get("alive")
    before = {str(name) for name in known} if isinstance(known, list) else set()
    # A key that was never seen alive belongs to a submission that is being prepared, by hand or by a run.
    gone = sorted(name for name in (before & registered) - alive if not submitting(context.instance, name))
    new = sorted(alive - registered)
    requests: list[dg.AddDynamicPartitionsRequest | dg.DeleteDynamicPartitionsRequest] = []
    if new:
        requests.append(PARTITIONS.build_add_request(new))
    if gone:
        requests.append(PARTITIONS.build_delete_request(gone))
    for line in report.done:
        context.log.info(line)
    for topology_id, message in report.failed.items():
        context.log.warning(f"{topology_id}: {message}")
    done = ", ".join([*report.done, *(f"new key {n}" for n in new), *(f"dropped key {n}" for n in gone)])
    waiting = len(report.memory.seen or {}) - len(report.done)
    # Names that are gone but still being submitted are looked at again.
    remembered = sorted(alive | (before & registered - set(gone)))
    return dg.SensorResult(
        dynamic_partitions_requests=requests,
        skip_reason=dg.SkipReason(done or f"nothing is due, {waiting} topologies wait for their delay"),
        cursor=json.dumps({"due": report.memory.to_json(), "alive": remembered}),
    )
