"""Positions in partitions of Kafka: which count, which are lost, and where reading begins."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from storm_dagster.connectors.kafka_positions import (
    CommittedPosition,
    StartPosition,
    describe_restart,
    describe_stop,
    is_recreated,
    position_metadata,
    start_position,
    topic_id_in,
    topic_id_text,
)

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
