"""Task ranges: short, canonical, and refused when they are anything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.model.errors import Corrupt
from storm_dagster.model.ranges import check_ranges, decode_ranges, encode_ranges, highest_id


def test_runs_are_joined() -> None:
    assert encode_ranges([7, 1, 3, 2]) == "1-3,7"
    assert encode_ranges([]) == ""
    assert decode_ranges("1-3,7") == (1, 2, 3, 7)


@given(st.sets(st.integers(min_value=1, max_value=5_000), max_size=300))
def test_what_is_written_is_read_back(ids: set[int]) -> None:
    assert decode_ranges(encode_ranges(ids)) == tuple(sorted(ids))


def test_a_hundred_thousand_tasks_of_one_component_stay_short() -> None:
    assert len(encode_ranges(range(1, 100_001))) < 20


@pytest.mark.parametrize(
    "text",
    ["0", "1-", "-1", "3-1", "1,1", "1-3,2", "01", "1 ,2", "a", "1-3,", "1-99999999999", "\uff11"],
)
def test_damaged_or_forged_ranges_are_refused(text: str) -> None:
    with pytest.raises(Corrupt):
        decode_ranges(text)


def test_a_forged_range_does_not_fill_the_memory() -> None:
    with pytest.raises(Corrupt, match="more than"):
        decode_ranges("1-9999999999")


def test_ids_beyond_those_of_a_topology_are_checked_and_not_expanded() -> None:
    check_ranges("1-10000000")
    assert decode_ranges("1-10000000", highest=3) == (1, 2, 3)
    assert decode_ranges("2,5-9,100-9999999", highest=6) == (2, 5, 6)
    assert decode_ranges("7-9", highest=0) == ()
    with pytest.raises(Corrupt):
        decode_ranges("1-3,2-10000000", highest=1)


def test_the_highest_id_is_read_from_the_ends() -> None:
    assert highest_id(["1-3,7", "4-6", ""]) == 7
    assert highest_id([]) == 0
