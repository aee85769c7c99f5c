"""A topology that writes down every number: the spout counts, the bolt appends each number to a
file on the state volume.

A number below ``done`` of the spout's state has been acked. One of these that is in no file is
lost; one that is in the files twice was repeated, which at-least-once delivery allows.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from storm_dagster.api import Bolt, Spout, Topology, Tuple

RATE = 100.0
"""Numbers per second."""


class CountingSpout(Spout):
    """1, 2, 3 ...; after a restart from the last number below which all are acked."""

    outputs = ["number"]

    def initialize(self, conf: Any, context: Any) -> None:
        self._done = int(context.state.get("done", 0))
        self._next = self._done
        self._acked: set[int] = set()
        self._again: deque[int] = deque()
        self._due = self._saved_at = time.monotonic()

    def next_tuple(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        # What was missed is not caught up: the load stays the same.
        self._due = max(self._due + 1 / RATE, now - 0.1)
        if self._again:
            number = self._again.popleft()
        else:
            self._next += 1
            number = self._next
        self.emit([number], tup_id=number)

    def ack(self, tup_id: int) -> None:
        self._acked.add(tup_id)
        while self._done + 1 in self._acked:
            self._done += 1
            self._acked.discard(self._done)
        if time.monotonic() - self._saved_at > 0.25:
            self._saved_at = time.monotonic()
            self._save()

    def close(self) -> None:
        """A task that moves begins where this one ended, and repeats no acked number."""
        self._save()

    def _save(self) -> None:
        self.context.state.save({"done": self._done})

    def fail(self, tup_id: int) -> None:
        self._again.append(tup_id)


class WritingBolt(Bolt):
    """Appends each number to a file of its own process, then acks."""

    def initialize(self, conf: Any, context: Any) -> None:
        folder = Path(conf["topology.state.dir"]) / "written"
        folder.mkdir(exist_ok=True)
        name = f"{context.task_id}-{time.time_ns()}.txt"
        self._file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._eat = folder / "eat"
        self._eaten: list[bytearray] = []

    def process(self, tup: Tuple) -> None:
        number = int(tup.values[0])
        if number % 10 == 0 and (self._eaten or self._asked_to_eat()):
            self._eaten.append(bytearray(os.urandom(1 << 20) * 64))
        os.write(self._file, b"%d\n" % number)

    def _asked_to_eat(self) -> bool:
        """Whether the test asks one task to outgrow its worker's memory; the first that sees it
        does.
        """
        try:
            self._eat.unlink()
        except FileNotFoundError:
            return False
        return True


class EveryNumber(Topology):
    """numbers -> write."""

    config = {"topology.max.spout.pending": 500, "topology.message.timeout.secs": 10}

    numbers = CountingSpout.spec()
    write = WritingBolt.spec(inputs=[numbers], par=4)
