"""Processes of this machine, each known exactly: by its pid and the moment of its start; and their
run files.

On Linux the start is in clock ticks since boot, which setting the clock does not move; elsewhere
psutil gives it in hundredths of a second. Neither is valid after a reboot.
"""

import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from storm_dagster.host.clock import boot_id
from storm_dagster.host.files import write_atomically

# psutil, which all else here is asked of, derives the start from the wall clock; and workers start
# without it.
_HAS_PROC = os.path.isdir("/proc/self")


class ExactProcess:
    """Base of records of a process: of this one, and no other that got its pid later."""

    pid: int
    start_ticks: int
    boot_id: str

    def alive(self) -> bool:
        """Whether exactly this process still runs (same pid, same start, same boot; a zombie does
        not).
        """
        return self.boot_id in ("", boot_id()) and start_ticks(self.pid) == self.start_ticks

    def signal(self, number: int) -> bool:
        """Signal exactly this process; ``False`` when it is gone."""
        return self.boot_id in ("", boot_id()) and signal_exactly(
            self.pid, self.start_ticks, number
        )


@dataclass(frozen=True)
class Process:
    """One live process."""

    pid: int
    start_ticks: int
    session: int
    """Pid of the leader of its session. A session outlives its leader, and no process gets that pid
    meanwhile.
    """


def start_ticks(pid: int) -> int | None:
    """Start of the process; ``None`` when there is no such process, or a zombie."""
    if not _HAS_PROC:
        import psutil

        try:
            process = psutil.Process(pid)
            return (
                None
                if process.status() == psutil.STATUS_ZOMBIE
                else round(process.create_time() * 100)
            )
        except psutil.Error:
            return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            raw = stream.read()
    except OSError:
        return None
    # The command name is in brackets and may itself hold blanks and brackets: count after the last
    # one.
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

    A pidfd is held before the start is compared, so that the pid cannot change hands in between;
    where there is none (before Linux 5.3, macOS), an instant is left.
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


def run_dir(home: Path) -> Path:
    """The folder of the run files of ``home``."""
    return home / "run"


class RunFile(BaseModel, ExactProcess, frozen=True, extra="ignore"):
    """One process of a cluster, from ``HOME/run``: matched by its pid *and* its start, and by the
    boot id of the machine.
    """

    role: str
    """``dev``, ``zookeeper``, ``spark``, ``nimbus``, ``supervisor``, ``worker``,
    ``dagster-webserver``, ...
    """
    id: str
    pid: int
    start_ticks: int
    boot_id: str = ""
    ports: dict[str, int] = {}
    """Addresses that the process listens on, by purpose (``http``, ``thrift``, ``data``...)."""

    @staticmethod
    def write(
        home: Path,
        role: str,
        id: str,
        ports: Mapping[str, int] | None = None,
        *,
        pid: int | None = None,
    ) -> "RunFile":
        """Record the calling process (or ``pid``) atomically, and return the record.

        ``ProcessLookupError`` when ``pid`` does not exist. ``id`` may hold any character of a node
        or topology id; ``/`` is replaced in the file's name.
        """
        pid = os.getpid() if pid is None else pid
        ticks = start_ticks(pid)
        if ticks is None:
            raise ProcessLookupError(f"process {pid} ({role} {id}) does not exist")
        record = RunFile(
            role=role, id=id, pid=pid, start_ticks=ticks, boot_id=boot_id(), ports=dict(ports or {})
        )
        target = RunFile.path_of(home, role, id)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, record.model_dump_json() + "\n")
        return record

    @staticmethod
    def path_of(home: Path, role: str, id: str) -> Path:
        """Path of the record of that role and id."""
        return run_dir(home) / f"{role}-{id.replace('/', '_')}.json"

    @staticmethod
    def read(path: Path) -> "RunFile | None":
        """The record in ``path``; ``None`` when the file is gone or unreadable (then it matches no
        process).
        """
        try:
            return RunFile.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    @staticmethod
    def read_all(home: Path) -> "list[RunFile]":
        """All readable records of ``home``, by file name."""
        found = [RunFile.read(path) for path in sorted(run_dir(home).glob("*.json"))]
        return [record for record in found if record is not None]

    def remove(self, home: Path) -> None:
        """Remove the record if it is still this process's own; never another's."""
        path = RunFile.path_of(home, self.role, self.id)
        current = RunFile.read(path)
        if current is not None and (current.pid, current.start_ticks) == (
            self.pid,
            self.start_ticks,
        ):
            path.unlink(missing_ok=True)
