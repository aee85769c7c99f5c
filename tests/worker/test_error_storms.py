"""Callbacks that raise again and again are called ever less often, and their errors are counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from storm_dagster.api import Bolt, Spout, TopologyBuilder, spout
from storm_dagster.testing.topology_harness import TopologyHarness

_SECS = 300.0
"""Simulated time of a storm."""
_MAX_CALLS = 15
"""Calls in that time whose pauses grow from 1 s to 60 s: 6 to reach 60 s, one a minute, a few of
the engine's own.
"""


class Storm(Spout):
    """Spout one of whose callbacks always raises.

    ``raises``: the callback. It emits at most ``number`` tuples.
    """

    def __init__(self, raises: str, number: int = 0, stop: bool = False) -> None:
        self.raises = raises
        self.number = number
        self.error = StopIteration if stop else ValueError

    def _call(self, callback: str) -> None:
        if callback == self.raises:
            raise self.error(callback)

    def next_tuple(self) -> None:
        self._call("next_tuple")
        if self.number:
            self.number -= 1
            self.emit([self.number], tup_id=self.number)

    def ack(self, tup_id: Any) -> None:
        self._call("ack")

    def fail(self, tup_id: Any) -> None:
        self._call("fail")

    def _on_clock(self) -> None:
        self._call("clock")


class SharedGenerator(Spout):
    """Spout whose tasks share a generator, which ends: a well known mistake."""

    numbers = iter(())

    def next_tuple(self) -> None:
        self.emit([next(self.numbers)])


class Refusing(Bolt):
    """Bolt that fails every tuple, and raises at every tick."""

    auto_ack = False

    def process(self, tup: Any) -> None:
        self.fail(tup)

    def process_tick(self, tup: Any) -> None:
        raise ValueError("a tick")


class EverySecond(Spout):
    """Spout whose calls raise and return nothing in turn."""

    def initialize(self, conf: Any, context: Any) -> None:
        self.calls = 0

    def next_tuple(self) -> None:
        self.calls += 1
        if self.calls % 2:
            raise ValueError("every second call")


def _topology(spout: type[Spout], bolt: type[Bolt] | None = None, **args: Any) -> TopologyBuilder:
    builder = TopologyBuilder("storm")
    builder.set_spout("storm", spout, outputs=["number"], args=args)
    if bolt is not None:
        ticks = {"topology.tick.tuple.freq.secs": 0.1}
        builder.set_bolt("bolt", bolt, inputs=["storm"], config=ticks)
    return builder


@pytest.mark.parametrize(
    "builder",
    [
        _topology(Storm, raises="next_tuple"),
        _topology(Storm, raises="next_tuple", stop=True),
        _topology(SharedGenerator),
        _topology(EverySecond),
        _topology(Storm, raises="clock"),
        _topology(Storm, Refusing, raises=""),
    ],
    ids=["next_tuple", "StopIteration", "shared generator", "every second", "clock", "tick"],
)
def test_a_callback_that_always_raises_is_called_ever_less_often(builder: TopologyBuilder) -> None:
    with TopologyHarness(builder, simulated=True) as harness:
        harness.advance(_SECS, timeout=120)
        assert 6 <= len(harness.errors) <= _MAX_CALLS


@pytest.mark.parametrize(("callback", "bolt"), [("ack", None), ("fail", Refusing)])
def test_a_spout_whose_verdicts_always_raise_is_held(
    callback: str, bolt: type[Bolt] | None
) -> None:
    builder = _topology(Storm, bolt, raises=callback, number=10_000)
    conf = {"topology.max.spout.pending": 1}
    with TopologyHarness(builder, simulated=True, conf=conf) as harness:
        harness.advance(_SECS, timeout=120)
        errors = [error for component, error in harness.errors if component == "storm"]
        assert 12 <= len(errors) <= 10 + _MAX_CALLS


class Recovering(Spout):
    """Spout that fails three times in a row, then emits for ever, one of three calls failing."""

    def initialize(self, conf: Any, context: Any) -> None:
        self.calls = 0

    def next_tuple(self) -> None:
        self.calls += 1
        if self.calls <= 3 or (self.calls <= 30 and self.calls % 3 == 0):
            raise ValueError("a call")
        if self.calls <= 30:
            self.emit([self.calls])


def test_a_spout_that_recovers_is_called_at_once_again() -> None:
    with TopologyHarness(_topology(Recovering), simulated=True) as harness:
        harness.advance(4.0)
        assert len(harness.run().values("storm")) == 18


@spout(outputs=["number"])
def broken_file() -> Iterator[int]:
    yield 1
    yield 2
    raise ValueError("line 3")


def test_a_generator_that_fails_at_one_place_starts_ever_less_often() -> None:
    builder = TopologyBuilder("storm")
    builder.set_spout("storm", broken_file)
    with TopologyHarness(builder, simulated=True) as harness:
        harness.advance(_SECS, timeout=120)
        assert 6 <= len(harness.errors) <= _MAX_CALLS
        assert len(harness.run().values("storm")) <= 2 * _MAX_CALLS


class RareErrors(Spout):
    """Spout without tuples, one of whose calls raises every 30 s."""

    def initialize(self, conf: Any, context: Any) -> None:
        self.context = context
        self.calls: list[float] = []
        self.raise_at = 0

    def next_tuple(self) -> None:
        now = self.context.now_ms()
        self.calls.append(now)
        if now >= self.raise_at:
            self.raise_at = now + 30_000
            raise ValueError("a call")


def test_rare_errors_of_a_spout_without_tuples_cause_no_pause() -> None:
    with TopologyHarness(_topology(RareErrors), simulated=True) as harness:
        harness.advance(_SECS, timeout=120)
        assert 9 <= len(harness.errors) <= 11


class BlockingStorm(Storm):
    """The same in a thread of its own."""

    blocking = True


class BlockingEverySecond(EverySecond):
    """The same in a thread of its own."""

    blocking = True


@pytest.mark.parametrize(
    "builder",
    [_topology(BlockingStorm, raises="next_tuple"), _topology(BlockingEverySecond)],
    ids=["always", "every second"],
)
def test_a_spout_in_a_thread_is_called_ever_less_often(builder: TopologyBuilder) -> None:
    with TopologyHarness(builder) as harness:
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline:
            harness.engine.run(time.monotonic())
            time.sleep(0.01)
        assert 2 <= len(harness.errors) <= 4
        assert {type(error) for _, error in harness.errors} == {ValueError}
