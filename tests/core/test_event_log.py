"""The event log of a topology: numbers without a gap, bounds, and removals that keep the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core import event_log
from storm_dagster.core.event_log import EventSource
from storm_dagster.model.event_log import EventBatchIndex, EventLogHead

LOG = "a" * 32
SOURCE = EventSource("wc-1-1", declared=True, owner="shop:default", user="ann")


@dataclass
class Log:
    """A log, and what it must hold: number -> (size, time) of each event that waits."""

    head: EventLogHead = field(default_factory=lambda: event_log.new_head(LOG, SOURCE))
    batches: list[EventBatchIndex] = field(default_factory=list)
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)
    dropped: int = 0
    now: int = 1_000_000

    def take(self, sizes: list[int]) -> bool:
        """Take events; true if the log is full."""
        tail = self.batches[-1] if self.batches else None
        plan = event_log.plan_take(self.head, tail, sizes, self.now)
        assert plan.count or plan.full or not sizes, "an event fits, unless the log is full"
        taken = sizes[: plan.count]
        if taken:
            joined = tail if plan.joins else None
            former = 0 if joined is None else joined.bytes
            first = self.head.next
            self.head, index = event_log.add_batch(
                self.head,
                joined,
                count=len(taken),
                blob=f"b{first}",
                size=former + sum(taken),
                now=self.now,
            )
            if joined is not None:
                self.batches.pop()
            self.batches.append(index)
            for place, size in enumerate(taken):
                self.waiting[first + place] = (size, self.now)
        return plan.full

    def remove(self, number: int, dropped: bool = False) -> None:
        """Remove the events up to ``number``; nothing if it is removed or does not exist."""
        if number >= self.head.next:
            assert event_log.remove_events(self.head, self.batches, number) is None
            return
        stays = [key for key in self.waiting if key > number]
        since = self.waiting[min(stays)][1] if stays else None
        removal = event_log.remove_events(
            self.head, self.batches, number, since=since, dropped=dropped
        )
        gone = [key for key in self.waiting if key <= number]
        assert (removal is None) == (not gone), "nothing changes if nothing is removed"
        if removal is None:
            return
        self.head = removal.head
        self.batches = [batch for batch in self.batches if batch not in removal.batches]
        for key in gone:
            del self.waiting[key]
        self.dropped += dropped * len(gone)

    def expire(self) -> None:
        self.remove(event_log.expired_number(self.batches, self.now), dropped=True)

    def check(self) -> None:
        head = self.head
        assert head.waiting == len(self.waiting) <= event_log.MAX_LOG_EVENTS
        assert head.dropped == self.dropped
        assert [*self.waiting] == list(range(head.acknowledged + 1, head.next)), "no gap"
        assert head.bytes == sum(batch.bytes for batch in self.batches) <= event_log.MAX_BYTES
        covered = [
            number for batch in self.batches for number in range(batch.first, batch.last + 1)
        ]
        assert covered == sorted(set(covered)), "each number is in one batch"
        assert [number for number in covered if number > head.acknowledged] == [*self.waiting]
        oldest = min((at for _, at in self.waiting.values()), default=None)
        assert head.since == oldest
        _, unread = event_log.batches_after(head, self.batches, "another log", 10**9)
        assert unread == self.batches, "another log's number says nothing"


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.lists(st.integers(1, 200_000), min_size=1, max_size=30)),
        st.tuples(st.just("take"), st.lists(st.integers(1, 300), min_size=1, max_size=1)),
        st.tuples(st.just("remove"), st.floats(0, 1.2)),
        st.tuples(st.just("wait"), st.sampled_from([1, 600, 3601, 90_000])),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_a_log_holds_each_event_until_it_is_removed(actions: list[tuple[str, object]]) -> None:
    log = Log()
    for action, argument in actions:
        if action == "take":
            assert isinstance(argument, list)
            log.take(argument)
        elif action == "remove":
            assert isinstance(argument, float)
            log.remove(log.head.acknowledged + round(argument * log.head.waiting))
        else:
            assert isinstance(argument, int)
            log.now += argument
            log.expire()
            oldest_allowed = log.now - event_log.MAX_AGE_SECS - 3600
            assert all(at >= oldest_allowed for _, at in log.waiting.values())
        log.check()


@given(st.lists(st.integers(1, 400_000), max_size=300), st.integers(1, 200))
def test_an_answer_has_the_first_events_that_fit(sizes: list[int], limit: int) -> None:
    count = event_log.page_count(sizes, limit)
    assert count <= limit and (count or not sizes), "at least one"
    assert count <= 1 or sum(sizes[:count]) <= event_log.MAX_PAGE_BYTES
    if count < min(limit, len(sizes)):
        assert sum(sizes[: count + 1]) > event_log.MAX_PAGE_BYTES, "and no fewer than fit"


@given(ACTIONS, st.floats(0, 1.2))
def test_the_batch_that_keeps_a_part_of_its_events_holds_the_first_that_stays(
    actions: list[tuple[str, object]], share: float
) -> None:
    """Only this batch is read before a removal, for the time of that event."""
    log = Log()
    for action, argument in actions:
        if action == "take":
            assert isinstance(argument, list)
            log.take(argument)
    number = round(share * log.head.waiting)
    partial = event_log.partial_batch(log.batches, number)
    stays_in = [batch for batch in log.batches if batch.first <= number + 1 <= batch.last]
    is_divided = bool(stays_in) and stays_in[0].first <= number
    assert partial == (stays_in[0] if is_divided else None)


@pytest.mark.parametrize(("number", "expected"), [(0, False), (3, False), (4, True), (10**9, True)])
def test_a_number_is_ahead_of_the_log_if_no_event_has_had_it(number: int, expected: bool) -> None:
    """Also of a log all of whose events were removed, and of one that was empty from the start."""
    log = Log()
    assert event_log.is_ahead(log.head, 1)
    log.take([100] * 3)
    assert event_log.is_ahead(log.head, number) == expected
    log.remove(3)
    assert event_log.is_ahead(log.head, number) == expected


def test_a_full_log_takes_events_again_after_a_removal() -> None:
    by_count = Log()
    while not by_count.take([100] * 1000):
        pass
    assert by_count.head.waiting == event_log.MAX_LOG_EVENTS
    by_count.remove(10)
    assert by_count.take([100] * 20) and by_count.head.waiting == event_log.MAX_LOG_EVENTS

    by_size = Log()
    while not by_size.take([400_000] * 10):
        pass
    assert event_log.MAX_BYTES - 400_000 < by_size.head.bytes <= event_log.MAX_BYTES
    by_size.check()


def test_slow_events_share_batches() -> None:
    """One event a second for an hour, which nobody takes, is a few nodes."""
    log = Log()
    for _ in range(3600):
        log.take([300])
        log.now += 1
    assert len(log.batches) == 18
    log.check()


def test_an_acknowledged_event_is_not_stored_anew() -> None:
    log = Log()
    log.take([100, 100])
    log.remove(1)
    log.take([100])
    assert [(batch.first, batch.count) for batch in log.batches] == [(1, 2), (3, 1)]
    log.check()


@pytest.mark.parametrize(
    ("log", "after", "numbers"),
    [
        (LOG, 2, [3, 4]),
        (LOG, 0, [2, 3, 4]),
        (LOG, 4, []),
        (LOG, 5, [2, 3, 4]),
        ("b" * 32, 3, [2, 3, 4]),
        (None, 3, [2, 3, 4]),
    ],
)
def test_reading_goes_on_after_a_number_of_the_same_log(
    log: str | None, after: int, numbers: list[int]
) -> None:
    own = Log()
    own.take([100] * 4)
    own.remove(1)
    start, batches = event_log.batches_after(own.head, own.batches, log, after)
    assert [
        number
        for batch in batches
        for number in range(batch.first, batch.last + 1)
        if number > start
    ] == numbers


def test_the_destination_is_that_of_the_conf() -> None:
    declared = {
        "declared.code.version": "v1",
        "declared.owner": "shop:default",
        "topology.submitter.user": "ann",
    }
    assert event_log.source_of("wc-1-1", declared) == SOURCE
    assert event_log.source_of("wc-1-1", {}) == EventSource("wc-1-1")
    head = event_log.new_head(LOG, SOURCE)
    assert event_log.source_of_head(head) == SOURCE
