"""State and dead letters of earlier releases: read once, kept aside, quarantined if damaged."""

from __future__ import annotations

import json
import logging
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from storm_dagster.api import Bolt, TaskState, TopologyBuilder, Tuple
from storm_dagster.core.dataplane.keyed_state import Partitioning
from storm_dagster.model.errors import Corrupt, Unavailable
from storm_dagster.model.records import StateHome
from storm_dagster.model.values import encode_value
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import patience
from storm_dagster.worker.state import former, storage
from storm_dagster.worker.state import letters as letters_module
from storm_dagster.worker.state.letters import DeadLetterLog
from storm_dagster.worker.state.storage import open_task_log
from storm_dagster.worker.state.task_store import TaskStore, task_folder
from storm_rigs.components import Words
from storm_rigs.worker.first_error import first_error

SCHEMA = """
CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS applied (id TEXT PRIMARY KEY) WITHOUT ROWID;
"""
VALUES = {
    "map": {"a": [1, 2.5, None, True, "\u00e9"]},
    "text": "x",
    "number": -3,
    "none": None,
    "set": {1, 2},
    "bytes": b"\x00",
    "tuple": (1, "a"),
}
WRITER = """
import os, sys
sys.path[:0] = {path!r}
from pathlib import Path
import test_former_state
test_former_state.write_database(Path({target!r}), test_former_state.VALUES, ["line-1"], 3, close=False)
os._exit(9)
"""


def write_database(
    path: Path, values: dict[str, Any], applied: list[str], openings: int, *, close: bool = True
) -> None:
    """State of a task as releases up to 0.2 have written it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.executescript(SCHEMA)
    database.execute(f"PRAGMA user_version = {openings}")
    database.execute("BEGIN")
    for key, value in values.items():
        plain = isinstance(value, dict | str | int | None)
        raw = msgspec.json.encode(value) if plain else b"\xc1" + encode_value(value)
        database.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (key, raw))
    database.executemany("INSERT INTO applied VALUES (?)", [(id,) for id in applied])
    database.execute("COMMIT")
    if close:
        database.close()


def opened(folder: Path, **options: Any) -> TaskState:
    return TaskState(TaskStore(open_task_log(folder, lambda: True, **options)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return task_folder(tmp_path, "wc", "count", 4)


@pytest.fixture
def path(folder: Path) -> Path:
    return folder.with_suffix(".sqlite3")


def names(path: Path) -> set[str]:
    """Names of the files beside the log, but for the note about what was taken over."""
    files = {other.name for other in path.parent.iterdir() if other.is_file()}
    return files - {f"{path.name}.imported"}


def test_state_of_an_earlier_release_is_read_once_and_kept(
    folder: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_database(path, VALUES, ["line-1", "2"], 3)
    with caplog.at_level(logging.INFO):
        state = opened(folder, opening=3)
    assert dict(state.items()) == VALUES and state.applied_ids() == {"line-1", "2"}
    assert {key: type(value) for key, value in state.items()} == {
        key: type(value) for key, value in VALUES.items()
    }
    assert names(path) == {"4.sqlite3.former"} and "4.sqlite3.former" in caplog.text
    state.save({"text": "newer"}, forget=["2"])
    state.close()
    state = opened(folder, opening=4)
    assert dict(state.items()) == {**VALUES, "text": "newer"}
    assert state.applied_ids() == {"line-1"} and names(path) == {"4.sqlite3.former"}
    with closing(sqlite3.connect(path.with_name("4.sqlite3.former"))) as database:
        assert database.execute("SELECT count(*) FROM state").fetchone() == (len(VALUES),)


def test_state_of_a_killed_worker_is_read_with_its_last_transactions(
    folder: Path, path: Path
) -> None:
    program = WRITER.format(path=[*sys.path, str(Path(__file__).parent)], target=str(path))
    done = subprocess.run([sys.executable, "-c", program], timeout=patience(60), check=False)
    assert done.returncode == 9 and path.with_name("4.sqlite3-wal").stat().st_size > 0
    state = opened(folder, opening=3)
    assert dict(state.items()) == VALUES and state.applied_ids() == {"line-1"}
    # The kept files are one database under the new name.
    assert path.with_name("4.sqlite3.former") in path.parent.iterdir()
    assert not [name for name in names(path) if not name.startswith("4.sqlite3.former")]
    with closing(sqlite3.connect(path.with_name("4.sqlite3.former"))) as database:
        assert database.execute("SELECT count(*) FROM state").fetchone() == (len(VALUES),)


def cut(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def overwrite(raw: bytes) -> bytes:
    return raw[:4096] + b"\x5a" * (len(raw) - 4096)


def no_database(raw: bytes) -> bytes:
    return b"text" * 2000


def begun(raw: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [cut, overwrite, no_database, begun])
def test_a_damaged_database_is_quarantined_and_replaced_only_on_request(
    damage: Callable[[bytes], bytes], folder: Path, path: Path
) -> None:
    many = {f"key{n}": "x" * 90 for n in range(500)}
    write_database(path, many, [], 3)
    whole = path.read_bytes()
    damaged = damage(whole)
    path.write_bytes(damaged)
    for _ in range(2):
        with pytest.raises(Corrupt, match=r"4\.sqlite3\.damaged"):
            opened(folder)
        assert names(path) == {"4.sqlite3.damaged"}
    assert path.with_name("4.sqlite3.damaged").read_bytes() == damaged
    # A copy that is whole is taken.
    path.write_bytes(whole)
    state = opened(folder, opening=3)
    assert dict(state.items()) == many
    assert names(path) == {"4.sqlite3.damaged", "4.sqlite3.former"}
    state.close()


def test_a_task_starts_when_its_damaged_former_state_is_moved_away(
    folder: Path, path: Path
) -> None:
    write_database(path, VALUES, [], 3)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(Corrupt):
        opened(folder)
    path.with_name("4.sqlite3.damaged").unlink()
    # Nothing is older than what was open before.
    with pytest.raises(Unavailable, match=r"opening 0, and opening 3 is known"):
        opened(folder, opening=3)
    assert len(opened(folder)) == 0


@pytest.mark.parametrize("step", ["_publish", "set_aside"])
def test_a_crash_while_former_state_is_read_loses_nothing(
    step: str, folder: Path, path: Path
) -> None:
    class Killed(BaseException):
        pass

    write_database(path, VALUES, ["1"], 3)
    owner: Any = storage if step == "set_aside" else storage.StateLog
    for _ in range(2):
        with patch.object(owner, step, side_effect=Killed), pytest.raises(Killed):
            opened(folder, opening=3)
        assert path.exists()
    state = opened(folder, opening=3)
    assert dict(state.items()) == VALUES and state.applied_ids() == {"1"}
    assert names(path) == {"4.sqlite3.former"}


def test_state_that_an_earlier_release_saved_later_is_taken(folder: Path, path: Path) -> None:
    write_database(path, VALUES, ["1"], 3)
    state = opened(folder, opening=3)
    state.save({"text": "of the log"})
    state.close()
    # The release before refuses to start, unless its operator wants older state: it counts on.
    write_database(path, {"text": "after a step back"}, ["2"], 5)
    state = opened(folder, opening=5)
    assert dict(state.items()) == {"text": "after a step back"} and state.applied("2")
    assert names(path) == {"4.sqlite3.former", "4.sqlite3.former.2"}
    state.close()
    # A copy of the file that was read does not replace what was saved since.
    state = opened(folder, opening=6)
    state.save({"text": "newest"})
    state.close()
    write_database(path, {"text": "old"}, [], 5)
    assert opened(folder, opening=7).get("text") == "newest"


def test_state_that_an_earlier_release_saved_later_is_taken_after_many_compactions(
    folder: Path, path: Path
) -> None:
    """Compactions raise the opening of the log beyond the one that the cluster knows."""
    write_database(path, VALUES, ["1"], 3)
    state = opened(folder, opening=3)
    for number in range(12):
        state.save({"text": f"{number}" + "x" * 1_000_000})
    state.close()
    write_database(path, {"text": "after a step back"}, ["2"], 5)
    state = opened(folder, opening=5)
    assert state.get("text") == "after a step back" and state.applied("2")
    state.close()
    assert opened(folder, opening=6).get("text") == "after a step back"


def test_a_database_damaged_after_a_step_back_never_uses_the_older_log(
    folder: Path, path: Path
) -> None:
    write_database(path, VALUES, ["1"], 3)
    opened(folder, opening=3).close()
    path.write_bytes(b"no database" * 500)
    for _ in range(2):
        with pytest.raises(Corrupt, match=r"damaged|cannot be read"):
            opened(folder, opening=4, take_older=True)
    # A whole copy in its place counts again.
    write_database(path, {"text": "a copy"}, [], 5)
    state = opened(folder, opening=4, take_older=True)
    assert state.get("text") == "a copy"
    state.close()
    assert opened(folder, opening=6).get("text") == "a copy"


class Remembers(Bolt):
    def process(self, tup: Tuple) -> None:
        state = self.context.state
        state.save({tup.values[0]: state.get(tup.values[0], 0) + 1})


def words_and_bolt() -> TopologyBuilder:
    builder = TopologyBuilder("wc")
    words = builder.set_spout("words", Words)
    builder.set_bolt("count", Remembers, inputs=[words])
    return builder


def test_a_task_continues_with_former_state_and_reports_unreadable_entries(tmp_path: Path) -> None:
    given: dict[str, list[Any]] = {"words": [["a"]]}
    with TopologyHarness(words_and_bolt(), {"words": []}, state_dir=tmp_path) as harness:
        harness.run()
        task = harness.tasks("count")[0].context.task_id
    path = task_folder(tmp_path, "wc", "count", task).with_suffix(".sqlite3")
    write_database(path, {"a": 41}, [], 2)
    with TopologyHarness(words_and_bolt(), given, state_dir=tmp_path) as harness:
        harness.shared.storage.home = StateHome(marker="", openings={str(task): (0, 2)})
        result = harness.run()
        assert result.errors == [] and harness.tasks("count")[0].context.state.get("a") == 42
    write_database(path, {"a": 70}, [], 9)
    path.write_bytes(path.read_bytes()[:4000])
    with TopologyHarness(words_and_bolt(), given, state_dir=tmp_path, simulated=True) as harness:
        text = str(first_error(harness)[1])
        assert str(path) in text and f"{task}.sqlite3.damaged" in text


# -- dead letters ----------------------------------------------------------------------------------


def letter(number: int, **more: Any) -> bytes:
    return json.dumps({"number": number, "values": [number], "raw": None, **more}).encode() + b"\n"


def letter_log(folder: Path, index: int = 0, tasks: int = 1, **options: Any) -> DeadLetterLog:
    division = Partitioning(tasks, by_key=False)
    return DeadLetterLog(folder, division, index, (0, 0), lambda: True, 1 << 20, **options)


def write_letters(folder: Path, index: int, *lines: bytes, old: tuple[bytes, ...] = ()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{index}.jsonl").write_bytes(b"".join(lines))
    if old:
        (folder / f"{index}.old.jsonl").write_bytes(b"".join(old))


def test_letters_of_an_earlier_release_are_read_once_and_kept(tmp_path: Path) -> None:
    change = json.dumps({"number": 2, "replayed_ms": 9}).encode() + b"\n"
    dropped = json.dumps({"number": 1, "tries": 9}).encode() + b"\n"
    write_letters(tmp_path, 0, dropped, letter(5), change, old=(letter(2), letter(3)))
    write_letters(tmp_path, 2, letter(5, of=2))
    write_letters(tmp_path, 1, letter(7))
    log = letter_log(tmp_path, 0, 2)
    log.open()
    letters = log.read()
    assert [one["values"] for one in letters.values()] == [[2], [3], [5], [5]]
    assert letters[2]["replayed_ms"] == 9 and letters[6]["of"] == 2
    assert {path.name for path in tmp_path.glob("*jsonl*")} == {
        "0.jsonl.former",
        "0.old.jsonl.former",
        "2.jsonl.former",
        "1.jsonl",
    }
    log.close()
    log.open()
    assert log.read() == letters
    log.close()
    # The release before writes a file of its own, when a cluster goes back to it for a while.
    write_letters(tmp_path, 0, letter(6), letter(9))
    log.open()
    assert [one["values"] for one in log.read().values()] == [[2], [3], [5], [5], [6], [9]]
    assert (tmp_path / "0.jsonl.former.2").exists()
    log.close()


def test_a_crash_before_former_letters_are_renamed_doubles_none(tmp_path: Path) -> None:
    write_letters(tmp_path, 0, letter(1), letter(2))
    log = letter_log(tmp_path)
    for _ in range(3):
        with (
            patch.object(letters_module.FormerLetters, "set_aside", side_effect=OSError("killed")),
            pytest.raises(OSError, match="killed"),
        ):
            log.open()
        log.close()
    log.open()
    assert [*log.read()] == [1, 2]


def test_a_crash_between_the_renames_of_former_letters_doubles_none(tmp_path: Path) -> None:
    write_letters(tmp_path, 0, letter(3), old=(letter(1), letter(2)))
    log = letter_log(tmp_path)
    rename = former.os.rename
    calls: list[Path] = []

    def rename_one(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) > 1:
            raise OSError("killed")
        rename(source, target)

    with (
        patch.object(former.os, "rename", rename_one),
        pytest.raises(OSError, match="killed"),
    ):
        log.open()
    assert (tmp_path / "0.jsonl").exists() and not (tmp_path / "0.old.jsonl").exists()
    log.close()
    log.open()
    assert [*log.read()] == [1, 2, 3] and not (tmp_path / "0.jsonl").exists()


def test_a_half_written_letter_is_reported_and_its_file_quarantined(tmp_path: Path) -> None:
    write_letters(tmp_path, 0, letter(1), b'{"number": 2, "val\n', letter(3))
    errors: list[Exception] = []
    log = letter_log(tmp_path, report=errors.append)
    log.open()
    assert [*log.read()] == [1, 3]
    (error,) = errors
    assert isinstance(error, Corrupt) and "1 line" in str(error)
    assert "0.jsonl.damaged" in str(error) and (tmp_path / "0.jsonl.damaged").exists()
