"""Buckets of latencies: their percentiles, sums and differences, and those of Prometheus."""

from __future__ import annotations

import random

import pytest

from storm_dagster.model.latency import (
    bucket_of,
    merge_latencies,
    percentiles,
    prometheus_buckets,
    subtract_latencies,
)

MS = 1_000_000


@pytest.mark.parametrize("spread", [0.1, 1.0, 2.5])
def test_a_percentile_is_off_by_less_than_five_percent(spread: float) -> None:
    rng = random.Random(7)
    values = sorted(rng.lognormvariate(0, spread) * MS for _ in range(20_000))
    buckets: dict[int, int] = {}
    for value in values:
        buckets[bucket_of(value)] = buckets.get(bucket_of(value), 0) + 1
    found = percentiles(buckets)
    assert found["sampled"] == len(values)
    for name, share in (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99)):
        assert found[name] * MS == pytest.approx(values[int(share * len(values)) - 1], rel=0.05), (
            name
        )


def test_buckets_merge_and_subtract_and_leave_their_operands_alone() -> None:
    one, two = (
        {"execute": {"a:default": {-80: 3, -72: 1}}},
        {"execute": {"a:default": {-80: 1}, "b:default": {-64: 5}}},
    )
    both = merge_latencies([one, two])
    assert both == {"execute": {"a:default": {-80: 4, -72: 1}, "b:default": {-64: 5}}}
    assert subtract_latencies(both, two)["execute"]["a:default"] == one["execute"]["a:default"]
    assert one["execute"]["a:default"] == {-80: 3, -72: 1} and two["execute"]["a:default"] == {
        -80: 1
    }
    assert percentiles({}) == {} and bucket_of(0) == bucket_of(1)


@pytest.mark.parametrize("nanos", [1, 900, 2**-10 * 1e9, 2**-10 * 1e9 + 1, 37 * MS, 250e9, 1e15])
def test_every_value_is_at_most_its_bound(nanos: float) -> None:
    counts, _ = prometheus_buckets({bucket_of(nanos): 1})
    for bound, number in counts:
        assert number == (nanos <= float(bound) * 1e9), bound
