"""A word count with state whose spout notes when it was acked, and each failure.

Each number is one of fifty words. The state of ``count`` has how often each number came, so that a
loss and a repetition both show. The spout continues where everything before is acked.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from storm_dagster.api import Bolt, Grouping, Spout, Topology, Tuple
from storm_dagster.host.clock import boot_clock

WORDS = 50
PER_SECOND = 100


class Numbers(Spout):
    """0, 1, 2 ... up to the limit, each until it is acked."""

    outputs = ["word", "number"]

    def initialize(self, conf: Any, context: Any) -> None:
        folder = Path(conf["counted.folder"])
        self._stop_file = folder / "stop"
        self._notes = (folder / "notes").open("a", buffering=1)
        self._next = int(context.state.get("next", 0))
        self._again: list[int] = []
        self._acked: set[int] = set()
        self._done = self._next
        self._due = 0.0
        self._stopped = False

    def next_tuple(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + 1 / PER_SECOND
        if self._again:
            number = self._again.pop()
        elif self._stop_file.exists():
            if not self._stopped:
                self._stopped = True
                self._notes.write(f"stopped {boot_clock():.4f} {self._next}\n")
            return
        else:
            number = self._next
            self._next += 1
        self.emit([f"word{number % WORDS}", number], tup_id=number)

    def ack(self, tup_id: int) -> None:
        self._notes.write(f"acked {boot_clock():.4f} {tup_id}\n")
        self._acked.add(tup_id)
        while self._done in self._acked:
            self._acked.discard(self._done)
            self._done += 1
        self.context.state.save({"next": self._done})

    def fail(self, tup_id: int) -> None:
        self._notes.write(f"failed {boot_clock():.4f} {tup_id}\n")
        self._again.append(tup_id)


class Relay(Bolt):
    """Passes on."""

    outputs = ["word", "number"]

    def process(self, tup: Tuple) -> None:
        self.emit(list(tup.values))


class Count(Bolt):
    """Saves how often each number came, before it acks."""

    def process(self, tup: Tuple) -> None:
        _, number = tup.values
        key = str(number)
        times = int(self.context.state.get(key, 0))
        self.context.state.save({key: times + 1})


class Counted(Topology):
    """numbers -> relay -> count, over three workers."""

    config = {"topology.workers": 3, "topology.message.timeout.secs": 30}

    numbers = Numbers.spec()
    relay = Relay.spec(inputs=[numbers], par=2)
    count = Count.spec(inputs={relay: Grouping.fields("word")}, par=3)
