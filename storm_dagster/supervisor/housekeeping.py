"""Background jobs of a supervisor: state file, folders of dead workers, logs."""

import logging
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from storm_dagster.supervisor.local_state import LocalState, LocalStateFile

_log = logging.getLogger(__name__)

KEEP_LOGS_SECS = 7 * 86_400.0
"""Logs of removed topologies are kept for a week, as Storm's are, for analysis after a kill."""


class Housekeeper:
    """Thread that runs small jobs in order. A job that fails is logged, and the next one runs."""

    def __init__(self, state_file: LocalStateFile) -> None:
        self._file = state_file
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._state: LocalState | None = None
        self._thread = threading.Thread(target=self._run, name="housekeeping", daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], object]) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def save(self, state: LocalState) -> None:
        """Write the state file, if the state has changed; of several pending states only the newest
        is written.
        """
        if state != self._state:
            self._state = state
            self._jobs.put(self.save_again)

    def save_again(self) -> None:
        """Write the newest state unless that is done, in case the disk was full before."""
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


def remove_old_logs(
    home: Path, now_secs: float, *, used: Collection[Path] = (), most_bytes: int | None = None
) -> list[Path]:
    """Remove log folders of worker slots, and return them: those without a write for a week, and
    while all logs have more than ``most_bytes`` the oldest ones.

    The folders ``used`` by live workers stay. Links are removed, never followed.
    """
    workers = home / "logs" / "workers"
    topologies = [
        path for path in sorted(workers.glob("*")) if path.is_dir() and not path.is_symlink()
    ]
    slots: list[tuple[float, Path, int]] = []
    for slot in (slot for topology in topologies for slot in sorted(topology.iterdir())):
        found = [path.lstat() for path in (slot, *slot.glob("*"))]
        slots.append(
            (max(stat.st_mtime for stat in found), slot, sum(stat.st_size for stat in found))
        )
    excess = sum(size for *_, size in slots) - (most_bytes or sys.maxsize)
    removed: list[Path] = []
    for newest, slot, size in sorted(slots):
        if slot in used or (now_secs - newest <= KEEP_LOGS_SECS and excess <= 0):
            continue
        if slot.is_dir() and not slot.is_symlink():
            shutil.rmtree(slot, ignore_errors=True)
        else:
            slot.unlink(missing_ok=True)
        excess -= size
        removed.append(slot)
    for topology in topologies:
        with suppress(OSError):  # It holds other slots.
            topology.rmdir()
    return removed


LOG_BACKUPS = 3
"""Rotated logs that are kept of each worker."""


def rotate(log: Path, max_bytes: int, backups: int) -> bool:
    """Rotate a log that is in use, if it is larger than ``max_bytes``. Whether it was rotated.

    The content is copied and the file then truncated, because its writers keep it open (and outlive
    this process). Lines written between the copy and the truncation are lost: a few at most.
    """
    try:
        if log.stat().st_size <= max_bytes:
            return False
    except FileNotFoundError:
        return False
    numbered = [log.with_name(f"{log.name}.{number}") for number in range(1, backups + 1)]
    for older, newer in zip(reversed(numbered), reversed(numbered[:-1]), strict=False):
        if numbered[0].exists() and newer.exists():
            os.replace(newer, older)
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(log, flags), "r+b") as source:
        if numbered:
            # A link is replaced, never followed: it could be planted to overwrite any file.
            numbered[0].unlink(missing_ok=True)
            sink_flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                with os.fdopen(os.open(numbered[0], sink_flags, 0o644), "wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
            except OSError:
                numbered[0].unlink(missing_ok=True)  # A part must not take the rest of the disk.
                raise
        source.truncate(0)
    return True
