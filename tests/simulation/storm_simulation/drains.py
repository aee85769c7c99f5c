"""Supervisors that drain at SIGTERM, as in containers: the faults, and their invariants."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from storm_dagster.model import paths
from storm_dagster.model.errors import Corrupt
from storm_dagster.model.records import Assignment, StormBase, SupervisorInfo, decode_record
from storm_simulation.ensemble import Commit
from storm_simulation.faults import GROUPS, Faults, Undo, fault
from storm_simulation.healing_checks import HEAL_SECS
from storm_simulation.rules import ROOT

if TYPE_CHECKING:
    from storm_simulation.calm import Calm
    from storm_simulation.cluster import Cluster
    from storm_simulation.supervisors import SimulatedSupervisor
    from storm_simulation.workers import SimulatedWorker

DRAIN_SECS = 20.0
"""``supervisor.drain.secs`` of a simulated cluster."""
_APPLY_SECS = 3.9
"""Time for which a move certainly waits for its workers; clocks of hosts run fast or slow."""
_END_SECS = 15.0
"""Longest time from the end of a drain to that of the process."""

# Once in each seed, after its other faults.
GROUPS["host drained"] = "for good"


def drain(part: SimulatedSupervisor) -> None:
    """SIGTERM with ``supervisor.on.term: drain``."""
    if part.daemon is not None:
        part.daemon._on_term = "drain"
    part.stop()


def _kill_container(part: SimulatedSupervisor) -> None:
    """SIGKILL of a container: its workers end with the supervisor."""
    for process in list(part.cluster.processes.values()):
        if process.host is part.host:
            process.kill()


def _until_mended(faults: Faults, secs: float, action: Callable[[], object]) -> Undo:
    """Schedule the action of a fault, unless it is mended before; return its end.

    Otherwise the action would come after everything was started again, and what it ends would stay
    away.
    """
    mended = False

    def act() -> None:
        if not mended:
            action()

    def mend() -> None:
        nonlocal mended
        mended = True
        faults.cluster.start_missing()

    faults.cluster.kernel.after(secs, act)
    return mend


def _running(faults: Faults) -> list[SimulatedSupervisor]:
    parts = faults.cluster.supervisors
    return [parts[name] for name in sorted(parts) if parts[name].up]


def _drain_one(faults: Faults) -> SimulatedSupervisor | None:
    """Drain one of the running supervisors; ``None`` if none runs."""
    parts = _running(faults)
    if not parts:
        return None
    part = faults.rng.choice(parts)
    faults._what = part.host.name
    drain(part)
    return part


@fault("supervisor drains", "processes")
def _one_drains(faults: Faults) -> Undo | None:
    part = _drain_one(faults)
    return None if part is None else faults.cluster.start_missing


@fault("supervisors drain at once", "processes")
def _several_drain(faults: Faults) -> Undo | None:
    """A rolling restart of several, or the end of all."""
    parts = _running(faults)
    if len(parts) < 2:
        return None
    chosen = faults.rng.sample(parts, faults.rng.randint(2, len(parts)))
    faults._what = ", ".join(part.host.name for part in chosen)
    for part in chosen:
        faults.cluster.kernel.after(faults.rng.choice((0.0, 0.5)), drain, part)
    return faults.cluster.start_missing


@fault("killed within a drain", "processes")
def _killed_within(faults: Faults) -> Undo | None:
    """The grace of the container is shorter than the drain."""
    part = _drain_one(faults)
    if part is None:
        return None
    grace_secs = faults.rng.choice((0.1, 0.5, 1.0, 2.0, 5.0))
    process = part.process

    def kill() -> None:
        if part.process is process and part.up:
            _kill_container(part)

    return _until_mended(faults, grace_secs, kill)


@fault("leader away within a drain", "processes")
def _leader_away(faults: Faults) -> Undo | None:
    """The leader ends before it moves the tasks, or while it moves them."""
    leader = faults.cluster.leader()
    if leader is None or leader.process is None:
        return None
    part = _drain_one(faults)
    if part is None:
        return None
    faults._what = f"{part.host.name}, {leader.host.name}"
    return _until_mended(faults, faults.rng.choice((0.0, 1.0, 2.5, 4.0)), leader.process.kill)


class Drains:
    """Invariants of each write while supervisors drain, and when tasks move."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._bases: dict[str, StormBase] = {}
        self._moves: dict[str, tuple[Assignment, int, float]] = {}
        """Topology id -> its assignment, the version of it, and the time of its write."""
        cluster.ensemble.observers.append(self.look)

    def look(self, commit: Commit) -> None:
        """Check one commit."""
        last = {path: kind for kind, path in commit.happened if kind != "CHILD"}
        for path in last:
            _, first, topology_id, *rest = [*path.removeprefix(ROOT).split("/"), "", ""]
            if not topology_id or any(rest):
                continue
            node = commit.tree.nodes.get(path)
            if f"/{first}" == paths.ASSIGNMENTS:
                self._assigned(commit, topology_id, None if node is None else node.data, path)
            elif f"/{first}" == paths.TOPOLOGY:
                self._base_written(topology_id, None if node is None else node.data)

    def _assigned(self, commit: Commit, topology_id: str, data: bytes | None, path: str) -> None:
        former = self._moves.pop(topology_id, None)
        if not data:
            return
        try:
            assignment = decode_record(Assignment, data)
        except Corrupt:
            return
        version = commit.tree.nodes[path].version
        self._moves[topology_id] = (assignment, version, self._cluster.kernel.now)
        if former is not None and assignment.history:
            self._healed(commit, former[0], assignment)

    def _healed(self, commit: Commit, before: Assignment, after: Assignment) -> None:
        """A healing leaves the workers that run on a host that drains to the leader's move."""
        if after.history[0].action != "healed" or after.history == before.history:
            return
        kept = {worker.slot for worker in after.workers}
        for worker in before.workers:
            if worker.slot in kept or not self._drains(commit, worker.node):
                continue
            process = self._cluster.worker_at(worker.host, worker.port)
            if process is None or process.spec.topology_id != after.topology_id:
                continue
            if self._works(process):
                name = process.process.name
                self._cluster.violated(
                    "drain", f"a healing took {after.topology_id} from {name}, whose host drains"
                )

    def _drains(self, commit: Commit, node: str) -> bool:
        record = commit.tree.nodes.get(ROOT + paths.supervisor(node))
        return record is not None and decode_record(SupervisorInfo, record.data).draining

    def _works(self, worker: SimulatedWorker) -> bool:
        """True if it runs and may run tasks."""
        is_alive = worker.process.runs and worker.loop is not None
        return is_alive and worker.leased_until() > self._cluster.kernel.now

    def _base_written(self, topology_id: str, data: bytes | None) -> None:
        before = self._bases.pop(topology_id, None)
        if data is None:
            return
        base = self._bases[topology_id] = decode_record(StormBase, data)
        if before is not None and (before.status, base.status) == ("REBALANCING", "ACTIVE"):
            self._resumed(topology_id)

    def _resumed(self, topology_id: str) -> None:
        """Spouts resume when each worker knows the places, so that no tuple is replayed."""
        move = self._moves.get(topology_id)
        if move is None:
            return
        assignment, version, moved_at = move
        if self._cluster.kernel.now - moved_at >= _APPLY_SECS:
            return
        if not assignment.history or assignment.history[0].action != "rebalanced":
            return  # A healing came at the same moment: what was dead is replayed in any case.
        slots = {worker.slot for worker in assignment.workers}
        for worker in self._cluster.workers.values():
            spec = worker.spec
            if spec.topology_id != topology_id or (spec.node, spec.port) not in slots:
                continue
            loop = worker.loop
            if loop is None or loop.placement is None or not self._works(worker):
                continue
            if loop.placement.version < version:
                self._cluster.violated(
                    "replay",
                    f"the spouts of {topology_id} resume, and {worker.process.name} knows version "
                    f"{loop.placement.version} of its places, not {version}",
                )


def _end_earlier_drains(calm: Calm) -> None:
    """Wait until the drains of faults have ended, and all supervisors take work again.

    Otherwise all of them may drain at once, so that none waits for a move.
    """
    cluster = calm.cluster

    def all_take_work() -> bool:
        cluster.start_missing()
        nodes = cluster.ensemble.tree.nodes
        records = [nodes.get(ROOT + paths.supervisor(name)) for name in cluster.supervisors]
        return all(
            record is not None and not decode_record(SupervisorInfo, record.data).draining
            for record in records
        )

    secs = DRAIN_SECS + _END_SECS
    if not cluster.until(all_take_work, secs):
        calm.fail("drain", f"not all supervisors take work {secs:g} s after the last fault")
    calm.await_healed(HEAL_SECS, "after the drains of faults")


def check_calm_drains(calm: Calm) -> None:
    """In a cluster without faults hosts drain at once: their tasks move, and they end."""
    cluster = calm.cluster
    rng = cluster.kernel.rng
    _end_earlier_drains(calm)
    if any(base.isolation for base in calm.bases().values()):
        return  # The topology that is isolated finds no slot elsewhere.
    used = sum(len(assignment.workers) for assignment in cluster.rules.assignments.values())
    ports = len(next(iter(cluster.supervisors.values())).ports)
    # One slot stays free for a topology that keeps one.
    needed = -(-(used + 1) // ports)
    most = len(cluster.supervisors) - needed
    if most < 1:
        return
    names = rng.sample(sorted(cluster.supervisors), rng.randint(1, most))
    processes = [cluster.supervisors[name].process for name in names]
    for name in names:
        drain(cluster.supervisors[name])
    calm.faults.counts["host drained"] += len(names)
    calm.faults.log.append(f"{cluster.kernel.now:.2f} drained: {names}")
    secs = DRAIN_SECS + _END_SECS
    if not cluster.until(lambda: all(each is None or each.dead for each in processes), secs):
        calm.fail("drain", f"{names} have not ended {secs:g} s after SIGTERM")
    left = sorted(
        f"{topology_id} on {worker.node}"
        for topology_id, assignment in cluster.rules.assignments.items()
        for worker in assignment.workers
        if worker.node in names
    )
    if left:
        calm.fail("drain", f"not moved, although slots are free: {left[0]}")
    if any(worker.host.name in names for worker in cluster.workers.values()):
        calm.fail("drain", f"a worker runs on {names} after their end")
    cluster.start_missing()
