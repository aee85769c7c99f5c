"""Topologies of the data-plane benchmark; their spouts are those of ``pace``."""

from __future__ import annotations

import time
from typing import Any

from pace import PacedSpout
from sentences import CountBolt, SentenceSpout, SplitBolt

from storm_dagster.api import (
    Bolt,
    Grouping,
    Join,
    JoinBolt,
    SparkBolt,
    Topology,
    TopologyBuilder,
    Tuple,
    Window,
)

KEYS = 1_000


class NumberSpout(PacedSpout):
    """(key, time of emission)."""

    outputs = ["key", "at"]

    def values(self, number: int) -> list[Any]:
        return [number % KEYS, time.monotonic()]


class Pass(Bolt):
    """Hands on what comes."""

    outputs = ["key", "at"]

    def process(self, tup: Tuple) -> None:
        self.emit(tup.values)


class End(Bolt):
    """Takes what comes."""

    def process(self, tup: Tuple) -> None:
        return None


class SlowBolt(Bolt):
    """A millisecond for each tuple: what back pressure is for."""

    blocking = True

    def process(self, tup: Tuple) -> None:
        time.sleep(0.001)


def _topology(name: str, pending: int | None = 1_000) -> TopologyBuilder:
    return TopologyBuilder(
        name,
        {
            "topology.workers": 2,
            "topology.acker.executors": 2,
            "topology.max.spout.pending": pending,
        },
    )


def chain() -> TopologyBuilder:
    """A spout and ten bolts that hand on, over two workers."""
    builder = _topology("chain")
    builder.set_spout("numbers", NumberSpout)
    before = "numbers"
    for number in range(1, 11):
        builder.set_bolt(f"pass{number}", Pass, inputs={before: Grouping.LOCAL_OR_SHUFFLE}, par=2)
        before = f"pass{number}"
    return builder


class WindowedJoin(Topology):
    """Two streams joined by key in tumbling windows of 200 ms."""

    config = {
        "topology.workers": 2,
        "topology.acker.executors": 2,
        "topology.max.spout.pending": 1_000,
    }

    numbers = NumberSpout.spec()
    others = NumberSpout.spec()
    joined = JoinBolt.spec(
        Join("numbers", "key").inner("others", "key", "numbers").select("numbers:key", "others:at"),
        Window.tumbling(secs=0.2),
        inputs={numbers: Grouping.fields("key"), others: Grouping.fields("key")},
        par=2,
    )
    end = End.spec(inputs=[joined])


def count(frame: Any) -> None:
    """Cost of a micro-batch: group and count."""
    frame.groupBy("key").count().toArrow()


def spark() -> TopologyBuilder:
    """Micro-batches of 20,000 tuples, grouped and counted on the cluster's Spark."""
    builder = _topology("spark", 60_000)
    builder.set_spout("numbers", NumberSpout)
    builder.set_bolt(
        "batches",
        SparkBolt,
        inputs="numbers",
        args={"function": "planes:count", "schema": "key long, at double", "batch_secs": 10.0},
    )
    return builder


def words(wide: str = "2") -> TopologyBuilder:
    """The word count with so many tasks of each component, over two workers (one, for one task)."""
    par = int(wide)
    builder = _topology("words")
    builder.config["topology.workers"] = min(2, par)
    builder.config["topology.acker.executors"] = min(2, par)
    builder.set_spout("sentences", SentenceSpout, par=par)
    builder.set_bolt("split", SplitBolt, inputs="sentences", par=par)
    builder.set_bolt("count", CountBolt, inputs={"split": Grouping.fields("word")}, par=par)
    return builder


class BurstBolt(Bolt):
    """20,000 tuples for each."""

    outputs = ["key", "at"]

    def process(self, tup: Tuple) -> None:
        for _ in range(20_000):
            self.emit(tup.values)


def burst() -> TopologyBuilder:
    """A fan-out of 20,000 beside a slow bolt, not acked: its memory is what back pressure
    leaves.
    """
    builder = _topology("burst", None)
    builder.set_spout("numbers", NumberSpout)
    builder.set_bolt("burst", BurstBolt, inputs="numbers")
    builder.set_bolt("slow", SlowBolt, inputs="burst", par=2)
    return builder


def slowed() -> TopologyBuilder:
    """The word count, and a slow bolt that reads the same sentences: nothing but back pressure
    bounds it.
    """
    builder = words()
    builder.config["topology.max.spout.pending"] = None
    builder.set_bolt("slow", SlowBolt, inputs="sentences", par=2)
    return builder
