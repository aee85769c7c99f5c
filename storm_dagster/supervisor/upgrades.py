"""A supervisor's part in gray upgrades.

It reads the state below ``/gray_upgrade``, writes the moves of its workers, and picks the
batches of topologies whose master runs here. It belongs to the thread of
:class:`~storm_dagster.supervisor.cluster_link.ClusterLink`. The slots have no notion of upgrades:
they get the code to run, and report its failures.
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
from storm_dagster.model.records import Assignment, WorkerSlot
from storm_dagster.model.view import UpgradeState
from storm_dagster.zk.gray_upgrades import write_move, write_pick
from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)
_MAX_FAILURES = 100
"""Failures that wait for :meth:`Upgrades.advance`; the oldest ones are dropped."""


@dataclass(eq=False)
class Upgrades:
    """Upgrades of the topologies that have workers here."""

    id: str
    """Id of the supervisor."""
    runs: Callable[[], Iterable[SlotRun]]
    """Current processes of this supervisor, from any thread."""
    boot_now: Callable[[], float]
    """The boot clock."""
    launch_secs: float
    """``nimbus.task.launch.secs``."""

    def __post_init__(self) -> None:
        self._boot_id = boot_id()
        self._failures: deque[tuple[int, Work, str]] = deque(maxlen=_MAX_FAILURES)
        """(port, work, text) of each crash or failed start that is not written yet."""
        self.states: dict[str, UpgradeState] = {}
        """Topology id -> its upgrade in progress."""
        self._stale: set[str] = set()
        """Ids of the topologies whose upgrade was written, or could not be, since it was read.

        The next write follows from the state after this one. Otherwise a failure that this
        supervisor has recorded could be overwritten.
        """

    def on_failure(self, port: int, work: Work, text: str) -> None:
        """Record that a process of that work crashed or was not started.

        From any thread.
        """
        self._failures.append((port, work, text))

    def read(self, cluster: StormClusterState, topology_id: str, wake: Callable[[], None]) -> None:
        """Read one upgrade, before the assignment is read.

        The end of an upgrade changes both at once: in this order the former code is never read
        without the record.
        """
        state = cluster.read_upgrade(topology_id, wake)
        if state.record is None:
            self.forget(topology_id)
        else:
            self.states[topology_id] = state
            self._stale.discard(topology_id)

    def forget(self, topology_id: str) -> None:
        """Drop an upgrade that has ended.

        An upgrade also ends if its topology no longer has an assignment.
        """
        self.states.pop(topology_id, None)
        self._stale.discard(topology_id)

    def advance(
        self, cluster: StormClusterState, assignments: Mapping[str, Assignment]
    ) -> set[str]:
        """Write the due moves of the workers here, and pick the next batches.

        Failures are first: a process that failed must not count as upgraded. Returns the ids of the
        topologies whose upgrade must be reread before it advances further. Without an upgrade, the
        recorded failures are dropped. An error of ZooKeeper is raised; the next call continues.
        """
        if not self.states:
            self._failures.clear()
            return set()
        runs = {(run.topology_id, run.port): run for run in self.runs()}
        workers = self._own_workers(assignments)
        self._write_failures(cluster, workers)
        for (topology_id, port), worker in workers.items():
            if topology_id in self._stale:
                continue
            state = self.states[topology_id]
            move = next_move(
                worker.address,
                state,
                assignments[topology_id].code_dir,
                runs.get((topology_id, port)),
                boot_id=self._boot_id,
                boot_now=self.boot_now(),
                launch_secs=self.launch_secs,
            )
            if move is not None:
                self._write(cluster, topology_id, state, move)
        for topology_id, state in self.states.items():
            if topology_id in self._stale or state.record is None or not state.record.continue_:
                continue
            if self._pick(cluster, topology_id, state):
                self._stale.add(topology_id)
        return set(self._stale)

    def _write_failures(
        self, cluster: StormClusterState, workers: Mapping[tuple[str, int], WorkerSlot]
    ) -> None:
        """Write the recorded failures of ``workers``, those here of topologies in upgrade.

        A failure outside an upgrade is dropped. One that cannot be written now stays queued for the
        next read of its upgrade.
        """
        kept: list[tuple[int, Work, str]] = []
        for _ in range(len(self._failures)):
            failure = self._failures.popleft()
            try:
                is_done = self._write_failure(cluster, workers, failure)
            except BaseException:
                self._failures.extendleft([failure, *reversed(kept)])
                raise
            if not is_done:
                kept.append(failure)
        self._failures.extendleft(reversed(kept))

    def _write_failure(
        self,
        cluster: StormClusterState,
        workers: Mapping[tuple[str, int], WorkerSlot],
        failure: tuple[int, Work, str],
    ) -> bool:
        """Write a failure if it concerns an upgrade; false if that has to wait."""
        port, work, text = failure
        topology_id = work.topology_id
        worker = workers.get((topology_id, port))
        if worker is None:
            return True
        if topology_id in self._stale:
            return False
        state = self.states[topology_id]
        move = early_failure(
            worker.address,
            state,
            work.code_dir,
            text,
            boot_id=self._boot_id,
            boot_now=self.boot_now(),
        )
        return move is None or self._write(cluster, topology_id, state, move)

    def _own_workers(
        self, assignments: Mapping[str, Assignment]
    ) -> dict[tuple[str, int], WorkerSlot]:
        """(topology id, port) -> worker here, of topologies in upgrade."""
        workers: dict[tuple[str, int], WorkerSlot] = {}
        for topology_id in self.states:
            assignment = assignments.get(topology_id)
            if assignment is None:
                continue
            for worker in assignment.workers:
                if worker.node == self.id:
                    workers[topology_id, worker.port] = worker
        return workers

    def _pick(self, cluster: StormClusterState, topology_id: str, state: UpgradeState) -> bool:
        """Pick the requested batch, if the topology master runs here.

        Returns true if the upgrade must be reread. JStorm's topology master picks itself. Here user
        code runs beside it, which must not name the code to run.
        """
        try:
            leader_epoch = cluster.epoch()
            versioned = cluster.read_assignment(topology_id)
            table = cluster.read_tasks(topology_id)
            if leader_epoch is None or versioned is None or table is None:
                return False
            epoch, _ = leader_epoch
            assignment, stat = versioned
            snapshot = UpgradeSnapshot(state, assignment, table)
            master = snapshot.master
            batch = pick(snapshot)
            if master is None or master.node != self.id or batch is None:
                return False
            write_pick(
                cluster.state,
                topology_id,
                state,
                batch,
                epoch=epoch,
                assignment_version=stat.version,
            )
        except (Conflict, Corrupt, Fenced) as error:
            _log.info("the upgrade of %s moved on: %s", topology_id, error.message)
        else:
            workers = ", ".join(batch.workers) or "empty, the requested workers do not exist"
            _log.info(
                "upgrade of %s: the next batch is %s",
                topology_id,
                workers,
                extra={"topology": topology_id},
            )
        return True

    def _write(
        self, cluster: StormClusterState, topology_id: str, state: UpgradeState, move: Move
    ) -> bool:
        """Write a move and return true; false if the upgrade changed in the meantime.

        In both cases, and after an error, the upgrade must be reread.
        """
        self._stale.add(topology_id)
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
