"""A source spout: retries, bounds, dead letters, positions and lag, on the loop and in a thread."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from storm_dagster.api import Bolt, SystemUnavailable, Topology, Tuple
from storm_dagster.connectors import (
    Lag,
    PartitionEnd,
    Retries,
    Source,
    SourceRecord,
    SourceSpout,
    source_spout,
)
from storm_dagster.model.errors import InvalidTopology, Unavailable
from storm_dagster.model.names import AWAITED_METRIC
from storm_dagster.model.values import decode_value
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.worker.state.storage import Positions
from storm_rigs.worker.sources_in_harness import run_until

QUICK = Retries(most=2, first_secs=0.01, longest_secs=0.05)


@pytest.fixture(autouse=True)
def quick_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_spout, "_COMMIT_SECS", 0.05)


class World:
    """What the sources read, and what they were told."""

    logs: ClassVar[dict[str, list[bytes]]] = {}
    assigned: ClassVar[list[dict[str, Any]]] = []
    committed: ClassVar[dict[str, Any]] = {}
    acked: ClassVar[list[Any]] = []
    nacked: ClassVar[list[Any]] = []
    bad: ClassVar[set[Any]] = set()
    seen: ClassVar[list[Any]] = []
    error: ClassVar[Exception | None] = None
    closed: ClassVar[int] = 0
    recreated: ClassVar[set[str]] = set()

    @classmethod
    def reset(cls, **logs: list[bytes]) -> None:
        cls.logs, cls.assigned, cls.committed, cls.acked, cls.nacked = logs, [], {}, [], []
        cls.bad, cls.seen, cls.error, cls.closed = set(), [], None, 0


@dataclass
class InThread(Source):
    """Logs of bytes; positions are kept with the component."""

    step: int = 3
    refresh_secs: ClassVar[float] = 0.01

    def open(self, conf: Mapping[str, Any], context: Any) -> None:
        self.at: dict[str, int] = {}

    def partitions(self) -> Collection[str]:
        return list(World.logs)

    def assign(self, mine: Mapping[str, Any]) -> None:
        World.assigned.append(dict(mine))
        self.at = {name: self.at.get(name, position or 0) for name, position in mine.items()}

    def read(self, most: int, full: Collection[str]) -> Sequence[Any]:
        if World.error is not None:
            raise World.error
        found: list[Any] = []
        for name, at in self.at.items():
            if name in full or at >= len(World.logs[name]):
                if not World.logs[name]:
                    found.append(PartitionEnd(name, 0))
                continue
            end = min(at + self.step, len(World.logs[name]))
            log = World.logs[name]
            found += [
                SourceRecord(log[index], name, index + 1, key=b"k", at_ms=1000)
                for index in range(at, end)
            ]
            self.at[name] = end
            if end == len(World.logs[name]):
                found.append(PartitionEnd(name, end))
        return found

    def recreated(self) -> Collection[str]:
        names = World.recreated
        World.recreated = set()
        return names

    def lag(self) -> Mapping[str, Lag]:
        return {name: Lag(len(World.logs[name]) - World.committed.get(name, 0)) for name in self.at}

    def close(self) -> None:
        World.closed += 1


@dataclass
class OnLoop(InThread):
    """The same on the loop; positions are kept by the source."""

    blocking: ClassVar[bool] = False
    keeps_positions: ClassVar[bool] = True

    def assign(self, mine: Mapping[str, Any]) -> None:
        super().assign({name: World.committed.get(name) for name in mine})

    def commit(self, after: Mapping[str, Any]) -> None:
        World.committed.update(after)


class Use(Bolt):
    def process(self, tup: Tuple) -> None:
        World.seen.append(tup.values)
        if tup.values[0] in World.bad:
            raise ValueError(f"{tup.values[0]} is bad")


def topology(source: Source, par: int = 1, **settings: Any) -> type[Topology]:
    body = {
        "source": source,
        "outputs": ["n"],
        "retries": QUICK,
        "__module__": __name__,
        **settings,
    }
    # Tasks import the class by its name.
    globals()["Reads"] = made = type("Reads", (SourceSpout,), body)

    class Reading(Topology):
        records = made.spec(par=par)
        use = Use.spec(inputs=[records])

    return Reading


SOURCES: list[Callable[[], Source]] = [InThread, OnLoop]


def stored(harness: TopologyHarness) -> dict[str, Any]:
    spout = harness.tasks("records")[0]
    return (
        dict(spout._store.current)
        if spout is not None and spout._store is not None
        else World.committed
    )


@pytest.mark.parametrize("make", SOURCES)
def test_every_record_is_read_once_and_positions_are_committed(
    make: Callable[[], Source], tmp_path: Path
) -> None:
    World.reset(a=[b"%d" % n for n in range(20)], b=[b"%d" % n for n in range(100, 107)], c=[])
    with TopologyHarness(topology(make()), state_dir=tmp_path) as harness:
        run_until(harness, lambda: stored(harness) == {"a": 20, "b": 7, "c": 0})
        assert harness.errors == []
    assert sorted(n for (n,) in World.seen) == [*range(20), *range(100, 107)]
    assert World.closed == 1
    World.logs["a"] += [b"20"]
    World.seen.clear()
    # With another number of tasks each partition goes on where it was, and has one reader.
    with TopologyHarness(topology(make(), par=2), state_dir=tmp_path) as harness:
        run_until(harness, lambda: World.seen == [[20]] and sum(map(len, World.assigned)) == 6)
        harness.run()
        assert World.seen == [[20]] and harness.errors == []
    again = [mine for mine in World.assigned[1:] if mine]
    assert sorted(name for mine in again for name in mine) == ["a", "b", "c"]
    assert {name: position for mine in again for name, position in mine.items()} == {
        "a": 20,
        "b": 7,
        "c": 0,
    }


@pytest.mark.parametrize("make", SOURCES)
def test_poison_becomes_a_dead_letter_and_stops_no_other_record(
    make: Callable[[], Source], tmp_path: Path
) -> None:
    World.reset(a=[b"%d" % n for n in range(30)], b=[b"{broken"])
    World.bad = {7}
    with TopologyHarness(topology(make()), state_dir=tmp_path) as harness:
        run_until(harness, lambda: stored(harness) == {"a": 30, "b": 1})
        letters = {letter["position"]["partition"]: letter for letter in harness.run().dead_letters}
    failed, undecoded = letters["a"], letters["b"]
    assert (
        failed["tries"] == 3
        and failed["values"] == [7]
        and "ValueError: 7 is bad" in failed["error"]
    )
    assert failed["component"] == "use" and failed["first_ms"] <= failed["last_ms"]
    assert failed["position"] == {
        "partition": "a", "after": 8, "key": "k", "headers": {}, "value": "7", "at_ms": 1000
    }  # fmt: skip
    assert (
        "InvalidJson: Expecting" in undecoded["error"]
        and undecoded["position"]["value"] == "{broken"
    )
    assert undecoded["raw"] is None, "what was never decoded is not emitted again"
    assert sum(n == 7 for (n,) in World.seen) == 3


WRONG_SHAPES = [
    (b'"ab"', "is of type str, and not a map or a list of the 2 fields 'customer', 'amount'"),
    (b"[1]", "is a list of 1 values"),
    (b"7", "is of type int"),
    (b'{"customer": "bob"}', "has no 'amount', only: 'customer'"),
    (b"null", 'set on_null of the spout to "skip"'),
]


@pytest.mark.parametrize("call", ["values", "decode"])
def test_a_system_that_decoding_needs_uses_up_no_try(call: str, tmp_path: Path) -> None:
    World.reset(a=[b"1", b"2", b"3"])
    calls: list[Any] = []

    def ask(value: Any) -> None:
        calls.append(value)
        if len(calls) in (1, 3):
            raise SystemUnavailable("the schema registry", "refused", after=0.01)

    def values(self: SourceSpout, record: SourceRecord) -> Any:
        ask(record.value)
        return SourceSpout.values(self, record)

    def decode(value: bytes) -> Any:
        ask(value)
        return int(value)

    methods = {"values": values} if call == "values" else {"decode": staticmethod(decode)}
    made = topology(OnLoop(), **methods)
    with TopologyHarness(made, state_dir=tmp_path) as harness:
        run_until(harness, lambda: World.committed.get("a") == 3)
        assert harness.run().dead_letters == []
        assert "waits for the schema registry" in str(harness.errors[0][1])
    assert sorted(World.seen) == [[1], [2], [3]]


def test_a_value_of_another_shape_is_a_dead_letter_at_its_first_try(tmp_path: Path) -> None:
    World.reset(
        a=[*(raw for raw, _ in WRONG_SHAPES), b'["ann", 1]', b'{"amount": 2, "customer": "bob"}']
    )
    emitted: list[Any] = []

    def values(self: SourceSpout, record: SourceRecord) -> Any:
        emitted.append(record.value)
        return SourceSpout.values(self, record)

    made = topology(OnLoop(), outputs=["customer", "amount"], values=values)
    with TopologyHarness(made, state_dir=tmp_path) as harness:
        run_until(harness, lambda: World.committed.get("a") == len(World.logs["a"]))
        letters = harness.run().dead_letters
        assert harness.errors == []
    assert World.seen == [["ann", 1], ["bob", 2]] and emitted == World.logs["a"]
    for (raw, reason), letter in zip(WRONG_SHAPES, letters, strict=True):
        assert reason in letter["error"] and letter["tries"] == 1
        assert letter["position"]["value"] == raw.decode() and letter["raw"] is None


UNFIT: list[Any] = ["ab", [1, 2], (3,), [object()], [{1: object()}], 7]


def test_values_that_do_not_fit_the_stream_are_a_dead_letter_at_once(tmp_path: Path) -> None:
    World.reset(a=[b"%d" % n for n in range(len(UNFIT))])
    calls: list[int] = []

    def values(self: SourceSpout, record: SourceRecord) -> Any:
        calls.append(record.after)
        return UNFIT[record.after - 1]

    with TopologyHarness(topology(InThread(), values=values), state_dir=tmp_path) as harness:
        run_until(harness, lambda: stored(harness) == {"a": len(UNFIT)})
        letters = harness.run().dead_letters
    # Only (3,) is a tuple of one field.
    assert World.seen == [[3]] and calls == [1, 2, 3, 4, 5, 6]
    assert [letter["position"]["after"] for letter in letters] == [1, 2, 4, 5, 6]
    assert all(letter["tries"] == 1 for letter in letters)


@pytest.mark.parametrize(
    ("on_null", "seen", "letters"),
    [("emit", [[None], [1], [None]], 0), ("skip", [[1]], 0), ("dead_letter", [[1]], 2)],
)
def test_null_and_tombstones_follow_on_null(
    on_null: str, seen: Any, letters: int, tmp_path: Path
) -> None:
    records: list[Any] = [b"null", b"1", None]
    World.reset(a=records)
    with TopologyHarness(topology(OnLoop(), on_null=on_null), state_dir=tmp_path) as harness:
        run_until(harness, lambda: World.committed.get("a") == 3)
        written = harness.run().dead_letters
    assert World.seen == seen and len(written) == letters
    assert all("on_null of the spout is dead_letter" in letter["error"] for letter in written)


def test_a_dead_letter_shows_nan_as_text_and_keeps_the_value(tmp_path: Path) -> None:
    World.reset(a=[b"1"])
    World.bad = {"bad"}
    values = ["bad", float("nan"), [None, float("inf")], "\udc80"]
    fit = {"values": lambda self, record: values, "outputs": ["a", "b", "c", "d"]}
    with TopologyHarness(topology(OnLoop(), **fit), state_dir=tmp_path) as harness:
        run_until(harness, lambda: World.committed.get("a") == 1)
        (letter,) = harness.run().dead_letters
    assert letter["values"] == ["bad", "nan", [None, "inf"], "\\udc80"]
    assert repr(decode_value(base64.b64decode(letter["raw"]))) == repr(values)


@dataclass
class WithLines(OnLoop):
    """A source that knows lines, and one line of which it could not read."""

    def read(self, most: int, full: Collection[str]) -> Sequence[Any]:
        found: list[Any] = []
        for record in super().read(most, full):
            if isinstance(record, SourceRecord):
                error = "in.csv, line 20: one field" if record.value == b"2" else ""
                record = SourceRecord(
                    record.value,
                    record.partition,
                    record.after,
                    line=10 * record.after,
                    error=error,
                )
            found.append(record)
        return found


def test_a_dead_letter_names_partition_and_line(tmp_path: Path) -> None:
    World.reset(a=[b"1", b"2", b"NaN", b"4"])
    with TopologyHarness(topology(WithLines()), state_dir=tmp_path) as harness:
        run_until(harness, lambda: World.committed.get("a") == 4)
        unread, undecoded = harness.run().dead_letters
    assert World.seen == [[1], [4]]
    assert unread["error"].endswith("UnreadableRecord: in.csv, line 20: one field")
    assert unread["position"]["line"] == 20 and unread["position"]["value"] == "2"
    assert "a, line 30: InvalidJson: NaN is not a number of JSON" in undecoded["error"]


def test_a_blocking_record_stops_its_partition_and_is_reported_once() -> None:
    World.reset(a=[b"%d" % n for n in range(80)], b=[b"%d" % n for n in range(100, 130)])
    World.bad = {0}
    with TopologyHarness(topology(OnLoop(), on_poison="block", max_open=5)) as harness:
        run_until(harness, lambda: World.committed.get("b") == 30 and World.seen.count([0]) > 6)
        # One record is open, and most of the bound is free: reading goes on, and ends ten bounds
        # after it.
        run_until(harness, lambda: [49] in World.seen and World.seen.count([0]) > 9)
        assert [50] not in World.seen
        reports = [str(error) for name, error in harness.errors if name == "records"]
        assert (
            len(reports) == 1
            and "a before 1 failed 3 times" in reports[0]
            and "block" in reports[0]
        )
        assert "a" not in World.committed or World.committed["a"] == 0
        World.bad = set()
        run_until(harness, lambda: World.committed.get("a") == 80)


@pytest.mark.parametrize("make", SOURCES)
def test_what_is_skipped_or_not_decoded_takes_no_turn(
    make: Callable[[], Source], tmp_path: Path
) -> None:
    World.reset(a=[b"{" if n % 1000 == 1 else b"%d" % n for n in range(20_000)])
    turns = 0

    def next_tuple(self: SourceSpout) -> None:
        nonlocal turns
        turns += 1
        SourceSpout.next_tuple(self)

    def values(self: SourceSpout, record: SourceRecord) -> Any:
        found = SourceSpout.values(self, record)
        assert found is not None
        return None if found[0] % 1000 else found

    source: Any = make()
    source.step = 500
    with TopologyHarness(
        topology(source, next_tuple=next_tuple, values=values), state_dir=tmp_path
    ) as harness:
        run_until(harness, lambda: stored(harness) == {"a": 20_000})
        assert len(harness.run().dead_letters) == 20
    assert [n for (n,) in World.seen] == list(range(0, 20_000, 1000)) and turns < 5_000


def test_a_partition_is_not_emitted_beyond_its_bound_and_hardly_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_spout, "_BATCH", 2)
    World.reset(a=[b"%d" % n for n in range(30)])
    World.bad = set(range(30))
    with TopologyHarness(topology(OnLoop(step=4), on_poison="block", max_open=5)) as harness:
        run_until(harness, lambda: World.seen.count([0]) > 3)
        assert {n for (n,) in World.seen} == set(range(5))
        assert harness.tasks("records")[0]._source.at == {"a": 8}
        World.bad = set()
        run_until(harness, lambda: World.committed.get("a") == 30)


def test_one_poison_record_among_ten_thousand_stops_nobody(tmp_path: Path) -> None:
    World.reset(a=[b"%d" % n for n in range(5000)], b=[b"%d" % n for n in range(5000, 10_000)])
    World.bad = {17}
    with TopologyHarness(topology(OnLoop(step=500)), state_dir=tmp_path) as harness:
        run_until(harness, lambda: World.committed == {"a": 5000, "b": 5000})
        (letter,) = harness.run().dead_letters
    assert letter["values"] == [17] and letter["position"]["after"] == 18
    assert {n for (n,) in World.seen} == set(range(10_000)) and len(World.seen) == 10_002


def test_skip_drops_a_record_after_its_tries() -> None:
    World.reset(a=[b"1", b"2", b"3"])
    World.bad = {2}
    with TopologyHarness(topology(OnLoop(), on_poison="skip")) as harness:
        run_until(harness, lambda: World.committed.get("a") == 3)
        assert harness.run().dead_letters == [] and World.seen.count([2]) == 3


def test_positions_that_could_not_be_stored_are_stored_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    World.reset(a=[b"1", b"2"])
    save, tries = Positions.save, []

    def save_late(self: Positions, *args: Any) -> None:
        tries.append(args)
        if len(tries) < 3:
            raise Unavailable("the state was divided over another number of tasks")
        save(self, *args)

    monkeypatch.setattr(Positions, "save", save_late)
    with TopologyHarness(topology(InThread())) as harness:
        run_until(harness, lambda: stored(harness) == {"a": 2} and len(tries) == 3)
        begin, end = (str(error) for _, error in harness.errors)
        assert "another number of tasks" in begin
        assert end.startswith("the source InThread answers again: it was away for ")
    assert World.seen == [[1], [2]]


def test_a_letter_that_cannot_be_kept_loses_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    World.reset(a=[b"1", b"2"])
    World.bad = {1}
    with TopologyHarness(topology(OnLoop())) as harness:
        monkeypatch.setattr(SourceSpout, "give_up", lambda *_: False)
        run_until(harness, lambda: World.seen.count([1]) > 5)
        assert World.committed.get("a") in (None, 0)
        World.bad = set()
        run_until(harness, lambda: World.committed.get("a") == 2)


@pytest.mark.parametrize("make", SOURCES)
def test_records_of_a_recreated_partition_commit_nothing(
    make: Callable[[], Any],
) -> None:
    World.reset(a=[b"1", b"2"], b=[b"3"])
    World.bad = {2}
    source = make()
    World.recreated = set()
    settings = {"on_poison": "block", "max_open": 1, "retries": Retries(most=0, first_secs=0.5)}
    with TopologyHarness(topology(source, **settings)) as harness:
        run_until(harness, lambda: [2] in World.seen)
        (spout,) = harness.tasks("records")
        run_until(harness, lambda: spout._committed == {"a": 1, "b": 1})
        # Also a partition that is full, and another that has no open record.
        World.logs["a"] = World.logs["b"] = [b"7"]
        spout._source.at = {"a": 0, "b": 0}
        World.recreated = {"a", "b"}
        run_until(
            harness, lambda: World.seen.count([7]) == 2 and spout._committed == {"a": 1, "b": 1}
        )
        World.bad = set()
        tries = World.seen.count([2])
        until = time.monotonic() + 1
        run_until(harness, lambda: time.monotonic() > until)
        assert spout._committed == {"a": 1, "b": 1} and World.seen.count([2]) == tries


@dataclass
class Queue(Source):
    """A queue deals records itself, and gets each back or acked."""

    def open(self, conf: Mapping[str, Any], context: Any) -> None:
        self.waiting = [*range(10)]

    def read(self, most: int, full: Collection[str]) -> Sequence[Any]:
        found, self.waiting = self.waiting[:4], self.waiting[4:]
        return [SourceRecord(str(n).encode(), handle=n) for n in found]

    def ack(self, handles: Sequence[Any]) -> None:
        World.acked.extend(handles)

    def nack(self, handles: Sequence[Any]) -> None:
        World.nacked.extend(handles)


def test_queue_records_are_acked_singly_and_the_rest_is_returned() -> None:
    World.reset()
    World.bad = {3}
    with TopologyHarness(topology(Queue(), on_poison="block")) as harness:
        run_until(harness, lambda: len(World.acked) == 9)
    assert sorted(World.acked) == [0, 1, 2, 4, 5, 6, 7, 8, 9] and World.nacked == [3]


@dataclass
class AwayQueue(Queue):
    """A queue that cannot be told at first."""

    def ack(self, handles: Sequence[Any]) -> None:
        if World.error is not None:
            raise World.error
        super().ack(handles)


def test_what_a_queue_could_not_be_told_it_is_told_later() -> None:
    World.reset()
    World.error = ConnectionError("the queue is away")
    with TopologyHarness(topology(AwayQueue())) as harness:
        run_until(harness, lambda: len(World.seen) == 10 and harness.errors)
        (begin,) = [str(error) for _, error in harness.errors]
        assert "ConnectionError: the queue is away" in begin and World.acked == []
        World.error = None
        run_until(harness, lambda: len(World.acked) == 10)
    assert sorted(World.acked) == list(range(10)) and World.nacked == []


def test_many_blocked_partitions_stop_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_spout, "_BATCH", 4)
    World.reset(**{f"a{n}": [b"0"] * 40 for n in range(8)}, b=[b"%d" % n for n in range(1, 100)])
    World.bad = {0}
    with TopologyHarness(topology(OnLoop(step=4), on_poison="block", max_open=2)) as harness:
        run_until(harness, lambda: World.committed.get("b") == 99)
        # Of each that is blocked, little more was read than its bound.
        assert all(harness.tasks("records")[0]._source.at[f"a{n}"] <= 8 for n in range(8))


def test_lag_by_partition_is_in_the_statistics() -> None:
    World.reset(a=[b"1"] * 4, b=[b"1"])
    with TopologyHarness(topology(OnLoop()), simulated=True, start_ms=5000) as harness:
        World.bad = {1}
        harness.advance(0.3)
        (metrics,) = [
            one.metrics for one in harness.engine.stats().values() if one.component == "records"
        ]
        assert metrics["lag"] == 5 and metrics["lag_secs"] >= 4.0
        assert (
            metrics["lag_by_partition"]["a"][0] == 4 and metrics["lag_by_partition"]["b"][1] >= 4.0
        )


def test_the_letter_of_a_long_record_leaves_room_for_others(tmp_path: Path) -> None:
    World.reset(a=[b'{"n": "' + b"x" * (8 << 20), b"7"])
    with TopologyHarness(topology(OnLoop()), state_dir=tmp_path) as harness:
        run_until(harness, lambda: World.seen == [[7]])
        result = harness.run()
    (letter,) = result.dead_letters
    value = letter["position"]["value"]
    assert value.startswith('{"n": "xxx') and value.endswith("... (8388615 in all)")
    assert len(value) < 300_000 and not result.errors, "the spout is not held"


def test_an_outage_of_a_source_has_a_begin_and_an_end() -> None:
    World.reset(a=[b"1", b"2"])
    World.error = ConnectionError("the server is away")
    with TopologyHarness(topology(OnLoop())) as harness:
        for _ in range(3):
            harness.run()
        (begin,) = [str(error) for _, error in harness.errors]
        assert begin.startswith("waits for the source OnLoop since 20")
        assert "ConnectionError: the server is away (test_source_spout.py, line " in begin
        runner = next(
            runner for runner in harness.engine.runners.values() if runner.component == "records"
        )
        awaited = runner.stats.metrics[AWAITED_METRIC]
        assert awaited.startswith("waits for the source OnLoop since 20")
        assert "the server is away" in awaited
        World.error = None
        run_until(harness, lambda: World.committed.get("a") == 2)
        run_until(harness, lambda: len(harness.errors) == 2)
        assert "the source OnLoop answers again" in str(harness.errors[1][1])
        assert runner.stats.metrics[AWAITED_METRIC] == ""


def test_a_subclass_chooses_what_it_emits() -> None:
    World.reset(a=[b'{"n": 1, "m": 2}', b'{"n": 3}', b"null"])

    with TopologyHarness(Pairs) as harness:
        run_until(harness, lambda: World.committed.get("a") == 3)
        result = harness.run()
    assert result.values("pairs") == [["k", 1], ["k", 3]]


class KeyAndNumber(SourceSpout):
    source = OnLoop()
    outputs = ["key", "n"]

    def values(self, record: SourceRecord) -> Sequence[Any] | None:
        decoded = self._decode(record.value)
        return None if decoded is None else [record.key.decode(), decoded["n"]]


class Pairs(Topology):
    pairs = KeyAndNumber.spec()


def halves(value: bytes) -> dict[str, Any]:
    left, right = value.decode().split("-")
    return {"left": left, "right": right}


class Split(SourceSpout):
    source = OnLoop()
    decode = halves
    outputs = ["right", "left"]


class Halves(Topology):
    records = Split.spec()


def test_a_function_decodes_and_fields_are_taken_by_name() -> None:
    World.reset(a=[b"x-y"])
    with TopologyHarness(Halves) as harness:
        run_until(harness, lambda: World.committed.get("a") == 1)
        assert harness.run().values("records") == [["y", "x"]]


def test_a_spout_without_a_source_is_refused() -> None:
    with pytest.raises(InvalidTopology, match="has no source"):
        SourceSpout.spec(outputs=["n"])


def test_an_on_null_that_means_nothing_is_refused() -> None:
    with pytest.raises(InvalidTopology, match="on_null of Reads is 'drop': make it"):
        topology(OnLoop(), on_null="drop")
