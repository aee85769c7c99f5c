"""Simulated worker processes: the real thread that keeps lease and assignment, and a model of the
loop of tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from storm_dagster.core.slots.model import Work
from storm_dagster.host.worker_spec import HeartbeatFile, WorkerSpec
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.exit_codes import EXIT_STOPPED, EXIT_SUPERSEDED
from storm_dagster.model.log_levels import KeptLevels
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.records import TaskBeats
from storm_dagster.model.wire import TaskReport, WorkerReport
from storm_dagster.worker.dataplane.routes import Placement
from storm_dagster.worker.engine.system import ListeningClock, TopologyMasterTable
from storm_dagster.worker.runtime import cluster_sync
from storm_dagster.worker.runtime.lease import WorkerLease
from storm_dagster.zk.session import lease_of
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_simulation.kernel import Host, Process
from storm_simulation.threads import Event, Future, Thread

if TYPE_CHECKING:
    from storm_simulation.cluster import Cluster

_TURN_SECS = 0.5
_REPORT_SECS = 3.0


class ModelLoop:
    """The worker's loop as far as ``ClusterSync`` and others see it: tasks that open, run while
    leased, and close.
    """

    def __init__(self, worker: SimulatedWorker, lease: WorkerLease) -> None:
        self._worker = worker
        self._kernel = worker.cluster.kernel
        self.lease = lease
        self.engine = SimpleNamespace(state_dir=None)
        self.placement: Placement | None = None
        self.open: dict[int, float] = {}
        """Open task -> time from which it runs."""
        self.paused = True
        self.passes = 0
        self.exit_code: int | None = None
        self.hung = 0
        """Faults by which the code of a task does not return now: the loop stands still, the other
        threads go on.
        """
        self.request_refresh: Callable[[], None] = lambda: None
        self._actions: deque[Callable[[], Any]] = deque()
        self._wake = Event()
        self._next_report = 0.0
        self._reported: Mapping[int, str] = {}
        self._count = 0
        self._table: TopologyMasterTable | None = None
        self._listening = ListeningClock()

    # -- from other threads ------------------------------------------------------------------------

    def post(self, action: Callable[[], Any]) -> None:
        self._actions.append(action)
        self._wake.set()

    def call(self, action: Callable[[], Any], timeout: float) -> Any:
        future = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

        self.post(run)
        return future.result(timeout)

    def restore_levels(self, kept: KeptLevels) -> None:
        pass

    def supersede(self, reason: str) -> None:
        self.end(EXIT_SUPERSEDED)

    def retire(self) -> None:
        self.end(EXIT_SUPERSEDED)

    def end(self, code: int) -> None:
        self.exit_code = code
        self._wake.set()

    def statuses(self) -> Mapping[int, Literal["starting", "running"]]:
        now = self._kernel.now
        return {
            task: "running" if now >= ready else "starting" for task, ready in self.open.items()
        }

    def status(self) -> str:
        if self.paused:
            return "paused" if self.lease.pauses else "starting"
        return (
            "running" if all(each == "running" for each in self.statuses().values()) else "starting"
        )

    def _master_task(self) -> int | None:
        if self.placement is None:
            return None
        return next(
            (t for t in self.open if self.placement.components.get(t) == TOPOLOGY_MASTER), None
        )

    def beats(self, tasks: frozenset[int]) -> TaskBeats | None:
        task = self._master_task()
        if task is None or self.statuses().get(task) != "running":
            return None
        if self._table is None or self._table.task != task:
            self._table = TopologyMasterTable(self._worker.spec.topology_id, task)
            if self.placement is not None:
                self._table.follow(self.placement)
        conf = self._worker.conf
        timeout, launch = (
            float(conf["nimbus.task.timeout.secs"]),
            float(conf["nimbus.task.launch.secs"]),
        )
        return self._table.beats(self._listening.now, timeout, tasks, launch)

    def metric_names(self) -> list[str]:
        return []

    def receive(self, report: WorkerReport) -> None:
        """A report of another worker."""
        if self._table is not None:
            self._table.receive(report, self._listening.now)

    # -- in the loop's thread ----------------------------------------------------------------------

    def close_tasks(self, tasks: frozenset[int]) -> None:
        for task in tasks:
            self.open.pop(task, None)
        self._worker.cluster.owners.closed(self._worker, tasks)

    def place(self, placement: Placement, active: bool) -> None:
        self.placement = placement
        gone = self.open.keys() - placement.open
        self.close_tasks(frozenset(gone))
        rng = self._kernel.rng
        for task in sorted(placement.open - self.open.keys()):
            self.open[task] = self._kernel.now + 0.1 * rng.random()
        self._worker.cluster.owners.opened(self._worker, placement.open)
        if self._table is not None:
            self._table.follow(placement)
        self._next_report = 0.0

    def run(self) -> int:
        boot = self._kernel.boot
        while self.exit_code is None:
            while self.hung:
                self._kernel.sleep(0.02)
            self.passes += 1
            self._wake.clear()
            while self._actions:
                self._actions.popleft()()
            if not self.lease.valid() or self.placement is None:
                if not self.paused:
                    self.paused = True
                    self.request_refresh()
                self._wake.wait(0.1)
                continue
            self.paused = False
            self._worker.cluster.owners.works(self._worker)
            self._worker.cluster.owners.check(self._worker)
            now = boot()
            if now >= self._next_report or dict(self.statuses()) != self._reported:
                self._report(now)
            self._wake.wait(0.11 if "starting" in self._reported.values() else _TURN_SECS)
        self.close_tasks(frozenset(self.open))
        return self.exit_code

    def _report(self, now: float) -> None:
        statuses = self.statuses()
        if statuses != self._reported:
            self._reported = statuses
            self.request_refresh()
        self._next_report = now + _REPORT_SECS
        self._count += 1
        spec, placement = self._worker.spec, self.placement
        assert placement is not None
        tasks = {
            str(task): TaskReport(component=placement.components.get(task, ""), status=status)
            for task, status in statuses.items()
        }
        report = WorkerReport(
            node=spec.node,
            host=spec.host,
            port=spec.port,
            pid=self._worker.process.pid,
            count=self._count,
            uptime_secs=int(now),
            version=placement.version,
            status=self.status(),
            tasks=tasks,
        )
        if self._master_task() is not None:
            self._listening.tick(now, 2 * _REPORT_SECS + 1)
            self.receive(report)
            return
        for task, component in placement.components.items():
            if component == TOPOLOGY_MASTER and task in placement.slots:
                self._worker.cluster.send_report(self._worker, placement.slots[task], report)


class SimulatedWorker:
    """One worker process."""

    def __init__(
        self, cluster: Cluster, host: Host, port: int, work: Work, code: dict[str, Any]
    ) -> None:
        self.cluster = cluster
        self.host = host
        self.work = work
        self.worker_id = f"w{cluster.kernel.rng.getrandbits(48):012x}"
        self.heartbeat_path = Path("/workers", self.worker_id, "heartbeat")
        self.conf = {
            **cluster.conf().values,
            **{k: v for k, v in code["conf"].items() if v is not None},
        }
        self.process: Process = cluster.process(f"worker-{host.name}-{port}", host)
        self.boot_id = f"boot-{host.name}-{host.files.get('boots', 0)}"
        self.started = cluster.kernel.boot(self.process)
        self.ticks = int(self.started * 100)
        self.loop: ModelLoop | None = None
        self.lease: WorkerLease | None = None
        self.sync: cluster_sync.ClusterSync | None = None
        self._terminated = False
        self.spec = WorkerSpec(
            worker_id=self.worker_id,
            token=f"{cluster.kernel.rng.getrandbits(64):016x}",
            topology_id=work.topology_id,
            node=host.name,
            host=host.name,
            port=port,
            home="/",
            code_dir=work.code_dir,
            code=str(code["sha256"])[:16],
            heartbeat_path=str(self.heartbeat_path),
            log_path="/dev/null",
        )
        self.process.at_end.append(self._ended)
        self.process.spawn(self._main)

    def terminate(self) -> None:
        self._terminated = True
        if self.loop is not None:
            self.loop.end(EXIT_STOPPED)

    def _ended(self) -> None:
        self.cluster.owners.closed(
            self, frozenset(self.loop.open) if self.loop is not None else frozenset()
        )
        self.cluster.worker_ended(self)

    def _main(self) -> None:
        kernel = self.cluster.kernel
        kernel.sleep(kernel.rng.uniform(0.4, 1.5))
        if not self.cluster.bind(self, 30.0):
            self.process.kill(1)
            return
        try:
            cluster = StormClusterState.open(self.conf)
        except StormDagsterError:
            self.process.kill(1)
            return
        self.lease = WorkerLease(lease_of(cluster.session).lease_end)
        self.loop = ModelLoop(self, self.lease)
        # The loop may ask at any moment: so at the one at which a new session has just come about,
        # too.
        cluster.session.add_listener(lambda _: self.cluster.owners.check(self))
        self.sync = cluster_sync.ClusterSync(self.spec, self.conf, cluster, self.lease, self.loop)  # type: ignore[arg-type]
        self.loop.request_refresh = self.sync.request_refresh
        if self._terminated:
            self.loop.end(EXIT_STOPPED)
        Thread(target=self._beat, name="heartbeat").start()
        self.sync.start()
        code = EXIT_SUPERSEDED
        try:
            code = self.loop.run()
        finally:
            self.sync.stop()
        self.process.kill(code)

    def _beat(self) -> None:
        kernel, loop = self.cluster.kernel, self.loop
        assert loop is not None
        seen, count = -1, 0
        while True:
            if loop.passes != seen and self.host.disk == "well":
                seen, count = loop.passes, count + 1
                beat = HeartbeatFile(
                    pid=self.process.pid, time_boot=kernel.boot(), count=count, status=loop.status()
                )
                self.host.files.setdefault("beats", {})[str(self.heartbeat_path)] = beat
            kernel.sleep(1.0)

    # -- what the invariants ask -------------------------------------------------------------------

    def leased_until(self) -> float:
        """True time until which it may run tasks, as its own clock will tell it."""
        if self.process.dead or self.lease is None or not self.lease.granted:
            return 0.0
        end = max(self.lease._until, self.lease._lease_end(self.lease._owner))
        return (end - self.host.boot_offset - 1000.0) / (1 + self.host.drift)
