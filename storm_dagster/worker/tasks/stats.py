"""Statistics of a task: exact counts and sampled latencies, in total and over sliding windows.

Counters are plain attributes; windows are computed from snapshots that a timer takes, so that a
tuple costs only an addition. Latencies are sampled (``topology.metric.sample.rate``): the first
tuple, then at least one in 20 at 0.05.
"""

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import msgspec

from storm_dagster.model.fusion import FUSED
from storm_dagster.model.latency import Latencies, bucket_of, subtract_latencies

T = TypeVar("T")
WINDOWS = {"600": 600, "10800": 10_800, "86400": 86_400}
"""Name -> seconds of the sliding windows; ``":all-time"`` is the fourth."""
_SNAPSHOTS = 20
_MOST_INPUTS = 1000
_OTHERS = "__other:default"

_Counters = tuple[int, ...]
_counted = attrgetter(
    *("executed", "acked", "failed", "execute_ns", "timed", "complete_ns", "completed")
)
_Streams = dict[str, dict[str, int]]
_Snapshot = tuple[float, _Counters, _Streams, bytes]
"""(time, counters, counters by stream, latencies)."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, dict[str, dict[int, int]]]).decode


class TaskStats:
    """Counters since the task was opened. Each sum of nanoseconds has its number of tuples."""

    def __init__(self, sample_rate: float = 1.0) -> None:
        self.every: int = max(1, round(1 / sample_rate)) if sample_rate > 0 else 0
        """Tuples per latency sample; 0: no samples."""
        self.until_sample = 1
        self.opened: float = time.monotonic()
        self.executed = self.acked = self.failed = self.errors = 0
        self.execute_ns = self.timed = 0
        """Sum of the sampled times, and number of their tuples."""
        self.complete_ns = self.completed = 0
        self.written = 0
        """Rows that a query has written outside of the topology: they count as emitted on the
        default stream.
        """
        self.executed_by: dict[str, int] = {}
        self.latencies: Latencies = {}
        """What is in the sums of nanoseconds; the buckets of ``process`` are those of
        ``execute``.
        """
        self.stream_counts: dict[str, dict[str, int]] = {}
        """Further counts by output stream, by their name in reports: see :meth:`count_stream`."""
        self.routes: dict[str, Any] = {}
        """Stream -> its Route, which counts emits."""
        self.metrics: dict[str, Any] = {}
        # Per window, oldest first. Packed, buckets take a tenth.
        self._rings: dict[str, list[_Snapshot]] = {name: [] for name in WINDOWS}

    def take_sample(self, tuples: int = 1) -> bool:
        """Whether to sample the latency of these tuples (one, or a batch as a whole)."""
        self.until_sample -= tuples
        if self.until_sample > 0 or not self.every:
            return False
        self.until_sample: int = self.every
        return True

    def take_samples(self, tuples: Sequence[T]) -> Sequence[T]:
        """Those of these tuples whose latency is to be sampled, one by one."""
        after, every = len(tuples) - self.until_sample, self.every
        if after < 0 or not every:
            self.until_sample = -after
            return ()
        first, self.until_sample = self.until_sample - 1, every - after % every
        return tuples[first::every]

    def count_input(self, key: str, number: int) -> None:
        """Count tuples of an input, ``component:stream``, in :attr:`executed_by`; all beyond a
        thousand as one input.

        A component has no such number of inputs. But a peer names the stream of what it sends.
        """
        by = self.executed_by
        if key not in by and len(by) >= _MOST_INPUTS:
            key = _OTHERS
        by[key] = by.get(key, 0) + number

    def count_stream(self, name: str, stream: str, number: int) -> None:
        """Add to a count by output stream that only a report and its reader know by name."""
        by_stream = self.stream_counts.setdefault(name, {})
        by_stream[stream] = by_stream.get(stream, 0) + number

    def executed_since(self, before: dict[str, int]) -> dict[str, int]:
        """What was executed by input since ``executed_by`` was ``before``."""
        return {
            key: more
            for key, number in self.executed_by.items()
            if (more := number - before.get(key, 0))
        }

    def time_inputs(self, nanos: int, inputs: dict[str, int]) -> None:
        """Count a sample: these tuples by input, executed in ``nanos`` together; each counts with
        their mean.
        """
        tuples = sum(inputs.values())
        self.execute_ns += nanos
        self.timed += tuples
        for key, number in inputs.items():
            self._count("execute", key, nanos / tuples, number)

    def time_tree(self, nanos: int, stream: str) -> None:
        """Count a sample: a tuple tree of this stream, completed in ``nanos``."""
        self.complete_ns += nanos
        self.completed += 1
        self._count("complete", stream, nanos, 1)

    def count_batch(self, rows: int, nanos: int) -> None:
        """Count a batch of a query as rows emitted and acked; its duration is one sample of the
        complete latency.
        """
        self.written += rows
        self.acked += rows
        self.time_tree(nanos, "default")

    def count_fused(self, executed: dict[str, int], emitted: int, nanos: int) -> None:
        """Count a batch that a query has run for a bolt: rows by input, those that leave it, and
        its duration.
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
        buckets = self.latencies.setdefault(kind, {}).setdefault(key, {})
        bucket = bucket_of(nanos)
        buckets[bucket] = buckets.get(bucket, 0) + number

    def _counters(self) -> _Counters:
        emitted, transferred = self.written, 0
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
            if ring and now - ring[-1][0] < secs / _SNAPSHOTS:
                continue
            if counters is None:
                counters, streams, latencies = (
                    self._counters(),
                    self.by_stream(),
                    _encode(self.latencies),
                )
            ring.append((now, counters, streams, latencies))
            while len(ring) > 1 and ring[1][0] <= now - secs:
                del ring[0]

    def _bases(self, now: float) -> Iterator[tuple[str, _Snapshot]]:
        # What a window begins with. Before the first snapshot, and in a task younger than the
        # window, everything counts.
        for name, secs in WINDOWS.items():
            ring = self._rings[name]
            start = bisect_right(ring, now - secs, key=itemgetter(0)) - 1
            if start >= 0:
                yield name, ring[start]

    def windows(self, now: float) -> dict[str, dict[str, float]]:
        """Metrics of each window; one longer than the task's uptime covers all of it."""
        current = self._counters()
        found = dict.fromkeys(WINDOWS, _as_metrics(current))
        for name, base in self._bases(now):
            found[name] = _as_metrics([a - b for a, b in zip(current, base[1], strict=True)])
        found[":all-time"] = _as_metrics(current)
        return found

    def window_streams(self, now: float) -> dict[str, _Streams]:
        """As :meth:`by_stream`, of the windows shorter than the task's uptime."""
        current = self.by_stream()
        return {
            name: {
                kind: {
                    key: count - base[2].get(kind, {}).get(key, 0) for key, count in counts.items()
                }
                for kind, counts in current.items()
            }
            for name, base in self._bases(now)
        }

    def window_latencies(self, now: float) -> dict[str, Latencies]:
        """Latencies of all time and of the windows shorter than the task's uptime; empty before the
        first sample.
        """
        if not self.latencies:
            return {}
        found = {":all-time": subtract_latencies(self.latencies, {})}
        for name, base in self._bases(now):
            found[name] = subtract_latencies(self.latencies, _decode(base[3]))
        return found

    def by_stream(self) -> _Streams:
        """Emitted, transferred and further counts by stream, executed by ``component:stream`` of
        the input.
        """
        written = {"default": self.written} if self.written else {}
        return {
            "emitted": {name: route.emitted for name, route in self.routes.items() if route.emitted}
            | written,
            "transferred": {
                name: route.transferred for name, route in self.routes.items() if route.transferred
            },
            "executed": {name: number for name, number in self.executed_by.items() if number},
            **{name: dict(by_stream) for name, by_stream in self.stream_counts.items()},
        }


def _mean_ms(total_ns: int, number: int) -> float:
    return round(total_ns / number / 1e6, 4) if number else 0.0


def _as_metrics(counters: Any) -> dict[str, float]:
    emitted, transferred, executed, acked, failed, ex_ns, timed, co_ns, completed = counters
    return {
        "emitted": emitted,
        "transferred": transferred,
        "executed": executed,
        "acked": acked,
        "failed": failed,
        "execute_ms": _mean_ms(ex_ns, timed),
        # A tuple is processed when its call returns.
        "process_ms": _mean_ms(ex_ns, timed),
        "complete_ms": _mean_ms(co_ns, completed),
    }
