"""Specification of a worker by its supervisor.

``python -m storm_dagster.worker SPEC.json`` reads it. The supervisor writes it atomically before it
starts the process; the worker reads it once. It has no task list: the worker reads its tasks from
ZooKeeper, so that a restarted worker never runs stale ones.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from storm_dagster.host.files import write_atomically
from storm_dagster.host.processes import ProcessEntry, processes
from storm_dagster.model.errors import Corrupt

WORKER_MODULE = "storm_dagster.worker"
"""Command line of a worker, before the path of its spec."""
SPARE = "--spare"
"""Option after that path: wait for a line of standard input before reading the spec, and exit at
its end.
"""
_MAX_BEAT_BYTES = 4096
"""Part of a heartbeat file that is read; a valid one is far smaller."""


class WorkerSpec(BaseModel, frozen=True, extra="forbid"):
    """One worker process."""

    worker_id: str
    """Name of the working folder ``HOME/workers/<worker_id>``; new for every start."""
    token: str
    """Start token, unguessable and new for every start: frames and requests of this process carry
    it.
    """
    link_key: str = ""
    """Key of the links between this topology's workers, in hex.

    ``""``: the links are open, on loopback.
    """
    topology_id: str
    node: str
    """Supervisor id."""
    host: str
    """Host name or address that the worker binds and announces."""
    port: int
    home: str
    """HOME: the worker writes ``run/worker-<node>-<port>.json`` there."""
    conf: dict[str, Any] = {}
    """Cluster conf of the daemon (at least ``storm.zookeeper.*``); the topology's conf wins."""
    code_dir: str
    """``.../stormdist/<topology id>``: ``stormconf.ser``, ``stormcode.ser``, and the archive
    unpacked in ``code/``.
    """
    code: str = ""
    """SHA-256 of the archive, first 16 hex digits; announced in the worker's node."""
    restarts: int = 0
    """Requested restarts of the topology when the process was started."""
    started: float = 0.0
    """Time of its start by the supervisor, by the boot clock, in seconds.

    The process of a spare is older.
    """
    heartbeat_path: str
    """File that the worker's heartbeat thread replaces every
    ``worker.heartbeat.frequency.secs``.
    """
    log_path: str
    """Log file; the worker appends to it, the supervisor rotates it at ``worker.log.max.bytes``."""

    @property
    def archive_root(self) -> Path:
        """The unpacked archive: first entry of the worker's ``PYTHONPATH``."""
        return Path(self.code_dir, "code")

    def write(self, path: Path) -> None:
        """Replace ``path`` atomically.

        Only its owner can read it, since it contains the token.
        """
        write_atomically(path, self.model_dump_json(indent=1), mode=0o600)

    @staticmethod
    def read(path: Path) -> "WorkerSpec":
        """Read the spec in ``path``; :class:`Corrupt` if it is damaged."""
        try:
            return WorkerSpec.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise Corrupt(
                f"{path} is not a valid worker spec ({field}: {first['msg']}): start the worker "
                "through its supervisor"
            ) from None


class HeartbeatFile(BaseModel, frozen=True, extra="ignore"):
    """Local heartbeat of a worker."""

    pid: int
    time_boot: float
    """Boot clock at the beat, seconds."""
    count: int
    """Rises only while the worker's loop advances."""
    status: str
    """``starting``, ``running`` or ``paused``.

    A paused worker has lost its lease: it executes no tuple, and waits.
    """
    failure: str = ""
    """Task whose component could not be opened, with the error and its place; empty without one."""

    @staticmethod
    def read(path: Path) -> "HeartbeatFile | None":
        """Read the newest beat.

        ``None`` before the first beat, or if it is damaged (the next beat replaces it).
        """
        # The worker may be another user's: its file must not block, redirect or flood the reader.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with open(os.open(path, flags), "rb") as stream:
                return HeartbeatFile.model_validate_json(stream.read(_MAX_BEAT_BYTES) or b"")
        except (OSError, ValidationError):
            return None


def worker_processes() -> Iterator[tuple[ProcessEntry, Path]]:
    """Processes of this machine with the command line of a worker.

    Each is given with the path of its spec.
    """
    import psutil

    for process in processes():
        with suppress(psutil.Error, ValueError, IndexError):
            command = psutil.Process(process.pid).cmdline()
            yield process, Path(command[command.index(WORKER_MODULE) + 1])
