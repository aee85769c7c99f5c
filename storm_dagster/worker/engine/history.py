"""History of a topology in its master: what flows now, and rings of figures for an hour and for a
day.

Figures come from the counters that workers report anyway, as differences over the last ten seconds
of each worker's own clock. The rings end with the process of the topology master: a picture made of
them has a gap then.
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
"""Of a row, after its time. Per second: tuples that bolts executed and spouts emitted, acks,
failures. Latency of execute (bolts) or of whole trees (spouts). Shares of time: of the busiest task
in execute, of the task held back longest. Tuples in queues. Sum of the metrics named lag.
"""

_WINDOW_SECS = 10.0
_SILENT_SECS = 15.0
"""A worker without a report for this long has no rates."""
_RINGS = {False: (10, 360), True: (300, 288)}
"""For an hour, and for a day: seconds of a row, number of rows."""
_MOST_COMPONENTS = 64
"""Components with rings of their own; of a larger topology the first by name, beside the whole."""
_MOST_STARTS = 99
"""Restarts of a slot that are remembered; further ones push out the oldest."""
_NONE = (0,) * 7
Figures = dict[str, Any]


class _Mark(NamedTuple):
    """Counters of one worker at one time of its own clock."""

    pid: int
    secs: float
    cpu_secs: float
    received: float
    tasks: dict[str, tuple[int, ...]]
    """Executed, emitted, acked, failed, nanoseconds of sampled tuples, number of these,
    milliseconds held back.
    """
    buckets: dict[str, Buckets]
    """By component."""
    report: Mapping[str, TaskReport]


def _mark(report: WorkerReport, received: float) -> _Mark:
    tasks: dict[str, tuple[int, ...]] = {}
    found: dict[str, list[Buckets]] = {}
    for task, one in report.tasks.items():
        if one.component.startswith("__"):
            continue
        emitted = sum(
            number
            for name, number in one.streams.get("emitted", {}).items()
            if not name.startswith("__")
        )
        counts = (int(one.stats.get(name, 0)) for name in ("acked", "failed"))
        tasks[task] = (
            sum(_inputs(one).values()),
            emitted,
            *counts,
            one.busy_ns,
            one.timed,
            one.held_ms,
        )
        kinds = one.latencies.get(":all-time", {})
        found.setdefault(one.component, []).extend(
            kinds.get("complete", kinds.get("execute", {})).values()
        )
    secs = report.system.get("uptime_ms", report.uptime_secs * 1000) / 1000
    buckets = {name: sum_buckets(parts) for name, parts in found.items()}
    return _Mark(
        report.pid,
        secs,
        report.system.get("cpu_ms", 0) / 1000,
        received,
        tasks,
        buckets,
        report.tasks,
    )


def _inputs(task: TaskReport) -> dict[str, int]:
    """What a task executed, by the input ``component:stream``, without those of the system."""
    executed = task.streams.get("executed", {})
    return {
        key: number
        for key, number in executed.items()
        if not key.startswith("__") and ":__" not in key
    }


class TopologyHistory:
    """Rates and rings of one topology. Used only by the loop. ``now`` is of a
    ``ListeningClock``.
    """

    def __init__(self) -> None:
        self._marks: dict[str, deque[_Mark]] = {}
        self._starts: dict[str, list[float]] = {}
        """Slot -> when a new process took the place of another one there."""
        self._rows: dict[tuple[str, bool], deque[list[Any]]] = {}
        self._ends: dict[bool, int] = {}
        self._sums: dict[str, list[Figures]] = {}
        """Component -> its figures since the last row of the day's ring."""

    def receive(self, key: str, report: WorkerReport, now: float) -> None:
        """Take the counters of the worker in slot ``key``."""
        marks, mark = self._marks.setdefault(key, deque(maxlen=100)), _mark(report, now)
        if marks and marks[-1].pid != mark.pid:
            marks.clear()
            self._starts[key] = [*self._starts.get(key, [])[-_MOST_STARTS:], now]
        if not marks and mark.secs < 60:
            # Seen from its start: all its counters began at 0.
            marks.append(_Mark(mark.pid, 0.0, 0.0, now, {}, {}, {}))
        marks.append(mark)
        while len(marks) > 2 and mark.secs - marks[1].secs >= _WINDOW_SECS:
            marks.popleft()

    def forget(self, wanted: Collection[str]) -> None:
        """Drop the counters of slots that are no longer of the topology."""
        self._marks = {key: marks for key, marks in self._marks.items() if key in wanted}
        self._starts = {key: starts for key, starts in self._starts.items() if key in wanted}

    def restarts(self, key: str, now: float) -> int:
        """How often a process of the slot was replaced in the last ten minutes."""
        return sum(1 for at in self._starts.get(key, ()) if now - at < 600.0)

    def flow(self, now: float) -> Figures:
        """``{"components": {id: figures by column, and "lag_rate"}, "tasks": {id: {"rate",
        "busy"}}, "edges": {id: {input: rate}}, "cpu": {slot: cores}}``.
        """
        parts: dict[str, Figures] = {}
        tasks: dict[str, Figures] = {}
        edges: dict[str, dict[str, float]] = {}
        cpu: dict[str, float] = {}
        for slot, marks in self._marks.items():
            old, new = marks[0], marks[-1]
            secs = new.secs - old.secs
            if secs <= 0 or now - new.received > _SILENT_SECS:
                continue
            cpu[slot] = _short((new.cpu_secs - old.cpu_secs) / secs)
            for task, counters in new.tasks.items():
                one, base = new.report[task], old.tasks.get(task, _NONE)
                if any(a < b for a, b in zip(counters, base, strict=True)):
                    base = _NONE
                since = (a - b for a, b in zip(counters, base, strict=True))
                executed, emitted, acked, failed, busy, timed, held = since
                part = parts.setdefault(one.component, _empty())
                rate = (executed or emitted) / secs
                share = executed * busy / timed / 1e9 / secs if timed and executed else 0.0
                tasks[task] = {"rate": _short(rate), "busy": _short(share)}
                for name, number in (
                    ("rate", rate),
                    ("acked", acked / secs),
                    ("failed", failed / secs),
                ):
                    part[name] += number
                part["capacity"] = max(part["capacity"], share)
                part["held"] = max(part["held"], min(1.0, held / 1000 / secs))
                part["waiting"] += one.waiting
                lag = one.metrics.get("lag")
                if isinstance(lag, int | float) and not isinstance(lag, bool):
                    part["lag"] = (part["lag"] or 0) + lag
                former = _inputs(old.report[task]) if base is not _NONE else {}
                for key, number in _inputs(one).items():
                    inputs = edges.setdefault(one.component, {})
                    inputs[key] = inputs.get(key, 0.0) + max(0, number - former.get(key, 0)) / secs
            for component, buckets in new.buckets.items():
                before = old.buckets.get(component, {})
                more = {
                    at: number - before.get(at, 0)
                    for at, number in buckets.items()
                    if number > before.get(at, 0)
                }
                part = parts.setdefault(component, _empty())
                part["buckets"] = sum_buckets([part["buckets"], more])
        return {
            "components": {
                name: {**_shown(part), "lag_rate": self._lag_rate(name)}
                for name, part in parts.items()
            },
            "tasks": tasks,
            "edges": {
                name: {key: _short(rate) for key, rate in found.items()}
                for name, found in edges.items()
            },
            "cpu": cpu,
            "parts": parts,
        }

    def summary(self) -> dict[str, float]:
        """The newest row of the whole topology in short; any thread."""
        ring = self._rows.get(("", False))
        newest = dict(zip(COLUMNS, ring[-1][1:], strict=True)) if ring else {}
        chosen = ("rate", "failed", "p95_ms", "capacity", "lag")
        found = {name: newest[name] for name in chosen if newest.get(name) is not None}
        return found if (rate := self._lag_rate("")) is None else {**found, "lag_rate": rate}

    def trend(self) -> str:
        """The rates of the last hour as :class:`TaskBeats` has them; any thread."""
        rows = list(self._rows.get(("", False), ()))
        by_age = multimap((rows[-1][0] // 120 - at // 120, rate) for at, rate, *_ in rows)
        means = [
            sum(found) / len(found) if (found := by_age.get(age)) else None
            for age in reversed(range(30))
        ]
        most = max((mean for mean in means if mean), default=1.0)
        return (
            "".join("." if mean is None else f"{round(15 * mean / most):x}" for mean in means)
            if rows
            else ""
        )

    def _lag_rate(self, component: str) -> float | None:
        """By how much the lag (``""``: of the whole topology) grew per second in the last minute;
        ``None`` when that is not known.
        """
        lag = 1 + COLUMNS.index("lag")
        rows = [
            row for row in list(self._rows.get((component, False), ()))[-7:] if row[lag] is not None
        ]
        if len(rows) < 3 or rows[-1][0] - rows[0][0] > 120:
            return None
        return _short((rows[-1][lag] - rows[0][lag]) / (rows[-1][0] - rows[0][0]))

    def advance(self, now: float, epoch_secs: float, spouts: Collection[str]) -> None:
        """Add the rows that are due; call it every few seconds."""
        if self._ends.get(False) == int(epoch_secs // 10):
            return
        parts: dict[str, Figures] = self.flow(now)["parts"]
        chosen = {name: parts[name] for name in sorted(parts)[:_MOST_COMPONENTS]}
        for name, part in {**chosen, "": _whole(parts, spouts)}.items():
            self._sums.setdefault(name, []).append(part)
            self._add(name, False, epoch_secs, part)
        self._ends[False] = int(epoch_secs // 10)
        day = int(epoch_secs // 300)
        if self._ends.setdefault(True, day) != day:
            for name, sums in self._sums.items():
                self._add(name, True, epoch_secs, _mean(sums))
            self._ends[True], self._sums = day, {}

    def _add(self, component: str, day: bool, epoch_secs: float, part: Figures) -> None:
        shown = _shown(part)
        if (component, day) not in self._rows and len(self._rows) > 4 * _MOST_COMPONENTS:
            return  # A peer makes names up.
        ring = self._rows.setdefault((component, day), deque(maxlen=_RINGS[day][1]))
        ring.append([int(epoch_secs), *(shown[name] for name in COLUMNS)])

    def answer(self, question: HistoryQuery) -> dict[str, Any]:
        """Rows of a component, or of the whole topology: ``{"columns", "interval", "rows"}``,
        oldest first.
        """
        rows = self._rows.get((question.component, question.day), ())
        return {
            "columns": ["time", *COLUMNS],
            "interval": _RINGS[question.day][0],
            "rows": list(rows),
        }


def _empty() -> Figures:
    return {**dict.fromkeys(COLUMNS, 0.0), "lag": None, "buckets": {}}


def _shown(part: Figures) -> Figures:
    latency = percentiles(part["buckets"])
    figures = {name: latency.get(name) if name.endswith("_ms") else part[name] for name in COLUMNS}
    return {name: None if number is None else _short(number) for name, number in figures.items()}


def _whole(parts: Mapping[str, Figures], spouts: Collection[str]) -> Figures:
    """The topology: rates, failures and latency are those of its spouts."""
    first = [part for name, part in parts.items() if name in spouts]
    whole = _mean(first) if first else _empty()
    for name in ("rate", "acked", "failed"):
        whole[name] = sum(part[name] for part in first)
    lags = [part["lag"] for part in parts.values() if part["lag"] is not None]
    whole["lag"] = sum(lags) if lags else None
    whole["waiting"] = sum(part["waiting"] for part in parts.values())
    for name in ("capacity", "held"):
        whole[name] = max((part[name] for part in parts.values()), default=0.0)
    return whole


def _mean(parts: list[Figures]) -> Figures:
    """Means over time; the latency is of all samples, which no mean of percentiles would be."""
    mean = {name: sum(part[name] or 0.0 for part in parts) / len(parts) for name in COLUMNS}
    return {
        **mean,
        "lag": parts[-1]["lag"],
        "buckets": sum_buckets(part["buckets"] for part in parts),
    }


def _short(number: float) -> float:
    """Four digits; of a large number all whole ones, because differences are taken (of a lag)."""
    return float(f"{number:.4g}") if abs(number) < 1000 else float(round(number))
