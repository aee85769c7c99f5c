"""Gray upgrades in the topology master: it picks each batch, as JStorm's GrayUpgradeHandler does."""

from __future__ import annotations

import logging
import threading
import time

from storm_dagster.core.upgrade.machine import pick
from storm_dagster.core.upgrade.snapshot import UpgradeSnapshot
from storm_dagster.model.errors import Conflict
from storm_dagster.model.records import Assignment
from storm_dagster.worker.runtime.lease import WorkerLease
from storm_dagster.zk.gray_upgrades import write_pick
from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)
_READ_SECS = 15.0


class UpgradeDriver:
    """Reader of ``/gray_upgrade/<id>``, every 15 s and when it changes. Used by the thread of ``ClusterSync`` only."""

    def __init__(self, topology_id: str, cluster: StormClusterState, lease: WorkerLease) -> None:
        self._id = topology_id
        self._cluster = cluster
        self._lease = lease
        self._changed = threading.Event()
        self._changed.set()
        self._read_at = 0.0

    def drive(self, assignment: Assignment, version: int, wake: threading.Event) -> None:
        """Pick the requested batch, if there is one. ``version`` is the assignment's.

        Call it only in the worker that runs the topology master. The write checks the leadership epoch and the
        assignment's version, so that a deposed leader's request or an old assignment has no effect.
        """
        now = time.monotonic()
        if not self._changed.is_set() and now - self._read_at < _READ_SECS:
            return

        def changed() -> None:
            self._changed.set()
            wake.set()

        self._changed.clear()
        self._read_at = now
        try:
            epoch = self._cluster.epoch()
            state = self._cluster.read_upgrade(self._id, changed)
            table = self._cluster.read_tasks(self._id) if state.record is not None else None
            batch = pick(UpgradeSnapshot(state, assignment, table)) if table is not None else None
            if batch is None or epoch is None or not self._lease.valid():
                return
            write_pick(self._cluster.state, self._id, state, batch, epoch=epoch[0], assignment_version=version)
            chosen = ", ".join(batch.workers) or "empty, the requested workers do not exist"
            _log.info("gray upgrade: the next batch is %s", chosen)
        except Conflict as error:
            _log.info("gray upgrade: read again (%s)", error)
            self._changed.set()
        except BaseException:
            self._changed.set()
            raise
