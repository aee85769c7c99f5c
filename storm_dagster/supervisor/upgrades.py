"""A supervisor's part in gray upgrades: the state below ``/gray_upgrade``, the writes about its own
workers, and the batches of topologies whose master runs here.

Belongs to the thread of :class:`~storm_dagster.supervisor.cluster_link.ClusterLink`. The slots
themselves know nothing of upgrades: they get the code to run, and report how that went.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from storm_dagster.core.slots.model import Work
from storm_dagster.core.upgrade.machine import Move, SlotRun, early_failure, next_move, pick
from storm_dagster.core.upgrade.selection import UpgradeSnapshot
from storm_dagster.host.clock import boot_id
from storm_dagster.model.errors import Conflict, Corrupt, Fenced
from storm_dagster.model.records import Assignment
from storm_dagster.model.view import UpgradeState
from storm_dagster.zk.gray_upgrades import write_move, write_pick
from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)
_MOST_FAILURES = 100


@dataclass(eq=False)
class Upgrades:
    """Upgrades of the topologies that have workers here."""

    id: str
    """Of the supervisor."""
    runs: Callable[[], Iterable[SlotRun]]
    """Current processes of this supervisor, from any thread."""
    boot_now: Callable[[], float]
    launch_secs: float

    def __post_init__(self) -> None:
        self._boot_id = boot_id()
        self._failures: deque[tuple[int, Work, str]] = deque(maxlen=_MOST_FAILURES)
        self.states: dict[str, UpgradeState] = {}
        """Topology id -> its upgrade in progress."""

    def on_failure(self, port: int, work: Work, text: str) -> None:
        """Record that a process of that work ended by itself, or did not come about; from any
        thread.
        """
        self._failures.append((port, work, text))

    def read(self, cluster: StormClusterState, topology_id: str, wake: Callable[[], None]) -> None:
        """Read one upgrade. Must precede the read of the assignment: the end of an upgrade changes
        both at once, and in this order the former code is never read without the record.
        """
        state = cluster.read_upgrade(topology_id, wake)
        if state.record is None:
            self.forget(topology_id)
        else:
            self.states[topology_id] = state

    def forget(self, topology_id: str) -> None:
        """Drop an upgrade that has ended, or whose topology has no assignment any more."""
        self.states.pop(topology_id, None)

    def advance(
        self, cluster: StormClusterState, assignments: Mapping[str, Assignment]
    ) -> set[str]:
        """Write what is to be written about the workers here; ids of the topologies to be read
        again.
        """
        if not self.states:
            self._failures.clear()
            return set()
        runs = {(run.topology_id, run.port): run for run in self.runs()}
        here = {
            (topology_id, worker.port): (worker.address, assignments[topology_id].code_dir)
            for topology_id in self.states
            if topology_id in assignments
            for worker in assignments[topology_id].workers
            if worker.node == self.id
        }
        stale: set[str] = set()
        while self._failures:
            port, work, text = self._failures[0]
            if (work.topology_id, port) in here:
                address, state = here[work.topology_id, port][0], self.states[work.topology_id]
                now = self.boot_now()
                move = early_failure(
                    address, state, work.code_dir, text, boot_id=self._boot_id, boot_now=now
                )
                if move is not None and not self._write(cluster, work.topology_id, state, move):
                    # Kept, for the next read of the upgrade.
                    return {work.topology_id}
                if move is not None:
                    stale.add(work.topology_id)
            self._failures.popleft()
        for (topology_id, port), (address, former) in here.items():
            if topology_id in stale:
                # One at a time: what comes next is decided from what then stands there.
                continue
            state = self.states[topology_id]
            run = runs.get((topology_id, port))
            times = {"boot_now": self.boot_now(), "launch_secs": self.launch_secs}
            move = next_move(address, state, former, run, boot_id=self._boot_id, **times)
            if move is not None:
                self._write(cluster, topology_id, state, move)
                stale.add(topology_id)
        requested = (
            each
            for each, state in self.states.items()
            if state.record is not None and state.record.continue_
        )
        stale.update(
            each
            for each in requested
            if each not in stale and self._pick(cluster, each, self.states[each])
        )
        return stale

    def _pick(self, cluster: StormClusterState, topology_id: str, state: UpgradeState) -> bool:
        """Pick the batch that was asked for, where the topology master runs; whether the upgrade is
        to be read again.

        JStorm's topology master picks itself. Here user code runs beside it, which must not name
        the code to run.
        """
        try:
            epoch, assigned = cluster.epoch(), cluster.read_assignment(topology_id)
            table = cluster.read_tasks(topology_id)
            if epoch is None or assigned is None or table is None:
                return False
            snapshot = UpgradeSnapshot(state, assigned[0], table)
            master, batch = snapshot.master, pick(snapshot)
            if master is None or master.node != self.id or batch is None:
                return False
            version = assigned[1].version
            write_pick(
                cluster.state, topology_id, state, batch, epoch=epoch[0], assignment_version=version
            )
        except (Conflict, Corrupt, Fenced) as error:
            _log.info("the upgrade of %s moved on: %s", topology_id, error.message)
        else:
            chosen = ", ".join(batch.workers) or "empty, the requested workers do not exist"
            _log.info(
                "upgrade of %s: the next batch is %s",
                topology_id,
                chosen,
                extra={"topology": topology_id},
            )
        return True

    def _write(
        self, cluster: StormClusterState, topology_id: str, state: UpgradeState, move: Move
    ) -> bool:
        try:
            write_move(cluster.state, topology_id, state, move)
        except Conflict as error:
            _log.info("the upgrade of %s moved on: %s", topology_id, error.message)
            return False
        _log.info(
            "upgrade of %s: %s is %s",
            topology_id,
            move.worker,
            move.kind,
            extra={"topology": topology_id},
        )
        return True
