"""Sequence numbers of blobs, by Storm's rules."""

from __future__ import annotations

import pytest

from storm_dagster.blobstore.sequence import SequenceDecision, holders_of_latest, next_sequence, split_holder
from storm_dagster.model.errors import Corrupt


def test_the_holders_of_the_highest_number_have_the_latest() -> None:
    assert holders_of_latest(["nimbus1:7800-1", "nimbus2:7800-2"]) == ["nimbus2:7800"]
    assert holders_of_latest(["nimbus1:7800-0"]) == []


def test_split_at_the_last_dash() -> None:
    assert split_holder("nimbus-1:7800-1") == ("nimbus-1:7800", 1)
    for damaged in ("nimbus", "nimbus-", "-1", "a:1-x", ""):
        with pytest.raises(Corrupt):
            split_holder(damaged)


@pytest.mark.parametrize(
    ("holders", "maximum", "me", "leader", "expected"),
    [
        ([], None, "a:1", True, SequenceDecision(1, 1)),  # first creation
        (["a:1-1"], 1, "a:1", True, SequenceDecision(2, 2)),  # the leader updates what it holds
        (["a:1-1", "b:1-1"], 1, "a:1", True, SequenceDecision(2, 2)),
        (["a:1-1"], 2, "b:1", False, SequenceDecision(2, 2)),  # the others lag behind the maximum
        (["a:1-2"], 2, "b:1", False, SequenceDecision(0, 2)),  # the others are newest
        (["a:1-2"], 2, "b:1", True, SequenceDecision(3, 3)),  # a new leader that was not listed
        ([], 3, "b:1", False, SequenceDecision(3, 3)),  # all nimbuses were down
        ([], 3, "b:1", True, SequenceDecision(3, 3)),
        (["a:1-2", "b:1-1"], 2, "b:1", False, SequenceDecision(2, 2)),  # mixed: the highest listed
    ],
)
def test_the_next_number_follows_holders_and_maximum(
    holders: list[str], maximum: int | None, me: str, leader: bool, expected: SequenceDecision
) -> None:
    assert next_sequence(holders, maximum, me=me, leader=leader) == expected


def test_a_leader_that_returns_after_a_lost_update_is_behind() -> None:
    """Create, sync, update, sync; the leader updates to 3 and dies before the sync; the old leader returns."""
    created = next_sequence([], None, me="n1:1", leader=True)
    assert created == SequenceDecision(1, 1)
    updated = next_sequence(["n1:1-1", "n2:1-1"], 1, me="n1:1", leader=True)
    assert updated == SequenceDecision(2, 2)
    third = next_sequence(["n1:1-2", "n2:1-2"], 2, me="n1:1", leader=True)
    assert third == SequenceDecision(3, 3)
    # n1 dies, n2 still shows 2 while the maximum is 3: its own update is 4.
    fourth = next_sequence(["n2:1-2"], 3, me="n2:1", leader=True)
    assert fourth == SequenceDecision(4, 4)
    returned = next_sequence(["n2:1-4"], 4, me="n1:1", leader=False)
    assert returned == SequenceDecision(0, 4)
    assert holders_of_latest(["n2:1-4", "n1:1-0"]) == ["n2:1"]
