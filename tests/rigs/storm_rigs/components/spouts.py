"""Spouts of tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

from storm_dagster.api import Spout


class InputSpout(Spout):
    """Place of the tuples that a test gives to its harness; it emits none itself."""

    def next_tuple(self) -> None:
        """Emit nothing."""


class Numbers(InputSpout):
    """Input of one number."""

    outputs = ["n"]


class Words(InputSpout):
    """Input of one word."""

    outputs = ["word"]


class Sentences(InputSpout):
    """Input of several words in one text."""

    outputs = ["sentence"]


class RangeSpout(Spout):
    """Emit 1, 2, ... up to ``total``, by default without end.

    A test may raise ``total`` later. Without ``tracked`` the tuples have no ids. Failed ones are
    not emitted again.
    """

    outputs = ["n"]

    def __init__(self, total: int | None = None, tracked: bool = True) -> None:
        self.total = total
        self.tracked = tracked
        self.emitted = 0
        self.acked: list[int] = []
        self.failed: list[int] = []

    def next_tuple(self) -> None:
        """Emit the next number."""
        if self.total is None or self.emitted < self.total:
            self.emitted += 1
            self.emit([self.emitted], tup_id=self.emitted if self.tracked else None)

    def ack(self, tup_id: int) -> None:
        """Note the number."""
        self.acked.append(tup_id)

    def fail(self, tup_id: int) -> None:
        """Note the number."""
        self.failed.append(tup_id)


class QueueSpout(Spout):
    """Emit the values in ``queue``, which a test fills, in their order.

    The queue and the notes are the class's, since a task may restart: begin a test with
    :meth:`reset`. Ids are 1, 2, ... in the order of emission.
    """

    outputs = ["value"]
    queue: ClassVar[deque[Sequence[Any]]] = deque()
    emitted: ClassVar[list[int]] = []
    acked: ClassVar[list[int]] = []
    failed: ClassVar[list[int]] = []

    @classmethod
    def reset(cls, *values: Sequence[Any]) -> None:
        """Forget the notes of an earlier test, and queue ``values``."""
        for notes in (cls.emitted, cls.acked, cls.failed):
            notes.clear()
        cls.queue.clear()
        cls.queue.extend(values)

    def next_tuple(self) -> None:
        """Emit all that is queued."""
        while self.queue:
            self.emitted.append(len(self.emitted) + 1)
            self.emit(list(self.queue.popleft()), tup_id=self.emitted[-1])

    def ack(self, tup_id: int) -> None:
        """Note the id."""
        self.acked.append(tup_id)

    def fail(self, tup_id: int) -> None:
        """Note the id."""
        self.failed.append(tup_id)
