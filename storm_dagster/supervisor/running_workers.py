"""Search for the workers that run already, for a supervisor that starts."""

import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from storm_dagster.core.slots.model import Work, Worker
from storm_dagster.host.clock import boot_id
from storm_dagster.host.worker_spec import WorkerSpec, worker_processes
from storm_dagster.model.errors import Corrupt
from storm_dagster.operations.live.worker_requests import link_key_of
from storm_dagster.security.settings import Security
from storm_dagster.security.zookeeper_access import PAYLOAD, ZooKeeperUsers
from storm_dagster.supervisor.launcher import SPEC
from storm_dagster.supervisor.processes import LiveWorker, WorkerProcess
from storm_dagster.supervisor.worker_cgroups import WorkerCgroups, end_leftovers
from storm_dagster.supervisor.worker_user import OWN

_log = logging.getLogger(__name__)

_OUTDATED = -1
"""A number of restarts that no assignment has, so that the worker is replaced."""


def find_workers(home: Path, supervisor_id: str, conf: Mapping[str, Any]) -> list[LiveWorker]:
    """Live worker processes of that supervisor, in each slot the oldest first.

    Workers outlive their supervisor. They are searched among the processes of the system, by the
    path of their spec below ``home``, so that a worker is found even if the supervisor died before
    it recorded the start, or the state file is damaged. A worker whose secrets are no longer valid
    by ``conf`` is returned as work that no assignment names, and so is restarted in its slot.
    """
    security = Security.of(conf)
    users = ZooKeeperUsers.of(conf)
    cgroups = WorkerCgroups(conf)
    workers: list[LiveWorker] = []
    for process, path in worker_processes():
        folder = path.parent.parent if path.parent.name == OWN else path.parent
        # Its children may have the same command line; the session's leader is the worker.
        if folder.parent != home / "workers" or process.session != process.pid:
            continue
        try:
            # Another user may start a process with such a command line.
            if os.stat(f"/proc/{process.pid}").st_uid != path.parent.stat().st_uid:
                continue
            spec = WorkerSpec.read(folder / SPEC)
        except FileNotFoundError:
            continue  # A spare, which ends with its supervisor.
        except (OSError, Corrupt) as error:
            _log.warning(
                "process %d runs a worker whose spec cannot be read: %s", process.pid, error
            )
            continue
        if spec.node != supervisor_id:
            continue
        # The folder of the code is named after its blob keys.
        restarts = spec.restarts if _is_current(spec, security, users) else _OUTDATED
        worker = Worker(folder.name, Work(spec.topology_id, Path(spec.code_dir).name, restarts))
        cgroup = cgroups.adopt(process.pid, process.start_ticks, folder)
        identity = WorkerProcess(
            process.pid, process.start_ticks, boot_id(), None, folder.name, cgroup
        )
        workers.append(
            LiveWorker(
                spec.port,
                worker,
                identity,
                Path(spec.heartbeat_path),
                Path(spec.log_path),
                spec.started,
            )
        )
    return sorted(workers, key=lambda live: (live.port, live.process.start_ticks))


def _is_current(spec: WorkerSpec, security: Security, users: ZooKeeperUsers | None) -> bool:
    """True if the secrets of a worker are still valid.

    They open other workers and ZooKeeper to it.
    """
    if spec.link_key != link_key_of(security, spec.topology_id):
        return False
    if users is None:
        return True
    valid_users = set(users.worker_conf(spec.topology_id)[PAYLOAD].split("\n"))
    own_users = str(spec.conf.get(PAYLOAD, "")).split("\n")
    return not valid_users.isdisjoint(own_users)


def remove_stale_folders(home: Path, supervisor_id: str, live_ids: Iterable[str]) -> None:
    """Remove the folders of this supervisor's dead workers, and end what these have left.

    ``live_ids`` are the ids of its live ones. A folder without a readable spec stays: it may be
    another supervisor's.
    """
    kept_names = set(live_ids)
    for folder in sorted((home / "workers").glob("*")):
        with suppress(OSError, Corrupt):
            if folder.name in kept_names:
                continue
            if WorkerSpec.read(folder / SPEC).node == supervisor_id:
                end_leftovers(folder)
                shutil.rmtree(folder, ignore_errors=True)
