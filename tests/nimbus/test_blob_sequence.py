"""Sequence numbers of blobs."""

from __future__ import annotations

import pytest

from storm_dagster.model.errors import Corrupt
from storm_dagster.nimbus.blobs.registry import BlobRecord, Registered, split_holder


def holders_of_latest(nodes: list[str]) -> list[str]:
    return Registered(
        "k", None, None, {node: split_holder(node) for node in nodes}
    ).newest_holders()


def next_sequence(nodes: list[str], maximum: int) -> int:
    record = BlobRecord(sequence=maximum, sha256="") if maximum else None
    return Registered(
        "k", record, None, {node: split_holder(node) for node in nodes}
    ).next_sequence()


def test_the_holders_of_the_highest_number_have_the_latest() -> None:
    assert holders_of_latest(["nimbus1:7800-1", "nimbus2:7800-2"]) == ["nimbus2:7800"]
    assert holders_of_latest(["nimbus1:7800-0"]) == []


def test_split_at_the_last_dash() -> None:
    assert split_holder("nimbus-1:7800-1") == ("nimbus-1:7800", 1)
    for damaged in ("nimbus", "nimbus-", "-1", "a:1-x", ""):
        with pytest.raises(Corrupt):
            split_holder(damaged)


@pytest.mark.parametrize(
    ("holders", "maximum", "expected"),
    [
        ([], 0, 1),  # first creation
        (["a:1-1"], 1, 2),  # the leader updates what it holds
        (["a:1-1", "b:1-1"], 1, 2),
        (["a:1-1"], 2, 3),  # the others lag behind the maximum
        (["a:1-2"], 2, 3),  # a new leader that was not listed
        ([], 3, 4),  # all nimbuses were down: another content has had the maximum
        (["a:1-2", "b:1-1"], 2, 3),  # mixed
        (["a:1-0"], 2, 3),  # it holds something, but not the newest
        (["a:1-3"], 2, 4),
    ],
)
def test_the_next_number_is_above_holders_and_maximum(
    holders: list[str], maximum: int, expected: int
) -> None:
    assert next_sequence(holders, maximum) == expected


def test_a_leader_that_returns_after_a_lost_update_is_behind() -> None:
    """Create, sync, update, sync; the leader updates to 3 and dies before the sync; the old leader
    returns.
    """
    assert next_sequence([], 0) == 1
    assert next_sequence(["n1:1-1", "n2:1-1"], 1) == 2
    assert next_sequence(["n1:1-2", "n2:1-2"], 2) == 3
    # n1 dies, n2 still shows 2 while the maximum is 3: its own update is 4.
    assert next_sequence(["n2:1-2"], 3) == 4
    assert holders_of_latest(["n2:1-4", "n1:1-3"]) == ["n2:1"]
