"""Worker processes: identity, notice of their death, kill with all children.

The identity is exact: pid, start time and boot id. Deaths are noticed by pidfds, for children and
adopted processes alike (Linux >= 5.3; without them, by polling ten times a second).
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storm_dagster.core.slots.model import Worker
from storm_dagster.host.clock import boot_id
from storm_dagster.host.processes import (
    ExactProcess,
    Process,
    processes,
    signal_exactly,
    start_ticks,
)

_log = logging.getLogger(__name__)
_POLL_MS = 100
"""Interval of checking processes without a pidfd."""


@dataclass(frozen=True)
class WorkerProcess(ExactProcess):
    """A worker process.

    It is the leader of its session, so that its children can be found.
    """

    pid: int
    start_ticks: int
    boot_id: str
    child: subprocess.Popen[bytes] | None = None
    """Set if this supervisor process started it."""

    def end(self) -> None:
        """KILL the process and everything in its session."""
        self.signal(signal.SIGKILL)
        end_session(self)


@dataclass
class LiveWorker:
    """A worker process in a slot, its files, and its newest heartbeat."""

    port: int
    worker: Worker
    process: WorkerProcess
    heartbeat_path: Path
    log_path: Path
    started: float
    """Boot clock, seconds."""
    count: int = -1
    """Count of the newest heartbeat; -1 before the first."""
    status: str = ""
    """Status in that heartbeat."""


def session_members(leader: int) -> list[Process]:
    """Live processes in the session of that leader, without the leader."""
    return [
        process for process in processes() if process.session == leader and process.pid != leader
    ]


def end_session(process: WorkerProcess) -> int:
    """KILL the other processes in a worker's session, and return their number.

    They are shell components. While a member lives, the kernel does not reuse the leader's pid: if
    another process has it, the session has no member.
    """
    current_ticks = start_ticks(process.pid)
    if process.boot_id != boot_id():
        return 0
    if current_ticks is not None and current_ticks != process.start_ticks:
        return 0
    killed = 0
    for member in session_members(process.pid):
        killed += signal_exactly(member.pid, member.start_ticks, signal.SIGKILL)
    return killed


class ProcessWatch:
    """Thread that reports the death of each watched process once."""

    def __init__(self, on_exit: Callable[[str, int | None], None]) -> None:
        """Start the thread.

        ``on_exit(key, status)`` runs in it. ``status`` is the exit code, minus the signal's number,
        or ``None`` for a process that is not a child.
        """
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._watched: dict[str, tuple[WorkerProcess, int]] = {}
        """Key -> process and its pidfd; -1 without one."""
        self._checked: set[str] = set()
        """Keys of the processes that were alive after their pidfd was opened."""
        # Ends of a pipe: a byte in it wakes the thread from its poll.
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closed = False
        """Ends the thread at its next wake."""
        self._thread = threading.Thread(target=self._run, name="process-watch", daemon=True)
        self._thread.start()

    def add(self, key: str, process: WorkerProcess) -> None:
        """Watch ``process``; a dead one is reported at once."""
        try:
            handle = os.pidfd_open(process.pid)
        except (OSError, AttributeError):
            handle = -1
        with self._lock:
            self._watched[key] = (process, handle)
        self._wake_thread()

    def close(self) -> None:
        """Stop watching. The processes continue."""
        self._closed = True
        self._wake_thread()
        self._thread.join(timeout=5)

    def _wake_thread(self) -> None:
        # A full pipe still wakes the thread; a closed one means that it has stopped.
        with contextlib.suppress(OSError):
            os.write(self._wake, b"x")

    def _run(self) -> None:
        """Wait for deaths until the watch is closed, then close all descriptors."""
        while not self._closed:
            with self._lock:
                watched = dict(self._watched)
            poll = select.poll()
            poll.register(self._woken, select.POLLIN)
            for _, handle in watched.values():
                if handle >= 0:
                    poll.register(handle, select.POLLIN)
            lacks_handle = any(handle < 0 for _, handle in watched.values())
            timeout_ms = _POLL_MS if lacks_handle else None
            ready = {descriptor for descriptor, _ in poll.poll(timeout_ms)}
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            for key, (process, handle) in watched.items():
                # A different start time means that the process died before its pidfd was opened.
                may_be_dead = handle in ready or handle < 0 or key not in self._checked
                if may_be_dead and not process.alive():
                    self._on_death(key, process, handle)
                else:
                    self._checked.add(key)
        with self._lock:
            for _, handle in self._watched.values():
                if handle >= 0:
                    os.close(handle)
            self._watched.clear()
        os.close(self._woken)
        os.close(self._wake)

    def _on_death(self, key: str, process: WorkerProcess, handle: int) -> None:
        """Report a dead process, and then end the processes left in its session."""
        with self._lock:
            self._watched.pop(key, None)
        self._checked.discard(key)
        status = process.child.wait() if process.child is not None else None
        if handle >= 0:
            os.close(handle)
        self._on_exit(key, status)
        try:
            end_session(process)
        except OSError as error:
            _log.warning(
                "processes left by process %d could not be searched: %s", process.pid, error
            )
