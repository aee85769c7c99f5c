"""The endpoint that takes Spark's micro-batches: acks end to end, replays, unknown clients,
closing.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any

import pyarrow as pa
import pytest

from storm_dagster.api.spark import bridge as spark_bridge
from storm_dagster.api.spark.bridge import BatchEndpoint, make_deliver
from storm_dagster.testing.waiting import eventually


class Frame:
    """The two calls that the shipped function makes on a DataFrame, over a table."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def select(self, *columns: str) -> Frame:
        return Frame(self.table.select(list(columns)))

    def toArrow(self) -> pa.Table:
        return self.table


class Delivery:
    """One call of the shipped function on a thread, as Spark makes it beside its server."""

    def __init__(
        self, endpoint: BatchEndpoint, table: pa.Table, batch_id: int = 0, chunk_rows: int = 3
    ) -> None:
        self.error: BaseException | None = None
        deliver = make_deliver(
            endpoint.host, endpoint.port, endpoint.secret, tuple(table.column_names), chunk_rows
        )

        def run() -> None:
            try:
                deliver(Frame(table), batch_id)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    @property
    def returned(self) -> bool:
        return not self.thread.is_alive()


@pytest.fixture
def endpoint() -> Iterator[BatchEndpoint]:
    endpoint = BatchEndpoint("127.0.0.1")
    yield endpoint
    endpoint.close()


def take(endpoint: BatchEndpoint) -> tuple[str, list[Any]]:
    found: list[tuple[str, list[Any]]] = []

    def one() -> bool:
        row = endpoint.take()
        if row is not None:
            found.append((row[0], row[2]))
        return bool(found)

    eventually(one, timeout=60, what="a row")
    return found[0]


WORDS = pa.table({"word": [f"w{n}" for n in range(8)], "n": list(range(8))})


def test_spark_is_told_only_after_the_last_row_is_acked(endpoint: BatchEndpoint) -> None:
    delivery = Delivery(endpoint, WORDS)
    rows = [take(endpoint) for _ in range(8)]
    assert [values for _, values in rows] == [[f"w{n}", n] for n in range(8)]
    for row_id, _ in rows[:-1]:
        endpoint.ack(row_id)
    assert endpoint.batches_done == 0
    assert not delivery.returned
    endpoint.ack(rows[-1][0])
    eventually(lambda: delivery.returned, timeout=60, what="the batch")
    assert delivery.error is None
    assert endpoint.batches_done == 1


def test_a_failed_row_is_dealt_again(endpoint: BatchEndpoint) -> None:
    delivery = Delivery(endpoint, WORDS.slice(0, 2))
    first, second = take(endpoint), take(endpoint)
    endpoint.ack(first[0])
    endpoint.fail(second[0])
    again = take(endpoint)
    assert again == second
    endpoint.ack(again[0])
    eventually(lambda: delivery.returned, timeout=60, what="the batch")
    assert delivery.error is None


def test_an_empty_batch_is_done_at_once(endpoint: BatchEndpoint) -> None:
    delivery = Delivery(endpoint, WORDS.slice(0, 0))
    eventually(lambda: delivery.returned, timeout=60, what="the batch")
    assert delivery.error is None


def test_rows_are_asked_for_chunk_by_chunk(endpoint: BatchEndpoint) -> None:
    Delivery(endpoint, WORDS, chunk_rows=3)
    for _ in range(2):
        take(endpoint)
    batch = endpoint._batch
    assert batch is not None
    assert batch.count == 3, "the second chunk must not come before the first is dealt"


def test_closing_makes_spark_repeat_the_batch() -> None:
    endpoint = BatchEndpoint("127.0.0.1")
    delivery = Delivery(endpoint, WORDS)
    take(endpoint)
    endpoint.close()
    eventually(lambda: delivery.returned, timeout=60, what="the function's return")
    assert delivery.error is not None


def test_a_newer_run_replaces_an_open_batch(endpoint: BatchEndpoint) -> None:
    old = Delivery(endpoint, WORDS)
    stale = take(endpoint)
    new = Delivery(endpoint, WORDS.slice(0, 1), batch_id=0)
    eventually(lambda: old.returned, timeout=60, what="the old run's end")
    assert old.error is not None
    fresh = take(endpoint)
    while fresh[0].split(":")[0] == stale[0].split(":")[0]:
        fresh = take(endpoint)
    endpoint.ack(stale[0])
    assert not new.returned
    endpoint.ack(fresh[0])
    eventually(lambda: new.returned, timeout=60, what="the new run's end")
    assert new.error is None


def test_a_client_without_the_secret_is_refused_and_harms_nobody(endpoint: BatchEndpoint) -> None:
    with pytest.raises((AuthenticationError, OSError, EOFError)):
        Client((endpoint.host, endpoint.port), authkey=b"guess").close()
    silent = socket.create_connection((endpoint.host, endpoint.port))
    with socket.create_connection((endpoint.host, endpoint.port)) as garbage:
        garbage.sendall(b"\xff" * 64)
    delivery = Delivery(endpoint, WORDS.slice(0, 1))
    row_id, _ = take(endpoint)
    endpoint.ack(row_id)
    eventually(lambda: delivery.returned, timeout=60, what="the batch")
    assert delivery.error is None
    silent.close()


def test_a_batch_is_done_when_all_of_its_tasks_have_acked(
    endpoint: BatchEndpoint,
) -> None:
    other = BatchEndpoint("127.0.0.1")
    other.secret = endpoint.secret
    endpoint.others = lambda: [(other.host, other.port)]
    try:
        delivery = Delivery(endpoint, WORDS, chunk_rows=100)
        dealt: dict[BatchEndpoint, list[tuple[str, list[Any]]]] = {
            one: [take(one) for _ in range(4)] for one in (endpoint, other)
        }
        found = [values for rows in dealt.values() for _, values in rows]
        assert sorted(found) == WORDS.to_pandas().values.tolist(), (
            "each row is dealt once, half of them to each"
        )
        for row_id, _ in dealt[endpoint]:
            endpoint.ack(row_id)
        assert not delivery.returned, "the other task's rows are not acked yet"
        other.fail(dealt[other][0][0])
        assert take(other) == dealt[other][0]
        for row_id, _ in dealt[other]:
            other.ack(row_id)
        eventually(lambda: delivery.returned, timeout=60, what="the batch")
        assert delivery.error is None
        assert (endpoint.batches_done, other.batches_done) == (1, 1)
    finally:
        other.close()


def test_a_closed_task_and_a_wrong_secret_get_no_rows(
    endpoint: BatchEndpoint,
) -> None:
    gone, ignorant = BatchEndpoint("127.0.0.1"), BatchEndpoint("127.0.0.1")
    gone.close()
    endpoint.others = lambda: [(gone.host, gone.port), (ignorant.host, ignorant.port)]
    try:
        delivery = Delivery(endpoint, WORDS, chunk_rows=100)
        for _ in range(8):
            endpoint.ack(take(endpoint)[0])
        eventually(lambda: delivery.returned, timeout=60, what="the batch")
        assert delivery.error is None
        assert ignorant.take() is None
    finally:
        ignorant.close()


def test_a_batch_is_repeated_when_one_of_its_tasks_goes_away(endpoint: BatchEndpoint) -> None:
    other = BatchEndpoint("127.0.0.1")
    other.secret = endpoint.secret
    endpoint.others = lambda: [(other.host, other.port)]
    delivery = Delivery(endpoint, WORDS)
    take(endpoint)
    take(other)
    other.close()
    eventually(lambda: delivery.returned, timeout=60, what="the function's return")
    assert delivery.error is not None, "Spark must not commit"


def test_untrusted_clients_keep_no_batch_out(
    endpoint: BatchEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent connections are few and short; Spark's own is served."""
    monkeypatch.setattr(spark_bridge, "_PROOF_SECS", 1.0)
    silent = [
        socket.create_connection((endpoint.host, endpoint.port), timeout=20) for _ in range(60)
    ]
    try:
        eventually(
            lambda: len(endpoint._unknown) <= 16,
            timeout=60,
            what="sixteen unknown connections at most",
        )
        batch = Delivery(endpoint, WORDS)
        for _ in range(8):
            endpoint.ack(take(endpoint)[0])
        eventually(lambda: batch.returned, timeout=60, what="the acked batch")
        assert batch.error is None
        eventually(
            lambda: not endpoint._unknown, timeout=60, what="the end of the last unknown connection"
        )
        # Single bytes of an answer do not prolong it.
        dripping = socket.create_connection((endpoint.host, endpoint.port), timeout=20)
        silent.append(dripping)

        def ended() -> bool:
            try:
                dripping.send(b"\0")
            except OSError:
                return True
            return False

        eventually(ended, timeout=60, what="the end of one that sends slowly")
    finally:
        for each in silent:
            each.close()


def test_a_batch_whose_place_others_take_comes_again(
    endpoint: BatchEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that connect all the time drop Spark's connection before it has authenticated."""
    shut_down = endpoint._shut_down
    dropped: list[Connection] = []

    def drop(connection: Connection) -> None:
        dropped.append(connection)
        if len(dropped) == 3:
            monkeypatch.undo()
        shut_down(connection)

    monkeypatch.setattr(endpoint, "_shut_down", drop)
    monkeypatch.setattr(spark_bridge, "_MAX_UNKNOWN", 0)
    batch = Delivery(endpoint, WORDS)
    for _ in range(8):
        endpoint.ack(take(endpoint)[0])
    eventually(lambda: batch.returned, timeout=20, what="the acked batch")
    assert batch.error is None and len(dropped) == 3
