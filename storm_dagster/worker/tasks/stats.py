"""Statistics of a task: exact counts and sampled latencies.

They are in total and over sliding windows. Counters are plain attributes; windows are computed from
snapshots that a timer takes, so that a tuple costs only an addition. Latencies are sampled
(``topology.metric.sample.rate``): the first tuple, then at least one in 20 at 0.05.
"""

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import msgspec

from storm_dagster.model.fusion import FUSED
from storm_dagster.model.latency import Latencies, bucket_of, subtract_latencies

T = TypeVar("T")
WINDOWS = {"600": 600, "10800": 10_800, "86400": 86_400}
"""Name -> seconds of the sliding windows; ``":all-time"`` is the fourth."""
_SNAPSHOTS = 20
"""Snapshots in the length of a window: its start is exact to a twentieth."""
_MAX_INPUTS = 1000
_OTHERS = "__other:default"
"""Input under which all inputs beyond that number are counted."""

_Counters = tuple[int, ...]
_counted = attrgetter(
    "executed", "acked", "failed", "execute_ns", "timed", "complete_ns", "completed"
)
_Streams = dict[str, dict[str, int]]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, dict[str, dict[int, int]]]).decode


class _Snapshot(NamedTuple):
    """Counters of a task at one time."""

    at: float
    counters: _Counters
    streams: _Streams
    latencies: bytes
    """Encoded ``Latencies``."""


class TaskStats:
    """Counters since the task was opened.

    Each sum of nanoseconds has its number of tuples. Methods that run per batch are measured by
    ``benchmarks/dataplane.py``.
    """

    def __init__(self, sample_rate: float = 1.0) -> None:
        self.every: int = max(1, round(1 / sample_rate)) if sample_rate > 0 else 0
        """Tuples per latency sample; 0: no samples."""
        self.until_sample = 1
        """Tuples until the next latency sample."""
        self.opened: float = time.monotonic()
        self.executed = 0
        self.acked = 0
        self.failed = 0
        self.errors = 0
        self.execute_ns = 0
        """Sum of the sampled times of execute."""
        self.timed = 0
        """Number of the tuples in :attr:`execute_ns`."""
        self.complete_ns = 0
        """Sum of the sampled times of trees."""
        self.completed = 0
        """Number of the trees in :attr:`complete_ns`."""
        self.written = 0
        """Rows that a query has written outside of the topology: they count as emitted on the
        default stream.
        """
        self.executed_by: dict[str, int] = {}
        self.latencies: Latencies = {}
        """Samples of the sums of nanoseconds. The buckets of ``process`` are those of ``execute``.
        """
        self.stream_counts: dict[str, dict[str, int]] = {}
        """Further counts by output stream, by their name in reports: see :meth:`count_stream`."""
        self.routes: dict[str, Any] = {}
        """Stream -> its Route, which counts emits."""
        self.metrics: dict[str, Any] = {}
        """Name -> newest value, of the metrics of the component."""
        self._rings: dict[str, list[_Snapshot]] = {name: [] for name in WINDOWS}
        """Window -> snapshots, oldest first. Latencies are encoded, in a tenth of the memory."""

    def take_sample(self, tuples: int = 1) -> bool:
        """True if the latency of these tuples must be sampled.

        They are one tuple, or a whole batch.
        """
        self.until_sample -= tuples
        if self.until_sample > 0 or not self.every:
            return False
        self.until_sample: int = self.every
        return True

    def take_samples(self, tuples: Sequence[T]) -> Sequence[T]:
        """Return the tuples whose latency must be sampled, one by one.

        All of ``tuples`` count for the distance to the next sample.
        """
        every = self.every
        after = len(tuples) - self.until_sample
        if after < 0 or not every:
            self.until_sample = -after
            return ()
        first = self.until_sample - 1
        self.until_sample = every - after % every
        return tuples[first::every]

    def count_input(self, key: str, number: int) -> None:
        """Count tuples of an input in :attr:`executed_by`.

        ``key``: ``component:stream``. All inputs beyond a thousand count as one. A component has
        fewer, but a peer names the stream of the tuples that it sends.
        """
        by = self.executed_by
        if key not in by and len(by) >= _MAX_INPUTS:
            key = _OTHERS
        by[key] = by.get(key, 0) + number

    def count_stream(self, name: str, stream: str, number: int) -> None:
        """Add to a count by output stream.

        Only a report and its reader know the count by name.
        """
        by_stream = self.stream_counts.setdefault(name, {})
        by_stream[stream] = by_stream.get(stream, 0) + number

    def executed_since(self, before: dict[str, int]) -> dict[str, int]:
        """Return the tuples executed since ``before``, by input.

        ``before``: a copy of ``executed_by``.
        """
        executed: dict[str, int] = {}
        for key, number in self.executed_by.items():
            more = number - before.get(key, 0)
            if more:
                executed[key] = more
        return executed

    def time_inputs(self, nanos: int, inputs: dict[str, int]) -> None:
        """Count a sample: tuples by input, executed in ``nanos`` together.

        Each counts with their mean.
        """
        tuples = sum(inputs.values())
        self.execute_ns += nanos
        self.timed += tuples
        for key, number in inputs.items():
            self._count("execute", key, nanos / tuples, number)

    def time_tree(self, nanos: int, stream: str) -> None:
        """Count a sample: a tuple tree, completed in ``nanos``.

        ``stream``: the stream of its root.
        """
        self.complete_ns += nanos
        self.completed += 1
        self._count("complete", stream, nanos, 1)

    def count_batch(self, rows: int, nanos: int) -> None:
        """Count a batch of a query as rows emitted and acked.

        Its duration is one sample of the complete latency.
        """
        self.written += rows
        self.acked += rows
        self.time_tree(nanos, "default")

    def count_fused(self, executed: dict[str, int], emitted: int, nanos: int) -> None:
        """Count a batch that a query has run for a bolt.

        ``executed``: rows by input; ``emitted``: rows that leave it.
        """
        rows = sum(executed.values())
        self.executed += rows
        self.acked += rows
        self.written += emitted
        for key, number in executed.items():
            self.executed_by[key] = self.executed_by.get(key, 0) + number
        if rows:
            self.time_inputs(nanos, executed)

    def _count(self, kind: str, key: str, nanos: float, number: int) -> None:
        """Add ``number`` samples of ``nanos`` each to the latencies."""
        buckets = self.latencies.setdefault(kind, {}).setdefault(key, {})
        bucket = bucket_of(nanos)
        buckets[bucket] = buckets.get(bucket, 0) + number

    def _counters(self) -> _Counters:
        """Return (emitted, transferred, and those of ``_counted``)."""
        emitted = self.written
        transferred = 0
        for name, route in self.routes.items():
            if not name.startswith(FUSED):
                emitted += route.emitted
                transferred += route.transferred
        return (emitted, transferred, *_counted(self))

    def snapshot(self, now: float) -> None:
        """Take the snapshots that are due; call it every few seconds."""
        counters: _Counters | None = None
        streams: _Streams = {}
        latencies = b""
        for name, secs in WINDOWS.items():
            ring = self._rings[name]
            if ring and now - ring[-1].at < secs / _SNAPSHOTS:
                continue
            if counters is None:
                counters = self._counters()
                streams = self.by_stream()
                latencies = _encode(self.latencies)
            ring.append(_Snapshot(now, counters, streams, latencies))
            while len(ring) > 1 and ring[1].at <= now - secs:
                del ring[0]

    def _bases(self, now: float) -> Iterator[tuple[str, _Snapshot]]:
        """Yield (window, newest snapshot before it).

        A window without one is left out: all counts of the task are in it.
        """
        for name, secs in WINDOWS.items():
            ring = self._rings[name]
            start = bisect_right(ring, now - secs, key=attrgetter("at")) - 1
            if start >= 0:
                yield name, ring[start]

    def windows(self, now: float) -> dict[str, dict[str, float]]:
        """Return metrics of each window.

        A window longer than the task's uptime covers all of it.
        """
        current = self._counters()
        metrics = dict.fromkeys(WINDOWS, _as_metrics(current))
        for name, base in self._bases(now):
            counters = [
                count - former for count, former in zip(current, base.counters, strict=True)
            ]
            metrics[name] = _as_metrics(counters)
        metrics[":all-time"] = _as_metrics(current)
        return metrics

    def window_streams(self, now: float) -> dict[str, _Streams]:
        """Return :meth:`by_stream` of the windows.

        Only of those with a snapshot before them, so shorter than the task's uptime.
        """
        current = self.by_stream()
        return {name: _subtract(current, base.streams) for name, base in self._bases(now)}

    def window_latencies(self, now: float) -> dict[str, Latencies]:
        """Return latencies of all time and of the windows.

        Only of windows shorter than the task's uptime. Empty before the first sample.
        """
        if not self.latencies:
            return {}
        latencies = {":all-time": subtract_latencies(self.latencies, {})}
        for name, base in self._bases(now):
            latencies[name] = subtract_latencies(self.latencies, _decode(base.latencies))
        return latencies

    def by_stream(self) -> _Streams:
        """Return all counts by stream.

        Emitted, transferred and further counts by output stream, executed by ``component:stream``
        of the input.
        """
        emitted: dict[str, int] = {}
        transferred: dict[str, int] = {}
        for name, route in self.routes.items():
            if route.emitted:
                emitted[name] = route.emitted
            if route.transferred:
                transferred[name] = route.transferred
        if self.written:
            emitted["default"] = self.written
        streams = {
            "emitted": emitted,
            "transferred": transferred,
            "executed": {name: number for name, number in self.executed_by.items() if number},
        }
        for name, by_stream in self.stream_counts.items():
            streams[name] = dict(by_stream)
        return streams


def _subtract(current: _Streams, former: _Streams) -> _Streams:
    """Counts by stream that were added since ``former``."""
    differences: _Streams = {}
    for kind, counts in current.items():
        former_counts = former.get(kind, {})
        differences[kind] = {
            key: count - former_counts.get(key, 0) for key, count in counts.items()
        }
    return differences


def _mean_ms(total_ns: int, number: int) -> float:
    return round(total_ns / number / 1e6, 4) if number else 0.0


def _as_metrics(counters: Any) -> dict[str, float]:
    """Return counters of :meth:`TaskStats._counters`, or differences, by name."""
    emitted, transferred, executed, acked, failed, *times = counters
    execute_ns, timed, complete_ns, completed = times
    return {
        "emitted": emitted,
        "transferred": transferred,
        "executed": executed,
        "acked": acked,
        "failed": failed,
        "execute_ms": _mean_ms(execute_ns, timed),
        # A tuple is processed when its call returns.
        "process_ms": _mean_ms(execute_ns, timed),
        "complete_ms": _mean_ms(complete_ns, completed),
    }
