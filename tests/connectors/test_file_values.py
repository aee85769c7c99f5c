"""Files as independent readers get them: each value equal, or its row rejected."""

from __future__ import annotations

import csv
import json
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import dataset

from storm_dagster.connectors import FileSink, Rejected, Row
from storm_rigs.worker.tuple_values import LOOKALIKES, TUPLE_VALUES, same

FEW = settings(max_examples=max(10, settings().max_examples))
OFFLINE = {"autoinstall_known_extensions": "false", "threads": "1"}
"""DuckDB fetches no extension."""
KINDS: list[list[Any]] = [
    [0, 1, 2**62, None, 1.5, True],
    [0.5, 1, None, float("nan"), 2**53 + 1, Decimal("0.5")],
    ["a", "", "1", None, "\ud800", "a\0", 'quo"te', "a,b", "x\r\ny", "\ufeffa", " b "],
    [b"a", b"", None, "a", bytearray(b"b")],
    [True, False, None, 1],
    [date(2026, 1, 1), None, datetime(2026, 1, 1), date(1, 1, 1)],
    [datetime(2026, 1, 1, 1, 2, 3, 4), None, datetime(2026, 1, 1, tzinfo=timezone.utc)],
    [datetime(2026, 1, 1, tzinfo=timezone.utc), None, datetime(2026, 1, 1)],
    [Decimal("1.5"), None, 1, 0.25, Decimal("1e-19"), Decimal("1e30"), Decimal("NaN")],
    [[1, 2], [], None, [None], [1.5], ["a"], (3,)],
    [{"a": 1, "b": [1]}, {"a": None}, {"a": 2, "c": 3}, None, {}, {1: 2}],
]
"""Values that a column may get, of its type and of others."""
BATCHES = st.lists(TUPLE_VALUES, min_size=1, max_size=6) | st.sampled_from(KINDS).flatmap(
    lambda kind: st.lists(st.sampled_from(kind), min_size=1, max_size=6)
)


def write(sink: FileSink, values: list[Any]) -> dict[int, str]:
    """Write a row for each value but the rejected ones, and return these with their reasons."""
    kept = {n: Row({"n": n, "v": value}) for n, value in enumerate(values)}
    reasons: dict[int, str] = {}
    while kept:
        try:
            sink.write(list(kept.values()), 1)
            break
        except Rejected as rejected:
            numbers = list(kept)
            for index, reason in rejected.rows.items():
                reasons[numbers[index]] = reason
                del kept[numbers[index]]
    return reasons


def is_equal(sent: Any, returned: Any) -> bool:
    """True if a reader got the value: numbers by value, maps with null for keys that they lack."""
    if isinstance(sent, list | tuple) and isinstance(returned, list):
        pairs = zip(sent, returned, strict=True)
        return len(sent) == len(returned) and all(is_equal(one, other) for one, other in pairs)
    if isinstance(sent, dict) and isinstance(returned, dict):
        keys = sent.keys() | returned.keys()
        return all(is_equal(sent.get(key), returned.get(key)) for key in keys)
    if isinstance(sent, bool) != isinstance(returned, bool):
        return False
    if isinstance(sent, int | float | Decimal) and isinstance(returned, int | float | Decimal):
        if Decimal(sent).is_nan():
            return Decimal(returned).is_nan()
        digits = Decimal(repr(sent)) if isinstance(sent, float) else sent
        return sent == returned or digits == returned
    if isinstance(sent, bytearray):
        sent = bytes(sent)
    return type(sent) is type(returned) and sent == returned


@FEW
@given(BATCHES)
def test_parquet_gives_each_value_to_pyarrow_and_duckdb(values: list[Any]) -> None:
    with TemporaryDirectory() as folder:
        sink = FileSink(folder, "parquet")
        sink.open({}, "")
        reasons = write(sink, values)
        sink.close()
        rows: list[dict[str, Any]] = []
        with_duckdb: list[dict[str, Any]] = []
        if len(reasons) < len(values):
            rows = dataset.dataset(folder, format="parquet").to_table().to_pylist()
            with duckdb.connect(config=OFFLINE) as reader:
                found = reader.sql(f"from '{folder}/*.parquet' order by n")
                with_duckdb = [
                    dict(zip(found.columns, row, strict=True)) for row in found.fetchall()
                ]
    assert {row["n"] for row in rows} | reasons.keys() == set(range(len(values)))
    assert all("'v'" in reason and ": " in reason for reason in reasons.values())
    assert len(rows) + len(reasons) == len(values) == len(with_duckdb) + len(reasons)
    for row in [*rows, *with_duckdb]:
        assert is_equal(values[row["n"]], row.get("v")), (values[row["n"]], row)


@FEW
@given(BATCHES)
def test_csv_gives_each_value_to_a_reader_that_knows_the_types(values: list[Any]) -> None:
    with TemporaryDirectory() as folder:
        sink = FileSink(folder, "csv")
        sink.open({}, "")
        reasons = write(sink, values)
        schema = sink._dataset.schema if sink._dataset else None
        sink.close()
        lines: list[list[str]] = []
        for path in Path(folder).glob("*.csv"):
            with path.open(newline="", encoding="utf-8") as file:
                lines = list(csv.reader(file))
    if len(reasons) == len(values):
        return
    assert schema is not None and lines[0] == ["n", "v"]
    assert {int(n) for n, _ in lines[1:]} | reasons.keys() == set(range(len(values)))
    assert len(lines) - 1 + len(reasons) == len(values)
    column_type = schema.field("v").type
    for n, cell in lines[1:]:
        value = values[int(n)]
        if cell == "" and value != "":
            assert value is None
        else:
            assert is_equal(value, parsed(cell, column_type)), (value, cell, column_type)


def parsed(cell: str, column_type: pa.DataType) -> Any:
    """The value of a cell, by Python's own functions."""
    if pa.types.is_string(column_type):
        return cell
    if pa.types.is_boolean(column_type):
        return {"true": True, "false": False}[cell]
    if pa.types.is_integer(column_type):
        return int(cell)
    if pa.types.is_floating(column_type):
        return float(cell)
    if pa.types.is_decimal(column_type):
        return Decimal(cell)
    if pa.types.is_date(column_type):
        return date.fromisoformat(cell)
    return datetime.fromisoformat(cell.replace("Z", "+00:00"))


def test_csv_is_read_by_duckdb_and_pyarrow_with_null_apart_from_empty_text(tmp_path: Path) -> None:
    sink = FileSink(str(tmp_path), "csv")
    sink.open({}, "")
    moment = datetime(2026, 1, 1, 1, 2, 3, 4)
    rows = [
        {"n": 1, "t": "", "at": moment, "ok": True, "x": 0.1},
        {"n": 2, "t": None, "at": None, "ok": None, "x": None},
        {"n": 3, "t": 'a,"b"\nc', "at": moment, "ok": False, "x": 1e300},
        {"n": 4, "t": "null", "at": moment, "ok": False, "x": float("inf")},
    ]
    sink.write([Row(row) for row in rows], 1)
    sink.close()
    (path,) = tmp_path.glob("*.csv")
    with duckdb.connect(config=OFFLINE) as reader:
        options = "header=true, nullstr='', allow_quoted_nulls=false"
        found = reader.sql(f"from read_csv('{path}', {options}) order by n")
        assert [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()] == rows
    from pyarrow import csv as arrow_csv

    options = arrow_csv.ConvertOptions(
        strings_can_be_null=True, quoted_strings_can_be_null=False, null_values=[""]
    )
    parse = arrow_csv.ParseOptions(newlines_in_values=True)
    table = arrow_csv.read_csv(path, convert_options=options, parse_options=parse)
    for name in ("n", "t", "ok", "x"):
        assert table.column(name).to_pylist() == [row[name] for row in rows]


@FEW
@given(st.lists(TUPLE_VALUES, min_size=1, max_size=6))
def test_json_lines_give_each_value_to_a_reader_of_json(values: list[Any]) -> None:
    with TemporaryDirectory() as folder:
        sink = FileSink(folder)
        sink.open({}, "")
        reasons = write(sink, values)
        sink.close()
        lines: list[str] = []
        for path in Path(folder).glob("*.jsonl"):
            lines = path.read_bytes().decode().removesuffix("\n").split("\n")
    rows = [json.loads(line) for line in lines]
    assert all("at .v" in reason for reason in reasons.values())
    assert {row["n"] for row in rows} | reasons.keys() == set(range(len(values)))
    for row in rows:
        assert same(row["v"], values[row["n"]])


ODD: list[tuple[str, list[Any], str]] = [
    (
        "parquet",
        [1, "two"],
        "the column is int64, and the value is of type str: convert it, or declare",
    ),
    ("parquet", [1, 1.5], ""),
    ("parquet", [1.5, 2**53 + 1], "the column is double, which would change 9007199254740993"),
    ("parquet", [1, 10**400], "the column is int64, which would change 1000"),
    ("parquet", ["a", 1], "the column is string, and the value is of type int"),
    ("parquet", [datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=timezone.utc)], "has an offset"),
    ("parquet", [[1], ["a"]], "at [0]: the column is int64"),
    ("parquet", [{"a": 1}, {"a": "x"}], "at .a: the column is int64"),
    ("parquet", [1, {1, 2}], "the value is of type set"),
    ("parquet", [None, {}], "the type of the parts of {} is not known yet: declare it in schema"),
    ("parquet", [None, {"a": {}}], "the type of the parts of {'a': {}} is not known yet"),
    ("parquet", [{"a": 1}, {"": 1}], "the schema has no key ''"),
    ("parquet", [{"a": 1}, {"A": 1}], "the schema has no key 'A'"),
    ("csv", [1, [1]], "'v': CSV has no form of a value of type list: make it text in row_of"),
    ("csv", [None, b"a"], "'v': CSV has no form of a value of type bytes: make it text in row_of"),
    ("csv", ["a", "b\0"], "CSV has no NUL character"),
    ("jsonl", [1, b"a"], "at .v: JSON has no form of a value of type bytes"),
    ("jsonl", [1, float("nan")], "at .v: nan is not a number of JSON"),
]


@pytest.mark.parametrize(("format", "values", "reason"), ODD)
def test_only_the_row_that_does_not_fit_is_rejected(
    format: Any, values: list[Any], reason: str, tmp_path: Path
) -> None:
    sink = FileSink(str(tmp_path), format)
    sink.open({}, "")
    reasons = write(sink, values)
    sink.close()
    assert list(reasons) == ([1] if reason else [])
    assert reason in reasons.get(1, "")
    assert len(list(tmp_path.glob(f"*.{format}"))) == 1


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_a_time_of_pandas_with_nanoseconds_is_rejected(format: Any, tmp_path: Path) -> None:
    sink = FileSink(str(tmp_path), format)
    sink.open({}, "")
    exact = pd.Timestamp("2026-01-01 00:00:00.000001")
    reasons = write(sink, [exact, exact + pd.Timedelta(1, "ns")])
    assert list(reasons) == [1] and "would change" in reasons[1]
    sink.close()


def test_no_value_that_looks_like_another_one_changes_in_a_column_of_text(tmp_path: Path) -> None:
    texts = [value for value in LOOKALIKES if isinstance(value, str) and value != "\ud800"]
    sink = FileSink(str(tmp_path), "parquet")
    sink.open({}, "")
    assert write(sink, texts) == {}
    sink.close()
    table = dataset.dataset(tmp_path, format="parquet").to_table()
    assert table.column("v").to_pylist() == texts
