"""Worker processes: identity, notice of their death, kill with all descendants.

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
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from storm_dagster.core.slots.model import Worker
from storm_dagster.host.clock import boot_clock, boot_id
from storm_dagster.host.descendants import (
    Identity,
    kill_descendants,
    process_table,
    seen_descendants,
    user_of,
)
from storm_dagster.host.processes import ExactProcess, start_ticks
from storm_dagster.host.waiting import poll
from storm_dagster.supervisor.worker_cgroups import WorkerCgroup

_log = logging.getLogger(__name__)
_POLL_MS = 100
"""Interval of checking processes without a pidfd, and cgroups whose processes are ending."""
_REMOVAL_SECS = 1.0
"""Time in which killed processes end, before a supervisor that stops leaves their cgroup."""
_LOOK_SECS = 5.0
"""Interval of reading the process tree of workers without a cgroup."""


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
    worker_id: str = ""
    """Mark of its descendants; ``""`` if they have none."""
    cgroup: WorkerCgroup | None = None
    """``None`` where the supervisor cannot make one."""

    def end(self) -> None:
        """KILL the process and all that descends from it."""
        self.signal(signal.SIGKILL)
        end_descendants(self)
        if self.cgroup is not None:
            self.cgroup.close()


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
    failure: str = ""
    """Failure in that heartbeat: a task that could not be opened."""


def end_descendants(
    process: WorkerProcess, seen: Collection[Identity] = (), user: int | None = None
) -> int:
    """KILL all that descends from a worker, and return the number of processes outside its cgroup.

    These are the processes of its cgroup, of its session, with its mark, and those that were
    ``seen``. ``user`` is the worker's, if it is known. While a member of the session lives, the
    kernel does not reuse the leader's pid: if another process has it, the session has no member.
    """
    if process.boot_id != boot_id():
        return 0
    if process.cgroup is not None:
        process.cgroup.kill()
    current_ticks = start_ticks(process.pid)
    is_reused = current_ticks is not None and current_ticks != process.start_ticks
    session = 0 if is_reused else process.pid
    return kill_descendants(process.worker_id, seen, session, user)


Watched: TypeAlias = dict[str, tuple[WorkerProcess, int]]
"""Key -> process and its pidfd; -1 without one."""


class ProcessWatch:
    """Thread that reports the death of each watched process once."""

    def __init__(self, on_exit: Callable[[str, int | None], None]) -> None:
        """Start the thread.

        ``on_exit(key, status)`` runs in it. ``status`` is the exit code, minus the signal's number,
        or ``None`` for a process that is not a child.
        """
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._watched: Watched = {}
        self._checked: set[str] = set()
        """Keys of the processes that were alive after their pidfd was opened."""
        self._descendants: dict[str, set[Identity]] = {}
        """Key -> descendants of a worker without a cgroup, by the last look."""
        self._users: dict[str, int] = {}
        """Key -> user of the process, where it lived when it was added."""
        self._looked_at = float("-inf")
        """Boot clock of that look."""
        self._ending: list[WorkerCgroup] = []
        """Cgroups of dead workers, in which killed processes are ending."""
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
        user = user_of(process.pid)
        with self._lock:
            self._watched[key] = (process, handle)
            if user is not None:
                self._users[key] = user
        self._wake_thread()

    def seen(self, key: str) -> frozenset[Identity]:
        """Descendants of a watched worker without a cgroup, as they were at the last look."""
        return frozenset(self._descendants.get(key, ()))

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
            waiting = select.poll()
            waiting.register(self._woken, select.POLLIN)
            for _, handle in watched.values():
                if handle >= 0:
                    waiting.register(handle, select.POLLIN)
            ready = {descriptor for descriptor, _ in waiting.poll(self._timeout_ms(watched))}
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
            self._look(watched)
            self._ending = [cgroup for cgroup in self._ending if not cgroup.close()]
        with self._lock:
            for _, handle in self._watched.values():
                if handle >= 0:
                    os.close(handle)
            self._watched.clear()
        for cgroup in self._ending:
            poll(cgroup.close, timeout=_REMOVAL_SECS, pause=0.02)
        os.close(self._woken)
        os.close(self._wake)

    def _timeout_ms(self, watched: Watched) -> float | None:
        """Time after which the thread wakes by itself; ``None`` if only a death wakes it."""
        if self._ending or any(handle < 0 for _, handle in watched.values()):
            return _POLL_MS
        if any(process.cgroup is None for process, _ in watched.values()):
            return 1000 * _LOOK_SECS
        return None

    def _look(self, watched: Watched) -> None:
        """Note the descendants of the live workers that have no cgroup, at times."""
        workers = {key: process for key, (process, _) in watched.items() if process.cgroup is None}
        if not workers or boot_clock() - self._looked_at < _LOOK_SECS:
            return
        self._looked_at = boot_clock()
        table = process_table()
        for key, process in workers.items():
            if key in self._checked:
                worker = (process.pid, process.start_ticks)
                former = self._descendants.get(key, set())
                self._descendants[key] = seen_descendants(table, worker, former)

    def _on_death(self, key: str, process: WorkerProcess, handle: int) -> None:
        """End what descends from a dead process, and then report it.

        In this order nothing of it holds a port of its slot when the next worker starts, and a
        supervisor that dies in between finds the worker's folder.
        """
        with self._lock:
            self._watched.pop(key, None)
            user = self._users.pop(key, None)
        self._checked.discard(key)
        status = process.child.wait() if process.child is not None else None
        if handle >= 0:
            os.close(handle)
        try:
            end_descendants(process, self._descendants.pop(key, ()), user)
        except Exception:
            # The thread must live: it reports all later deaths.
            _log.exception("processes left by process %d could not be searched", process.pid)
        if process.cgroup is not None:
            # Killed processes may take a moment, which no other worker waits for.
            self._ending.append(process.cgroup)
        self._on_exit(key, status)
