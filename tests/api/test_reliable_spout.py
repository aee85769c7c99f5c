"""What counts as a failure of a tuple of a ``ReliableSpout``."""

from __future__ import annotations

import pytest

from storm_dagster.api import ReliableSpout, Spout


class Numbers(ReliableSpout):
    def __init__(self) -> None:
        self.emits = self.letters = 0

    def give_up(self, *letter: object) -> bool:  # type: ignore[override]
        self.letters += 1
        return True


def test_workers_that_end_one_after_the_other_kill_no_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spout, "emit", lambda self, *_, **__: setattr(self, "emits", self.emits + 1))
    spout = Numbers()
    spout.emit([1], tup_id=1)
    for _ in range(10):
        spout._lost(1)
    assert (spout.emits, spout.letters, dict(spout.unacked_tuples).keys()) == (11, 0, {1})
    for _ in range(4):
        spout.fail(1)
    assert (spout.emits, spout.letters, spout.unacked_tuples) == (14, 1, {})
