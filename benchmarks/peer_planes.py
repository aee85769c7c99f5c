"""Topologies of the benchmark beside other engines: a word count, and a chain of ten bolts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peer_logs import SpoutLog
from planes import Pass
from sentences import CountBolt, SplitBolt, random_sentences

from storm_dagster.api import Grouping, Spout, TopologyBuilder


class LoggedSpout(Spout):
    """Emits at ``bench.rate`` (tuples a second of each task; 0: as fast as it may) and keeps a
    log.
    """

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        self._rate = float(conf["bench.rate"])
        self._acked = bool(conf["bench.acked"])
        self._log = SpoutLog(
            Path(conf["bench.folder"]) / f"spout-{context.task_id}-{os.getpid()}.log"
        )
        self._count = 0
        self._began = time.monotonic()

    def values(self, number: int) -> list[Any]:
        """The tuple of that number."""
        raise TypeError(f"{type(self).__name__} does not define values(self, number)")

    def next_tuple(self) -> None:
        now = time.monotonic()
        if self._rate and self._count >= (now - self._began) * self._rate:
            return
        values = self.values(self._count)
        self._count += 1
        if self._acked:
            self.emit(values, tup_id=now)
        else:
            self.emit(values)
        self._log.emitted()

    def ack(self, tup_id: float) -> None:
        """``tup_id`` is the time of emission."""
        self._log.acked(time.monotonic() - tup_id)


class SentenceSpout(LoggedSpout):
    """Ten random words each time."""

    outputs = ["sentence"]

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        super().initialize(conf, context)
        self._sentences = random_sentences(context.task_id)

    def values(self, number: int) -> list[Any]:
        return [self._sentences[number % 2_000]]


class NumberSpout(LoggedSpout):
    """Keys and the time of emission."""

    outputs = ["key", "at"]

    def values(self, number: int) -> list[Any]:
        return [number % 1_000, time.monotonic()]


def words(workers: str) -> TopologyBuilder:
    """sentences -> split -> count, with as many tasks of each as workers."""
    par = int(workers)
    builder = TopologyBuilder("words", {"topology.workers": par, "topology.acker.executors": par})
    builder.set_spout("sentences", SentenceSpout, par=par)
    builder.set_bolt("split", SplitBolt, inputs="sentences", par=par)
    builder.set_bolt("count", CountBolt, inputs={"split": Grouping.fields("word")}, par=par)
    return builder


def chain(workers: str) -> TopologyBuilder:
    """A spout and ten bolts that hand on."""
    par = int(workers)
    builder = TopologyBuilder("chain", {"topology.workers": par, "topology.acker.executors": par})
    builder.set_spout("numbers", NumberSpout)
    before = "numbers"
    for number in range(1, 11):
        builder.set_bolt(f"pass{number}", Pass, inputs={before: Grouping.LOCAL_OR_SHUFFLE}, par=par)
        before = f"pass{number}"
    return builder
