"""Processes of this machine, identified by pid and start, and their run files.

On Linux the start is in clock ticks since boot, which setting the clock does not move; elsewhere
psutil gives it in hundredths of a second. Neither is valid after a reboot.
"""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from storm_dagster.host.clock import boot_id
from storm_dagster.host.files import write_atomically, write_if_possible

_HAS_PROC = os.path.isdir("/proc/self")
"""True if the start of a process is read from /proc: psutil derives it from the wall clock, and
workers start without psutil.
"""


class ExactProcess:
    """Base of records of a process.

    They never match a later process of the same pid.
    """

    pid: int
    start_ticks: int
    boot_id: str

    def alive(self) -> bool:
        """True if this process runs.

        Pid, start and boot must be the same. A zombie does not run.
        """
        return self._is_of_this_boot() and start_ticks(self.pid) == self.start_ticks

    def signal(self, number: int) -> bool:
        """Signal exactly this process; ``False`` if it is gone."""
        return self._is_of_this_boot() and signal_exactly(self.pid, self.start_ticks, number)

    def _is_of_this_boot(self) -> bool:
        return self.boot_id in ("", boot_id())


class ProcessEntry(NamedTuple):
    """One live process."""

    pid: int
    start_ticks: int
    parent: int
    """Pid of its parent."""
    session: int
    """Pid of the leader of its session.

    A session outlives its leader; until it ends, no other process gets that pid.
    """


def read_entry(pid: int) -> ProcessEntry | None:
    """Read the entry of a process; ``None`` without the process, or for a zombie."""
    if not _HAS_PROC:
        return _entry_by_psutil(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            raw = stream.read()
    except OSError:
        return None
    # The command name is in brackets and may itself contain blanks and brackets: the fields are
    # counted after the last bracket.
    fields = raw[raw.rfind(b")") + 2 :].split()
    # The first of them is the state (Z: zombie, X: dead), the second the parent, the fourth the
    # session, the twentieth the start; see proc_pid_stat(5).
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return ProcessEntry(pid, int(fields[19]), int(fields[1]), int(fields[3]))


def _entry_by_psutil(pid: int) -> ProcessEntry | None:
    """As :func:`read_entry`, with the start in hundredths of a second."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        # The start first: if the pid is reused before the other calls, it no longer matches.
        ticks = round(process.create_time() * 100)
        return ProcessEntry(pid, ticks, process.ppid(), os.getsid(pid))
    except (psutil.Error, OSError):
        return None


def start_ticks(pid: int) -> int | None:
    """Start of the process; ``None`` without the process, or for a zombie."""
    entry = read_entry(pid)
    return None if entry is None else entry.start_ticks


def processes() -> Iterator[ProcessEntry]:
    """All live processes; zombies are left out."""
    import psutil

    for pid in psutil.pids():
        entry = read_entry(pid)
        if entry is not None:
            yield entry


def signal_exactly(pid: int, ticks: int, number: int) -> bool:
    """Signal the process of that pid and start.

    Returns ``False`` if it is gone, or another user's. A pidfd is opened before the start is
    compared, so that the pid cannot be reused in between; without pidfds (before Linux 5.3, macOS)
    a short race remains.
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
    """Folder of the run files of ``home``."""
    return home / "run"


class RunFile(BaseModel, ExactProcess, frozen=True, extra="ignore"):
    """Record of one process of a cluster, in ``HOME/run``.

    It matches a process by pid *and* start, and by the boot id of the machine.
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
        required: bool = True,
    ) -> "RunFile":
        """Record a process atomically, and return the record.

        It is the calling process, or ``pid``. ``ProcessLookupError`` if ``pid`` does not exist. If
        the disk refuses the file, ``OSError``; a warning unless it is ``required``.
        ``id`` may contain any character of a node or topology id; ``/`` is replaced in the file's
        name.
        """
        if pid is None:
            pid = os.getpid()
        ticks = start_ticks(pid)
        if ticks is None:
            raise ProcessLookupError(f"process {pid} ({role} {id}) does not exist")
        record = RunFile(
            role=role, id=id, pid=pid, start_ticks=ticks, boot_id=boot_id(), ports=dict(ports or {})
        )
        target = RunFile.path_of(home, role, id)

        def store() -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, record.model_dump_json() + "\n")

        if required:
            store()
        else:
            lacking = f"{target} is missing, so that `status` and `stop` do not see this {role}"
            write_if_possible(store, lacking)
        return record

    @staticmethod
    def path_of(home: Path, role: str, id: str) -> Path:
        """Path of the record of that role and id."""
        return run_dir(home) / f"{role}-{id.replace('/', '_')}.json"

    @staticmethod
    def read(path: Path) -> "RunFile | None":
        """Read the record in ``path``.

        ``None`` if the file is gone or unreadable: then it matches no process.
        """
        try:
            return RunFile.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    @staticmethod
    def read_all(home: Path) -> "list[RunFile]":
        """All readable records of ``home``, by file name."""
        records = [RunFile.read(path) for path in sorted(run_dir(home).glob("*.json"))]
        return [record for record in records if record is not None]

    def remove(self, home: Path) -> None:
        """Remove the record, unless it is another process's by now."""
        path = RunFile.path_of(home, self.role, self.id)
        current = RunFile.read(path)
        if current is None:
            return
        if current.pid == self.pid and current.start_ticks == self.start_ticks:
            with suppress(OSError):
                path.unlink(missing_ok=True)
