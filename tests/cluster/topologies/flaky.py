"""A topology whose bolt raises on one tuple in a thousand, the first time that it sees it."""

from __future__ import annotations

from typing import Any

from storm_dagster.api import Bolt, Spout, Topology, Tuple

TOTAL = 3_000


class Numbers(Spout):
    """0 .. TOTAL-1, each until it is acked; acked ones are saved."""

    outputs = ["number"]

    def initialize(self, conf: Any, context: Any) -> None:
        self._todo = list(range(TOTAL))
        self._acked: set[int] = set()

    def next_tuple(self) -> None:
        if self._todo:
            number = self._todo.pop()
            self.emit([number], tup_id=number)

    def ack(self, tup_id: int) -> None:
        self._acked.add(tup_id)
        if len(self._acked) == TOTAL:
            self.context.state.save({"acked": len(self._acked)})

    def fail(self, tup_id: int) -> None:
        self._todo.append(tup_id)


class Picky(Bolt):
    """Raises once for every thousandth number."""

    def initialize(self, conf: Any, context: Any) -> None:
        self._refused: set[int] = set()

    def process(self, tup: Tuple) -> None:
        number = tup.values[0]
        if number % 1_000 == 7 and number not in self._refused:
            self._refused.add(number)
            raise ValueError(f"I do not like {number}")


class Flaky(Topology):
    """numbers -> picky."""

    numbers = Numbers.spec()
    picky = Picky.spec(inputs=[numbers])
