"""The resources ``nimbus``, ``supervisors`` and ``workers``.

They find the running processes through ZooKeeper, read tails of logs, and restart workers. They
never own the life of a process: its supervisor starts a worker that is ended here.
"""

import logging
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storm_dagster.client import NimbusClient, upload_target
from storm_dagster.core.snapshot.workers import WorkerSnapshot, workers_of
from storm_dagster.defs.keys import catalog_field
from storm_dagster.defs.resources.handles import ClusterHandle, ZooKeeperResource
from storm_dagster.host.processes import RunFile
from storm_dagster.model.errors import InvalidRequest, NotAlive, Unavailable
from storm_dagster.model.records import SupervisorInfo
from storm_dagster.model.slot import Slot
from storm_dagster.packaging.target import check_inside, target_roots

_PROGRAMS = frozenset({"topology.python", "topology.environment"})
"""Conf keys that decide which programs workers start."""

_TAIL_BYTES = 64 * 1024
"""Bytes at the end of a log in which its last lines are searched."""


class NimbusResource(ClusterHandle):
    """Calls of nimbus: uploads, topologies, the cluster."""

    patience_secs: float = catalog_field("nimbus.patience_secs", default=15.0)

    def client(self, patience_secs: float | None = None) -> NimbusClient:
        """A client, to be closed by the caller (``with nimbus.client() as client``).

        ``patience_secs``: seconds that a call waits for a leader, by default those of the resource.
        """
        return NimbusClient.of_cluster(
            self.conf(),
            Path(self.home) if self.home else None,
            conf_dir=Path(self.conf_dir) if self.conf_dir else None,
            patience=self.patience_secs if patience_secs is None else patience_secs,
        )

    def topologies(self) -> list[dict[str, Any]]:
        """The topologies, as `storm-dagster list --json` shows them."""
        with self.client() as client:
            return client.get("/v1/topologies")["topologies"]

    def topology(self, name: str) -> dict[str, Any]:
        """One topology, as `storm-dagster show NAME --json` shows it.

        :class:`NotAlive` if it does not exist.
        """
        with self.client() as client:
            return client.get(f"/v1/topologies/{name}")


def upload_of(
    log: logging.Logger,
    nimbus: NimbusResource,
    handle: str | None,
    target: str | None,
    conf: Mapping[str, Any],
    allow_degraded: bool = False,
) -> str | None:
    """Handle of a form's upload: its ``handle``, else that of its uploaded TARGET.

    ``None`` without both. :class:`InvalidRequest` if both are given, and for a TARGET or a conf
    with which a form could run programs of others than the project; else errors of packing and
    uploading. ``conf`` and ``allow_degraded`` belong to the TARGET; a ``handle`` has its own.
    """
    if handle and target:
        raise InvalidRequest(
            "both handle and target are given: leave handle empty in a run launched by hand"
        )
    if handle or not target:
        return handle or None
    programs = sorted(_PROGRAMS & conf.keys())
    if programs:
        raise InvalidRequest(
            f"a form cannot set {' and '.join(programs)}: set it in the topology's own conf"
        )
    check_inside(target, target_roots(nimbus.conf()), nimbus.home_path())
    with nimbus.client() as client:
        uploaded = upload_target(
            client.accepting_fewer(allow_degraded),
            target,
            conf=conf,
            home=nimbus.home_path(),
            progress=lambda step, state: log.info("%s: %s %s", target, step, state),
        )
    log.info(
        "uploaded %d bytes, sha256 %s (sent: %s)", uploaded.size, uploaded.sha256, uploaded.sent
    )
    return uploaded.handle


class _Finder(ClusterHandle):
    """Resource that finds processes by ZooKeeper, with a session for each call."""

    def _zookeeper(self) -> ZooKeeperResource:
        return ZooKeeperResource(home=self.home, conf_dir=self.conf_dir, overrides=self.overrides)


class SupervisorsResource(_Finder):
    """The live supervisors."""

    def live(self) -> dict[str, SupervisorInfo]:
        """Supervisor id -> its record."""
        with self._zookeeper().cluster() as cluster:
            return dict(cluster.load_view().supervisors)


class WorkersResource(_Finder):
    """The live workers, of all topologies or of one."""

    def live(self, topology: str | None = None) -> list[WorkerSnapshot]:
        """Workers with a live process, in order of host and port."""
        with self._zookeeper().cluster() as cluster:
            view = cluster.load_view()
        now_secs = int(time.time())
        live: list[WorkerSnapshot] = []
        for candidate in view.topologies.values():
            if topology in (None, candidate.id, candidate.base.name):
                workers = workers_of(candidate, now_secs=now_secs)
                live += [worker for worker in workers if worker.pid is not None]
        return live

    def find(self, topology: str, node: str, port: int) -> WorkerSnapshot:
        """The worker of that slot; :class:`NotAlive` if no worker runs there."""
        slot = Slot(node, port)
        for worker in self.live(topology):
            if worker.slot == slot:
                return worker
        raise NotAlive(
            f"topology {topology!r} has no live worker in slot {slot.key}: "
            f"see `storm-dagster show {topology}`"
        )

    def tail(self, worker: WorkerSnapshot, lines: int = 100) -> str:
        """The last lines of the worker's log, of its last 64 KiB.

        :class:`Unavailable` if it is not on this machine.
        """
        logs = self.home_path() / "logs" / "workers"
        path = logs / worker.topology_id / str(worker.port) / "worker.log"
        try:
            with path.open("rb") as stream:
                stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                text = stream.read().decode(errors="replace")
        except OSError as error:
            raise Unavailable(
                f"the log of worker {worker.address} is not at {path} ({error.strerror}): ask with "
                f"`storm-dagster logs {worker.topology_name} --worker {worker.address}`"
            ) from None
        return "\n".join(text.splitlines()[-lines:])

    def restart(self, worker: WorkerSnapshot) -> int:
        """End the worker (SIGTERM), so that its supervisor restarts it; the signaled pid.

        Only on the worker's own machine, and only exactly that process (pid, start and boot are
        compared): :class:`Unavailable` otherwise.
        """
        record_id = f"{worker.node}-{worker.port}"
        for record in RunFile.read_all(self.home_path()):
            if record.role != "worker" or record.id != record_id:
                continue
            if record.pid == worker.pid and record.alive():
                os.kill(record.pid, signal.SIGTERM)
                return record.pid
        raise Unavailable(
            f"worker {worker.address} (pid {worker.pid}) does not run on this machine: restart its "
            f"topology with `storm-dagster restart {worker.topology_name}`"
        )
