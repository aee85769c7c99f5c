"""The documents of ``list --json`` and ``show --json``.

Pure functions of a view, and of a snapshot.
"""

from typing import Any

from storm_dagster.core.snapshot.statuses import LAUNCH_SECS, not_running
from storm_dagster.core.snapshot.stream_metrics import stream_metrics
from storm_dagster.core.snapshot.tasks import TaskSnapshot
from storm_dagster.core.snapshot.topology import ComponentSnapshot, TopologySnapshot
from storm_dagster.core.snapshot.windows import Totals, WindowStats, latency_document
from storm_dagster.core.snapshot.workers import WorkerSnapshot
from storm_dagster.model.records import TaskError
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext

_COUNTS = ("emitted", "transferred", "executed", "acked", "failed")
"""All-time numbers of tuples of a task."""
STAT_NAMES = (*_COUNTS, "execute_ms", "process_ms", "complete_ms")
"""All-time statistics of a task; the last three are latencies in milliseconds."""


def list_document(
    view: ClusterView, *, now_secs: int, launch_secs: float = LAUNCH_SECS
) -> dict[str, Any]:
    """``list --json``: every topology in name order.

    Damaged topologies (``view.corrupt``) are left out. ``not_running`` counts the tasks that have
    no slot, or whose worker is dead and is not being restarted.
    """
    rows = [
        _list_row(view, topology, now_secs, launch_secs) for topology in view.topologies.values()
    ]
    return {"topologies": sorted(rows, key=lambda row: (row["name"], row["id"]))}


def _list_row(
    view: ClusterView, topology: TopologyView, now_secs: int, launch_secs: float
) -> dict[str, Any]:
    base = topology.base
    return {
        "id": topology.id,
        "name": base.name,
        "status": base.status,
        "uptime_secs": max(0, now_secs - base.launch_time_secs),
        "workers": len(topology.workers),
        "executors": sum(base.executors.values()),
        "tasks": len(topology.tasks.component_of()) if topology.tasks else 0,
        "not_running": not_running(view, topology, now_secs, launch_secs),
    }


def errors_of(ctx: OperationsContext, topology_id: str) -> list[tuple[str, TaskError]]:
    """The newest errors of a topology as (component, error), newest first."""
    by_component = ctx.cluster.errors_by_component(topology_id)
    errors: list[tuple[str, TaskError]] = []
    for component, rows in by_component.items():
        errors += [(component, error) for error in rows]

    def newest_first(entry: tuple[str, TaskError]) -> tuple[int, str, int]:
        component, error = entry
        return (-error.time, component, error.task)

    return sorted(errors, key=newest_first)


def show_document(topology: TopologySnapshot) -> dict[str, Any]:
    """``show NAME --json``; without a response of the topology master counts are 0.

    A worker's ``version`` is the hash of the code that it runs. Of a component, ``stats`` are
    all-time values; ``waiting``, ``capacity`` and ``lag`` are current values, latencies those of
    the last ten minutes.
    """
    workers = sorted(topology.workers, key=lambda worker: (worker.host, worker.node, worker.port))
    failed = topology.failed_upgrade
    return {
        "id": topology.id,
        "name": topology.name,
        "status": topology.status,
        "uptime_secs": topology.uptime_secs,
        "workers": [_worker_document(worker) for worker in workers],
        "tasks": [_task_document(task) for task in topology.tasks.values()],
        "components": {
            name: _component_document(part) for name, part in topology.components.items()
        },
        "errors": [_error_document(component, error) for component, error in topology.errors],
        "back_pressure": topology.back_pressure,
        "history": [change.model_dump(exclude={"v"}) for change in topology.changes],
        "failed_upgrade": None if failed is None else failed.to_document(),
    }


def _worker_document(worker: WorkerSnapshot) -> dict[str, Any]:
    return {
        "node": worker.node,
        "host": worker.host,
        "port": worker.port,
        "pid": worker.pid,
        "tasks": list(worker.tasks),
        "uptime_secs": worker.uptime_secs,
        "version": worker.code,
    }


def _task_document(task: TaskSnapshot) -> dict[str, Any]:
    """A task of ``show``; its slot is ``null`` without a worker."""
    worker = task.worker
    is_alive = task.status in ("starting", "running")
    return {
        "id": task.id,
        "component": task.component,
        "node": worker.node if worker is not None else None,
        "host": worker.host if worker is not None else None,
        "port": worker.port if worker is not None else None,
        "status": task.status,
        "uptime_secs": task.uptime_secs if is_alive else 0,
        "stats": {
            **_counts(task.totals),
            "execute_ms": task.totals.execute_ms or 0,
            # A tuple is processed when its call returns.
            "process_ms": task.totals.execute_ms or 0,
            "complete_ms": task.totals.complete_ms or 0,
        },
    }


def _counts(totals: Totals) -> dict[str, int]:
    """The numbers of tuples of :data:`STAT_NAMES`, without the latencies."""
    return {name: getattr(totals, name) for name in _COUNTS}


def _component_document(part: ComponentSnapshot) -> dict[str, Any]:
    """A component of ``show``; latencies are 0 before the first tuple."""
    totals = part.totals
    execute_ms = round(totals.execute_ms, 3) if totals.executed else 0
    return {
        "type": part.kind,
        "executors": part.parallelism,
        "tasks": [task.id for task in part.tasks],
        "stats": {
            **_counts(totals),
            "execute_ms": execute_ms,
            "process_ms": execute_ms,
            "complete_ms": round(totals.complete_ms, 3) if totals.acked else 0,
        },
        "metrics": {str(task.id): dict(task.metrics) for task in part.tasks if task.metrics},
        **load_document(part),
    }


def load_document(part: ComponentSnapshot) -> dict[str, Any]:
    """Load of a component.

    Queue, capacity and lag are current values, latencies those of the last ten minutes, metrics of
    the output streams all-time values.
    """
    return {
        "waiting": part.waiting,
        "capacity": round(part.capacity, 3),
        "lag": part.lag,
        "lag_by_partition": dict(part.lag_by_partition),
        "latency": latency_document(part.recent.percentiles()),
        "stream_latency": _stream_latencies(part.recent),
        "streams": stream_metrics(part),
    }


def _stream_latencies(stats: WindowStats) -> dict[str, Any]:
    """Stream -> its latencies; streams without any are left out."""
    streams: set[str] = set()
    for latency_by_stream in stats.latencies.values():
        streams.update(latency_by_stream)
    documents: dict[str, Any] = {}
    for stream in sorted(streams):
        document = latency_document(stats.stream_percentiles(stream))
        if document:
            documents[stream] = document
    return documents


def _error_document(component: str, error: TaskError) -> dict[str, Any]:
    return {
        "component": component,
        **error.model_dump(include={"task", "host", "port", "time", "error", "count"}),
    }
