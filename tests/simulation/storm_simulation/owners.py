"""Who runs which task: the second invariant, by the leases of the processes on their own clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storm_simulation.kernel import Kernel
    from storm_simulation.workers import SimulatedWorker


class Owners:
    """The worker processes that have a task open. Two with a valid lease at one moment are a violation."""

    def __init__(self, kernel: Kernel, violated: Callable[[str, str], None]) -> None:
        self._kernel = kernel
        self._violated = violated
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
