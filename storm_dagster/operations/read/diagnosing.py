"""Measurements for :func:`~storm_dagster.core.diagnosis.diagnose`, from a view and the topology master's statistics."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from storm_dagster.core.diagnosis import (
    ComponentMeasure,
    Finding,
    TaskMeasure,
    TopologyMeasure,
    WorkerMeasure,
    diagnose,
    newest_errors,
)
from storm_dagster.model.names import ACKER, TOPOLOGY_MASTER
from storm_dagster.model.records import TaskError, TaskTable
from storm_dagster.model.view import TopologyView

_STARTING_SECS = 30
"""A topology younger than this has no findings: its figures have only begun."""
_ERRORS_SECS = 600


def findings_of(
    topology: TopologyView,
    stats: Mapping[str, Any] | None,
    *,
    now_secs: int,
    errors: Collection[tuple[str, TaskError]] = (),
) -> list[Finding]:
    """What :func:`diagnose` finds in a running topology; nothing in one that is not active, or is just starting."""
    if topology.base.status != "ACTIVE" or now_secs - topology.base.launch_time_secs < _STARTING_SECS:
        return []
    if stats is not None and "components" not in stats:
        return []  # Of a worker of the release before, which measures no rates.
    recent = [(component, error.error) for component, error in errors if now_secs - error.time < _ERRORS_SECS]
    return diagnose(measure_topology(topology, stats, newest_errors(recent)))


def measure_topology(
    topology: TopologyView, stats: Mapping[str, Any] | None, errors: Mapping[str, str] | None = None
) -> TopologyMeasure:
    """The measurements; ``stats`` is the topology master's answer (``None``: it gave none)."""
    table = topology.tasks or TaskTable(components={})
    assigned = topology.assignment.workers if topology.assignment else ()
    slots = {task: WorkerMeasure(worker.host, worker.port) for worker in assigned for task in worker.ids}
    masters = table.components[TOPOLOGY_MASTER].ids if TOPOLOGY_MASTER in table.components else ()
    given: Mapping[str, Any] = stats or {}
    return TopologyMeasure(
        name=topology.base.name,
        answered=stats is not None,
        master=next((slots[task] for task in masters if task in slots), None),
        ackers=len(table.components[ACKER].ids) if ACKER in table.components else 0,
        timeout_secs=given.get("timeout_secs", 30.0),
        report_secs=given.get("report_secs", 3.0),
        components={
            name: _component(name, topology, table, given, slots) for name in table.components if name[:2] != "__"
        },
        workers=tuple(
            WorkerMeasure(one["host"], int(key.rpartition(":")[2]), one.get("silent_secs", 0.0), one.get("restarts", 0))
            for key, one in sorted(given.get("workers", {}).items())
        ),
        errors=errors or {},
    )


def _component(
    name: str, topology: TopologyView, table: TaskTable, stats: Mapping[str, Any], slots: Mapping[int, WorkerMeasure]
) -> ComponentMeasure:
    part = table.components[name]
    flow: Mapping[str, Any] = stats.get("components", {}).get(name, {})
    tasks: Mapping[str, Any] = stats.get("tasks", {})
    return ComponentMeasure(
        id=name,
        kind=part.type,
        executors=topology.base.executors.get(name, len(part.ids)),
        sources=frozenset(key.rpartition(":")[0] for key in stats.get("edges", {}).get(name, {})),
        **{
            key: flow[key] for key in ("acked", "failed", "p99_ms", "waiting", "held", "lag", "lag_rate") if key in flow
        },
        tasks=tuple(
            TaskMeasure(task, f"{slots[task].host}:{slots[task].port}", one["rate"], one["busy"])
            for task in part.ids
            if task in slots and "busy" in (one := tasks.get(str(task), {}))
        ),
    )
