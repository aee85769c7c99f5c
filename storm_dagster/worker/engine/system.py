"""System tasks of a topology.

Ackers, and the topology master with its table of worker reports.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from storm_dagster.core.dataplane.acking import AckerResult, AckTracker
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.records import TaskBeats, WorkerBeat
from storm_dagster.model.slot import Slot
from storm_dagster.model.wire import WorkerReport
from storm_dagster.worker.dataplane.routes import Placement
from storm_dagster.worker.engine.history import TopologyHistory
from storm_dagster.worker.tasks.runner import Runner


class Acker(Runner):
    """One ``__acker`` task.

    Its messages are batched beside tuples; see ``Frame`` and ``Ledger``.
    """

    kind = "system"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Twice the timeout: the spout's own clock decides, and it may have started later.
        self.table_timeout = 2 * float(self.conf.get("topology.message.timeout.secs") or 30)
        """Seconds after which an incomplete tree is dropped."""
        self.table = AckTracker(self.table_timeout)
        self.tick_secs = None
        self._expire_at = 0.0
        """Time of the next removal of old trees."""

    def apply(
        self,
        now: float,
        into: AckerResult,
        inits: Sequence[int] = (),
        acks: Sequence[int] = (),
        fails: Sequence[int] = (),
        losses: Sequence[int] = (),
    ) -> None:
        """Apply flat lists from a frame, and add the results to ``into``.

        ``inits`` is root, value, spout task, root, ...; ``acks`` is root, value, root, ...; see
        :meth:`AckTracker.apply`.
        """
        # Measured by benchmarks/dataplane.py.
        init_numbers = iter(inits)
        ack_numbers = iter(acks)
        init_triples = zip(init_numbers, init_numbers, init_numbers, strict=True)
        ack_pairs = zip(ack_numbers, ack_numbers, strict=True)
        self.table.apply(now, init_triples, ack_pairs, fails, losses, into)
        self.stats.executed += len(inits) // 3 + len(acks) // 2 + len(fails) + len(losses)

    def on_clock(self, now: float) -> None:
        """Drop trees that have timed out."""
        if self.awaits_target:
            self.table.extend_deadlines(now)
        if now >= self._expire_at:
            self.table.expire(now)
            self._expire_at = now + max(1.0, self.table_timeout / 20)
        self.stats.acked = self.stats.executed


class ListeningClock:
    """Clock of the seconds in which this worker could receive reports.

    It stops while the worker is paused or frozen: an outage of ZooKeeper pauses all workers, and
    must not make them count as dead. One thread ticks; any may read.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds that were counted so far."""
        self._ticked: float | None = None
        """``now`` of the last tick."""

    def tick(self, now: float, max_secs: float) -> None:
        """Count the time since the last tick.

        A time of more than ``max_secs`` seconds is not counted.
        """
        if self._ticked is not None and now - self._ticked <= max_secs:
            self.now += now - self._ticked
        self._ticked = now


class _Received(NamedTuple):
    """Newest report of a worker."""

    report: WorkerReport
    received: float
    """Time of receipt, by the master's :class:`ListeningClock`."""
    beats: int
    """Reports of that process so far."""


class TopologyMasterTable:
    """Newest report of each worker.

    Thread-safe: the loop fills it, ``ClusterSync`` and requests read it.
    """

    def __init__(self, topology_id: str, task: int) -> None:
        self.topology_id = topology_id
        self.task = task
        self._lock = threading.Lock()
        self._reports: dict[str, _Received] = {}
        """``node:port`` -> newest report of that slot."""
        self._missed_since: dict[int, float] = {}
        """Task without a report -> time at which it was first missed."""
        self._placement: Placement | None = None
        self._slots: set[str] = set()
        """``node:port`` of all slots of the placement."""
        self.history = TopologyHistory()
        """Used only by the loop."""

    def receive(self, report: WorkerReport, now: float) -> None:
        """Store a report of a slot of the topology; another slot's is dropped.

        The beats of a new process of the slot starts at 1. ``now`` is a time of a
        :class:`ListeningClock`.
        """
        key = Slot(report.node, report.port).key
        with self._lock:
            if self._placement is not None and key not in self._slots:
                return
            former = self._reports.get(key)
            beats = 1
            if former is not None and former.report.pid == report.pid:
                beats = former.beats + 1
            self._reports[key] = _Received(report, now, beats)
        self.history.receive(key, report, now)

    def follow(self, placement: Placement) -> None:
        """Use ``placement`` from now on.

        Reports of other slots, and of former processes, are dropped.
        """
        with self._lock:
            former_tokens = self._placement.tokens if self._placement is not None else {}
            started = {
                slot.key for token, slot in placement.tokens.items() if token not in former_tokens
            }
            self._slots = {slot.key for slot in placement.slots.values()}
            self._reports = {
                key: entry
                for key, entry in self._reports.items()
                if key in self._slots and key not in started
            }
            self._placement = placement
        self.history.forget(self._slots)

    def _current_tasks(self, report: WorkerReport) -> set[int]:
        """Tasks of a report that its slot still has."""
        tasks = {int(task) for task in report.tasks}
        placement = self._placement
        if placement is None:
            return tasks
        slot = Slot(report.node, report.port)
        return {task for task in tasks if placement.slots.get(task) == slot}

    def beats(
        self, now: float, timeout: float, tasks: Iterable[int], launch: float = 120.0
    ) -> TaskBeats:
        """Return the liveness record of ``tasks``, all tasks of the topology.

        Dead are tasks of a worker without a report for ``timeout`` seconds, and tasks that no
        worker has reported ``launch`` seconds after they were first missed.
        """
        all_tasks = set(tasks)
        reported: set[int] = set()
        silent: set[int] = set()
        alive: set[int] = set()
        with self._lock:
            reports = dict(self._reports)
            version = self._placement.version if self._placement is not None else -1
            for report, received, _ in reports.values():
                current_tasks = self._current_tasks(report)
                reported |= current_tasks
                if now - received > timeout:
                    silent |= current_tasks
                else:
                    alive |= current_tasks
            self._missed_since = {
                task: self._missed_since.get(task, now) for task in all_tasks - reported
            }
            missing = {task for task, since in self._missed_since.items() if now - since > launch}
        dead = (missing | silent) - alive
        workers: dict[str, WorkerBeat] = {}
        for key, (report, received, count) in sorted(reports.items()):
            workers[key] = WorkerBeat(
                count=count,
                silent_ms=int((now - received) * 1000),
                uptime_secs=report.uptime_secs,
            )
        return TaskBeats(
            topology_id=self.topology_id,
            topology_master=self.task,
            workers=workers,
            dead=encode_ranges(dead & all_tasks),
            version=version,
            summary=self.history.summary(),
            trend=self.history.trend(),
        )

    def metric_names(self) -> list[str]:
        """Return ``component:metric`` of all reported metrics, sorted."""
        names: set[str] = set()
        with self._lock:
            for report, _, _ in self._reports.values():
                for task in report.tasks.values():
                    names.update(f"{task.component}:{name}" for name in task.metrics)
        return sorted(names)

    def document(self, now: float = 0.0) -> dict[str, Any]:
        """Return statistics of all tasks and workers, and current rates.

        ``{"tasks": {id: ...}, "workers": {"node:port": ...}, "components", "edges"}``; the last two
        are those of :meth:`TopologyHistory.flow`.
        """
        with self._lock:
            reports = dict(self._reports)
        flow = self.history.flow(now)
        tasks: dict[str, Any] = {}
        workers: dict[str, Any] = {}
        # Oldest first: of a task that two workers have reported, the newest report counts.
        by_age = sorted(reports.items(), key=lambda entry: entry[1].received)
        for key, (report, received, count) in by_age:
            workers[key] = {
                "pid": report.pid,
                "host": report.host,
                "uptime_secs": report.uptime_secs,
                "version": report.version,
                "status": report.status,
                "beats": count,
                "silent_secs": round(max(0.0, now - received), 1),
                "restarts": self.history.restarts(key, now),
                "cpu": flow["cpu"].get(key),
                "system": report.system,
            }
            for task, task_report in report.tasks.items():
                tasks[task] = {
                    **msgspec.structs.asdict(task_report),
                    "node": report.node,
                    "port": report.port,
                }
                tasks[task].update(flow["tasks"].get(task, {}))
        return {
            "tasks": tasks,
            "workers": workers,
            "components": flow["components"],
            "edges": flow["edges"],
        }


class TopologyMaster(Runner):
    """The ``__topology_master`` task.

    It collects the reports of all workers, which ``ClusterSync`` writes to ``/taskbeats/<id>``.
    """

    kind = "system"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tick_secs = None
        self.table = TopologyMasterTable(self.context.topology_id, self.task_id)
        self.listening = ListeningClock()

    def receive(self, report: Any) -> None:
        """Store a worker's report."""
        self.stats.executed += 1
        self.stats.acked += 1
        self.table.receive(report, self.listening.now)
