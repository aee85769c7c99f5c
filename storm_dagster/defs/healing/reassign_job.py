"""The reassignment job: dead tasks get a new slot."""

from dataclasses import replace
from typing import Any

import dagster as dg

from storm_dagster.core.liveness.causes import Cause, LivenessMemory
from storm_dagster.core.liveness.detection import observe
from storm_dagster.defs.binding import op_job
from storm_dagster.defs.forms import ReassignConfig
from storm_dagster.defs.keys import ASSIGNMENT, PUBLISHED_ASSIGNMENT
from storm_dagster.defs.metadata import (
    in_force_metadata,
    notes,
    placement_metadata,
    task_components,
)
from storm_dagster.defs.resources.handles import ZooKeeperResource
from storm_dagster.defs.resources.operating import Handles, operations
from storm_dagster.model.dagster_names import REASSIGN_JOB, DagsterNames
from storm_dagster.model.names import topology_name_of
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.healing import reassign
from storm_dagster.operations.results import ReassignResult


def _causes_now(ops: OperationsContext) -> list[Cause]:
    """Causes for a run launched by hand: every assigned slot without a live worker.

    The limits of time are not waited for, and causes that need an observation over time are left
    out.
    """
    no_wait = replace(ops.limits(), task_secs=0, launch_secs=0, supervisor_secs=float("inf"))
    liveness = observe(
        ops.cluster.load_view(),
        LivenessMemory(),
        no_wait,
        boot_id="by hand",
        boot_now=ops.monotonic(),
    )
    return [cause for cause in liveness.causes if cause.kind not in ("silent_master", "never_ran")]


def _metadata(report: ReassignResult) -> dict[str, Any]:
    """Metadata of one topology's reassignment, for both of its assets."""
    return {
        "topology_id": report.topology_id,
        "outcome": report.status,
        "causes": notes(report.causes),
        "cause_count": len(report.causes),
        "moved_tasks": report.moved,
        "assign_seconds": round(report.assign_secs, 3),
        "planner": report.planner or "none",
        "why_planner": report.why_planner or "PySpark was in reach",
        "error": report.error or "none",
    }


def _log_materializations(
    context: dg.OpExecutionContext,
    ops: OperationsContext,
    report: ReassignResult,
    zookeeper: ZooKeeperResource,
) -> None:
    """One materialization for each of the two assets, at the topology's partition."""
    components = task_components(ops, report.topology_id)
    planned = _metadata(report)
    if report.placement is not None:
        planned |= placement_metadata(report.placement, components)
    stored = {**_metadata(report), **in_force_metadata(report, components)}
    description = f"reassigned {report.moved} tasks of {report.topology_id}"
    for key, metadata in ((ASSIGNMENT, planned), (PUBLISHED_ASSIGNMENT, stored)):
        context.log_event(
            dg.AssetMaterialization(
                zookeeper.asset_key(key),
                description=description,
                metadata=metadata,
                partition=report.name,
            )
        )


def reassign_topologies(
    context: dg.OpExecutionContext, config: ReassignConfig, handles: Handles
) -> None:
    """Reassign the tasks of the config's causes, by default of all dead workers.

    The run fails if the reassignment of a topology failed, after the others were made.
    """
    with operations(context, handles) as ops:
        causes = [Cause.from_json(document) for document in config.causes]
        # Without causes an operator has launched the run: a pause is for automatic healing.
        is_by_hand = not causes
        if is_by_hand:
            causes = _causes_now(ops)
        for cause in causes:
            context.log.info(cause.describe())
        reports = reassign(ops, causes, despite_pause=is_by_hand)
        for report in reports:
            context.log.info(f"{report.topology_id}: {report.status}, {report.moved} tasks moved")
            if report.status == "assigned":
                _log_materializations(context, ops, report, handles.zookeeper)
    failed = [report for report in reports if report.status == "failed"]
    context.add_output_metadata(
        {
            "causes": len(causes),
            "moved_tasks": sum(report.moved for report in reports),
            "outcomes": notes(
                f"{topology_name_of(report.topology_id)}: {report.status}" for report in reports
            ),
        }
    )
    if failed:
        # The sensor retries with back-off while the cause persists.
        raise dg.Failure(
            description="; ".join(f"{report.name}: {report.error}" for report in failed),
            metadata={"error_type": "Unavailable", "message": failed[0].error or "no reason given"},
            allow_retries=False,
        )


def build_reassign_job(names: DagsterNames | None = None) -> dg.JobDefinition:
    """The job `reassign_topologies` of the cluster with these names."""
    return op_job(names or DagsterNames(), REASSIGN_JOB, reassign_topologies)
