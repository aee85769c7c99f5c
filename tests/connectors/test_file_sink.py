"""Files that are whole or not there, on a file system and on an S3 server."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from storm_dagster.connectors import FileSink, Rejected, Row
from storm_dagster.connectors.file_sink import file_name_of
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_rigs.stage.sink_rig import SinkRig


def numbers(*found: int) -> list[Row]:
    return [Row({"n": n}) for n in found]


def lines_of(fs: Any, url: str) -> list[int]:
    """The numbers in the files, in the order of their names."""
    found: list[int] = []
    for path in sorted(fs.glob(f"{url.removeprefix('s3://')}/*.jsonl")):
        found += [json.loads(line)["n"] for line in fs.cat_file(path).splitlines()]
    return found


def test_the_newest_token_is_in_the_name_of_the_newest_file(
    target: tuple[dict[str, Any], str, Any],
) -> None:
    conf, url, fs = target
    sink, other, again = (FileSink(url) for _ in range(3))
    assert (sink.open(conf, "t/a/1.0"), other.open(conf, "t/a/1.1")) == (0, 0)
    sink.write(numbers(1, 2), 1)
    sink.write(numbers(3), 2)
    # The answer was lost.
    assert sink.open(conf, "t/a/1.0") == 2
    other.write(numbers(4), 1)
    sink.close()
    assert again.open(conf, "t/a/1.0") == 2
    again.write(numbers(5), 3)
    assert FileSink(url).open(conf, "t/a/1.0") == 3
    assert sorted(lines_of(fs, url)) == [1, 2, 3, 4, 5]


def test_without_an_owner_no_file_takes_the_place_of_another(
    target: tuple[dict[str, Any], str, Any],
) -> None:
    conf, url, fs = target
    for n in range(3):
        sink = FileSink(url)
        assert sink.open(conf, "") is None
        sink.write(numbers(n), 1)
        sink.close()
    assert sorted(lines_of(fs, url)) == [0, 1, 2]


@pytest.mark.parametrize("name", ["a[1]b", "x*y", "q?z"])
def test_a_folder_with_characters_of_patterns_keeps_token_and_schema(
    name: str, tmp_path: Path
) -> None:
    url = str(tmp_path / name)
    first = FileSink(url, "csv")
    first.open({}, "me")
    first.write(numbers(1), 1)
    second = FileSink(url, "csv")
    assert second.open({}, "me") == 1
    with pytest.raises(Rejected):
        second.write([Row({"n": "text"})], 2)
    # The second opening has fenced the first one.
    with pytest.raises(Unavailable):
        first.write(numbers(2), 2)


def test_an_earlier_opening_finishes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "out")
    first, second = FileSink(url), FileSink(url)
    first.open({}, "me")
    first.write(numbers(1), 1)
    assert second.open({}, "me") == 1
    with pytest.raises(Unavailable, match="opened elsewhere"):
        first.write(numbers(2), 2)
    # It stands between the file and its name when another one opens.
    fsync = os.fsync

    def overtaken(file: int) -> None:
        monkeypatch.undo()
        fsync(file)
        assert FileSink(url).open({}, "me") == 1

    monkeypatch.setattr("os.fsync", overtaken)
    with pytest.raises(Unavailable):
        second.write(numbers(3), 2)
    assert lines_of(fsspec.filesystem("file"), url) == [1]


def test_an_earlier_opening_finishes_no_file_on_s3(s3: tuple[dict[str, Any], str, Any]) -> None:
    conf, bucket, fs = s3
    url = f"s3://{bucket}/out"
    first, second, third = (FileSink(url) for _ in range(3))
    first.open(conf, "me")
    first.write(numbers(1), 1)
    assert second.open(conf, "me") == 1
    with pytest.raises(Unavailable, match="opened elsewhere"):
        first.write(numbers(99), 2)
    second.write(numbers(2), 2)
    # It is frozen between the upload and its end, while another one finds no file of it, and writes
    # the batch.
    begin = second._begin_upload

    def overtaken(token: int) -> dict[str, Any]:
        begun = begin(token)
        assert third.open(conf, "me") == 2
        third.write(numbers(3), 3)
        return begun

    second._begin_upload = overtaken
    with pytest.raises(Unavailable, match="opened elsewhere"):
        second.write(numbers(98), 3)
    for token, why in ((3, "opened elsewhere"), (4, "no upload for token 4")):
        with pytest.raises(Unavailable, match=why):
            second.write(numbers(98), token)
    third.write(numbers(4), 4)
    assert lines_of(fs, url) == [1, 2, 3, 4]
    # Another one is complete just before its upload would be aborted: its file is found.
    fourth, abort = FileSink(url), FileSink._abort_uploads

    def completed(sink: FileSink, place: Any) -> None:
        with suppress(Unavailable):
            third.write(numbers(5), 5)
        abort(sink, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSink, "_abort_uploads", completed)
        assert fourth.open(conf, "me") == 5
    fourth.write(numbers(6), 6)
    # An opening with another format, after a hot deploy, is one of the same owner.
    fifth = FileSink(url, "csv")
    assert fifth.open(conf, "me") == 6
    with pytest.raises(Unavailable, match="opened elsewhere"):
        fourth.write(numbers(99), 7)
    fifth.write(numbers(7), 7)
    assert lines_of(fs, url) == [1, 2, 3, 4, 5, 6]
    assert [path.rpartition(".")[2] for path in sorted(fs.glob(f"{bucket}/out/me-*"))] == [
        "jsonl"
    ] * 6 + ["csv"]


def test_object_storage_that_cannot_fence_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FileSink("file://" + str(tmp_path)).open({}, "me") == 0
    assert "fence" not in caplog.text
    monkeypatch.setitem(_registry, "gs", Elsewhere)
    assert FileSink("gs://bucket/out").open({}, "me") == 0
    assert "gs://bucket/out has no means to fence an earlier writer" in caplog.text


class Elsewhere(MemoryFileSystem):
    """Object storage that is not S3."""

    protocol = "gs"


def test_no_part_of_a_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = FileSink(f"file://{tmp_path}/out")
    sink.open({}, "me")
    monkeypatch.setattr("os.fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sink.write(numbers(1), 1)
    assert not list((tmp_path / "out").glob("me*"))
    sink.close()
    assert list((tmp_path / "out" / "_staging").iterdir()) == []


ROWS = [{"a": 1, "text": "x"}, {"a": 2, "more": 0.5, "text": 'quo"te\n'}]


def content(rows: list[dict[str, Any]], format: str, folder: Path) -> Path:
    """The file of these rows."""
    sink = FileSink(str(folder), format)  # type: ignore[arg-type]
    sink.open({}, "me")
    sink.write([Row(values) for values in rows], 1)
    (path,) = folder.glob(f"me-000000000001-*.{format}")
    return path


def test_formats(tmp_path: Path) -> None:
    assert [
        json.loads(line) for line in content(ROWS, "jsonl", tmp_path).read_text().splitlines()
    ] == ROWS
    with content(ROWS, "csv", tmp_path).open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"a": "1", "text": "x", "more": ""},
            {"a": "2", "text": 'quo"te\n', "more": "0.5"},
        ]
    assert parquet.read_table(content(ROWS, "parquet", tmp_path)).to_pylist() == [
        {"a": 1, "text": "x", "more": None},
        {"a": 2, "text": 'quo"te\n', "more": 0.5},
    ]
    with pytest.raises(Rejected) as refused:
        content([{"a": n} for n in (1, "two", 3, 2**70, None)], "parquet", tmp_path / "other")
    assert sorted(refused.value.rows) == [1, 3] and not list((tmp_path / "other").glob("me-*"))
    with pytest.raises(InvalidRequest, match="'xml' is not a format"):
        content([], "xml", tmp_path)


VALUES = st.one_of(
    st.none(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)
FEW = settings(max_examples=max(4, settings().max_examples // 2))


@FEW
@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), VALUES), min_size=1, max_size=8),
    st.sampled_from(["jsonl", "csv", "parquet"]),
)
def test_what_is_left_when_the_refused_rows_are_gone_is_written(
    rows: list[dict[str, Any]], format: str
) -> None:
    with TemporaryDirectory() as folder:
        try:
            content(rows, format, Path(folder))
        except Rejected as refused:
            assert refused.rows
            content(
                [row for at, row in enumerate(rows) if at not in refused.rows], format, Path(folder)
            )


@given(st.text(max_size=4), st.text(max_size=4))
def test_names_of_owners_differ(one: str, other: str) -> None:
    assert (file_name_of(one) == file_name_of(other)) == (one == other)
    assert not set(file_name_of(one)) & set("/-%?*[]")


@pytest.mark.zookeeper
@pytest.mark.long
def test_rows_of_killed_workers_are_in_one_file_each(
    make_sink_rig: Callable[[int, dict[str, Any], str], SinkRig], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    make_sink_rig(20_000, {}, "InFiles").run(
        lambda: 200 * len(list(folder.glob("*.jsonl"))), kills=4
    )
    assert sorted(lines_of(fsspec.filesystem("file"), str(folder))) == list(range(20_000))
