"""Topologies that the tests of ``storm-dagster run`` run in processes of their own."""

from __future__ import annotations

import threading
import time
from typing import Any

from storm_dagster.api import Bolt, Grouping, Spout, StatefulBolt, Topology, bolt, spout

NUMBERS = 200


class Numbers(Spout):
    """The numbers from 0 to 199, each once; failed ones are emitted once more."""

    outputs = ["number"]

    def initialize(self, conf: Any, context: Any) -> None:
        self.waiting = list(range(NUMBERS))

    def next_tuple(self) -> None:
        if self.waiting:
            number = self.waiting.pop(0)
            self.emit([number], tup_id=number)

    def fail(self, tup_id: Any) -> None:
        self.waiting.append(tup_id)


class Double(Bolt):
    """Twice each number."""

    outputs = ["number"]

    def process(self, tup: Any) -> None:
        self.emit([2 * tup.values[0]])


class BlockingDouble(Double):
    """The same in a thread of its own."""

    blocking = True


class Sum(StatefulBolt):
    """Sum of all numbers, kept in the state."""

    outputs = ["sum"]

    def process(self, tup: Any) -> None:
        total = self.state.get("sum", 0) + tup.values[0]
        self.state["sum"] = total
        self.emit([total])


class Picky(Bolt):
    """Raises for one number until it has seen it twice; reports to Dagster at the last one."""

    outputs = ["number"]

    def initialize(self, conf: Any, context: Any) -> None:
        self.seen = 0

    def process(self, tup: Any) -> None:
        number = tup.values[0]
        if number == 13:
            self.seen += 1
            if self.seen < 3:
                raise ValueError("thirteen")
        if number == NUMBERS - 1:
            self.dagster.materialize("lake/hour", partition="2026-01-01", metadata={"rows": number})
        self.emit([number])


class Sums(Topology):
    config = {"topology.workers": 3}
    numbers = Numbers.spec()
    double = Double.spec(inputs=[numbers], par=2)
    total = Sum.spec(inputs={double: Grouping.GLOBAL})


class Blocking(Topology):
    numbers = Numbers.spec()
    double = BlockingDouble.spec(inputs=[numbers])
    total = Sum.spec(inputs={double: Grouping.GLOBAL})


class Fails(Topology):
    numbers = Numbers.spec()
    picky = Picky.spec(inputs=[numbers])


class NeverStarts(Topology):
    """Its spout cannot be initialized."""

    class Broken(Spout):
        outputs = ["number"]

        def initialize(self, conf: Any, context: Any) -> None:
            raise ValueError("the source is not there")

        def next_tuple(self) -> None:
            raise AssertionError

    numbers = Broken.spec()
    double = Double.spec(inputs=[numbers])


class NeverYields(Topology):
    """Its spout does not return."""

    class Stuck(Spout):
        outputs = ["number"]

        def next_tuple(self) -> None:
            while True:
                time.sleep(0.1)

    numbers = Stuck.spec()
    double = Double.spec(inputs=[numbers])


@spout(outputs=["tick", "thread"])
def ticks() -> Any:
    while True:
        time.sleep(0.001)
        yield time.monotonic(), threading.current_thread().name


@bolt(outputs=["tick"])
def passes_on(tick: float, thread: str) -> float:
    return tick


class Endless(Topology):
    config = {"topology.max.spout.pending": 100}
    ticks = ticks.spec()
    passes_on = passes_on.spec(inputs=[ticks])
