"""The disk level of the read cache: an embedded key-value store, SQLite unless the conf names
another.
"""

import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from storm_dagster.host.resolve import load_plugin


class DiskCache(Protocol):
    """A store of bytes by text keys that survives the process. All methods may be called from any
    thread.
    """

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Those of the keys that are there."""
        ...

    def put_many(self, values: Mapping[str, bytes]) -> None:
        """Create or replace."""

    def remove(self, keys: Iterable[str]) -> None:
        """Drop them; missing ones are no error."""

    def clear(self) -> None:
        """Drop everything."""

    def close(self) -> None:
        """End it."""


class SqliteCache:
    """:class:`DiskCache` in one SQLite file. A damaged file is replaced: it is only a cache."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "reads.sqlite"
        self._lock = threading.Lock()
        try:
            self._db = self._open()
        except sqlite3.DatabaseError:
            self._path.unlink(missing_ok=True)
            self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        # Lost writes only cost a read.
        db.execute("PRAGMA synchronous=OFF")
        db.execute(
            "CREATE TABLE IF NOT EXISTS reads (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID"
        )
        db.execute("SELECT count(*) FROM reads").fetchone()
        return db

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        wanted = list(keys)
        found: dict[str, bytes] = {}
        with self._lock:
            for start in range(0, len(wanted), 500):
                part = wanted[start : start + 500]
                marks = ",".join("?" * len(part))
                # Only question marks are put into the text.
                found.update(
                    self._db.execute(f"SELECT key, value FROM reads WHERE key IN ({marks})", part)
                )
        return found

    def put_many(self, values: Mapping[str, bytes]) -> None:
        self._write("INSERT OR REPLACE INTO reads VALUES (?, ?)", list(values.items()))

    def remove(self, keys: Iterable[str]) -> None:
        self._write("DELETE FROM reads WHERE key = ?", [(key,) for key in keys])

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        with self._lock:
            self._db.execute("BEGIN")
            self._db.executemany(statement, rows)
            self._db.execute("COMMIT")

    def clear(self) -> None:
        with self._lock:
            self._db.execute("DELETE FROM reads")

    def close(self) -> None:
        with self._lock:
            self._db.close()


def open_disk_cache(directory: Path, named: str | None, *, reset: bool) -> DiskCache:
    """The disk level in ``directory``; ``named`` is ``module:class``, called with the folder.

    With ``reset`` it is emptied. Raises :class:`InvalidRequest` when the class cannot be loaded.
    """
    make = SqliteCache if not named else load_plugin("nimbus.cache.class", named)
    cache: DiskCache = make(directory)
    if reset:
        cache.clear()
    return cache
