"""Tuples that fail every time become dead letters, with the reason, and can be emitted again."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.api import (
    BatchingBolt,
    Bolt,
    Grouping,
    ReliableSpout,
    ShellBolt,
    Spout,
    StatefulBolt,
    Stream,
    Topology,
    TopologyBuilder,
    Tuple,
)
from storm_dagster.core.dataplane.keyed_state import Partitioning
from storm_dagster.model.bounded_map import BoundedMap
from storm_dagster.model.errors import Corrupt, InvalidRequest, KeyNotFound, Unavailable
from storm_dagster.model.names import AWAITED_METRIC
from storm_dagster.model.wire import DeadLetterQuery
from storm_dagster.nimbus.requests.running_workers import dead_letters
from storm_dagster.operations.live.worker_requests import WorkerLinks, ask_worker
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.worker.state.letters import DeadLetterLog
from storm_rigs.components import HoldBolt
from storm_rigs.operations.storm_client import as_storm
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.worker_processes import WorkerRig

PROGRAM = """
import time
from pystorm import Bolt

class Use(Bolt):
    def process(self, tup):
        if tup.values[0] == 3:
            raise ValueError("three is too much")

    def fail(self, tup):
        super().fail(tup)
        time.sleep(0.5)  # tuples still come while it ends

Use().run()
"""


class Bug:
    """What is wrong with the bolts."""

    on = True
    seen: ClassVar[list[Any]] = []


def use(tup: Tuple) -> None:
    if Bug.on and tup.values[0] == 3:
        raise ValueError("three is too much")
    Bug.seen.append(tup.values)


class Numbers(ReliableSpout):
    """Each number once, with values of many types."""

    outputs: ClassVar[Any] = ["n", "price", "at"]
    max_fails = 2

    def initialize(self, conf: Any, context: Any) -> None:
        self.waiting = list(range(6))[::-1]

    def next_tuple(self) -> None:
        if self.waiting:
            n = self.waiting.pop()
            self.emit([n, Decimal("1.50"), AT], tup_id=n)


AT = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)


class BlockingNumbers(Numbers):
    blocking = True


class Plain(Spout):
    """Emits again whatever fails, for ever."""

    outputs: ClassVar[Any] = ["n", "price", "at"]

    def initialize(self, conf: Any, context: Any) -> None:
        self.waiting = list(range(6))[::-1]
        self.settled: list[int] = []

    def next_tuple(self) -> None:
        if self.waiting:
            n = self.waiting.pop()
            self.emit([n, Decimal("1.50"), AT], tup_id=n)

    def ack(self, tup_id: int) -> None:
        self.settled.append(tup_id)

    def fail(self, tup_id: int) -> None:
        self.waiting.append(tup_id)


class BlockingPlain(Plain):
    blocking = True


class InLoop(Bolt):
    def process(self, tup: Tuple) -> None:
        use(tup)


class Blocking(InLoop):
    blocking = True


class Async(Bolt):
    async def process(self, tup: Tuple) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        use(tup)


class Says(Bolt):
    """Fails by itself, and says why."""

    auto_ack = False

    def process(self, tup: Tuple) -> None:
        try:
            use(tup)
        except ValueError as error:
            self.fail(tup, reason=error)
        else:
            self.ack(tup)


class BlockingSays(Says):
    blocking = True


class Stateful(StatefulBolt):
    message_id = "n"

    def process(self, tup: Tuple) -> None:
        use(tup)
        self.state[tup.values[0]] = 1


class Batches(BatchingBolt):
    def group_key(self, tup: Tuple) -> Any:
        return tup.values[0]

    def process_batch(self, key: Any, tups: Any) -> None:
        for tup in tups:
            use(tup)


BOLTS = (InLoop, Blocking, Async, Says, BlockingSays, Stateful, Batches)


def build(spout: type, bolt: Any, **conf: Any) -> TopologyBuilder:
    builder = TopologyBuilder("letters")
    builder.set_spout("numbers", spout, config=conf)
    builder.set_bolt(
        "use",
        bolt,
        inputs={"numbers": Grouping.SHUFFLE},
        config={"topology.tick.tuple.freq.secs": 0.05},
    )
    return builder


@pytest.fixture(autouse=True)
def fresh() -> None:
    Bug.on, Bug.seen = True, []


def letters_of(harness: TopologyHarness) -> Any:
    (runner,) = [one for one in harness.engine.runners.values() if one.component == "numbers"]
    return runner.letters  # type: ignore[attr-defined]


@pytest.mark.parametrize("bolt", BOLTS, ids=lambda one: one.__name__)
@pytest.mark.parametrize(
    "spout", [Numbers, BlockingNumbers, Plain, BlockingPlain], ids=lambda one: one.__name__
)
def test_a_poison_tuple_becomes_a_letter_and_the_rest_flows(
    spout: type, bolt: type, tmp_path: Path
) -> None:
    conf = {"topology.dead.letter.tries": 3} if issubclass(spout, Plain) else {}
    with TopologyHarness(build(spout, bolt, **conf), state_dir=tmp_path) as harness:
        result = run_until(
            harness, lambda found: len(found.dead_letters) == 1 and len(Bug.seen) == 5
        )
        (letter,) = result.dead_letters
        assert letter["values"] == [3, "1.50", "2026-11-22T12:00:00Z"] and letter["fields"] == [
            "n",
            "price",
            "at",
        ]
        assert (letter["spout"], letter["component"], letter["tries"], letter["tup_id"]) == (
            "numbers",
            "use",
            3,
            3,
        )
        assert letter["error"] == "ValueError: three is too much"
        assert 0 < letter["first_ms"] <= letter["last_ms"]
        assert letters_of(harness)._runner.stats.metrics["dead_letters"] == 1
        if issubclass(spout, Plain):
            # It is settled: the spout does not keep it for ever.
            run_until(
                harness, lambda _: sorted(harness.tasks("numbers")[0].settled) == [0, 1, 2, 3, 4, 5]
            )

        # While the bug is there, the letter comes back with one try more.
        assert len(letters_of(harness).page(DeadLetterQuery(0, replay=True))["entries"]) == 1
        result = run_until(harness, lambda found: found.dead_letters[0]["tries"] == 4)
        assert "replayed_ms" not in result.dead_letters[0]

        Bug.on = False
        assert len(letters_of(harness).page(DeadLetterQuery(0, replay=True))["entries"]) == 1
        assert letters_of(harness).page(DeadLetterQuery(0, replay=True))["entries"] == []
        result = run_until(harness, lambda found: "replayed_ms" in found.dead_letters[0])
        assert Bug.seen.count([3, Decimal("1.50"), AT]) == 1 and len(Bug.seen) == 6
        assert letters_of(harness)._runner.stats.metrics["dead_letters"] == 0
        assert letters_of(harness).page(DeadLetterQuery(0, replay=True))["entries"] == []


def run_until(harness: TopologyHarness, done: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + patience(120)
    while not done(result := harness.run(timeout=60)) and time.monotonic() < deadline:
        time.sleep(0.005)
    if done(result):
        return result
    raise AssertionError((result.dead_letters, Bug.seen, harness.errors))


class Recorded(Numbers):
    acked: ClassVar[list[Any]] = []
    max_fails = 1

    def ack(self, tup_id: Any) -> None:
        super().ack(tup_id)
        self.acked.append(tup_id)


class WithProgram(Topology):
    numbers = Recorded.spec()
    use = ShellBolt.spec(command=sys.executable, script="use.py", inputs=[numbers])


def test_a_program_gives_a_reason_and_later_tuples_are_not_blamed(tmp_path: Path) -> None:
    (tmp_path / "resources").mkdir()
    (tmp_path / "resources" / "use.py").write_text(PROGRAM)
    with TopologyHarness(WithProgram, archive=tmp_path, state_dir=tmp_path) as harness:
        found = run_until(harness, lambda found: len(Recorded.acked) + len(found.dead_letters) == 6)
    (letter,) = found.dead_letters
    assert letter["component"] == "use" and "three is too much" in letter["error"]


def test_what_times_out_is_a_letter_too(tmp_path: Path) -> None:
    builder = build(Plain, HoldBolt, **{"topology.dead.letter.tries": 2})
    conf = {"topology.message.timeout.secs": 5}
    with TopologyHarness(builder, conf=conf, state_dir=tmp_path, simulated=True) as harness:
        letters = harness.advance(15).dead_letters
    assert len(letters) == 6 and {one["tries"] for one in letters} == {2}
    assert {one["error"] for one in letters} == {
        "not complete within topology.message.timeout.secs"
    }


class Given(ReliableSpout):
    """Gives up with a reason and a place in its source, as a spout does whose record cannot be
    decoded.
    """

    outputs: ClassVar[Any] = [Stream(["n"]), Stream(["letter"], name="dead")]
    given = False

    def next_tuple(self) -> None:
        if not self.given:
            self.given = True
            self.give_up(
                "r7", [b"\xff"], reason=ValueError("no text"), position={"topic": "t", "offset": 7}
            )
            self.give_up(["r8"], [object()], reason=None)


def test_letters_with_their_position_go_to_the_stream(tmp_path: Path) -> None:
    builder = TopologyBuilder("letters")
    numbers = builder.set_spout("numbers", Given, config={"topology.dead.letter.stream": "dead"})
    builder.set_bolt("use", InLoop, inputs=numbers["dead"])
    with TopologyHarness(builder, state_dir=tmp_path) as harness:
        result = harness.run()
        first, second = result.dead_letters
        assert (first["error"], first["position"]) == (
            "ValueError: no text",
            {"topic": "t", "offset": 7},
        )
        assert (first["tries"], first["component"], first["tup_id"]) == (1, "numbers", "r7")
        # What cannot travel cannot come back, and is kept as text.
        assert second["raw"] is None and "object object" in str(second["values"])
        emitted, _ = result.values("numbers", "dead")
        assert emitted[0]["values"] == ["/w=="] and emitted[0]["number"] == first["number"]
        assert len(letters_of(harness).page(DeadLetterQuery(0, replay=True))["entries"]) == 1
        harness.shared.spouts_run = False
        with pytest.raises(Unavailable, match="not active"):
            letters_of(harness).page(DeadLetterQuery(0, replay=True))


def numbers_builder(par: int, spout: type = Numbers, **conf: Any) -> TopologyBuilder:
    builder = TopologyBuilder("letters")
    builder.set_spout("numbers", spout, par=par, config=conf)
    builder.set_bolt("use", InLoop, inputs={"numbers": Grouping.SHUFFLE})
    return builder


def test_letters_of_tasks_that_are_no_more_are_taken_over(tmp_path: Path) -> None:
    with TopologyHarness(numbers_builder(3), state_dir=tmp_path) as harness:
        result = run_until(harness, lambda found: len(found.dead_letters) == 3)
        # They have one number each in a log of their own, and the same one in the time of a test.
        assert len({letter["task"] for letter in result.dead_letters}) == 3
    for par in (1, 2, 1):
        Bug.seen = []
        with TopologyHarness(numbers_builder(par, Silent), state_dir=tmp_path) as harness:
            letters = harness.run().dead_letters
            assert [letter["values"][0] for letter in letters] == [3, 3, 3]
            assert len({letter["task"] for letter in letters}) == 3
            counts = [
                runner.stats.metrics.get("dead_letters", 0)
                for runner in harness.engine.runners.values()
                if runner.component == "numbers"
            ]
            assert sum(counts) == 3
            for runner in harness.engine.runners.values():
                if runner.component == "numbers":
                    numbers = [*runner.letters.log.read()]  # type: ignore[attr-defined]
                    entries = runner.letters.page(DeadLetterQuery(0))["entries"]  # type: ignore[attr-defined]
                    assert [letter["number"] for letter in entries] == numbers


class Silent(Numbers):
    def next_tuple(self) -> None:
        pass


def letter_log(folder: Path, index: int = 0, tasks: int = 1, **options: Any) -> DeadLetterLog:
    log = DeadLetterLog(
        folder,
        Partitioning(tasks, by_key=False),
        index,
        (0, 0),
        lambda: True,
        options.pop("max_bytes", 2000),
        **options,
    )
    log.open()
    return log


def test_letters_with_one_number_are_numbered_when_one_task_gets_them(tmp_path: Path) -> None:
    for index in range(3):
        log = letter_log(tmp_path, index, 3)
        for number in (7, 8, 9):
            log.put(number, {"number": number, "values": [index, number]})
        log.close()
    log = letter_log(tmp_path)
    letters = log.read()
    assert len(letters) == 9 and [*letters] == sorted(letters)
    assert all(letter["number"] == number for number, letter in letters.items())
    assert sorted(letter["values"] for letter in letters.values()) == [
        [index, number] for index in range(3) for number in (7, 8, 9)
    ]
    assert log.next_number(1) == max(letters) + 1
    log.close()
    assert letter_log(tmp_path).read() == letters


def test_a_task_that_lost_its_letters_writes_none_and_continues_later(
    tmp_path: Path,
) -> None:
    first = letter_log(tmp_path)
    first.put(1, {"number": 1, "values": [1]})
    second = letter_log(tmp_path)
    second.put(2, {"number": 2, "values": [2]})
    with pytest.raises(Unavailable):
        first.put(3, {"number": 3, "values": [3]})
    assert [*second.read()] == [1, 2]
    # If the task is its own again, it reads what the other has written.
    first.put(4, {"number": 4, "values": [4]})
    assert [*first.read()] == [1, 2, 4]
    first.close()
    with pytest.raises(Unavailable, match="closed"):
        first.put(5, {"number": 5, "values": [5]})


def test_a_spout_runs_although_its_letters_cannot_be_opened(tmp_path: Path) -> None:
    log = letter_log(tmp_path / "harness" / "numbers.letters")
    log.put(1, {"number": 1, "values": [1]})
    log.close()
    (path,) = tmp_path.rglob("*.log")
    raw = path.read_bytes()
    path.write_bytes(raw[:12] + bytes([raw[12] ^ 1]) + raw[13:] + raw)
    builder = numbers_builder(1)
    builder.name = "harness"
    with TopologyHarness(builder, state_dir=tmp_path) as harness:
        run_until(harness, lambda _: len(Bug.seen) == 5)
        texts = [str(error) for _, error, *_ in harness.errors]
        assert any("damaged" in text and str(path) in text for text in texts)
        with pytest.raises(Corrupt, match="damaged"):
            letters_of(harness).page(DeadLetterQuery(0))
    assert path.exists()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers())), st.integers(1, 6))
def test_a_bounded_map_has_the_newest_entries(changes: list[tuple[int, int]], most: int) -> None:
    found: BoundedMap[int, int] = BoundedMap(most)
    model: dict[int, int] = {}
    for key, value in changes:
        if key not in model and len(model) == most:
            del model[next(iter(model))]
        found[key] = model[key] = value
        assert found == model and list(found) == list(model)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 300)), max_size=60), st.booleans())
def test_a_log_has_the_newest_letters_and_a_bound(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], torn: bool
) -> None:
    folder = tmp_path_factory.mktemp("letters")
    log = letter_log(folder)
    model: dict[int, dict[str, Any]] = {}
    for n, (step, size) in enumerate(changes):
        # A new letter, or, with an even step, a change of one that is there.
        number = max(model, default=0) + step
        if step % 2 == 0 and model:
            number = sorted(model)[step % len(model)]
        letter = {"number": number, "values": ["x" * size], "n": n}
        before = dict(model)
        model[number] = letter
        dropped = []
        for oldest in sorted(before):
            if sum(len(msgspec.json.encode(one)) for one in model.values()) <= 2000:
                break
            if oldest != number:
                dropped.append(model.pop(oldest))
        assert log.put(number, letter) == dropped
        assert log.read() == dict(sorted(model.items()))
        if torn:
            # As a process leaves it that is killed while it writes.
            log.close()
            if paths := [*folder.rglob("*.log")]:
                with paths[0].open("ab") as raw:
                    raw.write(b"\x50\x00\x00\x00\x01\x02\x03\x04half")
            log = letter_log(folder)
    assert log.read() == dict(sorted(model.items()))


CODE = """
import os
from pathlib import Path
from storm_dagster.api import Bolt, ReliableSpout

FOLDER = Path(os.environ["RIG_FOLDER"])


class Numbers(ReliableSpout):
    max_fails = 2

    def initialize(self, conf, context):
        self.n = 0

    def next_tuple(self):
        if self.n < 100:
            self.emit([self.n, {1, 2}], tup_id=self.n)
            self.n += 1


class Use(Bolt):
    def process(self, tup):
        n, more = tup.values
        if n % 10 == 3 and (FOLDER / "bug").exists():
            raise ValueError(f"{n} is too much")
        with (FOLDER / "used").open("a") as used:
            used.write(f"{n} {type(more).__name__}\\n")
"""


@pytest.mark.long
@pytest.mark.zookeeper
def test_letters_of_real_workers_are_paged_and_come_back(rig_of: Callable[..., WorkerRig]) -> None:
    """Spout, bolt and acker in a worker each: the reason travels over two links."""
    builder = TopologyBuilder("letters")
    builder.set_spout("numbers", "rig_code:Numbers", outputs=["n", "more"])
    builder.set_bolt("use", "rig_code:Use", inputs={"numbers": Grouping.SHUFFLE})
    rig = rig_of(builder, CODE, {"use": "1", "numbers": "2"})
    (rig.folder / "bug").touch()
    slots = {(f"s{n}", free_port()): tasks for n, tasks in enumerate(("1", "2,9", "8"))}
    rig.assign(slots)
    for slot in slots:
        rig.start(*slot)

    def letters(**asked: Any) -> dict[str, Any]:
        return dead_letters(
            rig.cluster.load_view().topologies[rig.topology_id], WorkerLinks(), **asked
        )

    eventually(rig.running, timeout=90, what="all workers run")
    eventually(lambda: len(letters()["letters"]) == 10, timeout=40, what="ten letters")
    page, found = letters(limit="4"), []
    while True:
        found += page["letters"]
        if page["next"] is None:
            break
        page = letters(limit="4", after=page["next"])
    assert sorted(one["tup_id"] for one in found) == list(range(3, 100, 10))
    assert {(one["component"], one["failed_task"], one["tries"]) for one in found} == {
        ("use", 1, 3)
    }
    assert all(one["error"] == f"ValueError: {one['tup_id']} is too much" for one in found)
    with pytest.raises(KeyNotFound, match="it has numbers"):
        letters(component="use")
    with pytest.raises(InvalidRequest):
        letters(after="x")
    # All of them were raised in one place: one record, with their number.
    errors = as_storm(rig.cluster)
    eventually(
        lambda: [one.count for one in errors.errors(rig.topology_id)] == [30],
        what="one record of 30 errors",
    )

    def metric() -> Any:
        master = next(slot for slot in slots if slot[0] == "s1")
        tasks = ask_worker("127.0.0.1", master[1], rig.live()[master].token, "stats", 20)["tasks"]
        return tasks["2"]["metrics"]["dead_letters"]

    assert metric() == 10
    (rig.folder / "bug").unlink()
    assert len(letters(replay=True)["letters"]) == 10
    eventually(
        lambda: all("replayed_ms" in one for one in letters()["letters"]),
        what="all letters are acked",
    )
    assert metric() == 0
    used = (rig.folder / "used").read_text().split("\n")
    assert sorted(used) == sorted(["", *(f"{n} set" for n in range(100))])


@pytest.mark.parametrize("spout", [Numbers, BlockingNumbers])
def test_letters_without_room_hold_the_spout_and_none_is_lost(spout: type, tmp_path: Path) -> None:
    conf = {"topology.dead.letter.max.bytes": 12_000}
    told = lambda: [str(error) for _, error in harness.errors]  # noqa: E731
    with TopologyHarness(build(spout, InLoop, **conf), state_dir=tmp_path) as harness:
        run_until(harness, lambda found: found.dead_letters)
        letters, metrics = letters_of(harness), letters_of(harness)._runner.stats.metrics
        written = 1
        # The tuples in flight may become letters while the spout is held.
        while not letters.holds or written < 60:
            assert letters.give_up(written, [100 + written, Decimal(1), AT], None, None)
            written += 1
        harness.tasks("numbers")[0].waiting.append(7)
        assert len(harness.run().dead_letters) == metrics["dead_letters"] == written
        assert "dead_letters_dropped" not in metrics
        assert 7 not in [values[0] for values in Bug.seen], "the spout emits nothing"
        assert metrics[AWAITED_METRIC].startswith("waits for room: its dead letters")
        (begin,) = [text for text in told() if "the spout emits nothing" in text]
        assert "dead-letters letters --replay" in begin and "overflow: drop" in begin
        Bug.on = False
        while letters.page(DeadLetterQuery(0, replay=True))["entries"]:
            harness.run()
        eventually(
            lambda: harness.run() and 7 in [values[0] for values in Bug.seen], 20, "it goes on"
        )
        assert metrics["dead_letters"] == 0 and metrics[AWAITED_METRIC] == ""
        assert [text for text in told() if "have room again" in text]
    assert {values[0] for values in Bug.seen} >= {100 + n for n in range(1, written)}


def test_deleted_letters_release_the_spout_that_they_hold(tmp_path: Path) -> None:
    conf = {"topology.dead.letter.max.bytes": 12_000}
    with TopologyHarness(build(Numbers, InLoop, **conf), state_dir=tmp_path) as harness:
        run_until(harness, lambda found: found.dead_letters)
        letters = letters_of(harness)
        written = 1
        while not letters.holds:
            assert letters.give_up(written, [100 + written, Decimal(1), AT], None, None)
            written += 1
        old = letters.page(DeadLetterQuery(0, delete_older_secs=3600))
        assert old == {"entries": [], "next": None} and letters.holds, "none is so old"
        page = letters.page(DeadLetterQuery(0, limit=2, delete_older_secs=0))
        assert len(page["entries"]) == 2 and page["next"] == page["entries"][-1]["number"]
        assert len(letters.page(DeadLetterQuery(0))["entries"]) == written - 2
        letters.page(DeadLetterQuery(0, delete_older_secs=0))
        assert letters.page(DeadLetterQuery(0))["entries"] == []
        assert not letters.holds and letters._runner.stats.metrics["dead_letters"] == 0
        assert "have room again" in str(harness.errors[-1][1])
    with TopologyHarness(build(Numbers, InLoop, **conf), state_dir=tmp_path) as harness:
        assert letters_of(harness).page(DeadLetterQuery(0))["entries"] == [], "for good"


def test_a_task_whose_letters_fill_their_room_begins_held(tmp_path: Path) -> None:
    conf = {"topology.dead.letter.max.bytes": 12_000}
    with TopologyHarness(build(Numbers, InLoop, **conf), state_dir=tmp_path) as harness:
        run_until(harness, lambda found: found.dead_letters)
        letters = letters_of(harness)
        while not letters.holds:
            assert letters.give_up(1, [100, Decimal(1), AT], None, None)
    Bug.seen.clear()
    with TopologyHarness(build(Numbers, InLoop, **conf), state_dir=tmp_path) as harness:
        harness.run()
        assert letters_of(harness).holds and not Bug.seen
    drops = {**conf, "topology.dead.letter.overflow": "drop"}
    with TopologyHarness(build(Numbers, InLoop, **drops), state_dir=tmp_path) as harness:
        run_until(harness, lambda found: len(Bug.seen) >= 5)
        assert not letters_of(harness).holds


def test_letters_that_are_dropped_are_counted(tmp_path: Path) -> None:
    conf = {
        "topology.dead.letter.max.bytes": 12_000,
        "topology.dead.letter.overflow": "drop",
    }
    with TopologyHarness(build(Numbers, InLoop, **conf), state_dir=tmp_path) as harness:
        run_until(harness, lambda found: found.dead_letters)
        letters, metrics = letters_of(harness), letters_of(harness)._runner.stats.metrics
        assert "dead_letters_dropped" not in metrics
        for n in range(60):
            assert letters.give_up(n, [n, Decimal(1), AT], None, None)
        kept = len(harness.run().dead_letters)
        assert metrics["dead_letters"] == kept < 61 and metrics["dead_letters_dropped"] == 61 - kept
        # Marks of replayed letters need room, too.
        while letters.page(DeadLetterQuery(0, replay=True))["entries"]:
            harness.run()
        left = [one for one in harness.run().dead_letters if "replayed_ms" not in one]
        assert metrics["dead_letters"] == len(left)


def no_place_for_three(
    context: Any, component: str, stream: str, tasks: list[int]
) -> Callable[[Any], list[int]]:
    def choose(values: Any) -> list[int]:
        if values[0] == 3:
            raise KeyError("three has no place")
        return tasks

    return choose


@pytest.mark.parametrize("spout", [Plain, BlockingPlain])
def test_a_tuple_whose_grouping_raises_becomes_a_letter(spout: type) -> None:
    builder = TopologyBuilder("letters")
    builder.set_spout("numbers", spout, config={"topology.dead.letter.tries": 3})
    builder.set_bolt(
        "use", InLoop, inputs={"numbers": Grouping.custom(f"{__name__}:no_place_for_three")}
    )
    Bug.on = False
    with TopologyHarness(builder) as harness:
        (letter,) = eventually(lambda: harness.run().dead_letters, 20, "a letter")
        assert (
            letter["values"] == [3, "1.50", AT.isoformat().replace("+00:00", "Z")]
            and letter["tries"] == 3
        )
        assert "three has no place" in letter["error"] and len(harness.errors) == 3
        (source,) = harness.tasks("numbers")

        def are_settled() -> bool:
            # After errors in a row the spout pauses, and the harness is idle.
            harness.run()
            return sorted(source.settled) == list(range(6))

        assert eventually(are_settled, 20, "its acks")
