"""Processes of this machine, each known exactly: by its pid and the moment of its start.

On Linux the start is in clock ticks since boot, which setting the clock does not move; elsewhere psutil gives
it in hundredths of a second. Neither is valid after a reboot.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from storm_dagster.model.clock import boot_id

# psutil, which all else here is asked of, derives the start from the wall clock; and workers start without it.
_HAS_PROC = os.path.isdir("/proc/self")


class ExactProcess:
    """Base of records of a process: of this one, and no other that got its pid later."""

    pid: int
    start_ticks: int
    boot_id: str

    def alive(self) -> bool:
        """Whether exactly this process still runs (same pid, same start, same boot; a zombie does not)."""
        return self.boot_id in ("", boot_id()) and start_ticks(self.pid) == self.start_ticks

    def signal(self, number: int) -> bool:
        """Signal exactly this process; ``False`` when it is gone."""
        return self.boot_id in ("", boot_id()) and signal_exactly(self.pid, self.start_ticks, number)


@dataclass(frozen=True)
class Process:
    """One live process."""

    pid: int
    start_ticks: int
    session: int
    """Pid of the leader of its session. A session outlives its leader, and no process gets that pid meanwhile."""


def start_ticks(pid: int) -> int | None:
    """Start of the process; ``None`` when there is no such process, or a zombie."""
    if not _HAS_PROC:
        import psutil

        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 100)
        except psutil.Error:
            return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            raw = stream.read()
    except OSError:
        return None
    # The command name is in brackets and may itself hold blanks and brackets: count after the last one.
    fields = raw[raw.rfind(b")") + 2 :].split()
    return int(fields[19]) if len(fields) >= 20 and fields[0] not in (b"Z", b"X") else None


def processes() -> Iterator[Process]:
    """All live processes; zombies are left out."""
    import psutil

    for pid in psutil.pids():
        # In this order: a pid that changes hands meanwhile does not match its start any more.
        ticks = start_ticks(pid)
        try:
            session = os.getsid(pid)
        except OSError:
            continue
        if ticks is not None:
            yield Process(pid, ticks, session)


def signal_exactly(pid: int, ticks: int, number: int) -> bool:
    """Signal the process of that pid and start; ``False`` when it is gone, or another user's.

    A pidfd is held before the start is compared, so that the pid cannot change hands in between; where there
    is none (before Linux 5.3, macOS), an instant is left.
    """
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
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if handle >= 0:
            os.close(handle)
