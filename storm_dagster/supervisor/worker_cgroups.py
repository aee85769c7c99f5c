"""Cgroups that a supervisor makes for its workers, one for each start.

A cgroup ends with its worker, with all that the worker started: no child outlives it, whatever it
does. Its path is in the worker's folder, for a supervisor that starts and finds the worker dead.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from storm_dagster.host.cgroups import (
    FOLDER,
    Cgroup,
    cgroup_mount,
    cgroup_of,
    may_make_cgroups,
    write_value,
)
from storm_dagster.host.descendants import kill_descendants, process_table, seen_descendants
from storm_dagster.host.waiting import poll
from storm_dagster.supervisor.worker_user import OWN

_log = logging.getLogger(__name__)

RECORD = "cgroup"
"""File with the path of a worker's cgroup, in the working folder of the worker."""
_REMOVAL_SECS = 2.0
"""Time in which killed processes end, before their cgroup stays."""
_FORGOTTEN_SECS = 600.0
"""Age of an empty cgroup that no worker will join: a start takes far less."""


class WorkerCgroup:
    """The cgroup of one worker, and the account of its memory. Thread-safe."""

    def __init__(self, group: Cgroup) -> None:
        """Use a cgroup that exists."""
        self.group = group
        self._last_oom: tuple[int, int | None] = (0, None)
        """Kills and peak in bytes, as they were when the cgroup was removed."""

    def limit_memory(self, limit: int) -> None:
        """Let the kernel end the whole worker beyond ``limit`` bytes.

        ``OSError`` if the cgroup has no controller of memory: that of the machine is elsewhere, or
        the cgroup above holds processes itself.
        """
        path = self.group.path
        top = path.parent.parent
        controllers = (top / "cgroup.controllers").read_text(encoding="ascii")
        if "memory" not in controllers.split():
            raise OSError(f"{top} has no controller of memory")
        for parent in (top, path.parent):
            write_value(parent / "cgroup.subtree_control", "+memory")
        write_value(path / "memory.max", str(limit))
        write_value(path / "memory.oom.group", "1")

    def oom(self) -> tuple[int, int | None]:
        """Number of processes that the kernel ended for their memory, and the peak in bytes.

        The peak is ``None`` before Linux 5.19. Both are known after the removal as well.
        """
        path = self.group.path
        with suppress(OSError, ValueError):
            lines = (path / "memory.events").read_text(encoding="ascii").splitlines()
            kills = int(dict(line.split() for line in lines).get("oom_kill", 0))
            peak = None
            with suppress(OSError):
                peak = int((path / "memory.peak").read_text(encoding="ascii"))
            self._last_oom = (kills, peak)
        return self._last_oom

    def kill(self) -> None:
        """KILL all processes in it."""
        self.group.kill()

    def close(self) -> bool:
        """Remove the cgroup; false while a killed process in it is still ending."""
        self.oom()
        if self.group.remove():
            return True
        # A process that was moved here since then must not stay.
        self.group.kill()
        return False


def parents_of_cgroups(conf: Mapping[str, Any]) -> list[Path]:
    """Folders below which a supervisor of ``conf`` makes cgroups; the first that can is used.

    It is the cgroup of this process. With ``supervisor.worker.memory.enforce`` it is first the top
    of the machine's: the kernel limits memory only where the cgroup above holds no process itself,
    and that of a supervisor does.
    """
    own = cgroup_of("self")
    mounted = cgroup_mount()
    parents: list[Path] = []
    if conf["supervisor.worker.memory.enforce"] and mounted is not None:
        parents.append(mounted[0])
    if own is not None and own not in parents:
        parents.append(own)
    return [parent for parent in parents if may_make_cgroups(parent)]


class WorkerCgroups:
    """Maker of the cgroups of one supervisor's workers. Thread-safe."""

    def __init__(self, conf: Mapping[str, Any]) -> None:
        """Look where cgroups can be made."""
        self.parents = parents_of_cgroups(conf)

    def remove_forgotten(self) -> None:
        """Remove old empty cgroups: their HOME was removed before a supervisor could do it."""
        for parent in self.parents:
            for folder in (parent / FOLDER).glob("*/"):
                # The kernel refuses to remove a cgroup with a process.
                with suppress(OSError):
                    if time.time() - folder.stat().st_ctime > _FORGOTTEN_SECS:
                        folder.rmdir()

    def make(self, worker_id: str) -> WorkerCgroup | None:
        """Make the cgroup of a new worker; ``None`` if that is not possible."""
        for parent in self.parents:
            try:
                return WorkerCgroup(Cgroup.make(parent, worker_id))
            except OSError as error:
                _log.info("worker %s gets no cgroup in %s: %s", worker_id, parent, error)
        return None

    def adopt(self, pid: int, ticks: int, folder: Path) -> WorkerCgroup | None:
        """The cgroup of a running worker, whose working folder that is.

        A worker that was started without one gets one now, if possible, with all descendants that
        the tree of processes shows.
        """
        worker_id = folder.name
        current = Cgroup.of_worker(pid, worker_id)
        if current is not None:
            return WorkerCgroup(current)
        cgroup = self.make(worker_id)
        if cgroup is None:
            return None
        try:
            record_cgroup(folder, cgroup)
            cgroup.group.add(pid)
        except OSError as error:
            _log.info("worker %s stays without a cgroup: %s", worker_id, error)
            cgroup.close()
            return None
        # The worker is first: what it starts from now on is in the cgroup already.
        for descendant, _ in seen_descendants(process_table(), (pid, ticks), ()):
            with suppress(OSError):
                cgroup.group.add(descendant)
        return cgroup


def record_cgroup(folder: Path, cgroup: WorkerCgroup | None) -> None:
    """Write the path of a worker's cgroup to its working folder."""
    if cgroup is not None:
        (folder / RECORD).write_text(str(cgroup.group.path), encoding="utf-8")


def recorded_cgroup(folder: Path) -> WorkerCgroup | None:
    """The cgroup that the working folder of a worker names, if it still exists."""
    try:
        path = (folder / RECORD).read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return None
    group = Cgroup.from_record(path, folder.name)
    return None if group is None else WorkerCgroup(group)


def _user_of_folder(folder: Path) -> int | None:
    """User of the worker of that working folder; ``None`` without its own folder in it."""
    try:
        return (folder / OWN).stat().st_uid
    except OSError:
        return None


def end_leftovers(folder: Path) -> None:
    """End all that a dead worker of that working folder has left, and remove its cgroup."""
    cgroup = recorded_cgroup(folder)
    if cgroup is not None:
        cgroup.kill()
    kill_descendants(folder.name, user=_user_of_folder(folder))
    if cgroup is not None and not poll(cgroup.close, timeout=_REMOVAL_SECS, pause=0.02):
        _log.warning("cgroup %s cannot be removed: a process in it does not end", cgroup.group.path)
