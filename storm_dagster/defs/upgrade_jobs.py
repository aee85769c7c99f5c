"""Gray upgrade, its completion and its rollback, as jobs: progress by worker, and an observation at the topology."""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import time
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from storm_dagster.core.gray_upgrade import Selection, parse_workers
from storm_dagster.defs.change_observation import observe_change
from storm_dagster.defs.failures import step_errors
from storm_dagster.defs.forms import GrayUpgradeConfig, NameConfig, RollbackConfig
from storm_dagster.defs.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.keys import ACTIVE_TOPOLOGY
from storm_dagster.defs.nimbus_resource import NimbusResource, upload_of
from storm_dagster.defs.operating import Handles, operations
from storm_dagster.defs.spark_resource import SparkResource
from storm_dagster.operations import lifecycle
from storm_dagster.operations.upgrade_facts import UpgradeReport
from storm_dagster.operations.upgrade_progress import Progress, await_batch, await_rollback

__all__ = ["build_upgrade_jobs"]

_GRAY = (
    "Run new code on some workers of a topology first, beside the old. With `target` an upgrade begins; without, the "
    "one under way goes on with another batch."
)
_COMPLETE = "End the upgrade: its code is the topology's. Workers not upgraded get it at their next start."
_ROLL_BACK = "Take every upgraded worker back to the former code."


def workers_table(workers: Mapping[str, str]) -> dg.MetadataValue:
    """Each worker and its state."""
    return dg.MetadataValue.table(
        records=[dg.TableRecord({"worker": name, "code": state}) for name, state in sorted(workers.items())],
        schema=dg.TableSchema(columns=[dg.TableColumn("worker"), dg.TableColumn("code")]),
    )


def progress_metadata(report: UpgradeReport, progress: Progress, began: float) -> dict[str, Any]:
    """What the upgrade has come to."""
    metadata: dict[str, Any] = {
        "topology_id": report.topology_id,
        "status": progress.status,
        "outcome": progress.outcome,
        "upgraded": progress.count("upgraded"),
        "upgrading": progress.count("upgrading"),
        "former": progress.count("former"),
        "workers": workers_table(progress.workers),
        "seconds": round(time.monotonic() - began, 3),
    }
    if report.state is not None and report.state.record is not None:
        metadata["code"] = report.state.record.code_dir
    if progress.reason:
        metadata["reason"] = progress.reason
    return metadata


def _observe(
    context: dg.OpExecutionContext,
    verb: str,
    report: UpgradeReport,
    metadata: dict[str, Any],
    shown: dg.AssetKey,
) -> None:
    outcome = f"{metadata['outcome']}, {metadata['status']}"
    observe_change(context, verb, report.name, outcome, metadata, shown)


def _teller(
    context: dg.OpExecutionContext, report: UpgradeReport, verb: str, shown: dg.AssetKey
) -> Callable[[str, str], None]:
    """Shows each worker's change in the run and at the topology's asset while it happens."""

    def tell(worker: str, state: str) -> None:
        context.log.info(f"{worker}: {state}")
        context.log_event(
            dg.AssetObservation(
                asset_key=shown,
                partition=report.name,
                description=f"{verb}: {worker} {state}",
                metadata={"verb": verb, "worker": worker, "code": state, "topology_id": report.topology_id},
            )
        )

    return tell


@dg.op(name="gray_upgrade_topology_op", description=_GRAY, out=dg.Out(dg.Nothing))
def gray_upgrade_topology_op(
    context: dg.OpExecutionContext,
    config: GrayUpgradeConfig,
    zookeeper: ZooKeeperResource,
    blobstore: BlobStoreResource,
    spark: SparkResource,
    nimbus: NimbusResource,
) -> None:
    """Upload if need be, ask for the batch, and watch it."""
    began = time.monotonic()
    with step_errors():
        selection = Selection(parse_workers(config.workers), config.component or None, config.number)
        handle = upload_of(context.log, nimbus, config.handle, config.target, config.conf)
    with operations(context, Handles(zookeeper, blobstore, spark)) as ops:
        report = lifecycle.gray_upgrade(
            ops,
            config.name,
            selection,
            handle=handle,
            token=config.token or context.run.run_id,
            allow_degraded=config.allow_degraded,
        )
        context.log.info(f"the upgrade of {report.topology_id} is {report.outcome}")
        progress = await_batch(
            ops,
            report,
            wait_secs=config.wait_secs,
            tell=_teller(context, report, "gray-upgrade", zookeeper.asset_key(ACTIVE_TOPOLOGY)),
        )
    _observe(
        context,
        "gray-upgrade",
        report,
        progress_metadata(report, progress, began),
        zookeeper.asset_key(ACTIVE_TOPOLOGY),
    )


@dg.op(name="complete_upgrade_topology_op", description=_COMPLETE, out=dg.Out(dg.Nothing))
def complete_upgrade_topology_op(
    context: dg.OpExecutionContext,
    config: NameConfig,
    zookeeper: ZooKeeperResource,
    blobstore: BlobStoreResource,
    spark: SparkResource,
) -> None:
    """End the upgrade where it stands."""
    began = time.monotonic()
    with operations(context, Handles(zookeeper, blobstore, spark)) as ops:
        report = lifecycle.complete_upgrade(ops, config.name)
    metadata = {
        "topology_id": report.topology_id,
        "status": report.status,
        "outcome": report.outcome,
        "code": report.assignment.code_dir if report.assignment is not None else "",
        "seconds": round(time.monotonic() - began, 3),
    }
    _observe(context, "complete-upgrade", report, metadata, zookeeper.asset_key(ACTIVE_TOPOLOGY))


@dg.op(name="rollback_topology_op", description=_ROLL_BACK, out=dg.Out(dg.Nothing))
def rollback_topology_op(
    context: dg.OpExecutionContext,
    config: RollbackConfig,
    zookeeper: ZooKeeperResource,
    blobstore: BlobStoreResource,
    spark: SparkResource,
) -> None:
    """Roll back, and watch the workers return."""
    began = time.monotonic()
    with operations(context, Handles(zookeeper, blobstore, spark)) as ops:
        report = lifecycle.roll_back(ops, config.name)
        progress = await_rollback(
            ops,
            report,
            wait_secs=config.wait_secs,
            tell=_teller(context, report, "rollback", zookeeper.asset_key(ACTIVE_TOPOLOGY)),
        )
    _observe(
        context,
        "rollback",
        report,
        progress_metadata(report, progress, began),
        zookeeper.asset_key(ACTIVE_TOPOLOGY),
    )


@dg.job(name="gray_upgrade_topology", description=_GRAY, executor_def=dg.in_process_executor)
def gray_upgrade_topology() -> None:
    """The job of one op."""
    gray_upgrade_topology_op()


@dg.job(name="complete_upgrade_topology", description=_COMPLETE, executor_def=dg.in_process_executor)
def complete_upgrade_topology() -> None:
    """The job of one op."""
    complete_upgrade_topology_op()


@dg.job(name="rollback_topology", description=_ROLL_BACK, executor_def=dg.in_process_executor)
def rollback_topology() -> None:
    """The job of one op."""
    rollback_topology_op()


def build_upgrade_jobs() -> list[dg.JobDefinition]:
    """The three jobs."""
    return [gray_upgrade_topology, complete_upgrade_topology, rollback_topology]
