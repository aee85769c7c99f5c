"""Tasks and executors of a snapshot, with their statistics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from storm_dagster.core.snapshot.statuses import TaskStatus
from storm_dagster.core.snapshot.windows import (
    WINDOWS,
    Kind,
    Totals,
    WindowStats,
    merge,
    read_totals,
    task_windows,
)
from storm_dagster.model.records import WorkerSlot

CAPACITY_WINDOW = "600"
"""Window of capacity and of the latencies of the present load."""

PartitionLag = tuple[float | None, float | None]
"""Records and seconds that a source is behind; ``None`` for a number that is unknown."""
_NUMBER = int | float | None
"""Types of the numbers of a :data:`PartitionLag`."""


@dataclass(frozen=True)
class TaskSnapshot:
    """One task of a topology."""

    id: int
    component: str
    kind: Kind
    worker: WorkerSlot | None
    """The worker of its slot; ``None`` while it has no slot."""
    status: TaskStatus
    entry: Mapping[str, Any] | None = field(default=None, repr=False)
    """The topology master's entry; ``None`` without a report.

    Readers use the properties.
    """

    @property
    def reported(self) -> bool:
        """True if the topology master has a report of the task."""
        return self.entry is not None

    @property
    def _values(self) -> Mapping[str, Any]:
        return self.entry or {}

    @property
    def uptime_secs(self) -> int:
        """Seconds since it was opened, as last reported."""
        return int(self._values.get("uptime_secs") or 0)

    @property
    def waiting(self) -> int:
        """Tuples in its queue."""
        return int(self._values.get("waiting") or 0)

    @property
    def rate(self) -> float | None:
        """Tuples per second over ten seconds; ``None`` if not measured."""
        return self._values.get("rate")

    @property
    def busy(self) -> float | None:
        """Share of ten seconds in ``execute``; ``None`` if not measured."""
        return self._values.get("busy")

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Newest values of ``report_metric``."""
        return self._values.get("metrics") or {}

    def stream_counts(self, name: str) -> Mapping[str, int]:
        """Output stream -> the count of that name, of all time.

        Empty if its worker does not report that count.
        """
        streams: Mapping[str, Any] = self._values.get("streams") or {}
        return streams.get(name) or {}

    @property
    def lag(self) -> float | None:
        """Its metric named ``lag``; ``None`` unless that is a number."""
        value = self.metrics.get("lag")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_number else None

    @property
    def lag_by_partition(self) -> dict[str, PartitionLag]:
        """Lag of the partitions that it reads; entries that are no lag are left out."""
        lags = self.metrics.get("lag_by_partition")
        if not isinstance(lags, Mapping):
            return {}
        # A user's component may report anything under this name.
        return {str(name): (lag[0], lag[1]) for name, lag in lags.items() if _is_lag(lag)}

    @cached_property
    def totals(self) -> Totals:
        """Statistics of all time."""
        return read_totals(self._values.get("stats") or {})

    @cached_property
    def windows(self) -> Mapping[str, WindowStats]:
        """Window -> statistics by stream, of all ``WINDOWS``."""
        return task_windows(self.entry, self.kind)


def _is_lag(lag: Any) -> bool:
    """True if the value has the form of a :data:`PartitionLag`."""
    if not isinstance(lag, list | tuple) or len(lag) != 2:
        return False
    return all(isinstance(number, _NUMBER) for number in lag)


def partition_lags(tasks: Iterable[TaskSnapshot]) -> dict[str, PartitionLag]:
    """Lag of the partitions that these tasks read, in order of their names."""
    lags: dict[str, PartitionLag] = {}
    for task in tasks:
        lags.update(task.lag_by_partition)
    return dict(sorted(lags.items()))


@dataclass(frozen=True)
class ExecutorSnapshot:
    """One executor: consecutive tasks of one component in one slot."""

    component: str
    kind: Kind
    tasks: tuple[TaskSnapshot, ...]

    @property
    def first(self) -> int:
        """Its first task."""
        return self.tasks[0].id

    @property
    def last(self) -> int:
        """Its last task."""
        return self.tasks[-1].id

    @property
    def id(self) -> str:
        """As Storm writes it: ``[1-2]``."""
        return f"[{self.first}-{self.last}]"

    @property
    def node(self) -> str | None:
        """Supervisor id; ``None`` while it is not placed."""
        worker = self.tasks[0].worker
        return worker.node if worker is not None else None

    @property
    def host(self) -> str:
        """Host; empty while it is not placed."""
        worker = self.tasks[0].worker
        return worker.host if worker is not None else ""

    @property
    def port(self) -> int:
        """Port of its slot; 0 while it is not placed."""
        worker = self.tasks[0].worker
        return worker.port if worker is not None else 0

    @property
    def reported(self) -> bool:
        """True if the topology master has a report of one of its tasks."""
        return any(task.reported for task in self.tasks)

    @property
    def uptime_secs(self) -> int:
        """Of its oldest task."""
        return max(task.uptime_secs for task in self.tasks)

    @cached_property
    def windows(self) -> Mapping[str, WindowStats]:
        """Window -> statistics of its tasks."""
        reported = [task for task in self.tasks if task.reported]
        windows: dict[str, WindowStats] = {}
        for name in WINDOWS:
            windows[name] = merge(task.windows[name] for task in reported)
        return windows

    @cached_property
    def capacity(self) -> float:
        """Share of time that a bolt's executor spent in ``execute``.

        It is 0 for a spout. It covers the last ten minutes, or its life if that is shorter.
        """
        if self.kind != "bolt" or not self.uptime_secs:
            return 0.0
        totals = self.windows[CAPACITY_WINDOW].totals(include_sys=True)
        # Tuples x milliseconds of each, by the milliseconds of the window.
        secs = min(int(CAPACITY_WINDOW), self.uptime_secs)
        return totals.executed * totals.execute_ms / (secs * 1000)
