"""The word count of the baseline, written with pystorm from PyPI: what Storm's Python users run
today.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from pystorm import Bolt, Spout  # pyright: ignore[reportMissingImports]

VOCABULARY = [f"word{number}" for number in range(5_000)]


class ShellSentenceSpout(Spout):
    """Ten random words each time."""

    def initialize(self, storm_conf: Any, context: Any) -> None:
        self.random = random.Random(1)
        self.count = 0

    def next_tuple(self) -> None:
        self.count += 1
        self.emit(
            [" ".join(self.random.choices(VOCABULARY, k=10))],
            tup_id=str(self.count),
            need_task_ids=False,
        )


class ShellSplitBolt(Bolt):
    """One tuple for each word."""

    def process(self, tup: Any) -> None:
        for word in tup.values[0].split():
            self.emit([word], need_task_ids=False)


class ShellCountBolt(Bolt):
    """Counts words."""

    def initialize(self, storm_conf: Any, context: Any) -> None:
        self.counts: dict[str, int] = {}

    def process(self, tup: Any) -> None:
        word = tup.values[0]
        self.counts[word] = self.counts.get(word, 0) + 1


if __name__ == "__main__":
    {"spout": ShellSentenceSpout, "split": ShellSplitBolt, "count": ShellCountBolt}[
        sys.argv[1]
    ]().run()
