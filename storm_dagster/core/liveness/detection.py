"""Detection of dead tasks, workers and hosts by counters and the observer's own clock (``docs/decisions.md#liveness``).

:func:`observe` takes a view and the observer's memory, and returns causes for a reassignment and the next
memory. No wall clock enters: a limit starts when this observer first saw the thing as it is, so that
a new observer (another boot id, a new leader, the end of an outage) grants one full timeout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from storm_dagster.core.liveness.causes import Cause, CauseKind
from storm_dagster.core.liveness.memory import (
    FirstSeen,
    LivenessMemory,
    MissingSlot,
    StartingWorker,
    TopologyMemory,
)
from storm_dagster.core.transitions import HEALED
from storm_dagster.model.conf import Conf
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.ranges import decode_ranges
from storm_dagster.model.records import Assignment, WorkerSlot
from storm_dagster.model.view import ClusterView, TopologyView, Versioned

_MASS_LOSS_SUPERVISORS = 3


@dataclass(frozen=True)
class LivenessLimits:
    """Limits, in seconds of silence."""

    task_secs: float = 30
    launch_secs: float = 120
    supervisor_secs: float = 30
    mass_loss_percent: float = 30

    @staticmethod
    def from_conf(conf: Conf) -> LivenessLimits:
        """The limits of a cluster conf."""
        return LivenessLimits(
            task_secs=conf.get("nimbus.task.timeout.secs", 30),
            launch_secs=conf.get("nimbus.task.launch.secs", 120),
            supervisor_secs=conf.get("nimbus.supervisor.timeout.secs", 30),
            mass_loss_percent=conf.get("nimbus.mass.loss.percent", 30),
        )


@dataclass(frozen=True)
class LivenessResult:
    """Result of one check of the cluster."""

    causes: tuple[Cause, ...]
    """Reasons to reassign tasks, in topology id order; empty while frozen."""
    memory: LivenessMemory
    frozen: str | None = None
    """Reason why healing pauses: so many workers vanished at once (``docs/decisions.md#mass-loss``)."""
    silent_supervisors: tuple[str, ...] = ()
    """Supervisors that are registered but whose counter does not rise: they get no new work."""
    restarting: tuple[tuple[str, str, int], ...] = ()
    """(topology id, supervisor id, port) that are restarted in place; recorded, not acted on."""
    waiting: tuple[str, ...] = ()
    """Problems whose limit has not passed yet, in words."""
    next_check: float | None = None
    """Boot clock at which the next limit passes if nothing changes; ``None`` when none is running."""


def unstopped_tasks(topology: TopologyView, offered: frozenset[str]) -> tuple[int, ...]:
    """Tasks that still run although their supervisor is not offered (lost, silent or blacklisted): they stay."""
    if topology.assignment is None:
        return ()
    return tuple(
        sorted(
            task
            for worker in topology.assignment.workers
            if worker.node not in offered and worker.slot in topology.live_workers
            for task in worker.ids
        )
    )


def observe(
    view: ClusterView,
    memory: LivenessMemory,
    limits: LivenessLimits,
    *,
    boot_id: str,
    boot_now: float,
    grant: bool = False,
) -> LivenessResult:
    """Check the cluster. ``grant`` restarts all limits, for an observer that was cut off from ZooKeeper."""
    cold = _cluster_restarted(view, memory)
    if cold or grant or memory.boot_id != boot_id or memory.since > boot_now:
        memory = LivenessMemory(boot_id=boot_id, since=boot_now, cold=cold)
    supervisors = {
        supervisor_id: _first_seen(info.count, memory.supervisors.get(supervisor_id), boot_now)
        for supervisor_id, info in view.supervisors.items()
    }
    silent = tuple(
        sorted(
            supervisor_id
            for supervisor_id, (_, since) in supervisors.items()
            if boot_now - since > limits.supervisor_secs
        )
    )
    round_ = _Round(view, memory, limits, boot_now, frozenset(silent))
    topologies = {topology.id: round_.topology(topology, assignment, at) for topology, assignment, at in _healed(view)}
    lost = {(cause.node, cause.port) for cause in round_.causes if cause.kind in ("lost_host", "dead_worker")}
    total = sum(len(assignment.workers) for _, assignment, _ in _healed(view))
    share = 100 * len(lost) / total if total else 0.0
    mass = share > limits.mass_loss_percent and len({node for node, _ in lost}) >= _MASS_LOSS_SUPERVISORS
    frozen_since = (boot_now if memory.frozen_since is None else memory.frozen_since) if mass else None
    # Bounded: what is still gone after a launch window is gone, and tasks may not stay dead for ever.
    frozen = frozen_since is not None and boot_now - frozen_since <= limits.launch_secs
    deadlines = list(round_.deadlines)
    if frozen and frozen_since is not None:
        deadlines.append(frozen_since + limits.launch_secs)
    return LivenessResult(
        causes=() if frozen else tuple(round_.causes),
        memory=LivenessMemory(
            boot_id=boot_id,
            since=memory.since,
            topologies=topologies,
            supervisors=supervisors,
            frozen_since=frozen_since,
            cold=memory.cold,
        ),
        frozen=(
            f"{len(lost)} of {total} workers on {len({node for node, _ in lost})} supervisors vanished at once: "
            f"nothing is reassigned for {limits.launch_secs:g} s; check the network and ZooKeeper"
            if frozen
            else None
        ),
        silent_supervisors=silent,
        restarting=tuple(round_.restarting),
        waiting=tuple(round_.waiting),
        next_check=min(deadlines, default=None),
    )


def _cluster_restarted(view: ClusterView, memory: LivenessMemory) -> bool:
    """Whether all supervisor processes of the last check are gone: the whole cluster stopped, or restarted.

    A process that was replaced counts its beats from the beginning.
    """
    return bool(memory.supervisors) and not any(
        supervisor_id in view.supervisors and view.supervisors[supervisor_id].count >= count
        for supervisor_id, (count, _) in memory.supervisors.items()
    )


def _first_seen(value: int, known: FirstSeen | None, boot_now: float) -> FirstSeen:
    return known if known is not None and known.value == value else FirstSeen(value, boot_now)


def _healed(view: ClusterView) -> Iterator[tuple[TopologyView, Assignment, Versioned]]:
    for _, topology in sorted(view.topologies.items()):
        if topology.base.status in HEALED and topology.assignment and topology.assignment_at:
            yield topology, topology.assignment, topology.assignment_at


@dataclass
class _Round:
    """One pass over the topologies; collects causes and deadlines."""

    view: ClusterView
    memory: LivenessMemory
    limits: LivenessLimits
    now: float
    silent: frozenset[str]
    causes: list[Cause] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)
    restarting: list[tuple[str, str, int]] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    def topology(self, topology: TopologyView, assignment: Assignment, assignment_at: Versioned) -> TopologyMemory:
        known = self.memory.topologies.get(topology.id)
        generation = assignment_at.version
        same = known is not None and known.assignment.value == generation
        placed = _first_seen(generation, known.assignment if known else None, self.now)
        beats = topology.beats_at.mzxid if topology.beats_at else -1
        beats_seen = _first_seen(beats, known.beats if known else None, self.now)
        starts = _slot_starts(assignment)
        missing: dict[str, MissingSlot] = {}
        judged: set[tuple[str, int]] = set()
        for worker in assignment.workers:
            if worker.slot in topology.live_workers:
                continue
            name = f"{worker.node}:{worker.port}"
            before = known.missing.get(name) if known is not None else None
            started = starts[worker.slot]
            if before is None or before.started != started:
                # A slot that was not missing at the last check of the same generation was alive then.
                before = MissingSlot(since=self.now, gone=bool(same and before is None), started=started)
            missing[name] = before
            kind, limit = self._limit(worker, before)
            if kind == "dead_worker" and self._is_restarting(worker):
                self.restarting.append((topology.id, worker.node, worker.port))
            if self._over(before.since, limit, topology, worker, "is missing"):
                judged.add(worker.slot)
                self._add(topology, generation, kind, worker, worker.ids)
        starting = self._never_ran(topology, assignment, generation, known, judged)
        next_memory = TopologyMemory(placed, beats_seen, missing, starting)
        if not self._master_silent(topology, assignment, assignment_at, next_memory, judged):
            self._dead_tasks(topology, assignment, assignment_at, judged)
        self._unassigned(topology, assignment, generation)
        return next_memory

    def _never_ran(
        self,
        topology: TopologyView,
        assignment: Assignment,
        generation: int,
        known: TopologyMemory | None,
        judged: set[tuple[str, int]],
    ) -> dict[str, StartingWorker]:
        """Check workers that have not reported all their tasks within the launch window."""
        starting: dict[str, StartingWorker] = {}
        for worker in assignment.workers:
            live = topology.live_workers.get(worker.slot)
            if live is None or live.status != "starting":
                continue
            name, token = f"{worker.node}:{worker.port}", live.token[:8]
            before = known.starting.get(name) if known is not None else None
            if before is None or before.token != token:
                before = StartingWorker(self.now, token)
            starting[name] = before
            if self._over(before.since, self.limits.launch_secs, topology, worker, "has not reported its tasks"):
                judged.add(worker.slot)
                self._add(topology, generation, "never_ran", worker, worker.ids)
        return starting

    def _is_restarting(self, worker: WorkerSlot) -> bool:
        info = self.view.supervisors.get(worker.node)
        return info is not None and worker.port in info.restarting

    def _limit(self, worker: WorkerSlot, missing: MissingSlot) -> tuple[CauseKind, float]:
        if worker.node not in self.view.supervisors:
            # Supervisor and worker both gone: the host is lost, unless this observer has only just come.
            if missing.since > self.memory.since:
                return "lost_host", 0
            return "lost_host", self.limits.launch_secs if self.memory.cold else self.limits.task_secs
        if self._is_restarting(worker) or not missing.gone:
            return "dead_worker", self.limits.launch_secs
        return "dead_worker", self.limits.task_secs

    def _over(self, since: float, limit: float, topology: TopologyView | None, worker: WorkerSlot, what: str) -> bool:
        """Whether the limit has passed; else its deadline is noted, and with ``topology`` a problem, too."""
        if limit == 0 or self.now - since > limit:
            return True
        self.deadlines.append(since + limit)
        if topology is not None:
            self.waiting.append(
                f"worker {worker.node}:{worker.port} of {topology.base.name} {what} for {self.now - since:.0f} s, "
                f"judged after {limit:g} s"
            )
        return False

    def _add(
        self,
        topology: TopologyView,
        generation: int,
        kind: CauseKind,
        worker: WorkerSlot | None,
        tasks: tuple[int, ...],
    ) -> None:
        self.causes.append(
            Cause(
                topology_id=topology.id,
                name=topology.base.name,
                generation=generation,
                kind=kind,
                node=worker.node if worker else "",
                host=worker.host if worker else "",
                port=worker.port if worker else 0,
                tasks=tasks,
                avoid=tuple(sorted(self.silent)),
            )
        )

    def _master_silent(
        self,
        topology: TopologyView,
        assignment: Assignment,
        assignment_at: Versioned,
        memory: TopologyMemory,
        judged: set[tuple[str, int]],
    ) -> bool:
        """Whether the topology master's record does not change although its worker lives, which is then replaced."""
        part = topology.tasks.components.get(TOPOLOGY_MASTER) if topology.tasks else None
        master = part.ids[0] if part and part.ids else 0
        for worker in assignment.workers:
            if master not in worker.ids:
                continue
            if worker.slot in judged:
                return True
            if worker.slot not in topology.live_workers:
                return False
            if memory.beats.value <= assignment_at.mzxid:
                # It has not reported since the newest placement; the first record is written with it.
                since, limit = max(memory.beats.since, memory.assignment.since), self.limits.launch_secs
            else:
                since, limit = memory.beats.since, self.limits.task_secs
            if self._over(since, limit, None, worker, ""):
                self._add(topology, assignment_at.version, "silent_master", worker, worker.ids)
                return True
        return False

    def _dead_tasks(
        self,
        topology: TopologyView,
        assignment: Assignment,
        assignment_at: Versioned,
        judged: set[tuple[str, int]],
    ) -> None:
        """Replace workers with tasks that the topology master reports as dead."""
        if topology.beats is None or topology.beats_at is None or not topology.beats.dead:
            return
        if topology.beats_at.mzxid <= assignment_at.mzxid:
            return  # Written before the newest placement: its tasks may have been reassigned since.
        dead = frozenset(decode_ranges(topology.beats.dead))
        for worker in assignment.workers:
            if worker.slot not in judged and worker.slot in topology.live_workers and dead & set(worker.ids):
                self._add(topology, assignment_at.version, "dead_task", worker, worker.ids)

    def _unassigned(self, topology: TopologyView, assignment: Assignment, generation: int) -> None:
        """Add tasks without a slot, once the cluster has a free one."""
        if topology.tasks is None:
            return
        placed = {task for worker in assignment.workers for task in worker.ids}
        without = tuple(sorted(topology.tasks.component_of().keys() - placed))
        if without and _has_free_slot(self.view, self.silent):
            self._add(topology, generation, "unassigned", None, without)


def _slot_starts(assignment: Assignment) -> Mapping[tuple[str, int], int]:
    """Slot -> newest start among its tasks: it rises when a task is placed there again."""
    starts = assignment.start_secs()
    return {worker.slot: max((starts.get(task, 0) for task in worker.ids), default=0) for worker in assignment.workers}


def _has_free_slot(view: ClusterView, silent: frozenset[str]) -> bool:
    used = view.used_ports()
    return any(
        set(info.ports) - used.get(supervisor_id, set())
        for supervisor_id, info in view.supervisors.items()
        if supervisor_id not in silent and info.host not in view.blacklist
    )
