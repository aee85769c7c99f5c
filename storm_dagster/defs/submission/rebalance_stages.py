"""The two stages of `rebalance_topology`: the plan, shown by `storm/assignment`, and the change itself."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import dagster as dg

from storm_dagster.defs.forms import RebalanceConfig
from storm_dagster.defs.pictures.metadata import table
from storm_dagster.defs.submission.metadata import in_force_metadata, placement_metadata, task_components
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.read.explaining import moves_document
from storm_dagster.operations.results import RebalanceResult


def _summary(report: RebalanceResult) -> dict[str, Any]:
    return {
        "topology_id": report.topology_id,
        "status": report.status,
        "outcome": report.outcome,
        "workers_wanted": report.workers,
        "executors_wanted": dg.MetadataValue.json(dict(report.executors)),
        "moved_tasks": report.moved,
        "assign_seconds": round(report.assign_secs, 3),
        "tasks_added": encode_ranges(report.tasks_added) or "none",
        "tasks_removed": encode_ranges(report.tasks_removed) or "none",
        "planner": report.planner or "none",
        "delay_secs": report.delay_secs,
    }


def plan_rebalance(ops: OperationsContext, name: str, config: RebalanceConfig) -> dict[str, Any]:
    """Metadata of what the rebalance would do; nothing changes. What does not fit is refused here."""
    report = rebalance(ops, name, **config.model_dump(), dry_run=True)
    metadata = _summary(report)
    if report.placement is not None:
        components = task_components(ops, report.topology_id)
        metadata = {**placement_metadata(report.placement, components, f"{name}: planned"), **metadata}
        moves = moves_document(report.assignment, report.placement, report.components)
        row = itemgetter("task", "component", "from", "to", "why")
        metadata["moves"] = table("task:int component from to why", [row(move) for move in moves])
    return metadata


def publish_rebalance(
    context: dg.AssetExecutionContext, ops: OperationsContext, name: str, names: DagsterNames
) -> dict[str, Any]:
    """Rebalance as the run's config asks, wait for the end of its delay, and show the assignment now in force."""
    config = _config_of(context.run.run_config, names.stage_op("assignment"))
    report = rebalance(ops, name, **config.model_dump())
    return {**_summary(report), **in_force_metadata(report, task_components(ops, report.topology_id))}


def _config_of(run_config: Mapping[str, Any], op: str) -> RebalanceConfig:
    """The form of the run, which stands on the first of the two assets."""
    ops = run_config.get("ops") or {}
    return RebalanceConfig(**((ops.get(op) or {}).get("config") or {}))
