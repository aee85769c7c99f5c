"""Workers of a snapshot: slots of a topology, and processes in them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storm_dagster.core.submission.tasks import executors_of
from storm_dagster.model.records import TaskTable, WorkerNode, WorkerSlot
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import TopologyView


@dataclass(frozen=True)
class WorkerSnapshot:
    """Worker of a topology: a slot that holds tasks of it."""

    topology_id: str
    topology_name: str
    node: str
    host: str
    port: int
    pid: int | None
    """``None`` while no process lives in the slot."""
    uptime_secs: int
    executors: int
    components: Mapping[int, str]
    """Task -> component, of the tasks of the slot, ascending."""
    memory_mb: float
    """Assigned to it, in MiB."""
    cpu: float
    """Assigned to it, in percent points of one core."""
    placed_secs: int = 0
    """Epoch seconds at which the newest of its tasks was placed here."""
    started_secs: float | None = None
    """Epoch seconds at which its process started, by the clock of its host.

    ``None`` without a process.
    """
    code: str | None = None
    """Hash of the code that its process runs; ``None`` without a process."""
    state: str = "dead"
    """``starting``, ``running``, ``paused``; ``dead`` without a process."""
    reported: bool = False
    """True if the topology master has a report of its process.

    The fields below are of that report.
    """
    silent_secs: float | None = None
    """Time since its last report to the topology master."""
    restarts: int | None = None
    """Number of restarts in the last ten minutes."""
    cpu_used: float | None = None
    """Number of cores that it used over the last ten seconds."""
    memory_used_mb: float | None = None
    holds_spouts: bool = False
    """True while its full queues make spouts wait."""

    @property
    def tasks(self) -> tuple[int, ...]:
        """Task ids, ascending."""
        return tuple(self.components)

    @property
    def tasks_by_component(self) -> Mapping[str, int]:
        """Component -> number of its tasks in the slot."""
        return Counter(self.components.values())

    @property
    def slot(self) -> Slot:
        """Its slot."""
        return Slot(self.node, self.port)

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"{self.host}:{self.port}"


def workers_of(
    topology: TopologyView, report: Mapping[str, Any] | None = None, *, now_secs: int
) -> list[WorkerSnapshot]:
    """The workers of a topology in order of host and port.

    ``report`` is the topology master's response; without it no worker has statistics.
    """
    table = topology.tasks or TaskTable(components={})
    component_of = table.component_of()
    first_tasks: set[int] = set()
    for groups in executors_of(table, topology.base.executors).values():
        first_tasks.update(group[0] for group in groups)
    starts = topology.assignment.start_secs() if topology.assignment is not None else {}
    entries: Mapping[str, Any] = (report or {}).get("workers") or {}
    workers: list[WorkerSnapshot] = []
    for worker in sorted(topology.workers, key=lambda slot: (slot.host, slot.port, slot.node)):
        entry = entries.get(worker.slot.key)
        workers.append(
            WorkerSnapshot(
                topology_id=topology.id,
                topology_name=topology.base.name,
                node=worker.node,
                host=worker.host,
                port=worker.port,
                executors=sum(1 for task in worker.ids if task in first_tasks),
                components={task: component_of.get(task, "?") for task in worker.ids},
                memory_mb=worker.memory_bytes / 2**20,
                cpu=float(worker.cpu),
                placed_secs=last_placed_secs(worker, starts),
                **_process_fields(topology.live_workers.get(worker.slot), entry, now_secs),
                **_reported_fields(entry),
            )
        )
    return workers


def last_placed_secs(worker: WorkerSlot, starts: Mapping[int, int]) -> int:
    """Epoch seconds at which the newest of its tasks was placed; 0 if that is unknown.

    ``starts`` maps tasks to epoch seconds.
    """
    return max((starts.get(task, 0) for task in worker.ids), default=0)


def _process_fields(
    node: WorkerNode | None, entry: Mapping[str, Any] | None, now_secs: int
) -> dict[str, Any]:
    """The fields of a worker that its node in ZooKeeper decides."""
    if node is None:
        return {"pid": None, "uptime_secs": 0}
    return {
        "pid": node.pid,
        "uptime_secs": _uptime_secs(node.started_ms, entry, now_secs),
        "started_secs": node.started_ms / 1000,
        "code": node.code,
        "state": node.status,
    }


def _uptime_secs(started_ms: int, entry: Mapping[str, Any] | None, now_secs: int) -> int:
    """Seconds by the worker's clock if it has reported, else by this one."""
    reported = entry.get("uptime_secs") if entry is not None else None
    if isinstance(reported, int | float):
        return int(reported)
    return max(0, now_secs - started_ms // 1000)


def _reported_fields(entry: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of a worker that only the topology master has; none without its entry."""
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
