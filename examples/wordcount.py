"""Word count over the source text of Python's own standard library: exact, also when a worker is
killed.

    storm-dagster submit examples/wordcount.py --conf topology.workers=4

Lines are delivered at least once: a line whose words were not all counted is emitted again. The
count bolt saves each count together with the ids of what it has counted, in one transaction, and
acks only after that; what comes a second time is recognised and not counted twice. So the counts
are exact, with another number of tasks of ``lines`` and ``split`` too (``storm-dagster rebalance
wordcount -e lines=1``); the counts belong to the tasks of ``count``, whose number stays.

Conf keys (with ``--conf KEY=VALUE``): ``wordcount.files`` (how many source files, in sorted order),
``wordcount.limit`` (how many lines at most), ``wordcount.lines.per.second`` (0: as fast as it
goes).
"""

from __future__ import annotations

import re
import sysconfig
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from storm_dagster.api import Grouping, Spout, TicklessBatchingBolt, Topology, Tuple, bolt

DEFAULT_FILES = 60
DEFAULT_LIMIT = 30_000
WORD = re.compile(r"[A-Za-z_]+")


def words_of(line: str) -> list[str]:
    """The words of a line, lower case."""
    return [word.lower() for word in WORD.findall(line)]


def read_lines(files: int = DEFAULT_FILES, limit: int = DEFAULT_LIMIT) -> Iterator[tuple[int, str]]:
    """(number, text) of the lines with words in them: the same ones, in the same order, in every
    process.
    """
    root = Path(sysconfig.get_path("stdlib"))
    number = 0
    for path in sorted(root.glob("*.py"))[:files]:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if WORD.search(line):
                if number >= limit:
                    return
                yield number, line
                number += 1


class LineSpout(Spout):
    """Emits every line, tracked by its number, until it is acked; remembers up to where all are.

    Several tasks share the lines. Every line of the task's share below ``done`` (saved in its
    state) has been counted, so a restarted spout goes on from there. With another number of tasks
    the shares are others: all of the new one is read, and what has been counted is not counted
    again.
    """

    outputs = ["line_id", "line"]

    def initialize(self, conf: Any, context: Any) -> None:
        index, tasks = context.task_index, len(context.component_tasks(context.component))
        files = int(conf.get("wordcount.files", DEFAULT_FILES))
        limit = int(conf.get("wordcount.limit", DEFAULT_LIMIT))
        self._lines = {
            number: line for number, line in read_lines(files, limit) if number % tasks == index
        }
        self._order = sorted(self._lines)
        self._rate = float(conf.get("wordcount.lines.per.second", 0)) / tasks
        # Place in the order below which everything is acked.
        share = [index, tasks]
        self._done = int(context.state.get("done", 0)) if context.state.get("share") == share else 0
        self._next = self._done
        self._acked: set[int] = set()
        self._again: deque[int] = deque()
        self._began = time.monotonic()
        self._emitted = 0
        self._saved_at = 0.0
        context.state.save({"total": len(self._order), "done": self._done, "share": share})

    def next_tuple(self) -> None:
        if self._rate and self._emitted >= (time.monotonic() - self._began) * self._rate:
            return
        if self._again:
            number = self._again.popleft()
        elif self._next < len(self._order):
            number = self._order[self._next]
            self._next += 1
        else:
            return
        self._emitted += 1
        self.emit([number, self._lines[number]], tup_id=number)

    def ack(self, tup_id: int) -> None:
        self._acked.add(tup_id)
        moved = False
        while self._done < len(self._order) and self._order[self._done] in self._acked:
            self._acked.discard(self._order[self._done])
            self._done += 1
            moved = True
        if moved and (self._done == len(self._order) or time.monotonic() - self._saved_at > 0.25):
            self._saved_at = time.monotonic()
            self.context.state.save({"done": self._done})

    def fail(self, tup_id: int) -> None:
        self._again.append(tup_id)


@bolt(outputs=["word", "line_id", "times"])
def split(line_id: int, line: str) -> Iterator[tuple[str, int, int]]:
    """One tuple for each different word of a line."""
    for word, times in Counter(words_of(line)).items():
        yield word, line_id, times


class CountBolt(TicklessBatchingBolt):
    """Counts words. A batch is saved in one transaction, and acked after that (by
    ``BatchingBolt``).
    """

    secs_between_batches = 0.1

    def initialize(self, conf: Any, context: Any) -> None:
        self._counts: dict[str, int] = dict(context.state.items())

    def process_batch(self, key: Any, tups: list[Tuple]) -> None:
        state = self.context.state
        fresh: dict[str, tuple[str, int]] = {}
        for tup in tups:
            word, line_id, times = tup.values
            mark = f"{line_id} {word}"
            if mark not in fresh and not state.applied(mark):
                fresh[mark] = (word, times)
        changed: dict[str, int] = {}
        for word, times in fresh.values():
            changed[word] = changed.get(word, self._counts.get(word, 0)) + times
        state.save(changed, applied=fresh)
        # Only what is saved is known: had saving failed, the tuples come again.
        self._counts.update(changed)


class WordCount(Topology):
    """lines -> split -> count."""

    config = {"topology.max.spout.pending": 1500}

    lines = LineSpout.spec()
    split = split.spec(inputs=[lines], par=2)
    count = CountBolt.spec(inputs={split: Grouping.fields("word")}, par=3)
