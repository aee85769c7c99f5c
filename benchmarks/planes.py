"""Topologies of the data-plane benchmark: a chain of ten bolts, a windowed join, micro-batches on Spark.

``bench.rate`` (tuples a second of each spout, 0: as fast as it goes) and ``bench.acked`` are conf keys.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from storm_dagster.api import (
    Bolt,
    Grouping,
    Join,
    JoinBolt,
    SparkBolt,
    Spout,
    Topology,
    TopologyBuilder,
    Tuple,
    Window,
)

KEYS = 1_000


class Numbers(Spout):
    """(key, time of emission); reports the quantiles of its complete latency every second."""

    outputs = ["key", "at"]

    def initialize(self, conf: Any, context: Any) -> None:
        self._rate = float(conf.get("bench.rate", 0))
        self._acked = bool(conf.get("bench.acked", True))
        self._count = 0
        self._began = self._told = time.monotonic()
        self._took: deque[float] = deque(maxlen=20_000)

    def next_tuple(self) -> None:
        now = time.monotonic()
        if self._rate and self._count >= (now - self._began) * self._rate:
            return
        self._count += 1
        self.emit([self._count % KEYS, now], tup_id=(self._count, now) if self._acked else None)

    def ack(self, tup_id: Any) -> None:
        now = time.monotonic()
        self._took.append(now - tup_id[1])
        if now - self._told >= 1:
            self._told = now
            took = sorted(self._took)
            self.report_metric("p50_ms", round(took[len(took) // 2] * 1000, 2))
            self.report_metric("p99_ms", round(took[len(took) * 99 // 100] * 1000, 2))


class Pass(Bolt):
    """Hands on what comes."""

    outputs = ["key", "at"]

    def process(self, tup: Tuple) -> None:
        self.emit(tup.values)


class End(Bolt):
    """Takes what comes."""

    def process(self, tup: Tuple) -> None:
        return None


def _topology(name: str) -> TopologyBuilder:
    return TopologyBuilder(
        name,
        {"topology.workers": 2, "topology.acker.executors": 2, "topology.max.spout.pending": 1_000},
    )


def chain() -> TopologyBuilder:
    """A spout and ten bolts that hand on, over two workers."""
    builder = _topology("chain")
    builder.set_spout("numbers", Numbers)
    before = "numbers"
    for number in range(1, 11):
        builder.set_bolt(f"pass{number}", Pass, inputs={before: Grouping.LOCAL_OR_SHUFFLE}, par=2)
        before = f"pass{number}"
    return builder


class WindowedJoin(Topology):
    """Two streams joined by key in tumbling windows of 200 ms."""

    config = {"topology.workers": 2, "topology.acker.executors": 2, "topology.max.spout.pending": 1_000}

    numbers = Numbers.spec()
    others = Numbers.spec()
    joined = JoinBolt.spec(
        Join("numbers", "key").inner("others", "key", "numbers").select("numbers:key", "others:at"),
        Window.tumbling(secs=0.2),
        inputs={numbers: Grouping.fields("key"), others: Grouping.fields("key")},
        par=2,
    )
    end = End.spec(inputs=[joined])


def count(frame: Any) -> None:
    """What a micro-batch costs: group and count."""
    frame.groupBy("key").count().toArrow()


def spark() -> TopologyBuilder:
    """Micro-batches of 20,000 tuples, grouped and counted on the cluster's Spark."""
    builder = _topology("spark")
    builder.set_spout("numbers", Numbers, config={"topology.max.spout.pending": 60_000})
    builder.set_bolt(
        "batches",
        SparkBolt,
        inputs="numbers",
        args={"function": "planes:count", "schema": "key long, at double", "batch_secs": 10.0},
    )
    return builder
