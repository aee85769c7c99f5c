"""The Kafka sink: on librdkafka's mock cluster, and with transactions on the broker that KAFKA_BOOTSTRAP names.

The mock neither fences producers nor keeps the offsets of a transaction.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from storm_dagster.connectors import FileSink, KafkaSink, PostgresSink, Rejected, Row
from storm_dagster.model.errors import MissingPart, Unavailable
from storm_rigs.sink_rig import SinkRig
from storm_rigs.worker_rig import free_port

REAL = os.environ.get("KAFKA_BOOTSTRAP", "")
real = pytest.mark.skipif(not REAL, reason="KAFKA_BOOTSTRAP names no broker")


@contextmanager
def mock_cluster() -> Iterator[str]:
    holder = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "none", "log_level": 0})
    yield ",".join(f"{each.host}:{each.port}" for each in holder.list_topics(timeout=10).brokers.values())


@pytest.fixture(scope="module")
def mock() -> Iterator[str]:
    with mock_cluster() as bootstrap:
        yield bootstrap


@pytest.fixture
def topic() -> Iterator[str]:
    """A topic of three partitions on the real broker; the mock makes its topics itself."""
    name = f"sink-{secrets.token_hex(4)}"
    admin = AdminClient({"bootstrap.servers": REAL}) if REAL else None
    if admin is not None:
        admin.create_topics([NewTopic(name, 3, 1)])[name].result(30)
    yield name
    if admin is not None:
        admin.delete_topics([name])[name].result(30)


def messages(bootstrap: str, topic: str) -> list[tuple[bytes | None, Any]]:
    """(key, decoded value) of all committed messages."""
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": "reader", "enable.partition.eof": True})
    try:
        parts = reader.list_topics(topic, timeout=10).topics[topic].partitions
        reader.assign([TopicPartition(topic, part, 0) for part in parts])
        found, ended = [], 0
        while ended < len(parts):
            for message in reader.consume(10_000, 0.2):
                if message.error():
                    ended += 1
                else:
                    found.append((message.key(), json.loads(message.value() or b"null")))
        return found
    finally:
        reader.close()


@pytest.mark.parametrize("broker", ["mock", pytest.param("real", marks=real)])
def test_rows_become_messages(broker: str, request: pytest.FixtureRequest, topic: str) -> None:
    bootstrap = REAL if broker == "real" else request.getfixturevalue("mock")
    conf = {"kafka.bootstrap.servers": bootstrap, "kafka.message.max.bytes": 20_000}
    sink = KafkaSink(topic, key="n")
    assert sink.open(conf, "") is None
    sink.write([Row({"n": n}) for n in range(500)], 1)
    rows = [Row({"n": 1}), Row({"n": 2, "text": "x" * 20_000}), Row({"m": 3}), Row({"n": object()})]
    with pytest.raises(Rejected) as refused:
        sink.write(rows, 2)
    assert sorted(refused.value.rows) == [1, 2, 3] and "kafka.message.max.bytes" in refused.value.rows[1]
    sink.close()
    assert sorted(value["n"] for _, value in messages(bootstrap, topic)) == list(range(500))
    assert (b"7", {"n": 7}) in messages(bootstrap, topic)


def test_a_batch_is_larger_than_the_queue_of_the_client(mock: str, topic: str) -> None:
    sink = KafkaSink(topic)
    sink.open({"kafka.bootstrap.servers": mock, "kafka.queue.buffering.max.messages": 100}, "")
    sink.write([Row({"n": n}) for n in range(2000)], 1)
    sink.close()
    assert sorted(value["n"] for _, value in messages(mock, topic)) == list(range(2000))


def test_a_broker_that_is_away_is_an_error_and_nothing_waits_for_it_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storm_dagster.connectors.kafka_sink._SECS", 0.3)
    conf = {"kafka.bootstrap.servers": f"127.0.0.1:{free_port()}", "kafka.log_level": 0}
    for owner in ("", "me"):
        sink = KafkaSink("t")
        with pytest.raises((KafkaException, Unavailable)):
            sink.open(conf, owner)
            sink.write([Row({"n": 1})], 1)
        sink.close()


SMALL = {"kafka.queue.buffering.max.messages": 10}


def test_messages_that_no_broker_takes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with mock_cluster() as bootstrap:
        sink = KafkaSink("t")
        sink.open({"kafka.bootstrap.servers": bootstrap, "kafka.log_level": 0}, "")
    monkeypatch.setattr("storm_dagster.connectors.kafka_sink._SECS", 0.3)
    with pytest.raises(Unavailable, match="1 messages wait"):
        sink.write([Row({"n": 1})], 1)
    sink.close()
    sink.open({"kafka.bootstrap.servers": bootstrap, "kafka.log_level": 0, **SMALL}, "")
    with pytest.raises(BufferError, match="Queue full"):
        sink.write([Row({"n": n}) for n in range(20)], 1)
    sink.close()


@pytest.mark.parametrize(
    ("library", "sink"),
    [("confluent_kafka", KafkaSink("t")), ("psycopg", PostgresSink("t")), ("s3fs", FileSink("s3://bucket/folder"))],
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    library: str, sink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    # What fsspec has imported for another test it does not import again.
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    extra = {"confluent_kafka": "kafka", "psycopg": "postgres", "s3fs": "s3"}[library]
    with pytest.raises(MissingPart, match=rf"pip install storm-dagster\[{extra}\]"):
        sink.open({}, "")
    sink.close()


@real
def test_a_batch_is_a_transaction_and_an_earlier_producer_writes_nothing(topic: str) -> None:
    conf, owner = {"kafka.bootstrap.servers": REAL, "kafka.log_level": 0}, f"wc/table/{topic}"
    first, second = KafkaSink(topic), KafkaSink(topic)
    assert first.open(conf, owner) == 0
    first.write([Row({"n": n}) for n in range(10)], 1)
    # Begun, and overtaken before it is committed.
    producer, group = first._producer, first._group
    assert producer is not None and group is not None
    producer.begin_transaction()
    producer.produce(topic, b'{"n": "never"}')
    producer.flush()
    assert second.open(conf, owner) == 1
    with pytest.raises(KafkaException):
        producer.send_offsets_to_transaction([TopicPartition(topic, 0, 2)], group.consumer_group_metadata(), 10)
        producer.commit_transaction(10)
    first.close()
    second.write([Row({"n": n}) for n in range(10, 20)], 2)
    second.close()
    assert first.open(conf, owner) == 2
    first.close()
    assert sorted(value["n"] for _, value in messages(REAL, topic)) == list(range(20))


@real
@pytest.mark.zookeeper
@pytest.mark.parametrize(
    ("total", "kills"), [(20_000, 3), pytest.param(1_000_000, 20, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_messages_of_killed_workers_are_committed_once(
    total: int,
    kills: int,
    make_sink_rig: Callable[[int, dict[str, Any], str], SinkRig],
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RIG_TOPIC", topic)
    reader = Consumer({"bootstrap.servers": REAL, "group.id": "watermarks"})

    def written() -> int:
        """At most: markers of transactions count, too."""
        return sum(reader.get_watermark_offsets(TopicPartition(topic, part), 10)[1] for part in range(3))

    make_sink_rig(total, {"kafka.bootstrap.servers": REAL}, "InTopic").run(written, kills)
    reader.close()
    assert sorted(value["n"] for _, value in messages(REAL, topic)) == list(range(total))
