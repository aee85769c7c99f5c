"""Stand-ins for the topology master, and for the supervisors with their processes, in a gray
upgrade.
"""

from __future__ import annotations

from storm_dagster.core.upgrade.machine import SlotRun, code_for, next_move, pick
from storm_dagster.core.upgrade.selection import UpgradeSnapshot
from storm_dagster.model.errors import NotAlive
from storm_dagster.model.records import GrayUpgrade
from storm_dagster.model.view import TopologyView, UpgradeState
from storm_dagster.zk.gray_upgrades import write_move, write_pick
from storm_dagster.zk.storm_cluster_state import StormClusterState


class UpgradeStandIns:
    """One topology of a cluster without daemons. Decisions and writes are those of the real
    daemons.
    """

    def __init__(self, cluster: StormClusterState, topology_id: str) -> None:
        self.cluster = cluster
        self.id = topology_id
        assignment = self.topology.assignment
        self.runs: dict[str, str] = {
            worker.address: self.id for worker in (assignment.workers if assignment else ())
        }
        """``host:port`` -> the code that its process runs."""

    @property
    def topology(self) -> TopologyView:
        """The topology as it is; :class:`NotAlive` when it is gone."""
        found = self.cluster.load_view().topologies.get(self.id)
        if found is None:
            raise NotAlive(f"topology {self.id} is gone: it has no workers to stand in for")
        return found

    @property
    def state(self) -> UpgradeState:
        """The upgrade as it is."""
        return self.cluster.read_upgrade(self.id)

    @property
    def record(self) -> GrayUpgrade:
        """What was asked for, while an upgrade is under way."""
        found = self.state.record
        assert found is not None, f"no upgrade of {self.id} is under way"
        return found

    def pick(self) -> None:
        """Act as the topology master: pick a batch."""
        topology, state, epoch = self.topology, self.state, self.cluster.epoch()
        if topology.assignment is None or topology.tasks is None or topology.assignment_at is None:
            return
        batch = pick(UpgradeSnapshot(state, topology.assignment, topology.tasks))
        if batch is not None and epoch is not None:
            version = topology.assignment_at.version
            write_pick(
                self.cluster.state,
                self.id,
                state,
                batch,
                epoch=epoch[0],
                assignment_version=version,
            )

    def supervise(self) -> None:
        """Act as the supervisors: replace processes, then write their state."""
        assignment = self.topology.assignment
        for worker in assignment.workers if assignment is not None else ():
            assert assignment is not None
            state = self.state
            code, hurry = code_for(worker, assignment, state)
            if hurry:
                self.runs[worker.address] = code
            code = self.runs.setdefault(worker.address, code)
            move = next_move(
                worker.address,
                state,
                assignment.code_dir,
                SlotRun(worker.port, self.id, code, started=0.0, running=True),
                boot_id="b",
                boot_now=1.0,
                launch_secs=120,
            )
            if move is not None:
                write_move(self.cluster.state, self.id, state, move)

    def batch(self) -> None:
        """Both turns: the batch that was asked for runs the new code."""
        self.pick()
        self.supervise()

    def on(self, code_dir: str) -> set[str]:
        """``host:port`` of the workers whose process runs that code."""
        return {address for address, runs in self.runs.items() if runs == code_dir}
