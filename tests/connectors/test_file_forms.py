"""Files as they really are: each record is read right, or rejected with its file and line."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.connectors import FileSource, source_spout
from storm_dagster.connectors.compressed import DamagedArchive, open_decompressed
from storm_dagster.connectors.file_rows import TextOptions, csv_rows, line_rows
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_rigs.components import CollectBolt
from storm_rigs.worker.sources_in_harness import reading, run_until

SEEN = CollectBolt.everything
"""Values of all rows that were read."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_spout, "_COMMIT_SECS", 0.02)
    monkeypatch.setattr(FileSource, "refresh_secs", 0.05)


def read_whole(source: FileSource, folder: Path, **body: Any) -> list[dict[str, Any]]:
    """The dead letters of all files, which are read to their ends."""
    with TopologyHarness(reading(source, **body), state_dir=folder / "state") as harness:
        run_until(
            harness,
            lambda: (
                set(harness.tasks("rows")[0]._store.current.values() if ready(harness) else ())
                == {"end"}
            ),
        )
        assert harness.errors == []
        return harness.run().dead_letters


def ready(harness: TopologyHarness) -> bool:
    (spout,) = harness.tasks("rows")
    return spout is not None and spout._store is not None


def test_rows_with_other_numbers_of_fields_are_rejected_alone(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('a,b\n1,2\n3,4,5\n6\n"x\ny",7\n\n8,9\n')
    too_many, too_few = read_whole(FileSource(f"{tmp_path}/in.csv"), tmp_path)
    assert SEEN == [[{"a": "1", "b": "2"}], [{"a": "x\ny", "b": "7"}], [{"a": "8", "b": "9"}]]
    assert f"{tmp_path}/in.csv, line 3: 3 fields, and the header has 2" in too_many["error"]
    assert f"{tmp_path}/in.csv, line 4: 1 fields" in too_few["error"]
    assert too_many["position"]["value"] == "3,4,5\n" and too_many["position"]["line"] == 3
    assert [too_many["tries"], too_few["tries"]] == [1, 1]


def test_lines_that_are_not_json_are_rejected_with_their_line(tmp_path: Path) -> None:
    lines = b'\xef\xbb\xbf{"n": 1}\r\n\r\n{"n": NaN}\n{"n": "\xe9"}\n{"n": "\\ud800"}\n{"n": 1%s}\n'
    (tmp_path / "in.jsonl").write_bytes(lines % (b"0" * 30))
    letters = read_whole(FileSource(f"{tmp_path}/in.jsonl"), tmp_path)
    assert SEEN == [[{"n": 1}], [{"n": 10**30}]], "also after a byte order mark"
    reasons = [
        "line 3: InvalidJson: NaN",
        "line 4: InvalidJson: byte",
        "line 5: InvalidJson: at .n",
    ]
    for letter, reason in zip(letters, reasons, strict=True):
        assert f"{tmp_path}/in.jsonl, {reason}" in letter["error"]


def test_latin_1_is_read_by_option_and_rejected_without_it(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes("n;t\r\n1;café\r\n2;tea\r\n".encode("latin-1"))
    (letter,) = read_whole(FileSource(f"{tmp_path}/in.csv", delimiter=";"), tmp_path)
    assert SEEN == [[{"n": "2", "t": "tea"}]]
    assert "in.csv, line 2: byte 0xe9 is not utf-8: set encoding" in letter["error"]
    source = FileSource(f"{tmp_path}/in.csv", delimiter=";", encoding="latin-1")
    assert read_whole(source, tmp_path / "other") == []
    assert SEEN == [[{"n": "1", "t": "café"}], [{"n": "2", "t": "tea"}]]
    (tmp_path / "in.jsonl").write_bytes('{"t": "café"}\r\n'.encode("latin-1"))
    source = FileSource(f"{tmp_path}/in.jsonl", encoding="latin-1")
    assert read_whole(source, tmp_path / "third") == [] and SEEN == [[{"t": "café"}]]


def test_a_cut_archive_is_named_and_is_read_on_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from storm_dagster.connectors import file_source

    monkeypatch.setattr(file_source, "_RETRY_SECS", 0.05)
    whole = gzip.compress(b"1\n2\n") + gzip.compress(b"3\n" * 10) + gzip.compress(b"4\n")
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(whole[:-12])
    with TopologyHarness(reading(FileSource(str(path))), state_dir=tmp_path / "state") as harness:
        run_until(harness, lambda: harness.errors)
        (_, error), *_ = harness.errors
        assert f"{path} (after 12 records) cannot be read" in str(error)
        assert "gzip data are cut" in str(error)
        path.write_bytes(whole)
        run_until(harness, lambda: SEEN[-1:] == [[4]])
    assert [[1], [2], *[[3]] * 10, [4]] == SEEN


def rows_of(text: str | bytes, **options: Any) -> list[Any]:
    raw = text.encode() if isinstance(text, str) else text
    found = csv_rows(io.BytesIO(raw), TextOptions(**options))
    return [row.error or row.value for row in found]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("a;b\n1;2\n", {"delimiter": ";"}),
        ("a\tb\n1\t2\n", {"delimiter": "\t"}),
        ("\ufeffa,b\r\n1,2\r\n", {}),
        ('"a","b"\n"1","2"', {}),
        ("a,b\n1,2\n".encode("utf-16"), {"encoding": "utf-16"}),
        ("\n\na,b\n\n1,2\n\n", {}),
        ("a,b\r1,2\r", {}),
    ],
)
def test_every_form_of_csv_gives_the_same_rows(text: Any, options: Any) -> None:
    assert rows_of(text, **options) == [{"a": "1", "b": "2"}]


NAMES = ["a", "b", "c"]
FIELD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@given(
    st.lists(st.tuples(FIELD, FIELD, FIELD), max_size=6),
    st.sampled_from([",", ";", "\t", "|"]),
    st.sampled_from(["\n", "\r\n"]),
)
def test_what_is_written_as_csv_comes_back(rows: Any, delimiter: str, end: str) -> None:
    import csv

    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerows([NAMES, *rows])
    expected = [dict(zip(NAMES, row, strict=True)) for row in rows]
    assert rows_of(text.getvalue(), delimiter=delimiter) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('a,b\n1,"x"y\n2,3\n', "a quote is out of place"),
        ('a,b\n1,"x\n', "a quote is opened here, and not closed"),
        (b"a,b\n1,\xff\n2,3\n", "byte 0xff is not utf-8"),
    ],
)
def test_a_row_of_csv_that_is_not_certain_has_a_reason(text: Any, reason: str) -> None:
    first, *others = rows_of(text)
    assert reason in first and others in ([], [{"a": "2", "b": "3"}])


def test_short_rows_are_filled_by_option_and_long_ones_never() -> None:
    filled = rows_of("a,b\n1\n2,3,4\n", short_rows="none")
    assert filled == [{"a": "1", "b": None}, "3 fields, and the header has 2"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a;b\n1;2\n", "set delimiter=';'"),
        ("a,a\n1,2\n", "the header has 'a' twice"),
        ("a,b\n1," + "x" * 140_000 + "\n2,3\n", "line 2: field larger"),
        (b"\xff\xfea\x00\n", 'UTF-16: set encoding="utf-16"'),
        (b"\xff\xfe\x00\x00a\x00\x00\x00", 'UTF-32: set encoding="utf-32"'),
        (gzip.compress(b"a,b\n1,2\n"), "gzip: give it a name that ends with .gz"),
        (bz2.compress(b"a,b\n1,2\n"), "bzip2: give it a name that ends with .bz2"),
        (lzma.compress(b"a,b\n1,2\n"), "xz: give it a name that ends with .xz"),
        (b"x.csv" + bytes(95) + b"0000644" + bytes(400) + b"a,b\n1,2\n", "tar archive"),
    ],
    # A compressed text has the time of its making, so that it cannot be the name of a test.
    ids=["delimiter", "name twice", "long", "utf-16", "utf-32", "gzip", "bzip2", "xz", "tar"],
)
def test_a_file_of_csv_that_cannot_be_understood_is_refused(text: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        rows_of(text)
    assert rows_of("a;b\n1;2\n", delimiter=",") == [{"a;b": "1;2"}], "as it is asked for"


def test_lines_of_another_encoding_are_text() -> None:
    for encoding in ("utf-16", "cp1252"):
        raw = 'é\r\n\r\n"ü"'.encode(encoding)
        rows = [*line_rows(io.BytesIO(raw), TextOptions(encoding))]
        assert [(row.value, row.line, row.error) for row in rows] == [("é", 1, ""), ('"ü"', 3, "")]
    (row,) = line_rows(io.BytesIO(b"\x81\n"), TextOptions("cp1252"))
    assert "byte 0x81 is not cp1252" in row.error


@pytest.mark.parametrize(
    "encoding", ["U8", "utf", "utf_8_sig", "cp65001", "utf-16-le", "utf-32-be"]
)
def test_a_byte_order_mark_is_skipped_under_every_name_of_an_encoding(encoding: str) -> None:
    text = "\ufeffa,b\n1,é\n"
    raw = text.encode("utf-8" if encoding == "utf_8_sig" else encoding)
    assert rows_of(raw, encoding=encoding) == [{"a": "1", "b": "é"}]
    first, _ = line_rows(io.BytesIO(raw), TextOptions(encoding))
    assert first.value in (b"a,b", "a,b")


def test_a_byte_order_mark_of_utf_8_contradicts_another_encoding() -> None:
    with pytest.raises(ValueError, match=r"mark of UTF-8.*'latin-1'.*encoding=\"utf-8\""):
        rows_of(b"\xef\xbb\xbfa,b\n1,2\n", encoding="latin-1")


@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-be", "utf-32", "shift_jis", "cp1252", "utf-7"]
)
def test_bytes_of_no_encoding_reject_their_row_alone(encoding: str) -> None:
    wrong = {"utf-16": b"\x00\xd8", "utf-16-be": b"\xd8\x00", "utf-32": b"\x00\x00\x00\x99"}
    raw = "a,b\n1,".encode(encoding) + wrong.get(encoding, b"\x81")
    end = "\n2,3\n".encode(encoding.replace("16", "16-le").replace("le-be", "be"))
    if encoding == "utf-32":
        end = "\n2,3\n".encode("utf-32-le")
    rejected, row = rows_of(raw + end, encoding=encoding)
    assert "is not" in rejected and row == {"a": "2", "b": "3"}
    lines = [*line_rows(io.BytesIO(raw + end), TextOptions(encoding))]
    assert [bool(line.error) for line in lines] == [False, True, False]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
def test_a_cut_character_at_the_end_rejects_the_last_row_alone(encoding: str) -> None:
    *rows, rejected = rows_of("a,b\n1,2\n".encode(encoding) + b"\x01", encoding=encoding)
    assert rows == [{"a": "1", "b": "2"}] and "byte 0x01 is not" in rejected


@pytest.mark.parametrize(
    "raw", [b"\xff\xfex\x00\n\x00", gzip.compress(b"x\n")], ids=["utf-16", "gzip"]
)
def test_lines_of_a_file_of_another_form_are_no_records(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"UTF-16|gzip"):
        list(line_rows(io.BytesIO(raw), TextOptions()))


def zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstd,
}
TEXT = b"".join(b"line %d\n" % n for n in range(20_000))


def decompressed(raw: bytes, kind: str) -> bytes:
    return open_decompressed(io.BytesIO(raw), kind).read()


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_all_members_of_an_archive_are_read(kind: str) -> None:
    compress = COMPRESSIONS[kind]
    raw = compress(TEXT[:7]) + compress(b"") + compress(TEXT[7:])
    assert decompressed(raw, kind) == TEXT
    assert decompressed(raw + b"\0" * 512, kind) == TEXT, "as tapes fill it"
    assert decompressed(b"", kind) == b""


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_a_cut_or_damaged_archive_is_an_error(kind: str) -> None:
    raw = COMPRESSIONS[kind](TEXT[:70]) + COMPRESSIONS[kind](TEXT[70:])
    first = len(COMPRESSIONS[kind](TEXT[:70]))
    for size in (2, first // 2, first + 2, len(raw) // 2, len(raw) - 1):
        with pytest.raises(DamagedArchive, match=r"are cut|damaged"):
            decompressed(raw[:size], kind)
    for damaged in (raw + b"more" * 9, raw[:first] + b"{}" + raw[first:], b'{"n": 1}\n' * 9):
        with pytest.raises(DamagedArchive, match="are damaged"):
            decompressed(damaged, kind)


def test_a_zip_archive_of_several_files_is_refused() -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("a.txt", "1\n")
    assert decompressed(archive.getvalue(), "zip") == b"1\n"
    with zipfile.ZipFile(archive, "a") as made:
        made.writestr("b.txt", "2\n")
    with pytest.raises(DamagedArchive, match="has 2 files, and only one can be read"):
        decompressed(archive.getvalue(), "zip")
    with pytest.raises(DamagedArchive, match="damaged or cut"):
        decompressed(archive.getvalue()[:-30], "zip")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"encoding": "latin-99"}, "encoding of"),
        ({"delimiter": ";;"}, "delimiter of"),
        ({"delimiter": ""}, "delimiter of"),
        ({"short_rows": "fill"}, "short_rows of"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: Any, reason: str) -> None:
    with pytest.raises(InvalidTopology, match=reason):
        FileSource("/in/*.csv", **options)


def test_tsv_files_have_tabs() -> None:
    assert FileSource("/in/*.tsv.gz").text.delimiter == "\t"
    assert FileSource("/in/*.tsv", delimiter=",").text.delimiter == ","
