"""Simulated Dagster: its sensors as they are, its runs as processes, its storage as a list."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg

from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.core.reassignment import Runnable
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.core.transitions import DueMemory
from storm_dagster.defs.healing import heartbeat_sensor, sensor_watch
from storm_dagster.defs.healing.memory import REASSIGN_OP, HealingCursor
from storm_dagster.model import paths
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.model.view import TopologyView
from storm_dagster.operations.context import OperationsContext, load_runnable
from storm_dagster.operations.live import healing, lifecycle
from storm_dagster.operations.results import ReassignResult
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_simulation.kernel import EPOCH, Host, Process
from storm_simulation.tree import Tree

if TYPE_CHECKING:
    from storm_simulation.cluster import Cluster

_LOG = logging.getLogger("simulation.run")
_TICK_SECS = 45.0
_RUN_DELAYS = (0.2, 2.0)
_LOST_RUN_SECS = 30.0
"""Time after which Dagster's monitoring marks a run as failed whose process is gone."""


@contextmanager
def operations(cluster: Cluster) -> Iterator[OperationsContext]:
    """The context of a run, as ``defs.resources.operating.connect`` makes it."""
    conf = cluster.conf()
    with StormClusterState.open(conf.values) as state:
        stored = state.epoch()
        epoch = None if stored is None else stored[0]
        with NimbusBlobClient(state.leader_http, epoch=epoch) as blobs:
            yield OperationsContext(
                cluster=state, blobs=blobs, conf=conf, planner=plan_placement, log=_LOG
            )


@dataclass(eq=False)
class Run:
    """A healing run, as Dagster's storage has it."""

    run_id: str
    created: float
    config: dict[str, Any]
    status: dg.DagsterRunStatus = dg.DagsterRunStatus.QUEUED

    @property
    def create_timestamp(self) -> Any:
        return SimpleNamespace(timestamp=lambda: EPOCH + self.created)

    @property
    def dagster_run(self) -> Any:
        return SimpleNamespace(status=self.status, run_id=self.run_id, run_config=self.config)


class HealingRuns:
    """Outcomes of healing runs, by topology."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """``moved``, ``late`` (another healer was faster), or ``fruitless`` -> number."""
        self.empty: dict[str, list[float]] = {}
        """Topology id -> times at which runs were requested that changed nothing or were late."""

    def add(self, run: Run, causes: list[Cause], reports: list[ReassignResult], tree: Tree) -> None:
        """Count the outcome of a run for each of its topologies."""
        outcomes = {report.topology_id: report.status for report in reports}
        generations = {cause.topology_id: cause.generation for cause in causes}
        for topology_id, generation in generations.items():
            node = tree.nodes.get(f"/storm{paths.assignment(topology_id)}")
            if outcomes.get(topology_id) == "assigned":
                self.counts["moved"] += 1
                continue
            is_late = node is None or node.version != generation
            self.counts["late" if is_late else "fruitless"] += 1
            self.empty.setdefault(topology_id, []).append(run.created)


@dataclass
class Storage:
    """Dagster's storage: it outlives its processes, and may stop answering."""

    runs: list[Run] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    cursor: str | None = None
    silent: bool = False
    starts_runs: bool = True


class _Instance:
    def __init__(self, dagster: SimulatedDagster) -> None:
        self._dagster = dagster

    def get_run_records(self, filters: Any = None, limit: int = 100) -> list[Run]:
        kernel = self._dagster.cluster.kernel
        while self._dagster.storage.silent:
            kernel.sleep(1.0)
        unfinished = [
            run
            for run in self._dagster.storage.runs
            if run.status in heartbeat_sensor.UNFINISHED_STATUSES
        ]
        return unfinished[-limit:]


class SimulatedDagster:
    """The daemon and code server with the healing and the lifecycle sensor."""

    def __init__(self, cluster: Cluster, host: Host) -> None:
        self.cluster = cluster
        self.host = host
        self.names = DagsterNames()
        self.storage = Storage()
        self.process: Process | None = None
        self.healings = 0
        self.healing_runs = HealingRuns()
        self.next_run: Callable[[Process], None] | None = None
        """What happens to the next run, soon after its start."""
        self.interval_secs = 1.0
        """Least time from the start of a sensor's tick to the next one."""
        self.tick_secs = _TICK_SECS
        """Longest tick of the healing sensor."""
        self.sensors_on = True
        self.switched_off = False
        """Nobody starts the daemon again."""
        self.run_delays = _RUN_DELAYS
        """Least and longest time until a run starts."""

    @property
    def up(self) -> bool:
        return self.process is not None and self.process.runs

    def start(self) -> None:
        if self.switched_off or (self.process is not None and not self.process.dead):
            return
        # What its process remembers.
        HealingCursor._recent.clear()
        sensor_watch._idle_watches.clear()
        self.process = self.cluster.process("dagster", self.host)
        self.process.spawn(self._heal, "heartbeat_sensor")
        self.process.spawn(self._finish, "lifecycle_sensor")

    def switch_off(self) -> None:
        """End the daemon, until :meth:`switch_on`."""
        self.switched_off = True
        if self.process is not None:
            self.process.kill()

    def switch_on(self) -> None:
        """Start the daemon if it is off."""
        if self.switched_off:
            self.switched_off = False
            self.cluster.start_missing()

    def reset_delays(self) -> None:
        """Runs start soon."""
        self.run_delays = _RUN_DELAYS

    # -- sensors -----------------------------------------------------------------------------------

    def _await_tick(self, begun: float) -> None:
        """Sleep until the next tick of a sensor whose last one began then."""
        kernel = self.cluster.kernel
        pause = kernel.rng.uniform(0.2, 1.5)
        kernel.sleep(max(pause, begun + self.interval_secs - kernel.now))
        while not self.sensors_on:
            kernel.sleep(1.0)

    def _heal(self) -> None:
        conf = self.cluster.conf().values
        limits = LivenessLimits.from_conf(conf)
        kernel = self.cluster.kernel
        begun = kernel.now - self.interval_secs
        while True:
            self._await_tick(begun)
            begun = kernel.now
            tick_secs, interval_secs = self.tick_secs, self.interval_secs
            context: Any = SimpleNamespace(cursor=self.storage.cursor, instance=_Instance(self))
            tick = heartbeat_sensor._Tick(
                "heartbeat_sensor", context, limits, self.names, self._load
            )
            requests: list[dg.RunRequest] = []
            try:
                with sensor_watch.open_watch(
                    conf, tick_secs=tick_secs, interval_secs=interval_secs
                ) as watch:
                    requests = tick.run(watch, kernel.boot() + tick_secs)
                    tick.cursor.store(watch.cluster, tick.memory, tick.epoch)
            except Unavailable:
                tick.grant_new_time()
                if not tick.is_loaded:
                    continue
            self.storage.cursor = tick.cursor.after(tick.memory)
            for request in requests:
                self._launch(request)

    def _load(self, state: StormClusterState, topology: TopologyView) -> Runnable:
        """The code of a topology, as the sensor reads it."""
        with NimbusBlobClient(state.leader_http, deadline_secs=3.0) as blobs:
            ctx = OperationsContext(state, blobs, self.cluster.conf(), planner=plan_placement)
            return load_runnable(ctx, topology)

    def _launch(self, request: dg.RunRequest) -> None:
        assert request.run_key is not None
        if request.run_key in self.storage.keys:
            return
        self.storage.keys.add(request.run_key)
        kernel = self.cluster.kernel
        run = Run(f"run-{len(self.storage.keys)}", kernel.now, dict(request.run_config))
        self.storage.runs.append(run)
        kernel.after(kernel.rng.uniform(*self.run_delays), self._start_run, run)

    def _start_run(self, run: Run) -> None:
        if not self.storage.starts_runs or (self.process is not None and self.process.dead):
            self.cluster.kernel.after(1.0, self._start_run, run)
            return
        causes = run.config["ops"][self.names.name(REASSIGN_OP)]["config"]["causes"]
        run.status = dg.DagsterRunStatus.STARTED
        self.healings += 1

        decoded = [Cause.from_json(cause) for cause in causes]

        def work() -> None:
            reports: list[ReassignResult] = []
            try:
                with operations(self.cluster) as connected:
                    ctx = replace(connected, run=run.run_id)
                    reports = healing.reassign(ctx, decoded)
                failed = any(report.status == "failed" for report in reports)
                run.status = dg.DagsterRunStatus.FAILURE if failed else dg.DagsterRunStatus.SUCCESS
            except StormDagsterError:
                run.status = dg.DagsterRunStatus.FAILURE
            self.healing_runs.add(run, decoded, reports, self.cluster.ensemble.tree)

        process = self.cluster.job(run.run_id, work)
        if self.next_run is not None:
            kernel = self.cluster.kernel
            kernel.after(
                kernel.rng.choice((0.01, 0.1, 1.0)) * kernel.rng.random(), self.next_run, process
            )
            self.next_run = None

        def lost() -> None:
            if run.status == dg.DagsterRunStatus.STARTED:
                self.cluster.kernel.after(
                    _LOST_RUN_SECS, setattr, run, "status", dg.DagsterRunStatus.FAILURE
                )

        process.at_end.append(lost)

    def _finish(self) -> None:
        kernel = self.cluster.kernel
        memory = DueMemory()
        begun = kernel.now
        while True:
            kernel.sleep(4.0)
            self._await_tick(begun)
            begun = kernel.now
            boot_id = f"boot-{self.host.name}-{self.host.files.get('boots', 0)}"
            try:
                with operations(self.cluster) as ctx:
                    memory = lifecycle.finish_due(
                        ctx, memory, boot_id=boot_id, boot_now=kernel.boot()
                    ).memory
            except StormDagsterError:
                continue


Work = Callable[[], None]
