"""The word count of the benchmarks: ten-word sentences over 5,000 words, counted in memory."""

from __future__ import annotations

import random
from typing import Any

from pace import PacedSpout

from storm_dagster.api import Bolt, Grouping, Topology, Tuple

VOCABULARY = [f"word{number}" for number in range(5_000)]


def random_sentences(seed: int) -> list[str]:
    """2,000 sentences of ten words, made beforehand: no benchmark measures ``random.choices``."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(VOCABULARY, k=10)) for _ in range(2_000)]


class SentenceSpout(PacedSpout):
    """Ten random words each time."""

    outputs = ["sentence"]

    def initialize(self, conf: Any, context: Any) -> None:
        super().initialize(conf, context)
        self._sentences = random_sentences(context.task_id)

    def values(self, number: int) -> list[Any]:
        return [self._sentences[number % 2_000]]


class SplitBolt(Bolt):
    """One tuple for each word."""

    outputs = ["word"]

    def process(self, tup: Tuple) -> None:
        for word in tup.values[0].split():
            self.emit([word])


class CountBolt(Bolt):
    """Counts words."""

    def initialize(self, conf: Any, context: Any) -> None:
        self._counts: dict[str, int] = {}

    def process(self, tup: Tuple) -> None:
        word = tup.values[0]
        self._counts[word] = self._counts.get(word, 0) + 1


class Sentences(Topology):
    """sentences -> split -> count."""

    config = {
        "topology.max.spout.pending": 1_000,
        "topology.workers": 2,
        "topology.acker.executors": 2,
    }

    sentences = SentenceSpout.spec(par=2)
    split = SplitBolt.spec(inputs=[sentences], par=2)
    count = CountBolt.spec(inputs={split: Grouping.fields("word")}, par=2)
