"""One op job for each verb of a topology's life. Each waits for its effect and then reports it."""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import time
from collections.abc import Callable
from typing import Any

import dagster as dg

from storm_dagster.defs.change_observation import observe_change
from storm_dagster.defs.failures import step_errors
from storm_dagster.defs.forms import KillConfig, NameConfig, UpdateConfig
from storm_dagster.defs.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.keys import ACTIVE_TOPOLOGY, PARTITIONS_NAME, PUBLISHED_ASSIGNMENT
from storm_dagster.defs.nimbus_resource import NimbusResource, upload_of
from storm_dagster.defs.operating import Handles, operations
from storm_dagster.defs.spark_resource import SparkResource
from storm_dagster.defs.submission_metadata import stored_metadata
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.operations import lifecycle
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.reports import LifecycleReport

__all__ = ["build_lifecycle_jobs"]

_POLL_SECS = 0.5
# After the delay the leader and lifecycle_sensor remove the topology too: this run lets them, and does it
# itself when neither is there.
_GRACE_SECS = 2.0
# A run that waits holds a process: longer delays are left to the leader and lifecycle_sensor.
_LONGEST_WAIT_SECS = 600
_LONGEST_START_SECS = 60.0


def lifecycle_metadata(report: LifecycleReport, began: float) -> dict[str, Any]:
    """What became of the topology."""
    return {
        "topology_id": report.topology_id,
        "status": report.status or "gone",
        "previous": report.previous or "unknown",
        "changed": report.changed,
        **({"drain_secs": round(report.drain_secs, 3)} if report.drain_secs else {}),
        "seconds": round(time.monotonic() - began, 3),
    }


def _observe(
    context: dg.OpExecutionContext,
    verb: str,
    report: LifecycleReport,
    began: float,
    shown: dg.AssetKey,
    gap_secs: float | None = None,
) -> None:
    metadata = lifecycle_metadata(report, began)
    if gap_secs is not None:
        metadata["gap_secs"] = round(gap_secs, 3)
    observe_change(context, verb, report.name, report.status or "gone", metadata, shown)


def _verb_job(
    verb: str, description: str, operation: Callable[[OperationsContext, str], LifecycleReport]
) -> dg.JobDefinition:
    @dg.op(name=f"{verb}_topology_op", description=description, out=dg.Out(dg.Nothing))
    def verb_op(
        context: dg.OpExecutionContext,
        config: NameConfig,
        zookeeper: ZooKeeperResource,
        blobstore: BlobStoreResource,
        spark: SparkResource,
    ) -> None:
        began = time.monotonic()
        with operations(context, Handles(zookeeper, blobstore, spark)) as ops:
            report = operation(ops, config.name)
        _observe(context, verb, report, began, zookeeper.asset_key(ACTIVE_TOPOLOGY))

    @dg.job(name=f"{verb}_topology", description=description, executor_def=dg.in_process_executor)
    def verb_job() -> None:
        verb_op()

    return verb_job


_KILL = "Silence the topology's spouts, wait, and end it: workers, cluster state, code, and its partition."


@dg.op(name="kill_topology_op", description=_KILL, out=dg.Out(dg.Nothing))
def kill_topology_op(
    context: dg.OpExecutionContext,
    config: KillConfig,
    zookeeper: ZooKeeperResource,
    blobstore: BlobStoreResource,
    spark: SparkResource,
) -> None:
    """Kill the topology, see it removed, then drop its partition key."""
    began = time.monotonic()
    with operations(context, Handles(zookeeper, blobstore, spark)) as ops:
        report = lifecycle.kill(ops, config.name, config.wait_secs)
        if report.status is not None:
            context.log.info(f"{report.topology_id} is silent, it ends in {report.delay_secs} s")
            if (report.delay_secs or 0) <= _LONGEST_WAIT_SECS:
                report = _await_removal(ops, report)
        gone = ops.cluster.load_view().topology_named(report.name) is None
    _observe(context, "kill", report, began, zookeeper.asset_key(ACTIVE_TOPOLOGY))
    if gone and context.instance.has_dynamic_partition(PARTITIONS_NAME, report.name):
        # The history stays; a later submission of the name shows it again.
        context.instance.delete_dynamic_partition(PARTITIONS_NAME, report.name)


def _await_removal(ops: OperationsContext, report: LifecycleReport) -> LifecycleReport:
    """Wait until the killed topology is gone; remove it here when nobody has by the end of its delay."""
    deadline = ops.monotonic() + (report.delay_secs or 0) + _GRACE_SECS
    while ops.monotonic() < deadline:
        if report.topology_id not in ops.cluster.load_view().topologies:
            return LifecycleReport(
                report.topology_id, report.name, None, changed=True, previous=report.previous
            )
        ops.sleep(_POLL_SECS)
    return lifecycle.remove(ops, report.topology_id)


@dg.job(name="kill_topology", description=_KILL, executor_def=dg.in_process_executor)
def kill_topology() -> None:
    """The job of one op."""
    kill_topology_op()


_UPDATE = "Run new code in the place of the running topology (hot deploy): checked, stored and placed first."


@dg.op(name="update_topology_op", description=_UPDATE, out=dg.Out(dg.Nothing))
def update_topology_op(
    context: dg.OpExecutionContext,
    config: UpdateConfig,
    zookeeper: ZooKeeperResource,
    blobstore: BlobStoreResource,
    spark: SparkResource,
    nimbus: NimbusResource,
) -> None:
    """Upload if need be, then replace; the old topology is touched only when the new one stands ready."""
    began = time.monotonic()
    with step_errors():
        handle = upload_of(context.log, nimbus, config.handle, config.target, config.conf)
        if handle is None and not config.token:
            raise InvalidRequest(f"nothing to run in the place of {config.name!r}: give `target` in the form")
    with operations(context, Handles(zookeeper, blobstore, spark)) as ops:
        report = lifecycle.update(
            ops,
            config.name,
            token=config.token or context.run.run_id,
            handle=handle,
            allow_degraded=config.allow_degraded,
        )
        gap = _await_workers(ops, report) if report.drain_secs else None
        found = ops.cluster.read_assignment(report.topology_id)
        table = ops.cluster.read_tasks(report.topology_id)
    _observe(context, "update", report, began, zookeeper.asset_key(ACTIVE_TOPOLOGY), gap)
    if found is None or table is None:
        return  # Killed in the meantime.
    shown = stored_metadata(found[0], table.component_of(), report.name)
    common = {"topology_id": report.topology_id, "status": report.status or "gone"}
    for key, metadata in ((PUBLISHED_ASSIGNMENT, {**common, **shown}), (ACTIVE_TOPOLOGY, common)):
        context.log_event(
            dg.AssetMaterialization(
                asset_key=zookeeper.asset_key(key), partition=report.name, metadata=metadata
            )
        )


def _await_workers(ops: OperationsContext, report: LifecycleReport) -> float | None:
    """Seconds from the last tuple of the old topology until every worker of the new one runs; ``None``: not in time."""
    began = ops.monotonic()
    while ops.monotonic() - began < _LONGEST_START_SECS:
        topology = ops.cluster.load_view().topologies.get(report.topology_id)
        if topology is None or topology.assignment is None:
            return None
        slots = {worker.slot for worker in topology.assignment.workers}
        if slots <= {slot for slot, node in topology.live_workers.items() if node.status == "running"}:
            return (report.swap_secs or 0.0) + ops.monotonic() - began
        ops.sleep(_POLL_SECS / 5)
    return None


@dg.job(name="update_topology", description=_UPDATE, executor_def=dg.in_process_executor)
def update_topology() -> None:
    """The job of one op."""
    update_topology_op()


def build_lifecycle_jobs() -> list[dg.JobDefinition]:
    """The jobs that kill, activate, deactivate, restart and update a topology."""
    return [
        kill_topology,
        update_topology,
        _verb_job("activate", "Let the topology's spouts emit.", lifecycle.activate),
        _verb_job("deactivate", "Stop the topology's spouts; its workers stay.", lifecycle.deactivate),
        _verb_job(
            "restart",
            "Start the topology anew from its own code, under a new id, with the parallelism that it has now.",
            lambda ops, name: lifecycle.restart(ops, name),
        ),
    ]
