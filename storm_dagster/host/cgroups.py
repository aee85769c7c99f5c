"""Cgroups (v2) of worker processes: a process and all that it starts, until the end.

A child stays in the cgroup of its parent, whatever session or parent it has later, and the kernel
ends all processes of a cgroup at once. A worker's cgroup is a folder of the kernel's file system,
below that of its supervisor, so that limits of the service manager bind the worker as well::

    <cgroup of the supervisor>/storm_dagster/<worker id>/

A process may make it if it may write in the folder of its own cgroup: root, or the user of a unit
with ``Delegate=yes``. Containers mount the folder read-only by default.
"""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from storm_dagster.host.cgroup_mounts import DELETED, cgroup_mounts, groups_of
from storm_dagster.host.processes import signal_exactly, start_ticks

FOLDER = "storm_dagster"
"""Name of the folder that holds the cgroups of workers."""
JOIN = b"0"
"""Content that makes a process join a cgroup, written to its file of members."""
_MAX_ROUNDS = 20
"""Rounds of signals for a cgroup whose processes fork faster than they are ended."""
_MEMBERS = "cgroup.procs"
"""File of the processes of a cgroup; a pid that is written to it joins."""


def cgroup_mount() -> tuple[Path, str] | None:
    """Folder of the mounted cgroups (v2), and the cgroup at its top.

    ``None`` if the machine, or this container, has none.
    """
    try:
        mounts = cgroup_mounts()
    except OSError:
        return None
    for mount in mounts:
        if mount.version == 2:
            return Path(mount.folder), mount.top
    return None


def cgroup_of(pid: int | str) -> Path | None:
    """Folder of the cgroup of a process; ``self`` is this one.

    ``None`` without the process, or if its cgroup is not mounted here.
    """
    mounted = cgroup_mount()
    if mounted is None:
        return None
    folder, top = mounted
    try:
        path = groups_of(pid).get("")
    except OSError:
        return None
    if path is None or path.endswith(DELETED):
        return None
    if path.startswith("/.."):
        return None  # Above what this container sees.
    if top != "/":
        if path != top and not path.startswith(f"{top}/"):
            return None
        path = path.removeprefix(top)
    return folder / path.strip("/")


def may_make_cgroups(parent: Path | None) -> bool:
    """True if this process may make cgroups in the folder of that one, and end them at once."""
    if parent is None:
        return False
    may_write = os.access(parent, os.W_OK | os.X_OK) and os.access(parent / _MEMBERS, os.W_OK)
    is_writable_mount = not os.statvfs(parent).f_flag & os.ST_RDONLY
    return may_write and is_writable_mount


@dataclass(frozen=True)
class Cgroup:
    """One cgroup, by its folder."""

    path: Path

    @staticmethod
    def make(parent: Path, name: str) -> "Cgroup":
        """Make a cgroup in ``parent/storm_dagster``; ``OSError`` where that is not allowed."""
        group = Cgroup(parent / FOLDER / name)
        (parent / FOLDER).mkdir(exist_ok=True)
        group.path.mkdir()
        if not (group.path / _MEMBERS).exists():
            group.path.rmdir()
            raise NotADirectoryError(f"{parent} is not a cgroup")
        return group

    @staticmethod
    def of_worker(pid: int | str, worker_id: str) -> "Cgroup | None":
        """The cgroup of a worker process; ``None`` if it has none of its own."""
        path = cgroup_of(pid)
        if path is None or path.name != worker_id or path.parent.name != FOLDER:
            return None
        return Cgroup(path)

    @staticmethod
    def from_record(path: str, worker_id: str) -> "Cgroup | None":
        """The cgroup that a record of that worker names, if it still exists.

        ``None`` for a path that is not that of a cgroup of this worker.
        """
        mounted = cgroup_mount()
        group = Path(path)
        if mounted is None or ".." in group.parts or not group.is_relative_to(mounted[0]):
            return None
        is_of_worker = group.name == worker_id and group.parent.name == FOLDER
        if not is_of_worker or not (group / _MEMBERS).exists():
            return None
        return Cgroup(group)

    def open_members(self) -> int:
        """Open the file of the members, for a child that joins between fork and exec.

        The kernel asks what the opener may do, so that the child may have another user already.
        The caller closes the descriptor.
        """
        return os.open(self.path / _MEMBERS, os.O_WRONLY | os.O_CLOEXEC)

    def holds(self, pid: int) -> bool:
        """True if the process is in this cgroup itself."""
        return cgroup_of(pid) == self.path

    def add(self, pid: int) -> None:
        """Move a process into the cgroup, with all its threads; ``OSError`` if it is gone."""
        # Without O_CREAT: a folder that is not a cgroup is not changed.
        write_value(self.path / _MEMBERS, str(pid))

    def kill(self) -> None:
        """KILL all processes of the cgroup and of those below it."""
        try:
            write_value(self.path / "cgroup.kill", "1")
        except OSError:
            self._kill_each()  # Before Linux 5.14, or gone.

    def _kill_each(self) -> None:
        """KILL each process, until a round finds none that could be signaled."""
        for _ in range(_MAX_ROUNDS):
            signaled = False
            for folder in self._folders():
                for pid in _members(folder):
                    ticks = start_ticks(pid)
                    if ticks is not None:
                        signaled |= signal_exactly(pid, ticks, signal.SIGKILL)
            if not signaled:
                return

    def remove(self) -> bool:
        """Remove the cgroup and those below it; false while a process in it lives."""
        for folder in self._folders():
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True

    def _folders(self) -> list[Path]:
        """The folders of the cgroup and of those below it, the lowest first."""
        return [Path(root) for root, _, _ in os.walk(self.path, topdown=False)]


def write_value(file: Path, value: str) -> None:
    """Write a value to a file of the kernel; ``OSError`` if it does not exist."""
    with open(os.open(file, os.O_WRONLY | os.O_CLOEXEC), "w", encoding="ascii") as stream:
        stream.write(value)


def _members(folder: Path) -> list[int]:
    """Pids of a cgroup; none if it is gone."""
    try:
        return [int(line) for line in (folder / _MEMBERS).read_text(encoding="ascii").split()]
    except (OSError, ValueError):
        return []
