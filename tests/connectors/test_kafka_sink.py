"""The Kafka sink: on librdkafka's mock cluster, and with transactions on the broker that
KAFKA_BOOTSTRAP names.

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

from storm_dagster.api import Grouping, Topology
from storm_dagster.connectors import (
    FileSink,
    KafkaSink,
    KafkaSource,
    PostgresSink,
    Rejected,
    Row,
    SinkBolt,
    SourceRecord,
    SourceSpout,
)
from storm_dagster.model.errors import MissingPart, Unavailable
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_rigs.components import CollectBolt, InputSpout
from storm_rigs.servers.kafka import KafkaRig
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.sink_rig import SinkRig

REAL = os.environ.get("KAFKA_BOOTSTRAP", "")
real = pytest.mark.skipif(not REAL, reason="KAFKA_BOOTSTRAP names no broker")


@contextmanager
def mock_cluster() -> Iterator[str]:
    holder = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "none", "log_level": 0})
    yield ",".join(
        f"{each.host}:{each.port}" for each in holder.list_topics(timeout=10).brokers.values()
    )


@pytest.fixture(scope="module")
def mock() -> Iterator[str]:
    with mock_cluster() as bootstrap:
        yield bootstrap


def test_a_sink_without_its_brokers_writes_no_line(capfd: pytest.CaptureFixture[str]) -> None:
    conf = {
        "kafka.bootstrap.servers": f"127.0.0.1:{free_port()}",
        # Many attempts in a short time.
        "kafka.reconnect.backoff.ms": 20,
        "kafka.reconnect.backoff.max.ms": 50,
        "kafka.message.timeout.ms": 1500,
    }
    sink = KafkaSink("away")
    sink.open(conf, "")
    with pytest.raises(Unavailable):
        sink.write([Row({"n": 1})], 1)
    sink.close()
    assert capfd.readouterr().err == ""


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
    reader = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "reader", "enable.partition.eof": True}
    )
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
    assert (
        sorted(refused.value.rows) == [1, 2, 3]
        and "kafka.message.max.bytes" in refused.value.rows[1]
    )
    sink.close()
    assert sorted(value["n"] for _, value in messages(bootstrap, topic)) == list(range(500))
    assert (b"7", {"n": 7}) in messages(bootstrap, topic)


KEYS: list[bytes | None] = [
    None,
    b"",
    b"ann",
    b"None",
    b"b'ann'",
    b"\xff\x00\x80",
    "é".encode(),
    b"7",
    b"x" * 5000,
]


class Records(SourceSpout):
    outputs = ["key", "value"]

    def values(self, record: SourceRecord) -> list[Any]:
        return [record.key, record.value]


class Copied(SinkBolt):
    batch_secs = 0.1


def copy_of(source: str, target: str) -> type[Topology]:
    """A topology that copies a topic by the product's own source and sink."""
    sink = KafkaSink(target, key="key", value=lambda row: row["value"])
    # Tasks import the classes by their names.
    globals()["Records"] = spout = type(
        "Records", (Records,), {"source": KafkaSource(source), "__module__": __name__}
    )
    globals()["Copied"] = bolt = type("Copied", (Copied,), {"sink": sink, "__module__": __name__})

    class Copy(Topology):
        records = spout.spec(par=2)
        copied = bolt.spec(inputs=[records], par=2)

    return Copy


def test_a_topic_that_is_copied_has_the_keys_of_the_original() -> None:
    rig = KafkaRig()
    source, target = rig.topic(), rig.topic()
    producer = Producer(rig.conf)
    for number in range(90):
        producer.produce(source, value=b"%d" % number, key=KEYS[number % len(KEYS)])
    assert producer.flush(30) == 0
    conf = {"kafka.bootstrap.servers": rig.bootstrap, "kafka.log_level": 0}
    with TopologyHarness(copy_of(source, target), conf=conf) as harness:

        def is_copied() -> bool:
            harness.engine.run(harness.shared.clock())
            return sum(rig.ends(target).values()) >= 90

        eventually(is_copied, 60, "all records are copied", interval=0.01, ignore=(KafkaException,))
        assert harness.errors == []
    original = sorted(messages(rig.bootstrap, source), key=str)
    assert sorted(messages(rig.bootstrap, target), key=str) == original
    assert {key for key, _ in original} == set(KEYS)
    rig.close()


class Stored(SinkBolt):
    batch_rows = 50


def test_a_row_with_a_key_of_another_type_is_rejected_alone() -> None:
    rig = KafkaRig()
    topic = rig.topic()
    globals()["Stored"] = bolt = type(
        "Stored", (Stored,), {"sink": KafkaSink(topic, key="customer"), "__module__": __name__}
    )

    class Storing(Topology):
        orders = InputSpout.spec(outputs=["customer", "n"])
        stored = bolt.spec(inputs=[orders])
        note = CollectBolt.spec(inputs={stored["rejected"]: Grouping.GLOBAL})

    CollectBolt.everything.clear()
    keys = ["ann", 7, None, True, 1.5, ["a"], {"a": 1}]
    orders = [[keys[n % len(keys)], n] for n in range(70)]
    conf = {"kafka.bootstrap.servers": rig.bootstrap, "kafka.log_level": 0}
    with TopologyHarness(Storing, {"orders": orders}, conf=conf) as harness:

        def is_finished() -> bool:
            harness.engine.run(harness.shared.clock())
            return len(CollectBolt.everything) >= 40 and sum(rig.ends(topic).values()) >= 30

        eventually(
            is_finished, 60, "each row is sent or rejected", interval=0.01, ignore=(KafkaException,)
        )
    sent = sorted((value["n"], key) for key, value in messages(rig.bootstrap, topic))
    kept = {0: b"ann", 1: b"7", 2: None}
    assert sent == [(n, kept[n % 7]) for n in range(70) if n % 7 in kept]
    assert sorted(row["n"] for row, _ in CollectBolt.everything) == [
        n for n in range(70) if n % 7 not in kept
    ]
    kinds = {3: "bool", 4: "float", 5: "list", 6: "dict"}
    for row, reason in CollectBolt.everything:
        assert (
            f"the key 'customer' is of type {kinds[row['n'] % 7]}, and a key is bytes, text"
            in reason
        )
    rig.close()


def test_a_row_without_its_key_field_is_rejected_with_its_fields(mock: str) -> None:
    sink = KafkaSink("t", key="customer")
    sink.open({"kafka.bootstrap.servers": mock}, "")
    with pytest.raises(Rejected) as refused:
        sink.write([Row({"customer": "ann"}), Row({"n": 1, "m": 2})], 1)
    sink.close()
    assert list(refused.value.rows) == [1]
    assert (
        "no field 'customer' for the key of its message, only: n, m: add the field"
        in refused.value.rows[1]
    )


@real
@pytest.mark.parametrize("is_once", [False, True], ids=["at least once", "exactly once"])
@pytest.mark.parametrize("keyed", [4, 50_000])
def test_a_compacted_topic_refuses_rows_without_a_key_alone(
    is_once: bool, keyed: int, topic: str
) -> None:
    admin = AdminClient({"bootstrap.servers": REAL})
    compacted = f"{topic}-compacted"
    admin.create_topics([NewTopic(compacted, 2, 1, config={"cleanup.policy": "compact"})])[
        compacted
    ].result(30)
    conf = {"kafka.bootstrap.servers": REAL, "kafka.log_level": 0}
    owner = f"wc/table/{topic}" if is_once else ""
    sink = KafkaSink(compacted, key="k")
    assert sink.open(conf, owner) == (0 if is_once else None)
    rows = [Row({"k": n, "n": n}) for n in range(keyed)]
    # In front, so that a large batch is not sent in full when the broker refuses it.
    rows[1:1] = [Row({"k": None, "n": -1}), Row({"k": None, "n": -2})]
    for _ in range(10):
        # As a SinkBolt does it: without refused rows, and with a new connection after an error.
        try:
            sink.write(rows, 1)
            break
        except Rejected as refused:
            assert {rows[at].values["k"] for at in refused.rows} == {None}
            for reason in refused.rows.values():
                assert (
                    "refuses a message without a key" in reason
                    and "set key of the KafkaSink" in reason
                )
            rows = [row for at, row in enumerate(rows) if at not in refused.rows]
        except Unavailable as error:
            assert is_once and "waits for a new producer" in str(error)
            sink.close()
            assert sink.open(conf, owner) == 0
    sink.close()
    sent = [(value["n"], key) for key, value in messages(REAL, compacted)]
    assert set(sent) == {(n, b"%d" % n) for n in range(keyed)}
    # At least once: the other partition has had its messages of the first batch.
    assert not is_once or len(sent) == keyed
    admin.delete_topics([compacted])[compacted].result(30)


def test_a_batch_is_larger_than_the_queue_of_the_client(mock: str, topic: str) -> None:
    sink = KafkaSink(topic)
    sink.open({"kafka.bootstrap.servers": mock, "kafka.queue.buffering.max.messages": 100}, "")
    sink.write([Row({"n": n}) for n in range(2000)], 1)
    sink.close()
    assert sorted(value["n"] for _, value in messages(mock, topic)) == list(range(2000))


def test_an_unreachable_broker_is_an_error_and_does_not_delay_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    with pytest.raises(
        Unavailable, match=r"has not taken the messages before for 0\.3 s: .*Queue full"
    ):
        sink.write([Row({"n": n}) for n in range(20)], 1)
    sink.close()


@pytest.mark.parametrize(
    ("library", "sink"),
    [
        ("confluent_kafka", KafkaSink("t")),
        ("psycopg", PostgresSink("t")),
        ("s3fs", FileSink("s3://bucket/folder")),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    library: str, sink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    # What fsspec has imported for another test it does not import again.
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    extra, distribution = {
        "confluent_kafka": ("kafka", "confluent-kafka"),
        "psycopg": ("postgres", "psycopg"),
        "s3fs": ("s3", "s3fs"),
    }[library]
    hint = rf"pip install '{distribution}.* \(the extra {extra} of"
    with pytest.raises(MissingPart, match=hint):
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
        producer.send_offsets_to_transaction(
            [TopicPartition(topic, 0, 2)], group.consumer_group_metadata(), 10
        )
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
    ("total", "kills"),
    [(20_000, 3), pytest.param(1_000_000, 20, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
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
        return sum(
            reader.get_watermark_offsets(TopicPartition(topic, part), 10)[1] for part in range(3)
        )

    make_sink_rig(total, {"kafka.bootstrap.servers": REAL}, "InTopic").run(written, kills)
    reader.close()
    assert sorted(value["n"] for _, value in messages(REAL, topic)) == list(range(total))
