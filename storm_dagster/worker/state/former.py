"""Files of earlier releases, of ``context.state`` and of dead letters.

They are SQLite databases and JSON lines. They are read once, into a state log, and kept beside it
under another name.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from storm_dagster.core.dataplane.keyed_state import Contents
from storm_dagster.host.files import write_atomically
from storm_dagster.model.errors import Corrupt, Unavailable
from storm_dagster.model.values import encode_value
from storm_dagster.worker.state.log import InitialContents

IMPORTED_SUFFIX = ".former"
"""Suffix of a file whose contents are in a state log."""
DAMAGED_SUFFIX = ".damaged"
"""Suffix of a file that could not be read, or not all of it."""
_TYPED = b"\xc1"
"""First byte of a value that is in the form of the log, not JSON."""
_COMPANIONS = ("-wal", "-shm", "")
"""Files of one SQLite database, in the order in which they may be renamed."""


def set_aside(path: Path, suffix: str) -> Path:
    """Rename a file and its SQLite companions to a free name with ``suffix``.

    Returns that name.
    """
    target = path.with_name(path.name + suffix)
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}{suffix}.{number}")
    for companion in _COMPANIONS:
        part = path.with_name(path.name + companion)
        if part.exists():
            os.rename(part, target.with_name(target.name + companion))
    return target


def quarantined_paths(path: Path) -> list[Path]:
    """Return the current paths of damaged files that had this path, by name."""
    names = [*path.parent.glob(f"{path.name}{DAMAGED_SUFFIX}*")]
    return sorted(name for name in names if not name.name.endswith(("-wal", "-shm")))


def read_imported_opening(path: Path) -> int:
    """Return the opening of the last database that was taken over.

    ``path`` is its name. 0 if there was none. :class:`Corrupt` if the note about it is damaged.
    """
    note = _note_of(path)
    try:
        return int(note.read_text(encoding="ascii"))
    except FileNotFoundError:
        return 0
    except ValueError:
        raise Corrupt(
            f"{note} does not hold a number: write into it the user_version of the database that "
            "was taken over last, or 0"
        ) from None


def note_imported_opening(path: Path, opening: int) -> None:
    """Remember the opening of the database that was taken over."""
    write_atomically(_note_of(path), f"{opening}\n", sync=True)


def is_damaged_since_import(path: Path) -> bool:
    """True if a database was quarantined after the last one was taken over."""
    damaged = quarantined_paths(path)
    if not damaged:
        return False
    note = _note_of(path)
    # Renaming a file sets its time of change.
    return not note.exists() or damaged[-1].stat().st_ctime > note.stat().st_mtime


def _note_of(path: Path) -> Path:
    """File with the opening of the last database of this path that was taken over."""
    return path.with_name(f"{path.name}.imported")


# -- context.state ---------------------------------------------------------------------------------


def read_database(path: Path) -> InitialContents | None:
    """Read the SQLite database of ``context.state``.

    ``None`` if there is none. :class:`Corrupt` if it is damaged or half-written; then it is
    renamed, as the error says.
    """
    if not path.exists():
        return None
    try:
        with _local_copy(path) as database:
            return _contents_of(database)
    except sqlite3.OperationalError as error:
        # The disk or a limit of the process, not the contents.
        raise Unavailable(f"the state in {path} cannot be read now ({error}): retried") from None
    except (sqlite3.DatabaseError, ValueError, msgspec.MsgspecError) as error:
        target = set_aside(path, DAMAGED_SUFFIX)
        raise damaged_database(path, target, f"cannot be read ({error})") from None


def damaged_database(path: Path, target: Path, reason: str) -> Corrupt:
    """Error that names a quarantined database."""
    return Corrupt(
        f"the state in {path} {reason}, and is kept as {target.name}: put a copy that is whole in "
        f"its place, or move {target.name} to another folder to start the task with empty state"
    )


@contextmanager
def _local_copy(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the database without a lock, or a local copy of it.

    No mapped file is in its folder, which hosts may share.
    """
    log = path.with_name(f"{path.name}-wal")
    if not log.exists() or not log.stat().st_size:
        address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as database:
            yield database
        return
    # Its last transactions are in the log, which SQLite reads with a lock and a mapped file.
    with tempfile.TemporaryDirectory(prefix="storm-state-") as folder:
        copy = Path(folder) / "state.sqlite3"
        shutil.copyfile(path, copy)
        shutil.copyfile(log, f"{copy}-wal")
        with closing(sqlite3.connect(copy)) as database:
            yield database


def _contents_of(database: sqlite3.Connection) -> InitialContents:
    """Read an open database. ``ValueError`` if it is damaged or half-written."""
    # Decoded here: text that is not UTF-8 is damage.
    database.text_factory = bytes
    (verdict,) = database.execute("PRAGMA quick_check").fetchone()
    if verdict != b"ok":
        raise ValueError(verdict.decode(errors="replace"))
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    if not {b"state", b"applied"} <= tables:
        raise ValueError("it is half-written: its tables are missing")
    (openings,) = database.execute("PRAGMA user_version").fetchone()
    contents = Contents(encoded=True)
    for key, value in database.execute("SELECT CAST(key AS BLOB), value FROM state"):
        contents.values[key.decode()] = msgspec.Raw(_encoded(value))
    for (id,) in database.execute("SELECT CAST(id AS BLOB) FROM applied"):
        contents.ids[id.decode()] = 0
    return InitialContents(openings, contents)


def _encoded(value: Any) -> bytes:
    """Return a value in the form of the log.

    The database has JSON, or :data:`_TYPED` and the form of the log.
    """
    if not isinstance(value, bytes):
        raise ValueError("a value is a number")
    return value[1:] if value[:1] == _TYPED else encode_value(msgspec.json.decode(value))


# -- dead letters ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FormerLetters:
    """Dead letters of one task in files of JSON lines."""

    index: int
    """Index of the task that wrote them."""
    paths: tuple[Path, ...]
    letters: tuple[dict[str, Any], ...]
    """In order of their numbers."""
    checksums: tuple[str, ...]
    """Checksum and size of each file."""
    unreadable: int
    """Number of lines that are not letters, such as one that a killed process had begun."""

    def set_aside(self) -> list[Path]:
        """Rename the files, as read or as damaged.

        Returns the new names.
        """
        return [
            set_aside(path, DAMAGED_SUFFIX if self.unreadable else IMPORTED_SUFFIX)
            for path in self.paths
        ]


def letter_indexes(folder: Path) -> list[int]:
    """Indexes of the tasks that have files of dead letters in the folder."""
    names = {path.name.partition(".")[0] for path in folder.glob("*.jsonl")}
    return sorted(int(name) for name in names if name.isdecimal())


def read_letters(folder: Path, index: int) -> FormerLetters:
    """Read the letters of a task.

    A line is a letter, or a change of an earlier one of its number.
    """
    paths = [folder / f"{index}.old.jsonl", folder / f"{index}.jsonl"]
    paths = [path for path in paths if path.exists()]
    letters: dict[int, dict[str, Any]] = {}
    checksums: list[str] = []
    unreadable = 0
    for path in paths:
        raw = path.read_bytes()
        checksums.append(f"{zlib.crc32(raw):08x}.{len(raw)}")
        for line in raw.splitlines():
            try:
                change = msgspec.json.decode(line, type=dict[str, Any])
                letters.setdefault(int(change["number"]), {}).update(change)
            except (ValueError, TypeError, KeyError):
                unreadable += bool(line)
    # Changes of letters that were dropped have no values.
    complete = [letters[number] for number in sorted(letters) if "values" in letters[number]]
    return FormerLetters(index, tuple(paths), tuple(complete), tuple(checksums), unreadable)
