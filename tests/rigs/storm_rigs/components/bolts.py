"""Bolts of tests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from storm_dagster.api import Bolt, Tuple

_LONGER_THAN_A_TEST_SECS = 3600.0


class DiscardBolt(Bolt):
    """Ack every tuple, and do nothing with it."""

    def process(self, tup: Tuple) -> None:
        """Do nothing."""


class CollectBolt(Bolt):
    """Keep the values of every tuple.

    ``received`` is what one task got. ``everything`` is what all tasks of this process got, in
    order, also those of an earlier topology: a test that reads it clears it first.
    """

    everything: ClassVar[list[list[Any]]] = []

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Begin with no tuple."""
        self.received: list[list[Any]] = []

    def process(self, tup: Tuple) -> None:
        """Keep the values."""
        self.received.append(tup.values)
        self.everything.append(tup.values)


class HoldBolt(CollectBolt):
    """Keep the values of every tuple, and neither ack nor fail it."""

    auto_ack = False


class AsyncHoldBolt(CollectBolt):
    """Keep the values of every tuple, and await the end of the task in it."""

    async def process(self, tup: Tuple) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Wait for longer than a test lasts."""
        super().process(tup)
        await asyncio.sleep(_LONGER_THAN_A_TEST_SECS)


class RejectBolt(CollectBolt):
    """Raise ``ValueError`` for some tuples, and pass the others on.

    Rejected are the tuples whose first value is in ``values``, by default all; each of these values
    ``times`` times, by default always. Others are kept, and emitted if the bolt has ``outputs``.
    """

    def __init__(self, values: Sequence[Any] | None = None, times: int | None = None) -> None:
        self.values = values
        self.times = times

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Begin with no tuple rejected."""
        super().initialize(conf, context)
        self.rejected: Counter[Any] = Counter()

    def process(self, tup: Tuple) -> None:
        """Raise, or keep the values and emit them."""
        value = tup.values[0]
        if self.values is None or value in self.values:
            key = repr(value)
            if self.times is None or self.rejected[key] < self.times:
                self.rejected[key] += 1
                raise ValueError(f"{key} is rejected")
        super().process(tup)
        if self.context.streams:
            self.emit(tup.values)


class SleepBolt(Bolt):
    """Take ``secs`` for each tuple."""

    def __init__(self, secs: float) -> None:
        self.secs = secs

    def process(self, tup: Tuple) -> None:
        """Sleep."""
        time.sleep(self.secs)


class BlockingSleepBolt(SleepBolt):
    """Take ``secs`` for each tuple, in a thread of the task."""

    blocking = True


class CountBolt(Bolt):
    """Count words, and emit each with its count so far."""

    outputs = ["word", "count"]

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Begin with no word."""
        self.counts: Counter[str] = Counter()

    def process(self, tup: Tuple) -> None:
        """Count the word."""
        word = tup.values[0]
        self.counts[word] += 1
        self.emit([word, self.counts[word]])
