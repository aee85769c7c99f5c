"""One schema of all files of a folder, whatever tasks, releases and readers do."""

from __future__ import annotations

import contextlib
import json
import threading
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import pyarrow as pa
import pytest
from pyarrow import dataset, parquet

from storm_dagster.api import Grouping, TopologyBuilder
from storm_dagster.connectors import FileSink, Rejected, Row, SinkBolt
from storm_dagster.connectors.exclusive_create import create_object
from storm_dagster.connectors.file_schema import (
    declared_schema,
    decode_schema,
    encode_schema,
    inferred_schema,
    with_declared,
)
from storm_dagster.model.errors import Corrupt, InvalidRequest
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import patience
from storm_rigs.components import CollectBolt, InputSpout


def opened(folder: Any, owner: str = "", conf: Any = None, **options: Any) -> FileSink:
    """A sink of Parquet files in the folder."""
    sink = FileSink(str(folder), options.pop("format", "parquet"), **options)
    sink.open(conf or {}, owner)
    return sink


def rows_of(*values: Any) -> list[Row]:
    return [Row(value if isinstance(value, dict) else {"v": value}) for value in values]


def refused(sink: FileSink, rows: list[Row], token: int = 1) -> dict[int, str]:
    """Write the rows but the rejected ones, and return these with their reasons."""
    try:
        sink.write(rows, token)
    except Rejected as rejected:
        kept = [row for index, row in enumerate(rows) if index not in rejected.rows]
        if kept:
            sink.write(kept, token)
        return rejected.rows
    return {}


def schemas_in(folder: Path) -> set[str]:
    """The different schemas of the files."""
    return {
        str(parquet.read_schema(path).remove_metadata())
        for path in sorted(folder.glob("*.parquet"))
    }


def values_in(folder: Path, column: str = "v") -> list[Any]:
    """Values of a column as pyarrow reads the folder; DuckDB gets the same."""
    table = dataset.dataset(folder, format="parquet").to_table()
    values = table.column(column).to_pylist()
    offline = {"autoinstall_known_extensions": "false", "threads": "1"}
    with duckdb.connect(config=offline) as reader:
        found = reader.sql(f"select {column} from '{folder}/*.parquet'").fetchall()
    assert sorted(map(repr, [value for (value,) in found])) == sorted(map(repr, values))
    return values


def test_all_files_have_the_schema_of_the_first_batch(tmp_path: Path) -> None:
    first, second = opened(tmp_path, "a"), opened(tmp_path, "b")
    assert refused(first, rows_of(1, 2)) == {}
    assert list(refused(second, rows_of("x", 3, None, 4.0, 4.5))) == [0, 4]
    third = opened(tmp_path, "c")
    assert refused(third, rows_of(2.0)) == {}
    assert len(schemas_in(tmp_path)) == 1
    assert sorted(values_in(tmp_path), key=str) == [1, 2, 2, 3, 4, None]


def test_a_column_of_none_waits_for_its_type(tmp_path: Path) -> None:
    first, second = opened(tmp_path, "a"), opened(tmp_path, "b")
    batch = rows_of({"n": 1, "v": None, "w": None})
    assert refused(first, batch) == {} and refused(second, batch) == {}
    assert refused(second, rows_of({"n": 2, "v": "text", "w": None}), 2) == {}
    # The first task learns the type from the folder.
    reasons = refused(first, rows_of({"n": 3, "v": 7}, {"n": 4, "v": "more"}), 2)
    assert list(reasons) == [0] and "column 'v': the column is string" in reasons[0]
    fields = [{"n": "int64"}, {"n": "int64", "v": "string"}]
    assert schemas_in(tmp_path) == {
        str(pa.schema([(name, kind) for name, kind in each.items()])) for each in fields
    }
    merged = pa.unify_schemas([parquet.read_schema(path) for path in tmp_path.glob("*.parquet")])
    table = dataset.dataset(tmp_path, schema=merged, format="parquet").to_table().sort_by("n")
    assert table.column("v").to_pylist() == [None, None, "text", "more"]


def test_parts_of_maps_and_lists_wait_for_their_types(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    reasons = refused(sink, rows_of({"n": 1, "v": {"a": None, "b": []}}, {"n": 2, "v": None}))
    assert list(reasons) == [0] and "the type of the parts of" in reasons[0]
    assert refused(sink, rows_of({"n": 3, "v": {"a": 1, "b": ["x"]}})) == {}
    assert refused(sink, rows_of({"n": 4, "v": {"a": None, "b": []}})) == {}
    reasons = refused(sink, rows_of({"n": 5, "v": {"c": 1}}))
    assert "the schema has no key 'c' here: declare it" in reasons[0]


def test_an_open_key_of_a_map_is_left_out(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    values = [{"a": 1, "b": None}, {"a": 2}, {"b": None}, None]
    assert refused(sink, rows_of(*[{"v": value} for value in values])) == {}
    assert values_in(tmp_path) == [{"a": 1}, {"a": 2}, {"a": None}, None]
    assert refused(sink, rows_of({"v": [{"a": 1}]}))[0].startswith(
        "column 'v': the column is struct"
    )
    assert refused(sink, rows_of({"v": {"a": 3, "b": "x"}})) == {}
    newest = max(tmp_path.glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    assert parquet.read_table(newest).to_pylist() == [{"v": {"a": 3, "b": "x"}}]


def test_rows_without_any_type_are_rejected(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    reasons = refused(sink, rows_of({}, {"v": None}))
    assert list(reasons) == [0, 1] and "no column has a type yet: declare" in reasons[1]
    assert refused(sink, rows_of({"v": 1}, {})) == {}


def test_a_new_column_needs_a_declared_schema(tmp_path: Path) -> None:
    sink = opened(tmp_path, "a")
    assert refused(sink, rows_of({"n": 1})) == {}
    reasons = refused(sink, rows_of({"n": 2}, {"n": 3, "more": "x"}), 2)
    assert list(reasons) == [1]
    assert "the dataset has no column 'more': declare it in schema of the FileSink" in reasons[1]
    declared = opened(tmp_path, "a", schema={"n": int, "more": str})
    assert refused(declared, rows_of({"n": 4, "more": "y"}), 3) == {}
    # A task of the release before goes on, with the columns that it knows.
    assert refused(opened(tmp_path, "b"), rows_of({"n": 5})) == {}
    table = pa.concat_tables(
        [parquet.read_table(path) for path in sorted(tmp_path.glob("*.parquet"))],
        promote_options="default",
    )
    assert sorted(table.column("n").to_pylist()) == [1, 2, 4, 5]
    assert sorted(map(str, table.column("more").to_pylist())) == ["None"] * 3 + ["y"]


def test_a_declared_schema_does_not_change_a_column(tmp_path: Path) -> None:
    assert refused(opened(tmp_path), rows_of({"n": 1, "v": None})) == {}
    for schema in ({"n": str}, pa.schema([("n", pa.int32())])):
        with pytest.raises(InvalidRequest, match=r"declares the column 'n' as .* have int64"):
            opened(tmp_path, schema=schema)
    with pytest.raises(InvalidRequest, match="without the column 'm', which is declared as not"):
        opened(tmp_path, schema=pa.schema([pa.field("m", pa.int64(), nullable=False)]))
    # A column without a type takes the declared one; one that is not declared stays.
    sink = opened(tmp_path, schema={"v": datetime})
    moment = datetime(2026, 1, 1, tzinfo=timezone.utc)
    assert refused(sink, rows_of({"n": 2, "v": moment})) == {}


def test_a_declared_schema_of_arrow_holds_its_types(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            pa.field("n", pa.int32(), nullable=False),
            ("price", pa.decimal128(6, 2)),
            ("at", pa.timestamp("ms", "UTC")),
            ("tags", pa.map_(pa.string(), pa.int64())),
            ("kind", pa.dictionary(pa.int32(), pa.string())),
            ("x", pa.float32()),
        ]
    )
    sink = opened(tmp_path, schema=schema)
    at = datetime(2026, 1, 1, 0, 0, 0, 5000, timezone.utc)
    good = {"n": 1, "price": 1.25, "at": at, "tags": {"a": 1}, "kind": "k", "x": 0.5}
    odd = [
        {"n": 2**31},
        {"n": None},
        {"n": 1, "price": "1.25"},
        {"n": 1, "price": 1.255},
        {"n": 1, "at": at.replace(microsecond=1)},
        {"n": 1, "tags": {1: 1}},
        {"n": 1, "kind": 7},
        {"n": 1, "x": 0.1},
    ]
    assert list(refused(sink, rows_of(good, *odd))) == list(range(1, 9))
    (path,) = tmp_path.glob("*.parquet")
    (row,) = parquet.read_table(path).to_pylist()
    assert {**row, "tags": dict(row["tags"]), "price": float(row["price"])} == good


def test_csv_refuses_declared_types_without_a_form(tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int64()), ("d", pa.duration("us")), ("b", pa.binary(2))])
    sink = opened(tmp_path, format="csv", schema=schema)
    reasons = refused(sink, rows_of({"n": 1}, {"n": 2, "d": timedelta(1)}, {"n": 3, "b": b"ab"}))
    assert "column 'd': CSV has no form of duration" in reasons[1]
    assert (
        "column 'b': CSV has no form of a value of type bytes" in reasons[2] and len(reasons) == 2
    )


def test_json_lines_have_a_schema_only_if_it_is_declared(tmp_path: Path) -> None:
    free = opened(tmp_path / "free", format="jsonl")
    assert refused(free, rows_of({"v": 1}, {"v": "x", "w": [1, "a"]})) == {}
    assert not (tmp_path / "free" / "_schema").exists()
    bound = opened(tmp_path / "bound", format="jsonl", schema={"v": int})
    assert list(refused(bound, rows_of({"v": 1}, {"v": "x"}, {"w": 1}))) == [1, 2]


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_files_of_earlier_releases_stay_as_they_are(format: Any, tmp_path: Path) -> None:
    old = tmp_path / f"me-000000000001-0123456789abcdef.{format}"
    old.write_bytes(b"an old file")
    sink = FileSink(str(tmp_path), format)
    assert sink.open({}, "me") == 1
    assert refused(sink, rows_of(1, "x"), 2) == {1: refused(sink, rows_of("x"), 3)[0]}
    assert old.read_bytes() == b"an old file"


DAMAGED = [
    b"",
    b"{",
    b"[]",
    b'{"storm_dagster_schema": 2}',
    b'{"storm_dagster_schema": 1, "columns": {}, "arrow": "AAAA"}',
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_schema_is_named_and_nothing_is_written(content: bytes, tmp_path: Path) -> None:
    assert refused(opened(tmp_path), rows_of(1)) == {}
    path = tmp_path / "_schema" / "000001.json"
    whole = path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(Corrupt, match=r"_schema/000001.json is damaged .*: restore the object"):
        opened(tmp_path)
    path.write_bytes(whole)
    assert refused(opened(tmp_path), rows_of(2)) == {}
    assert sorted(values_in(tmp_path)) == [1, 2]


def fill(disk: Path) -> Path:
    """Write a file that leaves no room on a small disk."""
    filler = disk / ".filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


def test_a_disk_that_fills_between_the_files_of_two_tasks_loses_no_row(small_disk: Path) -> None:
    folder = small_disk / "rows"
    first, second = opened(folder, "a"), opened(folder, "b")
    first.write(rows_of(1, 2), 1)
    filler = fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        second.write(rows_of(3), 1)
    assert values_in(folder) == [1, 2]
    filler.unlink()
    # As the bolt does after an error.
    second.close()
    again = FileSink(str(folder), "parquet")
    assert again.open({}, "b") == 0
    again.write(rows_of(3), 1)
    assert sorted(values_in(folder)) == [1, 2, 3]
    assert len(schemas_in(folder)) == 1


def test_a_full_disk_leaves_no_part_of_a_schema(small_disk: Path) -> None:
    folder = small_disk / "rows"
    sink = opened(folder, "a")
    filler = fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        sink.write(rows_of(1), 1)
    filler.unlink()
    sink.close()
    other = opened(folder, "b")
    other.write(rows_of("text"), 1)
    assert values_in(folder) == ["text"]


def test_an_object_of_other_columns_than_its_schema_is_damaged() -> None:
    document = json.loads(encode_schema(pa.schema([("n", pa.int64())])))
    document["columns"]["n"] = "string"
    with pytest.raises(Corrupt, match="its columns and its schema of Arrow differ"):
        decode_schema(json.dumps(document).encode(), "path")


SCHEMAS = [
    (["n"], "a map of columns to types"),
    ({}, "a map of columns to types"),
    ({"n": complex}, "'n' of a FileSink: .* is not a type of a field, use one of str, int, float"),
    (pa.schema([("n", pa.int64()), ("n", pa.string())]), "a column twice, or none"),
]


@pytest.mark.parametrize(("schema", "reason"), SCHEMAS)
def test_another_object_as_schema_is_refused(schema: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        opened(tmp_path, schema=schema)


PARTS_WITHOUT_NULL: list[tuple[pa.DataType, Any, list[Any], str]] = [
    (
        pa.struct([pa.field("a", pa.int64(), nullable=False), ("b", pa.int64())]),
        {"a": 1},
        [{}, {"a": None}, {"b": 2}],
        "at .a",
    ),
    (pa.list_(pa.field("item", pa.int64(), nullable=False)), [1], [[1, None]], "at [1]"),
    (
        pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False)),
        {"k": 1},
        [{"k": None}],
        "at ['k']",
    ),
    (
        pa.list_(pa.struct([pa.field("a", pa.string(), nullable=False)])),
        [{"a": "x"}],
        [[{"a": "x"}, {}]],
        "at [1]: at .a",
    ),
]


@pytest.mark.parametrize(("kind", "fitting", "wrong", "place"), PARTS_WITHOUT_NULL)
def test_a_part_that_must_not_be_null_rejects_its_row_alone(
    kind: pa.DataType, fitting: Any, wrong: list[Any], place: str, tmp_path: Path
) -> None:
    sink = FileSink(str(tmp_path), "parquet", schema=pa.schema([("n", pa.int64()), ("v", kind)]))
    sink.open({}, "")
    rows = [Row({"n": 0, "v": fitting}), *(Row({"n": 1, "v": value}) for value in wrong)]
    with pytest.raises(Rejected) as refused:
        sink.write(rows, 1)
    assert list(refused.value.rows) == list(range(1, len(rows)))
    assert all(place in reason and "'v'" in reason for reason in refused.value.rows.values())
    sink.write([rows[0], Row({"n": 2, "v": None})], 1)


@pytest.mark.parametrize(
    "kind",
    [
        pa.month_day_nano_interval(),
        pa.run_end_encoded(pa.int32(), pa.int64()),
        pa.dense_union([pa.field("i", pa.int64())]),
        pa.decimal128(5, -2),
        pa.list_(pa.month_day_nano_interval()),
    ],
    ids=str,
)
def test_a_declared_type_that_parquet_lacks_is_refused_at_open(
    kind: pa.DataType, tmp_path: Path
) -> None:
    sink = FileSink(str(tmp_path), "parquet", schema=pa.schema([("n", pa.int64()), ("v", kind)]))
    with pytest.raises(InvalidRequest, match="column 'v' of a FileSink: Parquet has no form"):
        sink.open({}, "")


def test_the_order_of_declarations_decides_no_type() -> None:
    known = inferred_schema(None, [{"a": 1, "b": None}, {"c": [None]}])
    declared = declared_schema({"b": str, "d": float})
    assert declared is not None
    merged = with_declared(known, declared, "url")
    assert merged.names == ["a", "b", "c", "d"]
    assert with_declared(merged, declared, "url") == merged


def test_one_of_many_tasks_creates_the_schema(target: tuple[dict[str, Any], str, Any]) -> None:
    conf, url, fs = target
    path = f"{url.removeprefix('s3://')}/_schema/000001.json"
    starting = threading.Barrier(8)
    results: list[tuple[bool, bytes]] = []

    def create(content: bytes) -> None:
        starting.wait(patience(30))
        results.append((create_object(fs, path, content), content))

    threads = [threading.Thread(target=create, args=[b"%d" % n * 1000]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(30))
    (winner,) = [content for is_created, content in results if is_created]
    assert len(results) == 8 and fs.cat_file(path) == winner
    fs.rm(path)
    # Tasks that begin at once with other types agree on one of them.
    sinks = [FileSink(url, "parquet") for _ in range(3)]
    for number, sink in enumerate(sinks):
        sink.open(conf, f"t/a/{number}")
    values = [1, "x", 2.5]
    reasons = [refused(sink, rows_of(value)) for sink, value in zip(sinks, values, strict=True)]
    assert reasons[0] == {} and list(reasons[1]) == [0] and list(reasons[2]) == [0]
    for sink in sinks:
        sink.close()


def test_a_file_system_without_links_creates_the_schema_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    fs = fsspec.filesystem("file")
    path = str(tmp_path / "_schema" / "000001.json")
    assert create_object(fs, path, b"a") and not create_object(fs, path, b"b")
    assert fs.cat_file(path) == b"a" and len(fs.ls(str(tmp_path / "_schema"))) == 1


def test_a_store_without_conditions_is_checked_and_written(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    path = f"/{tmp_path.name}/_schema/000001.json"
    assert create_object(fs, path, b"a") and not create_object(fs, path, b"b")
    assert fs.cat_file(path) == b"a"


class Archived(SinkBolt):
    batch_rows = 20
    record_id = "n"
    exactly_once = True


def run_release(
    folder: Path, state: Path, tasks: int, rows: list[list[Any]], **options: Any
) -> Any:
    """A release of a topology that writes the rows with so many tasks; its rejected rows."""
    sink = FileSink(str(folder), "parquet", **options)
    globals()["Archived"] = bolt = type(
        "Archived", (Archived,), {"sink": sink, "__module__": __name__}
    )
    builder = TopologyBuilder("archive")
    builder.set_spout("days", InputSpout, outputs=["n", "at", "amount", "note"])
    archive = builder.set_bolt("archive", bolt, inputs={"days": Grouping.fields("n")}, par=tasks)
    builder.set_bolt("note", CollectBolt, inputs={archive["rejected"]: Grouping.GLOBAL})
    CollectBolt.everything.clear()
    with TopologyHarness(builder, {"days": rows}, simulated=True, state_dir=state) as harness:
        result = harness.advance(6)
    assert len(result.acked["days"]) == len(rows)
    return [row["n"] for row, _ in CollectBolt.everything]


def a_day(tmp_path: Path) -> tuple[Path, dict[int, Any]]:
    """A folder that two tasks have written, then three, then a later release; and its rows."""
    folder = tmp_path / "day"
    expected: dict[int, Any] = {}
    moment = datetime(2026, 1, 1, tzinfo=timezone.utc)

    def part(first: int, count: int, amounts: list[Any]) -> list[list[Any]]:
        rows: list[list[Any]] = []
        for n in range(first, first + count):
            amount = amounts[n % len(amounts)]
            row = [n, moment.replace(minute=n % 60), amount, None if n % 3 else f"note {n}"]
            rows.append(row)
            if amount is None or isinstance(amount, int | float):
                expected[n] = row
        return rows

    state = tmp_path / "state"
    bad = run_release(folder, state, 2, part(0, 100, [0.5, 1, None, 2.5]))
    bad += run_release(folder, state, 3, part(100, 100, [3, "x", 4.0]))
    declared = {"n": int, "at": datetime, "amount": float, "note": str}
    bad += run_release(folder, state, 2, part(200, 100, [1.5, b"y", 7]), schema=declared)
    assert sorted(bad) == [n for n in range(300) if n not in expected] and bad
    return folder, expected


def test_a_day_of_tasks_and_releases_is_one_dataset(tmp_path: Path) -> None:
    folder, expected = a_day(tmp_path)
    assert len(schemas_in(folder)) == 1
    rows = dataset.dataset(folder, format="parquet").to_table().to_pylist()
    assert {row["n"]: list(row.values()) for row in rows} == expected
    assert len(rows) == len(expected) == len(values_in(folder, "n"))


def read_with_spark(remote: str, folders: list[Path]) -> list[list[dict[str, Any]]]:
    """The rows of Parquet files in each folder, by the column ``n``, as Spark sends them."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.remote(remote).create()
    try:
        session.conf.set("spark.sql.session.timeZone", "UTC")
        frames = [session.read.parquet(str(folder)).orderBy("n") for folder in folders]
        return [frame.toArrow().to_pylist() for frame in frames]
    finally:
        session.stop()


@pytest.mark.long
@pytest.mark.spark
def test_spark_reads_the_day_and_every_type(tmp_path: Path, spark_remote: str) -> None:
    folder, expected = a_day(tmp_path)
    every = tmp_path / "types"
    row = {
        "n": 1, "t": "x\0é", "f": float("inf"), "b": True, "raw": b"\xff", "d": date(1, 1, 1),
        "at": datetime(1600, 1, 1, 0, 0, 0, 1, timezone.utc), "local": datetime(2026, 1, 1, 12),
        "l": [1, None], "m": {"a": [1.5], "b": None}, "none": None,
    }  # fmt: skip
    assert refused(opened(every), rows_of(row, {**row, "n": 2, "m": {"a": [], "b": "x"}})) == {}
    rows, kinds = read_with_spark(spark_remote, [folder, every])
    assert {row["n"]: list(row.values()) for row in rows} == expected
    first = {**row, "m": {"a": [1.5], "b": None}}
    del first["none"]
    assert kinds[0] == first
