"""Latencies counted in exponential buckets.

Unlike means, they merge by addition, and give windows by subtraction. Bucket ``i`` holds what took
more than ``2 ** ((i - 1) / 8)`` and at most ``2 ** (i / 8)`` seconds, so that a percentile is off
by at most 4.4 %. Every eighth bound is a power of two, and a bound of Prometheus.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

Buckets = dict[int, int]
"""Bucket -> number of tuples."""
Latencies = dict[str, dict[str, Buckets]]
"""``execute`` and ``complete`` -> stream (of a bolt: ``component:stream`` of the input) ->
buckets.
"""

_PER_DOUBLING = 8
"""Buckets from one power of two to the next."""
_BOUNDS = range(-16, 9)
"""Exponents of the bounds that Prometheus gets: 15 us to 256 s."""
# (name in documents, share of the tuples).
_QUANTILES = (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99))


def bucket_of(nanos: float) -> int:
    """The bucket of a latency in nanoseconds."""
    return math.ceil(_PER_DOUBLING * math.log2(max(nanos, 1.0) / 1e9))


def read_latencies(document: Mapping[str, Any] | None) -> Latencies:
    """Latencies of JSON, where buckets are strings."""
    latencies: Latencies = {}
    for kind, by_key in (document or {}).items():
        latencies[kind] = {}
        for key, buckets in by_key.items():
            latencies[kind][key] = {int(bucket): number for bucket, number in buckets.items()}
    return latencies


def merge_latencies(parts: Iterable[Latencies]) -> Latencies:
    """Add the latencies of several tasks."""
    total: Latencies = {}
    for part in parts:
        for kind, by_key in part.items():
            for key, buckets in by_key.items():
                sums = total.setdefault(kind, {}).setdefault(key, {})
                for bucket, number in buckets.items():
                    sums[bucket] = sums.get(bucket, 0) + number
    return total


def subtract_latencies(now: Latencies, before: Latencies) -> Latencies:
    """Latencies counted since ``before``, an earlier state of ``now``.

    Always a copy.
    """
    differences: Latencies = {}
    for kind, by_key in now.items():
        differences[kind] = {}
        for key, buckets in by_key.items():
            former = before.get(kind, {}).get(key, {})
            differences[kind][key] = _subtract_buckets(buckets, former)
    return differences


def _subtract_buckets(now: Buckets, before: Buckets) -> Buckets:
    """Numbers counted since ``before``, without unchanged buckets."""
    differences: Buckets = {}
    for bucket, number in now.items():
        difference = number - before.get(bucket, 0)
        if difference:
            differences[bucket] = difference
    return differences


def sum_buckets(parts: Iterable[Buckets]) -> Buckets:
    """Add the buckets of several streams."""
    return merge_latencies({"": {"": part}} for part in parts).get("", {}).get("", {})


def percentiles(buckets: Buckets) -> dict[str, float]:
    """``p50_ms``, ``p95_ms``, ``p99_ms``, and the number ``sampled`` of tuples.

    A percentile is the middle of its bucket. Empty without tuples.
    """
    sampled = sum(buckets.values())
    if not sampled:
        return {}
    statistics: dict[str, float] = {"sampled": sampled}
    for name, share in _QUANTILES:
        remaining = share * sampled
        for bucket in sorted(buckets):
            remaining -= buckets[bucket]
            if remaining <= 0:
                statistics[name] = float(f"{_middle(bucket) * 1000:.4g}")
                break
    return statistics


def prometheus_buckets(buckets: Buckets) -> tuple[list[tuple[str, float]], float]:
    """The histogram for Prometheus: [(bound, number up to it)], and the sum in seconds.

    A bound is the text of a number of seconds, the last one ``+Inf``.
    """
    counts: list[tuple[str, float]] = []
    for bound in _BOUNDS:
        last_bucket = bound * _PER_DOUBLING
        number = sum(count for bucket, count in buckets.items() if bucket <= last_bucket)
        counts.append((repr(2.0**bound), float(number)))
    counts.append(("+Inf", float(sum(buckets.values()))))
    seconds = sum(_middle(bucket) * number for bucket, number in buckets.items())
    return counts, seconds


def _middle(bucket: int) -> float:
    """Middle of a bucket, seconds."""
    return 2.0 ** ((bucket - 0.5) / _PER_DOUBLING)
