"""Statistics by window and stream, made of the reports of a topology master: the one source of
every page (REST, Thrift).

A task reports exact counts of each window, and by stream what it emitted, transferred and executed.
What a bolt acked and failed and its latencies are known for the task as a whole; with one input
they belong to it, with several they are shared out by what was executed from each. A spout's acks
are shared out in the same way by what it emitted on each stream.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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

_COUNTED = ("emitted", "transferred", "executed", "acked", "failed")
ALL_TIME = ":all-time"
WINDOWS = ("600", "10800", "86400", ALL_TIME)
"""Storm's window names: seconds, and the whole life."""

Kind = Literal["spout", "bolt"]
Counts = Mapping[str, int]
Means = Mapping[str, float]


def check_window(window: str | None) -> str:
    """The window of that name; Storm's rule: everything unknown means all time."""
    return window if window in WINDOWS else ALL_TIME


def is_system_name(name: str) -> bool:
    """Whether a stream or component belongs to the system (Storm's ``sys=false`` hides it)."""
    return name.startswith("__")


def split_input(key: str) -> tuple[str, str]:
    """(component, stream) of an input key ``component:stream``."""
    component, _, stream = key.rpartition(":")
    return component, stream


@dataclass(frozen=True)
class Totals:
    """Statistics of one window, summed; latencies are means over what was counted, in
    milliseconds.
    """

    emitted: int = 0
    transferred: int = 0
    executed: int = 0
    acked: int = 0
    failed: int = 0
    execute_ms: float = 0.0
    process_ms: float = 0.0
    complete_ms: float = 0.0


@dataclass(frozen=True)
class WindowStats:
    """Statistics of one window by stream.

    ``emitted`` and ``transferred`` are keyed by output stream. ``acked`` and ``failed`` are keyed
    by output stream for a spout and by input ``component:stream`` for a bolt, as ``executed``,
    ``execute_ms`` and ``process_ms``; ``complete_ms`` (spouts) by output stream.
    """

    emitted: Counts = field(default_factory=dict)
    transferred: Counts = field(default_factory=dict)
    executed: Counts = field(default_factory=dict)
    acked: Counts = field(default_factory=dict)
    failed: Counts = field(default_factory=dict)
    execute_ms: Means = field(default_factory=dict)
    process_ms: Means = field(default_factory=dict)
    complete_ms: Means = field(default_factory=dict)
    latencies: Latencies = field(default_factory=dict)
    """Of the sampled tuples; a bolt has ``execute`` and ``process``, a spout ``complete``."""

    def buckets(self, kind: str) -> Buckets:
        """The latency of that kind over all streams but those of the system."""
        return sum_buckets(_of_users(self.latencies.get(kind, {})).values())

    def percentiles(self) -> dict[str, dict[str, float]]:
        """Kind of latency -> p50, p95 and p99 over all streams; without the kinds of which there is
        no sample.
        """
        return {
            kind: found
            for kind in sorted(self.latencies)
            if (found := percentiles(self.buckets(kind)))
        }

    def stream_percentiles(self, key: str) -> dict[str, dict[str, float]]:
        """As :meth:`percentiles`, of one stream."""
        every = {
            kind: percentiles(by_key.get(key, {}))
            for kind, by_key in sorted(self.latencies.items())
        }
        return {kind: found for kind, found in every.items() if found}

    def shown(self, include_sys: bool) -> WindowStats:
        """The numbers without the streams of the system, unless with ``include_sys``."""
        if include_sys:
            return self
        return replace(
            self, **{one.name: _of_users(getattr(self, one.name)) for one in fields(Totals)}
        )

    @property
    def outputs(self) -> list[str]:
        """Output streams on which something was sent."""
        return sorted({*self.emitted, *self.transferred})

    @property
    def inputs(self) -> list[str]:
        """Inputs ``component:stream`` of which a bolt executed something."""
        return sorted(self.executed)

    def of(self, key: str) -> Totals:
        """The statistics of one stream."""
        return Totals(
            **{one.name: getattr(self, one.name).get(key, one.default) for one in fields(Totals)}
        )

    def totals(self, *, include_sys: bool = False) -> Totals:
        """The sum over streams; those of the system only with ``include_sys``."""
        part = self.shown(include_sys)
        return Totals(
            **{name: sum(getattr(part, name).values()) for name in _COUNTED},
            execute_ms=_mean(part.execute_ms, part.executed),
            process_ms=_mean(part.process_ms, part.executed),
            complete_ms=_mean(part.complete_ms, part.acked),
        )


def task_windows(entry: Mapping[str, Any] | None, kind: Kind) -> dict[str, WindowStats]:
    """Window -> statistics of one task, from the topology master's entry for it (``None``: it
    reported nothing).
    """
    if entry is None:
        return {window: WindowStats() for window in WINDOWS}
    lifetime = entry.get("streams") or {}
    by_window = {ALL_TIME: lifetime, **(entry.get("window_streams") or {})}
    latest = entry.get("windows") or {}
    latencies = entry.get("latencies") or {}
    return {
        window: replace(
            _one_window(
                by_window.get(window, lifetime),
                latest.get(window) or entry.get("stats") or {},
                kind,
            ),
            latencies=_with_process(read_latencies(latencies.get(window, latencies.get(ALL_TIME)))),
        )
        for window in WINDOWS
    }


def _with_process(latencies: Latencies) -> Latencies:
    return {"process": latencies["execute"], **latencies} if "execute" in latencies else latencies


def _one_window(streams: Mapping[str, Any], latest: Mapping[str, Any], kind: Kind) -> WindowStats:
    emitted: dict[str, int] = dict(streams.get("emitted") or {})
    executed: dict[str, int] = dict(streams.get("executed") or {})
    if not executed and latest.get("executed"):
        # System components count their messages without a stream.
        executed = {":__system": int(latest["executed"])}
    if kind == "spout":
        weights = {stream: count for stream, count in emitted.items() if not is_system_name(stream)}
    else:
        weights = executed
    acked = _share(int(latest.get("acked") or 0), weights)
    return WindowStats(
        emitted=emitted,
        transferred=dict(streams.get("transferred") or {}),
        executed=executed,
        acked=acked,
        failed=_share(int(latest.get("failed") or 0), weights),
        execute_ms=_same(latest.get("execute_ms"), executed),
        process_ms=_same(latest.get("process_ms"), executed),
        complete_ms=_same(latest.get("complete_ms"), acked) if kind == "spout" else {},
    )


def merge(parts: Iterable[WindowStats]) -> WindowStats:
    """Several tasks as one: counts summed, latencies weighted by the tuples that they are of."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    return WindowStats(
        **{name: _sum(getattr(part, name) for part in parts) for name in _COUNTED},
        execute_ms=_weighted((part.execute_ms, part.executed) for part in parts),
        process_ms=_weighted((part.process_ms, part.executed) for part in parts),
        complete_ms=_weighted((part.complete_ms, part.acked) for part in parts),
        latencies=merge_latencies(part.latencies for part in parts),
    )


def _of_users(by_key: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in by_key.items() if not is_system_name(split_input(key)[1])}


def _share(total: int, weights: Counts) -> dict[str, int]:
    """``total`` in whole numbers by weight; the sum is exact (the rest goes to the last key)."""
    whole = sum(weights.values())
    if not total or not weights:
        return {}
    *keys, last = sorted(weights)
    shares = {key: total * weights[key] // whole if whole else 0 for key in keys}
    shares[last] = total - sum(shares.values())
    return {key: number for key, number in shares.items() if number}


def _same(mean: Any, counts: Counts) -> dict[str, float]:
    return {key: float(mean) for key, number in counts.items() if number} if mean else {}


def _mean(means: Means, counts: Counts) -> float:
    number = sum(counts.values())
    if not number:
        return 0.0
    return sum(means.get(key, 0.0) * count for key, count in counts.items()) / number


def _sum(parts: Iterable[Counts]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in parts:
        total.update(counts)
    return dict(total)


def _weighted(parts: Iterable[tuple[Means, Counts]]) -> dict[str, float]:
    sums, numbers = defaultdict[str, float](float), Counter[str]()
    for means, counts in parts:
        for key, mean in means.items():
            sums[key] += mean * counts.get(key, 0)
            numbers[key] += counts.get(key, 0)
    return {key: sums[key] / numbers[key] for key in sums if numbers[key]}
