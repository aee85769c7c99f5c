"""Statuses of tasks, by the cluster's records and by the topology master."""

from collections.abc import Mapping
from typing import Any, Literal

from storm_dagster.core.snapshot.workers import last_placed_secs
from storm_dagster.model.records import WorkerSlot
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView, TopologyView

TaskStatus = Literal["starting", "running", "dead", "unassigned"]
LAUNCH_SECS = 120.0
"""Default of ``nimbus.task.launch.secs``."""


class TaskStatuses:
    """Statuses of the tasks of one topology; records are decoded once.

    While its worker has no node in ZooKeeper, a task is ``starting`` if its supervisor lives and
    either restarts the worker or had less than ``launch_secs`` since the placement; else it is
    ``dead``. The statuses are for display; healing has its own clock.
    """

    def __init__(
        self,
        view: ClusterView,
        topology: TopologyView,
        now_secs: int,
        launch_secs: float = LAUNCH_SECS,
    ) -> None:
        self._topology = topology
        self._opened: dict[tuple[str, int], frozenset[int]] = {}
        """Slot of a live worker -> tasks that its process has opened, or is opening."""
        for slot, node in topology.live_workers.items():
            self._opened[slot] = topology.own_tasks(node.tasks)
        starts = topology.assignment.start_secs() if topology.assignment else {}
        self._waiting: set[Slot] = set()
        """Slots whose worker may still come: a worker without a process is starting there."""
        for worker in topology.workers:
            supervisor = view.supervisors.get(worker.node)
            if supervisor is None:
                continue
            placed_secs = last_placed_secs(worker, starts)
            if worker.port in supervisor.restarting or now_secs - placed_secs <= launch_secs:
                self._waiting.add(worker.slot)
        self._dead = topology.dead_tasks
        """Tasks that the topology master reports as dead."""

    def of(
        self, task: int, worker: WorkerSlot | None, entry: Mapping[str, Any] | None
    ) -> TaskStatus:
        """Status of a task with its assigned worker.

        ``entry`` is the topology master's entry; with ``None`` the record of the worker decides.
        """
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


def not_running(
    view: ClusterView, topology: TopologyView, now_secs: int, launch_secs: float
) -> int:
    """Number of tasks without a slot, with a worker that is gone for good, or reported as dead.

    A worker that is being restarted is not gone. 0 for a killed topology.
    """
    return len(down_tasks(view, topology, now_secs, launch_secs))


def down_tasks(
    view: ClusterView, topology: TopologyView, now_secs: int, launch_secs: float
) -> list[int]:
    """The tasks that :func:`not_running` counts, ascending."""
    if topology.tasks is None or topology.base.status == "KILLED":
        return []
    slots = topology_slots(topology)
    tasks = topology.tasks.component_of()
    # All tasks have a live worker: only those that the topology master reports as dead count.
    if len(slots) == len(tasks) and not topology.missing_workers:
        return sorted(topology.dead_tasks & tasks.keys())
    statuses = TaskStatuses(view, topology, now_secs, launch_secs)
    return [
        task
        for task in sorted(tasks)
        if statuses.of(task, slots.get(task), entry=None) in ("dead", "unassigned")
    ]


def topology_slots(topology: TopologyView) -> dict[int, WorkerSlot]:
    """Task -> the worker that the assignment gives it."""
    slots: dict[int, WorkerSlot] = {}
    for worker in topology.workers:
        slots.update(dict.fromkeys(worker.ids, worker))
    return slots
