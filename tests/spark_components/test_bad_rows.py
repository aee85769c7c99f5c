"""Rows that break a SparkBolt's function are found and fail alone; chunks of Spark are divided by
their bytes.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import psutil
import pyarrow as pa
import pytest

from storm_dagster.api import SparkBolt, TopologyBuilder, Tuple
from storm_dagster.api.context import TopologyContext
from storm_dagster.api.spark import bolt as spark_bolt
from storm_dagster.api.spark.bridge import BatchEndpoint, make_deliver
from storm_dagster.api.spark.session import drop_worker_session
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.names import AWAITED_METRIC
from storm_dagster.model.wire import MAX_FRAME_BYTES
from storm_dagster.testing.waiting import eventually

CALLS: list[tuple[int, str]] = []
"""Rows and batch id of each call of a function of this module."""


class Recorder:
    """Keeps what a bolt does."""

    def __init__(self) -> None:
        self.emitted: list[list[Any]] = []
        self.acked: list[Tuple] = []
        self.failed: list[Tuple] = []
        self.reasons: list[Any] = []
        self.errors: list[BaseException] = []
        self.metrics: dict[str, Any] = {}

    def emit(self, tup: Any, *_: Any) -> None:
        if "refused" in tup:
            raise InvalidRequest("refused")
        self.emitted.append(list(tup))

    def ack_all(self, tups: Any) -> None:
        self.acked += tups

    def fail(self, tup: Tuple, reason: Any = None) -> None:
        self.failed.append(tup)
        self.reasons.append(reason)

    def error(self, error: BaseException, tup: Any = None) -> None:
        self.errors.append(error)

    def metric(self, name: str, value: Any) -> None:
        self.metrics[name] = value

    def awaits(self, source: str, text: str) -> None:
        self.metrics[AWAITED_METRIC] = text

    def joint(self, tups: Any) -> Tuple:
        return Tuple(0, "", "", 0, ())


def parsed(frame: Any, *, context: Any) -> Any:
    """Raises in Spark with a row whose text is no number."""
    from pyspark.sql import functions as f

    CALLS.append((frame.count(), context.batch_id))
    return frame.select(f.col("text").cast("int").alias("n"))


def broken(frame: Any) -> Any:
    CALLS.append((frame.count(), ""))
    raise RuntimeError("the database is down")


def refused(frame: Any) -> Any:
    """Raises for a row as a client of another service does that is down."""
    CALLS.append((frame.count(), ""))
    if "refused" in [row[0] for row in frame.collect()]:
        raise ConnectionRefusedError(111, "Connection refused")


def checked(frame: Any) -> Any:
    """Raises in a Python worker of Spark, as a function of the user does there."""
    from pyspark.sql import functions as f

    def check(text: str) -> str:
        if text.startswith("-"):
            raise ValueError(f"negative value {text}")
        return text

    return frame.select(f.udf(check)("text").alias("text"))


def loses_its_session(frame: Any, *, context: Any) -> Any:
    """Fails as if the batch brought Spark down: each time its session is gone."""
    CALLS.append((0, context.batch_id))
    frame.sparkSession.client.release_session()
    return frame


LOST_AT: list[int] = []
"""Numbers of the calls at which Spark is lost."""


def _lose_spark(frame: Any) -> None:
    """Release the session, if it is time for that."""
    CALLS.append((frame.count(), ""))
    if len(CALLS) in LOST_AT:
        frame.sparkSession.client.release_session()


def lost_while_searched(frame: Any) -> Any:
    """Raises for rows that are no numbers; Spark is lost in a later call."""
    _lose_spark(frame)
    return frame.selectExpr("CAST(text AS INT) AS n")


def lost_in_secret(frame: Any) -> None:
    """As :func:`lost_while_searched`, but each error is one of the function's own."""
    try:
        _lose_spark(frame)
        frame.selectExpr("CAST(text AS INT) AS n").collect()
    except Exception:
        raise RuntimeError("cannot store the batch") from None


def mistaken(frame: Any) -> None:
    """Raises for a row by a mistake in its own code."""
    CALLS.append((frame.count(), ""))
    for row in frame.collect():
        if row[0] == "bad":
            row.no_such_column  # noqa: B018


def exits(frame: Any) -> Any:
    raise SystemExit(3)


def typed(frame: Any) -> Any:
    return frame.selectExpr("price * 2 AS price", "day", "named_struct('day', day) AS both")


def same(frame: Any) -> Any:
    return frame


@pytest.fixture
def bolt_of(spark_remote: str) -> Iterator[Callable[..., Any]]:
    # A busy machine must not reach the limit of the time for dividing.
    conf = {"spark.remote": spark_remote, "topology.message.timeout.secs": 1200}
    CALLS.clear()

    def make(function: str, outputs: list[str], **args: Any) -> Any:
        builder = TopologyBuilder("rows")
        builder.set_spout("lines", "rows:Lines", outputs=["text"])
        builder.set_spout("people", "rows:People", outputs=["name", "city"])
        builder.set_spout("places", "rows:Places", outputs=["city", "name"])
        builder.set_bolt(
            "parse", SparkBolt, inputs="lines", args={"function": "x:y"}, outputs=outputs
        )
        bolt: Any = SparkBolt(**{"function": f"{__name__}:{function}", **args})
        bolt._collector = Recorder()
        bolt.context = TopologyContext(
            topology_id="rows-1-1",
            spec=builder.build(),
            tasks={1: "lines", 2: "parse"},
            task_id=2,
            component="parse",
            conf=conf,
        )
        bolt.initialize(conf, bolt.context)
        return bolt

    yield make
    drop_worker_session(conf)


def run(bolt: Any, texts: list[Any]) -> list[Tuple]:
    tuples = [Tuple(n, "lines", "default", 1, [text]) for n, text in enumerate(texts)]
    for tup in tuples:
        bolt.process(tup)
    return tuples


pytestmark = pytest.mark.timeout(240)


@pytest.mark.spark
@pytest.mark.parametrize(
    "at",
    [(0,), *(pytest.param(at, marks=pytest.mark.long) for at in ((9,), (4, 5), (0, 1, 2)))],
    ids=str,
)
def test_only_the_rows_that_break_the_function_fail(
    bolt_of: Callable[..., Any], at: tuple[int, ...]
) -> None:
    bolt = bolt_of("parsed", ["n"], schema="text string", batch_tuples=10)
    tuples = run(bolt, [f"bad {n}" if n in at else str(n) for n in range(10)])
    done = bolt._collector
    assert done.failed == [tuples[n] for n in at]
    assert sorted(done.acked, key=lambda tup: tup.values) == [
        tup for n, tup in enumerate(tuples) if n not in at
    ]
    assert sorted(done.emitted) == [[n] for n in range(10) if n not in at], (
        "each row is emitted once"
    )
    assert [str(error).split(" alone")[0] for error in done.errors] == [
        f"component 'parse', task 2: {__name__}:parsed fails with the row {{'text': 'bad {n}'}}"
        for n in at
    ]
    assert done.reasons == done.errors, "what a dead letter would name"
    assert done.metrics["bad_rows"] == len(at)
    assert done.metrics["batch_tuples"] == 10 - len(at)


@pytest.mark.spark
def test_a_bad_row_alone_is_named(bolt_of: Callable[..., Any]) -> None:
    bolt = bolt_of("parsed", ["n"], schema="text string", batch_tuples=1)
    assert run(bolt, ["no number"]) == bolt._collector.failed
    assert "fails with the row {'text': 'no number'} alone" in str(bolt._collector.errors[0])


@pytest.mark.spark
def test_the_error_of_a_bad_row_names_the_raising_line(
    bolt_of: Callable[..., Any],
) -> None:
    bolt = bolt_of("checked", ["text"], schema="text string", batch_tuples=4)
    tuples = run(bolt, ["1", "2", "-3", "4"])
    done = bolt._collector
    assert done.failed == [tuples[2]]
    assert str(done.errors[0]).endswith("(PythonException: ValueError: negative value -3)")
    assert done.reasons == done.errors
    # If no row succeeds, the batch fails for what the function raised.
    bolt = bolt_of("checked", ["text"], schema="text string", batch_tuples=4)
    assert run(bolt, ["-1", "-2", "-3", "-4"]) == bolt._collector.failed
    (reason,) = {str(reason) for reason in bolt._collector.reasons}
    # Spark names one of the rows.
    assert reason.rstrip("1234") == "PythonException: ValueError: negative value -"


@pytest.mark.spark
def test_a_mistake_in_the_function_is_an_error_with_file_and_line(
    bolt_of: Callable[..., Any],
) -> None:
    bolt = bolt_of("mistaken", [], schema="text string", batch_tuples=4)
    for texts in (["1", "bad", "3", "4"], ["bad", "bad", "bad", "bad"]):
        run(bolt, texts)
    done = bolt._collector
    assert len(done.failed) == 5 and len(done.acked) == 3
    assert len(done.errors) == 2
    for error in done.errors:
        report = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        assert f'File "{__file__}", line ' in report and "row.no_such_column" in report
    assert not done.metrics.get(AWAITED_METRIC), "it is no outage"


@pytest.mark.spark
def test_a_batch_that_loses_spark_is_kept_and_fails_only_later(
    bolt_of: Callable[..., Any],
) -> None:
    bolt = bolt_of("loses_its_session", ["text"], schema="text string", batch_tuples=3)
    tuples = run(bolt, ["1", "2", "3"])
    done = bolt._collector
    assert bolt._waiting == tuples and bolt._is_full and not done.failed
    assert "3 tuples wait since 20" in str(done.errors[0]) and "Spark at sc://" in str(
        done.errors[0]
    )
    # A tuple that comes while the task ends starts no batch.
    bolt.process(Tuple(9, "lines", "default", 1, ["4"]))
    assert len(CALLS) == 1 and bolt._waiting.pop().values == ["4"]

    def failed() -> bool:
        bolt.process_tick(None)
        return bool(done.failed)

    eventually(failed, 120, "the batch fails", interval=0.05)
    assert done.failed == tuples and not bolt._is_full and not bolt._waiting
    assert len(CALLS) == spark_bolt._MAX_LOSSES and len({batch_id for _, batch_id in CALLS}) == 1
    assert "Spark answers again" in str(done.errors[1])
    assert len(done.errors) == 3, "begin and end are reported, and that the batch fails"


@pytest.mark.spark
@pytest.mark.parametrize(
    ("function", "outputs", "lost_at"),
    [
        ("lost_while_searched", ["n"], 2),
        pytest.param("lost_while_searched", ["n"], 3, marks=pytest.mark.long),
        pytest.param("lost_in_secret", [], 2, marks=pytest.mark.long),
        ("lost_in_secret", [], 3),
    ],
)
def test_spark_that_is_lost_while_bad_rows_are_searched_fails_no_healthy_row(
    bolt_of: Callable[..., Any], function: str, outputs: list[str], lost_at: int
) -> None:
    LOST_AT[:] = [lost_at]
    bolt = bolt_of(function, outputs, schema="text string", batch_tuples=6)
    tuples = run(bolt, ["0", "1", "2", "bad", "4", "5"])
    done = bolt._collector
    assert not done.failed and bolt._is_full, "the batch waits"
    assert not {id(tup) for tup in bolt._waiting} & {id(tup) for tup in done.acked}
    assert done.metrics[AWAITED_METRIC].startswith("waits for Spark since 20")

    def finished() -> bool:
        bolt.process_tick(None)
        return not bolt._is_full

    eventually(finished, 120, "the batch is processed", interval=0.05)
    assert done.failed == [tuples[3]], "the bad row alone"
    assert sorted(tup.values[0] for tup in done.acked) == ["0", "1", "2", "4", "5"]
    if outputs:
        assert sorted(done.emitted) == [[0], [1], [2], [4], [5]], "each row is emitted once"
    texts = [str(error) for error in done.errors]
    assert ["Spark answers again" in text for text in texts] == [False, True, False]


@pytest.mark.spark
@pytest.mark.parametrize(
    ("function", "outputs", "text"),
    [("parsed", ["n"], "UNAVAILABLE"), ("refused", [], "refused")],
    ids=["row", "error"],
)
def test_a_row_that_imitates_a_lost_spark_fails_alone(
    bolt_of: Callable[..., Any], function: str, outputs: list[str], text: str
) -> None:
    bolt = bolt_of(function, outputs, schema="text string", batch_tuples=5)
    run(bolt, list("01234"))
    session = bolt._session
    tuples = run(bolt, ["0", "1", text, "3", "4"])
    assert bolt._collector.failed == [tuples[2]]
    assert len(bolt._collector.acked) == 9
    assert f"fails with the row {{'text': '{text}'}} alone" in str(bolt._collector.errors[0])
    run(bolt, list("01234"))
    assert bolt._session is session


@pytest.mark.spark
def test_a_function_that_fails_with_any_rows_is_not_called_for_each(
    bolt_of: Callable[..., Any],
) -> None:
    bolt = bolt_of("broken", [], schema="text string", batch_tuples=64)
    assert run(bolt, [str(n) for n in range(64)]) == bolt._collector.failed
    assert [str(error) for error in bolt._collector.errors] == ["the database is down"]
    assert [rows for rows, _ in CALLS] == [64, 32, 16, 8, 4, 2, 1, 1, 1]
    assert bolt._collector.metrics["bad_rows"] == 0


@pytest.mark.spark
def test_a_batch_whose_function_exits_is_gathered_until_the_task_restarts(
    bolt_of: Callable[..., Any],
) -> None:
    bolt = bolt_of("exits", [], schema="text string", batch_tuples=4)
    bolt.process(Tuple(9, "lines", "default", 1, ["first"]))
    with pytest.raises(SystemExit):
        run(bolt, ["1", "2", "3"])
    # What a runner fails when it closes the component.
    assert [tup.values for tup in bolt._waiting] == [["first"], ["1"], ["2"], ["3"]]


@pytest.mark.spark
def test_dividing_a_batch_ends_before_its_tuples_time_out(bolt_of: Callable[..., Any]) -> None:
    bolt = bolt_of("parsed", ["n"], schema="text string", batch_tuples=8)
    bolt._max_secs = 0.0
    assert run(bolt, ["bad"] + ["1"] * 7) == bolt._collector.failed
    assert [rows for rows, _ in CALLS] == [8]


@pytest.mark.spark
def test_a_value_of_another_type_does_not_stop_the_batch(bolt_of: Callable[..., Any]) -> None:
    bolt = bolt_of("same", ["n"], schema="n int", batch_tuples=8)
    tuples = run(bolt, [1, 2, 3, "four", 5, 6, 7, 8])
    assert bolt._collector.failed == [tuples[3]]
    assert "{'n': 'four'}" in str(bolt._collector.errors[0])
    assert sorted(bolt._collector.emitted) == [[n] for n in (1, 2, 3, 5, 6, 7, 8)]


CHANGED: list[tuple[str, Any, Any, str]] = [
    ("v date", date(2026, 1, 1), datetime(2026, 1, 1, 12), "the column is date32"),
    ("v struct<a: bigint>", {"a": 1}, {"a": 1, "b": 2}, "the schema has no key 'b'"),
    ("v decimal(5,2)", Decimal("1.25"), 1.255, "would change 1.255"),
    ("v map<string, bigint>", {"a": 1}, {1: 1}, "the column is string"),
    ("v bigint", 7, timedelta(1), "the value is of type datetime.timedelta"),
]


@pytest.mark.spark
@pytest.mark.parametrize(("schema", "value", "changed", "reason"), CHANGED)
def test_a_value_that_the_schema_would_change_fails_alone(
    bolt_of: Callable[..., Any], schema: str, value: Any, changed: Any, reason: str
) -> None:
    bolt = bolt_of("same", ["v"], schema=schema, batch_tuples=4)
    tuples = run(bolt, [value, changed, value, value])
    assert bolt._collector.failed == [tuples[1]]
    assert reason in str(bolt._collector.reasons[0])
    # A map of Spark comes back as its entries.
    returned = list(value.items()) if "map<" in schema else value
    assert bolt._collector.emitted == [[returned]] * 3


@pytest.mark.spark
def test_streams_with_other_fields_are_refused_without_a_schema(
    bolt_of: Callable[..., Any],
) -> None:
    bolt = bolt_of("same", ["city"], batch_tuples=2)
    people, places = (
        [
            Tuple(n, name, "default", 1, [*values])
            for n, values in enumerate((["Ann", "Rome"], ["Bob", "Oslo"]))
        ]
        for name in ("people", "places")
    )
    for tup in (people[0], places[0], *people):
        bolt.process(tup)
    done = bolt._collector
    assert (done.failed, done.acked) == ([people[0], places[0]], people)
    assert done.emitted == [["Rome"], ["Oslo"]], "what is of one stream has its names"
    assert [str(error) for error in done.errors] == [
        f"component 'parse', task 2: {__name__}:same reads the fields ['name', 'city'] and "
        "['city', 'name']: name its columns in schema"
    ]
    bolt = bolt_of("same", ["city"], batch_tuples=2, schema="name string, city string")
    bolt.process(people[0])
    bolt.process(places[1])
    assert bolt._collector.emitted == [["Rome"], ["Oslo"]]


@pytest.mark.spark
def test_values_arrive_as_the_types_of_spark(bolt_of: Callable[..., Any]) -> None:
    day = date(2026, 11, 22)
    bolt = bolt_of(
        "typed", ["price", "day", "both"], schema="price decimal(5,2), day date", batch_tuples=1
    )
    bolt.process(Tuple(1, "lines", "default", 1, [Decimal("1.50"), day]))
    assert bolt._collector.emitted == [[Decimal("3.00"), day, {"day": day}]]
    assert type(bolt._collector.emitted[0][0]) is Decimal


@pytest.mark.spark
def test_rows_of_a_result_are_not_emitted_twice(bolt_of: Callable[..., Any]) -> None:
    bolt = bolt_of("same", ["text"], schema="text string", batch_tuples=4)
    assert run(bolt, ["a", "b", "refused", "c"]) == bolt._collector.failed
    assert bolt._collector.emitted == [["a"], ["b"]]


@pytest.mark.spark
def test_equal_rows_have_an_equal_batch_id(bolt_of: Callable[..., Any]) -> None:
    ids = []
    for texts in (["1", "2"], ["1", "2"], ["2", "1"]):
        # Each bolt is new, as after a restart.
        run(bolt_of("parsed", ["n"], schema="text string", batch_tuples=2), texts)
        ids.append(CALLS[-1][1])
    assert ids[0] == ids[1] != ids[2]
    assert all(len(batch_id) == 32 for batch_id in ids)


class Frame:
    """The two calls that the shipped function makes on a DataFrame, over a table."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def select(self, *columns: str) -> Frame:
        return self

    def toArrow(self) -> pa.Table:
        return self.table


@pytest.fixture
def endpoint() -> Iterator[BatchEndpoint]:
    endpoint = BatchEndpoint("127.0.0.1")
    yield endpoint
    endpoint.close()


def test_chunks_are_divided_by_bytes(
    endpoint: BatchEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    add_rows = endpoint._add_rows
    monkeypatch.setattr(
        endpoint, "_add_rows", lambda batch, raw: (sizes.append(len(raw)), add_rows(batch, raw))
    )
    # One row is above the limit by itself, and goes alone.
    table = pa.table({"text": [str(n) * (40_000 if n == 5 else 2_000) for n in range(9)]})
    deliver = make_deliver(
        endpoint.host, endpoint.port, endpoint.secret, ("text",), 5_000, chunk_bytes=8_000
    )
    thread = threading.Thread(target=deliver, args=(Frame(table), 0), daemon=True)
    thread.start()
    rows: list[list[Any]] = []

    def all_taken() -> bool:
        row = endpoint.take()
        if row is not None:
            rows.append(row[2])
            endpoint.ack(row[0])
        return len(rows) == 9

    eventually(all_taken, timeout=20, what="the rows")
    eventually(lambda: not thread.is_alive(), timeout=20, what="the batch")
    assert rows == [[text] for text in table["text"].to_pylist()]
    assert [size > 9_000 for size in sizes].count(True) == 1
    assert endpoint.batches_done == 1


def test_a_chunk_does_not_wait_for_the_acknowledgement_of_its_header(
    endpoint: BatchEndpoint,
) -> None:
    """A large one goes in two parts, of which the kernel may keep the second back for 40 ms."""
    deliver = make_deliver(endpoint.host, endpoint.port, endpoint.secret, ("text",), 5_000)
    table = pa.table({"text": ["a" * 30_000]})
    thread = threading.Thread(target=deliver, args=(Frame(table), 0), daemon=True)
    thread.start()
    row = eventually(endpoint.take, timeout=20, what="the row")
    links = [
        one
        for one in psutil.Process().net_connections()
        if one.raddr and one.raddr.port == endpoint.port
    ]
    assert links, "the batch is open until the row is acked"
    for link in links:
        with socket.socket(fileno=os.dup(link.fd)) as sender:
            assert sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    endpoint.ack(row[0])
    eventually(lambda: not thread.is_alive(), timeout=20, what="the batch")


def test_a_row_that_no_worker_takes_is_an_error_with_the_remedy(endpoint: BatchEndpoint) -> None:
    # As a tuple it would fit into no frame between workers.
    table = pa.table({"text": ["b" * MAX_FRAME_BYTES]})
    deliver = make_deliver(endpoint.host, endpoint.port, endpoint.secret, ("text",), 5_000)
    patience = threading.Timer(20, endpoint.close)
    patience.start()
    with pytest.raises(
        ValueError,
        match=r"micro-batch 7 has 67,\d+,\d+ bytes, a worker takes 62,914,560: filter it",
    ):
        deliver(Frame(table), 7)
    patience.cancel()
