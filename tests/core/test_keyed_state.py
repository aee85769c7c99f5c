"""Contents of a task's state."""

from __future__ import annotations

import pytest

from storm_dagster.core.dataplane.keyed_state import (
    Checkpoint,
    Contents,
    LargeMap,
    encode_entry,
    frame,
    join_encoded,
    read_log,
)
from storm_dagster.core.dataplane.window_state import HeldTuple, WindowPosition
from storm_dagster.model.errors import Corrupt


def test_much_state_is_written_and_read_in_small_pieces() -> None:
    many = 60_000
    written = Contents(
        {f"k{n}": n for n in range(many)}, {f"new{n}": n for n in range(2500)}, {("old", 1): 7}
    )
    records = list(written.snapshot())
    assert records[0].full and max(len(one.values) + len(one.ids) for one in records) <= 1000
    read, again = Contents(), Contents(encoded=True)
    for record in read_log(b"".join(map(frame, records)), "log"):
        read.apply(record)
        again.apply(record)
    assert (dict(read.values), read.ids, read.old_ids) == (
        written.values,
        written.ids,
        written.old_ids,
    )
    copied = Contents()
    for record in again.snapshot():
        copied.apply(record)
    assert isinstance(copied.values, LargeMap) and dict(copied.values) == written.values
    values = copied.values
    values["k1"] = "new"
    del values["k2"]
    assert (
        values.pop("k3") == 3
        and values.get("k3", 9) == 9
        and "k2" not in values
        and values["k1"] == "new"
    )
    assert len(values) == many - 2 == len(list(values)) and values.setdefault("k4", 0) == 4
    while values:
        values.popitem()
    assert len(values) == 0


@pytest.mark.parametrize("zeros", [1, 7, 8, 9, 64, 5000])
def test_zeros_that_a_power_cut_left_at_the_end_are_no_damage(zeros: int) -> None:
    records = list(Contents({"k": 1}).snapshot())
    whole = b"".join(map(frame, records))
    assert list(read_log(whole + b"\0" * zeros, "log")) == list(read_log(whole, "log"))
    if zeros >= 8:
        # A whole head of zeros, and something behind it.
        with pytest.raises(Corrupt, match="damaged"):
            list(read_log(whole + b"\0" * zeros + b"rest of a record", "log"))


def test_many_tuples_of_windows_are_written_and_read_in_small_pieces() -> None:
    many = 25_000
    written = Contents(windows=WindowPosition(shape=[1], watermark=7))
    for number in range(many):
        written.held[number] = (
            number % 3,
            encode_entry(HeldTuple(number, number, ["c", "s", 1, [number]], "key")),
        )
    written.results = {number: join_encoded(["default", [number], None]) for number in range(2500)}
    records = list(written.snapshot())
    assert max(len(one.held) + len(one.results) for one in records) <= 1000
    for encoded in (False, True):
        read = Contents(encoded=encoded)
        for record in read_log(b"".join(map(frame, records)), "log"):
            read.apply(record)
        assert read.windows == written.windows and list(map(bytes, read.results.values())) == list(
            map(bytes, written.results.values())
        )
        assert sorted((entry.number, entry.item[3][0], entry.key) for entry in read.entries()) == [
            (number, number, "key") for number in range(many)
        ]
        assert isinstance(read.held, LargeMap) and {owner for owner, _ in read.held.values()} == {
            0,
            1,
            2,
        }
        read.apply(Checkpoint(finished=[5], confirmed=[6]))
        assert 5 not in read.held and 6 not in read.results


def test_ids_are_handed_out_when_two_generations_have_passed() -> None:
    contents = Contents(ids={("words", "default", n): n for n in range(50_000)})
    assert contents.rotate_ids() == {} and len(contents.old_ids) == 50_000
    # As many may come again: a table in parts grows without a long stop.
    assert isinstance(contents.ids, LargeMap)
    contents.ids["new"] = 1
    forgotten = contents.rotate_ids()
    assert len(forgotten) == 50_000 and dict(contents.old_ids) == {"new": 1} and contents.ids == {}
    for left in range(49_999, -1, -1):
        forgotten.popitem()
        assert len(forgotten) == left
    assert dict(contents.old_ids) == {"new": 1}


def test_forgotten_ids_count_as_applied_in_no_generation() -> None:
    records = [
        Checkpoint(ids=[(1, "old"), (2, ["c", "s", 1])]),
        Checkpoint(rotated=True, ids=[(3, "new"), (4, "kept")]),
        Checkpoint(ids=[(5, "both")], forgotten=["old", ("c", "s", 1), "new", "both", "unknown"]),
    ]
    for encoded in (False, True):
        contents = Contents(encoded=encoded)
        for record in read_log(b"".join(map(frame, records)), "log"):
            contents.apply(record)
        assert dict(contents.ids) == {"kept": 4} and dict(contents.old_ids) == {}
