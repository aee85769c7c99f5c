"""``HOME/run/<role>-<id>.json``: the process of each role, so that ``stop`` ends exactly that one.

A pid alone may belong to another process by now; a process is matched by its pid *and* its start
(:func:`~storm_dagster.model.processes.start_ticks`), and by the boot id of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from storm_dagster.model.clock import boot_id
from storm_dagster.model.host import write_atomically
from storm_dagster.model.processes import ExactProcess, start_ticks


def run_dir(home: Path) -> Path:
    """The folder of the run files of ``home``."""
    return home / "run"


class RunFile(BaseModel, ExactProcess):
    """One process of a cluster."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="ignore")

    role: str
    """``dev``, ``zookeeper``, ``spark``, ``nimbus``, ``supervisor``, ``worker``, ``dagster-webserver``, ..."""
    id: str
    pid: int
    start_ticks: int
    boot_id: str = ""
    ports: dict[str, int] = {}
    """Addresses that the process listens on, by purpose (``http``, ``thrift``, ``data``...)."""

    @staticmethod
    def write(
        home: Path, role: str, id: str, ports: Mapping[str, int] | None = None, *, pid: int | None = None
    ) -> RunFile:
        """Record the calling process (or ``pid``) atomically, and return the record.

        ``ProcessLookupError`` when ``pid`` does not exist. ``id`` may hold any character of a node or
        topology id; ``/`` is replaced in the file's name.
        """
        pid = os.getpid() if pid is None else pid
        ticks = start_ticks(pid)
        if ticks is None:
            raise ProcessLookupError(f"process {pid} ({role} {id}) does not exist")
        record = RunFile(role=role, id=id, pid=pid, start_ticks=ticks, boot_id=boot_id(), ports=dict(ports or {}))
        target = RunFile.path_of(home, role, id)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, record.model_dump_json() + "\n")
        return record

    @staticmethod
    def path_of(home: Path, role: str, id: str) -> Path:
        """Path of the record of that role and id."""
        return run_dir(home) / f"{role}-{id.replace('/', '_')}.json"

    @staticmethod
    def read(path: Path) -> RunFile | None:
        """The record in ``path``; ``None`` when the file is gone or unreadable (then it matches no process)."""
        try:
            return RunFile.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    @staticmethod
    def read_all(home: Path) -> list[RunFile]:
        """All readable records of ``home``, by file name."""
        found = [RunFile.read(path) for path in sorted(run_dir(home).glob("*.json"))]
        return [record for record in found if record is not None]

    def remove(self, home: Path) -> None:
        """Remove the record if it is still this process's own; never another's."""
        path = RunFile.path_of(home, self.role, self.id)
        current = RunFile.read(path)
        if current is not None and (current.pid, current.start_ticks) == (self.pid, self.start_ticks):
            path.unlink(missing_ok=True)
