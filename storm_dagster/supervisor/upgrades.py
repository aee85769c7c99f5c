"""Gray upgrades in a supervisor: it reads ``/gray_upgrade``, and writes the progress of its own workers.

Used by the thread of :class:`~storm_dagster.supervisor.cluster_link.ClusterLink`. The slots know nothing of upgrades: they
run the code that is desired, and report failures.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from storm_dagster.core.gray_upgrade import Move, SlotRun, early_failure, next_move
from storm_dagster.core.slots.model import Work
from storm_dagster.model.clock import boot_id
from storm_dagster.model.errors import Conflict
from storm_dagster.model.records import Assignment
from storm_dagster.model.view import UpgradeState
from storm_dagster.zk.gray_upgrades import write_move
from storm_dagster.zk.storm_cluster_state import StormClusterState

__all__ = ["Upgrades", "started_at"]

_log = logging.getLogger(__name__)
_MOST_FAILURES = 100


def started_at(start_ticks: int) -> float:
    """Start of a process by the boot clock, seconds; -1 if it died before its start time was read."""
    return start_ticks / os.sysconf("SC_CLK_TCK") if start_ticks >= 0 else -1.0


class Upgrades:
    """Upgrades of the topologies that have workers here."""

    def __init__(
        self,
        supervisor_id: str,
        runs: Callable[[], Iterable[SlotRun]],
        boot_now: Callable[[], float],
        launch_secs: float,
    ) -> None:
        """``runs()``: current processes of this supervisor, from any thread."""
        self._id = supervisor_id
        self._runs = runs
        self._boot_now = boot_now
        self._launch_secs = launch_secs
        self._boot_id = boot_id()
        self._failures: deque[tuple[int, Work, str]] = deque(maxlen=_MOST_FAILURES)
        self.states: dict[str, UpgradeState] = {}
        """Topology id -> its upgrade in progress."""

    def on_failure(self, port: int, work: Work, text: str) -> None:
        """Queue the failure of a process of that work, or of its start; any thread."""
        self._failures.append((port, work, text))

    def read(self, cluster: StormClusterState, topology_id: str, wake: Callable[[], None]) -> None:
        """Read one upgrade. Must precede the read of the assignment: the end of an upgrade changes both at once, and in
        this order the former code is never read without the record."""
        state = cluster.read_upgrade(topology_id, wake)
        if state.record is None:
            self.states.pop(topology_id, None)
        else:
            self.states[topology_id] = state

    def forget(self, topology_id: str) -> None:
        """Drop a topology without an assignment."""
        self.states.pop(topology_id, None)

    def advance(self, cluster: StormClusterState, assignments: Mapping[str, Assignment]) -> set[str]:
        """Write the progress of the workers here, and return the ids of the topologies to read again."""
        if not self.states:
            self._failures.clear()
            return set()
        runs = {(run.topology_id, run.port): run for run in self._runs()}
        stale: set[str] = set()
        while self._failures:
            port, work, text = self._failures[0]
            state, assignment = self.states.get(work.topology_id), assignments.get(work.topology_id)
            address = _address(assignment, self._id, port)
            if state is not None and address is not None:
                now = self._boot_now()
                move = early_failure(address, state, work.code_dir, text, boot_id=self._boot_id, boot_now=now)
                if move is not None and not self._write(cluster, work.topology_id, state, move):
                    # Kept, for the next read of the upgrade.
                    return {work.topology_id}
                if move is not None:
                    stale.add(work.topology_id)
            self._failures.popleft()
        for topology_id, state in self.states.items():
            assignment = assignments.get(topology_id)
            for worker in assignment.workers if assignment is not None else ():
                if worker.node != self._id or assignment is None or topology_id in stale:
                    continue
                move = next_move(
                    worker.address,
                    state,
                    assignment.code_dir,
                    runs.get((topology_id, worker.port)),
                    boot_id=self._boot_id,
                    boot_now=self._boot_now(),
                    launch_secs=self._launch_secs,
                )
                if move is not None:
                    self._write(cluster, topology_id, state, move)
                    # One at a time: the next move depends on the new record.
                    stale.add(topology_id)
        return stale

    def waiting(self) -> bool:
        """Whether an upgrade is in progress, whose moves need polling."""
        return bool(self.states)

    def _write(self, cluster: StormClusterState, topology_id: str, state: UpgradeState, move: Move) -> bool:
        try:
            write_move(cluster.state, topology_id, state, move)
        except Conflict as error:
            _log.info("the upgrade of %s moved on: %s", topology_id, error.message)
            return False
        _log.info("upgrade of %s: %s is %s", topology_id, move.worker, move.kind)
        return True


def _address(assignment: Assignment | None, node: str, port: int) -> str | None:
    if assignment is None:
        return None
    return next(
        (worker.address for worker in assignment.workers if worker.slot == (node, port)),
        None,
    )
