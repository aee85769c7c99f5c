"""Disk level of the read cache: an embedded key-value store.

It is SQLite unless the conf names another class.
"""

import logging
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from storm_dagster.host.resolve import load_plugin

_log = logging.getLogger(__name__)

_KEYS_PER_QUERY = 500
"""Well below 999, the limit of older releases of SQLite for the variables of a statement."""


class DiskCache(Protocol):
    """A store of bytes by text keys that survives the process.

    All methods may be called from any thread.
    """

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Values of those keys that the store has."""
        ...

    def put_many(self, values: Mapping[str, bytes]) -> None:
        """Create or replace these keys."""

    def remove(self, keys: Iterable[str]) -> None:
        """Remove these keys; a missing one is not an error."""

    def clear(self) -> None:
        """Remove all keys."""

    def close(self) -> None:
        """Close the store."""


class SqliteCache:
    """:class:`DiskCache` in one SQLite file.

    A damaged file is replaced, because it is only a cache.
    """

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
        """Open the file, or create it; ``sqlite3.DatabaseError`` if it is damaged."""
        db = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        # Lost writes only cost a read.
        db.execute("PRAGMA synchronous=OFF")
        db.execute(
            "CREATE TABLE IF NOT EXISTS reads (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID"
        )
        # Visits every row, so that most damage shows now.
        db.execute("SELECT count(*) FROM reads").fetchone()
        return db

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        key_list = list(keys)
        values: dict[str, bytes] = {}
        with self._lock:
            for start in range(0, len(key_list), _KEYS_PER_QUERY):
                part = key_list[start : start + _KEYS_PER_QUERY]
                # The statement contains only question marks, never a key.
                marks = ",".join("?" * len(part))
                query = f"SELECT key, value FROM reads WHERE key IN ({marks})"
                values.update(self._db.execute(query, part))
        return values

    def put_many(self, values: Mapping[str, bytes]) -> None:
        self._write("INSERT OR REPLACE INTO reads VALUES (?, ?)", list(values.items()))

    def remove(self, keys: Iterable[str]) -> None:
        self._write("DELETE FROM reads WHERE key = ?", [(key,) for key in keys])

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        with self._lock:
            self._db.execute("BEGIN")
            try:
                self._db.executemany(statement, rows)
                self._db.execute("COMMIT")
            except sqlite3.Error:
                # Otherwise each later write would fail, also once the disk has room. SQLite has
                # ended the transaction itself after some errors.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def clear(self) -> None:
        with self._lock:
            self._db.execute("DELETE FROM reads")

    def close(self) -> None:
        with self._lock:
            self._db.close()


def open_disk_cache(directory: Path, class_name: str | None, *, reset: bool) -> DiskCache | None:
    """Open the disk level in ``directory``; ``None``, with a warning, if the disk refuses it.

    ``class_name`` is ``module:class``, which is called with the folder; ``None``:
    :class:`SqliteCache`. With ``reset`` the cache is emptied. Raises :class:`InvalidRequest` if the
    class cannot be loaded.
    """
    cache_class = load_plugin("nimbus.cache.class", class_name) if class_name else SqliteCache
    try:
        cache: DiskCache = cache_class(directory)
        if reset:
            cache.clear()
    except (OSError, sqlite3.Error) as error:
        _log.warning(
            "the read cache in %s cannot be used (%s): nodes are read from ZooKeeper until the "
            "next start",
            directory,
            error,
        )
        return None
    return cache
