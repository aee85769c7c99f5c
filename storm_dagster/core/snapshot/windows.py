"""Statistics by window and stream, read from the reports of a topology master.

A task reports exact counts of a window, and the emitted, transferred and executed tuples by stream.
The acked and failed tuples of a bolt and its latencies are reported for the whole task. With one
input they belong to it; with several inputs they are divided by the tuples executed from them. The
acks of a spout are divided in the same way by the tuples emitted on its streams.

A latency is a sum of nanoseconds over the tuples that it belongs to, and buckets of the sampled
tuples: both add up, so that a mean over several tasks is weighted by their tuples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from storm_dagster.model.latency import (
    Buckets,
    Latencies,
    merge_latencies,
    percentiles,
    read_latencies,
    sum_buckets,
)

ALL_TIME = ":all-time"
WINDOWS = ("600", "10800", "86400", ALL_TIME)
"""Storm's window names: seconds, and the whole life."""

Kind = Literal["spout", "bolt"]
Counts = Mapping[str, int]
"""Stream or input -> count, as :class:`WindowStats` keys it."""

_NANOS_PER_MILLI = 1_000_000


def check_window(window: str | None) -> str:
    """The window of that name; as in Storm, an unknown name means all time."""
    return window if window in WINDOWS else ALL_TIME


def is_system_name(name: str) -> bool:
    """True if a stream or component belongs to the system."""
    return name.startswith("__")


def split_input(key: str) -> tuple[str, str]:
    """(component, stream) of an input key ``component:stream``."""
    component, _, stream = key.rpartition(":")
    return component, stream


@dataclass(frozen=True)
class Totals:
    """Statistics of one window, summed over streams and tasks."""

    emitted: int = 0
    transferred: int = 0
    executed: int = 0
    acked: int = 0
    failed: int = 0
    execute_ns: int = 0
    """Time in ``execute`` of the executed tuples, in nanoseconds."""
    complete_ns: int = 0
    """Time to complete the acked tuple trees, in nanoseconds."""

    @property
    def execute_ms(self) -> float:
        """Mean milliseconds in ``execute``; 0 if no tuple was executed."""
        return _mean_ms(self.execute_ns, self.executed)

    @property
    def complete_ms(self) -> float:
        """Mean milliseconds to complete a tuple tree; 0 if none was acked."""
        return _mean_ms(self.complete_ns, self.acked)

    @property
    def failed_ratio(self) -> float:
        """Failed tuples by acked and failed ones; 0 without any."""
        ended = self.acked + self.failed
        return self.failed / ended if ended else 0.0


_SUMS = tuple(part.name for part in fields(Totals))
"""Names of the fields that add up; :class:`WindowStats` has the same by stream."""


def sum_totals(parts: Iterable[Totals]) -> Totals:
    """Add up the totals of tasks or components."""
    sums = dict.fromkeys(_SUMS, 0)
    for part in parts:
        for name in _SUMS:
            sums[name] += getattr(part, name)
    return Totals(**sums)


def read_totals(metrics: Mapping[str, Any]) -> Totals:
    """Totals of a task's report, which has counts and mean milliseconds.

    A field that the report lacks is 0.
    """
    executed = int(metrics.get("executed") or 0)
    acked = int(metrics.get("acked") or 0)
    return Totals(
        emitted=int(metrics.get("emitted") or 0),
        transferred=int(metrics.get("transferred") or 0),
        executed=executed,
        acked=acked,
        failed=int(metrics.get("failed") or 0),
        execute_ns=_mean_ns(metrics.get("execute_ms")) * executed,
        complete_ns=_mean_ns(metrics.get("complete_ms")) * acked,
    )


@dataclass(frozen=True)
class WindowStats:
    """Statistics of one window by stream.

    ``emitted`` and ``transferred`` are keyed by output stream. ``acked`` and ``failed`` are keyed
    by output stream for a spout and by input ``component:stream`` for a bolt, as ``executed`` and
    ``execute_ns``; ``complete_ns`` (spouts) by output stream.
    """

    emitted: Counts = field(default_factory=dict)
    transferred: Counts = field(default_factory=dict)
    executed: Counts = field(default_factory=dict)
    acked: Counts = field(default_factory=dict)
    failed: Counts = field(default_factory=dict)
    execute_ns: Counts = field(default_factory=dict)
    complete_ns: Counts = field(default_factory=dict)
    latencies: Latencies = field(default_factory=dict)
    """Of the sampled tuples; a bolt has ``execute``, a spout ``complete``."""

    def buckets(self, kind: str) -> Buckets:
        """Latency of that kind over all streams of users."""
        return sum_buckets(_of_users(self.latencies.get(kind, {})).values())

    def percentiles(self) -> dict[str, dict[str, float]]:
        """Kind of latency -> p50, p95 and p99 over all streams.

        Kinds without a sample are left out.
        """
        by_kind = {kind: percentiles(self.buckets(kind)) for kind in sorted(self.latencies)}
        return {kind: values for kind, values in by_kind.items() if values}

    def stream_percentiles(self, key: str) -> dict[str, dict[str, float]]:
        """As :meth:`percentiles`, of one stream."""
        by_kind: dict[str, dict[str, float]] = {}
        for kind, by_key in sorted(self.latencies.items()):
            values = percentiles(by_key.get(key, {}))
            if values:
                by_kind[kind] = values
        return by_kind

    def filter_system(self, include_sys: bool) -> WindowStats:
        """The statistics without the streams of the system.

        With ``include_sys``, all of them.
        """
        if include_sys:
            return self
        return replace(self, **{name: _of_users(getattr(self, name)) for name in _SUMS})

    @property
    def outputs(self) -> list[str]:
        """Output streams with an emitted or transferred tuple."""
        return sorted({*self.emitted, *self.transferred})

    @property
    def inputs(self) -> list[str]:
        """Inputs ``component:stream`` with an executed tuple."""
        return sorted(self.executed)

    def of(self, key: str) -> Totals:
        """The statistics of one stream or input; 0 where it has none."""
        return Totals(**{name: getattr(self, name).get(key, 0) for name in _SUMS})

    @property
    def execute_ms(self) -> dict[str, float]:
        """Input with a time -> mean milliseconds in ``execute``."""
        return _means_ms(self.execute_ns, self.executed)

    @property
    def complete_ms(self) -> dict[str, float]:
        """Output stream -> mean milliseconds to complete a tuple tree."""
        return _means_ms(self.complete_ns, self.acked)

    def totals(self, *, include_sys: bool = False) -> Totals:
        """Sums over the streams.

        Streams of the system count only with ``include_sys``.
        """
        part = self.filter_system(include_sys)
        return Totals(**{name: sum(getattr(part, name).values()) for name in _SUMS})


def latency_document(by_kind: Mapping[str, Any]) -> dict[str, Any]:
    """Latencies by kind for documents: ``process`` repeats ``execute``.

    A tuple is processed when its call returns; Storm's clients read both.
    """
    if "execute" not in by_kind:
        return dict(by_kind)
    return {**by_kind, "process": by_kind["execute"]}


def task_windows(entry: Mapping[str, Any] | None, kind: Kind) -> dict[str, WindowStats]:
    """Window -> statistics of one task.

    ``entry`` is the topology master's entry for it, ``None`` without a report.
    """
    if not entry:
        return {window: WindowStats() for window in WINDOWS}
    # A window that the entry lacks has the statistics of all time.
    lifetime = entry.get("streams") or {}
    by_window = {ALL_TIME: lifetime, **(entry.get("window_streams") or {})}
    latest = entry.get("windows") or {}
    latencies = entry.get("latencies") or {}
    windows: dict[str, WindowStats] = {}
    for window in WINDOWS:
        totals = latest.get(window) or entry.get("stats") or {}
        stats = _window_stats(by_window.get(window, lifetime), totals, kind)
        buckets = read_latencies(latencies.get(window, latencies.get(ALL_TIME)))
        windows[window] = replace(stats, latencies=buckets)
    return windows


def _window_stats(streams: Mapping[str, Any], totals: Mapping[str, Any], kind: Kind) -> WindowStats:
    """Statistics of a window from the counts by stream and the totals of the task.

    Acks, failures and latencies are known for the task only, and are divided over its streams.
    """
    emitted: dict[str, int] = dict(streams.get("emitted") or {})
    executed: dict[str, int] = dict(streams.get("executed") or {})
    if not executed and totals.get("executed"):
        # System components count their messages without a stream.
        executed = {":__system": int(totals["executed"])}
    if kind == "spout":
        weights = {stream: count for stream, count in emitted.items() if not is_system_name(stream)}
    else:
        weights = executed
    acked = _share(int(totals.get("acked") or 0), weights)
    return WindowStats(
        emitted=emitted,
        transferred=dict(streams.get("transferred") or {}),
        executed=executed,
        acked=acked,
        failed=_share(int(totals.get("failed") or 0), weights),
        execute_ns=_nanos(totals.get("execute_ms"), executed),
        complete_ns=_nanos(totals.get("complete_ms"), acked) if kind == "spout" else {},
    )


def merge(parts: Iterable[WindowStats]) -> WindowStats:
    """Add up the statistics of several tasks."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    sums: dict[str, Any] = {}
    for name in _SUMS:
        sums[name] = _sum(getattr(part, name) for part in parts)
    return WindowStats(
        **sums,
        latencies=merge_latencies(part.latencies for part in parts),
    )


def _of_users(by_key: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in by_key.items() if not is_system_name(split_input(key)[1])}


def _share(total: int, weights: Counts) -> dict[str, int]:
    """Divide ``total`` by weight into whole numbers.

    The sum is exact: the last key has the rest, and without any weight all of it. Keys with 0 are
    left out; empty without keys.
    """
    total_weight = sum(weights.values())
    if not total or not weights:
        return {}
    *keys, last = sorted(weights)
    shares: dict[str, int] = {}
    for key in keys:
        shares[key] = total * weights[key] // total_weight if total_weight else 0
    shares[last] = total - sum(shares.values())
    return {key: number for key, number in shares.items() if number}


def _mean_ns(mean_ms: Any) -> int:
    """Nanoseconds of a reported mean in milliseconds with four decimals."""
    return round(float(mean_ms or 0.0) * _NANOS_PER_MILLI)


def _nanos(mean_ms: Any, counts: Counts) -> dict[str, int]:
    """Stream -> nanoseconds, if this mean is that of every stream."""
    nanos = _mean_ns(mean_ms)
    if not nanos:
        return {}
    return {key: nanos * number for key, number in counts.items() if number}


def _mean_ms(nanos: int, tuples: int) -> float:
    return nanos / tuples / _NANOS_PER_MILLI if tuples else 0.0


def _means_ms(nanos: Counts, tuples: Counts) -> dict[str, float]:
    return {key: _mean_ms(sum_ns, tuples.get(key, 0)) for key, sum_ns in nanos.items()}


def _sum(parts: Iterable[Counts]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in parts:
        total.update(counts)
    return dict(total)
