"""History of a topology in its master.

It has the current rates, and rings of metrics for an hour and a day. Metrics come from the counters
that workers report anyway, as differences over the last ten seconds of each worker's own clock. The
rings end with the process of the topology master: a picture of them has a gap then.
"""

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from storm_dagster.model.latency import Buckets, percentiles, sum_buckets
from storm_dagster.model.multimap import multimap
from storm_dagster.model.wire import HistoryQuery, TaskReport, WorkerReport

COLUMNS = (
    "rate",
    "acked",
    "failed",
    "p50_ms",
    "p95_ms",
    "p99_ms",
    "capacity",
    "held",
    "waiting",
    "lag",
)
"""Columns of a row, after its time.

Per second: tuples that bolts executed and spouts emitted, acks, failures. Latency of execute
(bolts) or of whole trees (spouts). Shares of time: of the busiest task in execute, of the task held
back longest. Tuples in queues. Sum of the metrics named lag.
"""

_WINDOW_SECS = 10.0
_SILENT_SECS = 15.0
"""A worker without a report for this long has no rates."""
_RINGS = {False: (10, 360), True: (300, 288)}
"""True for the day's ring, False for the hour's -> (seconds of a row, number of rows)."""
_MAX_COMPONENTS = 64
"""Components with separate rings; of a larger topology the first by name, beside the whole."""
_MAX_STARTS = 99
"""Remembered restarts of a slot; each further one pushes out the oldest."""
_NONE = (0,) * 7
"""Counters of a task that has just started. Compared by identity, too."""
Metrics = dict[str, Any]
"""Metrics of a task, a component or the topology, by :data:`COLUMNS` and further names."""


class _Mark(NamedTuple):
    """Counters of one worker at one time of its clock."""

    pid: int
    secs: float
    """Uptime of the worker, by its own clock."""
    cpu_secs: float
    """Processor time of the worker since its start."""
    received: float
    """Time of receipt, by the topology master's clock."""
    tasks: dict[str, tuple[int, ...]]
    """Executed, emitted, acked, failed, nanoseconds of sampled tuples, number of these,
    milliseconds held back.
    """
    buckets: dict[str, Buckets]
    """Execute latencies of bolts, and complete latencies of spouts, by component."""
    report: Mapping[str, TaskReport]
    started_for: str = ""
    """Code and requested restarts for which its process was started; empty: not known."""


def _mark(report: WorkerReport, received: float) -> _Mark:
    """Take the counters of a report, without system tasks and system streams."""
    tasks: dict[str, tuple[int, ...]] = {}
    latencies: dict[str, list[Buckets]] = {}
    for task, task_report in report.tasks.items():
        if task_report.component.startswith("__"):
            continue
        emitted = 0
        for stream, number in task_report.streams.get("emitted", {}).items():
            if not stream.startswith("__"):
                emitted += number
        tasks[task] = (
            sum(_inputs(task_report).values()),
            emitted,
            int(task_report.stats.get("acked", 0)),
            int(task_report.stats.get("failed", 0)),
            task_report.busy_ns,
            task_report.timed,
            task_report.held_ms,
        )
        kinds = task_report.latencies.get(":all-time", {})
        buckets = kinds.get("complete", kinds.get("execute", {}))
        latencies.setdefault(task_report.component, []).extend(buckets.values())
    return _Mark(
        pid=report.pid,
        secs=report.system.get("uptime_ms", report.uptime_secs * 1000) / 1000,
        cpu_secs=report.system.get("cpu_ms", 0) / 1000,
        received=received,
        tasks=tasks,
        buckets={name: sum_buckets(parts) for name, parts in latencies.items()},
        report=report.tasks,
        started_for=report.started_for,
    )


def _inputs(task: TaskReport) -> dict[str, int]:
    """Executed tuples of a task by input ``component:stream``.

    Without inputs of the system.
    """
    executed = task.streams.get("executed", {})
    return {
        key: number
        for key, number in executed.items()
        if not key.startswith("__") and ":__" not in key
    }


class TopologyHistory:
    """Rates and rings of one topology.

    Used only by the loop. ``now`` is a time of a ``ListeningClock``.
    """

    def __init__(self) -> None:
        self._marks: dict[str, deque[_Mark]] = {}
        """Slot -> its counters, oldest first: rates are differences of the last and the first."""
        self._starts: dict[str, list[float]] = {}
        """Slot -> times at which a new process replaced another one there."""
        self._rows: dict[tuple[str, bool], deque[list[Any]]] = {}
        """(component or ``""`` for the whole, key of ``_RINGS``) -> rows, oldest first."""
        self._ends: dict[bool, int] = {}
        """Key of ``_RINGS`` -> number of the interval since 1970 in which the last row was added.
        """
        self._sums: dict[str, list[Metrics]] = {}
        """Component -> its metrics since the last row of the day's ring."""

    def receive(self, key: str, report: WorkerReport, now: float) -> None:
        """Take the counters of the worker in slot ``key``."""
        marks = self._marks.setdefault(key, deque(maxlen=100))
        mark = _mark(report, now)
        if marks and marks[-1].pid != mark.pid:
            # A process for other code, or for a requested restart, was planned.
            is_planned = marks[-1].started_for != mark.started_for
            marks.clear()
            if not is_planned:
                starts = self._starts.get(key, [])[-_MAX_STARTS:]
                self._starts[key] = [*starts, now]
        if not marks and mark.secs < 60:
            # A new process: all its counters began at 0.
            marks.append(_Mark(mark.pid, 0.0, 0.0, now, {}, {}, {}, mark.started_for))
        marks.append(mark)
        # The first mark is the newest one that is old enough.
        while len(marks) > 2 and mark.secs - marks[1].secs >= _WINDOW_SECS:
            marks.popleft()

    def forget(self, slots: Collection[str]) -> None:
        """Drop the counters of all slots but those of the topology."""
        self._marks = {key: marks for key, marks in self._marks.items() if key in slots}
        self._starts = {key: starts for key, starts in self._starts.items() if key in slots}

    def restarts(self, key: str, now: float) -> int:
        """Number of replaced processes of a slot in the last ten minutes.

        Starts that an upgrade, an update or a restart has requested are left out.
        """
        return sum(1 for at in self._starts.get(key, ()) if now - at < 600.0)

    def flow(self, now: float) -> Metrics:
        """Return the current metrics.

        ``{"components": {id: metrics by column, and "lag_rate"}, "tasks": {id: {"rate",
        "busy"}}, "edges": {id: {input: rate}}, "cpu": {slot: cores}, "parts": {id: metrics that
        are not rounded, with "buckets"}}``. Workers without a recent report are left out.
        """
        parts: dict[str, Metrics] = {}
        tasks: dict[str, Metrics] = {}
        edges: dict[str, dict[str, float]] = {}
        cpu: dict[str, float] = {}
        for slot, marks in self._marks.items():
            old = marks[0]
            new = marks[-1]
            secs = new.secs - old.secs
            if secs <= 0 or now - new.received > _SILENT_SECS:
                continue
            cpu[slot] = _round((new.cpu_secs - old.cpu_secs) / secs)
            for task in new.tasks:
                component = new.report[task].component
                part = parts.setdefault(component, _empty())
                tasks[task] = _add_task(part, task, old, new)
                _add_inputs(edges, task, old, new)
            for component, buckets in new.buckets.items():
                part = parts.setdefault(component, _empty())
                more = _new_samples(buckets, old.buckets.get(component, {}))
                part["buckets"] = sum_buckets([part["buckets"], more])
        components: dict[str, Metrics] = {}
        for name, part in parts.items():
            components[name] = {**_rounded_metrics(part), "lag_rate": self._lag_rate(name)}
        rounded_edges: dict[str, dict[str, float]] = {}
        for name, rates in edges.items():
            rounded_edges[name] = {key: _round(rate) for key, rate in rates.items()}
        return {
            "components": components,
            "tasks": tasks,
            "edges": rounded_edges,
            "cpu": cpu,
            "parts": parts,
        }

    def summary(self) -> dict[str, float]:
        """Return metrics of the topology's newest row; any thread."""
        ring = self._rows.get(("", False))
        newest = dict(zip(COLUMNS, ring[-1][1:], strict=True)) if ring else {}
        metrics: dict[str, float] = {}
        for name in ("rate", "failed", "p95_ms", "capacity", "lag"):
            if newest.get(name) is not None:
                metrics[name] = newest[name]
        lag_rate = self._lag_rate("")
        if lag_rate is not None:
            metrics["lag_rate"] = lag_rate
        return metrics

    def trend(self) -> str:
        """Return the rates of the last hour; any thread. Empty before the first row.

        The form is that of :class:`TaskBeats`.
        """
        rows = list(self._rows.get(("", False), ()))
        if not rows:
            return ""
        # A digit is the mean rate of two minutes; the last one is that of the newest row.
        newest = rows[-1][0] // 120
        rates_by_age = multimap((newest - at // 120, rate) for at, rate, *_ in rows)
        means: list[float | None] = []
        for age in reversed(range(30)):
            rates = rates_by_age.get(age)
            means.append(sum(rates) / len(rates) if rates else None)
        highest = max((mean for mean in means if mean), default=1.0)
        digits = ["." if mean is None else f"{round(15 * mean / highest):x}" for mean in means]
        return "".join(digits)

    def _lag_rate(self, component: str) -> float | None:
        """Return the growth of the lag per second in the last minute.

        ``""`` is the whole topology. ``None`` if the growth is not known.
        """
        # A row begins with its time. Seven rows of ten seconds are a minute.
        lag = 1 + COLUMNS.index("lag")
        newest = list(self._rows.get((component, False), ()))[-7:]
        rows = [row for row in newest if row[lag] is not None]
        if len(rows) < 3:
            return None
        secs = rows[-1][0] - rows[0][0]
        if secs > 120:
            # The history has a gap.
            return None
        return _round((rows[-1][lag] - rows[0][lag]) / secs)

    def advance(self, now: float, epoch_secs: float, spouts: Collection[str]) -> None:
        """Add the rows that are due; call it every few seconds.

        ``now``: time of the reports' clock; ``epoch_secs``: seconds since 1970, the time of the
        rows; ``spouts``: the components whose rates are those of the topology.
        """
        if self._ends.get(False) == int(epoch_secs // 10):
            return
        parts: dict[str, Metrics] = self.flow(now)["parts"]
        chosen = {name: parts[name] for name in sorted(parts)[:_MAX_COMPONENTS]}
        chosen[""] = _whole(parts, spouts)
        for name, part in chosen.items():
            self._sums.setdefault(name, []).append(part)
            self._add(name, False, epoch_secs, part)
        self._ends[False] = int(epoch_secs // 10)
        # The first row of the day's ring ends with the interval in which the process started.
        interval = int(epoch_secs // 300)
        if self._ends.setdefault(True, interval) != interval:
            for name, sums in self._sums.items():
                self._add(name, True, epoch_secs, _mean(sums))
            self._ends[True] = interval
            self._sums = {}

    def _add(self, component: str, day: bool, epoch_secs: float, part: Metrics) -> None:
        """Add a row to a ring; the oldest row of a full ring is dropped."""
        metrics = _rounded_metrics(part)
        if (component, day) not in self._rows and len(self._rows) > 4 * _MAX_COMPONENTS:
            return  # A peer invents names.
        ring = self._rows.setdefault((component, day), deque(maxlen=_RINGS[day][1]))
        ring.append([int(epoch_secs), *(metrics[name] for name in COLUMNS)])

    def rows(self, query: HistoryQuery) -> dict[str, Any]:
        """Return the rows of a component or of the topology.

        The oldest row is first. ``{"columns", "interval", "rows"}``.
        """
        rows = self._rows.get((query.component, query.day), ())
        return {
            "columns": ["time", *COLUMNS],
            "interval": _RINGS[query.day][0],
            "rows": list(rows),
        }


def _add_task(part: Metrics, task: str, old: _Mark, new: _Mark) -> Metrics:
    """Add the rates of a task to ``part``, those of its component.

    Returns the task's own ``{"rate", "busy"}``.
    """
    report = new.report[task]
    counters = new.tasks[task]
    base = _base_counters(task, old, new)
    differences = [count - former for count, former in zip(counters, base, strict=True)]
    executed, emitted, acked, failed, busy_ns, timed, held_ms = differences
    secs = new.secs - old.secs
    rate = (executed or emitted) / secs
    busy = executed * busy_ns / timed / 1e9 / secs if timed and executed else 0.0
    part["rate"] += rate
    part["acked"] += acked / secs
    part["failed"] += failed / secs
    part["capacity"] = max(part["capacity"], busy)
    part["held"] = max(part["held"], min(1.0, held_ms / 1000 / secs))
    part["waiting"] += report.waiting
    lag = report.metrics.get("lag")
    if isinstance(lag, int | float) and not isinstance(lag, bool):
        part["lag"] = (part["lag"] or 0) + lag
    return {"rate": _round(rate), "busy": _round(busy)}


def _base_counters(task: str, old: _Mark, new: _Mark) -> tuple[int, ...]:
    """Counters to subtract from those of a task in ``new``.

    ``_NONE`` for a task that restarted, so that a counter is lower, or that ``old`` lacks.
    """
    base = old.tasks.get(task, _NONE)
    pairs = zip(new.tasks[task], base, strict=True)
    return _NONE if any(count < former for count, former in pairs) else base


def _add_inputs(edges: dict[str, dict[str, float]], task: str, old: _Mark, new: _Mark) -> None:
    """Add the rates of a task's inputs to those of its component."""
    report = new.report[task]
    is_continued = _base_counters(task, old, new) is not _NONE
    former = _inputs(old.report[task]) if is_continued else {}
    secs = new.secs - old.secs
    for key, number in _inputs(report).items():
        rates = edges.setdefault(report.component, {})
        rates[key] = rates.get(key, 0.0) + max(0, number - former.get(key, 0)) / secs


def _new_samples(buckets: Buckets, former: Buckets) -> Buckets:
    """Samples that were added to ``former``."""
    return {
        at: number - former.get(at, 0)
        for at, number in buckets.items()
        if number > former.get(at, 0)
    }


def _empty() -> Metrics:
    """Metrics of no task; ``lag`` is ``None`` until a task reports it."""
    return {**dict.fromkeys(COLUMNS, 0.0), "lag": None, "buckets": {}}


def _rounded_metrics(part: Metrics) -> Metrics:
    """Metrics by column, rounded, with percentiles of the latency."""
    latency = percentiles(part["buckets"])
    metrics: Metrics = {}
    for name in COLUMNS:
        number = latency.get(name) if name.endswith("_ms") else part[name]
        metrics[name] = None if number is None else _round(number)
    return metrics


def _whole(parts: Mapping[str, Metrics], spouts: Collection[str]) -> Metrics:
    """Metrics of the topology.

    Rates, acks, failures and latency are those of its spouts; ``capacity`` and ``held`` are those
    of the worst component; ``waiting`` and ``lag`` are sums.
    """
    spout_parts = [part for name, part in parts.items() if name in spouts]
    topology = _mean(spout_parts) if spout_parts else _empty()
    for name in ("rate", "acked", "failed"):
        topology[name] = sum(part[name] for part in spout_parts)
    lags = [part["lag"] for part in parts.values() if part["lag"] is not None]
    topology["lag"] = sum(lags) if lags else None
    topology["waiting"] = sum(part["waiting"] for part in parts.values())
    for name in ("capacity", "held"):
        topology[name] = max((part[name] for part in parts.values()), default=0.0)
    return topology


def _mean(parts: list[Metrics]) -> Metrics:
    """Means over time; the lag is the newest one.

    The latency has all samples: a mean of percentiles is not a percentile.
    """
    mean: Metrics = {}
    for name in COLUMNS:
        mean[name] = sum(part[name] or 0.0 for part in parts) / len(parts)
    mean["lag"] = parts[-1]["lag"]
    mean["buckets"] = sum_buckets(part["buckets"] for part in parts)
    return mean


def _round(number: float) -> float:
    """Round to four digits, or to an integer if it is larger.

    Differences are taken of large numbers (of a lag), so they keep all their digits.
    """
    return float(f"{number:.4g}") if abs(number) < 1000 else float(round(number))
