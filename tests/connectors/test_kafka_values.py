"""Messages as an independent reader gets them: each value equal, or its row rejected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from hypothesis import given, settings
from hypothesis import strategies as st

from storm_dagster.api import SystemUnavailable
from storm_dagster.connectors import KafkaSink, Rejected, Row
from storm_dagster.connectors.kafka_values import encode_headers
from storm_rigs.servers.kafka import KafkaRig
from storm_rigs.worker.tuple_values import TUPLE_VALUES, same

FEW = settings(max_examples=max(5, settings().max_examples // 4))


class Reader:
    """A topic, a sink of it, and a reader that continues after the messages that it returned."""

    def __init__(self, rig: KafkaRig) -> None:
        self.topic = rig.topic()
        self._sink = KafkaSink(self.topic, key="k", headers="h")
        conf = {"bootstrap.servers": rig.bootstrap, "log_level": 0, "linger.ms": 0}
        self._sink.open({f"kafka.{key}": value for key, value in conf.items()}, "")
        quick = {"fetch.wait.max.ms": 10, "fetch.queue.backoff.ms": 5}
        self._consumer = Consumer({**rig.conf, **quick, "group.id": "reader"})
        self._consumer.assign([TopicPartition(self.topic, part, 0) for part in range(4)])

    def write(self, rows: list[Row]) -> dict[int, str]:
        """Write the rows but the rejected ones, and return these with their reasons."""
        try:
            self._sink.write(rows, 1)
        except Rejected as rejected:
            kept = [row for index, row in enumerate(rows) if index not in rejected.rows]
            self._sink.write(kept, 2)
            return rejected.rows
        return {}

    def messages(self, count: int) -> dict[int, Any]:
        """The next messages by the header ``n``."""
        found: dict[int, Any] = {}
        while len(found) < count:
            for message in self._consumer.consume(1, 10):
                assert message.error() is None, message.error()
                (_, number), *headers = message.headers()
                found[int(number)] = (message.key(), headers, message.value())
        return found

    def close(self) -> None:
        self._sink.close()
        self._consumer.close()


@pytest.fixture(scope="module")
def rig() -> Iterator[KafkaRig]:
    kafka = KafkaRig()
    yield kafka
    kafka.close()


@pytest.fixture(scope="module")
def reader(rig: KafkaRig) -> Iterator[Reader]:
    one = Reader(rig)
    yield one
    one.close()


@FEW
@given(st.lists(TUPLE_VALUES, min_size=1, max_size=6))
def test_each_value_of_a_tuple_comes_back_or_its_row_is_rejected(
    reader: Reader, values: list[Any]
) -> None:
    rows = [
        Row({"k": "key", "v": value, "h": [("n", n), ("via", "a"), ("via", b"\xff")]})
        for n, value in enumerate(values)
    ]
    reasons = reader.write(rows)
    assert all("at .v" in reason and reader.topic in reason for reason in reasons.values())
    messages = reader.messages(len(rows) - len(reasons))
    assert messages.keys() | reasons.keys() == set(range(len(rows)))
    for n, (key, headers, value) in messages.items():
        assert (key, headers) == (b"key", [("via", b"a"), ("via", b"\xff")])
        assert same(json.loads(value), {"k": "key", "v": values[n]})


@FEW
@given(st.lists(TUPLE_VALUES, min_size=1, max_size=6))
def test_each_key_and_header_comes_back_or_its_row_is_rejected(
    reader: Reader, values: list[Any]
) -> None:
    rows = [Row({"k": value, "h": [("n", n), ("x", value)]}) for n, value in enumerate(values)]
    # The key is a field of the message, too, which JSON cannot hold if it is bytes.
    rows = [
        Row({**row.values, "k": None if type(row.values["k"]) is bytes else row.values["k"]})
        for row in rows
    ]
    reasons = reader.write(rows)
    messages = reader.messages(len(rows) - len(reasons))
    for n, (key, headers, _) in messages.items():
        value = values[n]
        expected = value if isinstance(value, bytes | None) else str(value).encode()
        assert isinstance(value, str | int | bytes | None) and not isinstance(value, bool)
        assert headers == [("x", expected)] and key == (None if type(value) is bytes else expected)
    for n, reason in reasons.items():
        kind = type(values[n])
        assert kind not in (int, bytes, type(None)) and "in row_of" in reason
        assert kind is not str or "surrogate" in reason


def test_headers_are_pairs_or_a_map() -> None:
    pairs = [("via", "a"), ["via", b"b"], ("count", 3), ("none", None)]
    expected = [("via", b"a"), ("via", b"b"), ("count", b"3"), ("none", None)]
    assert encode_headers("h", pairs) == expected
    assert encode_headers("h", {"a": "1", "b": None}) == [("a", b"1"), ("b", None)]
    assert encode_headers("h", None) == [] and encode_headers("h", ()) == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("text", "the headers 'h' are of type str: make them a list of"),
        (7, "the headers 'h' are of type int"),
        (["via"], "a header in 'h' is of type str: make it a pair"),
        ([(b"via", b"a")], "a header in 'h' is of type tuple: make it a pair"),
        ([("via", 1.5)], "the header 'via' in 'h' is of type float, and a header is bytes, text"),
        ([("a\ud800", b"")], "the name of a header in 'h' has half of a surrogate pair"),
        ([("a\0", b"")], "the name of a header in 'h' has a NUL character"),
    ],
)
def test_headers_of_another_form_are_refused_by_name(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        encode_headers("h", value)


def test_only_the_row_whose_made_value_is_not_bytes_is_rejected(rig: KafkaRig) -> None:
    topic = rig.topic()
    sink = KafkaSink(topic, value=lambda row: row["made"])
    sink.open({"kafka.bootstrap.servers": rig.bootstrap, "kafka.log_level": 0}, "")
    made: list[Any] = ["é", bytearray(b"a"), memoryview(b"b"), None, "\ud800", 5, {"a": 1}]
    rows = [Row({"made": value}) for value in made]
    with pytest.raises(Rejected) as refused:
        sink.write(rows, 1)
    assert list(refused.value.rows) == [4, 5, 6]
    for reason in refused.value.rows.values():
        assert f"the function value of the KafkaSink for topic {topic}" in reason
    sink.write(rows[:4], 1)
    sink.close()
    consumer = Consumer({**rig.conf, "group.id": "made"})
    consumer.assign([TopicPartition(topic, part, 0) for part in range(4)])
    values: list[Any] = []
    while len(values) < 4:
        values += [message.value() for message in consumer.consume(4, 5)]
    consumer.close()
    assert sorted(values, key=str) == [None, b"\xc3\xa9", b"a", b"b"]


def test_a_system_that_encoding_needs_rejects_no_row(rig: KafkaRig) -> None:
    def encode(row: Any) -> bytes:
        if row["n"] == 2:
            raise SystemUnavailable("the schema registry", "refused")
        return b"1"

    sink = KafkaSink(rig.topic(), value=encode)
    sink.open({"kafka.bootstrap.servers": rig.bootstrap, "kafka.log_level": 0}, "")
    with pytest.raises(SystemUnavailable):
        sink.write([Row({"n": n}) for n in range(4)], 1)
    sink.close()
