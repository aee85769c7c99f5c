"""A topology that never ends and asks little: its spout saves how many numbers came back acked."""

from __future__ import annotations

import time
from typing import Any

from storm_dagster.api import Bolt, Spout, Topology, Tuple


class Numbers(Spout):
    """0, 1, 2 ..., some twenty a second, each until it is acked."""

    outputs = ["number"]

    def initialize(self, conf: Any, context: Any) -> None:
        self._next = 0
        self._again: list[int] = []
        self._acked = 0
        self._due = time.monotonic()

    def next_tuple(self) -> None:
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + 0.05
        if self._again:
            number = self._again.pop()
        else:
            number, self._next = self._next, self._next + 1
        self.emit([number], tup_id=number)

    def ack(self, tup_id: int) -> None:
        self._acked += 1
        self.context.state.save({"acked": self._acked})

    def fail(self, tup_id: int) -> None:
        self._again.append(tup_id)


class Sink(Bolt):
    """The end of the line."""

    def process(self, tup: Tuple) -> None:
        pass


class Steady(Topology):
    """numbers -> sink."""

    numbers = Numbers.spec()
    sink = Sink.spec(inputs=[numbers])
    config = {"topology.workers": 2, "topology.message.timeout.secs": 10}
