"""Durable state of one task: a small key-value store that survives the worker.

The path below ``topology.state.dir`` is topology *name*, component and task id, so that the state
survives restarts, moves between slots of one host, and new deployments of the topology.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from storm_dagster.model.errors import Corrupt, Unavailable
from storm_dagster.model.values import decode_value, encode_value

_TYPED = b"\xc1"
"""First byte of a value that JSON would change. Neither JSON nor MessagePack has it."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS applied (id TEXT PRIMARY KEY) WITHOUT ROWID;
"""


def _encode(key: str, value: Any) -> bytes:
    """Bytes of a value: JSON, which every release reads, if the value comes out of it with its
    types.
    """
    try:
        typed = encode_value(value)
    except TypeError as error:
        raise TypeError(f"the state of {key!r:.80} cannot be saved: it is {error}") from None
    try:
        plain = msgspec.json.encode(value)
        if encode_value(msgspec.json.decode(plain)) == typed:
            return plain
    except (TypeError, ValueError, OverflowError):
        pass
    return _TYPED + typed


def _decode(raw: bytes) -> Any:
    return decode_value(memoryview(raw)[1:]) if raw[:1] == _TYPED else msgspec.json.decode(raw)


class TaskState:
    """Map of strings to the values that tuples may hold, and a set of applied ids.

    :meth:`save` changes both in one transaction: after a crash all or nothing is stored. So a bolt
    that saves the id of a line together with the changed counts, and acks only then, counts every
    line exactly once, although lines are delivered at least once::

        if not state.applied(line_id):
            state.save({word: state.get(word, 0) + n for word, n in counts.items()}, applied=[line_id])
        self.ack(tup)
    """

    def __init__(self, path: Path, owns: Callable[[], bool] | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._owns = owns
        self._lock = threading.RLock()
        try:
            self._db = sqlite3.connect(
                path, timeout=10.0, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode=WAL")
            # In WAL mode NORMAL survives the death of the process; `sync` of save() adds a power
            # cut.
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise Corrupt(
                f"the state of this task in {path} cannot be opened ({error}): move the file away to start with nothing"
            ) from None

    @staticmethod
    def open(
        folder: Path,
        topology: str,
        component: str,
        task: int,
        owns: Callable[[], bool] | None = None,
    ) -> "TaskState":
        """Open the store of one task; ``owns()``: whether this process may still write."""
        safe = quote(component, safe="").replace(".", "%2E") or "%00"
        return TaskState(folder / topology / safe / f"{task}.sqlite3", owns)

    def openings(self) -> int:
        """How often the store was opened for a task, as :meth:`count_opening` says."""
        with self._lock:
            return self._db.execute("PRAGMA user_version").fetchone()[0]

    def count_opening(self, number: int) -> None:
        """Set :meth:`openings`, unless the worker's lease has ended."""
        with self._lock:
            if self._owns is None or self._owns():
                self._db.execute(f"PRAGMA user_version = {number:d}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default``."""
        with self._lock:
            row = self._db.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
        return default if row is None else _decode(row[0])

    def items(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """All (key, value) pairs whose key starts with ``prefix``, by key."""
        with self._lock:
            rows = self._db.execute(
                "SELECT key, value FROM state WHERE substr(key, 1, ?) = ? ORDER BY key",
                (len(prefix), prefix),
            ).fetchall()
        for key, value in rows:
            yield key, _decode(value)

    def __len__(self) -> int:
        with self._lock:
            return self._db.execute("SELECT count(*) FROM state").fetchone()[0]

    def applied(self, id: object) -> bool:
        """Whether the id was saved as applied."""
        with self._lock:
            return (
                self._db.execute("SELECT 1 FROM applied WHERE id = ?", (str(id),)).fetchone()
                is not None
            )

    def applied_ids(self) -> set[str]:
        """All applied ids, as strings."""
        with self._lock:
            return {row[0] for row in self._db.execute("SELECT id FROM applied")}

    def save(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        applied: Iterable[object] = (),
        remove: Iterable[str] = (),
        forget: Iterable[object] = (),
        sync: bool = False,
    ) -> None:
        """Set ``values``, delete the keys ``remove``, add ids to the applied ones and drop those in
        ``forget``.

        All or nothing. It survives the death of the process at once, and with ``sync`` also a power
        cut. Raises :class:`Unavailable`, having changed nothing, when the worker's lease has ended:
        then another worker may own the task.
        """
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany("DELETE FROM state WHERE key = ?", [(key,) for key in remove])
                self._db.executemany(
                    "INSERT INTO state VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                    [(key, _encode(key, value)) for key, value in (values or {}).items()],
                )
                self._db.executemany(
                    "INSERT OR IGNORE INTO applied VALUES (?)", [(str(id),) for id in applied]
                )
                self._db.executemany(
                    "DELETE FROM applied WHERE id = ?", [(str(id),) for id in forget]
                )
                if self._owns is not None and not self._owns():
                    raise Unavailable(
                        "the worker's lease ended, its tasks may run elsewhere by now: the state was not saved"
                    )
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            if sync:
                self._db.execute("PRAGMA wal_checkpoint(FULL)")

    def clear(self) -> None:
        """Delete everything."""
        with self._lock:
            self._db.executescript("BEGIN; DELETE FROM state; DELETE FROM applied; COMMIT;")

    def close(self) -> None:
        """Close the file; further use fails."""
        with self._lock:
            self._db.close()
