"""Statuses of tasks, by the cluster's records and by the topology master."""

from collections.abc import Mapping
from typing import Any, Literal

from storm_dagster.model.ranges import decode_ranges
from storm_dagster.model.records import WorkerSlot
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView, TopologyView

TaskStatus = Literal["starting", "running", "dead", "unassigned"]
LAUNCH_SECS = 120.0
"""Default of ``nimbus.task.launch.secs``."""


class TaskStatuses:
    """Statuses of the tasks of one topology; each record is decoded once.

    Without a worker's node a task is ``starting`` while its supervisor lives and restarts it or its
    launch time (seconds since it was placed) has not passed, else ``dead``. This is for display;
    healing uses its own clock.
    """

    def __init__(
        self,
        view: ClusterView,
        topology: TopologyView,
        now_secs: int,
        launch_secs: float = LAUNCH_SECS,
    ) -> None:
        self._topology = topology
        self._opened = {
            slot: frozenset(decode_ranges(node.tasks))
            for slot, node in topology.live_workers.items()
        }
        starts = topology.assignment.start_secs() if topology.assignment else {}
        self._waiting: set[Slot] = set()
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


def not_running(
    view: ClusterView, topology: TopologyView, now_secs: int, launch_secs: float
) -> int:
    """Number of tasks that have no slot, or whose worker is gone and is not being restarted."""
    if topology.tasks is None or topology.base.status == "KILLED":
        return 0
    slots = topology_slots(topology)
    tasks = topology.tasks.component_of()
    if (
        len(slots) == len(tasks)
        and {worker.slot for worker in slots.values()} <= topology.live_workers.keys()
    ):
        return len(topology.dead_tasks & tasks.keys())
    statuses = TaskStatuses(view, topology, now_secs, launch_secs)
    return sum(statuses.of(task, slots.get(task), None) in ("dead", "unassigned") for task in tasks)


def topology_slots(topology: TopologyView) -> dict[int, WorkerSlot]:
    """Task -> the worker that the assignment gives it."""
    slots: dict[int, WorkerSlot] = {}
    for worker in topology.workers:
        slots.update(dict.fromkeys(worker.ids, worker))
    return slots
