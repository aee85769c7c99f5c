"""The pure halves of the data plane."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.dataplane.acking import AckTracker, PendingMap
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.groupings import (
    GROUPINGS,
    Grouping,
    GroupingType,
    custom_chooser,
    fields_chooser,
    partial_key_chooser,
    stable_hash,
)

HASHES = [1055753242, 344747109, 3885220735, 4058625515, 4143597793]
KEYS = st.one_of(
    st.text(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.none(),
    st.booleans(),
    st.binary(),
)


def test_the_hash_never_changes() -> None:
    # These numbers are part of the contract: stored state is divided by them.
    assert [stable_hash(key) for key in ("word", 1, ("a", 2), None, b"x")] == HASHES


def test_the_hash_is_the_same_in_another_process() -> None:
    code = "from storm_dagster.model.groupings import stable_hash as h; print([h('word'), h(1), h(('a', 2)), h(None), h(b'x')])"
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "77"},
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert out.stdout.decode().strip() == str(HASHES)


@given(st.lists(KEYS, min_size=1, max_size=3), st.integers(1, 9))
def test_equal_keys_share_a_target(key: list, count: int) -> None:
    choose = fields_chooser(range(count), range(len(key)))
    again = fields_chooser(range(count), range(len(key)))
    assert choose([*key, "rest"]) == choose([*key, "other"]) == again(key)


def test_equal_numbers_of_different_types_share_a_target() -> None:
    for one, other in ((1, 1.0), (1, True), ((1, 2), [1, 2]), ("1", "1")):
        assert stable_hash(one) == stable_hash(other)
    with pytest.raises(InvalidRequest):
        stable_hash(object())


def test_choosers_spread() -> None:
    fields = fields_chooser(range(4), [0])
    used = Counter(fields([f"word{n}"]) for n in range(10_000))
    assert max(used.values()) < 1.2 * min(used.values())
    custom = custom_chooser({1: "x", 2: "y"}, lambda values: [2, 1])
    assert custom([]) == ["y", "x"]
    with pytest.raises(InvalidRequest):
        custom_chooser({1: "x"}, lambda values: 9)([])


def test_partial_key_takes_the_less_used_of_two_tasks() -> None:
    keys = [f"word{n}" for n in range(20)]
    tasks_of: dict[str, set[int]] = {}
    for key in keys:
        choose = partial_key_chooser(range(4), [0])
        tasks = Counter(choose([key, number]) for number in range(100))
        tasks_of[key] = set(tasks)
        # One task, if both hashes of the key name it; else the two get as many tuples.
        assert list(tasks.values()) in ([100], [50, 50])
    assert any(len(tasks) == 2 for tasks in tasks_of.values())

    choose = partial_key_chooser(range(4), [0])
    counts = dict.fromkeys(range(4), 0)
    for number in range(1_000):
        key = keys[number * number % len(keys)]
        task = choose([key])
        assert counts[task] == min(counts[candidate] for candidate in tasks_of[key])
        counts[task] += 1


def test_every_grouping_can_be_named_written_and_read_about() -> None:
    assert set(GROUPINGS) == set(get_args(GroupingType))
    page = (Path(__file__).parents[2] / "docs" / "authoring.md").read_text(encoding="utf-8")
    for name in GROUPINGS:
        author = name if hasattr(Grouping, name) else name.upper()
        assert hasattr(Grouping, author) and f"`Grouping.{author}" in page


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_an_acker_is_right_in_any_order(seed: int, edges: int) -> None:
    draw = random.Random(seed)
    numbers = [draw.getrandbits(64) | 1 for _ in range(edges)]
    value = 0
    for number in numbers:
        value ^= number
    news: list[tuple] = [("init", value), *[("ack", number) for number in numbers]]
    draw.shuffle(news)
    acker = AckTracker(10.0)
    for index, (kind, number) in enumerate(news):
        if kind == "init":
            verdicts = acker.apply(0.0, inits=[(7, number, 3)])
        else:
            verdicts = acker.apply(0.0, acks=[(7, number)])
        last = index == len(news) - 1
        assert verdicts.acked == ({3: [7]} if last else {})
    assert len(acker) == 0


def test_failed_trees_and_forgotten_trees() -> None:
    acker = AckTracker(10.0)
    acker.apply(0.0, inits=[(1, 5, 3)])
    assert acker.apply(0.0, fails=[1]).failed == {3: [1]}
    assert acker.apply(0.0, fails=[2]).failed == {0: [2]}
    acker.apply(1.0, acks=[(9, 4)])
    assert acker.expire(5.0) == 0 and acker.expire(11.0) == 1


def test_pending_entries_never_expire_early() -> None:
    pending: PendingMap[str] = PendingMap(5.0)
    for n in range(3):
        pending.add(n, str(n), float(n))
    assert pending.pop(1) == ("1", 1.0) and pending.pop(1) is None
    assert pending.expire(4.9) == []
    assert pending.expire(5.0) == [(0, "0")]
    assert len(pending) == 1


def test_short_waits_pause_message_timeouts_without_restarting_them() -> None:
    """A target that fails for half a second in every five keeps no lost entry permanently."""
    pending: PendingMap[str] = PendingMap(30.0)
    pending.add(0, "lost", 0.0)
    expired_at = None
    now = 0.0
    while expired_at is None and now < 120.0:
        now += 0.1
        if now % 5.0 < 0.5:
            pending.extend_deadlines(now)
        if pending.expire(now):
            expired_at = now
    # 30 s of the clock, and six to seven waits of half a second.
    assert expired_at is not None and 30.0 < expired_at <= 34.5


def test_the_timeouts_of_pending_entries_begin_again_while_they_are_extended() -> None:
    pending: PendingMap[str] = PendingMap(5.0)
    pending.add(0, "before", 0.0)
    for now in (4.0, 100.0):
        pending.extend_deadlines(now)
        assert pending.expire(now) == []
    pending.add(1, "after", 102.0)
    assert pending.expire(104.9) == []
    assert pending.expire(105.0) == [(0, "before")]
    assert pending.expire(106.9) == [] and pending.expire(107.0) == [(1, "after")]
