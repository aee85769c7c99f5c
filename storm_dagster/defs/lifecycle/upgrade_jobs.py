"""Gray upgrade, its completion and its rollback, as jobs: progress by worker, and an observation at the topology."""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import time
from collections import Counter
from typing import Any

import dagster as dg

from storm_dagster.core.upgrade.selection import Selection, parse_workers
from storm_dagster.defs.binding import op_job
from storm_dagster.defs.failures import step_errors
from storm_dagster.defs.forms import GrayUpgradeConfig, NameConfig, RollbackConfig
from storm_dagster.defs.keys import ACTIVE_TOPOLOGY
from storm_dagster.defs.lifecycle.jobs import observe_change
from storm_dagster.defs.pictures.metadata import table
from storm_dagster.defs.resources.nimbus import NimbusResource, upload_of
from storm_dagster.defs.resources.operating import Handles, operations
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.upgrade import UpgradeResult, await_upgrade


def _watch(
    context: dg.OpExecutionContext,
    handles: Handles,
    ops: OperationsContext,
    request: UpgradeResult,
    wait_secs: float,
    verb: str,
) -> UpgradeResult:
    """Wait for the workers, and show each one's change in the run and at the topology's asset."""

    def on_worker(worker: str, state: str) -> None:
        context.log.info(f"{worker}: {state}")
        context.log_event(
            dg.AssetObservation(
                asset_key=handles.zookeeper.asset_key(ACTIVE_TOPOLOGY),
                partition=request.name,
                description=f"{verb}: {worker} {state}",
                metadata={"verb": verb, "worker": worker, "code": state, "topology_id": request.topology_id},
            )
        )

    return await_upgrade(ops, request, wait_secs=wait_secs, on_worker=on_worker, back=verb == "rollback")


def _observe(context: dg.OpExecutionContext, handles: Handles, verb: str, result: UpgradeResult, began: float) -> None:
    """Record the outcome; after a wait with the state of each worker."""
    metadata: dict[str, Any] = {
        "topology_id": result.topology_id,
        "status": result.status,
        "outcome": result.outcome,
        "seconds": round(time.monotonic() - began, 3),
    }
    if verb == "complete-upgrade":
        metadata["code"] = result.assignment.code_dir if result.assignment is not None else ""
    else:
        phases = sorted(result.workers.items())
        count = Counter(result.workers.values())
        metadata |= {phase: count[phase] for phase in ("upgraded", "upgrading", "former")}
        metadata["workers"] = table("worker code", phases)
        if result.state is not None and result.state.record is not None:
            metadata["code"] = result.state.record.code_dir
        if result.reason:
            metadata["reason"] = result.reason
    observe_change(context, handles, verb, result.name, f"{result.outcome}, {result.status}", metadata)


def gray_upgrade_topology(
    context: dg.OpExecutionContext, config: GrayUpgradeConfig, handles: Handles, nimbus: NimbusResource
) -> None:
    """Upload if need be, ask for the batch, and watch it."""
    began = time.monotonic()
    with step_errors():
        selection = Selection(parse_workers(config.workers), config.component or None, config.number)
        handle = upload_of(context.log, nimbus, config.handle, config.target, config.conf, config.allow_degraded)
    with operations(context, handles) as ops:
        request = lifecycle.gray_upgrade(
            ops,
            config.name,
            selection,
            handle=handle,
            token=config.token or context.run.run_id,
            allow_degraded=config.allow_degraded,
        )
        context.log.info(f"the upgrade of {request.topology_id} is {request.outcome}")
        result = _watch(context, handles, ops, request, config.wait_secs, "gray-upgrade")
    _observe(context, handles, "gray-upgrade", result, began)


def complete_upgrade_topology(context: dg.OpExecutionContext, config: NameConfig, handles: Handles) -> None:
    """End the upgrade where it stands."""
    began = time.monotonic()
    with operations(context, handles) as ops:
        result = lifecycle.complete_upgrade(ops, config.name)
    _observe(context, handles, "complete-upgrade", result, began)


def rollback_topology(context: dg.OpExecutionContext, config: RollbackConfig, handles: Handles) -> None:
    """Roll back, and watch the workers return."""
    began = time.monotonic()
    with operations(context, handles) as ops:
        request = lifecycle.roll_back(ops, config.name)
        result = _watch(context, handles, ops, request, config.wait_secs, "rollback")
    _observe(context, handles, "rollback", result, began)


_JOBS = {
    gray_upgrade_topology: "Run new code on some workers of a topology first, beside the old. With `target` an upgrade "
    "begins; without, the one under way goes on with another batch.",
    complete_upgrade_topology: "End the upgrade: its code is the topology's. Workers not upgraded get it at their next "
    "start.",
    rollback_topology: "Take every upgraded worker back to the former code.",
}


def build_upgrade_jobs(names: DagsterNames) -> list[dg.JobDefinition]:
    """The three jobs."""
    return [op_job(names, function.__name__, description, function) for function, description in _JOBS.items()]
