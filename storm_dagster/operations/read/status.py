"""The documents of ``list --json`` and ``show --json``. Pure: from a view and the statistics of
workers.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from storm_dagster.model.ranges import decode_ranges
from storm_dagster.model.records import TaskError, WorkerNode, WorkerSlot
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext, topology_by_name

TaskStatus = Literal["starting", "running", "dead", "unassigned"]

STAT_NAMES = (
    "emitted",
    "transferred",
    "executed",
    "acked",
    "failed",
    "execute_ms",
    "process_ms",
    "complete_ms",
)
"""All-time statistics of a task; the last three are latencies in milliseconds."""

_COUNTS = STAT_NAMES[:5]


def _head(topology: TopologyView, now_secs: int) -> dict[str, Any]:
    base = topology.base
    uptime_secs = max(0, now_secs - base.launch_time_secs)
    return {"id": topology.id, "name": base.name, "status": base.status, "uptime_secs": uptime_secs}


def list_document(view: ClusterView, *, now_secs: int, launch_secs: float = 120) -> dict[str, Any]:
    """``list --json``: every topology in name order. Damaged ones (``view.corrupt``) are left out.

    ``not_running`` counts the tasks that have no slot, or whose worker is gone and is not being
    restarted.
    """
    topologies: list[dict[str, Any]] = [
        {
            **_head(topology, now_secs),
            "workers": len(topology.workers),
            "executors": sum(topology.base.executors.values()),
            "tasks": len(topology.tasks.component_of()) if topology.tasks else 0,
            "not_running": _not_running(view, topology, now_secs, launch_secs),
        }
        for topology in view.topologies.values()
    ]
    topologies.sort(key=lambda document: (document["name"], document["id"]))
    return {"topologies": topologies}


def _not_running(
    view: ClusterView, topology: TopologyView, now_secs: int, launch_secs: float
) -> int:
    if topology.tasks is None or topology.base.status == "KILLED":
        return 0
    slots = {task: worker for worker in topology.workers for task in worker.ids}
    wanted = topology.tasks.component_of()
    if (
        len(slots) == len(wanted)
        and {worker.slot for worker in slots.values()} <= topology.live_workers.keys()
    ):
        return len(topology.dead_tasks & wanted.keys())
    statuses = _Statuses(view, topology, now_secs, launch_secs)
    return sum(
        statuses.of(task, slots.get(task), None) in ("dead", "unassigned") for task in wanted
    )


def errors_of(ctx: OperationsContext, topology_id: str) -> list[tuple[str, TaskError]]:
    """The newest errors of a topology as (component, error), newest first."""
    by_component = ctx.cluster.errors_by_component(topology_id)
    found = [(component, error) for component, errors in by_component.items() for error in errors]
    return sorted(found, key=lambda pair: (-pair[1].time, pair[0], pair[1].task))


class _Statuses:
    """Statuses of tasks, by the cluster's records and the topology master; each record is decoded
    once.

    Without a worker's node a task is ``starting`` while its supervisor lives and restarts it or its
    launch time (seconds since it was placed) has not passed, else ``dead``. This is for display;
    healing uses its own clock.
    """

    def __init__(
        self, view: ClusterView, topology: TopologyView, now_secs: int, launch_secs: float
    ) -> None:
        self._topology = topology
        self._opened = {
            slot: frozenset(decode_ranges(n.tasks)) for slot, n in topology.live_workers.items()
        }
        starts = topology.assignment.start_secs() if topology.assignment else {}
        self._waiting: set[tuple[str, int]] = set()
        for worker in topology.workers:
            supervisor = view.supervisors.get(worker.node)
            if supervisor is None:
                continue
            placed = max((starts.get(task, 0) for task in worker.ids), default=0)
            if worker.port in supervisor.restarting or now_secs - placed <= launch_secs:
                self._waiting.add(worker.slot)
        self._dead = topology.dead_tasks

    def of(
        self, task: int, worker: WorkerSlot | None, entry: Mapping[str, Any] | None
    ) -> TaskStatus:
        """The status of one task; ``entry`` is the topology master's for it."""
        if worker is None:
            return "unassigned"
        live = self._topology.live_workers.get(worker.slot)
        if live is None:
            return "starting" if worker.slot in self._waiting else "dead"
        if task in self._dead:
            return "dead"
        if entry is not None and entry.get("status") in ("starting", "running"):
            return "running" if entry["status"] == "running" else "starting"
        opened = live.status != "starting" and task in self._opened[worker.slot]
        return "running" if opened else "starting"


def show_document(
    view: ClusterView,
    name: str,
    stats: Mapping[str, Any] | None = None,
    *,
    now_secs: int,
    errors: Iterable[tuple[str, TaskError]] = (),
    launch_secs: float = 120,
) -> dict[str, Any]:
    """``show NAME --json`` for a topology by name or id; :class:`NotAlive` for any other.

    ``stats`` is the topology master's answer ``{"tasks": {id: ...}, "workers": {"node:port":
    ...}}``, or ``None`` when it did not answer; counts are then 0. ``errors`` are (component,
    error). A worker's ``version`` is the hash of the code that it runs.
    """
    topology = topology_by_name(view, name)
    reported_tasks: Mapping[str, Any] = (stats or {}).get("tasks") or {}
    reported_workers: Mapping[str, Any] = (stats or {}).get("workers") or {}
    slots = {task: worker for worker in topology.workers for task in worker.ids}
    components = topology.tasks.component_of() if topology.tasks else {}
    statuses = _Statuses(view, topology, now_secs, launch_secs)
    tasks = [
        _task_document(task, component, slots.get(task), reported_tasks.get(str(task)), statuses)
        for task, component in sorted(components.items())
    ]
    return {
        **_head(topology, now_secs),
        "workers": [
            _worker_document(
                worker, topology.live_workers.get(worker.slot), reported_workers, now_secs
            )
            for worker in sorted(topology.workers, key=lambda worker: (worker.host, worker.slot))
        ],
        "tasks": tasks,
        "components": _components_document(topology, tasks, reported_tasks),
        "errors": [
            {
                "component": component,
                **error.model_dump(include={"task", "host", "port", "time", "error", "count"}),
            }
            for component, error in errors
        ],
    }


def _worker_document(
    worker: WorkerSlot, live: WorkerNode | None, reported: Mapping[str, Any], now_secs: int
) -> dict[str, Any]:
    entry = reported.get(f"{worker.node}:{worker.port}")
    uptime = max(0, now_secs - live.started_ms // 1000) if live is not None else 0
    if live is not None and entry is not None and isinstance(entry.get("uptime_secs"), int | float):
        uptime = int(entry["uptime_secs"])
    return {
        "node": worker.node,
        "host": worker.host,
        "port": worker.port,
        "pid": live.pid if live is not None else None,
        "tasks": list(worker.ids),
        "uptime_secs": uptime,
        "version": live.code if live is not None else None,
    }


def _task_document(
    task: int,
    component: str,
    worker: WorkerSlot | None,
    entry: Mapping[str, Any] | None,
    statuses: _Statuses,
) -> dict[str, Any]:
    status = statuses.of(task, worker, entry)
    reported: Mapping[str, Any] = entry or {}
    given: Mapping[str, Any] = reported.get("stats") or {}
    return {
        "id": task,
        "component": component,
        **{part: getattr(worker, part, None) for part in ("node", "host", "port")},
        "status": status,
        "uptime_secs": int(reported.get("uptime_secs") or 0)
        if status in ("starting", "running")
        else 0,
        "stats": {name: given.get(name) or 0 for name in STAT_NAMES},
    }


def _components_document(
    topology: TopologyView, tasks: list[dict[str, Any]], entry: Mapping[str, Any]
) -> dict[str, Any]:
    """Component -> type, executors, task ids, statistics, and the newest user metrics by task.

    Of the statistics counts are summed and latencies weighted by counts.
    """
    documents: dict[str, Any] = {}
    rows = {task["id"]: task["stats"] for task in tasks}
    for component_id, part in (topology.tasks.components if topology.tasks else {}).items():
        ids = part.ids
        mine = [rows[task] for task in ids]
        stats: dict[str, float] = {name: sum(each[name] for each in mine) for name in _COUNTS}
        for name, weight in (
            ("execute_ms", "executed"),
            ("process_ms", "executed"),
            ("complete_ms", "acked"),
        ):
            total = sum(each[weight] for each in mine)
            stats[name] = (
                round(sum(each[name] * each[weight] for each in mine) / total, 3) if total else 0
            )
        documents[component_id] = {
            "type": part.type,
            "executors": topology.base.executors.get(component_id, len(ids)),
            "tasks": list(ids),
            "stats": stats,
            "metrics": {
                str(task): dict(reported)
                for task in ids
                if (reported := (entry.get(str(task)) or {}).get("metrics"))
            },
        }
    return documents
