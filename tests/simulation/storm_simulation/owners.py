"""Who runs which task: the second invariant, by the leases of the processes on their own clocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from storm_dagster.model import paths
from storm_simulation.rules import ROOT

if TYPE_CHECKING:
    from storm_simulation.cluster import Cluster
    from storm_simulation.workers import SimulatedWorker


class Owners:
    """The worker processes that have a task open. Two with a valid lease at one moment are a
    violation.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._kernel = cluster.kernel
        self._violated = cluster.violated
        self._open: dict[tuple[str, int], dict[SimulatedWorker, None]] = {}

    def opened(self, worker: SimulatedWorker, tasks: Iterable[int]) -> None:
        for task in tasks:
            self._open.setdefault((worker.spec.topology_id, task), {})[worker] = None
        self.check(worker)

    def closed(self, worker: SimulatedWorker, tasks: Iterable[int]) -> None:
        for task in tasks:
            key = (worker.spec.topology_id, task)
            of = self._open.get(key)
            if of is not None:
                of.pop(worker, None)
                if not of:
                    del self._open[key]

    def check(self, worker: SimulatedWorker) -> None:
        """No other process may run a task that this one runs now."""
        assert worker.loop is not None
        now = self._kernel.now
        mine = worker.leased_until() > now
        for task in worker.loop.open:
            of = self._open.get((worker.spec.topology_id, task), {})
            if not mine or len(of) < 2:
                continue
            for other in of:
                if other is not worker and other.leased_until() > now + 1e-3:
                    self._violated(
                        "I2",
                        f"task {task} of {worker.spec.topology_id} runs in {worker.process.name} ({worker.process.pid}) "
                        f"and in {other.process.name} ({other.process.pid}, leased for {other.leased_until() - now:.2f} s)",
                    )

    def works(self, worker: SimulatedWorker) -> None:
        """Its lease says that it may run tasks now: so the session that it was granted to has the
        worker's node.
        """
        assert worker.lease is not None
        spec, rules = worker.spec, self._cluster.rules
        base = rules.bases.get(spec.topology_id)
        if base is None or base.status == "KILLED":
            return  # Its node goes with the topology, and nobody else will run the tasks.
        node = self._cluster.ensemble.tree.nodes.get(
            ROOT + paths.worker(spec.topology_id, spec.node, spec.port)
        )
        if node is None or node.owner != worker.lease._owner:
            whose = "is gone" if node is None else "is another session's"
            self._violated(
                "I2",
                f"{worker.process.name} ({worker.process.pid}) works on {spec.topology_id} by the lease of session "
                f"{worker.lease._owner:x}, and its node {whose}",
            )

    def running(self, topology_id: str, task: int) -> bool:
        """Whether a process runs the task now."""
        now = self._kernel.now
        return any(
            worker.process.runs
            and worker.loop is not None
            and now >= worker.loop.open.get(task, now + 1)
            and worker.leased_until() > now
            for worker in self._open.get((topology_id, task), {})
        )
