"""Back pressure by component: fan-outs, unrelated branches, cycles, sizes, and peers that do not
receive.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from storm_dagster.api import Bolt, Grouping, ReliableSpout, Spout, Topology, TopologyBuilder, Tuple
from storm_dagster.model.slot import Slot
from storm_dagster.model.wire import DeadLetterQuery, Frame, decode_frame, encode_frame
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.worker.dataplane.routes import RemoteLink
from storm_dagster.worker.dataplane.sending import send_remote
from storm_dagster.worker.dataplane.transport import _DROP_BYTES, Transport
from storm_dagster.worker.engine import pressure
from storm_dagster.worker.engine.pressure import Pressure
from storm_rigs.components import DiscardBolt, InputSpout, RangeSpout, SleepBolt
from storm_rigs.stage.local_workers import LocalWorkers

LIMIT = 400
MANY = 2_000
QUEUE = {"topology.executor.queue.size": LIMIT, "topology.acker.executors": 0}


class Burst(Bolt):
    """Many tuples for one."""

    outputs = ["n"]

    def process(self, tup: Tuple) -> None:
        for _ in range(MANY):
            self.emit(tup.values)


class BlockingBurst(Burst):
    blocking = True


class AsyncBurst(Bolt):
    outputs = ["n"]

    async def process(self, tup: Tuple) -> None:
        for _ in range(MANY):
            self.emit(tup.values)


class Large(Spout):
    outputs = ["text"]

    def next_tuple(self) -> None:
        self.emit(["x" * 20_000])


@pytest.fixture
def workers() -> Iterator[Callable[..., LocalWorkers]]:
    made: list[LocalWorkers] = []

    def make(*args: Any) -> LocalWorkers:
        made.append(LocalWorkers(*args))
        return made[-1]

    yield make
    for one in made:
        one.close()


def fan_out(burst: type[Bolt]) -> TopologyBuilder:
    """A fan-out before a slow bolt, and a branch that has nothing to do with it."""
    builder = TopologyBuilder("fan")
    builder.set_spout("numbers", RangeSpout, args={"tracked": False})
    builder.set_bolt("burst", burst, inputs="numbers")
    builder.set_bolt("slow", SleepBolt, inputs="burst", args={"secs": 0.0001})
    builder.set_spout("others", RangeSpout, args={"tracked": False})
    builder.set_bolt("end", DiscardBolt, inputs="others")
    return builder


HERE = {"numbers": 0, "burst": 0, "slow": 0, "others": 0, "end": 0}
ELSEWHERE = {**HERE, "slow": 1}
APART = {**HERE, "slow": 1, "burst": 2}


@pytest.mark.parametrize(
    ("burst", "slots", "most"),
    [
        (Burst, HERE, LIMIT + MANY),
        # A call for each pass until the request to wait has come: two, and what the sockets hold.
        (Burst, ELSEWHERE, LIMIT + 6 * MANY),
        (Burst, APART, LIMIT + 6 * MANY),
        # A thread may be ahead of its loop.
        (BlockingBurst, HERE, 2 * LIMIT + 2 * MANY),
        (AsyncBurst, HERE, 2 * LIMIT + 2 * MANY),
    ],
)
def test_only_the_fan_out_waits_for_its_slow_bolt(
    workers: Callable[..., LocalWorkers], burst: type[Bolt], slots: Mapping[str, int], most: int
) -> None:
    running = workers(fan_out(burst), slots, QUEUE)
    slow, end, before_slow = running.runner("slow"), running.runner("end"), running.runner("burst")
    waiting: list[int] = []

    def enough() -> bool:
        running.turn()
        waiting.append(slow.waiting())
        return slow.stats.executed > 3 * MANY

    # The threads that carry the request to wait get their turns.
    eventually(enough, 60, "the slow bolt has executed three bursts", interval=0.002)
    assert max(waiting) <= most, max(waiting)
    # It is held itself, so its own queue fills, and its spout waits.
    assert before_slow.waiting() <= 3 * LIMIT
    before = end.stats.executed

    def goes_on() -> bool:
        running.turn()
        return end.stats.executed > before + 100

    # The slow bolt is full for most of the time.
    eventually(goes_on, 60, "the other branch goes on", interval=0)
    assert running.errors == []


class Round(Bolt):
    """Goes round until the number is 0; ``several`` for each, of which the others pass on one in
    ``several``.
    """

    outputs = ["n", "copy"]

    def __init__(self, several: int = 1) -> None:
        self.several = several

    def process(self, tup: Tuple) -> None:
        n, copy = tup.values
        if n > 0 and copy == 0:
            for number in range(self.several):
                self.emit([n - 1, number])


class BlockingRound(Round):
    blocking = True


def cycle(bolt: type[Bolt], several: int) -> TopologyBuilder:
    builder = TopologyBuilder("cycle")
    builder.set_spout("starts", InputSpout, outputs=["n", "copy"])
    builder.set_bolt(
        "a",
        bolt,
        inputs={"starts": Grouping.SHUFFLE, "c": Grouping.SHUFFLE},
        args={"several": several},
    )
    builder.set_bolt("b", bolt, inputs="a")
    builder.set_bolt("c", bolt, inputs="b")
    return builder


@pytest.mark.parametrize(("bolt", "several"), [(Round, 1), (Round, 20), (BlockingRound, 1)])
@pytest.mark.parametrize("slots", [{"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 1, "c": 2}])
def test_a_cycle_of_full_queues_drains(
    workers: Callable[..., LocalWorkers], bolt: type[Bolt], several: int, slots: dict[str, int]
) -> None:
    running = workers(cycle(bolt, several), {**slots, "starts": 0}, QUEUE)
    tasks = [running.runner(name) for name in "abc"]

    def started() -> bool:
        running.turn()
        return all(one.status == "running" for one in tasks)

    eventually(started, 60, "all tasks run", interval=0)
    for one in tasks:
        one.queue.extend(Tuple(0, "starts", "default", 0, [3, 0], None) for _ in range(2 * LIMIT))
    held: set[str] = set()
    most = 0

    def drained() -> bool:
        nonlocal most
        running.turn()
        held.update(one.component for one in tasks if one.held and one.in_cycle)
        most = max(most, *(one.waiting() for one in tasks))
        return not any(one.waiting() for one in tasks)

    eventually(drained, 60, "the cycle drains", interval=0)
    # A request to wait may come too late where the tasks have threads.
    assert held == {"a", "b", "c"} or (held and bolt is BlockingRound)
    assert running.errors == []
    assert most < 4 * 2 * LIMIT


def test_a_burst_that_was_not_expected_is_noticed_after_one_slice(
    workers: Callable[..., LocalWorkers],
) -> None:
    running = workers(fan_out(Burst), HERE, QUEUE)
    burst, slow = running.runner("burst"), running.runner("slow")
    eventually(lambda: running.turn() or burst.stats.executed > 0, 60, "the first call", interval=0)  # type: ignore[func-returns-value]
    # As after many calls that emitted one tuple each.
    burst._gain = 1  # type: ignore[attr-defined]
    executed = burst.stats.executed
    eventually(
        lambda: running.turn() or burst.stats.executed > executed, 60, "the next call", interval=0
    )  # type: ignore[func-returns-value]
    assert burst.stats.executed - executed <= 64 and slow.waiting() <= LIMIT + 65 * MANY


def test_large_tuples_fill_a_queue_by_their_bytes(
    workers: Callable[..., LocalWorkers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pressure, "_QUEUE_BYTES", 1 << 20)
    builder = TopologyBuilder("large")
    builder.set_spout("large", Large)
    builder.set_bolt("slow", SleepBolt, inputs="large", args={"secs": 0.0001})
    running = workers(builder, {"large": 0, "slow": 1}, {"topology.acker.executors": 0})
    slow, spout = running.runner("slow"), running.runner("large")
    # Before, frames wait until the user at the other end is known.
    eventually(lambda: running.turn() or slow.tuple_bytes, 60, "a frame", interval=0)  # type: ignore[func-returns-value]
    eventually(lambda: running.turn() or spout.held, 60, "the spout waits", interval=0)  # type: ignore[func-returns-value]
    eventually(lambda: running.turn() or not spout.held, 60, "the spout goes on", interval=0)  # type: ignore[func-returns-value]
    assert 10_000 < slow.tuple_bytes < 30_000
    assert slow.stats.executed > 0


def test_what_waits_for_a_dead_peer_is_limited_in_bytes() -> None:
    transport = Transport("127.0.0.1", 0, "token", 100)
    dead = Slot("s", 1)
    try:
        transport.set_peers({dead: "127.0.0.1:1"}, [])
        peer = transport.peers[dead]
        link = RemoteLink(1, 2, "default", peer)
        for _ in range(60):
            send_remote(link, None, ["x" * (1 << 20)])
            transport.flush(lambda *_: None)
        assert 0 < peer.backlog_bytes == sum(map(len, peer.backlog)) <= _DROP_BYTES
        assert transport.dropped() > 0
        # Nothing waits for the dead: their tuples are replayed elsewhere.
        assert transport.busy() == []
        # A live worker that does not receive gets everything in the end, so its senders must wait.
        peer.alive = True
        assert transport.busy() == [dead]
        # One large frame is kept, whatever its size.
        peer.alive = False
        send_remote(link, None, ["x" * (_DROP_BYTES + 1)])
        transport.flush(lambda *_: None)
        assert len(peer.backlog) == 1
    finally:
        transport.close()


class Waits(Bolt):
    """Waits for a system outside, as a sink does whose database is away."""

    blocking = True
    auto_ack = False
    is_away = True

    def initialize(self, conf: Any, context: Any) -> None:
        self.kept: list[Tuple] = []

    def _make_room(self) -> None:
        if not self.is_away:
            self._is_full, self._room_at = False, 0
            self.ack_kept()

    def process(self, tup: Tuple) -> None:
        self.kept.append(tup)
        if self.is_away:
            self._is_full, self._room_at = True, 1
        else:
            self.ack_kept()

    def ack_kept(self) -> None:
        for tup in self.kept:
            self.ack(tup)
        self.kept.clear()


class Counted(ReliableSpout):
    """A few tuples, whose failures are counted."""

    outputs = ["n"]

    def initialize(self, conf: Any, context: Any) -> None:
        self.number = 0
        self.fails: Counter[int] = Counter()

    def next_tuple(self) -> None:
        self.number += 1
        self.emit([self.number], tup_id=self.number)
        time.sleep(0.01)

    def fail(self, tup_id: int) -> None:
        self.fails[tup_id] += 1
        super().fail(tup_id)


@pytest.mark.parametrize(
    "slots", [{"numbers": 0, "waits": 0, "__acker": 0}, {"numbers": 0, "waits": 1, "__acker": 2}]
)
def test_no_tuple_times_out_while_its_bolt_waits_for_a_target(
    workers: Callable[..., LocalWorkers], slots: dict[str, int], tmp_path: Path
) -> None:
    builder = TopologyBuilder("away")
    builder.set_spout("numbers", Counted)
    builder.set_bolt("waits", Waits, inputs="numbers", outputs=[])
    conf = {"topology.message.timeout.secs": patience(1), "topology.dead.letter.tries": 3}
    running = workers(builder, slots, conf, tmp_path)
    spout, bolt = running.runner("numbers"), running.runner("waits")
    eventually(lambda: running.turn() or spout.held, 60, "the spout waits", interval=0.002)  # type: ignore[func-returns-value]
    began = time.monotonic()
    # Longer than all tries of a tuple, and than an acker keeps a tree.
    while time.monotonic() - began < patience(6):
        running.turn()
        time.sleep(0.002)
    waiting = spout.instance.number
    assert 0 < waiting < 200, "the spout waits as well"
    letters = spout.letters.page(DeadLetterQuery(0))  # type: ignore[attr-defined]
    assert not spout.instance.fails and not letters["entries"]
    # The tuples that waited are processed, and complete their trees.
    bolt.instance.is_away = False
    eventually(
        lambda: running.turn() or spout.stats.acked > waiting,
        60,
        "the tuples are acked",
        interval=0.002,
    )  # type: ignore[func-returns-value]
    assert not spout.instance.fails


class OldFrame(msgspec.Struct, array_like=True):
    """A frame of 0.1.0."""

    token: str
    groups: list[Any] = []
    acks: list[Any] = []
    inits: list[Any] = []
    fails: list[Any] = []
    acked: list[Any] = []
    failed: list[Any] = []
    pressure: bool | None = None
    report: Any = None
    loads: Any = None


class Held(Topology):
    numbers = RangeSpout.spec(args={"tracked": False})
    others = RangeSpout.spec(args={"tracked": False})
    burst = Burst.spec(inputs=[numbers])
    passes = Burst.spec(inputs=[burst])
    end = DiscardBolt.spec(inputs=[passes])
    other = DiscardBolt.spec(inputs=[others])


def held_by(full: list[str] | None) -> set[str]:
    with TopologyHarness(Held) as harness:
        harness.shared.sliced = True
        runners = list(harness.engine.runners.values())
        found = Pressure(harness.engine.conf, None, harness.engine.spec)
        found.on_request(Slot("s", 1), True, full)
        found.apply(runners)
        held = {one.component for one in runners if one.held}
        found.on_request(Slot("s", 1), False, None)
        found.apply(runners)
        assert not any(one.held for one in runners)
        return held


def test_only_what_is_upstream_of_a_full_component_waits() -> None:
    assert held_by(["end"]) == {"numbers", "passes"}
    assert held_by(["burst"]) == {"numbers"}
    assert held_by(["other"]) == {"others"}
    assert held_by(["other", "passes"]) == {"numbers", "others", "burst"}


def test_a_peer_of_an_older_release_stops_all_spouts() -> None:
    old = decode_frame(encode_frame(OldFrame("token", pressure=True)))
    assert old.pressure is True and old.full is None
    assert held_by(old.full) == {"numbers", "others"}
    new = encode_frame(Frame("token", pressure=True, full=["end"]))
    assert msgspec.msgpack.decode(new, type=OldFrame).pressure is True
    assert decode_frame(new).full == ["end"]
    away = decode_frame(encode_frame(Frame("token", pressure=True, full=["end"], away=["end"])))
    assert away.away == ["end"] and old.away is None
