"""Results of windows while their readers are slow, full or killed, and sources that are only
held.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import pytest

from storm_dagster.api import (
    Bolt,
    Grouping,
    Spout,
    Topology,
    TopologyBuilder,
    Tuple,
    TupleWindow,
    Window,
    WindowedBolt,
)
from storm_dagster.model.names import ACKER
from storm_dagster.model.slot import Slot
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_dagster.worker.dataplane.routes import Placement
from storm_rigs.components import CollectBolt, DiscardBolt, HoldBolt, Numbers, RangeSpout
from storm_rigs.stage.local_workers import LocalWorkers

MANY = 1000
PLAIN = {"topology.testing.always.try.serialize": False}


class Many(WindowedBolt):
    window = Window.tumbling(count=1)
    outputs = ["n"]

    def process_window(self, window: TupleWindow) -> None:
        for number in range(MANY):
            self.emit([number])


class Slow(Bolt):
    """Acks 20 tuples a second."""

    auto_ack = False
    config = {"topology.tick.tuple.freq.secs": 1}

    def initialize(self, conf: Any, context: Any) -> None:
        self.waiting: deque[Tuple] = deque()
        self.seen: list[int] = []

    def process(self, tup: Tuple) -> None:
        self.seen.append(tup.values[0])
        self.waiting.append(tup)

    def process_tick(self, tup: Tuple) -> None:
        for _ in range(min(20, len(self.waiting))):
            self.ack(self.waiting.popleft())


class Slowly(Topology):
    numbers = Numbers.spec()
    many = Many.spec(inputs=[numbers])
    slow = Slow.spec(inputs=[many])


def unfinished(harness: TopologyHarness, component: str = "many") -> dict[int, Any]:
    """The results of the first task that are not complete."""
    return next(
        one for one in harness.engine.runners.values() if one.component == component
    ).state.log.contents.results  # type: ignore[union-attr]


def test_a_result_that_takes_its_reader_longer_than_the_message_timeout_completes(
    tmp_path: Path,
) -> None:
    with TopologyHarness(
        Slowly, {"numbers": [[1]]}, conf=PLAIN, state_dir=tmp_path, simulated=True
    ) as harness:
        harness.advance(20)
        done = set(range(MANY)) - {tup.values[0] for tup in harness.tasks("slow")[0].waiting}
        assert 0 < len(unfinished(harness)) < MANY
    # What was not complete comes again, and only that.
    with TopologyHarness(
        Slowly, {"numbers": []}, conf=PLAIN, state_dir=tmp_path, simulated=True
    ) as harness:
        harness.advance(5)
        result = harness.advance(145)
        slow = harness.tasks("slow")[0]
        assert unfinished(harness) == {} and not slow.waiting and result.errors == []
        assert set(range(MANY)) - done <= set(slow.seen) and len(set(slow.seen)) < MANY
        assert len(slow.seen) < 2 * MANY, "no more is sent at once than the reader finishes in time"


def test_results_wait_for_a_full_reader() -> None:
    with TopologyHarness(Slowly, {"numbers": [[1]]}, conf=PLAIN, simulated=True) as harness:
        harness.advance(1)
        slow = harness.tasks("slow")[0]
        slow.waiting.clear()  # It neither acks nor fails them.
        harness.shared.sliced = True
        hold(harness, "slow")
        before = len(slow.seen)
        harness.advance(100)
        assert len(slow.seen) == before
        hold(harness)
        harness.advance(150)
        assert set(slow.seen) == set(range(MANY)) and unfinished(harness) == {}


class BlockingMany(Many):
    blocking = True

    def process_window(self, window: TupleWindow) -> None:
        for number in range(4 * MANY):
            self.emit([number])


class Blocking(Topology):
    numbers = Numbers.spec()
    many = BlockingMany.spec(inputs=[numbers])


def test_a_run_ends_when_all_of_a_large_result_has_come() -> None:
    with TopologyHarness(Blocking, {"numbers": [[1]]}, conf=PLAIN) as harness:
        assert harness.run().values("many") == [[number] for number in range(4 * MANY)]


def hold(harness: TopologyHarness, *full: str) -> None:
    """These components are full in another worker; without one, none is."""
    harness.engine.pressure.on_request(Slot("other", 1), bool(full), full)
    if full:
        # A request expires by real time.
        requests = harness.engine.pressure._requests
        slot = Slot("other", 1)
        requests[slot] = requests[slot]._replace(expiry=float("inf"))
    harness.engine._update_spouts(harness.shared.clock())


class Ahead(Spout):
    outputs = ["at"]


class Behind(Spout):
    outputs = ["at"]


class Tens(WindowedBolt):
    window = Window.tumbling(secs=10)
    timestamp_field = "at"
    late_stream = "late"
    outputs = ["end", "tuples"]

    def process_window(self, window: TupleWindow) -> None:
        self.emit([window.end_ms, len(window)])


class Lagging(Topology):
    ahead = Ahead.spec()
    behind = Behind.spec()
    unrelated = Numbers.spec()
    tens = Tens.spec(inputs=[ahead, behind])
    sink = DiscardBolt.spec(inputs=[tens])
    beside = DiscardBolt.spec(inputs=[behind])
    other = DiscardBolt.spec(inputs=[unrelated])


@pytest.mark.parametrize("stopped", ["sink", "tens", "beside", "inactive", "paused", "other"])
def test_a_source_that_is_held_or_paused_is_not_silent(stopped: str) -> None:
    given = {"ahead": [[100_000]], "behind": [[50_000]], "unrelated": []}
    with TopologyHarness(Lagging, given, simulated=True) as harness:
        harness.advance(2)
        if stopped == "inactive":
            harness.engine.activate(False)
        elif stopped == "paused":
            assert harness.clock is not None
            harness.clock.secs += 20
        else:
            hold(harness, stopped)
        harness.advance(2 if stopped == "paused" else 20)
        harness.engine.activate(True)
        hold(harness)
        harness.give("behind", [60_000], [70_000])
        result = harness.advance(2)
        late = len(result.values("tens", "late"))
        # What is full on another branch holds none of the sources, which were silent.
        assert late == (2 if stopped == "other" else 0)
        ends = [end for end, _ in result.values("tens")]
        assert ends == ([50_000, 100_000] if stopped == "other" else [50_000, 60_000, 70_000])
        harness.advance(12)
        assert len(harness.run().values("tens")) == (2 if stopped == "other" else 4), (
            "silence counts again"
        )


class Partitions(Spout):
    outputs = ["at"]
    ready: ClassVar[dict[int, list[int]]] = {}

    def next_tuple(self) -> None:
        mine = self.ready.get(self.context.task_index)
        if mine:
            self.emit([mine.pop(0)])


class Growing(Topology):
    partitions = Partitions.spec()
    tens = Tens.spec(inputs=[partitions])


def test_windows_wait_for_a_source_that_a_rebalance_adds() -> None:
    Partitions.ready = {0: [100_000]}
    with TopologyHarness(Growing, simulated=True) as harness:
        harness.advance(1)
        placement = harness.engine.placement
        assert placement is not None
        tasks = {**placement.components, 99: "partitions"}
        everything = frozenset(tasks)
        harness.engine.place(
            Placement(
                1, dict.fromkeys(tasks, Slot("harness", 0)), {}, tasks, everything, everything
            )
        )
        Partitions.ready[0] = [150_000]
        harness.advance(3)
        Partitions.ready[1] = [110_000, 120_000]
        result = harness.advance(2)
        assert result.values("tens", "late") == []
        assert result.values("tens") == [[100_000, 1], [110_000, 1], [120_000, 1]]


def test_results_that_time_out_are_noted_once_while_nobody_takes_them() -> None:
    with TopologyHarness(Slowly, {"numbers": [[1]]}, conf=PLAIN, simulated=True) as harness:
        harness.advance(1)
        many = next(one for one in harness.engine.runners.values() if one.component == "many")
        results = many.results
        assert results is not None and len(results.pending) > 0
        for _ in range(3):
            results.on_clock(harness.shared.clock() + 100)
        assert sorted(results.failed) == sorted(results.pending.entries)


class Few(Many):
    def process_window(self, window: TupleWindow) -> None:
        self.emit([len(window)])


def test_results_at_a_killed_worker_are_sent_again_at_once(tmp_path: Path) -> None:
    CollectBolt.everything.clear()
    builder = TopologyBuilder("killed")
    builder.set_spout("ones", RangeSpout, args={"total": 1, "tracked": False})
    builder.set_bolt("few", Few, inputs={"ones": Grouping.SHUFFLE}, config=Few.component_config({}))
    builder.set_bolt("keeps", HoldBolt, inputs="few", outputs=[])
    slots = {"ones": 0, "few": 0, ACKER: 0, "keeps": 1}
    workers = LocalWorkers(builder, slots, {"topology.message.timeout.secs": 600}, tmp_path)
    try:
        eventually(
            lambda: workers.turn() or CollectBolt.everything, 30, "the result", interval=0.001
        )  # type: ignore[func-returns-value]
        workers.place(2, {**slots, "keeps": 0}, gone=1)

        def again() -> bool:
            workers.turn(but=1)
            return len(CollectBolt.everything) > 1

        eventually(again, 30, "the result comes again", interval=0.001)
        assert CollectBolt.everything == [[1], [1]] and workers.errors == []
    finally:
        workers.close()


class AsMany(WindowedBolt):
    window = Window.tumbling(count=1)
    outputs = ["n"]

    def process_window(self, window: TupleWindow) -> None:
        for _ in range(window.tuples[0].values[0]):
            self.emit([1])


class Batches(Bolt):
    """Acks all that waits every ten seconds, as a sink that writes files, unless its system is
    away.
    """

    auto_ack = False
    config = {"topology.tick.tuple.freq.secs": 10}
    away: ClassVar[bool] = False

    def initialize(self, conf: Any, context: Any) -> None:
        self.waiting: list[Tuple] = []
        self.sizes: list[int] = []

    def process(self, tup: Tuple) -> None:
        self.waiting.append(tup)

    def process_tick(self, tup: Tuple) -> None:
        if not Batches.away:
            self.sizes.append(len(self.waiting))
            for waiting in self.waiting:
                self.ack(waiting)
            self.waiting = []


class Batched(Topology):
    numbers = Numbers.spec()
    many = AsMany.spec(inputs=[numbers])
    batches = Batches.spec(inputs=[many])


def test_a_reader_that_acks_in_batches_gets_larger_batches_after_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with TopologyHarness(Batched, {"numbers": [[6 * MANY]]}, conf=PLAIN, simulated=True) as harness:
        harness.advance(62)
        batches = harness.tasks("batches")[0]
        assert sum(batches.sizes) == 6 * MANY and max(batches.sizes) > 2 * MANY, batches.sizes
        monkeypatch.setattr(Batches, "away", True)
        harness.give("numbers", [6 * MANY])
        harness.advance(100)
        monkeypatch.setattr(Batches, "away", False)
        batches.sizes.clear()
        harness.advance(150)
        assert unfinished(harness) == {} and max(batches.sizes) > MANY, batches.sizes


class Told(WindowedBolt):
    """Tells Dagster of each window."""

    window = Window.tumbling(count=1)
    outputs = ["n"]

    def process_window(self, window: TupleWindow) -> None:
        self.dagster.materialize("daily")
        self.emit(window.tuples[0].values)


class Telling(Topology):
    numbers = Numbers.spec()
    many = Told.spec(inputs=[numbers])
    reads = CollectBolt.spec(inputs=[many])


def test_rows_of_windows_flow_while_dagster_is_away() -> None:
    with TopologyHarness(Telling, {"numbers": []}, conf=PLAIN, simulated=True) as harness:
        harness.dagster_up = False
        harness.run()
        for number in range(36):
            harness.give("numbers", [number])
            harness.advance(5)
        assert harness.tasks("reads")[0].received == [[number] for number in range(36)]
        harness.dagster_up = True
        harness.advance(60)
        assert unfinished(harness) == {}, "Dagster has all events"
