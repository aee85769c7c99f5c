"""Snapshot of one running topology.

Pure: it is made of a view of the cluster, the topology master's response and the errors. The
submitted code adds edges without traffic and fused bolts. Formats and rules about a running
topology read this value, and neither the response nor the records.
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
from storm_dagster.core.snapshot.upgrades import FailedUpgrade, failed_upgrade
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
"""Timeout of tuple trees without a response that names it."""
_DEFAULT_REPORT_SECS = 3.0
"""Interval between reports of a worker without a response that names it."""


@dataclass(frozen=True)
class Flow:
    """Metrics of a component over the last ten seconds.

    ``None`` means that a metric is not measured. Rates are per second. ``capacity`` is the share of
    time of its busiest task in ``execute``, ``held`` the longest share of time that back pressure
    stopped one of its tasks. Latencies are of ``execute`` (bolts) or of whole trees (spouts). The
    names are those of the response.
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
"""Names of the metrics, in the response and in :class:`Flow`."""


@dataclass(frozen=True)
class ComponentSnapshot:
    """One component; its statistics are the sums of those of its tasks."""

    id: str
    kind: Kind
    tasks: tuple[TaskSnapshot, ...]
    executors: tuple[ExecutorSnapshot, ...]
    parallelism: int
    """Number of its executors by the topology's record."""
    errors: tuple[TaskError, ...] = ()
    """Newest first."""
    flow: Flow = field(default_factory=Flow)
    inputs: Mapping[str, float] = field(default_factory=dict)
    """Input ``component:stream`` with traffic -> tuples per second."""
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
        """Sum of its tasks' metrics named ``lag``; ``None`` without any."""
        lags = [task.lag for task in self.tasks if task.lag is not None]
        return sum(lags) if lags else None

    @cached_property
    def lag_by_partition(self) -> Mapping[str, PartitionLag]:
        """Lag of the partitions that its tasks read."""
        return partition_lags(self.tasks)

    @property
    def capacity(self) -> float:
        """Capacity of its busiest executor, as in Storm."""
        return max((executor.capacity for executor in self.executors), default=0.0)

    @cached_property
    def totals(self) -> Totals:
        """Statistics of all time."""
        return sum_totals(task.totals for task in self.tasks)

    @cached_property
    def windows(self) -> Mapping[str, WindowStats]:
        """Window -> statistics of all executors."""
        windows: dict[str, WindowStats] = {}
        for name in WINDOWS:
            windows[name] = merge(executor.windows[name] for executor in self.executors)
        return windows

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
    reported: bool
    """True if the topology master gave statistics; without them all are 0."""
    measured: bool = False
    """True if it gave rates; topology masters of the first release do not."""
    edges: Mapping[Edge, float] = field(default_factory=dict)
    """Tuples per second between components of users.

    Edges without traffic are included only with the submitted code.
    """
    errors: tuple[tuple[str, TaskError], ...] = ()
    """(component, error), newest first."""
    changes: tuple[AssignmentChange, ...] = ()
    """Of its assignment, newest first."""
    failed_upgrade: FailedUpgrade | None = None
    """Its newest upgrade, if a failure rolled it back."""
    timeout_secs: float = _DEFAULT_TIMEOUT_SECS
    """Time after which a tuple tree fails."""
    report_secs: float = _DEFAULT_REPORT_SECS
    """Interval between two reports of a worker."""

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
        """Slots that hold its tasks and have a live process."""
        return sum(1 for worker in self.workers if worker.pid is not None)

    @property
    def back_pressure(self) -> int:
        """Number of workers whose full queues make spouts wait."""
        return sum(worker.holds_spouts for worker in self.workers)

    @property
    def ackers(self) -> int:
        """Number of tasks that track tuple trees."""
        return len(self.components[ACKER].tasks) if ACKER in self.components else 0

    @property
    def master(self) -> WorkerSlot | None:
        """The topology master's worker; ``None`` while it has no slot."""
        part = self.components.get(TOPOLOGY_MASTER)
        return part.tasks[0].worker if part is not None and part.tasks else None

    @property
    def down(self) -> list[int]:
        """Tasks that are dead or have no slot."""
        return [task.id for task in self.tasks.values() if task.status in ("dead", "unassigned")]

    @property
    def metrics(self) -> dict[tuple[str, str], Mapping[str, Any]]:
        """(component, task) -> its metrics, in text order of the tasks."""
        tasks = sorted(self.tasks.values(), key=lambda task: str(task.id))
        return {(task.component, str(task.id)): task.metrics for task in tasks if task.metrics}

    def components_of(self, kind: Kind, include_sys: bool) -> list[ComponentSnapshot]:
        """Its spouts or bolts in order of their ids.

        Components of the system are included only with ``include_sys``.
        """
        parts = [part for _, part in sorted(self.components.items()) if part.kind == kind]
        return [part for part in parts if include_sys or not part.is_system]

    def totals(self, window: str, *, include_sys: bool = False) -> Totals:
        """Storm's totals of a topology in a window.

        Tuples are counted of all components, acks, failures and latency of spouts.
        """
        of_components: list[Totals] = []
        of_spouts: list[Totals] = []
        for part in self.components.values():
            if part.is_system and not include_sys:
                continue
            totals = part.windows[window].totals(include_sys=include_sys)
            of_components.append(totals)
            if part.kind == "spout":
                of_spouts.append(totals)
        spouts = sum_totals(of_spouts)
        return Totals(
            emitted=sum(totals.emitted for totals in of_components),
            transferred=sum(totals.transferred for totals in of_components),
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
    (component, error), newest first. ``code`` adds edges without traffic and fused bolts.
    ``launch_secs`` is ``nimbus.task.launch.secs``.
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
        reported=report is not None,
        measured="components" in values,
        edges=_edges(components, code),
        errors=errors,
        changes=topology.assignment.history if topology.assignment is not None else (),
        failed_upgrade=failed_upgrade(view, topology),
        timeout_secs=values.get("timeout_secs", _DEFAULT_TIMEOUT_SECS),
        report_secs=values.get("report_secs", _DEFAULT_REPORT_SECS),
    )


def _tasks(
    topology: TopologyView, entries: Mapping[str, Any], statuses: TaskStatuses
) -> dict[int, TaskSnapshot]:
    """Task -> its snapshot, ascending; ``entries`` are the response's, by task id as text."""
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
    """Component -> its snapshot, of users and of the system.

    ``tasks`` has all tasks of the topology, ``report`` is the topology master's response or empty,
    ``errors`` are by component, newest first.
    """
    table = topology.tasks or TaskTable(components={})
    flows: Mapping[str, Any] = report.get("components") or {}
    edges: Mapping[str, Any] = report.get("edges") or {}
    fused = fused_components(code.spec, code.conf) if code is not None else {}
    components: dict[str, ComponentSnapshot] = {}
    for component, groups in executors_of(table, topology.base.executors).items():
        part = table.components[component]
        flow = flows.get(component) or {}
        executors: list[ExecutorSnapshot] = []
        for group in groups:
            members = tuple(tasks[task] for task in group)
            executors.append(ExecutorSnapshot(component, part.type, members))
        components[component] = ComponentSnapshot(
            id=component,
            kind=part.type,
            tasks=tuple(tasks[task] for task in part.ids),
            executors=tuple(executors),
            parallelism=topology.base.executors.get(component, len(part.ids)),
            errors=tuple(errors.get(component, ())),
            flow=Flow(**{name: flow.get(name) for name in _FLOW}),
            inputs=edges.get(component) or {},
            fused_in=fused.get(component, ""),
        )
    return components


def _edges(components: Mapping[str, ComponentSnapshot], code: Runnable | None) -> dict[Edge, float]:
    """Edge between components of users -> tuples per second.

    With the submitted code, edges without traffic are included with 0.
    """
    edges: dict[Edge, float] = {}
    if code is not None:
        for target, _, part in code.spec.components():
            for item in part.inputs:
                edges[Edge(item.component, target, item.stream)] = 0.0
    for target, part in components.items():
        for key, rate in part.inputs.items():
            source, stream = split_input(key)
            edges[Edge(source, target, stream)] = rate
    users = {name for name, part in components.items() if not part.is_system}
    return {
        edge: rate for edge, rate in edges.items() if edge.source in users and edge.target in users
    }
