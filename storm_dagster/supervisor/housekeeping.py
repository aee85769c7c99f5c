"""What a supervisor does on the side, off its loop: state file, dead workers' folders, unused code, logs."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from storm_dagster.model.run_file import RunFile
from storm_dagster.supervisor.local_state import LocalState, LocalStateFile

__all__ = ["Housekeeper", "remove_run_file", "rotate"]

_log = logging.getLogger(__name__)


class Housekeeper:
    """One thread that does small jobs in order. A job that fails is logged and does not stop the others."""

    def __init__(self, state_file: LocalStateFile) -> None:
        self._file = state_file
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._state: LocalState | None = None
        self._thread = threading.Thread(target=self._run, name="housekeeping", daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], object]) -> None:
        """Do ``job`` when those before it are done."""
        self._jobs.put(job)

    def save(self, state: LocalState) -> None:
        """Write the state file; of several states in a row the newest is enough."""
        if state != self._state:
            self._state = state
            self._jobs.put(self.save_again)

    def save_again(self) -> None:
        """Write the newest state unless it was written already: after a disk that was full has space again."""
        if self._state is not None:
            self._file.write(self._state)

    def close(self, deadline_secs: float = 5.0) -> None:
        """Finish what was asked for, within the deadline."""
        self._jobs.put(None)
        self._thread.join(timeout=deadline_secs)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                _log.exception("housekeeping failed")


def remove_run_file(home: Path, supervisor_id: str, port: int, pid: int, ticks: int) -> None:
    """Remove the run file of a worker that is dead; never that of the one that followed it."""
    path = RunFile.path_of(home, "worker", f"{supervisor_id}-{port}")
    run = RunFile.read(path)
    if run is not None and (run.pid, run.start_ticks) == (pid, ticks):
        run.remove(home)


def remove_folder(folder: Path) -> None:
    """Remove a dead worker's working folder."""
    shutil.rmtree(folder, ignore_errors=True)


def rotate(log: Path, max_bytes: int, backups: int) -> bool:
    """Rotate a log that some process appends to, when it is larger than ``max_bytes``; whether it was done.

    The content is copied and the file then emptied, because its writers keep it open (and outlive us). What is
    written between the copy's last look and the truncation is lost: at most some lines.
    """
    try:
        if log.stat().st_size <= max_bytes:
            return False
    except FileNotFoundError:
        return False
    numbered = [log.with_name(f"{log.name}.{number}") for number in range(1, backups + 1)]
    for older, newer in zip(reversed(numbered), reversed(numbered[:-1]), strict=False):
        if newer.exists():
            os.replace(newer, older)
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(log, flags), "r+b") as source:
        if numbered:
            # A planted link is replaced, never written through (hazard S9).
            numbered[0].unlink(missing_ok=True)
            sink_flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(numbered[0], sink_flags, 0o644), "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
        source.truncate(0)
    return True
