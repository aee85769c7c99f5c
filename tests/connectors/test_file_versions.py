"""Versions of files: a replaced file is a new one, and one that was appended to is read on."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from storm_dagster.connectors import FileSource, Source, SourceRecord, source_spout
from storm_dagster.connectors.file_versions import FileVersion, change_of, hash_of, stored_version
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.worker.state.storage import Positions
from storm_rigs.components import CollectBolt
from storm_rigs.worker.sources_in_harness import reading, run_until

SEEN = CollectBolt.everything
"""Values of all rows that were read."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_spout, "_COMMIT_SECS", 0.02)
    monkeypatch.setattr(FileSource, "refresh_secs", 0.05)


def positions(harness: TopologyHarness) -> dict[str, Any]:
    (spout,) = harness.tasks("rows")
    if spout is None or spout._store is None:
        return {}
    return {Path(name).name: at for name, at in spout._store.current.items()}


def is_read(harness: TopologyHarness, *values: Any) -> Callable[[], bool]:
    """All files are read, and these are the values of their rows."""
    return lambda: (
        [[value] for value in values] == SEEN and set(positions(harness).values()) == {"end"}
    )


def replace(path: Path, data: bytes, secs: int) -> None:
    """As the class asks for it: under its name it is whole, and with its time."""
    half = path.with_name(f"_{path.name}.half")
    half.write_bytes(data)
    os.utime(half, (secs, secs))
    half.replace(path)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_file_that_is_appended_to_is_read_on_also_after_a_restart(tmp_path: Path) -> None:
    lines, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    texts: dict[Path, Callable[[int], bytes]] = {
        lines: lambda n: b'"line %d"\n\n' % n,
        packed: lambda n: gzip.compress(b'"packed %d"\n' % n),
    }
    for path, text in texts.items():
        source = FileSource(str(path))
        path.write_bytes(text(1) + text(2))
        word = "line" if path is lines else "packed"
        state = tmp_path / f"state of {path.name}"
        with TopologyHarness(reading(source), state_dir=state) as harness:
            run_until(harness, is_read(harness, f"{word} 1", f"{word} 2"))
            append(path, text(3))
            run_until(harness, is_read(harness, f"{word} 1", f"{word} 2", f"{word} 3"))
            append(path, text(4))
            run_until(harness, is_read(harness, *(f"{word} {n}" for n in (1, 2, 3, 4))))
            assert harness.errors == []
        append(path, text(5))
        with TopologyHarness(reading(source), state_dir=state) as harness:
            run_until(harness, is_read(harness, f"{word} 5"))
            append(path, text(6))
            run_until(harness, is_read(harness, f"{word} 5", f"{word} 6"))


@pytest.mark.parametrize("size", [3, 300])
def test_a_replaced_file_is_a_new_one_also_after_a_restart(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.jsonl"
    content = lambda first: b"".join(b"%d\n" % n for n in range(first, first + size))  # noqa: E731
    replace(path, content(1000), 1000)
    with TopologyHarness(reading(FileSource(str(path))), state_dir=tmp_path / "state") as harness:
        run_until(harness, is_read(harness, *range(1000, 1000 + size)))
        # Of the same size.
        replace(path, content(2000), 2000)
        expected = [*range(1000, 1000 + size), *range(2000, 2000 + size)]
        run_until(harness, is_read(harness, *expected))
        # Another time is no other file.
        os.utime(path, (2500, 2500))
        run_until(harness, lambda: version_of(harness).time == 2500)
        assert len(SEEN) == 2 * size and harness.errors == []
    replace(path, content(3000) + b"7\n", 3000)
    with TopologyHarness(reading(FileSource(str(path))), state_dir=tmp_path / "state") as harness:
        run_until(harness, is_read(harness, *range(3000, 3000 + size), 7))
        replace(path, b"1\n", 4000)
        run_until(harness, is_read(harness, *range(3000, 3000 + size), 7, 1))


def version_of(harness: TopologyHarness) -> FileVersion:
    (version,) = harness.tasks("rows")[0]._source._versions.values()
    return version


def test_a_file_that_is_replaced_while_it_is_read_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    replace(path, b"".join(b"%d\n" % n for n in range(3000)), 1000)
    with TopologyHarness(
        reading(FileSource(str(path)), max_open=5), state_dir=tmp_path / "state"
    ) as harness:
        run_until(harness, lambda: len(SEEN) > 20)
        replace(path, b"7000\n7001\n", 2000)
        run_until(
            harness,
            lambda: SEEN[-2:] == [[7000], [7001]] and positions(harness) == {"a.jsonl": "end"},
        )
        assert harness.errors == []


def test_a_file_that_cannot_be_compared_stops_no_other_and_is_compared_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FileSource(f"{tmp_path}/*.jsonl")
    state = tmp_path / "state"
    for name in ("a", "b"):
        replace(tmp_path / f"{name}.jsonl", b"1\n2\n", 1000)
    with TopologyHarness(reading(source), state_dir=state) as harness:
        run_until(harness, is_read(harness, 1, 2, 1, 2))
    replace(tmp_path / "a.jsonl", b"5\n6\n", 2000)
    append(tmp_path / "b.jsonl", b"3\n")
    read_head = FileSource._read_head

    def refuse(self: FileSource, name: str, count: int) -> bytes:
        if name.endswith("a.jsonl"):
            raise OSError("refused")
        return read_head(self, name, count)

    monkeypatch.setattr(FileSource, "_read_head", refuse)
    with TopologyHarness(reading(source), state_dir=state) as harness:
        run_until(harness, lambda: SEEN == [[3]] and harness.errors)
        assert "a.jsonl cannot be read: OSError: refused" in str(harness.errors[0][1])
        monkeypatch.setattr(FileSource, "_read_head", read_head)
        run_until(harness, lambda: SEEN == [[3], [5], [6]])


def test_positions_without_identities_count_and_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        replace(tmp_path / f"{name}.jsonl", b"1\n2\n3\n", 1000)
    state = tmp_path / "state"
    source = FileSource(f"{tmp_path}/*.jsonl")
    # As an earlier release stores them.
    save = Positions.save
    with monkeypatch.context() as patch:
        patch.setattr(
            Positions, "save", lambda self, changed, forget, _: save(self, changed, forget)
        )
        with TopologyHarness(reading(source), state_dir=state) as harness:
            run_until(harness, is_read(harness, 1, 2, 3, 1, 2, 3))
            save(harness.tasks("rows")[0]._store, {f"{tmp_path}/b.jsonl": 2})
            assert harness.tasks("rows")[0]._store.identities == {}
    with TopologyHarness(reading(source), state_dir=state) as harness:
        run_until(harness, is_read(harness, 3))
        run_until(harness, lambda: len(harness.tasks("rows")[0]._store.identities) == 2)
        assert harness.errors == []
    append(tmp_path / "a.jsonl", b"4\n")
    replace(tmp_path / "b.jsonl", b"5\n6\n7\n", 3000)
    with TopologyHarness(reading(source), state_dir=state) as harness:
        run_until(harness, lambda: sorted(n for (n,) in SEEN) == [4, 5, 6, 7])
        run_until(harness, lambda: set(positions(harness).values()) == {"end"})


def test_an_identity_belongs_to_one_position_only(tmp_path: Path) -> None:
    """An earlier release moves positions on, and leaves the identities of former ones."""
    path = tmp_path / "a.jsonl"
    replace(path, b"1\n2\n", 1000)
    state = tmp_path / "state"
    with TopologyHarness(reading(FileSource(str(path))), state_dir=state) as harness:
        run_until(harness, is_read(harness, 1, 2))
        store = harness.tasks("rows")[0]._store
        assert store.identities[str(path)]["rows"] == 2
        # As that release does it.
        store.save({str(path): 1})
    replace(path, b"8\n9\n", 2000)
    with TopologyHarness(reading(FileSource(str(path))), state_dir=state) as harness:
        run_until(harness, is_read(harness, 9))


def test_an_object_with_another_etag_is_a_new_one(
    s3: tuple[dict[str, Any], str, Any], tmp_path: Path
) -> None:
    conf, bucket, fs = s3
    fs.pipe_file(f"{bucket}/in/a.jsonl", b"1\n2\n")
    fs.pipe_file(f"{bucket}/in/b.jsonl", b"5\n")
    source = FileSource(f"s3://{bucket}/in/*.jsonl")
    with TopologyHarness(reading(source), state_dir=tmp_path, conf=conf) as harness:
        run_until(harness, lambda: sorted(SEEN) == [[1], [2], [5]])
        fs.pipe_file(f"{bucket}/in/a.jsonl", b"3\n4\n")
        run_until(harness, lambda: SEEN[-2:] == [[3], [4]])
        run_until(harness, lambda: set(positions(harness).values()) == {"end"})
        assert harness.errors == []
    fs.pipe_file(f"{bucket}/in/a.jsonl", b"3\n4\n")
    fs.pipe_file(f"{bucket}/in/b.jsonl", b"6\n")
    with TopologyHarness(reading(source), state_dir=tmp_path, conf=conf) as harness:
        run_until(harness, is_read(harness, 6))
        assert "etag" in harness.tasks("rows")[0]._store.identities[f"{bucket}/in/a.jsonl"]


HEAD = b"the first bytes"


def read_head(count: int) -> bytes:
    return HEAD[:count]


@pytest.mark.parametrize(
    ("size", "time", "head", "change"),
    [
        (100, 1.0, b"not read", "same"),
        (100, 2.0, HEAD, "same"),
        (101, 2.0, HEAD, "appended"),
        (101, 1.0, HEAD, "appended"),
        (101, 2.0, b"other bytes", "replaced"),
        (100, 2.0, b"other bytes", "replaced"),
        (99, 2.0, HEAD, "replaced"),
        (101, 2.0, b"", "appended"),
    ],
)
def test_size_time_and_first_bytes_tell_what_has_happened(
    size: int, time: float, head: bytes, change: str
) -> None:
    known = FileVersion(100, 1.0, head_bytes=len(head), head=hash_of(head))
    assert change_of(known, FileVersion(size, time), read_head) == change


def test_an_etag_alone_tells_and_an_unknown_version_is_the_same() -> None:
    known = FileVersion(100, 1.0, etag="x")
    assert change_of(known, FileVersion(100, 2.0, etag="x"), read_head) == "same"
    assert change_of(known, FileVersion(100, 1.0, etag="y"), read_head) == "replaced"
    for unknown in (FileVersion(), FileVersion(5, 1.0), known):
        assert change_of(unknown, FileVersion(9, 2.0), read_head) == "same"
    for identity in (None, 7, {"size": "many"}, [1]):
        assert stored_version(identity) is None
    assert stored_version({"size": 3, "of a later release": 1}) == FileVersion(3)


@dataclass
class Table(Source):
    """A table that may be made anew under its name."""

    refresh_secs: ClassVar[float] = 0.01
    table_id: ClassVar[Any] = "first"
    assigned: ClassVar[list[dict[str, Any]]] = []

    def open(self, conf: Mapping[str, Any], context: Any) -> None:
        self.after: int | None = None

    def partitions(self) -> Collection[str]:
        return ["table"]

    def identity(self, partition: str) -> Any:
        return self.table_id

    def assign(self, mine: Mapping[str, Any]) -> None:
        self.assigned.append(dict(mine))
        self.after = mine["table"] or 0

    def read(self, most: int, full: Collection[str]) -> Sequence[Any]:
        after = self.after
        if after is None or after >= 2:
            return []
        self.after = after + 1
        return [SourceRecord(b"%d" % after, "table", self.after)]


@pytest.mark.parametrize(
    ("stored", "current", "is_lost"),
    [
        ("first", "first", False),
        ("first", "second", True),
        ({"id": 1}, {"id": 2}, True),
        (None, "first", False),
        ("first", None, False),
    ],
)
def test_a_source_of_its_own_names_what_its_positions_are_of(
    stored: Any, current: Any, is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Table.assigned.clear()
    for table_id in (stored, current):
        monkeypatch.setattr(Table, "table_id", table_id)
        with TopologyHarness(reading(Table()), state_dir=tmp_path) as harness:
            run_until(harness, lambda: positions(harness) == {"table": 2})
            run_until(harness, lambda: Table.assigned)
            if table_id is not None:
                run_until(
                    harness,
                    lambda table_id=table_id: (
                        harness.tasks("rows")[0]._store.identities == {"table": table_id}
                    ),
                )
            errors = [str(error) for _, error in harness.errors]
    assert Table.assigned == [{"table": None}, {"table": None if is_lost else 2}]
    assert len(errors) == is_lost
    assert all("table is read from its beginning: its position 2" in text for text in errors)
    assert ([[0], [1]] if is_lost else []) == SEEN
