"""Check of one topology: its missing, starting and silent workers, and its tasks without a slot.

See :mod:`storm_dagster.core.liveness.detection`, which checks all topologies of a cluster.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from storm_dagster.core.liveness.causes import (
    SPREAD_PAUSE_SECS,
    Cause,
    CauseKind,
    FirstSeen,
    LivenessMemory,
    MissingSlot,
    StartingWorker,
    TopologyMemory,
)
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.core.transitions import STEADY
from storm_dagster.core.usable_slots import UsableSlots, usable_slots
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.records import Assignment, WorkerSlot
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView, TopologyView, Versioned


def first_seen(value: int, last: FirstSeen | UnsetType | None, boot_now: float) -> FirstSeen:
    """The last value with its time, or a new value with the current time."""
    return last if last and last.value == value else FirstSeen(value, boot_now)


@dataclass
class LivenessCheck:
    """One check of all topologies; collects causes and deadlines."""

    view: ClusterView
    memory: LivenessMemory
    """Memory of the last check."""
    limits: LivenessLimits
    now: float
    """Boot clock of this check."""
    silent: frozenset[str]
    """Ids of the registered supervisors whose counter does not rise."""
    last_signs: Mapping[str, float]
    """Supervisor id -> boot clock at which its counter last rose, of those that are gone."""
    causes: list[Cause] = field(default_factory=list)
    """Causes of the topologies that were checked so far."""
    deadlines: list[float] = field(default_factory=list)
    """Boot clocks at which the limits that are running pass."""
    restarting: list[tuple[str, str, int]] = field(default_factory=list)
    """(topology id, supervisor id, port) of workers that are restarted in place."""
    waiting: list[str] = field(default_factory=list)
    """Problems whose limit has not passed yet, in words."""

    def usable_slots(self, topology: TopologyView) -> UsableSlots:
        """Slots that the topology may use, with its reserve, which only a plan knows."""
        users = self.limits.users
        return usable_slots(self.view, placing=[topology.id], avoid=self.silent, bounds=users)

    def is_restarting(self, worker: WorkerSlot) -> bool:
        """True if the worker's supervisor reports that it restarts the worker."""
        info = self.view.supervisors.get(worker.node)
        return info is not None and worker.port in info.restarting

    def limit(self, worker: WorkerSlot, missing: MissingSlot) -> tuple[CauseKind, float]:
        """Kind of the cause if the worker stays missing, and the seconds until it is one.

        0 means that it is one at once.
        """
        if worker.node not in self.view.supervisors:
            # Without supervisor and worker the host is lost, unless this is the first check.
            if missing.since > self.memory.since:
                return "lost_host", 0
            # After a start of the whole cluster, a host that was not seen yet may still be booting.
            if self.memory.cold and worker.node not in self.last_signs:
                return "lost_host", self.limits.launch_secs
            return "lost_host", self.limits.task_secs
        if self.is_restarting(worker) or not missing.gone:
            return "dead_worker", self.limits.launch_secs
        return "dead_worker", self.limits.task_secs


class TopologyCheck:
    """The part of a check that concerns one topology."""

    def __init__(
        self,
        check: LivenessCheck,
        topology: TopologyView,
        assignment: Assignment,
        assignment_at: Versioned,
    ) -> None:
        self._check = check
        self._now = check.now
        self._topology = topology
        self._assignment = assignment
        self._assignment_at = assignment_at
        self._last = check.memory.topologies.get(topology.id)
        """Memory of the last check; ``None`` if that did not check the topology."""
        self._judged: set[Slot] = set()
        """Slots of workers that are missing or starting for too long: they have a cause."""

    def run(self) -> TopologyMemory:
        """Add causes and deadlines to the check; return the memory for the next one."""
        last = self._last
        generation = self._assignment_at.version
        placed = first_seen(generation, last.assignment if last else None, self._now)
        record_at = self._topology.beats_at
        record_zxid = record_at.mzxid if record_at else -1
        master_record = first_seen(record_zxid, last.beats if last else None, self._now)
        same_generation = last is not None and last.assignment.value == generation
        missing = self._check_missing(same_generation)
        starting = self._check_starting()
        memory = TopologyMemory(placed, master_record, missing, starting)
        # Both checks filled ``_judged``, which the next one reads. The dead tasks in the record of
        # a topology master that is silent are out of date.
        if not self._check_master(memory):
            self._check_dead_tasks()
        self._check_unassigned()
        return replace(memory, room=self._check_free_room(memory))

    def _check_missing(self, same_generation: bool) -> dict[str, MissingSlot]:
        """Check the workers without a process; return them by ``"node:port"``.

        ``same_generation``: the last check was of this generation of the assignment.
        """
        starts = self._assignment.start_secs()
        missing: dict[str, MissingSlot] = {}
        for worker in self._assignment.workers:
            if worker.slot in self._topology.live_workers:
                continue
            key = worker.slot.key
            slot = self._last.missing.get(key) if self._last is not None else None
            # The newest start among its tasks rises with every placement of a task there.
            started = max((starts.get(task, 0) for task in worker.ids), default=0)
            if slot is None or slot.started != started:
                # If the last check of the same generation did not miss it, it was alive then.
                was_alive = same_generation and slot is None
                slot = MissingSlot(since=self._now, gone=was_alive, started=started)
            missing[key] = slot
            kind, limit = self._check.limit(worker, slot)
            if kind == "dead_worker" and self._check.is_restarting(worker):
                self._check.restarting.append((self._topology.id, worker.node, worker.port))
            if self._is_over(slot.since, limit, worker, "is missing"):
                self._judged.add(worker.slot)
                # The silence of a lost host began when its supervisor was last seen.
                since = self._check.last_signs.get(worker.node, slot.since)
                self._add(kind, worker, worker.ids, since=since)
        return missing

    def _check_starting(self) -> dict[str, StartingWorker]:
        """Check the workers that do not run all their tasks yet; return them by ``"node:port"``.

        One that takes longer than the launch window is a cause.
        """
        starting: dict[str, StartingWorker] = {}
        for worker in self._assignment.workers:
            live = self._topology.live_workers.get(worker.slot)
            if live is None or live.status != "starting":
                continue
            key = worker.slot.key
            token = live.token[:8]
            start = self._last.starting.get(key) if self._last is not None else None
            if start is None or start.token != token:
                start = StartingWorker(self._now, token)
            starting[key] = start
            limit = self._check.limits.launch_secs
            if self._is_over(start.since, limit, worker, "has not reported its tasks"):
                self._judged.add(worker.slot)
                self._add("never_ran", worker, worker.ids, token, start.since)
        return starting

    def _check_master(self, memory: TopologyMemory) -> bool:
        """True if the worker of the topology master has a cause, or gets one now.

        A worker that lives is replaced if the topology master's record does not change for too
        long. ``False`` while its limit is running, and if the master's task has no worker.
        """
        master_worker = self._master_worker()
        if master_worker is None:
            return False
        if master_worker.slot in self._judged:
            return True
        if master_worker.slot not in self._topology.live_workers:
            return False
        since = memory.beats.since
        limit = self._check.limits.task_secs
        if memory.beats.value <= self._assignment_at.mzxid:
            # It has not reported since the newest placement, which writes the first record.
            since = max(since, memory.assignment.since)
            limit = self._check.limits.launch_secs
        if not self._is_over(since, limit, master_worker):
            return False
        self._add("silent_master", master_worker, master_worker.ids, str(memory.beats.value), since)
        return True

    def _master_worker(self) -> WorkerSlot | None:
        """The worker that the topology master's task is assigned to."""
        table = self._topology.tasks
        part = table.components.get(TOPOLOGY_MASTER) if table else None
        if part is None or not part.ids:
            return None
        for worker in self._assignment.workers:
            if part.ids[0] in worker.ids:
                return worker
        return None

    def _check_dead_tasks(self) -> None:
        """Replace workers with tasks that the topology master reports as dead."""
        dead = self._topology.dead_tasks
        for worker in self._assignment.workers:
            if worker.slot in self._judged or worker.slot not in self._topology.live_workers:
                continue
            if not dead.isdisjoint(worker.ids):
                self._add("dead_task", worker, worker.ids)

    def _check_unassigned(self) -> None:
        """Add tasks without a slot, once there is a free one that the topology may use."""
        if self._topology.tasks is None:
            return
        placed: set[int] = set()
        for worker in self._assignment.workers:
            placed.update(worker.ids)
        without = tuple(sorted(self._topology.tasks.component_of().keys() - placed))
        if without and self._check.usable_slots(self._topology).free:
            self._add("unassigned", None, without)

    def _check_free_room(self, memory: TopologyMemory) -> FirstSeen | UnsetType:
        """Check for too few workers; return ``TopologyMemory.room``.

        Tasks are spread once slots were free for longer than a host may come and go, and not soon
        after another placement: hosts that come and go must not move them repeatedly.
        """
        base = self._topology.base
        executors = sum(
            count for component, count in base.executors.items() if component != TOPOLOGY_MASTER
        )
        missing_workers = min(base.workers, executors) - len(self._assignment.workers)
        is_steady = base.status in STEADY and not memory.missing and not memory.starting
        if missing_workers < 1 or not is_steady:
            return UNSET
        workers = min(missing_workers, self._check.usable_slots(self._topology).count)
        if workers < 1:
            return UNSET
        free_room = first_seen(workers, self._last.room if self._last else None, self._now)
        ready_at = free_room.since + self._check.limits.window_secs
        # Version 0 is the first placement: no task has been moved.
        if memory.assignment.value:
            ready_at = max(ready_at, memory.assignment.since + SPREAD_PAUSE_SECS)
        if self._now < ready_at:
            self._check.deadlines.append(ready_at)
        else:
            self._add("too_few_workers", None, ())
        return free_room

    def _is_over(
        self, since: float, limit: float, worker: WorkerSlot, problem: str | None = None
    ) -> bool:
        """True if the limit has passed, which a limit of 0 always has.

        Else its deadline is recorded, and with ``problem`` a sentence about the worker.
        """
        if limit == 0 or self._now - since > limit:
            return True
        self._check.deadlines.append(since + limit)
        if problem is not None:
            silent_secs = self._now - since
            self._check.waiting.append(
                f"worker {worker.slot.key} of {self._topology.base.name} {problem} for "
                f"{silent_secs:.0f} s, judged after {limit:g} s"
            )
        return False

    def _add(
        self,
        kind: CauseKind,
        worker: WorkerSlot | None,
        tasks: tuple[int, ...],
        seen: str = "",
        since: float | None = None,
    ) -> None:
        """Add a cause to the check.

        ``worker`` is ``None`` for tasks without a slot and for too few workers. ``seen`` is the
        cause's field, ``since`` the boot clock at which the silence began.
        """
        node = worker.node if worker else ""
        if self._check.view.drains(node) and node not in self._check.silent:
            return  # The leader moves its tasks; tasks that stay until its end are of a lost host.
        self._check.causes.append(
            Cause(
                topology_id=self._topology.id,
                name=self._topology.base.name,
                generation=self._assignment_at.version,
                kind=kind,
                node=node,
                host=worker.host if worker else "",
                port=worker.port if worker else 0,
                tasks=tasks,
                avoid=tuple(sorted(self._check.silent)),
                seen=seen,
                silent_secs=0.0 if since is None else round(self._now - since, 1),
            )
        )
