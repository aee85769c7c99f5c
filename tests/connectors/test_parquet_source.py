"""Files of Parquet as other programs write them: each row equal, or rejected alone."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta, timezone
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from storm_dagster.api import Topology
from storm_dagster.connectors import FileSource, SourceSpout
from storm_dagster.connectors.file_rows import FileRow, parquet_rows
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually

NANOS: list[pa.DataType] = [pa.timestamp("ns"), pa.time64("ns"), pa.duration("ns")]


def rows_of(table: pa.Table, **options: Any) -> list[FileRow]:
    """The rows of a file with the table."""
    file = BytesIO()
    parquet.write_table(table, file, **options)
    file.seek(0)
    return list(parquet_rows(file))


def numbered(numbers: list[int | None], kind: pa.DataType) -> pa.Table:
    """A column of a type that is a whole number inside."""
    whole = pa.int32() if kind == pa.date32() else pa.int64()
    return pa.table({"v": pa.array(numbers, whole).cast(kind)})


@given(
    st.sampled_from(NANOS),
    st.lists(st.none() | st.integers(0, 86_399 * 10**9), min_size=1, max_size=5),
)
def test_nanoseconds_are_read_exactly_or_their_row_is_rejected(
    kind: pa.DataType, numbers: list[int | None]
) -> None:
    rows = rows_of(numbered(numbers, kind))
    assert len(rows) == len(numbers)
    for number, row in zip(numbers, rows, strict=True):
        if number is not None and number % 1000:
            assert f"column 'v' ({kind}) has no value of Python" in row.error
            continue
        assert not row.error
        if number is None:
            assert row.value == {"v": None}
            continue
        since = timedelta(microseconds=number // 1000)
        expected: Any = since
        if pa.types.is_timestamp(kind):
            expected = datetime(1970, 1, 1) + since
        elif pa.types.is_time(kind):
            expected = (datetime(1970, 1, 1) + since).time()
        assert type(row.value["v"]) is type(expected) and row.value["v"] == expected


def test_times_of_int96_are_read_in_every_year() -> None:
    times = [datetime(1, 1, 1), datetime(2026, 1, 1, 1, 2, 3, 4), datetime(9999, 12, 31), None]
    table = pa.table({"v": pa.array(times, pa.timestamp("us"))})
    rows = rows_of(table, use_deprecated_int96_timestamps=True)
    assert [row.value["v"] for row in rows] == times
    assert all(type(row.value["v"]) in (datetime, type(None)) for row in rows)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (pa.timestamp("us"), [9 * 10**18, 0]),
        (pa.timestamp("s"), [10**12, 0]),
        (pa.date32(), [2**31 - 1, 0]),
        (pa.date32(), [-(10**6), 0]),
    ],
    ids=str,
)
def test_a_row_outside_of_pythons_years_is_rejected_alone(
    kind: pa.DataType, numbers: list[int]
) -> None:
    first, second = rows_of(numbered(list(numbers), kind))
    assert "column 'v' (" in first.error and "has no value of Python: " in first.error
    assert not second.error and second.value["v"] in (date(1970, 1, 1), datetime(1970, 1, 1))


def test_nested_times_dictionaries_and_nulls_are_values() -> None:
    moment = datetime(2026, 1, 1, 1, 2, 3, 4)
    values: list[Any] = [
        {"at": [moment, None], "part": {"of": time(1, 2)}, "by": [("a", timedelta(1))]},
        {"at": None, "part": None, "by": []},
        None,
    ]
    kind = pa.struct(
        {
            "at": pa.list_(pa.timestamp("ns")),
            "part": pa.struct({"of": pa.time64("ns")}),
            "by": pa.map_(pa.string(), pa.duration("ns")),
        }
    )
    table = pa.table(
        {
            "v": pa.array(values, kind),
            "word": pa.array(["a", None, "a"]).dictionary_encode(),
            "zoned": pa.array([moment, None, moment], pa.timestamp("ns", "Europe/Berlin")),
            "nothing": pa.nulls(3),
        }
    )
    rows = [row.value for row in rows_of(table)]
    assert [row["v"] for row in rows] == values
    assert [row["word"] for row in rows] == ["a", None, "a"]
    assert rows[0]["zoned"] == moment.replace(tzinfo=timezone.utc)
    assert all(row["nothing"] is None for row in rows)


@pytest.mark.parametrize(
    "table",
    [
        pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]),
        pa.table({"v": pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])}),
    ],
    ids=["columns", "fields"],
)
def test_a_name_that_occurs_twice_is_an_error_of_the_file(table: pa.Table) -> None:
    with pytest.raises(ValueError, match="its schema has 'a' twice: rename a column or field"):
        rows_of(table)


class Rows(SourceSpout):
    source = FileSource("unset/*.parquet")
    outputs = ["n", "text"]


class Reading(Topology):
    rows = Rows.spec()


def test_text_that_is_not_utf_8_is_a_dead_letter_with_file_and_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets = pa.array([0, 1, 2], pa.int32()).buffers()[1]
    text = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"\xffa"))
    path = tmp_path / "in.parquet"
    parquet.write_table(pa.table({"n": [1, 2], "text": text}), path)
    monkeypatch.setattr(Rows, "source", FileSource(str(path)))
    with TopologyHarness(Reading, state_dir=tmp_path / "state") as harness:
        eventually(lambda: harness.run().values("rows"), 60, "the row after it")
        result = harness.run()
        assert result.values("rows") == [[2, "a"]] and not result.errors
    (letter,) = result.dead_letters
    assert f"{path}, row 1: column 'text' (string) has no value of Python" in letter["error"]
