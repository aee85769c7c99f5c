"""Snapshots of a topology for its pages: one set for REST, Thrift and metrics.

Pure: from a view of the cluster, the topology master's answer and the errors.
:class:`~.reading.ClusterReader` gives them (``snapshot(name)``) with everything filled in.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

from storm_dagster.core.submission.tasks import executors_of
from storm_dagster.model.multimap import multimap
from storm_dagster.model.records import SupervisorInfo, TaskError, TaskTable, WorkerSlot
from storm_dagster.model.tables import load_table
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.nimbus.requests.window_stats import (
    WINDOWS,
    Kind,
    WindowStats,
    is_system_name,
    merge,
    task_windows,
)

_TABLES = {
    name: {field: attrgetter(place) for field, place in table.items()}
    for name, table in load_table(__name__, "rows").items()
}


def fields_of(name: str, source: object) -> dict[str, Any]:
    """The fields of a table, read from their source."""
    return {field: value(source) for field, value in _TABLES[name].items()}


_CAPACITY_WINDOW = "600"


@dataclass(frozen=True)
class ExecutorSnapshot:
    """One executor: a run of tasks of one component on one slot."""

    component: str
    kind: Kind
    first: int
    last: int
    node: str | None
    """Supervisor id; ``None`` while it is not placed. ``host`` and ``port`` are then empty
    and 0.
    """
    host: str
    port: int
    uptime_secs: int
    windows: Mapping[str, WindowStats]
    """Every one of :data:`~.window_stats.WINDOWS`."""
    reported: bool
    """Whether the topology master knew of one of its tasks."""
    waiting: int = 0
    """Tuples in its queues."""

    @property
    def id(self) -> str:
        """As Storm writes it: ``[1-2]``."""
        return f"[{self.first}-{self.last}]"

    @cached_property
    def capacity(self) -> float:
        """Share of the last ten minutes (or of its life) that a bolt's executor spent in
        ``execute``.
        """
        if self.kind != "bolt" or not self.uptime_secs:
            return 0.0
        totals = self.windows[_CAPACITY_WINDOW].totals(include_sys=True)
        secs = min(int(_CAPACITY_WINDOW), self.uptime_secs)
        return totals.executed * totals.execute_ms / (secs * 1000)


PartitionLag = tuple[float | None, float | None]
"""Records and seconds that a source is behind."""
_NUMBER = int | float | None


@dataclass(frozen=True)
class ComponentSnapshot:
    """One component with its executors; its statistics are the sums of theirs."""

    id: str
    kind: Kind
    tasks: tuple[int, ...]
    executors: tuple[ExecutorSnapshot, ...]
    errors: tuple[TaskError, ...] = ()
    """Newest first."""
    lag: float | None = None
    """Sum of the metrics named ``lag`` of its tasks; ``None`` without any."""
    lag_by_partition: Mapping[str, PartitionLag] = field(default_factory=dict)
    """Of a source."""

    @property
    def waiting(self) -> int:
        """Tuples in the queues of its tasks."""
        return sum(one.waiting for one in self.executors)

    def load_document(self) -> dict[str, Any]:
        """How loaded it is, for ``show --json``: queue, capacity and lag now, latencies of the last
        ten minutes.
        """
        recent = self.windows[_CAPACITY_WINDOW]
        keys = sorted({key for by_key in recent.latencies.values() for key in by_key})
        return {
            "waiting": self.waiting,
            "capacity": round(self.capacity, 3),
            "lag": self.lag,
            "lag_by_partition": dict(self.lag_by_partition),
            "latency": recent.percentiles(),
            "stream_latency": {
                key: found for key in keys if (found := recent.stream_percentiles(key))
            },
        }

    @property
    def is_system(self) -> bool:
        """Whether the system added it."""
        return is_system_name(self.id)

    @cached_property
    def windows(self) -> Mapping[str, WindowStats]:
        """Window -> statistics of all executors."""
        return {name: merge(one.windows[name] for one in self.executors) for name in WINDOWS}

    @property
    def capacity(self) -> float:
        """Capacity of the busiest executor, as in Storm."""
        return max((one.capacity for one in self.executors), default=0.0)


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
    cpu: float


@dataclass(frozen=True)
class TopologySnapshot:
    """One topology at one moment."""

    id: str
    name: str
    status: str
    uptime_secs: int
    components: Mapping[str, ComponentSnapshot]
    workers: tuple[WorkerSnapshot, ...]
    tasks_total: int
    executors_total: int
    answered: bool
    """Whether the topology master gave statistics; without them all are 0."""
    metrics: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """(component, task) -> values of ``report_metric``."""
    back_pressure: int = 0
    """Workers whose queues hold the spouts back."""

    @property
    def workers_total(self) -> int:
        """Slots that hold its tasks."""
        return len(self.workers)

    @property
    def workers_live(self) -> int:
        """Of them, those with a live process."""
        return sum(1 for worker in self.workers if worker.pid is not None)

    def shown(self, kind: Kind, include_sys: bool) -> list[ComponentSnapshot]:
        """Its spouts or bolts in order of their ids; those of the system only with
        ``include_sys``.
        """
        every = [part for _, part in sorted(self.components.items()) if part.kind == kind]
        return [part for part in every if include_sys or not part.is_system]

    def totals(self, window: str, *, include_sys: bool = False) -> dict[str, float]:
        """Storm's topology-wide totals of a window: tuples sent by all, acks, failures and latency
        of spouts.
        """
        shown = [part for part in self.components.values() if include_sys or not part.is_system]
        every = [part.windows[window].totals(include_sys=include_sys) for part in shown]
        spouts = merge(part.windows[window] for part in shown if part.kind == "spout").totals(
            include_sys=include_sys
        )
        return {
            "emitted": sum(one.emitted for one in every),
            "transferred": sum(one.transferred for one in every),
            "acked": spouts.acked,
            "failed": spouts.failed,
            "complete_ms": spouts.complete_ms,
        }


@dataclass(frozen=True)
class SupervisorSnapshot:
    """One supervisor and what runs on it."""

    id: str
    info: SupervisorInfo
    uptime_secs: int
    used: tuple[int, ...]
    blacklisted: bool
    used_memory_mb: float = 0.0
    used_cpu: float = 0.0
    workers: tuple[WorkerSnapshot, ...] = field(default=())


@dataclass(frozen=True)
class TopologySize:
    """What a topology has and was given, which needs no statistics."""

    tasks: int
    executors: int
    workers: int
    memory_mb: float
    cpu: float

    @staticmethod
    def of(*topologies: TopologyView) -> "TopologySize":
        """The size of all of them together."""
        tables = [(one.tasks, one.base.executors) for one in topologies if one.tasks is not None]
        workers = [
            worker for one in topologies if one.assignment for worker in one.assignment.workers
        ]
        return TopologySize(
            tasks=sum(len(part.ids) for table, _ in tables for part in table.components.values()),
            executors=sum(len(each) for found in tables for each in executors_of(*found).values()),
            workers=len(workers),
            memory_mb=sum(worker.memory_bytes for worker in workers) / 2**20,
            cpu=float(sum(worker.cpu for worker in workers)),
        )


def topologies_by_owner(
    view: ClusterView, owner: str | None = None
) -> dict[str, list[TopologyView]]:
    """Owner -> his topologies; those without one belong to ``""``. With ``owner`` only his."""
    wanted = (
        topology for topology in view.topologies.values() if owner in (None, topology.base.owner)
    )
    return dict(sorted(multimap((topology.base.owner, topology) for topology in wanted).items()))


def snapshot_topology(
    topology: TopologyView,
    report: Mapping[str, Any] | None = None,
    *,
    now_secs: int,
    errors: Iterable[tuple[str, TaskError]] = (),
) -> TopologySnapshot:
    """A topology's snapshot; ``report`` is its master's answer, ``errors`` are (component, error),
    newest first.
    """
    table = topology.tasks or TaskTable(components={})
    reported_tasks: Mapping[str, Any] = (report or {}).get("tasks") or {}
    slots = {task: worker for worker in topology.workers for task in worker.ids}
    by_component = multimap(errors)
    components: dict[str, ComponentSnapshot] = {}
    for component_id, groups in executors_of(table, topology.base.executors).items():
        kind = table.components[component_id].type
        components[component_id] = ComponentSnapshot(
            id=component_id,
            kind=kind,
            tasks=table.components[component_id].ids,
            executors=tuple(
                _executor(component_id, kind, group, slots.get(group[0]), reported_tasks)
                for group in groups
            ),
            errors=tuple(by_component.get(component_id, ())),
            lag=_lag(reported_tasks.get(str(task)) for task in table.components[component_id].ids),
            lag_by_partition=lag_by_partition(reported_tasks, table.components[component_id].ids),
        )
    return TopologySnapshot(
        id=topology.id,
        name=topology.base.name,
        status=topology.base.status,
        uptime_secs=max(0, now_secs - topology.base.launch_time_secs),
        components=components,
        workers=tuple(workers_of(topology, report, now_secs=now_secs)),
        tasks_total=sum(len(part.tasks) for part in components.values()),
        executors_total=sum(len(part.executors) for part in components.values()),
        answered=report is not None,
        metrics={
            (str(entry.get("component") or ""), task): entry["metrics"]
            for task, entry in sorted(reported_tasks.items())
            if entry.get("metrics")
        },
        back_pressure=sum(
            bool((worker.get("system") or {}).get("back_pressure"))
            for worker in ((report or {}).get("workers") or {}).values()
        ),
    )


def workers_of(
    topology: TopologyView, report: Mapping[str, Any] | None = None, *, now_secs: int
) -> list[WorkerSnapshot]:
    """The workers of a topology in order of host and port."""
    table = topology.tasks or TaskTable(components={})
    component_of = table.component_of()
    first = {
        group[0]
        for groups in executors_of(table, topology.base.executors).values()
        for group in groups
    }
    reported_workers: Mapping[str, Any] = (report or {}).get("workers") or {}
    found: list[WorkerSnapshot] = []
    for worker in sorted(topology.workers, key=lambda one: (one.host, one.port, one.node)):
        live = topology.live_workers.get(worker.slot)
        uptime = max(0, now_secs - live.started_ms // 1000) if live is not None else 0
        worker_report = reported_workers.get(f"{worker.node}:{worker.port}")
        if live is not None and worker_report is not None:
            uptime = int(worker_report.get("uptime_secs") or uptime)
        found.append(
            WorkerSnapshot(
                topology_id=topology.id,
                topology_name=topology.base.name,
                node=worker.node,
                host=worker.host,
                port=worker.port,
                pid=live.pid if live is not None else None,
                uptime_secs=uptime,
                executors=sum(1 for task in worker.ids if task in first),
                tasks_by_component=Counter(component_of.get(task, "?") for task in worker.ids),
                memory_mb=worker.memory_bytes / 2**20,
                cpu=float(worker.cpu),
            )
        )
    return found


def supervisors_of(
    view: ClusterView, *, now_secs: int, workers: bool = False
) -> list[SupervisorSnapshot]:
    """Every live supervisor in order of host and id; with ``workers`` also what runs on it."""
    used = view.used_ports()
    running: dict[str, list[WorkerSnapshot]] = {}
    memory, cpu = Counter[str](), Counter[str]()
    for topology in view.topologies.values():
        for slot in topology.workers:
            memory[slot.node] += slot.memory_bytes
            cpu[slot.node] += slot.cpu
        if workers:
            for worker in workers_of(topology, now_secs=now_secs):
                running.setdefault(worker.node, []).append(worker)
    return [
        SupervisorSnapshot(
            id=supervisor_id,
            info=info,
            uptime_secs=max(0, now_secs - info.started),
            used=tuple(sorted(used.get(supervisor_id, ()))),
            blacklisted=info.host in view.blacklist,
            used_memory_mb=memory[supervisor_id] / 2**20,
            used_cpu=float(cpu[supervisor_id]),
            workers=tuple(
                sorted(running.get(supervisor_id, ()), key=lambda one: (one.port, one.topology_id))
            ),
        )
        for supervisor_id, info in sorted(
            view.supervisors.items(), key=lambda pair: (pair[1].host, pair[0])
        )
    ]


def _executor(
    component: str,
    kind: Kind,
    group: Sequence[int],
    slot: WorkerSlot | None,
    report: Mapping[str, Any],
) -> ExecutorSnapshot:
    entries = [report[str(task)] for task in group if str(task) in report]
    each = [task_windows(entry, kind) for entry in entries]
    return ExecutorSnapshot(
        component=component,
        kind=kind,
        first=group[0],
        last=group[-1],
        node=slot.node if slot else None,
        host=slot.host if slot else "",
        port=slot.port if slot else 0,
        uptime_secs=max((int(entry.get("uptime_secs") or 0) for entry in entries), default=0),
        windows={name: merge(one[name] for one in each) for name in WINDOWS},
        reported=bool(entries),
        waiting=sum(int(entry.get("waiting") or 0) for entry in entries),
    )


def lag_by_partition(reported: Mapping[str, Any], tasks: Iterable[int]) -> dict[str, PartitionLag]:
    """Lag of the partitions that these tasks read, in order of their names."""
    found: dict[str, PartitionLag] = {}
    for task in tasks:
        lags = ((reported.get(str(task)) or {}).get("metrics") or {}).get("lag_by_partition")
        for name, lag in lags.items() if isinstance(lags, Mapping) else ():
            # A user's component may report anything under this name.
            if (
                isinstance(lag, list | tuple)
                and len(lag) == 2
                and all(isinstance(one, _NUMBER) for one in lag)
            ):
                found[str(name)] = (lag[0], lag[1])
    return dict(sorted(found.items()))


def _lag(entries: Iterable[Mapping[str, Any] | None]) -> float | None:
    values = [(entry.get("metrics") or {}).get("lag") for entry in entries if entry is not None]
    numbers = [
        value for value in values if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return sum(numbers) if numbers else None
