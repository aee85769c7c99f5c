"""A topology whose tuples take a while, and whose spouts count what became of each: nothing may be
lost on the way.
"""

from __future__ import annotations

import time
from typing import Any

from storm_dagster.api import Bolt, Grouping, Spout, Topology, Tuple


class Numbers(Spout):
    """0, 1, 2 ..., each until it is acked; saves how many went out, came back, and failed.

    Two hundred a second: tests wait for some of them, and for other things most of the time.
    """

    outputs = ["number"]

    def initialize(self, conf: Any, context: Any) -> None:
        self._next = 0
        self._again: list[int] = []
        self._acked: set[int] = set()
        self._failed = 0
        self._due = 0.0

    def _save(self) -> None:
        self.context.state.save(
            {"sent": self._next, "acked": len(self._acked), "failed": self._failed}
        )

    def next_tuple(self) -> None:
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + 0.005
        if self._again:
            number = self._again.pop()
        else:
            number, self._next = self._next, self._next + 1
        self.emit([number], tup_id=number)
        self._save()

    def ack(self, tup_id: int) -> None:
        self._acked.add(tup_id)
        self._save()

    def fail(self, tup_id: int) -> None:
        self._failed += 1
        self._again.append(tup_id)
        self._save()


class Relay(Bolt):
    """Passes on."""

    outputs = ["number"]

    def process(self, tup: Tuple) -> None:
        self.emit(list(tup.values))


class Count(Bolt):
    """The end of the line."""

    def process(self, tup: Tuple) -> None:
        pass


class Slow(Topology):
    """numbers -> relay -> count, over three workers."""

    numbers = Numbers.spec()
    relay = Relay.spec(inputs={numbers: Grouping.SHUFFLE}, par=2)
    count = Count.spec(inputs={relay: Grouping.fields("number")}, par=2)
    config = {
        "topology.workers": 3,
        "topology.max.spout.pending": 200,
        "topology.message.timeout.secs": 10,
    }
