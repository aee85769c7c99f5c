"""Reports of the stages of a submission as Dagster metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from storm_dagster.core.pictures.placement import SlotTasks
from storm_dagster.defs.pictures.metadata import (
    assignment_metadata,
    blobs_table,
    components_table,
    nodes_table,
    notes,
    table,
    tasks_table,
    unassigned_table,
)
from storm_dagster.model import paths
from storm_dagster.model.masking import mask
from storm_dagster.model.placement import TopologyPlacement
from storm_dagster.model.records import Assignment
from storm_dagster.operations import results
from storm_dagster.operations.context import OperationsContext


def fields_of(report: results.TopologyResult, names: str) -> dict[str, Any]:
    """Those fields of a result that are shown as they are."""
    return {name: getattr(report, name) for name in names.split()}


def conf_metadata(report: results.ConfResult) -> dict[str, Any]:
    """Stage 1: id, token, epoch, the normalized conf, components, warnings."""
    components = list(report.topology.components())
    return {
        **fields_of(report, "topology_id token epoch"),
        "conf": dg.MetadataValue.json(mask(report.conf)),
        "components": components_table(report.topology),
        "warnings": notes(report.warnings),
        "warning_count": len(report.warnings),
        "component_count": len(components),
        "executors": sum(spec.parallelism for _, _, spec in components),
        "already_published": report.published,
        "replaces": report.replaces or "nothing",
    }


def code_metadata(report: results.CodeResult) -> dict[str, Any]:
    """Stage 2: the blobs with size and hash, and how many nimbuses hold each."""
    return {
        **fields_of(report, "topology_id degraded"),
        "blobs": blobs_table(report.blobs),
        "copies": table("key copies:int", list(report.copies.items())),
        "code_bytes": sum(blob.size for blob in report.blobs),
        "copies_min": min(report.copies.values(), default=0),
        "copies_wanted": report.wanted_copies,
    }


def tasks_metadata(report: results.TasksResult) -> dict[str, Any]:
    """Stage 3: which tasks belong to which component, and how they are grouped into executors."""
    return {
        **fields_of(report, "topology_id tasks workers"),
        "tasks_by_component": tasks_table(report.table),
        "executors_by_component": dg.MetadataValue.json(dict(report.executors)),
        "executors": sum(report.executors.values()),
    }


def placement_metadata(placement: TopologyPlacement, components: Mapping[int, str], title: str) -> dict[str, Any]:
    """A planner's outcome: slots, picture, what moved, what has no slot and why."""
    slots = [SlotTasks(w.node, w.host, w.port, w.tasks, w.kept) for w in placement.workers]
    return {
        **assignment_metadata(slots, components, title),
        "outcome": placement.status,
        "moved_tasks": placement.moved,
        "unassigned_tasks": len(placement.unassigned),
        "unassigned": unassigned_table(placement.unassigned, components),
        "warnings": notes(placement.warnings),
        "reasons": table(
            "task:int component why",
            [(task, components.get(task, "?"), why) for task, why in sorted(placement.reasons.items())],
        ),
    }


def planned_metadata(report: results.AssignmentResult, components: Mapping[int, str]) -> dict[str, Any]:
    """Stage 4: the placement, who computed it and how long it took."""
    return {
        **fields_of(report, "topology_id planner"),
        **placement_metadata(report.placement, components, f"{report.name}: tasks on slots"),
        "session_seconds": round(report.session_secs, 3),
        "assign_seconds": round(report.assign_secs, 3),
        "supervisors_offered": report.supervisors,
    }


def stored_metadata(assignment: Assignment, components: Mapping[int, str], name: str) -> dict[str, Any]:
    """An assignment as it stands in ZooKeeper."""
    slots = [SlotTasks(w.node, w.host, w.port, w.ids) for w in assignment.workers]
    return {
        **assignment_metadata(slots, components, f"{name}: tasks on slots"),
        "assignment_type": assignment.type,
        "assigned_at": dg.MetadataValue.timestamp(assignment.timestamp_ms / 1000),
    }


def in_force_metadata(
    report: results.RebalanceResult | results.ReassignResult, components: Mapping[int, str]
) -> dict[str, Any]:
    """The assignment that a change brought about, and the version of its node; empty without a change."""
    found = {} if report.assignment is None else stored_metadata(report.assignment, components, report.name)
    if report.version is not None:
        found["zookeeper"] = nodes_table({paths.assignment(report.topology_id): report.version})
    return found


def task_components(ops: OperationsContext, topology_id: str) -> dict[int, str]:
    """Task id -> component of a topology, by its tasks in ZooKeeper."""
    tasks = ops.cluster.read_tasks(topology_id)
    return tasks.component_of() if tasks is not None else {}


def published_metadata(report: results.PublishResult, components: Mapping[int, str]) -> dict[str, Any]:
    """Stage 5: paths and versions of what the one transaction wrote, and the tries that it took."""
    return {
        **fields_of(report, "topology_id status planner attempts replanned"),
        **stored_metadata(report.assignment, components, report.name),
        "zookeeper": nodes_table(report.versions),
        "nodes_written": 0 if report.already else len(report.versions),
        "already_published": report.already,
        "replaced": report.replaced or "nothing",
    }


def active_metadata(report: results.ActivateResult) -> dict[str, Any]:
    """Stage 6: the status that the topology has now."""
    return {**fields_of(report, "topology_id status changed"), "base_version": report.version}
