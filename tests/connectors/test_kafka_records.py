"""Records of Kafka as they are, quiet outages, and topics that become compacted."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import (
    AlterConfigOpType,  # pyright: ignore[reportPrivateImportUsage]
    ConfigEntry,  # pyright: ignore[reportPrivateImportUsage]
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
)

from storm_dagster.api import Topology
from storm_dagster.connectors import (
    KafkaSource,
    SourceSpout,
    kafka_outage,
    kafka_reads,
    kafka_topic_ids,
    source_spout,
)
from storm_dagster.connectors.kafka_outage import LibraryLog, Outage
from storm_dagster.connectors.kafka_reads import CleanupPolicies
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_rigs.components import CollectBolt
from storm_rigs.servers.kafka import REAL, KafkaRig
from storm_rigs.worker.sources_in_harness import run_until

SEEN = CollectBolt.everything
"""Values of all records that were read."""


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaRig]:
    rig = KafkaRig()
    yield rig
    rig.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_spout, "_COMMIT_SECS", 0.05)
    monkeypatch.setattr(KafkaSource, "refresh_secs", 0.1)
    if not REAL:
        # Librdkafka's brokers give no ids and no policies, however long a client waits.
        monkeypatch.setattr(kafka_topic_ids, "_RESPONSE_SECS", 0.1)
        monkeypatch.setattr(kafka_reads, "_POLICY_WAIT_SECS", 0.1)


def reading(topic: str, **body: Any) -> type[Topology]:
    parts = {"source": KafkaSource(topic), "outputs": ["n"], "__module__": __name__, **body}
    # Tasks import the class by its name.
    globals()["Records"] = made = type("Records", (SourceSpout,), parts)
    SEEN.clear()

    class Reading(Topology):
        records = made.spec()
        use = CollectBolt.spec(inputs=[records])

    return Reading


def harness_of(
    kafka: KafkaRig, topology: type[Topology], state_dir: Path | None = None, **conf: Any
) -> TopologyHarness:
    conf = {"kafka.bootstrap.servers": kafka.bootstrap, **conf}
    return TopologyHarness(topology, conf=conf, state_dir=state_dir)


def error_texts(harness: TopologyHarness) -> list[str]:
    return [str(error) for name, error in harness.errors if name == "records"]


def test_repeated_headers_are_all_in_a_list(kafka: KafkaRig) -> None:
    topic = kafka.topic()
    headers = [("via", b"a"), ("try", b"1"), ("via", b"b"), ("none", None)]
    kafka.produce(topic, [1], headers=headers)
    kafka.produce(topic, [2])
    values = lambda self, record: [record.headers, list(record.header_list)]  # noqa: E731
    with harness_of(kafka, reading(topic, values=values, outputs=["map", "list"])) as harness:
        run_until(harness, lambda: len(SEEN) == 2)
    assert [{"via": b"b", "try": b"1", "none": None}, [*map(tuple, headers)]] in [
        [row[0], [*map(tuple, row[1])]] for row in SEEN
    ]
    assert [{}, []] in SEEN


def test_tombstones_and_other_shapes_are_rejected_once(kafka: KafkaRig, tmp_path: Path) -> None:
    topic = kafka.topic()
    producer = Producer(kafka.conf)
    for value in (b'"ab"', b"[1]", b"7", b"null", None, b'["ann", 5]'):
        producer.produce(topic, value, key=b"k", partition=0)
    assert producer.flush(30) == 0
    topology = reading(topic, outputs=["customer", "amount"])
    with harness_of(kafka, topology, tmp_path) as harness:
        run_until(harness, lambda: SEEN == [["ann", 5]])
        letters = harness.run().dead_letters
        assert error_texts(harness) == []
    assert [letter["position"]["value"] for letter in letters] == ['"ab"', "[1]", "7", "null", None]
    assert all(letter["tries"] == 1 and "WrongShape" in letter["error"] for letter in letters)
    assert SEEN == [["ann", 5]]


def test_an_outage_writes_hardly_a_line_and_has_begin_and_end(
    kafka: KafkaRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kafka_outage, "_QUIET_SECS", 0.2)
    away = {"kafka.bootstrap.servers": "127.0.0.1:1", "kafka.reconnect.backoff.max.ms": 100}
    with caplog.at_level(logging.INFO), harness_of(kafka, reading("any"), **away) as harness:
        until = time.monotonic() + 1.5
        run_until(harness, lambda: time.monotonic() > until and harness.errors)
        assert len(error_texts(harness)) == 1
        lines = [one for one in caplog.records if one.name.endswith("kafka_source")]
        assert len(lines) <= 1
    topic = kafka.topic()
    with harness_of(kafka, reading(topic)) as harness:
        run_until(harness, lambda: harness.tasks("records")[0]._source._partitions)
        harness.tasks("records")[0]._source._add_error(KafkaError(KafkaError._TRANSPORT))
        run_until(harness, lambda: len(error_texts(harness)) == 2)
        begin, end = error_texts(harness)
        assert "does not answer" in begin and f"Kafka at {kafka.bootstrap} answers again" in end


def test_brokers_that_come_back_in_steps_are_one_outage(
    kafka: KafkaRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that has started answers, and does not know groups and leaders yet."""
    monkeypatch.setattr(kafka_outage, "_QUIET_SECS", 0.2)
    with harness_of(kafka, reading(kafka.topic())) as harness:
        run_until(harness, lambda: harness.tasks("records")[0]._source._partitions)
        source = harness.tasks("records")[0]._source
        for code in (
            KafkaError._TRANSPORT,
            KafkaError._UNKNOWN_PARTITION,
            KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
            KafkaError.NOT_LEADER_FOR_PARTITION,
        ):
            source._add_error(KafkaException(KafkaError(code)))
        run_until(harness, lambda: len(error_texts(harness)) > 1)
        begin, end = error_texts(harness)
        assert "does not answer" in begin
        assert "answers again" in end


def test_an_outage_ends_with_a_response_after_a_quiet_time() -> None:
    outage = Outage("b:1")
    assert outage.on_response(1.0) is None, "there was none"
    for now in (10.0, 20.0, 100.0):
        outage.on_error(now)
    assert outage.on_response(101.0) is None, "another broker may have answered"
    assert str(outage.on_response(116.0)) == "Kafka answers again: b:1 were away for 90 s"
    assert outage.on_response(200.0) is None
    outage.on_error(300.0)
    assert "0 s" in str(outage.on_response(400.0))


def test_the_library_logs_one_line_a_minute_and_counts_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(kafka_outage.time, "monotonic", lambda: now[0])
    log = LibraryLog(logging.getLogger("test.library"))
    with caplog.at_level(logging.INFO):
        for number in range(180):
            now[0] = 1000.0 + number
            log.log(logging.WARNING, "%s [%s] %s", "MAXPOLL", "client", number)
            log.log(logging.ERROR, "%s [%s] %s", "FAIL", "client", "Connection refused")
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "MAXPOLL [client] 0",
        "MAXPOLL [client] 60 (and 59 other lines before)",
        "MAXPOLL [client] 120 (and 59 other lines before)",
    ]


def test_a_topic_that_becomes_compacted_is_named_once() -> None:
    policies = CleanupPolicies(None, None, ["a", "b"])
    assert policies.newly_compacted({"a": "delete", "b": "compact"}) == []
    assert policies.newly_compacted({}) == [], "unknown"
    assert policies.newly_compacted({"a": "compact,delete", "b": "compact"}) == ["a"]
    assert policies.newly_compacted({"a": "compact"}) == []


@pytest.mark.skipif(not REAL, reason="librdkafka's brokers have no policies: set KAFKA_BOOTSTRAP")
def test_a_compacted_topic_is_read_on_and_named(
    kafka: KafkaRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_reads, "_POLICY_SECS", 0.2)
    topic = kafka.topic()
    kafka.produce(topic, range(8), key=b"k")
    with harness_of(kafka, reading(topic)) as harness:
        run_until(harness, lambda: len(SEEN) == 8)
        source = harness.tasks("records")[0]._source
        run_until(harness, lambda: source._policies._is_compacted == {topic: False})
        entry = ConfigEntry(
            "cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SET
        )
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
        for change in kafka.admin.incremental_alter_configs([resource]).values():
            change.result(30)
        run_until(harness, lambda: error_texts(harness))
        kafka.produce(topic, [100], key=b"k")
        run_until(harness, lambda: SEEN[-1:] == [[100]])
        assert [f"topic {topic!r} is compacted now" in text for text in error_texts(harness)] == [
            True
        ]
