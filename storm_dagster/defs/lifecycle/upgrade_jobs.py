"""Gray upgrade, its completion and its rollback, as jobs: progress by worker, and an observation at the topology."""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import time
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from storm_dagster.core.gray_upgrade import Selection, parse_workers
from storm_dagster.defs.binding import op_job
from storm_dagster.defs.failures import step_errors
from storm_dagster.defs.forms import GrayUpgradeConfig, NameConfig, RollbackConfig
from storm_dagster.defs.keys import ACTIVE_TOPOLOGY
from storm_dagster.defs.lifecycle.change_observation import observe_change
from storm_dagster.defs.resources.nimbus import NimbusResource, upload_of
from storm_dagster.defs.resources.operating import Handles, operations
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.upgrade.facts import UpgradeReport
from storm_dagster.operations.upgrade.progress import Progress, await_batch, await_rollback

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
    """Metadata of the upgrade."""
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
    context: dg.OpExecutionContext, handles: Handles, verb: str, name: str, found: Mapping[str, Any]
) -> None:
    observe_change(context, handles, verb, name, f"{found['outcome']}, {found['status']}", found)


def _notifier(
    context: dg.OpExecutionContext, handles: Handles, report: UpgradeReport, verb: str
) -> Callable[[str, str], None]:
    """Shows each worker's change in the run and at the topology's asset while it happens."""

    def notify(worker: str, state: str) -> None:
        context.log.info(f"{worker}: {state}")
        context.log_event(
            dg.AssetObservation(
                asset_key=handles.zookeeper.asset_key(ACTIVE_TOPOLOGY),
                partition=report.name,
                description=f"{verb}: {worker} {state}",
                metadata={"verb": verb, "worker": worker, "code": state, "topology_id": report.topology_id},
            )
        )

    return notify


def gray_upgrade_topology(
    context: dg.OpExecutionContext, config: GrayUpgradeConfig, handles: Handles, nimbus: NimbusResource
) -> None:
    """Upload if need be, ask for the batch, and watch it."""
    began = time.monotonic()
    with step_errors():
        selection = Selection(parse_workers(config.workers), config.component or None, config.number)
        handle = upload_of(context.log, nimbus, config.handle, config.target, config.conf)
    with operations(context, handles) as ops:
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
            ops, report, wait_secs=config.wait_secs, tell=_notifier(context, handles, report, "gray-upgrade")
        )
    _observe(context, handles, "gray-upgrade", report.name, progress_metadata(report, progress, began))


def complete_upgrade_topology(context: dg.OpExecutionContext, config: NameConfig, handles: Handles) -> None:
    """End the upgrade where it stands."""
    began = time.monotonic()
    with operations(context, handles) as ops:
        report = lifecycle.complete_upgrade(ops, config.name)
    metadata = {
        "topology_id": report.topology_id,
        "status": report.status,
        "outcome": report.outcome,
        "code": report.assignment.code_dir if report.assignment is not None else "",
        "seconds": round(time.monotonic() - began, 3),
    }
    _observe(context, handles, "complete-upgrade", report.name, metadata)


def rollback_topology(context: dg.OpExecutionContext, config: RollbackConfig, handles: Handles) -> None:
    """Roll back, and watch the workers return."""
    began = time.monotonic()
    with operations(context, handles) as ops:
        report = lifecycle.roll_back(ops, config.name)
        progress = await_rollback(
            ops, report, wait_secs=config.wait_secs, tell=_notifier(context, handles, report, "rollback")
        )
    _observe(context, handles, "rollback", report.name, progress_metadata(report, progress, began))


_JOBS = {
    "gray_upgrade_topology": (_GRAY, gray_upgrade_topology),
    "complete_upgrade_topology": (_COMPLETE, complete_upgrade_topology),
    "rollback_topology": (_ROLL_BACK, rollback_topology),
}


def build_upgrade_jobs(names: DagsterNames) -> list[dg.JobDefinition]:
    """The three jobs."""
    return [op_job(names, name, description, function) for name, (description, function) in _JOBS.items()]
