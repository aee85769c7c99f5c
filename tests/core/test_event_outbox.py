"""Events of a worker until the cluster takes them: bounded, joined, in order, and no tuple acked
before its event is taken.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.dataplane.event_outbox import (
    MAX_BATCH,
    MAX_BATCH_BYTES,
    MAX_TASK_EVENTS,
    EventOutbox,
    ReportResponse,
)
from storm_dagster.model.dagster_events import DagsterEvent


def event(number: int) -> DagsterEvent:
    return DagsterEvent.make("wc/count", "materialization", "lake/words", partition=f"p{number}")


def sent(outbox: EventOutbox[Any], now: float) -> list[DagsterEvent]:
    """The events of the next batch."""
    return [entry.event for entry in outbox.next_batch(now)]


def stored(*events: DagsterEvent) -> ReportResponse:
    return ReportResponse(frozenset(one.id for one in events))


@pytest.fixture
def outbox() -> EventOutbox[str]:
    return EventOutbox(60.0)


def test_an_event_is_sent_until_an_answer_names_it(outbox: EventOutbox[str]) -> None:
    one, two = event(1), event(2)
    assert sent(outbox, 0.0) == []
    outbox.add(7, one, "a", 0.0)
    assert sent(outbox, 0.0) == [one]
    outbox.add(7, two, "b", 0.1)
    assert sent(outbox, 0.2) == [], "one batch at a time"
    assert outbox.handle_response(ReportResponse(problem="no leader"), 1.0).ack == []
    assert sent(outbox, 1.4) == [], "a pause after a problem"
    assert sent(outbox, 1.5) == [one, two]
    assert outbox.handle_response(stored(one), 2.0).ack == ["a"]
    assert sent(outbox, 2.0) == [two]
    outcome = outbox.handle_response(ReportResponse(refused={two.id: "no such check"}), 3.0)
    assert outcome.ack == [] and len(outbox) == 0
    ((entry, reason),) = outcome.refused
    assert (
        entry.event == two
        and [holder for holder, _ in entry.holders] == ["b"]
        and reason == "no such check"
    )


def test_a_stored_event_whose_asset_is_undefined_is_acked_and_named(
    outbox: EventOutbox[str],
) -> None:
    first, second = event(1), event(2)
    outbox.add(7, first, "a", 0.0)
    outbox.add(7, second, "b", 0.0)
    sent(outbox, 0.0)
    stored_ids = frozenset({first.id, second.id})
    response = ReportResponse(stored_ids, undefined={second.id: "is defined nowhere"})
    outcome = outbox.handle_response(response, 1.0)
    assert outcome.ack == ["a", "b"]
    ((entry, reason),) = outcome.undefined
    assert entry.event == second and reason == "is defined nowhere"


def test_pauses_grow_and_end_with_an_answer_without_a_problem(outbox: EventOutbox[str]) -> None:
    now, pauses = 0.0, []
    outbox.add(1, event(1), None, now)
    assert sent(outbox, now)
    for _ in range(8):
        outbox.handle_response(ReportResponse(problem="down"), now)
        began = now
        while not sent(outbox, now):
            now += 0.5
        pauses.append(now - began)
    assert pauses == [0.5, 1, 2, 4, 8, 15, 15, 15]
    outbox.handle_response(ReportResponse(), now)
    assert sent(outbox, now), "at once"
    outbox.handle_response(ReportResponse(problem="down"), now)
    assert not sent(outbox, now + 0.4) and sent(outbox, now + 0.5)


def test_a_replay_joins_the_event_that_waits_and_both_tuples_are_acked(
    outbox: EventOutbox[str],
) -> None:
    one = event(1)
    outbox.add(7, one, "first", 0.0)
    assert sent(outbox, 0.0) == [one]
    outbox.add(7, event(1), "replay", 31.0)
    outbox.add(8, event(1), "of another task", 32.0)
    assert len(outbox) == 2
    assert outbox.handle_response(stored(one), 33.0).ack == ["first", "replay", "of another task"]
    assert sent(outbox, 34.0) == []


def test_tuples_that_timed_out_are_let_go_and_their_events_stay(outbox: EventOutbox[str]) -> None:
    outbox.add(7, event(1), "old", 0.0)
    outbox.add(7, event(1), "new", 50.0)
    assert outbox.expire(60.0) == [] and outbox.expire(61.0) == ["old"]
    assert sent(outbox, 61.0) == [event(1)]
    assert outbox.handle_response(stored(event(1)), 62.0).ack == ["new"]


def test_a_task_has_a_bounded_number_of_events(outbox: EventOutbox[str]) -> None:
    assert all(outbox.add(1, event(number), None, 0.0) for number in range(MAX_TASK_EVENTS))
    assert not outbox.add(1, event(MAX_TASK_EVENTS), "tuple", 0.0)
    assert outbox.add(1, event(0), "tuple", 0.0), "to join one takes no room"
    assert outbox.add(2, event(MAX_TASK_EVENTS), "tuple", 0.0), "another task has its own room"
    batch = sent(outbox, 0.0)
    assert batch == [event(number) for number in range(MAX_BATCH)]
    outbox.handle_response(stored(*batch), 0.0)
    assert outbox.add(1, event(MAX_TASK_EVENTS), "tuple", 0.0)


def test_a_batch_has_as_many_events_as_fit_into_a_request(outbox: EventOutbox[str]) -> None:
    large = [
        DagsterEvent.make("wc/count", "observation", "a", metadata={"n": n, "text": "x" * 16_000})
        for n in range(60)
    ]
    for one in large:
        outbox.add(1, one, None, 0.0)
    batches: list[list[DagsterEvent]] = []
    while len(outbox):
        batches.append(sent(outbox, 0.0))
        outbox.handle_response(stored(*batches[-1]), 0.0)
    assert [one for batch in batches for one in batch] == large
    sizes = [sum(len(msgspec.json.encode(one)) for one in batch) for batch in batches]
    assert len(batches) == 2 and max(sizes) <= MAX_BATCH_BYTES


def test_tuples_wait_on_while_no_timeout_runs(outbox: EventOutbox[str]) -> None:
    outbox.add(7, event(1), "tuple", 0.0)
    outbox.postpone_expiry(59.0)
    assert outbox.expire(119.0) == [] and outbox.expire(120.0) == ["tuple"]


def test_a_closed_task_fails_its_tuples_and_keeps_unrepeatable_events(
    outbox: EventOutbox[str],
) -> None:
    outbox.add(1, event(1), "tuple", 0.0)
    outbox.add(1, event(2), None, 0.0)
    outbox.add(2, event(3), "other", 0.0)
    assert outbox.close(1) == ["tuple"]
    assert sent(outbox, 0.0) == [event(2), event(3)]
    assert outbox.handle_response(stored(event(2), event(3)), 0.0).ack == ["other"]
    assert len(outbox) == 0


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 2), st.integers(0, 5)),
        st.tuples(
            st.just("send"),
            st.sampled_from(["stored", "lost", "partly", "problem", "refused"]),
            st.just(0),
        ),
        st.tuples(st.just("close"), st.integers(1, 2), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 70), st.just(0)),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_every_tuple_has_one_verdict_and_acks_mean_taken(
    actions: list[Any],
) -> None:
    """A cluster that takes what it is sent, and whose answers get lost."""
    outbox: EventOutbox[tuple[int, str]] = EventOutbox(60.0)
    now, number = 0.0, 0
    known: set[str] = set()
    held: dict[tuple[int, str], str] = {}

    def verdict(holders: list[tuple[int, str]], acked: bool) -> None:
        for holder in holders:
            name = held.pop(holder)
            assert not acked or name in known

    def send(how: str) -> None:
        batch = sent(outbox, now)
        if not batch:
            return
        part = batch[: len(batch) // 2] if how == "partly" else batch
        if how in ("stored", "lost", "partly"):
            known.update(one.id for one in part)
        answers = {
            "stored": stored(*part),
            "partly": ReportResponse(frozenset(one.id for one in part), problem="slow"),
            "lost": ReportResponse(problem="connection reset"),
            "problem": ReportResponse(problem="no leader"),
            "refused": ReportResponse(refused={one.id: "no" for one in part}),
        }
        outcome = outbox.handle_response(answers[how], now)
        verdict(outcome.ack, True)
        for entry, _ in outcome.refused:
            verdict([holder for holder, _ in entry.holders], False)

    for what, first, second in actions:
        now += 0.1
        if what == "add":
            number += 1
            holder = (number, f"tuple {number}")
            held[holder] = event(second).id
            assert outbox.add(first, event(second), holder, now)
        elif what == "send":
            send(first)
        elif what == "close":
            verdict(outbox.close(first), False)
        else:
            now += first
            verdict(outbox.expire(now), False)
    for _ in range(3):
        now += 20
        send("stored")
    assert held == {} and len(outbox) == 0
