"""Discovery of the running workers of a supervisor that starts.

Workers outlive their supervisor. Besides the local state, the processes of the system are searched: a worker's command
line ends with the path of its spec below this HOME. So a worker is found even if the supervisor died before it recorded
the start, or the state file is damaged.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from storm_dagster.core.slots.model import Work, Worker
from storm_dagster.model.clock import boot_id
from storm_dagster.model.errors import Corrupt
from storm_dagster.model.security import Security
from storm_dagster.model.worker_spec import WorkerSpec, worker_processes
from storm_dagster.model.zookeeper_access import PAYLOAD, ZooKeeperUsers
from storm_dagster.operations.live.worker_requests import link_key_of
from storm_dagster.supervisor.launcher import SPEC
from storm_dagster.supervisor.processes import LiveWorker, WorkerProcess
from storm_dagster.supervisor.worker_user import OWN

_log = logging.getLogger(__name__)
_OUTDATED = -1
"""A number of restarts that no assignment has."""


def find_workers(home: Path, supervisor_id: str, conf: Mapping[str, Any]) -> list[LiveWorker]:
    """Every live worker process of that supervisor below ``home``, the oldest first in each slot.

    One with secrets that count no more by ``conf`` is found as work that no assignment names, and so is started again in
    its slot.
    """
    security, users = Security.of(conf), ZooKeeperUsers.of(conf)
    found: list[LiveWorker] = []
    for process, path in worker_processes():
        folder = path.parent.parent if path.parent.name == OWN else path.parent
        # Its children may have the same command line; the session's leader is the worker.
        if folder.parent != home / "workers" or process.session != process.pid:
            continue
        try:
            # Anybody may start a process with such a command line.
            if os.stat(f"/proc/{process.pid}").st_uid != path.parent.stat().st_uid:
                continue
            spec = WorkerSpec.read(folder / SPEC)
        except (OSError, Corrupt) as error:
            _log.warning("process %d runs a worker whose spec cannot be read: %s", process.pid, error)
            continue
        if spec.node != supervisor_id:
            continue
        # The folder of the code is named after its blob keys.
        restarts = spec.restarts if _is_current(spec, security, users) else _OUTDATED
        worker = Worker(folder.name, Work(spec.topology_id, Path(spec.code_dir).name, restarts))
        known = WorkerProcess(process.pid, process.start_ticks, boot_id())
        found.append(LiveWorker(spec.port, worker, known, Path(spec.heartbeat_path), Path(spec.log_path)))
    return sorted(found, key=lambda worker: (worker.port, worker.process.start_ticks))


def _is_current(spec: WorkerSpec, security: Security, users: ZooKeeperUsers | None) -> bool:
    """Whether a worker reaches other workers and ZooKeeper by what it was given."""
    known = users.worker_conf(spec.topology_id)[PAYLOAD].split("\n") if users is not None else []
    given = str(spec.conf.get(PAYLOAD, "")).split("\n")
    return spec.link_key == link_key_of(security, spec.topology_id) and (not known or not {*known}.isdisjoint(given))


def remove_stale_folders(home: Path, supervisor_id: str, alive: Iterable[str]) -> None:
    """Remove the working folders of this supervisor's workers that run no more."""
    keep = set(alive)
    for folder in sorted((home / "workers").glob("*")):
        with suppress(OSError, Corrupt):
            if folder.name not in keep and WorkerSpec.read(folder / SPEC).node == supervisor_id:
                shutil.rmtree(folder, ignore_errors=True)
