"""Files of a state log: which one is a task's newest, and a name that only one process gets."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest

from storm_dagster.worker.state import log_files
from storm_dagster.worker.state.log_files import copy_range, link_unless_taken, newest_logs


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def test_the_newest_log_of_each_task_is_that_of_the_last_opening(tmp_path: Path) -> None:
    """By number, not by text; of this division, and of no file that is not a log."""
    write(tmp_path, "000003/0.9.log", "000003/0.10.log", "000003/12.1.log", "000002/0.99.log")
    others = ("000003/0.11.log.tmp", "000003/.0.12.log.7.8.tmp", "000003/x.13.log", "000003/0.log")
    write(tmp_path, *others)
    division = tmp_path / "000003"
    assert newest_logs(tmp_path, 3) == {
        0: (10, division / "0.10.log"),
        12: (1, division / "12.1.log"),
    }
    assert newest_logs(tmp_path, 4) == {}


def test_a_file_gets_a_free_name_once(tmp_path: Path) -> None:
    """The one that comes second changes nothing, and leaves no temporary file."""
    path = tmp_path / "0.1.log"
    for content, is_first in ((b"first", True), (b"second", False)):
        temporary = tmp_path / "temporary"
        temporary.write_bytes(content)
        assert link_unless_taken(temporary, path) == is_first
        assert [file.name for file in tmp_path.iterdir()] == ["0.1.log"]
        assert path.read_bytes() == b"first"


def test_a_file_gets_no_name_in_a_folder_that_another_task_removed(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.write_bytes(b"content")
    assert not link_unless_taken(temporary, tmp_path / "gone" / "0.1.log")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("begin", "end", "content"),
    [(0, 10, b"0123456789"), (3, 7, b"3456"), (4, 4, b""), (8, 99, b"89"), (50, 60, b"")],
)
def test_a_range_of_a_file_is_appended_block_by_block(
    begin: int, end: int, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"0123456789")
    for block in (1, 3, 1 << 20):
        monkeypatch.setattr(log_files, "_BLOCK", block)
        target = BytesIO(b"before ")
        target.seek(0, 2)
        copy_range(path, begin, end, target)
        assert target.getvalue() == b"before " + content
