"""Finding the workers that run already when a supervisor starts.

Workers outlive their supervisor. What stands in the local state is checked, and ``/proc`` is asked too: a
worker's command line ends with the path of its spec below this HOME, so that a worker is also found when
the supervisor died between starting it and writing that down, or when the state file was damaged.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from storm_dagster.core.slot_model import Work
from storm_dagster.model.errors import Corrupt
from storm_dagster.model.run_file import boot_id, start_ticks
from storm_dagster.model.worker_spec import WorkerSpec
from storm_dagster.supervisor.launcher import SPEC
from storm_dagster.supervisor.processes import WorkerProcess

__all__ = ["FoundWorker", "find_workers", "remove_stale_folders"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundWorker:
    """A live worker process of this supervisor."""

    port: int
    worker_id: str
    work: Work
    process: WorkerProcess
    heartbeat_path: Path
    log_path: Path


def find_workers(home: Path, supervisor_id: str) -> list[FoundWorker]:
    """Every live worker process of that supervisor below ``home``, the oldest first in each slot."""
    found: list[FoundWorker] = []
    this_boot = boot_id()
    for pid, ticks, folder in _worker_processes(home / "workers"):
        try:
            spec = WorkerSpec.read(folder / SPEC)
        except (OSError, Corrupt) as error:
            _log.warning("process %d runs a worker whose spec cannot be read: %s", pid, error)
            continue
        if spec.node != supervisor_id:
            continue
        # The folder of the code is named after its blob keys.
        work = Work(spec.topology_id, Path(spec.code_dir).name)
        process = WorkerProcess(pid, ticks, this_boot)
        found.append(
            FoundWorker(spec.port, folder.name, work, process, Path(spec.heartbeat_path), Path(spec.log_path))
        )
    return sorted(found, key=lambda worker: (worker.port, worker.process.start_ticks))


def _worker_processes(folder: Path) -> Iterable[tuple[int, int, Path]]:
    """(pid, start ticks, working folder) of the processes whose last argument is a spec below ``folder``."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            arguments = Path(entry.path, "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:
            continue
        spec = Path(os.fsdecode(arguments[-1]))
        if spec.name != SPEC or spec.parent.parent != folder or len(arguments) < 2:
            continue
        # A shell component is a child with a command line of its own; the session's leader is the worker.
        pid = int(entry.name)
        ticks = start_ticks(pid)
        try:
            leads = os.getsid(pid) == pid
        except ProcessLookupError:
            continue
        if ticks is not None and leads:
            yield pid, ticks, spec.parent


def remove_stale_folders(home: Path, supervisor_id: str, alive: Iterable[str]) -> list[str]:
    """Remove the working folders of this supervisor's workers that run no more; the ids removed."""
    keep = set(alive)
    removed: list[str] = []
    for folder in sorted((home / "workers").glob("*")):
        if folder.name in keep or not folder.is_dir():
            continue
        try:
            if WorkerSpec.read(folder / SPEC).node != supervisor_id:
                continue
        except (OSError, Corrupt):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder.name)
    return removed
