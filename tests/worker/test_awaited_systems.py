"""Components that name a system that does not answer: no try of a tuple is used up."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from storm_dagster.api import (
    BatchingBolt,
    Bolt,
    ReliableSpout,
    Spout,
    SystemUnavailable,
    TopologyBuilder,
    Tuple,
    TupleWindow,
    Window,
    WindowedBolt,
)
from storm_dagster.connectors import FileSink, PostgresSink, SinkBolt
from storm_dagster.model.names import AWAITED_METRIC
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.local_workers import LocalWorkers

_OUTAGE_SECS = 300.0
"""Simulated time of an outage: ten message timeouts."""


class System:
    """A system of a user, which is away or answers."""

    is_away: ClassVar[bool] = False
    stored: ClassVar[list[Any]] = []
    calls: ClassVar[int] = 0

    @classmethod
    def store(cls, *values: Any) -> None:
        cls.calls += 1
        if cls.is_away:
            raise SystemUnavailable("the orders API", "connection refused")
        cls.stored.extend(values)


@pytest.fixture(autouse=True)
def system() -> type[System]:
    System.is_away = True
    System.stored = []
    System.calls = 0
    return System


class Storing(Bolt):
    def process(self, tup: Tuple) -> None:
        System.store(tup.values[0])


class StoringInThread(Storing):
    blocking = True


class StoringAsync(Bolt):
    async def process(self, tup: Tuple) -> None:
        System.store(tup.values[0])


class StoringBatches(BatchingBolt):
    config = {"topology.tick.tuple.freq.secs": 1}

    def process_batch(self, key: Any, tups: list[Tuple]) -> None:
        System.store(*[tup.values[0] for tup in tups])


class StoringBatchesInThread(StoringBatches):
    blocking = True


class StoringWindows(WindowedBolt):
    window = Window.tumbling(count=5)
    window_tries = 2

    def process_window(self, window: TupleWindow) -> None:
        System.store(*[tup.values[0] for tup in window.tuples])


class Opening(Bolt):
    """Connects when it opens."""

    def initialize(self, conf: Any, context: Any) -> None:
        System.store()

    def process(self, tup: Tuple) -> None:
        System.store(tup.values[0])


class IntoDatabase(SinkBolt):
    """Writes to a PostgreSQL that does not listen."""

    sink: ClassVar[Any] = PostgresSink("orders")


class OntoDisk(SinkBolt):
    """Writes to a folder that cannot be made."""

    sink: ClassVar[Any] = FileSink("/dev/null/orders")


@pytest.mark.parametrize("bolt", [IntoDatabase, OntoDisk])
def test_a_sink_whose_system_is_away_writes_few_lines(
    bolt: type[SinkBolt], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    conf = {
        "postgres.host": "127.0.0.1",
        "postgres.port": free_port(),
        "postgres.user": "nobody",
        "postgres.dbname": "none",
    }
    rows = [[n] for n in range(10)]
    harness = TopologyHarness(
        _bolt_topology(bolt), {"numbers": rows}, conf=conf, state_dir=tmp_path, simulated=True
    )
    with harness:
        runner = _runner(harness, "store")
        eventually(lambda: harness.advance(1) and runner.target_is_away(), 60, "it waits")
        lines = len(caplog.records)
        result = harness.advance(_OUTAGE_SECS, timeout=60)
        assert len(caplog.records) - lines <= _OUTAGE_SECS / 60, "at most one line a minute"
        assert runner.stats.metrics[AWAITED_METRIC].startswith("waits for the sink ")
        assert not result.failed.get("numbers"), "no try is used up"
        # Before the first tuple, and with it.
        assert 1 <= len(harness.errors) <= 2, harness.errors


class Polling(Spout):
    """Reads numbers of the system."""

    outputs = ["n"]

    def initialize(self, conf: Any, context: Any) -> None:
        self.next_number = 0

    def next_tuple(self) -> None:
        System.store()
        if self.next_number < 10:
            self.emit([self.next_number], tup_id=self.next_number)
            self.next_number += 1


class PollingInThread(Polling):
    blocking = True


def _runner(harness: TopologyHarness, component: str) -> Any:
    return next(
        runner for runner in harness.engine.runners.values() if runner.component == component
    )


def _bolt_topology(bolt: type[Bolt]) -> TopologyBuilder:
    builder = TopologyBuilder("awaited")
    builder.set_spout("numbers", ReliableSpout, outputs=["n"])
    builder.set_bolt("store", bolt, inputs=["numbers"], outputs=[])
    return builder


def _check_reports(harness: TopologyHarness, component: str) -> None:
    """Check that the errors are the begin and the end of one outage."""
    errors = [str(error) for name, error in harness.errors if name == component]
    assert len(errors) == 2, errors
    assert errors[0].startswith("waits for the orders API since 1970-01-01 ")
    assert "connection refused" in errors[0]
    assert errors[1].startswith("the orders API answers again: it was away for ")
    assert _runner(harness, component).stats.metrics[AWAITED_METRIC] == ""


@pytest.mark.parametrize(
    "bolt",
    [
        Storing,
        StoringInThread,
        StoringAsync,
        StoringBatches,
        StoringBatchesInThread,
        StoringWindows,
        Opening,
    ],
)
def test_a_bolt_that_names_a_system_keeps_its_tuples_until_it_answers(
    bolt: type[Bolt], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rows = [[n] for n in range(10)]
    harness = TopologyHarness(
        _bolt_topology(bolt), {"numbers": rows}, state_dir=tmp_path, simulated=True
    )
    with harness:
        runner = _runner(harness, "store")
        eventually(lambda: harness.advance(1) and runner.target_is_away(), 60, "it waits")
        lines = len(caplog.records)
        result = harness.advance(_OUTAGE_SECS, timeout=60)
        assert runner.stats.metrics[AWAITED_METRIC].startswith("waits for the orders API since ")
        assert not result.failed.get("numbers"), "no try is used up"
        assert not System.stored
        # Tuples of windows are acked when they are in the state.
        assert bolt is StoringWindows or not result.acked.get("numbers")
        assert len(caplog.records) - lines <= _OUTAGE_SECS / 60, "at most one line a minute"
        # 30 of 10 s, and the first ones, by each of the tuples that an async bolt has in flight.
        assert System.calls <= 40 * 10
        System.is_away = False
        eventually(
            lambda: len(harness.advance(5).acked.get("numbers", ())) == 10, 60, "all are stored"
        )
        assert sorted(System.stored) == list(range(10)), "each once"
        assert not harness.run().failed.get("numbers")
        _check_reports(harness, "store")


@pytest.mark.parametrize("spout", [Polling, PollingInThread])
def test_a_spout_that_names_a_system_is_called_after_growing_pauses(spout: type[Spout]) -> None:
    builder = TopologyBuilder("awaited")
    builder.set_spout("poll", spout)
    builder.set_bolt("store", Storing, inputs=["poll"], outputs=[])
    with TopologyHarness(builder, simulated=True) as harness:
        runner = _runner(harness, "poll")
        eventually(
            lambda: harness.advance(1) and AWAITED_METRIC in runner.stats.metrics, 60, "it waits"
        )
        calls = System.calls
        for _ in range(12):
            harness.advance(_OUTAGE_SECS / 12)
            # A thread calls the spout in real time.
            time.sleep(0.05)
        assert 0 < System.calls - calls <= _OUTAGE_SECS / 5
        assert runner.stats.metrics[AWAITED_METRIC].startswith("waits for the orders API since ")
        System.is_away = False
        eventually(
            lambda: harness.advance(5) and set(range(10)) <= set(System.stored), 60, "all emitted"
        )
        _check_reports(harness, "poll")


class Endless(Spout):
    """A hundred numbers a second, each with one try."""

    outputs = ["n"]

    def initialize(self, conf: Any, context: Any) -> None:
        self.emitted = 0
        self.failed = 0
        self.next_at = time.monotonic()

    def next_tuple(self) -> None:
        if time.monotonic() >= self.next_at:
            self.next_at = time.monotonic() + 0.01
            self.emit([self.emitted], tup_id=self.emitted)
            self.emitted += 1

    def fail(self, tup_id: Any) -> None:
        self.failed += 1


def test_a_bolt_that_waits_holds_the_spout_of_another_worker(tmp_path: Path) -> None:
    System.is_away = False
    builder = TopologyBuilder("awaited")
    builder.set_spout("numbers", Endless)
    builder.set_bolt("store", Storing, inputs="numbers", outputs=[])
    slots = {"numbers": 0, "store": 1, "__acker": 1}
    # Shorter than the outage.
    conf = {"topology.message.timeout.secs": 2}
    with LocalWorkers(builder, slots, conf, tmp_path) as workers:
        spout: Any = workers.runner("numbers")

        def turn_until(condition: Any, what: str) -> None:
            eventually(lambda: workers.turn() or condition(), 60, what, interval=0.003)

        turn_until(lambda: len(System.stored) > 20, "the stream runs")
        System.is_away = True
        turn_until(lambda: spout.held, "the spout is held")
        emitted = spout.instance.emitted
        until = time.monotonic() + 5
        turn_until(lambda: time.monotonic() > until, "more than two timeouts pass")
        assert spout.instance.emitted == emitted and not spout.instance.failed
        System.is_away = False
        turn_until(lambda: spout.instance.emitted > emitted + 20, "the stream goes on")
        assert not spout.instance.failed, "no try is used up"
        assert len(workers.errors) == 2, "begin and end of the outage"


class Recovering(Bolt):
    def process(self, tup: Tuple) -> None:
        System.store()
        raise ValueError("a bad row")


def test_another_error_ends_the_wait_and_fails_its_tuple() -> None:
    builder = _bolt_topology(Recovering)
    with TopologyHarness(builder, {"numbers": [[1]]}, simulated=True) as harness:
        harness.advance(10)
        System.is_away = False
        result = harness.advance(20)
        assert result.failed["numbers"], "it fails by itself"
        errors = [str(error) for _, error in harness.errors]
        assert "a bad row" in errors[1] or "a bad row" in errors[2]
        assert any("the orders API answers again" in error for error in errors)


class TwoSystems:
    """Two systems of a user, of which some are away."""

    away: ClassVar[set[str]] = set()
    stored: ClassVar[list[Any]] = []

    @classmethod
    def store(cls, system: str, value: Any) -> None:
        if system in cls.away:
            raise SystemUnavailable(system, f"{system} refuses")
        cls.stored.append(value)


@pytest.fixture
def two() -> type[TwoSystems]:
    TwoSystems.away = {"the orders API", "the calendar"}
    TwoSystems.stored = []
    return TwoSystems


class TwoCalls(Bolt):
    """Needs one system for its tuples, and another one for its ticks."""

    config = {"topology.tick.tuple.freq.secs": 1}

    def process(self, tup: Tuple) -> None:
        TwoSystems.store("the orders API", tup.values[0])

    def process_tick(self, tup: Tuple) -> None:
        TwoSystems.store("the calendar", "tick")


class TwoTuples(Bolt):
    """Has two tuples in flight, each of which needs another system."""

    async def process(self, tup: Tuple) -> None:
        system = "the orders API" if tup.values[0] == 0 else "the calendar"
        # Long enough for the other one to begin.
        await asyncio.sleep(0.1)
        TwoSystems.store(system, tup.values[0])


def _systems_of(text: str) -> set[str]:
    """The systems that the metric names."""
    return set(re.findall(r"waits for (the [\w ]+?) since ", text))


@pytest.mark.parametrize(
    ("bolt", "first"),
    [(TwoCalls, "the calendar"), (TwoTuples, "the calendar"), (TwoTuples, "the orders API")],
)
def test_a_task_that_waits_for_two_systems_shows_each_until_it_answers(
    bolt: type[Bolt], first: str, two: type[TwoSystems]
) -> None:
    (second,) = two.away - {first}
    builder = _bolt_topology(bolt)
    with TopologyHarness(builder, {"numbers": [[0], [1]]}, simulated=True) as harness:
        runner = _runner(harness, "store")

        def awaits(*systems: str) -> None:
            def shown() -> bool:
                harness.advance(1)
                time.sleep(0.01)
                text = runner.stats.metrics.get(AWAITED_METRIC, "")
                return _systems_of(text) == set(systems)

            eventually(shown, 60, f"it waits for {systems}")

        awaits(first, second)
        harness.advance(60)
        awaits(first, second)
        two.away = {second}
        awaits(second)
        harness.advance(60)
        awaits(second)
        assert runner.target_is_away(), "spouts are held"
        two.away = set()
        awaits()
        assert not runner.target_is_away()
        texts = [str(error) for _, error in harness.errors]
        ends = [text for text in texts if "answers again" in text]
        assert len(texts) == 4, "begin and end of each"
        assert [text.partition(" answers")[0] for text in ends] == [first, second]


class Reporting(Bolt):
    """Reports the first number to Dagster, and stores the second one."""

    assets = ["lake/orders"]

    def process(self, tup: Tuple) -> None:
        if tup.values[0] == 0:
            self.dagster.observe("lake/orders")
        else:
            System.store(tup.values[0])


class ReportingInThread(Reporting):
    blocking = True


@pytest.mark.parametrize("first", ["events", "system"])
@pytest.mark.parametrize("bolt", [Reporting, ReportingInThread])
def test_a_task_whose_events_wait_and_that_names_a_system_shows_both(
    bolt: type[Bolt], first: str
) -> None:
    builder = _bolt_topology(bolt)
    with TopologyHarness(builder, {"numbers": [[0], [1]]}, simulated=True) as harness:
        harness.dagster_up = False
        runner = _runner(harness, "store")

        def awaits(*systems: str) -> bool:
            harness.advance(1)
            time.sleep(0.01)
            text = runner.stats.metrics.get(AWAITED_METRIC, "")
            return all(
                (name in text) == (name in systems) for name in ("the cluster", "the orders")
            )

        eventually(lambda: awaits("the cluster", "the orders"), 60, "it waits for both")
        if first == "events":
            harness.dagster_up = True
            eventually(lambda: awaits("the orders"), 60, "it waits for the API")
            System.is_away = False
        else:
            System.is_away = False
            eventually(lambda: awaits("the cluster"), 60, "it waits for the cluster")
            harness.dagster_up = True
        eventually(lambda: awaits(), 60, "it waits for nothing")


class Crashing(Bolt):
    """Its task crashes while it waits; it needs no system after that."""

    config = {"topology.tick.tuple.freq.secs": 1}
    crashes: ClassVar[int] = 0

    async def process(self, tup: Tuple) -> None:
        System.store(tup.values[0])

    def process_tick(self, tup: Tuple) -> None:
        if not type(self).crashes and not System.is_away:
            type(self).crashes += 1
            raise SystemExit("the task ends")


def test_a_task_that_is_made_again_waits_for_nothing() -> None:
    Crashing.crashes = 0
    builder = _bolt_topology(Crashing)
    with TopologyHarness(builder, {"numbers": [[1]]}, simulated=True) as harness:
        runner = _runner(harness, "store")
        eventually(lambda: harness.advance(1) and runner.target_is_away(), 60, "it waits")
        # The next tick ends the task, and its tuple fails with it.
        System.is_away = False
        runner.instance.process = _never
        eventually(
            lambda: harness.advance(1) and Crashing.crashes and not runner.target_is_away(),
            60,
            "the new task waits for nothing",
        )
        assert runner.stats.metrics[AWAITED_METRIC] == ""


async def _never(tup: Tuple) -> None:
    raise SystemUnavailable("the orders API", "it was away")
