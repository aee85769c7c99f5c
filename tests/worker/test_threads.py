"""Blocking and async components."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from typing import Any, ClassVar

from storm_dagster.api import Bolt, Grouping, Spout, Topology, Tuple
from storm_dagster.testing.topology_harness import TopologyHarness, run_topology
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.worker.dataplane.routes import Placement
from storm_dagster.worker.tasks.spouts import SpoutBase
from storm_rigs.components import Numbers, RangeSpout

LOOP_THREAD: list[int] = []


class Blocks(Bolt):
    blocking = True
    outputs = ["n", "thread"]

    def process(self, tup: Tuple) -> None:
        n = tup.values[0]
        if n == 3:
            raise ValueError("three")
        time.sleep(0.001)
        tasks = self.emit([n, threading.get_ident()], need_task_ids=True)
        assert tasks


class Keeps(Bolt):
    def initialize(self, conf, context) -> None:
        self.kept: list[list[int]] = []

    def process(self, tup: Tuple) -> None:
        self.kept.append([*tup.values, threading.get_ident()])


class BlockingTopology(Topology):
    numbers = Numbers.spec()
    blocks = Blocks.spec(inputs=[numbers], par=2)
    keeps = Keeps.spec(inputs={blocks: Grouping.GLOBAL})


def test_blocking_bolts_run_in_their_own_threads() -> None:
    with TopologyHarness(BlockingTopology, {"numbers": [[n] for n in range(20)]}) as harness:
        result = harness.run()
        kept = harness.tasks("keeps")[0].kept
    assert sorted(n for n, _, _ in kept) == [n for n in range(20) if n != 3]
    threads = {thread for _, thread, _ in kept}
    assert len(threads) == 2
    assert {here for _, _, here in kept} == {
        threading.get_ident()
    } and threading.get_ident() not in threads
    assert sorted(result.acked["numbers"]) == [n for n in range(20) if n != 3]
    assert result.failed["numbers"] == [3]


class BlockingNumbers(Spout):
    blocking = True
    outputs = ["n"]

    def initialize(self, conf, context) -> None:
        self.next = 0
        self.acked: list[int] = []
        self.thread = threading.get_ident()

    def next_tuple(self) -> None:
        assert threading.get_ident() == self.thread
        if self.next < 50:
            self.emit([self.next], tup_id=self.next)
            self.next += 1

    def ack(self, tup_id: int) -> None:
        assert threading.get_ident() == self.thread
        self.acked.append(tup_id)


class Told(BlockingNumbers):
    def initialize(self, conf, context) -> None:
        super().initialize(conf, context)
        self.told: list[str] = []

    def activate(self) -> None:
        self.told.append("activate")

    def deactivate(self) -> None:
        self.told.append("deactivate")


class ToldSource(Topology):
    numbers = Told.spec()


def test_a_blocking_spout_that_opens_while_the_topology_is_inactive_is_told() -> None:
    with TopologyHarness(ToldSource) as harness:
        harness.engine.activate(False)

        def told(calls: list[str]) -> bool:
            harness.engine.run(time.monotonic())
            (runner,) = [
                one for one in harness.engine.runners.values() if one.component == "numbers"
            ]
            return getattr(getattr(runner, "instance", None), "told", None) == calls

        eventually(lambda: told(["deactivate"]), timeout=20, what="the first call")
        harness.engine.activate(True)
        eventually(lambda: told(["deactivate", "activate"]), timeout=20, what="the second call")


class BlockingSource(Topology):
    numbers = BlockingNumbers.spec(config={"topology.max.spout.pending": 5})
    keeps = Keeps.spec(inputs=[numbers])


def test_a_blocking_spout_respects_max_pending_and_hears_its_acks() -> None:
    with TopologyHarness(BlockingSource) as harness:
        spout = None
        deadline = time.monotonic() + patience(20)
        most = 0
        while time.monotonic() < deadline:
            harness.engine.run(time.monotonic())
            (runner,) = [
                one for one in harness.engine.runners.values() if isinstance(one, SpoutBase)
            ]
            most = max(most, len(runner.pending))
            spout: Any = runner.instance
            if spout is not None and len(spout.acked) == 50:
                break
        assert spout is not None and sorted(spout.acked) == list(range(50))
        assert most <= 5


class Async(Bolt):
    outputs = ["n"]
    async_window = 10

    def initialize(self, conf, context) -> None:
        self.now = 0
        self.most = 0

    async def process(self, tup: Tuple) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        if tup.values[0] == 7:
            raise ValueError("seven")
        self.emit(tup.values)


class AsyncTopology(Topology):
    numbers = Numbers.spec()
    work = Async.spec(inputs=[numbers])
    keeps = Keeps.spec(inputs=[work])


def test_async_bolts_overlap_and_anchor_to_their_own_tuple() -> None:
    with TopologyHarness(AsyncTopology, {"numbers": [[n] for n in range(40)]}) as harness:
        result = harness.run()
        assert 2 <= harness.tasks("work")[0].most <= 10
    assert sorted(result.acked["numbers"]) == [n for n in range(40) if n != 7]
    assert result.failed["numbers"] == [7]


class BadStart(Bolt):
    tries = 0

    def initialize(self, conf, context) -> None:
        type(self).tries += 1
        if type(self).tries == 1:
            raise OSError("not yet")

    def process(self, tup: Tuple) -> None:
        pass


class BadStartTopology(Topology):
    numbers = Numbers.spec()
    bad = BadStart.spec(inputs=[numbers])


def test_a_component_that_cannot_initialize_is_tried_again() -> None:
    result = run_topology(BadStartTopology, {"numbers": [[1]]}, timeout=20)
    assert [type(error).__name__ for _, error in result.errors] == ["OSError"]
    assert result.acked["numbers"] == [0]


class Images(Spout):
    outputs = ["image"]
    left = 300

    def next_tuple(self) -> None:
        if self.left:
            self.left -= 1
            self.emit([bytes(1000)], tup_id=self.left)


class Looks(Bolt):
    blocking = True
    outputs = ["size"]

    def process(self, tup: Tuple) -> None:
        # With the ids it waits for the loop, which has acked the tuples before then.
        self.emit([len(tup.values[0])], need_task_ids=True)


class Album(Topology):
    images = Images.spec()
    looks = Looks.spec(inputs=[images])


def runner_of(harness: TopologyHarness, component: str) -> Any:
    (runner,) = [one for one in harness.engine.runners.values() if one.component == component]
    return runner


def test_a_blocking_bolt_holds_few_finished_tuples() -> None:
    with TopologyHarness(Album) as harness:
        assert len(harness.run().values("looks")) == 300
        assert len(runner_of(harness, "looks").unacked) < 50


class WaitsForItsEnd(Bolt):
    """Is in its first tuple until its task closes."""

    blocking = True
    inside = threading.Event()
    seen: ClassVar[list[int]] = []

    def process(self, tup: Tuple) -> None:
        runner: Any = self._bound()._runner  # type: ignore[attr-defined]
        self.inside.set()
        while not self.seen and not runner._stopping:
            time.sleep(0.001)
        self.seen.append(tup.values[0])


class Unanchored(Topology):
    numbers = RangeSpout.spec(args={"total": 50, "tracked": False})
    waits = WaitsForItsEnd.spec(inputs=[numbers])


def test_untracked_tuples_waiting_for_a_thread_outlive_a_new_placement() -> None:
    WaitsForItsEnd.inside.clear()
    WaitsForItsEnd.seen.clear()
    with TopologyHarness(Unanchored) as harness:
        engine = harness.engine

        def all_wait() -> bool:
            engine.run(harness.shared.clock())
            return runner_of(harness, "waits").waiting() == 50 and WaitsForItsEnd.inside.is_set()

        eventually(all_wait, 20, "all tuples wait", interval=0.001)
        before = engine.placement
        assert before is not None
        components = {**before.components, 99: "waits"}
        everything = frozenset(components)
        engine.place(
            Placement(
                1, dict.fromkeys(components, engine.slot), {}, components, everything, everything
            )
        )
        harness.run()
        assert WaitsForItsEnd.seen == list(range(1, 51))


class Gated(Bolt):
    blocking = True
    gate = threading.Event()

    def initialize(self, conf, context) -> None:
        self.ticks = 0
        self.inside = False

    def process(self, tup: Tuple) -> None:
        self.inside = True
        self.gate.wait(patience(20))

    def process_tick(self, tup: Tuple) -> None:
        self.ticks += 1


class GatedTopology(Topology):
    numbers = Numbers.spec()
    gated = Gated.spec(inputs=[numbers])


def test_ticks_that_are_due_while_a_thread_is_busy_are_one() -> None:
    Gated.gate.clear()
    with TopologyHarness(GatedTopology, {"numbers": [[1]]}) as harness:
        run = harness.engine.run

        def inside() -> bool:
            run(harness.shared.clock())
            return harness.tasks("gated")[0] is not None and harness.tasks("gated")[0].inside

        eventually(inside, 20, "the call", interval=0.001)
        for _ in range(5):
            harness.tick("gated")
            run(harness.shared.clock())
        Gated.gate.set()
        harness.run()
        assert harness.tasks("gated")[0].ticks == 1
        harness.tick("gated")
        harness.run()
        assert harness.tasks("gated")[0].ticks == 2


def test_a_thread_that_emits_always_finds_its_streams() -> None:
    """Also while the loop replaces the routes."""
    with TopologyHarness(BlockingTopology, {"numbers": []}) as harness:
        harness.run()
        runner = next(one for one in harness.engine.runners.values() if one.component == "blocks")
        seen: list[bool] = []

        class Watched(dict[str, Any]):
            def keys(self) -> Any:
                seen.append("default" in runner.routes)
                return super().keys()

            def __iter__(self) -> Any:
                return super().__iter__()

        new = {name: copy.copy(route) for name, route in runner.routes.items()}
        runner.wire(Watched(new))
        assert all(seen) and seen and runner.routes == new
