"""What counts as a failure of a tuple of a ``ReliableSpout``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from storm_dagster.api import Bolt, ReliableSpout, Spout, Topology, Tuple, spout
from storm_dagster.testing.topology_harness import run_topology


class Numbers(ReliableSpout):
    def __init__(self) -> None:
        self.emits = self.letters = 0

    def give_up(self, *letter: object) -> bool:  # type: ignore[override]
        self.letters += 1
        return True


def test_workers_that_end_one_after_the_other_kill_no_tuple(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Spout, "emit", lambda self, *_, **__: setattr(self, "emits", self.emits + 1)
    )
    spout = Numbers()
    spout.emit([1], tup_id=1)
    for _ in range(10):
        spout._lost(1)
    assert (spout.emits, spout.letters, dict(spout.unacked_tuples).keys()) == (11, 0, {1})
    for _ in range(4):
        spout.fail(1)
    assert (spout.emits, spout.letters, spout.unacked_tuples) == (14, 1, {})


ROWS: list[Any] = []


@spout(outputs=["rows"])
def batches() -> Iterator[Any]:
    gathered: list[Any] = []
    for n in range(6):
        gathered.append([n])
        if len(gathered) == 3:
            yield gathered
            for one in gathered:
                one.clear()
            gathered.clear()


class FailsTwice(Bolt):
    tries = 0

    def process(self, tup: Tuple) -> None:
        type(self).tries += 1
        ROWS.append(tup.values[0])
        if self.tries <= 2:
            raise OSError("away")


class Reused(Topology):
    batches = batches.spec()
    fails = FailsTwice.spec(inputs=[batches])


def test_a_failed_tuple_is_emitted_again_as_it_was_emitted_first() -> None:
    FailsTwice.tries = 0
    ROWS.clear()
    run_topology(Reused)
    assert sorted(ROWS) == [[[0], [1], [2]]] * 2 + [[[3], [4], [5]]] * 2


def test_a_value_that_cannot_travel_is_named_by_the_first_emit() -> None:
    class Wrong(Topology):
        source = Odd.spec()

    (_, error), *_ = run_topology(Wrong).errors
    assert "field 'n' of stream 'default' is of type" in str(error)


class Odd(ReliableSpout):
    outputs: ClassVar[Any] = ["n"]
    left = 1

    def next_tuple(self) -> None:
        if self.left:
            self.left = 0
            self.emit([object()], tup_id=1)
