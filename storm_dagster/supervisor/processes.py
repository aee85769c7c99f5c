"""Worker processes: knowing exactly which one is meant, hearing of its death at once, ending it whole.

A process is named by pid, start time and boot id together. Deaths are heard of through pidfds, which work for
children and for processes that an earlier supervisor started alike (Linux >= 5.3; where the kernel refuses
them, ten looks a second).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storm_dagster.model.run_file import boot_id, start_ticks

__all__ = ["ProcessWatch", "WorkerProcess", "end_session", "session_members"]

_log = logging.getLogger(__name__)
_LOOK_MS = 100


@dataclass(frozen=True)
class WorkerProcess:
    """One worker process; the leader of its own session, so that all it starts can be found again."""

    pid: int
    start_ticks: int
    boot_id: str
    child: subprocess.Popen[bytes] | None = None
    """Given when this very supervisor started it."""

    def alive(self) -> bool:
        """Whether exactly this process runs; a zombie does not."""
        return self.boot_id == boot_id() and start_ticks(self.pid) == self.start_ticks

    def signal(self, number: int) -> bool:
        """Send a signal to exactly this process; ``False`` when it is gone."""
        return self.boot_id == boot_id() and _signal_exactly(self.pid, self.start_ticks, number)

    def end(self) -> None:
        """KILL the process and everything in its session."""
        self.signal(signal.SIGKILL)
        end_session(self)


def _signal_exactly(pid: int, ticks: int, number: int) -> bool:
    """Signal the process of that pid and start time. The pidfd is held before the start time is compared, so
    that the pid cannot change hands in between."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):
        handle = -1
    try:
        if start_ticks(pid) != ticks:
            return False
        if handle >= 0:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(pid, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)


def session_members(leader: int) -> list[tuple[int, int]]:
    """(pid, start ticks) of the live processes in the session of that leader, itself left out."""
    found: list[tuple[int, int]] = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or entry.name == str(leader):
            continue
        try:
            raw = Path(entry.path, "stat").read_bytes()
        except OSError:
            continue
        fields = raw[raw.rfind(b")") + 2 :].split()
        if len(fields) >= 20 and fields[0] not in (b"Z", b"X") and int(fields[3]) == leader:
            found.append((int(entry.name), int(fields[19])))
    return found


def end_session(process: WorkerProcess) -> int:
    """KILL what a worker started and left in its session (shell components); how many there were.

    While a member lives, the kernel gives the leader's pid to nobody; when a stranger has it now, there is
    no member left.
    """
    now = start_ticks(process.pid)
    if process.boot_id != boot_id() or (now is not None and now != process.start_ticks):
        return 0
    members = session_members(process.pid)
    return sum(_signal_exactly(pid, ticks, signal.SIGKILL) for pid, ticks in members)


class ProcessWatch:
    """A thread that reports the death of watched processes, each once."""

    def __init__(self, on_exit: Callable[[str, int | None], None]) -> None:
        """``on_exit(key, status)`` runs in the watching thread; ``status`` is the exit code, minus the signal's
        number, or ``None`` for a process that is not our child."""
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._watched: dict[str, tuple[WorkerProcess, int]] = {}
        self._seen: set[str] = set()
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="process-watch", daemon=True)
        self._thread.start()

    def add(self, key: str, process: WorkerProcess) -> None:
        """Watch ``process``; a process that is dead already is reported at once."""
        try:
            handle = os.pidfd_open(process.pid)
        except (OSError, AttributeError):
            handle = -1
        with self._lock:
            self._watched[key] = (process, handle)
        self._poke()

    def close(self) -> None:
        """Stop watching. The processes go on."""
        self._closed = True
        self._poke()
        self._thread.join(timeout=5)

    def _poke(self) -> None:
        try:
            os.write(self._wake, b"x")
        except OSError:
            # Full: it will wake anyway. Closed: nobody watches any more.
            pass

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                watched = dict(self._watched)
            poll = select.poll()
            poll.register(self._woken, select.POLLIN)
            for _, handle in watched.values():
                if handle >= 0:
                    poll.register(handle, select.POLLIN)
            blind = any(handle < 0 for _, handle in watched.values())
            ready = {descriptor for descriptor, _ in poll.poll(_LOOK_MS if blind else None)}
            if self._woken in ready:
                try:
                    os.read(self._woken, 4096)
                except BlockingIOError:
                    pass
            for key, (process, handle) in watched.items():
                # A process whose start time is another's died before its pidfd was opened.
                if (handle in ready or handle < 0 or key not in self._seen) and not process.alive():
                    self._gone(key, process, handle)
                else:
                    self._seen.add(key)
        with self._lock:
            for _, handle in self._watched.values():
                if handle >= 0:
                    os.close(handle)
            self._watched.clear()
        os.close(self._woken)
        os.close(self._wake)

    def _gone(self, key: str, process: WorkerProcess, handle: int) -> None:
        with self._lock:
            self._watched.pop(key, None)
        self._seen.discard(key)
        status: int | None = None
        if process.child is not None:
            status = process.child.wait()
        if handle >= 0:
            os.close(handle)
        self._on_exit(key, status)
        try:
            end_session(process)
        except OSError as error:
            _log.warning("what process %d left running could not be looked for: %s", process.pid, error)
