"""Specification of a worker by its supervisor: the file that ``python -m storm_dagster.worker
SPEC.json`` reads.

The supervisor writes it atomically before it starts the process; the worker reads it once. It holds
no task list: which tasks to run is read from ZooKeeper, so that a restarted worker can never run
stale ones.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from storm_dagster.host.files import write_atomically
from storm_dagster.host.processes import Process, processes
from storm_dagster.model.errors import Corrupt

WORKER_MODULE = "storm_dagster.worker"
"""Command line of a worker, before the path of its spec."""
SPARE = "--spare"
"""After that path: wait for a line of standard input before reading it; end when there is none."""
_MOST_BEAT_BYTES = 4096


class WorkerSpec(BaseModel, frozen=True, extra="forbid"):
    """One worker process."""

    worker_id: str
    """Name of the working folder ``HOME/workers/<worker_id>``; new for every start."""
    token: str
    """Start token, unguessable and new for every start: frames and requests of this process carry
    it.
    """
    link_key: str = ""
    """Key of the links between this topology's workers, in hex; ``""``: they are open, on
    loopback.
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
    """Cluster conf of the daemon (``storm.zookeeper.*`` at the least); the topology's conf lies
    over it.
    """
    code_dir: str
    """``.../stormdist/<topology id>``: ``stormconf.ser``, ``stormcode.ser``, and the archive
    unpacked in ``code/``.
    """
    code: str = ""
    """SHA-256 of the archive, first 16 hex digits; announced in the worker's node."""
    restarts: int = 0
    """Restarts of the topology that were asked for when the process was started."""
    started: float = 0.0
    """When the supervisor started it, by the boot clock, seconds; a spare's process is older."""
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
        """Replace ``path`` atomically, readable by the owner only (it holds the token)."""
        write_atomically(path, self.model_dump_json(indent=1), mode=0o600)

    @staticmethod
    def read(path: Path) -> "WorkerSpec":
        """The spec in ``path``; :class:`Corrupt` when it is damaged."""
        try:
            return WorkerSpec.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise Corrupt(
                f"{path} is not a valid worker spec ({where}: {first['msg']}): start the worker through its supervisor"
            ) from None


class HeartbeatFile(BaseModel, frozen=True, extra="ignore"):
    """The worker's local heartbeat. ``count`` rises only while the worker's loop advances."""

    pid: int
    time_boot: float
    """Boot clock at the beat, seconds."""
    count: int
    status: str
    """``starting``, ``running`` or ``paused`` (the lease ended: nothing is executed, the process
    waits).
    """

    @staticmethod
    def read(path: Path) -> "HeartbeatFile | None":
        """The newest beat, or ``None`` when there is none yet or it is damaged (the next beat
        replaces it).
        """
        try:
            # The worker may be another user's: nothing that it puts there blocks, leads elsewhere
            # or has no end.
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
                return HeartbeatFile.model_validate_json(stream.read(_MOST_BEAT_BYTES) or b"")
        except (OSError, ValidationError):
            return None


def worker_processes() -> Iterator[tuple[Process, Path]]:
    """Every process of this machine whose command line is a worker's, with the path of its spec."""
    import psutil

    for process in processes():
        with suppress(psutil.Error, ValueError, IndexError):
            line = psutil.Process(process.pid).cmdline()
            yield process, Path(line[line.index(WORKER_MODULE) + 1])
