"""Reports of a local run: what flowed in its components, in total and since the last report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from storm_dagster.model.fusion import FUSED
from storm_dagster.model.latency import (
    Latencies,
    merge_latencies,
    percentiles,
    subtract_latencies,
    sum_buckets,
)
from storm_dagster.model.wire import TaskReport

_LATENCY_OF = {"spout": "complete", "bolt": "execute"}
"""Kind of component -> the latency that is shown.

Of a spout the time from emit to ack, of a bolt the time of one call of ``process``.
"""


@dataclass(frozen=True)
class ComponentCounts:
    """Counts of a component since the start of the run, over all of its tasks."""

    kind: str
    """``spout`` or ``bolt``."""
    tasks: int = 0
    running: int = 0
    """Number of tasks whose component is initialized."""
    emitted: int = 0
    executed: int = 0
    acked: int = 0
    failed: int = 0
    errors: int = 0
    waiting: int = 0
    """Number of tuples in the queues of its tasks now."""
    latencies: Latencies = field(default_factory=dict)


@dataclass(frozen=True)
class ComponentRow:
    """A component in a report."""

    component: str
    counts: ComponentCounts
    emitted_per_sec: float
    executed_per_sec: float
    latency: Mapping[str, float]
    """``p50_ms``, ``p95_ms``, ``p99_ms`` since the last report; empty without a sample."""

    def to_document(self) -> dict[str, Any]:
        """Return the row as JSON."""
        counts = self.counts
        return {
            "component": self.component,
            "type": counts.kind,
            "tasks": counts.tasks,
            "running": counts.running,
            "emitted": counts.emitted,
            "emitted_per_sec": round(self.emitted_per_sec, 1),
            "executed": counts.executed,
            "executed_per_sec": round(self.executed_per_sec, 1),
            "acked": counts.acked,
            "failed": counts.failed,
            "errors": counts.errors,
            "waiting": counts.waiting,
            **{key: value for key, value in self.latency.items() if key != "sampled"},
        }


@dataclass(frozen=True)
class RunReport:
    """State of a local run at one moment."""

    topology: str
    seconds: float
    """Time since the start of the run."""
    rows: Sequence[ComponentRow]
    errors: int
    """Number of errors that tasks reported."""
    events: int
    """Number of reports to Dagster, which were printed."""
    last: Mapping[str, Sequence[Mapping[str, Any]]]
    """Shown component -> its last tuples, oldest first, each with its origin and its values."""
    end: str = ""
    """Reason for the end of the run; empty while it runs."""

    @property
    def is_starting(self) -> bool:
        """True while a task is not initialized."""
        return any(row.counts.running < row.counts.tasks for row in self.rows)

    def to_document(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {
            "topology": self.topology,
            "seconds": round(self.seconds, 1),
            "components": [row.to_document() for row in self.rows],
            "errors": self.errors,
            "events": self.events,
            "last": self.last,
            "end": self.end or None,
        }


def count_components(
    reports: Mapping[str, TaskReport], kinds: Mapping[str, str]
) -> dict[str, ComponentCounts]:
    """Add up the reports of tasks by component.

    ``kinds``: component -> ``spout`` or ``bolt``, in the order of the result. Tasks of other
    components (the acker, the bolt of the display) are left out.
    """
    tasks_of: dict[str, list[TaskReport]] = {component: [] for component in kinds}
    for report in reports.values():
        if report.component in tasks_of:
            tasks_of[report.component].append(report)
    return {
        component: _sum_reports(tasks, kinds[component]) for component, tasks in tasks_of.items()
    }


def _sum_reports(tasks: Sequence[TaskReport], kind: str) -> ComponentCounts:
    def total(name: str) -> int:
        return int(sum(task.stats.get(name, 0) for task in tasks))

    return ComponentCounts(
        kind=kind,
        tasks=len(tasks),
        running=sum(task.status == "running" for task in tasks),
        emitted=total("emitted"),
        executed=total("executed"),
        acked=total("acked"),
        failed=total("failed"),
        errors=sum(task.errors for task in tasks),
        waiting=sum(task.waiting for task in tasks),
        latencies=merge_latencies(task.latencies.get(":all-time", {}) for task in tasks),
    )


def compare_counts(
    now: Mapping[str, ComponentCounts], before: Mapping[str, ComponentCounts], secs: float
) -> list[ComponentRow]:
    """Return the rows of a report: the counts ``now``, and rates since ``before``.

    ``secs`` is the time between both. A task that restarts keeps its counts, so they never
    decrease.
    """
    rows: list[ComponentRow] = []
    for component, counts in now.items():
        former = before.get(component, ComponentCounts(counts.kind))
        emitted = counts.emitted - former.emitted
        executed = counts.executed - former.executed
        latencies = subtract_latencies(counts.latencies, former.latencies)
        samples = latencies.get(_LATENCY_OF[counts.kind], {})
        buckets = [part for stream, part in samples.items() if not stream.startswith(FUSED)]
        row = ComponentRow(
            component=component,
            counts=counts,
            emitted_per_sec=emitted / secs if secs > 0 else 0.0,
            executed_per_sec=executed / secs if secs > 0 else 0.0,
            latency=percentiles(sum_buckets(buckets)),
        )
        rows.append(row)
    return rows
