"""Nothing is committed past an open record, nothing gets stuck: in whatever order records finish or
fail.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storm_dagster.connectors.tracking import (
    SPAN,
    OpenRecord,
    PartitionEnd,
    Retries,
    SourceRecord,
    Tracker,
)
from storm_dagster.model.groupings import reader_of

QUICK = Retries(most=2, first_secs=1.0, longest_secs=8.0)


@settings(max_examples=max(20, settings().max_examples // 2))
@given(
    seed=st.integers(0, 1 << 30),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    bound=st.integers(1, 12),
    batch=st.integers(1, 20),
    failing=st.sampled_from([0.0, 0.15, 0.6]),
    poison=st.sampled_from([0, 1, 7]),
)
def test_never_committed_past_an_open_record_and_never_stuck(
    seed: int, sizes: list[int], bound: int, batch: int, failing: float, poison: int
) -> None:
    draw = random.Random(seed)
    # Gaps between and after the records: the end is beyond the last record.
    logs: dict[str, list[SourceRecord]] = {}
    ends: dict[str, int] = {}
    for number, size in enumerate(sizes):
        offset, name = 0, f"p{number}"
        logs[name] = []
        for _ in range(size):
            offset += draw.choice([0, 0, 0, 1, 5])
            bad = poison and draw.randrange(40) < poison
            logs[name].append(
                SourceRecord("bad" if bad else offset, name, offset + 1, at_ms=offset)
            )
            offset += 1
        ends[name] = offset + draw.choice([0, 2])
    tracker = Tracker(bound, QUICK)
    rest = {name: list(log) for name, log in logs.items()}
    finished: dict[str, set[int]] = {name: set() for name in logs}
    ended: set[str] = set()
    out: list[OpenRecord] = []
    committed = dict.fromkeys(logs, 0)
    poisoned: Counter[str] = Counter()
    late: list[OpenRecord] = []
    now = 0.0
    for _ in range(20_000):
        now += 0.5
        for name in [name for name in rest if name not in tracker.full]:
            part, rest[name] = rest[name][:batch], rest[name][batch:]
            for record in part:
                tracker.read(record)
                if draw.random() < 0.3:
                    # All of it, as far as the source knows.
                    tracker.read(PartitionEnd(name, record.after))
            if not rest[name] and name not in ended:
                ended.add(name)
                tracker.read(PartitionEnd(name, ends[name]))
        while (one := tracker.take(now)) is not None:
            assert not one.finished and one not in out
            out.append(one)
        for progress in tracker.partitions.values():
            given_out = [
                one for one in progress.records if isinstance(one, OpenRecord) and not one.finished
            ]
            assert len(given_out) - len(progress.held) <= bound
        draw.shuffle(out)
        for _ in range(draw.randint(0, len(out)) if len(out) > 1 else len(out)):
            one = out.pop()
            late.append(one)
            if one.record.value == "bad" or draw.random() < failing:
                if tracker.fail(one, now):
                    poisoned[one.record.partition] += 1
                    assert one.tries == QUICK.most + 1
                    assert tracker.finish(one)
                    finished[one.record.partition].add(one.record.after)
            else:
                assert tracker.finish(one)
                finished[one.record.partition].add(one.record.after)
        if (
            late
            and draw.random() < 0.1
            and (twice := draw.choice(late)) not in out
            and twice.finished
        ):
            # A second verdict on a record that is finished changes nothing.
            assert not tracker.finish(twice) and not tracker.fail(twice, now)
        for name, position in tracker.positions():
            assert position >= committed[name]
            committed[name] = position
            behind = {record.after for record in logs[name] if record.after <= position}
            assert behind <= finished[name], "committed past an open record"
        if committed == ends and not out:
            break
    assert committed == ends, "stuck"
    assert tracker.held == 0 and not tracker.full
    assert {name: len(found) for name, found in finished.items()} == {
        name: len(log) for name, log in logs.items()
    }


def read(tracker: Tracker, *afters: int, partition: str = "p") -> None:
    for after in afters:
        tracker.read(SourceRecord(after, partition, after, at_ms=after * 1000))


def test_a_bound_stops_reading_and_no_retry() -> None:
    tracker = Tracker(2, QUICK)
    read(tracker, 1, 2, 3)
    first, second = tracker.take(0), tracker.take(0)
    assert first is not None and second is not None and tracker.take(0) is None
    assert tracker.full == {"p"} and tracker.held == 1
    assert not tracker.fail(first, 0) and tracker.take(0.5) is None
    assert tracker.take(1.0) is first, "the retry is emitted although the partition is full"
    assert tracker.finish(second)
    third = tracker.take(1.0)
    assert third is not None and third.record.after == 3 and dict(tracker.positions()) == {}
    assert tracker.finish(first) and dict(tracker.positions()) == {"p": 2}
    assert tracker.full == set() and tracker.held == 0


def test_what_is_read_after_an_open_record_is_bounded_until_it_is_finished() -> None:
    tracker = Tracker(2, QUICK)
    read(tracker, 1)
    first, given_out = tracker.take(0), 0
    for after in range(2, 500):
        # A source may go on with a partition that is full.
        if tracker.held:
            break
        read(tracker, after)
        while (one := tracker.take(0)) is not None:
            given_out += 1
            assert tracker.finish(one)
    progress = tracker.partitions["p"]
    assert "p" in tracker.full
    assert first is not None and given_out == SPAN * 2 - 1 and len(progress.records) == SPAN * 2 + 1
    assert tracker.finish(first) and dict(tracker.positions()) == {"p": SPAN * 2}
    last = tracker.take(0)
    assert (
        last is not None
        and tracker.finish(last)
        and not tracker.full
        and tracker.held == 0 == len(progress.records)
    )


def test_a_record_of_a_queue_keeps_no_other_one_in_memory() -> None:
    tracker = Tracker(5, QUICK)
    tracker.read(SourceRecord(0, handle=0))
    first = tracker.take(0)
    for number in range(1, 1000):
        tracker.read(SourceRecord(number, handle=number))
        one = tracker.take(0)
        assert one is not None and tracker.finish(one) and not tracker.full
        assert len(tracker.partitions[""].records) < 2 * SPAN
    assert [one.record.handle for one in tracker.release("")] == [0] and first is not None
    # Nor does it when many are read at once.
    for number in range(500):
        tracker.read(SourceRecord(number, handle=number))
    first, last = tracker.take(0), None
    while (one := tracker.take(0)) is not None:
        last = one.record.handle
        assert tracker.finish(one)
    assert first is not None and first.record.handle == 0 and last == 499


def test_records_that_come_one_by_one_are_given_out_though_each_was_the_last() -> None:
    tracker = Tracker(1, QUICK)
    for after in range(1, 40):
        tracker.read(SourceRecord(after, "p", after))
        tracker.read(PartitionEnd("p", after))
    for after in range(1, 40):
        one = tracker.take(0)
        assert one is not None and one.record.after == after and tracker.finish(one)
    assert dict(tracker.positions()) == {"p": 39} and not tracker.full


def test_pauses_double_up_to_the_longest_and_a_lost_worker_is_no_try() -> None:
    assert [QUICK.pause(tries) for tries in (1, 2, 3, 4, 5, 2000)] == [1, 2, 4, 8, 8, 8]
    tracker = Tracker(2, QUICK)
    read(tracker, 1)
    one, now = tracker.take(0), 0.0
    assert one is not None
    for _ in range(50):
        assert not tracker.fail(one, now, counts=False)
        now += 10
        assert tracker.take(now) is one
    assert [tracker.fail(one, now), tracker.take(now + 10) is one, tracker.fail(one, now + 10)] == [
        False,
        True,
        False,
    ]


def test_an_end_is_committed_when_everything_before_is_finished() -> None:
    tracker = Tracker(10)
    tracker.read(PartitionEnd("empty", 7))
    read(tracker, 1)
    tracker.read(PartitionEnd("p", 5))
    tracker.read(PartitionEnd("p", 9, closed=True))
    assert dict(tracker.positions()) == {"empty": 7} and tracker.closed() == []
    one = tracker.take(0)
    assert one is not None and tracker.finish(one)
    assert dict(tracker.positions()) == {"empty": 7, "p": 9} and tracker.closed() == ["p"]


def test_a_released_partition_is_forgotten_with_its_records() -> None:
    tracker = Tracker(1, QUICK)
    read(tracker, 1, 2)
    one = tracker.take(0)
    assert one is not None and [left.record.after for left in tracker.release("p")] == [1, 2]
    assert not tracker.finish(one) and not tracker.fail(one, 0) and tracker.take(100) is None
    assert tracker.held == 0 and tracker.full == set() and not tracker.partitions


def test_event_time_says_how_far_behind_a_partition_is() -> None:
    tracker = Tracker(10)
    assert tracker.behind_ms("p", 9000) is None
    read(tracker, 1, 4, 2)
    assert tracker.behind_ms("p", 9000) == 8000
    for _ in range(3):
        one = tracker.take(0)
        assert one is not None
        tracker.finish(one)
    assert tracker.partitions["p"].watermark_ms == 4000 and tracker.behind_ms("p", 9000) == 5000


@pytest.mark.parametrize("tasks", [1, 2, 5, 12])
def test_each_partition_has_one_reader_and_numbered_ones_go_around(tasks: int) -> None:
    readers = Counter(reader_of(f"orders[{number}]", tasks) for number in range(12))
    assert set(readers) == set(range(tasks)) and max(readers.values()) - min(readers.values()) <= 1
    assert {reader_of(name, tasks) for name in ("a", "", "s3://x/y.csv", "9" * 40)} <= set(
        range(tasks)
    )
