"""What a component raises, and where: reported, its tuples fail, its task restarts, its worker goes
on.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest

from storm_dagster.api import (
    BatchingBolt,
    Bolt,
    Grouping,
    Spout,
    StatefulBolt,
    Topology,
    TopologyBuilder,
    Tuple,
)
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.slot import Slot
from storm_dagster.testing.topology_harness import HarnessResult, TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_dagster.worker.dataplane.transport import Peer
from storm_dagster.worker.engine.native import NativeEngine
from storm_dagster.worker.runtime.heartbeat import Watchdog
from storm_dagster.worker.tasks.plain_values import metric_value
from storm_rigs.components import DiscardBolt, Numbers


class Once(Bolt):
    """Does ``act`` for the first tuple, and passes all others on."""

    outputs = ["n"]
    closed: ClassVar[list[int]] = []
    done: ClassVar[set[str]] = set()

    def initialize(self, conf: Any, context: Any) -> None:
        self.kind: str = conf["test.kind"]

    def process(self, tup: Tuple) -> None:
        if tup.values[0] == 0 and self.kind not in self.done:
            self.done.add(self.kind)
            self.act()
        self.emit(tup.values)

    def act(self) -> None:
        if self.kind == "exit":
            sys.exit(3)
        if self.kind == "cancel":
            raise asyncio.CancelledError
        if self.kind == "grouping":
            self.emit([-1])
        if self.kind == "direct":
            self.emit([1], direct_task=4711)

    def close(self) -> None:
        self.closed.append(id(self))


class OnceBlocking(Once):
    blocking = True


class OnceAsync(Once):
    async def process(self, tup: Tuple) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(0)
        super().process(tup)


class OnceStateful(Once, StatefulBolt):
    pass


class OnceBatching(Once, BatchingBolt):
    def process(self, tup: Tuple) -> None:
        BatchingBolt.process(self, tup)

    def process_batch(self, key: Any, tups: list[Tuple]) -> None:
        for tup in tups:
            Once.process(self, tup)


def raising_grouping(context: Any, component: str, stream: str, tasks: list[int]) -> Any:
    def choose(values: Any) -> Any:
        if values[0] == -1:
            raise IndexError("no such region")
        return tasks

    return choose


@pytest.fixture(autouse=True)
def _groupings(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("guard_groupings")
    module.__dict__.update(raising_grouping=raising_grouping)
    monkeypatch.setitem(sys.modules, "guard_groupings", module)
    monkeypatch.setattr(Once, "done", set())
    monkeypatch.setattr(Once, "closed", [])


KINDS = [Once, OnceBlocking, OnceAsync, OnceStateful, OnceBatching]


def harness_of(bolt: type[Bolt], kind: str, tmp_path: Path, **options: Any) -> TopologyHarness:
    builder = TopologyBuilder("guarded")
    builder.set_spout("numbers", Numbers, outputs=["n"])
    builder.set_bolt("once", bolt, inputs="numbers")
    builder.set_bolt(
        "takes", DiscardBolt, inputs={"once": Grouping.custom("guard_groupings:raising_grouping")}
    )
    return TopologyHarness(
        builder,
        {"numbers": [[n] for n in range(5)]},
        replays=1,
        conf={"test.kind": kind},
        state_dir=tmp_path,
        **options,
    )


def run_with_ticks(harness: TopologyHarness) -> HarnessResult:
    """The result after three runs with a tick each, in which a bolt that batches hands on, and a
    last one.
    """
    for _ in range(3):
        harness.run(timeout=30)
        harness.tick("once")
    return harness.run(timeout=30)


@pytest.mark.parametrize("kind", ["exit", "cancel"])
@pytest.mark.parametrize("bolt", KINDS)
def test_what_is_no_exception_restarts_the_task_and_its_tuple_is_replayed(
    bolt: type[Bolt], kind: str, tmp_path: Path
) -> None:
    with harness_of(bolt, kind, tmp_path) as harness:
        result = run_with_ticks(harness)
        assert sorted(result.acked["numbers"]) == list(range(5))
        assert 0 in result.failed["numbers"]
        assert len(set(result.failed["numbers"])) == len(result.failed["numbers"])
        assert [type(error).__name__ for _, error in result.errors] == [
            "SystemExit" if kind == "exit" else "CancelledError"
        ]
        assert len(Once.closed) == 1, "the crashed component was closed, and another one was made"


@pytest.mark.parametrize("kind", ["grouping", "direct"])
@pytest.mark.parametrize("bolt", KINDS)
def test_an_emit_that_fails_rejects_its_input_whatever_runs_the_bolt(
    bolt: type[Bolt], kind: str, tmp_path: Path
) -> None:
    with harness_of(bolt, kind, tmp_path) as harness:
        result = run_with_ticks(harness)
        failed = result.failed["numbers"]
        assert sorted(result.acked["numbers"]) == list(range(5)) and 0 in failed
        assert bolt is OnceBatching or failed == [0]
        text = "no such region" if kind == "grouping" else "cannot be sent to task 4711"
        assert sum(text in str(error) for _, error in result.errors) == 1 and not Once.closed


class Exits(Spout):
    outputs = ["n"]
    method = "next_tuple"
    heard: ClassVar[list[str]] = []
    exits: ClassVar[list[str]] = []
    made: ClassVar[list[Any]] = []

    def initialize(self, conf: Any, context: Any) -> None:
        self.n = 0
        self.made.append(self)

    def exit_in(self, method: str) -> None:
        if method in self.exits:
            self.exits.remove(method)
            raise SystemExit(method)

    def next_tuple(self) -> None:
        if self.n == 3:
            self.exit_in("next_tuple")
        if self.n < 6:
            self.n += 1
            self.emit([self.n], tup_id=(id(self), self.n))

    def ack(self, tup_id: Any) -> None:
        self.heard.append("ack")
        self.exit_in("ack")

    def fail(self, tup_id: Any) -> None:
        self.heard.append("fail")
        self.exit_in("fail")


class ExitsBlocking(Exits):
    blocking = True


class FailsOnce(Bolt):
    def process(self, tup: Tuple) -> None:
        if tup.values[0] == 5 and "fail" in Exits.exits:
            raise ValueError("five")


@pytest.mark.parametrize("method", ["next_tuple", "ack", "fail"])
@pytest.mark.parametrize("spout", [Exits, ExitsBlocking])
def test_a_spout_that_exits_is_made_again_with_one_verdict_per_tuple(
    spout: type[Exits], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Exits, "heard", [])
    monkeypatch.setattr(Exits, "exits", [method])
    monkeypatch.setattr(Exits, "made", [])
    builder = TopologyBuilder("exits")
    builder.set_spout("exits", spout)
    builder.set_bolt("fails", FailsOnce, inputs="exits")
    with TopologyHarness(builder) as harness:

        def done() -> bool:
            harness.engine.run(time.monotonic())
            return len(Exits.made) == 2 and Exits.made[1].n == 6 and len(Exits.heard) == count()

        def count() -> int:
            return sum(one.n for one in Exits.made)

        eventually(lambda: done(), 60, "every tuple is heard of", interval=0.001)
        assert len(Exits.heard) == count() > 6
        assert [str(error) for _, error in harness.errors if isinstance(error, SystemExit)] == [
            method
        ]


class Applies(StatefulBolt):
    message_id = "n"

    def initialize(self, conf: Any, context: Any) -> None:
        self.refused: set[int] = set()
        self.again: list[int] = []

    def process(self, tup: Tuple) -> None:
        n = tup.values[0]
        if n in self.refused:
            self.state[n] = self.state.get(n, 0) + 1
            return
        self.refused.add(n)
        if n % 2:
            self.fail(tup)
        else:
            self.ack(tup)
            raise ValueError(f"{n} after its ack")

    def process_again(self, tup: Tuple) -> None:
        self.again.append(tup.values[0])


class AppliesBlocking(Applies):
    blocking = True


@pytest.mark.parametrize("bolt", [Applies, AppliesBlocking])
def test_a_tuple_that_a_stateful_bolt_failed_does_not_count_as_applied(
    bolt: type[Bolt], tmp_path: Path
) -> None:
    class Grouped(Topology):
        numbers = Numbers.spec()
        applies = bolt.spec(inputs={numbers: Grouping.fields("n")})

    given = {"numbers": [[n] for n in range(6)]}
    with TopologyHarness(Grouped, given, replays=1, state_dir=tmp_path) as harness:
        result = harness.run(timeout=30)
        (applies,) = harness.tasks("applies")
        assert dict(applies.state.items()) == dict.fromkeys(range(6), 1) and applies.again == []
    assert sorted(result.acked["numbers"]) == sorted(result.failed["numbers"]) == list(range(6))


class Keys(StatefulBolt):
    def process(self, tup: Tuple) -> None:
        self.state[object() if tup.values[0] == 1 else tup.values[0]] = 1


def test_a_key_that_cannot_be_saved_fails_its_own_tuple(tmp_path: Path) -> None:
    class Stateful(Topology):
        numbers = Numbers.spec()
        keys = Keys.spec(inputs=[numbers])

    with TopologyHarness(Stateful, {"numbers": [[0], [1], [2]]}, state_dir=tmp_path) as harness:
        result = harness.run()
        assert sorted(result.acked["numbers"]) == [0, 2] and result.failed["numbers"] == [1]
        assert "cannot be saved" in str(result.errors[0][1])


def test_metrics_are_numbers_that_every_report_can_hold() -> None:
    numpy = pytest.importorskip("numpy")
    assert metric_value("mean", numpy.float64(1.5)) == ("mean", 1.5)
    kind, value = metric_value("n", numpy.int64(7))
    assert (kind, value, type(value)) == ("n", 7, int)
    for number, text in ((math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")):
        assert metric_value("mean", numpy.float64(number)) == ("mean", text)
    assert metric_value("on", True) == ("on", True) and metric_value("s", "text") == ("s", "text")
    loop: list[Any] = []
    loop.append(loop)
    for bad in (2**70, object(), "\udc80", loop, numpy.zeros(3), bytes(20_000), {1: object()}):
        with pytest.raises(InvalidRequest, match="metric 'x' cannot be published"):
            metric_value("x", bad)


def test_a_report_that_cannot_be_encoded_costs_no_acks() -> None:
    peer = Peer(Slot("s", 1), "127.0.0.1:1", None)  # type: ignore[arg-type]
    peer.by_task["acks"][1] = [1, 2]
    peer.report = object()
    frames = list(peer.frames("token", 10, lambda *_: None))
    assert len(frames) == 1 and peer.report is None


class ImportExits(Bolt):
    def initialize(self, conf: Any, context: Any) -> None:
        raise SystemExit("argparse")

    def process(self, tup: Tuple) -> None:
        pass


class ImportExitsBlocking(ImportExits):
    blocking = True


@pytest.mark.parametrize("bolt", [ImportExits, ImportExitsBlocking])
def test_a_component_that_exits_in_initialize_is_tried_again(bolt: type[Bolt]) -> None:
    class Starts(Topology):
        numbers = Numbers.spec()
        exits = bolt.spec(inputs=[numbers])

    with TopologyHarness(Starts, {"numbers": []}) as harness:

        def tried_twice() -> bool:
            harness.engine.run(time.monotonic())
            return len(harness.errors) >= 2

        eventually(tried_twice, 30, "two tries", interval=0.001)
        assert all(isinstance(error, SystemExit) for _, error in harness.errors)


class Stuck(Bolt):
    blocking = True
    release: ClassVar[threading.Event] = threading.Event()
    inside: ClassVar[threading.Semaphore] = threading.Semaphore(0)
    closed: ClassVar[list[int]] = []

    def process(self, tup: Tuple) -> None:
        self.inside.release()
        self.ask()

    def ask(self) -> None:
        self.release.wait(60)  # the request

    def close(self) -> None:
        self.closed.append(self.task_id)


class StuckAsync(Stuck):
    async def process(self, tup: Tuple) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.inside.release()
        await self.ask()  # type: ignore[misc]

    async def ask(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self.release.is_set():
            await asyncio.sleep(0.01)  # the request


class StuckLoop(Stuck):
    blocking = False


def stuck_harness(
    bolt: type[Bolt], par: int, monkeypatch: pytest.MonkeyPatch, **conf: Any
) -> TopologyHarness:
    monkeypatch.setattr(Stuck, "release", threading.Event())
    monkeypatch.setattr(Stuck, "inside", threading.Semaphore(0))
    monkeypatch.setattr(Stuck, "closed", [])
    builder = TopologyBuilder("stuck")
    builder.set_spout("numbers", Numbers, outputs=["n"])
    builder.set_bolt("stuck", bolt, inputs={"numbers": Grouping.ALL}, par=par)
    return TopologyHarness(builder, {"numbers": [[1]]}, conf=conf)


@pytest.mark.parametrize("bolt", [Stuck, StuckAsync, StuckLoop])
def test_a_hanging_call_is_reported_once_with_the_line_of_the_user(
    bolt: type[Bolt], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stuck_harness(bolt, 1, monkeypatch, **{"topology.message.timeout.secs": 0.2}) as harness:
        dog = Watchdog(
            harness.shared, lambda: 0, 0.2, lambda: list(harness.engine.runners.values())
        )

        def watch() -> None:
            assert Stuck.inside.acquire(timeout=30)
            eventually(lambda: dog.check() or harness.errors, 30, "a report")
            dog.check()
            dog.check()
            Stuck.release.set()

        watching = threading.Thread(target=watch)
        watching.start()
        harness.run(timeout=60)
        watching.join(30)
        ((component, error),) = harness.errors
    assert component == "stuck" and "'stuck' has not returned for" in str(error)
    lines = [line for line in str(error).splitlines() if "# the request" in line]
    assert len(lines) == 1 and "test_guard.py" in str(error), str(error)


def test_threads_close_side_by_side_and_a_stuck_one_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = stuck_harness(Stuck, 4, monkeypatch, **{"supervisor.worker.shutdown.sleep.secs": 600})
    for _ in range(4):
        eventually(
            lambda: (
                harness.engine.run(time.monotonic()) is not None
                and Stuck.inside.acquire(blocking=False)
            ),
            30,
            "all",
        )
    threading.Timer(0.3, Stuck.release.set).start()
    harness.close()
    assert len(Stuck.closed) == 4 and not harness.errors

    harness = stuck_harness(Stuck, 4, monkeypatch, **{"supervisor.worker.shutdown.sleep.secs": 0.5})
    for _ in range(4):
        eventually(
            lambda: (
                harness.engine.run(time.monotonic()) is not None
                and Stuck.inside.acquire(blocking=False)
            ),
            30,
            "all",
        )
    slept: list[float] = []
    wait = time.sleep
    monkeypatch.setattr(
        "storm_dagster.worker.engine.native.time.sleep",
        lambda secs: (slept.append(secs), wait(secs)),
    )
    harness.close()
    assert sum(slept) <= 0.5, "one grace for all of them"
    assert len(harness.errors) == 4 and all(
        "# the request" in str(error) for _, error in harness.errors
    )
    Stuck.release.set()


def test_a_runner_of_ours_that_raises_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Plain(Topology):
        numbers = Numbers.spec()
        takes = DiscardBolt.spec(inputs=[numbers])

    with TopologyHarness(Plain, {"numbers": [[1], [2]]}) as harness:
        engine: NativeEngine = harness.engine
        for runner in engine.runners.values():
            calls = iter([RuntimeError("run"), None])

            def run(now: float, runner: Any = runner, calls: Any = calls) -> bool:
                if (error := next(calls, None)) is not None:
                    raise error
                return type(runner).run(runner, now)

            monkeypatch.setattr(runner, "run", run)
        result = harness.run(timeout=30)
        assert sorted(result.acked["numbers"]) == [0, 1] or sorted(result.failed["numbers"])
        assert {str(error) for _, error in harness.errors} == {"run"}
