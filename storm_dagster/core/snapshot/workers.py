"""Workers of a snapshot: the slots of one topology, and the processes in them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storm_dagster.core.submission.tasks import executors_of
from storm_dagster.model.records import TaskTable
from storm_dagster.model.view import TopologyView


@dataclass(frozen=True)
class WorkerSnapshot:
    """One worker: a slot that holds tasks of the topology."""

    topology_id: str
    topology_name: str
    node: str
    host: str
    port: int
    pid: int | None
    """``None`` while no process lives in the slot."""
    uptime_secs: int
    executors: int
    tasks_by_component: Mapping[str, int]
    memory_mb: float
    """Given to it by the assignment, in MiB."""
    cpu: float
    """Given to it by the assignment, in percent points of one core."""
    tasks: tuple[int, ...] = ()
    code: str | None = None
    """Hash of the code that its process runs; ``None`` without a process."""
    state: str = "dead"
    """``starting``, ``running``, ``paused``; ``dead`` without a process."""
    reported: bool = False
    """True if the topology master knows of its process; else what follows is not known."""
    silent_secs: float | None = None
    """Since its last report to the topology master."""
    restarts: int | None = None
    """In the last ten minutes."""
    cpu_used: float | None = None
    """Cores, over the last ten seconds."""
    memory_used_mb: float | None = None
    holds_spouts: bool = False
    """True while its full queues make spouts wait."""

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"{self.host}:{self.port}"


def workers_of(
    topology: TopologyView, report: Mapping[str, Any] | None = None, *, now_secs: int
) -> list[WorkerSnapshot]:
    """The workers of a topology in order of host and port."""
    table = topology.tasks or TaskTable(components={})
    component_of = table.component_of()
    first_tasks = {
        group[0]
        for groups in executors_of(table, topology.base.executors).values()
        for group in groups
    }
    reports: Mapping[str, Any] = (report or {}).get("workers") or {}
    workers: list[WorkerSnapshot] = []
    for worker in sorted(topology.workers, key=lambda slot: (slot.host, slot.port, slot.node)):
        entry = reports.get(worker.slot.key)
        live = topology.live_workers.get(worker.slot)
        workers.append(
            WorkerSnapshot(
                topology_id=topology.id,
                topology_name=topology.base.name,
                node=worker.node,
                host=worker.host,
                port=worker.port,
                pid=live.pid if live is not None else None,
                uptime_secs=_uptime_secs(live.started_ms, entry, now_secs) if live else 0,
                executors=sum(1 for task in worker.ids if task in first_tasks),
                tasks_by_component=Counter(component_of.get(task, "?") for task in worker.ids),
                memory_mb=worker.memory_bytes / 2**20,
                cpu=float(worker.cpu),
                tasks=worker.ids,
                code=live.code if live is not None else None,
                state=live.status if live is not None else "dead",
                **_measured(entry),
            )
        )
    return workers


def _uptime_secs(started_ms: int, entry: Mapping[str, Any] | None, now_secs: int) -> int:
    """By the worker's own clock if it has reported, else by this one."""
    reported = entry.get("uptime_secs") if entry is not None else None
    if isinstance(reported, int | float):
        return int(reported)
    return max(0, now_secs - started_ms // 1000)


def _measured(entry: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of a worker that only the topology master knows."""
    if entry is None:
        return {}
    system: Mapping[str, Any] = entry.get("system") or {}
    memory_bytes = system.get("memory_bytes")
    return {
        "reported": True,
        "silent_secs": entry.get("silent_secs"),
        "restarts": entry.get("restarts"),
        "cpu_used": entry.get("cpu"),
        "memory_used_mb": memory_bytes / 2**20 if memory_bytes else None,
        "holds_spouts": bool(system.get("back_pressure")),
    }
