"""Detection of dead tasks, workers and hosts by counters and the observer's own clock
(``docs/decisions.md#liveness``).

:func:`observe` takes a view and the observer's memory, and returns causes for a reassignment and
the next memory. No wall clock enters: a limit starts when this observer first saw the thing as it
is, so that a new observer (another boot id, a new leader, the end of an outage) grants one full
timeout.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from storm_dagster.core.liveness.causes import (
    SPREAD_PAUSE_SECS,
    Cause,
    CauseKind,
    FirstSeen,
    LivenessMemory,
    MissingSlot,
    StartingWorker,
    TopologyMemory,
)
from storm_dagster.core.transitions import HEALED, STEADY
from storm_dagster.model.conf import Conf
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.records import Assignment, WorkerSlot
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView, TopologyView, Versioned

_MASS_LOSS_SUPERVISORS = 3


@dataclass(frozen=True)
class LivenessLimits:
    """Limits, in seconds of silence."""

    task_secs: float = 30
    launch_secs: float = 120
    supervisor_secs: float = 30
    mass_loss_percent: float = 30
    window_secs: float = 0
    """Losses of one fault may come so far apart: ZooKeeper ends sessions in buckets, and clients
    reconnect late.
    """

    @staticmethod
    def from_conf(conf: Conf) -> "LivenessLimits":
        """The limits of a cluster conf."""
        return LivenessLimits(
            task_secs=conf.get("nimbus.task.timeout.secs", 30),
            launch_secs=conf.get("nimbus.task.launch.secs", 120),
            supervisor_secs=conf.get("nimbus.supervisor.timeout.secs", 30),
            mass_loss_percent=conf.get("nimbus.mass.loss.percent", 30),
            window_secs=conf.get("storm.zookeeper.session.timeout", 4000) / 500,
        )


@dataclass(frozen=True)
class LivenessResult:
    """Result of one check of the cluster."""

    causes: tuple[Cause, ...]
    """Reasons to reassign tasks, in topology id order; empty while frozen."""
    memory: LivenessMemory
    frozen: str | None = None
    """Reason why healing pauses: so many workers vanished at once
    (``docs/decisions.md#mass-loss``).
    """
    silent_supervisors: tuple[str, ...] = ()
    """Supervisors that are registered but whose counter does not rise: they get no new work."""
    restarting: tuple[tuple[str, str, int], ...] = ()
    """(topology id, supervisor id, port) that are restarted in place; recorded, not acted on."""
    waiting: tuple[str, ...] = ()
    """Problems whose limit has not passed yet, in words."""
    next_check: float | None = None
    """Boot clock at which the next limit passes if nothing changes; ``None`` when none is
    running.
    """


def observe(
    view: ClusterView,
    memory: LivenessMemory,
    limits: "LivenessLimits",
    *,
    boot_id: str,
    boot_now: float,
    grant: bool = False,
) -> LivenessResult:
    """Check the cluster. ``grant`` restarts all limits, for an observer that was cut off from
    ZooKeeper.
    """
    cold = _cluster_restarted(view, memory)
    if cold or grant or memory.boot_id != boot_id or memory.since > boot_now + limits.window_secs:
        # Sessions that an outage ended, end a little after the observer's own reconnection.
        late = limits.window_secs if grant and memory.boot_id == boot_id else 0
        memory = LivenessMemory(boot_id=boot_id, since=boot_now + late, cold=cold)
    supervisors = {
        supervisor_id: _first_seen(info.count, memory.supervisors.get(supervisor_id), boot_now)
        for supervisor_id, info in view.supervisors.items()
    }
    silent = sorted(
        node for node, seen in supervisors.items() if boot_now - seen.since > limits.supervisor_secs
    )
    placed = {worker.node for _, assignment, _ in _healed(view) for worker in assignment.workers}
    signs = {node: seen.since for node, seen in memory.supervisors.items()}
    signs.update(memory.last_signs or {})
    # A counter that was left out of a stored memory (``since`` 0) tells nothing.
    oldest = memory.since - (
        limits.window_secs if memory.cold else 0
    )  # After a restart, who is there has come back.
    gone = {
        node: at
        for node, at in signs.items()
        if node in placed and node not in supervisors and at >= oldest
    }
    round_ = _Round(view, memory, limits, boot_now, frozenset(silent), gone)
    topologies = {found[0].id: _TopologyCheck(round_, *found).run() for found in _healed(view)}
    since = memory.frozen_since
    frozen = since is not None and boot_now - since <= limits.launch_secs
    # What was moved already counts as well: a fault comes in parts, and a pause lasts until its
    # hosts are back.
    live = {slot.key for topology, _, _ in _healed(view) for slot in topology.live_workers}
    lost = {
        key: at
        for key, at in (memory.lost or {}).items()
        if key not in live
        and (
            boot_now - at <= limits.window_secs
            or (frozen and Slot.parse(key).node not in view.supervisors)
        )
    }
    judged = [cause for cause in round_.causes if cause.kind in ("lost_host", "dead_worker")]
    lost.update((cause.slot.key, boot_now) for cause in judged)
    nodes = {Slot.parse(key).node for key in lost}
    total = sum(len(assignment.workers) for _, assignment, _ in _healed(view))
    share = 100 * len(lost) / total if total else 0.0
    mass = share > limits.mass_loss_percent and len(nodes) >= _MASS_LOSS_SUPERVISORS
    frozen_since = (boot_now if since is None else since) if mass else None
    # Bounded: what is still gone after a launch window is gone, and tasks may not stay dead for
    # ever.
    frozen = frozen_since is not None and boot_now - frozen_since <= limits.launch_secs
    if frozen and frozen_since is not None:
        round_.deadlines.append(frozen_since + limits.launch_secs)
    return LivenessResult(
        causes=() if frozen else tuple(round_.causes),
        memory=LivenessMemory(
            boot_id=boot_id,
            since=memory.since,
            topologies=topologies,
            supervisors=supervisors,
            frozen_since=frozen_since,
            cold=memory.cold,
            lost=lost or UNSET,
            last_signs=gone or UNSET,
        ),
        frozen=(
            f"{len(lost)} of {total} workers on {len(nodes)} supervisors vanished at once: "
            f"nothing is reassigned for {limits.launch_secs:g} s; check the network and ZooKeeper"
            if frozen
            else None
        ),
        silent_supervisors=tuple(silent),
        restarting=tuple(round_.restarting),
        waiting=tuple(round_.waiting),
        next_check=min(round_.deadlines, default=None),
    )


def _cluster_restarted(view: ClusterView, memory: LivenessMemory) -> bool:
    """Whether all supervisor processes of the last check are gone: the whole cluster stopped, or
    restarted.

    A process that was replaced counts its beats from the beginning.
    """
    return bool(memory.supervisors) and not any(
        supervisor_id in view.supervisors and view.supervisors[supervisor_id].count >= count
        for supervisor_id, (count, _) in memory.supervisors.items()
    )


def _first_seen(value: int, known: FirstSeen | UnsetType | None, boot_now: float) -> FirstSeen:
    return known if known and known.value == value else FirstSeen(value, boot_now)


def _healed(view: ClusterView) -> Iterator[tuple[TopologyView, Assignment, Versioned]]:
    for _, topology in sorted(view.topologies.items()):
        if topology.base.status in HEALED and topology.assignment and topology.assignment_at:
            yield topology, topology.assignment, topology.assignment_at


@dataclass
class _Round:
    """One pass over the topologies; collects causes and deadlines."""

    view: ClusterView
    memory: LivenessMemory
    limits: "LivenessLimits"
    now: float
    silent: frozenset[str]
    last_signs: Mapping[str, float]
    """Host that went and still holds tasks -> boot clock at which its counter last rose."""
    causes: list[Cause] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)
    restarting: list[tuple[str, str, int]] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    @cached_property
    def free_slots(self) -> int:
        """Slots of supervisors that may get work which no assignment holds."""
        used = self.view.used_ports()
        return sum(
            len({*info.ports} - used.get(supervisor_id, set()))
            for supervisor_id, info in self.view.open_supervisors().items()
            if supervisor_id not in self.silent
        )

    def is_restarting(self, worker: WorkerSlot) -> bool:
        info = self.view.supervisors.get(worker.node)
        return info is not None and worker.port in info.restarting

    def limit(self, worker: WorkerSlot, missing: MissingSlot) -> tuple[CauseKind, float]:
        if worker.node not in self.view.supervisors:
            # Supervisor and worker both gone: the host is lost, unless this observer has only just
            # come.
            if missing.since > self.memory.since:
                return "lost_host", 0
            slow = self.memory.cold and worker.node not in self.last_signs
            return "lost_host", self.limits.launch_secs if slow else self.limits.task_secs
        if self.is_restarting(worker) or not missing.gone:
            return "dead_worker", self.limits.launch_secs
        return "dead_worker", self.limits.task_secs


class _TopologyCheck:
    """The part of a round that one topology takes."""

    def __init__(
        self,
        round_: _Round,
        topology: TopologyView,
        assignment: Assignment,
        assignment_at: Versioned,
    ) -> None:
        self._round = round_
        self._now = round_.now
        self._topology = topology
        self._assignment = assignment
        self._assignment_at = assignment_at
        self._known = round_.memory.topologies.get(topology.id)
        self._judged: set[Slot] = set()

    def run(self) -> TopologyMemory:
        known, generation = self._known, self._assignment_at.version
        placed = _first_seen(generation, known.assignment if known else None, self._now)
        beats_at = self._topology.beats_at
        beats = _first_seen(
            beats_at.mzxid if beats_at else -1, known.beats if known else None, self._now
        )
        missing = self._missing(same=known is not None and known.assignment.value == generation)
        memory = TopologyMemory(placed, beats, missing, self._never_ran())
        if not self._master_silent(memory):
            self._dead_tasks()
        self._unassigned()
        return replace(memory, room=self._room(memory))

    def _missing(self, same: bool) -> dict[str, MissingSlot]:
        """Check workers that are absent. ``same``: the last check was of this generation."""
        starts = self._assignment.start_secs()
        missing: dict[str, MissingSlot] = {}
        for worker in self._assignment.workers:
            if worker.slot in self._topology.live_workers:
                continue
            key = worker.slot.key
            before = self._known.missing.get(key) if self._known is not None else None
            # The newest start among its tasks: it rises when a task is placed there again.
            started = max((starts.get(task, 0) for task in worker.ids), default=0)
            if before is None or before.started != started:
                # A slot that was not missing at the last check of the same generation was alive
                # then.
                before = MissingSlot(
                    since=self._now, gone=bool(same and before is None), started=started
                )
            missing[key] = before
            kind, limit = self._round.limit(worker, before)
            if kind == "dead_worker" and self._round.is_restarting(worker):
                self._round.restarting.append((self._topology.id, worker.node, worker.port))
            if self._over(before.since, limit, worker, "is missing"):
                self._judged.add(worker.slot)
                self._add(
                    kind,
                    worker,
                    worker.ids,
                    since=self._round.last_signs.get(worker.node, before.since),
                )
        return missing

    def _never_ran(self) -> dict[str, StartingWorker]:
        """Check workers that have not reported all their tasks within the launch window."""
        starting: dict[str, StartingWorker] = {}
        for worker in self._assignment.workers:
            live = self._topology.live_workers.get(worker.slot)
            if live is None or live.status != "starting":
                continue
            key = worker.slot.key
            token = live.token[:8]
            before = self._known.starting.get(key) if self._known is not None else None
            if before is None or before.token != token:
                before = StartingWorker(self._now, token)
            starting[key] = before
            if self._over(
                before.since, self._round.limits.launch_secs, worker, "has not reported its tasks"
            ):
                self._judged.add(worker.slot)
                self._add("never_ran", worker, worker.ids, token, before.since)
        return starting

    def _master_silent(self, memory: TopologyMemory) -> bool:
        """Whether the topology master's record does not change although its worker lives, which is
        then replaced.
        """
        part = (
            self._topology.tasks.components.get(TOPOLOGY_MASTER) if self._topology.tasks else None
        )
        master = part.ids[0] if part and part.ids else 0
        limits = self._round.limits
        for worker in self._assignment.workers:
            if master not in worker.ids:
                continue
            if worker.slot in self._judged:
                return True
            if worker.slot not in self._topology.live_workers:
                return False
            if memory.beats.value <= self._assignment_at.mzxid:
                # It has not reported since the newest placement; the first record is written with
                # it.
                since, limit = max(memory.beats.since, memory.assignment.since), limits.launch_secs
            else:
                since, limit = memory.beats.since, limits.task_secs
            if self._over(since, limit, worker):
                self._add("silent_master", worker, worker.ids, str(memory.beats.value), since)
                return True
        return False

    def _dead_tasks(self) -> None:
        """Replace workers with tasks that the topology master reports as dead."""
        live, dead = self._topology.live_workers, self._topology.dead_tasks
        for worker in self._assignment.workers:
            if worker.slot not in self._judged and worker.slot in live and dead & set(worker.ids):
                self._add("dead_task", worker, worker.ids)

    def _unassigned(self) -> None:
        """Add tasks without a slot, once the cluster has a free one."""
        if self._topology.tasks is None:
            return
        placed = {task for worker in self._assignment.workers for task in worker.ids}
        without = tuple(sorted(self._topology.tasks.component_of().keys() - placed))
        if without and self._round.free_slots:
            self._add("unassigned", None, without)

    def _room(self, memory: TopologyMemory) -> FirstSeen | UnsetType:
        """Check for too few workers: it spreads once slots were free for as long as a host may come
        and go.

        Not soon after another placement, so that hosts that come and go do not move its tasks again
        and again.
        """
        base = self._topology.base
        executors = sum(
            count for component, count in base.executors.items() if component != TOPOLOGY_MASTER
        )
        workers = min(
            min(base.workers, executors) - len(self._assignment.workers), self._round.free_slots
        )
        if workers < 1 or base.status not in STEADY or memory.missing or memory.starting:
            return UNSET
        room = _first_seen(workers, self._known.room if self._known else None, self._now)
        ready = room.since + self._round.limits.window_secs
        if memory.assignment.value:
            ready = max(ready, memory.assignment.since + SPREAD_PAUSE_SECS)
        if self._now < ready:
            self._round.deadlines.append(ready)
        else:
            self._add("too_few_workers", None, ())
        return room

    def _over(
        self, since: float, limit: float, worker: WorkerSlot, what: str | None = None
    ) -> bool:
        """Whether the limit has passed; else its deadline is noted, and with ``what`` a problem,
        too.
        """
        if limit == 0 or self._now - since > limit:
            return True
        self._round.deadlines.append(since + limit)
        if what is not None:
            self._round.waiting.append(
                f"worker {worker.slot.key} of {self._topology.base.name} {what} for {self._now - since:.0f} s, "
                f"judged after {limit:g} s"
            )
        return False

    def _add(
        self,
        kind: CauseKind,
        worker: WorkerSlot | None,
        tasks: tuple[int, ...],
        seen: str = "",
        since: float | None = None,
    ) -> None:
        self._round.causes.append(
            Cause(
                topology_id=self._topology.id,
                name=self._topology.base.name,
                generation=self._assignment_at.version,
                kind=kind,
                node=worker.node if worker else "",
                host=worker.host if worker else "",
                port=worker.port if worker else 0,
                tasks=tasks,
                avoid=tuple(sorted(self._round.silent)),
                seen=seen,
                silent_secs=0.0 if since is None else round(self._now - since, 1),
            )
        )
