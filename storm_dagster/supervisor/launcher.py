"""Launcher of workers: folder, spec, environment, log, process."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import storm_dagster
from storm_dagster.core.slots.model import Work
from storm_dagster.model.clock import boot_id
from storm_dagster.model.errors import Corrupt, InvalidTopology, Unavailable
from storm_dagster.model.processes import start_ticks
from storm_dagster.model.run_file import RunFile
from storm_dagster.model.security import Security
from storm_dagster.model.worker_spec import WORKER_MODULE, WorkerSpec
from storm_dagster.operations.live.worker_curve import link_key_of
from storm_dagster.supervisor.housekeeping import rotate
from storm_dagster.supervisor.localizer import LocalCode
from storm_dagster.supervisor.processes import WorkerProcess

_log = logging.getLogger(__name__)

_KEPT_BACK = frozenset(
    {
        *("storm.secret", "storm.secret.file", "storm.tls.cert", "storm.tls.key"),
        *("dagster.graphql.url", "dagster.graphql.headers", "dagster.graphql.token.file"),
    }
)
SPEC = "SPEC.json"
HEARTBEAT = "heartbeat.json"


@dataclass(frozen=True)
class LaunchedWorker:
    """A worker process and its files."""

    worker_id: str
    process: WorkerProcess
    heartbeat_path: Path
    log_path: Path


def log_path(home: Path, topology_id: str, port: int) -> Path:
    """Log of the worker of that slot, including standard output and error."""
    return home / "logs" / "workers" / topology_id / str(port) / "worker.log"


def worker_command(conf: Mapping[str, Any], spec: Path) -> list[str]:
    """Command line of a worker; an argument list without a shell, since it contains conf values."""
    return [str(conf.get("topology.python") or sys.executable), "-m", WORKER_MODULE, str(spec)]


def worker_environment(
    base: Mapping[str, str], conf: Mapping[str, Any], archive_root: Path, home: Path
) -> dict[str, str]:
    """Environment of a worker: the supervisor's, ``topology.environment`` over it, and its import path.

    The archive is first on the path, then the user's PYTHONPATH, then this package.
    """
    wanted = conf.get("topology.environment") or {}
    for name in wanted:
        if not name or "=" in name or "\0" in name or "\0" in str(wanted[name]):
            raise InvalidTopology(f"topology.environment: {name!r:.80} cannot name a variable: rename it")
    environment = {**base, "PYTHONUNBUFFERED": "1", **{name: str(value) for name, value in wanted.items()}}
    ours = str(Path(storm_dagster.__file__).parents[1])
    path = [str(archive_root), *environment.get("PYTHONPATH", "").split(os.pathsep), ours]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(part for part in path if part))
    environment["STORM_DAGSTER_HOME"] = str(home)
    return environment


class Launcher:
    """Launcher of one supervisor's workers. Blocks on the disk: not for a loop."""

    def __init__(self, home: Path, supervisor_id: str, host: str, cluster_conf: Mapping[str, Any]) -> None:
        self._home = home
        self._id = supervisor_id
        self._host = host
        self._conf = dict(cluster_conf)
        self._security = Security.of(self._conf)
        # User code runs in workers: they get their own link key, never the cluster's secrets.
        self._handed = {key: value for key, value in self._conf.items() if key not in _KEPT_BACK}

    def launch(self, port: int, work: Work, code: LocalCode) -> LaunchedWorker:
        """Start a worker of ``work`` in slot ``port``.

        Raises :class:`Corrupt` if the local code is damaged, :class:`InvalidTopology` for an environment that is not
        valid, :class:`Unavailable` if the interpreter cannot be started.
        """
        conf = read_topology_conf(code.path / "stormconf.ser")
        worker_id = uuid.uuid4().hex
        folder = self._home / "workers" / worker_id
        log = log_path(self._home, work.topology_id, port)
        spec = WorkerSpec(
            worker_id=worker_id,
            token=secrets.token_hex(16),
            topology_id=work.topology_id,
            node=self._id,
            host=self._host,
            port=port,
            home=str(self._home),
            conf=self._handed,
            link_key=link_key_of(self._security, work.topology_id),
            code_dir=str(code.path),
            code=code.sha256[:16],
            heartbeat_path=str(folder / HEARTBEAT),
            log_path=str(log),
        )
        environment = worker_environment(os.environ, conf, spec.archive_root, self._home)
        folder.mkdir(parents=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        # Also here, since the regular rotation may miss a worker that always dies soon.
        rotate(log, int(self._conf["worker.log.max.bytes"]), int(self._conf["worker.log.backups"]))
        try:
            spec.write(folder / SPEC)
            child = self._spawn(worker_command(conf, folder / SPEC), folder, environment, log)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        ticks = start_ticks(child.pid)
        # A child that died at once has no start time; ProcessWatch finds it dead.
        process = WorkerProcess(child.pid, -1 if ticks is None else ticks, boot_id(), child)
        try:
            # The worker writes the same when it is up; `stop` must find it before.
            RunFile.write(self._home, "worker", f"{self._id}-{port}", {"data": port}, pid=child.pid)
        except ProcessLookupError:
            pass
        _log.info("started worker %s of %s in slot %d, pid %d", worker_id, work.topology_id, port, child.pid)
        return LaunchedWorker(worker_id, process, Path(spec.heartbeat_path), log)

    def _spawn(
        self, command: list[str], folder: Path, environment: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        # Appending keeps the output of the slot's last worker, and leaves no hole after a truncation.
        with log.open("ab") as output:
            try:
                return subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise Unavailable(
                    f"{command[0]} cannot be started ({error.strerror or error}): "
                    "set topology.python to an interpreter that exists on every supervisor"
                ) from None


def read_topology_conf(path: Path) -> dict[str, Any]:
    """The topology's normalized conf; :class:`Corrupt` if it is missing or not a JSON object."""
    try:
        conf = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} cannot be read ({error}): it is fetched again") from None
    if not isinstance(conf, dict):
        raise Corrupt(f"{path} is not a JSON object: it is fetched again")
    return conf
