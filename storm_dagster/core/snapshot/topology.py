"""Snapshot of one running topology.

Pure: made of a view of the cluster, the topology master's response, the errors and, where edges
without traffic or fused bolts are wanted, the submitted code. Whoever shows or judges a running
topology formats this value, and reads neither the response nor the records.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from storm_dagster.core.reassignment import Runnable
from storm_dagster.core.snapshot.statuses import LAUNCH_SECS, TaskStatuses, topology_slots
from storm_dagster.core.snapshot.tasks import (
    CAPACITY_WINDOW,
    ExecutorSnapshot,
    PartitionLag,
    TaskSnapshot,
    partition_lags,
)
from storm_dagster.core.snapshot.windows import (
    WINDOWS,
    Kind,
    Totals,
    WindowStats,
    is_system_name,
    merge,
    split_input,
    sum_totals,
)
from storm_dagster.core.snapshot.workers import WorkerSnapshot, workers_of
from storm_dagster.core.submission.tasks import executors_of
from storm_dagster.model.fusion import fused_components
from storm_dagster.model.multimap import multimap
from storm_dagster.model.names import ACKER, TOPOLOGY_MASTER
from storm_dagster.model.records import AssignmentChange, TaskError, TaskTable, WorkerSlot
from storm_dagster.model.view import ClusterView, TopologyView

_DEFAULT_TIMEOUT_SECS = 30.0
_DEFAULT_REPORT_SECS = 3.0


@dataclass(frozen=True)
class Flow:
    """Figures of a component over the last ten seconds; ``None``: not known.

    Rates are per second. ``capacity`` and ``held`` are shares of time, of the busiest task in
    ``execute`` and of the task that back pressure held back longest. Latencies are of ``execute``
    (bolts) or of whole trees (spouts).
    """

    rate: float | None = None
    acked: float | None = None
    failed: float | None = None
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    capacity: float | None = None
    held: float | None = None
    waiting: float | None = None
    lag: float | None = None
    lag_rate: float | None = None
    """Growth of the lag; negative while it shrinks."""


_FLOW = tuple(Flow.__dataclass_fields__)


@dataclass(frozen=True)
class ComponentSnapshot:
    """One component with its tasks; its statistics are the sums of theirs."""

    id: str
    kind: Kind
    tasks: tuple[TaskSnapshot, ...]
    executors: tuple[ExecutorSnapshot, ...]
    parallelism: int
    """Executors that it is to have."""
    errors: tuple[TaskError, ...] = ()
    """Newest first."""
    flow: Flow = field(default_factory=Flow)
    inputs: Mapping[str, float] = field(default_factory=dict)
    """Input ``component:stream`` -> tuples per second, of those that carry any."""
    fused_in: str = ""
    """The spout whose query runs this bolt; empty for any other."""

    @property
    def is_system(self) -> bool:
        """True if the system added it."""
        return is_system_name(self.id)

    @property
    def waiting(self) -> int:
        """Tuples in the queues of its tasks."""
        return sum(task.waiting for task in self.tasks)

    @property
    def lag(self) -> float | None:
        """Sum of the metrics named ``lag`` of its tasks; ``None`` without any."""
        lags = [task.lag for task in self.tasks if task.lag is not None]
        return sum(lags) if lags else None

    @cached_property
    def lag_by_partition(self) -> Mapping[str, PartitionLag]:
        """Of a source."""
        return partition_lags(self.tasks)

    @property
    def capacity(self) -> float:
        """Capacity of the busiest executor, as in Storm."""
        return max((executor.capacity for executor in self.executors), default=0.0)

    @cached_property
    def totals(self) -> Totals:
        """Statistics of all time."""
        return sum_totals(task.totals for task in self.tasks)

    @cached_property
    def windows(self) -> Mapping[str, WindowStats]:
        """Window -> statistics of all executors."""
        return {
            name: merge(executor.windows[name] for executor in self.executors) for name in WINDOWS
        }

    @property
    def recent(self) -> WindowStats:
        """Statistics of the last ten minutes."""
        return self.windows[CAPACITY_WINDOW]

    @property
    def sources(self) -> frozenset[str]:
        """Components that it reads."""
        return frozenset(split_input(key)[0] for key in self.inputs)


class Edge(NamedTuple):
    """A stream from one component to another."""

    source: str
    target: str
    stream: str


@dataclass(frozen=True)
class TopologySnapshot:
    """One topology at one moment."""

    id: str
    name: str
    status: str
    now_secs: int
    """Epoch seconds of the snapshot."""
    uptime_secs: int
    components: Mapping[str, ComponentSnapshot]
    tasks: Mapping[int, TaskSnapshot]
    """In ascending order."""
    workers: tuple[WorkerSnapshot, ...]
    """In order of host and port."""
    answered: bool
    """True if the topology master gave statistics; without them all are 0."""
    measured: bool = False
    """True if it gave rates: those of the first release do not."""
    edges: Mapping[Edge, float] = field(default_factory=dict)
    """Tuples per second between components of users; with the submitted code also edges without
    traffic.
    """
    errors: tuple[tuple[str, TaskError], ...] = ()
    """(component, error), newest first."""
    changes: tuple[AssignmentChange, ...] = ()
    """Of its assignment, newest first."""
    timeout_secs: float = _DEFAULT_TIMEOUT_SECS
    """Longest time that a tuple tree may take."""
    report_secs: float = _DEFAULT_REPORT_SECS
    """Between two reports of a worker."""

    @property
    def tasks_total(self) -> int:
        """Tasks, those of the system included."""
        return len(self.tasks)

    @property
    def executors_total(self) -> int:
        """Executors, those of the system included."""
        return sum(len(part.executors) for part in self.components.values())

    @property
    def workers_total(self) -> int:
        """Slots that hold its tasks."""
        return len(self.workers)

    @property
    def workers_live(self) -> int:
        """Of them, those with a live process."""
        return sum(1 for worker in self.workers if worker.pid is not None)

    @property
    def back_pressure(self) -> int:
        """Workers whose queues hold the spouts back."""
        return sum(worker.holds_spouts for worker in self.workers)

    @property
    def ackers(self) -> int:
        """Tasks that track tuple trees."""
        return len(self.components[ACKER].tasks) if ACKER in self.components else 0

    @property
    def master(self) -> WorkerSlot | None:
        """The worker that runs the topology master; ``None`` while it has no slot."""
        part = self.components.get(TOPOLOGY_MASTER)
        return part.tasks[0].worker if part is not None and part.tasks else None

    @property
    def down(self) -> list[int]:
        """Tasks that do not run and are not about to."""
        return [task.id for task in self.tasks.values() if task.status in ("dead", "unassigned")]

    @property
    def metrics(self) -> dict[tuple[str, str], Mapping[str, Any]]:
        """(component, task) -> values of ``report_metric``, in order of the tasks' text."""
        tasks = sorted(self.tasks.values(), key=lambda task: str(task.id))
        return {(task.component, str(task.id)): task.metrics for task in tasks if task.metrics}

    def shown(self, kind: Kind, include_sys: bool) -> list[ComponentSnapshot]:
        """Its spouts or bolts in order of their ids; those of the system only with
        ``include_sys``.
        """
        parts = [part for _, part in sorted(self.components.items()) if part.kind == kind]
        return [part for part in parts if include_sys or not part.is_system]

    def totals(self, window: str, *, include_sys: bool = False) -> Totals:
        """Storm's topology-wide totals of a window: tuples sent by all; acks, failures and latency
        of spouts.
        """
        shown = [part for part in self.components.values() if include_sys or not part.is_system]
        parts = [part.windows[window].totals(include_sys=include_sys) for part in shown]
        spouts = sum_totals(
            totals for part, totals in zip(shown, parts, strict=True) if part.kind == "spout"
        )
        return Totals(
            emitted=sum(totals.emitted for totals in parts),
            transferred=sum(totals.transferred for totals in parts),
            acked=spouts.acked,
            failed=spouts.failed,
            complete_ns=spouts.complete_ns,
        )


def snapshot_topology(
    view: ClusterView,
    topology: TopologyView,
    report: Mapping[str, Any] | None = None,
    *,
    now_secs: int,
    errors: Iterable[tuple[str, TaskError]] = (),
    code: Runnable | None = None,
    launch_secs: float = LAUNCH_SECS,
) -> TopologySnapshot:
    """Take a topology's snapshot.

    ``report`` is its topology master's response ``{"tasks": {id: ...}, "workers": {"node:port":
    ...}, "components": ..., "edges": ...}``, or ``None`` when it did not respond. ``errors`` are
    (component, error), newest first. ``launch_secs`` is ``nimbus.task.launch.secs``.
    """
    values: Mapping[str, Any] = report or {}
    errors = tuple(errors)
    statuses = TaskStatuses(view, topology, now_secs, launch_secs)
    tasks = _tasks(topology, values.get("tasks") or {}, statuses)
    components = _components(topology, tasks, values, multimap(errors), code)
    return TopologySnapshot(
        id=topology.id,
        name=topology.base.name,
        status=topology.base.status,
        now_secs=now_secs,
        uptime_secs=max(0, now_secs - topology.base.launch_time_secs),
        components=components,
        tasks=tasks,
        workers=tuple(workers_of(topology, report, now_secs=now_secs)),
        answered=report is not None,
        measured="components" in values,
        edges=_edges(components, code),
        errors=errors,
        changes=topology.assignment.history if topology.assignment is not None else (),
        timeout_secs=values.get("timeout_secs", _DEFAULT_TIMEOUT_SECS),
        report_secs=values.get("report_secs", _DEFAULT_REPORT_SECS),
    )


def _tasks(
    topology: TopologyView, entries: Mapping[str, Any], statuses: TaskStatuses
) -> dict[int, TaskSnapshot]:
    table = topology.tasks or TaskTable(components={})
    slots = topology_slots(topology)
    tasks: dict[int, TaskSnapshot] = {}
    for task, component in sorted(table.component_of().items()):
        worker = slots.get(task)
        entry = entries.get(str(task))
        tasks[task] = TaskSnapshot(
            id=task,
            component=component,
            kind=table.components[component].type,
            worker=worker,
            status=statuses.of(task, worker, entry),
            entry=entry,
        )
    return tasks


def _components(
    topology: TopologyView,
    tasks: Mapping[int, TaskSnapshot],
    report: Mapping[str, Any],
    errors: Mapping[str, list[TaskError]],
    code: Runnable | None,
) -> dict[str, ComponentSnapshot]:
    table = topology.tasks or TaskTable(components={})
    flows: Mapping[str, Any] = report.get("components") or {}
    edges: Mapping[str, Any] = report.get("edges") or {}
    fused = fused_components(code.spec, code.conf) if code is not None else {}
    components: dict[str, ComponentSnapshot] = {}
    for component, groups in executors_of(table, topology.base.executors).items():
        part = table.components[component]
        figures = flows.get(component) or {}
        components[component] = ComponentSnapshot(
            id=component,
            kind=part.type,
            tasks=tuple(tasks[task] for task in part.ids),
            executors=tuple(
                ExecutorSnapshot(component, part.type, tuple(tasks[task] for task in group))
                for group in groups
            ),
            parallelism=topology.base.executors.get(component, len(part.ids)),
            errors=tuple(errors.get(component, ())),
            flow=Flow(**{name: figures.get(name) for name in _FLOW}),
            inputs=edges.get(component) or {},
            fused_in=fused.get(component, ""),
        )
    return components


def _edges(components: Mapping[str, ComponentSnapshot], code: Runnable | None) -> dict[Edge, float]:
    edges: dict[Edge, float] = {}
    if code is not None:
        for target, _, part in code.spec.components():
            edges.update((Edge(item.component, target, item.stream), 0.0) for item in part.inputs)
    for target, part in components.items():
        for key, rate in part.inputs.items():
            source, stream = split_input(key)
            edges[Edge(source, target, stream)] = rate
    users = {name for name, part in components.items() if not part.is_system}
    return {
        edge: rate for edge, rate in edges.items() if edge.source in users and edge.target in users
    }
