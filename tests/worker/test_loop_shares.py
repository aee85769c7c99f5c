"""Components whose slow calls take their worker's loop are named, with figures and remedy."""

from __future__ import annotations

import time
from typing import Any

import pytest

from storm_dagster.api import Bolt, Spout, TopologyBuilder
from storm_dagster.model.names import SLOW_CALLS
from storm_dagster.model.records import TaskError
from storm_dagster.operations.read.explaining import slow_call_problems
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_dagster.worker.runtime.loop_shares import (
    WINDOW_SECS,
    LoopShares,
    LoopUse,
    loop_use,
    slow_components,
)
from storm_dagster.worker.tasks.errors import ErrorReporter


@pytest.mark.parametrize(
    ("uses", "slow"),
    [
        ({"a": (29.0, 100), "b": (0.5, 1000)}, {"a"}),
        ({"a": (16.0, 320)}, {"a"}),
        ({"a": (14.0, 100)}, set()),
        # Computes all the time, in short calls: no other task waits long for it.
        ({"a": (29.0, 1_000_000)}, set()),
        ({"a": (8.0, 30), "b": (9.0, 30), "c": (2.0, 30), "d": (5.0, 1_000_000)}, {"a", "b"}),
        # A call that has not returned.
        ({"a": (29.0, 0)}, {"a"}),
    ],
)
def test_only_slow_calls_that_take_more_than_half_are_named(
    uses: dict[str, tuple[float, int]], slow: set[str]
) -> None:
    after = {name: LoopUse(1, secs, calls) for name, (secs, calls) in uses.items()}
    assert set(slow_components({}, after, 30.0)) == slow


def test_slow_calls_among_many_quick_ones_are_named() -> None:
    after = {
        "tick": LoopUse(1, 20.0, 1_000_000, slow_secs=18.0, slow_passes=30),
        "quick": LoopUse(2, 9.0, 1_000_000, slow_secs=0.1, slow_passes=3),
    }
    (error,) = slow_components({}, after, 30.0).values()
    assert "'tick' took 60 %" in str(error) and "30 calls of 600 ms" in str(error)


class Sleeper(Spout):
    """Spout that sleeps when it has nothing to emit, as most of streamparse's do."""

    def next_tuple(self) -> None:
        time.sleep(0.02)


class SometimesSleeper(Spout):
    """Spout that emits at every call, and sleeps at every fiftieth."""

    calls = 0

    def next_tuple(self) -> None:
        self.calls += 1
        self.emit([self.calls])
        if self.calls % 50 == 0:
            time.sleep(0.05)


class SlowClock(Spout):
    """Spout whose clock method, as that of a source without a thread, takes long."""

    def next_tuple(self) -> None:
        pass

    def _on_clock(self) -> None:
        time.sleep(0.15)


class SlowTicks(Bolt):
    """Bolt that works at each tick."""

    def process(self, tup: Any) -> None:
        pass

    def process_tick(self, tup: Any) -> None:
        time.sleep(0.15)


class Quick(Spout):
    """Spout that returns at once."""

    def next_tuple(self) -> None:
        pass


class Blocking(Sleeper):
    """The same in a thread of its own."""

    blocking = True


def _harness(**spouts: Any) -> TopologyHarness:
    builder = TopologyBuilder("shares")
    for name, spout in spouts.items():
        builder.set_spout(name, spout, outputs=["n"], par=2)
    return TopologyHarness(builder)


def _slow_components(harness: TopologyHarness, secs: float) -> dict[str, Any]:
    """The slow components of a window in which the loop runs for so many seconds."""
    runners = list(harness.engine.runners.values())
    begin = time.monotonic()
    before = loop_use(runners)
    while time.monotonic() < begin + secs:
        harness.engine.run(time.monotonic())
    return slow_components(before, loop_use(runners), time.monotonic() - begin)


def _await_slow(harness: TopologyHarness, component: str, secs: float) -> dict[str, Any]:
    """The slow components of the first window in which the machine stops no other component."""

    def window() -> dict[str, Any] | None:
        slow = _slow_components(harness, secs)
        return slow if set(slow) == {component} else None

    return eventually(window, 30, f"a window in which only {component} is slow")


def test_spouts_that_sleep_on_the_loop_are_named_once() -> None:
    with _harness(sleeper=Sleeper, quick=Quick, other=Blocking) as harness:
        slow = _await_slow(harness, "sleeper", 0.5)
        assert "set blocking = True" in str(slow["sleeper"])


@pytest.mark.parametrize("slow", [SometimesSleeper, SlowClock, SlowTicks])
def test_every_callback_on_the_loop_counts(slow: Any) -> None:
    builder = TopologyBuilder("shares")
    builder.set_spout("quick", Quick, outputs=["n"])
    if issubclass(slow, Bolt):
        ticks = {"topology.tick.tuple.freq.secs": 0.1}
        builder.set_bolt("slow", slow, inputs=["quick"], config=ticks)
    else:
        builder.set_spout("slow", slow, outputs=["n"])
    with TopologyHarness(builder) as harness:
        harness.engine.run(time.monotonic())
        _await_slow(harness, "slow", 1.0)


def test_a_component_is_reported_once() -> None:
    with _harness(sleeper=Sleeper) as harness:
        runners = harness.engine.runners.values()
        sleepers = [runner for runner in runners if runner.component == "sleeper"]
        shares = LoopShares()
        assert shares.check(0.0, sleepers) == []
        for window in (1, 2):
            for runner in sleepers:
                runner.loop_time.add(WINDOW_SECS)
            reported = shares.check(window * WINDOW_SECS, sleepers)
            assert [component for _, component, _ in reported] == ["sleeper"] * (window == 1)


def test_doctor_and_the_page_name_slow_calls_for_a_day() -> None:
    reported: list[tuple[str, TaskError]] = []

    def record(task: int, component: str, text: str, secs: int, group: str) -> None:
        error = TaskError(task=task, host="h", port=1, time=secs, error=text, group=group)
        reported.append((component, error))

    reporter = ErrorReporter({}, record, time.monotonic)
    use = {"sleeper": LoopUse(7, 29.0, 100)}
    (error,) = slow_components({}, use, 30.0).values()
    reporter(7, "sleeper", error, SLOW_CALLS)
    reporter(7, "sleeper", ValueError("another"), "process")
    now = reported[0][1].time
    (problem,) = slow_call_problems(reported, now + 60)
    assert problem.startswith("calls of component 'sleeper' took 97 %")
    assert slow_call_problems(reported, now + 90_000) == []
