"""Batches, their acks and tokens, whatever a sink or a worker does."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storm_dagster.api import Grouping, ReliableSpout, Topology, TopologyBuilder
from storm_dagster.connectors import (
    Rejected,
    Retries,
    Retry,
    Row,
    SinkBolt,
    Source,
    SourceRecord,
    SourceSpout,
)
from storm_dagster.core.dataplane.keyed_state import (
    Checkpoint,
    Contents,
    Partitioning,
    frame,
    read_log,
)
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.names import AWAITED_METRIC
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_rigs.components import CollectBolt, InputSpout, RejectBolt


class Store:
    """A database, and what happens to the writes to it, the last thing first."""

    def __init__(self, plan: Sequence[str] = ()) -> None:
        self.plan = list(plan)
        self.rows: list[Any] = []
        self.ids: list[str | None] = []
        self.batches: list[int] = []
        self.tokens: dict[str, int] = defaultdict(int)
        self.epochs: Counter[str] = Counter()


STORE = Store()


class StoreSink:
    def open(self, conf: Any, owner: str) -> int | None:
        if STORE.plan and STORE.plan[-1] == "away":
            STORE.plan.pop()
            raise ConnectionError("the store is away")
        STORE.epochs[owner] += 1
        self.owner, self.epoch = owner, STORE.epochs[owner]
        if STORE.plan and STORE.plan[-1] == "busy":
            STORE.plan.pop()
            raise Retry(after=0.2)
        return STORE.tokens[owner]

    def write(self, rows: Sequence[Row], token: int) -> None:
        assert self.epoch == STORE.epochs[self.owner] and token > STORE.tokens[self.owner] and rows
        what = STORE.plan.pop() if STORE.plan else "ok"
        if what == "retry":
            raise Retry(after=0.2)
        if what == "before":
            raise ConnectionError("nothing is written")
        if what == "exit before":
            raise SystemExit("killed before the write")
        refused = {at: "odd" for at, row in enumerate(rows) if row.values["n"] in REFUSED}
        if refused:
            raise Rejected(refused)
        STORE.rows += [row.values["n"] for row in rows]
        STORE.ids += [row.id for row in rows]
        STORE.batches.append(len(rows))
        STORE.tokens[self.owner] = token
        if what == "after":
            raise ConnectionError("all is written, and the answer is lost")
        if what == "exit after":
            raise SystemExit("killed after the write")

    def close(self) -> None:
        self.epoch = 0


REFUSED = {13, 14, 33}


class Write(SinkBolt):
    batch_rows = 7
    batch_bytes = 200

    sink = StoreSink()


class WriteOnce(Write):
    record_id = "n"
    exactly_once = True


class Once(Topology):
    numbers = InputSpout.spec(outputs=["key", "n"])
    write = WriteOnce.spec(inputs={numbers: Grouping.fields("key")}, par=2)
    note = CollectBolt.spec(inputs={write["rejected"]: Grouping.GLOBAL})


class OnceLater(Topology):
    numbers = InputSpout.spec(outputs=["key", "n"])
    write = WriteOnce.spec(inputs={numbers: Grouping.fields("key")})
    note = RejectBolt.spec(inputs={write["rejected"]: Grouping.GLOBAL}, args={"times": 1})


class Often(Topology):
    numbers = InputSpout.spec(outputs=["key", "n"])
    write = Write.spec(inputs=[numbers], par=2)
    note = CollectBolt.spec(inputs={write["rejected"]: Grouping.GLOBAL})


def run(
    topology: type[Topology],
    numbers: Sequence[Any],
    secs: float = 4.0,
    times: int = 1,
    **options: Any,
) -> Any:
    """Run until all is acked."""
    CollectBolt.everything.clear()
    rows = [[f"k{n % 5}", n] for n in numbers]
    with TopologyHarness(
        topology, {"numbers": rows}, simulated=True, replays=99, **options
    ) as harness:
        for _ in range(times):
            result = harness.advance(secs)
            if len(result.acked["numbers"]) == len(rows):
                break
        return result


FEW = settings(max_examples=max(4, settings().max_examples // 4))
PLAN = st.lists(
    st.sampled_from(
        ["ok", "retry", "before", "after", "away", "busy", "exit before", "exit after"]
    ),
    min_size=1,
    max_size=9,
)


@FEW
@given(PLAN)
def test_every_row_is_written_once_whatever_happens(plan: list[str]) -> None:
    global STORE
    STORE = Store(plan)
    result = run(Once, range(40), times=30)
    assert sorted(result.acked["numbers"]) == list(range(40)), result.errors
    assert Counter(STORE.rows) == Counter(set(range(40)) - REFUSED)
    assert STORE.ids == [str(n) for n in STORE.rows]
    assert {row["n"]: why for row, why in CollectBolt.everything} == dict.fromkeys(REFUSED, "odd")


@FEW
@given(PLAN)
def test_without_tokens_every_row_is_written_and_nothing_is_acked_before(plan: list[str]) -> None:
    global STORE
    STORE = Store(plan)
    result = run(Often, range(40), times=30)
    assert sorted(result.acked["numbers"]) == list(range(40)), result.errors
    assert set(STORE.rows) == set(range(40)) - REFUSED
    assert {row["n"] for row, _ in CollectBolt.everything} == REFUSED


def test_a_sink_that_is_busy_when_it_is_opened_loses_no_row(tmp_path: Path) -> None:
    """Its token, which it tells later, says which rows of the time before are written."""
    global STORE
    STORE = Store(["away"] * 99 + ["after"] * 2)
    run(Once, range(10), state_dir=tmp_path)
    assert sorted(STORE.rows) == list(range(10)), "written, and the answer is lost"
    STORE.plan = ["busy"] * 2
    result = run(Once, range(100, 110), times=9, state_dir=tmp_path)
    assert sorted(result.acked["numbers"]) == list(range(10)), result.errors
    assert Counter(STORE.rows) == Counter([*range(10), *range(100, 110)])


def test_a_row_that_comes_twice_is_written_once() -> None:
    """While it waits in a batch, and later."""
    global STORE
    STORE = Store()
    result = run(Once, [1, 2, 1, *range(20), 1, 2])
    assert len(result.acked["numbers"]) == 25 and Counter(STORE.rows) == Counter(
        set(range(20)) - REFUSED
    )


@pytest.mark.parametrize("plan", [[], ["exit after", "ok"]])
def test_a_rejected_row_whose_reader_failed_is_rejected_again(plan: list[str]) -> None:
    """Although the rows beside it are written, and are not written again."""
    global STORE
    STORE = Store(plan)
    result = run(OnceLater, range(10, 20), times=30)
    assert len(result.acked["numbers"]) == 10 and Counter(STORE.rows) == Counter(
        set(range(10, 20)) - REFUSED
    )
    assert {row["n"] for row, _ in CollectBolt.everything} == {13, 14}


def test_a_batch_has_a_number_of_rows_of_bytes_and_an_age() -> None:
    global STORE

    class Limits(Topology):
        numbers = InputSpout.spec(outputs=["key", "n"])
        write = Write.spec(inputs=[numbers])

    STORE = Store()
    rows = [["x" * 150, n] for n in range(3)] + [["", n] for n in range(20, 29)]
    with TopologyHarness(Limits, {"numbers": rows}, simulated=True) as harness:
        harness.run()
        # 158 and 316 bytes; one row of 158 with those of 8 that fit beside it; then seven rows.
        assert STORE.batches == [2, 7]
        assert len(harness.advance(0.8).acked["numbers"]) == 9
        assert len(harness.advance(0.8).acked["numbers"]) == 12
    assert STORE.batches == [2, 7, 3]


def test_an_unreachable_sink_is_reported_with_its_begin_and_end_and_holds_its_tuples() -> None:
    global STORE
    STORE = Store(["before", "away"] * 200)
    rows = [["a", n] for n in range(100, 150)]
    with TopologyHarness(
        Often, {"numbers": rows}, simulated=True, conf={"topology.message.timeout.secs": 900}
    ) as harness:

        def five_seconds() -> list[tuple[str, BaseException]]:
            harness.clock.secs += 5  # type: ignore[union-attr]
            harness.engine.run(harness.shared.clock())
            return harness.errors

        eventually(five_seconds, 60, "what is said of the sink", interval=0.1)
        for _ in range(24):
            five_seconds()
            time.sleep(0.02)
        tasks = harness.tasks("write")
        assert (
            all(sum(len(tups) for _, tups in task._writing + task._entries) <= 7 for task in tasks)
            and not STORE.rows
        )
        told = [str(error) for component, error in harness.errors if component == "write"]
        begins = [text for text in told if "rows wait for the sink" in text]
        # Of each task, before and after it has connected without rows.
        assert 1 <= len(begins) <= 2 * 2
        assert all("answers again" in text for text in told if text not in begins)
        awaited = [
            runner.stats.metrics.get(AWAITED_METRIC, "")
            for runner in harness.engine.runners.values()
            if runner.component == "write"
        ]
        assert any(text.startswith("waits for the sink ") for text in awaited)
        STORE.plan.clear()
        for _ in range(10):
            result = harness.advance(11)
        told = [str(error) for component, error in harness.errors if component == "write"]
        begins = [text for text in told if "rows wait for the sink" in text]
        ends = [text for text in told if "answers again" in text]
        assert 1 <= len(ends) <= len(begins), "the end is reported"
        assert len(result.acked["numbers"]) == 50 and sorted(STORE.rows) == list(range(100, 150))


class Fifty(Source):
    """Fifty records; positions are kept here."""

    keeps_positions: ClassVar[bool] = True
    blocking: ClassVar[bool] = False
    committed: ClassVar[dict[str, Any]] = {}

    def open(self, conf: Any, context: Any) -> None:
        self.rest = [SourceRecord(["a", n], "p", n - 99) for n in range(100, 150)]

    def partitions(self) -> list[str]:
        return ["p"]

    def read(self, most: int, full: Any) -> list[SourceRecord]:
        self.rest, found = [], self.rest
        return found

    def commit(self, after: Any) -> None:
        self.committed.update(after)


class ReadFifty(SourceSpout):
    outputs = ["key", "n"]
    source = Fifty()
    decode = "none"
    retries = Retries(most=2, first_secs=0.01, longest_secs=0.01)


class Waits(Topology):
    numbers = ReadFifty.spec()
    write = Write.spec(inputs=[numbers])
    note = CollectBolt.spec(inputs={write["rejected"]: Grouping.GLOBAL})


def test_no_record_is_given_up_while_its_sink_is_away(tmp_path: Path) -> None:
    global STORE
    STORE = Store(["away"] * 10_000)
    conf = {"topology.message.timeout.secs": 2}
    with TopologyHarness(Waits, simulated=True, conf=conf, state_dir=tmp_path) as harness:

        def refused() -> bool:
            harness.engine.run(harness.shared.clock())
            return all(task._room_at for task in harness.tasks("write"))

        eventually(refused, 20, "the first try", interval=0.001)
        for _ in range(200):
            harness.clock.secs += 0.5  # type: ignore[union-attr]
            harness.engine.run(harness.shared.clock())
            time.sleep(0.01)
        assert not STORE.rows and not Fifty.committed
        STORE.plan.clear()
        for _ in range(20):
            result = harness.advance(2)
        assert not result.dead_letters and {*STORE.rows} == {*range(100, 150)} - REFUSED
        # Each record fails at most once: then its spout waits.
        assert len(STORE.rows) <= 2 * 50
    assert Fifty.committed == {"p": 50}


class Tracked(ReliableSpout):
    """Emits a failed tuple again at once, three times."""

    outputs = ["key", "n"]
    failures = 0

    def initialize(self, conf: Any, context: Any) -> None:
        self.rest = [*range(100, 150)]

    def next_tuple(self) -> None:
        if self.rest:
            n = self.rest.pop()
            self.emit(["a", n], tup_id=n)

    def fail(self, tup_id: int) -> None:
        self.failures += 1
        super().fail(tup_id)


class WaitsTracked(Topology):
    numbers = Tracked.spec()
    write = Write.spec(inputs=[numbers])
    note = CollectBolt.spec(inputs={write["rejected"]: Grouping.GLOBAL})


def test_an_outage_of_a_sink_is_no_failure_of_a_tuple(tmp_path: Path) -> None:
    global STORE
    STORE = Store(["away"] * 10_000)
    conf = {"topology.message.timeout.secs": 2, "topology.dead.letter.tries": 3}
    with TopologyHarness(WaitsTracked, simulated=True, conf=conf, state_dir=tmp_path) as harness:

        def refused() -> bool:
            harness.engine.run(harness.shared.clock())
            return all(task._room_at for task in harness.tasks("write"))

        eventually(refused, 20, "the first try", interval=0.001)
        for _ in range(200):
            harness.clock.secs += 0.5  # type: ignore[union-attr]
            harness.engine.run(harness.shared.clock())
            time.sleep(0.01)
        assert not STORE.rows
        STORE.plan.clear()
        for _ in range(20):
            result = harness.advance(2)
        assert not result.dead_letters and sorted(STORE.rows) == list(range(100, 150))
        assert harness.tasks("numbers")[0].failures == 0


def test_a_row_that_raises_fails_and_a_row_of_none_is_acked() -> None:
    global STORE
    STORE = Store()
    with TopologyHarness(Odd, {"numbers": [["k", n] for n in range(4)]}, simulated=True) as harness:
        result = harness.advance(4)
    assert (
        sorted(result.acked["numbers"]) == [1, 2, 3]
        and result.failed["numbers"] == [0]
        and STORE.rows == [2, 3]
    )


@pytest.mark.parametrize("topology", [Once, Often])
def test_refused_rows_fail_if_nothing_reads_them(topology: type[Topology]) -> None:
    global STORE
    STORE = Store()
    with TopologyHarness(
        topology, {"numbers": [["k", n] for n in range(40)]}, simulated=True
    ) as harness:
        harness.run()
        # The harness reads all streams. Rows of the first batches came before this.
        for task in harness.tasks("write"):
            task._rejected_is_read = False
        harness.give("numbers", ["k", 33], ["k", 50])
        result = harness.advance(4)
    assert 40 in result.failed["numbers"] and 41 in result.acked["numbers"] and 50 in STORE.rows


class WriteOdd(Write):
    def row_of(self, tup: Any) -> Any:
        n = tup.values.n
        return None if 1 / n == 1 else {"n": n}


class Odd(Topology):
    numbers = InputSpout.spec(outputs=["key", "n"])
    write = WriteOdd.spec(inputs=[numbers])
    note = CollectBolt.spec(inputs={write["rejected"]: Grouping.GLOBAL})


class WriteBoth(Write):
    record_id = ("key", "n")


class Both(Topology):
    numbers = InputSpout.spec(outputs=["key", "n"])
    write = WriteBoth.spec(inputs=[numbers])


class WriteKey(Write):
    record_id = "key"


class ByKey(Topology):
    numbers = InputSpout.spec(outputs=["key", "n"])
    write = WriteKey.spec(inputs=[numbers])


@pytest.mark.parametrize(
    ("topology", "rows", "ids"),
    [
        (
            Both,
            [["a/b", "c"], ["a", "b/c"], ["a", "b%2Fc"], ["", ""]],
            ["a/b/c", "a/b%2Fc", "a/b%252Fc", "/"],
        ),
        (Both, [["topic/x%[0]", 17]], ["topic/x%[0]/17"]),
        (ByKey, [["a/b%", 1], ["", 2]], ["a/b%", ""]),
        (Often, [["a", 1]], [None]),
    ],
)
def test_records_have_different_ids(
    topology: type[Topology], rows: list[Any], ids: list[str | None]
) -> None:
    global STORE
    STORE = Store()
    with TopologyHarness(topology, {"numbers": rows}, simulated=True) as harness:
        assert len(harness.advance(4).acked["numbers"]) == len(rows)
    assert STORE.ids == ids


def test_exactly_once_needs_ids_and_a_sink_with_tokens() -> None:
    with pytest.raises(InvalidTopology, match="set record_id"):
        type("Bad", (SinkBolt,), {"exactly_once": True})
    with pytest.raises(
        InvalidTopology, match="'table': record_id is 'nn', but 'default' of 'numbers' has: key, n"
    ):
        build(type("Wrong", (Write,), {"record_id": "nn"}))
    with pytest.raises(InvalidTopology, match="has no sink: set sink"):
        build(type("Nothing", (SinkBolt,), {}))


def build(bolt: type[SinkBolt]) -> Any:
    builder = TopologyBuilder("t")
    numbers = builder.set_spout("numbers", InputSpout, outputs=["key", "n"])
    builder.set_bolt("table", bolt, inputs=[numbers])
    return builder.build()


# -- the batches in a log --------------------------------------------------------------------------

NAMES = st.dictionaries(
    st.tuples(st.text(max_size=2), st.integers(0, 50)), st.integers(0, 2**40), max_size=6
)
RECORDS = st.lists(
    st.tuples(st.sampled_from(["a/1.0", "a/1.1"]), st.integers(1, 9), NAMES), max_size=6
)


@given(RECORDS, st.integers(1, 4))
def test_batches_are_in_the_log_and_go_where_their_tuples_go(
    records: list[Any], tasks: int
) -> None:
    contents, expected = Contents(), {}
    for owner, token, names in records:
        record = Checkpoint(batches=[(owner, token, [(at, name) for name, at in names.items()])])
        (read,) = read_log(frame(record), "log")
        contents.apply(read)
        expected[owner] = (token, names)
        if not names:
            del expected[owner]
    assert contents.batches == expected
    again = Contents()
    for record in read_log(b"".join(map(frame, contents.snapshot())), "log"):
        again.apply(record)
    assert again.batches == expected
    shared = [
        Partitioning(tasks, True).share(index, [(0, contents)], lambda key, values: None)
        for index in range(tasks)
    ]
    for owner, (token, names) in expected.items():
        parts = [each.batches[owner] for each in shared if owner in each.batches]
        assert {part[0] for part in parts} == {token}
        assert sum(len(part[1]) for part in parts) == len(names)
        assert {name: at for part in parts for name, at in part[1].items()} == names
    for index, each in enumerate(shared):
        assert all(
            at % tasks == index for _, names in each.batches.values() for at in names.values()
        )
