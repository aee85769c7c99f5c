"""A Spark server that is killed under a steady stream: every tuple is processed, and no try of a
tuple is used up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from storm_dagster.api import (
    Bolt,
    ReliableSpout,
    SparkBolt,
    SparkQuery,
    SparkSpout,
    TopologyBuilder,
    Tuple,
)
from storm_dagster.api.spark.session import drop_worker_session, worker_session
from storm_dagster.model.names import AWAITED_METRIC
from storm_dagster.model.wire import DeadLetterQuery
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.servers.ports import free_port
from storm_rigs.servers.spark_server import SparkServer
from storm_rigs.stage.local_workers import LocalWorkers

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


class Stream(ReliableSpout):
    """``RATE`` numbers a second while ``RUNS``; a failed one is emitted again at once."""

    outputs = ["n"]
    RATE: ClassVar[int] = 0
    RUNS: ClassVar[bool] = False

    def initialize(self, conf: Any, context: Any) -> None:
        self.emitted = 0
        self.due_at = time.monotonic()
        self.fails: Counter[int] = Counter()

    def next_tuple(self) -> None:
        now = time.monotonic()
        # After a pause it goes on at its rate.
        self.due_at = max(self.due_at, now - 0.1)
        while self.RUNS and self.due_at <= now:
            self.emit([self.emitted], tup_id=self.emitted)
            self.emitted += 1
            self.due_at += 1 / self.RATE

    def fail(self, tup_id: int) -> None:
        self.fails[tup_id] += 1
        super().fail(tup_id)


class Seen(Bolt):
    """Keeps the numbers that come out of Spark."""

    numbers: ClassVar[set[int]] = set()

    def process(self, tup: Tuple) -> None:
        self.numbers.add(tup.values[0])


def negated(frame: Any) -> Any:
    return frame.selectExpr("-n AS n")


def hides_the_cause(frame: Any) -> Any:
    """As a function that writes might do."""
    try:
        return frame.selectExpr("-n AS n").collect() and frame.selectExpr("-n AS n")
    except Exception:
        raise RuntimeError("cannot store the batch") from None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SparkServer]:
    server = SparkServer(free_port(), tmp_path / "spark")
    server.start()
    yield server
    server.stop()


def kill(server: SparkServer) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(patience(30))


@pytest.fixture
def workers(server: SparkServer, tmp_path: Path) -> Iterator[Callable[[str, float], LocalWorkers]]:
    made: list[LocalWorkers] = []
    confs: list[dict[str, Any]] = []

    def make(function: str, timeout_secs: float) -> LocalWorkers:
        builder = TopologyBuilder("away")
        builder.set_spout("stream", Stream)
        args = {"function": f"{__name__}:{function}", "schema": "n long", "batch_secs": 0.5}
        builder.set_bolt("spark", SparkBolt, inputs="stream", outputs=["n"], args=args)
        builder.set_bolt("seen", Seen, inputs="spark", outputs=[])
        conf = {
            "spark.remote": server.remote,
            "topology.message.timeout.secs": timeout_secs,
            "topology.dead.letter.tries": 3,
        }
        confs.append(conf)
        # A server that has just started takes long for its first jobs.
        worker_session(conf).createDataFrame([(1,)], "n long").selectExpr("-n AS n").collect()
        slots = {"stream": 0, "spark": 1, "seen": 0, "__acker": 2}
        made.append(LocalWorkers(builder, slots, conf, tmp_path / "state"))
        return made[-1]

    Seen.numbers.clear()
    yield make
    Stream.RUNS = False
    for running in made:
        running.close()
    for conf in confs:
        drop_worker_session(conf)


def run_through_an_outage(
    server: SparkServer, running: LocalWorkers, rate: int, outage_secs: float, before_secs: float
) -> tuple[Any, list[str]]:
    """Run a stream, kill Spark for that long, and return the spout and the errors when all that it
    emitted is done.
    """
    spout: Any = running.runner("stream")
    bolt = running.runner("spark")

    def turn_until(condition: Callable[[], bool], secs: float, what: str) -> None:
        eventually(lambda: running.turn() or condition(), secs, what, interval=0.003)  # type: ignore[func-returns-value]

    turn_until(lambda: all(one.status == "running" for one in (spout, bolt)), 60, "the tasks run")
    Stream.RATE, Stream.RUNS = rate, True
    began = time.monotonic()
    turn_until(
        lambda: time.monotonic() - began > before_secs and len(Seen.numbers) > rate,
        120,
        "the first rows",
    )
    kill(server)
    killed = time.monotonic()
    turn_until(
        lambda: time.monotonic() - killed > outage_secs, outage_secs + 60, "the end of the outage"
    )
    emitted = spout.instance.emitted
    server.start()
    # It goes on, and then comes to its end.
    turn_until(lambda: spout.instance.emitted > emitted + rate, 300, "the stream goes on")
    Stream.RUNS = False
    turn_until(lambda: spout.stats.acked >= spout.instance.emitted, 300, "all tuples are acked")
    return spout, [str(error) for error in running.errors]


@pytest.mark.parametrize(
    "function", ["negated", pytest.param("hides_the_cause", marks=pytest.mark.long)]
)
def test_no_tuple_is_given_up_while_spark_is_away(
    server: SparkServer,
    workers: Callable[[str, float], LocalWorkers],
    function: str,
    recwarn: pytest.WarningsRecorder,
) -> None:
    # Four times as long as a tuple may take: its three tries would be used up.
    running = workers(function, patience(4))
    spout, errors = run_through_an_outage(
        server, running, rate=50, outage_secs=patience(16), before_secs=2
    )
    assert not spout.letters.page(DeadLetterQuery(0))["entries"], "no dead letter"
    assert {-n for n in Seen.numbers} == set(range(spout.instance.emitted)), (
        "every tuple is processed"
    )
    # A tuple may time out while the loss of the server is noticed.
    assert max(spout.instance.fails.values(), default=0) <= 1
    assert len(errors) == 2, errors
    assert (
        errors[0].startswith("component 'spark', task ")
        and f"Spark at {server.remote}" in errors[0]
    )
    assert "tuples wait since 20" in errors[0] and "start it" in errors[0]
    assert "Spark answers again: it was away for " in errors[1]
    metrics = running.runner("spark").stats.metrics
    assert metrics[AWAITED_METRIC] == "", "nothing is waited for"
    warnings = [str(warning.message) for warning in recwarn]
    assert not [text for text in warnings if "RETRIES_EXCEEDED" in text]


@pytest.mark.long
def test_two_minutes_without_spark_at_a_thousand_tuples_a_second(
    server: SparkServer, workers: Callable[[str, float], LocalWorkers]
) -> None:
    running = workers("negated", 30)
    spout, errors = run_through_an_outage(
        server, running, rate=1000, outage_secs=120, before_secs=10
    )
    assert not spout.letters.page(DeadLetterQuery(0))["entries"]
    assert {-n for n in Seen.numbers} == set(range(spout.instance.emitted))
    assert not spout.instance.fails, "no try is used up"
    assert len(errors) == 2, "the begin and the end of the outage"


def test_a_task_waiting_for_spark_ends_immediately_and_returns_its_tuples(tmp_path: Path) -> None:
    builder = TopologyBuilder("away")
    builder.set_spout("stream", Stream)
    args = {"function": f"{__name__}:negated", "schema": "n long", "batch_secs": 0.1}
    builder.set_bolt("spark", SparkBolt, inputs="stream", outputs=["n"], args=args)
    builder.set_bolt("seen", Seen, inputs="spark", outputs=[])
    conf = {
        "spark.remote": f"sc://127.0.0.1:{free_port()}",
        "supervisor.worker.shutdown.sleep.secs": 30,
    }
    running = LocalWorkers(
        builder, {"stream": 0, "spark": 1, "seen": 0, "__acker": 0}, conf, tmp_path
    )
    try:
        spout: Any = running.runner("stream")
        bolt = running.runner("spark")
        Stream.RATE, Stream.RUNS = 100, True
        waits = lambda: running.turn() or (spout.held and bolt.target_is_away())  # noqa: E731
        eventually(waits, 60, "the task waits for Spark", interval=0.003)
        awaited = bolt.stats.metrics[AWAITED_METRIC]
        assert awaited.startswith("waits for Spark since 20") and "refused" in awaited
        Stream.RUNS = False
        emitted = spout.instance.emitted
        assert emitted > 0 and not spout.instance.fails
        # As when the topology is rebalanced.
        running.engines[1].close_tasks([bolt.task_id], reopen=True)
        assert bolt.has_ended(), "its thread has ended"
        returned = lambda: running.turn() or sum(spout.instance.fails.values()) >= emitted  # noqa: E731
        eventually(returned, 60, "the tuples come back to their spout", interval=0.003)
        assert not spout.letters.page(DeadLetterQuery(0))["entries"]
        assert max(spout.instance.failed_tuples.values()) == 0, "as no try"
    finally:
        Stream.RUNS = False
        running.close()


def test_an_hour_without_spark_is_one_error_and_few_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    builder = TopologyBuilder("away")
    builder.set_spout("stream", Stream)
    args = {"function": f"{__name__}:negated", "schema": "n long", "batch_secs": 0.1}
    builder.set_bolt("spark", SparkBolt, inputs="stream", outputs=["n"], args=args)
    conf = {"spark.remote": f"sc://127.0.0.1:{free_port()}"}
    caplog.set_level(logging.INFO)
    harness = TopologyHarness(
        builder, {"stream": [[n] for n in range(20)]}, conf=conf, state_dir=tmp_path, simulated=True
    )
    with harness:
        bolt: Any = next(
            runner for runner in harness.engine.runners.values() if runner.component == "spark"
        )
        eventually(lambda: harness.advance(5) and bolt.target_is_away(), 60, "it waits for Spark")
        lines = len(caplog.records)
        for _ in range(60):
            harness.advance(60)
        assert bolt.target_is_away()
        assert len(harness.errors) == 1, harness.errors
        assert len(caplog.records) - lines <= 60, "at most one line a minute"
        assert bolt.stats.metrics[AWAITED_METRIC].startswith(
            "waits for Spark since 1970-01-01 00:0"
        )


def rates(spark: Any) -> Any:
    return spark.readStream.format("rate").option("rowsPerSecond", 10).load()


@pytest.mark.parametrize("kind", [SparkSpout, SparkQuery])
def test_a_query_that_waits_for_spark_names_it_and_is_quiet(
    kind: type[SparkSpout], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    builder = TopologyBuilder("away")
    name = "query" if kind is SparkQuery else "source"
    args = {name: f"{__name__}:rates", "checkpoint": str(tmp_path / "checkpoint")}
    builder.set_spout("rates", kind, outputs=["value"], args=args)
    builder.set_bolt("seen", Seen, inputs="rates", outputs=[])
    caplog.set_level(logging.INFO)
    remote = f"sc://127.0.0.1:{free_port()}"
    with TopologyHarness(builder, conf={"spark.remote": remote}, state_dir=tmp_path) as harness:
        spout: Any = next(
            runner for runner in harness.engine.runners.values() if runner.component == "rates"
        )

        def awaited() -> str:
            harness.engine.run(harness.shared.clock())
            return spout.stats.metrics.get(AWAITED_METRIC, "")

        eventually(awaited, 60, "what it waits for", interval=0.01)
        assert awaited().startswith("waits for Spark since 20") and "refused" in awaited()
        lines = len(caplog.records)
        # The first pauses are 1 s and 2 s.
        until = time.monotonic() + 4
        eventually(lambda: awaited() and time.monotonic() > until, 60, "tries", interval=0.01)
        assert len(caplog.records) - lines <= 1
        assert len(harness.errors) == 1, harness.errors
