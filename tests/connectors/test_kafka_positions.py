"""Positions in partitions of Kafka: which count, which are lost, and where reading begins."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from itertools import product
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.connectors.kafka_errors import readable_error
from storm_dagster.connectors.kafka_positions import (
    CommittedPosition,
    StartPosition,
    describe_restart,
    describe_stop,
    is_recreated,
    number_of,
    partition_name,
    position_metadata,
    start_position,
    start_time_ms,
    topic_id_in,
    topic_id_text,
    topic_of,
)
from storm_dagster.connectors.kafka_reads import partition_names
from storm_dagster.model.errors import InvalidRequest, InvalidTopology, Unavailable

OLD, NEW = "D4czM240Ry6d-sPliZOM0w", "o08CSK83ToGLrUUPFow6pw"
FIRST, END = 10, 20


def id_of(stored_id: str | None, current_id: str | None) -> bool:
    """True if the two ids say that the topic is another one."""
    return (stored_id, current_id) in {(OLD, NEW), (NEW, OLD)}


@pytest.mark.parametrize("on_lost", ["stop", "earliest", "latest"])
@pytest.mark.parametrize("start", ["earliest", "latest", 15])
def test_every_position_begins_stops_or_goes_on_as_the_settings_say(
    start: Any, on_lost: Any
) -> None:
    at_start = {"earliest": FIRST, "latest": END, 15: 15}[start]
    for current_id in (None, OLD, NEW):
        begin = start_position(None, current_id, FIRST, END, start=start, on_lost=on_lost)
        assert begin == StartPosition(at_start), "no position is lost"
    if_lost = {"stop": None, "earliest": FIRST, "latest": END}[on_lost]
    for offset, stored_id, current_id in product(
        range(FIRST - 2, END + 3), (None, OLD, NEW), (None, OLD, NEW)
    ):
        committed = CommittedPosition(offset, stored_id)
        begin = start_position(committed, current_id, FIRST, END, start=start, on_lost=on_lost)
        is_lost = id_of(stored_id, current_id) or offset < FIRST or offset > END
        assert begin.offset == (if_lost if is_lost else offset), (committed, current_id)
        assert bool(begin.reason) == is_lost
        if is_lost:
            assert "the source has 10 to 20" in begin.reason
            names_both = str(stored_id) in begin.reason and str(current_id) in begin.reason
            assert names_both == id_of(stored_id, current_id)


@pytest.mark.parametrize("on_lost", ["stop", "earliest", "latest"])
@pytest.mark.parametrize("offset", [0, 1])
def test_an_empty_topic_keeps_a_position_of_its_own_only(offset: int, on_lost: Any) -> None:
    if_lost = None if on_lost == "stop" else 0
    for stored_id, current_id in product((None, OLD, NEW), (None, OLD, NEW)):
        committed = CommittedPosition(offset, stored_id)
        begin = start_position(committed, current_id, 0, 0, start="earliest", on_lost=on_lost)
        is_lost = offset > 0 or id_of(stored_id, current_id)
        assert begin.offset == (if_lost if is_lost else 0)


def test_a_topic_is_another_one_only_if_both_ids_are_there() -> None:
    for stored_id, current_id in product((None, OLD, NEW), (None, OLD, NEW)):
        assert is_recreated(stored_id, current_id) == id_of(stored_id, current_id)


def test_a_lost_position_names_partition_position_records_ids_and_remedy() -> None:
    committed = CommittedPosition(15, OLD)
    reason = start_position(committed, NEW, FIRST, END, start="latest", on_lost="stop").reason
    text = describe_stop("orders[3]", committed, reason)
    for part in (
        "orders[3] stands still",
        "position 15 is lost",
        OLD,
        NEW,
        "10 to 20",
        "Set on_lost",
        "--reset-offsets",
    ):
        assert part in text
    text = describe_restart("orders[3]", FIRST, committed, reason, "earliest")
    for part in (
        "orders[3] goes on at 10",
        "position 15 was lost",
        OLD,
        NEW,
        "on_lost is earliest",
    ):
        assert part in text


@pytest.mark.parametrize("task", ["wc-1-1700000000 task 3", "a topic_id=x task 3", ""])
def test_the_id_of_a_topic_stands_beside_the_name_of_the_task(task: str) -> None:
    assert position_metadata(task, None) == task, "as earlier releases write it"
    assert position_metadata(task, OLD).startswith(task)
    assert topic_id_in(position_metadata(task, OLD)) == OLD


@pytest.mark.parametrize(
    "metadata",
    [None, "", "wc-1-1700000000 task 3", "another tool", "topic_id=", f"x topic_id={OLD} and more"],
)
def test_metadata_of_earlier_releases_and_other_tools_has_no_topic_id(metadata: str | None) -> None:
    assert topic_id_in(metadata) is None


def test_ids_are_written_as_the_tools_of_kafka_print_them() -> None:
    assert topic_id_text("D4czM240Ry6d+sPliZOM/w") == "D4czM240Ry6d-sPliZOM_w"
    assert topic_id_text(None) is None
    assert topic_id_text("A" * 22) is None, "a broker that gives none answers zeros"


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("1970-01-01", 0),
        ("2026-11-24T10:00:00", 1_795_514_400_000),
        ("2026-11-24 10:00", 1_795_514_400_000),
        ("2026-11-24T10:00:00Z", 1_795_514_400_000),
        ("2026-11-24T12:00:00+02:00", 1_795_514_400_000),
        ("2026-11-24T10:00:00.123456", 1_795_514_400_123),
    ],
)
def test_a_start_time_is_in_utc_without_a_time_zone(start: str, expected: int) -> None:
    assert start_time_ms(start) == expected


_ZONES: st.SearchStrategy[Any] = st.sampled_from(
    [None, timezone.utc, timezone(timedelta(hours=-7, minutes=-30))]
)


@given(st.datetimes(min_value=datetime(1971, 1, 1), timezones=_ZONES))
def test_a_start_time_is_exact_to_the_millisecond(start: datetime) -> None:
    """Otherwise a record is read that is older than the start, or one is left out."""
    as_utc = start if start.tzinfo else start.replace(tzinfo=timezone.utc)
    since = as_utc - datetime(1970, 1, 1, tzinfo=timezone.utc)
    whole_secs = since.days * 86_400 + since.seconds
    assert start_time_ms(start.isoformat()) == whole_secs * 1000 + since.microseconds // 1000


@pytest.mark.parametrize("start", ["", "now", "Earliest", "10:00", "1795514400000", "Z"])
def test_a_start_that_is_not_a_time_is_refused_with_the_choices(start: str) -> None:
    with pytest.raises(InvalidTopology, match='make it "earliest", "latest", or a time'):
        start_time_ms(start)


@given(st.from_regex(r"[a-zA-Z0-9._-]{1,249}", fullmatch=True), st.integers(0, 2**31 - 1))
def test_the_name_of_a_partition_has_its_topic_and_number(topic: str, number: int) -> None:
    name = partition_name(topic, number)
    assert (topic_of(name), number_of(name)) == (topic, number)


UNREACHABLE = (
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
    KafkaError._RESOLVE,
    KafkaError._WAIT_COORD,
    KafkaError.REQUEST_TIMED_OUT,
)
NOT_READY = (
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError._WAIT_CACHE,
)


@pytest.mark.parametrize("wrap", [lambda error: error, KafkaException])
@pytest.mark.parametrize("code", UNREACHABLE)
def test_brokers_that_do_not_respond_are_unavailable_by_address(code: int, wrap: Any) -> None:
    error = readable_error(wrap(KafkaError(code)), confluent_kafka, "k1:9092,k2:9092")
    assert isinstance(error, Unavailable)
    assert "Kafka at k1:9092,k2:9092 does not answer" in error.message


@pytest.mark.parametrize("wrap", [lambda error: error, KafkaException])
@pytest.mark.parametrize("code", NOT_READY)
def test_brokers_that_start_or_elect_are_unavailable_by_name(code: int, wrap: Any) -> None:
    """As those that do not respond: both belong to one outage."""
    error = readable_error(wrap(KafkaError(code)), confluent_kafka, "k1:9092,k2:9092")
    assert isinstance(error, Unavailable)
    assert f"Kafka at k1:9092,k2:9092 is not ready: {KafkaError(code).name()}" in error.message


@pytest.mark.parametrize("code", [KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC])
def test_topics_that_a_client_forgot_in_an_outage_belong_to_it(code: int) -> None:
    error = KafkaError(code)
    forgotten = readable_error(error, confluent_kafka, "k1:9092", is_outage=True)
    assert isinstance(forgotten, Unavailable)
    assert not isinstance(readable_error(error, confluent_kafka, "k1:9092"), Unavailable)


def answer_with(topic_error: int) -> Any:
    """Description of topics by a broker that returns an error for one."""
    topic = SimpleNamespace(error=KafkaError(topic_error), partitions={})
    return SimpleNamespace(topics={"orders": topic})


def test_a_topic_whose_brokers_elect_a_leader_exists() -> None:
    with pytest.raises(KafkaException, match="LEADER_NOT_AVAILABLE"):
        partition_names(confluent_kafka, [answer_with(KafkaError.LEADER_NOT_AVAILABLE)])
    with pytest.raises(InvalidRequest, match="create it"):
        partition_names(confluent_kafka, [answer_with(KafkaError.UNKNOWN_TOPIC_OR_PART)])


@pytest.mark.parametrize("wrap", [lambda error: error, KafkaException])
def test_another_error_of_kafka_begins_with_its_name(wrap: Any) -> None:
    """The spout reports errors with equal beginnings once."""
    refusal = wrap(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    error = readable_error(refusal, confluent_kafka, "k1:9092")
    assert not isinstance(error, Unavailable)
    assert str(error).startswith("TOPIC_AUTHORIZATION_FAILED of Kafka at k1:9092: ")


def test_an_error_that_is_not_of_kafka_is_reported_as_it_is() -> None:
    error = ValueError("a bug of the program")
    assert readable_error(error, confluent_kafka, "k1:9092") is error
