"""Background jobs of a supervisor: state file, worker folders, logs."""

import errno
import logging
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from storm_dagster.supervisor.local_state import LocalState, LocalStateFile

_log = logging.getLogger(__name__)

KEEP_LOGS_SECS = 7 * 86_400.0
"""Logs of removed topologies are kept for a week, as Storm's are, for analysis after a kill."""
LOG_BACKUPS = 3
"""Rotated logs that are kept of each worker."""
MAX_COPIED = 2
"""Largest copy of a rotated log, as a multiple of the size at which it is rotated: a worker that
writes fast gets beyond that size between two checks.
"""
_COPY_BYTES = 1 << 20
"""Bytes of a log that are in memory at one time."""


class Housekeeper:
    """Thread that runs small jobs in order.

    A job that fails is logged, and the next one runs.
    """

    def __init__(self, state_file: LocalStateFile) -> None:
        self._file = state_file
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        """Pending jobs; ``None`` ends the thread."""
        self._state: LocalState | None = None
        """Newest state to write; ``None`` before the first :meth:`save`."""
        self._thread = threading.Thread(target=self._run, name="housekeeping", daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], object]) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def save(self, state: LocalState) -> None:
        """Write the state file, if the state has changed.

        Of several pending states only the newest is written.
        """
        if state != self._state:
            self._state = state
            self._jobs.put(self.save_again)

    def save_again(self) -> None:
        """Write the newest state unless it is on disk.

        The disk may have been full before. Raises ``OSError`` if it still is.
        """
        if self._state is not None:
            self._file.write(self._state)

    def close(self, deadline_secs: float = 5.0) -> None:
        """Finish the queued jobs, within the deadline."""
        self._jobs.put(None)
        self._thread.join(timeout=deadline_secs)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                _log.exception("housekeeping failed")


class _SlotLogs(NamedTuple):
    """Log folder of one slot; sorts by the time of its last write."""

    written_at: float
    """Newest write of the folder or a file in it, epoch seconds."""
    path: Path
    size: int
    """Bytes, of the folder and its files."""


def _slot_logs(path: Path) -> _SlotLogs:
    stats = [entry.lstat() for entry in (path, *path.glob("*"))]
    written_at = max(stat.st_mtime for stat in stats)
    size = sum(stat.st_size for stat in stats)
    return _SlotLogs(written_at, path, size)


def remove_old_logs(
    home: Path, now_secs: float, *, used: Collection[Path] = (), max_bytes: int | None = None
) -> list[Path]:
    """Remove old log folders of worker slots, and return them.

    A folder is old if it had no write for a week before ``now_secs`` (epoch). While all logs have
    more than ``max_bytes`` (0 or ``None``: no limit), the oldest folders are removed, too. The
    folders ``used`` by live workers stay. Links are removed, never followed.
    """
    workers = home / "logs" / "workers"
    topologies = [
        path for path in sorted(workers.glob("*")) if path.is_dir() and not path.is_symlink()
    ]
    slots: list[_SlotLogs] = []
    for topology in topologies:
        slots.extend(_slot_logs(path) for path in sorted(topology.iterdir()))
    excess = sum(slot.size for slot in slots) - (max_bytes or sys.maxsize)
    removed: list[Path] = []
    for slot in sorted(slots):
        expired = now_secs - slot.written_at > KEEP_LOGS_SECS
        if slot.path in used or (not expired and excess <= 0):
            continue
        if slot.path.is_dir() and not slot.path.is_symlink():
            shutil.rmtree(slot.path, ignore_errors=True)
        else:
            slot.path.unlink(missing_ok=True)
        excess -= slot.size
        removed.append(slot.path)
    for topology in topologies:
        with suppress(OSError):  # It holds other slots.
            topology.rmdir()
    return removed


def rotate(log: Path, max_bytes: int, backups: int) -> bool:
    """Rotate a log that is in use, if it is larger than ``max_bytes``.

    Returns true if it was rotated. The former contents are ``<log>.1`` (the newest) to
    ``<log>.<backups>``. The content is copied and the file then truncated, because its writers
    keep it open (and outlive this process). Lines written between the copy and the truncation are
    lost: a few at most. Of a log that has grown beyond :data:`MAX_COPIED` times ``max_bytes`` the
    end is copied, and holes of a sparse file stay holes: a worker sets its size as it likes. Raises
    ``OSError`` if the copy fails, and for a link.
    """
    try:
        if log.stat().st_size <= max_bytes:
            return False
    except FileNotFoundError:
        return False
    copies = [log.with_name(f"{log.name}.{number}") for number in range(1, backups + 1)]
    # Without copy 1, the last rotation failed after this step: a second shift would lose the oldest
    # copy for no new one.
    if copies and copies[0].exists():
        for number in range(len(copies) - 1, 0, -1):
            newer = copies[number - 1]
            if newer.exists():
                os.replace(newer, copies[number])
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(log, flags), "r+b") as source:
        if copies:
            _copy_log(source, copies[0], MAX_COPIED * max_bytes)
        source.truncate(0)
    return True


def _copy_log(source: IO[bytes], target: Path, max_bytes: int) -> None:
    """Copy the end of a log to a new file of its owner.

    After an error, which is raised, there is no file.
    """
    # A link is replaced, never followed: it could be planted to overwrite any file.
    target.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(target, flags, 0o644), "wb") as sink:
            owner = os.fstat(source.fileno())
            if os.geteuid() == 0:
                # The copy counts for the quota of the worker's user, as the log does.
                os.fchown(sink.fileno(), owner.st_uid, owner.st_gid)
            start = max(0, owner.st_size - max_bytes)
            copy_data(source.fileno(), sink.fileno(), start, owner.st_size)
    except OSError:
        target.unlink(missing_ok=True)  # A part must not take the rest of the disk.
        raise


def copy_data(source: int, sink: int, start: int, end: int) -> None:
    """Copy the bytes from ``start`` to ``end``; a hole of the source is one of the copy."""
    position = start
    while position < end:
        try:
            data = os.lseek(source, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # Only a hole is left.
        hole = min(end, os.lseek(source, data, os.SEEK_HOLE))
        os.lseek(source, data, os.SEEK_SET)
        os.lseek(sink, data - start, os.SEEK_SET)
        position = data
        while position < hole:
            chunk = os.read(source, min(_COPY_BYTES, hole - position))
            if not chunk:
                return  # Its writer has truncated it.
            view = memoryview(chunk)
            while view:
                view = view[os.write(sink, view) :]
            position += len(chunk)
    os.ftruncate(sink, max(0, end - start))
