"""Snapshots of supervisors, owners and sizes: what is shown of a cluster without statistics."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from storm_dagster.core.snapshot.workers import WorkerSnapshot, workers_of
from storm_dagster.core.submission.tasks import executors_of
from storm_dagster.model.multimap import multimap
from storm_dagster.model.records import SupervisorInfo
from storm_dagster.model.view import ClusterView, TopologyView


@dataclass(frozen=True)
class SupervisorSnapshot:
    """One supervisor and what runs on it."""

    id: str
    info: SupervisorInfo
    uptime_secs: int
    used: tuple[int, ...]
    blacklisted: bool
    used_memory_mb: float = 0.0
    used_cpu: float = 0.0
    workers: tuple[WorkerSnapshot, ...] = ()
    """In order of their ports."""

    @property
    def slots(self) -> dict[int, WorkerSnapshot | None]:
        """Port -> the worker in it, ``None`` in a free slot, in order of the ports.

        A worker may run in a slot that the supervisor no longer offers.
        """
        slots: dict[int, WorkerSnapshot | None] = dict.fromkeys(self.info.ports)
        for worker in self.workers:
            slots[worker.port] = worker
        return dict(sorted(slots.items()))


@dataclass(frozen=True)
class TopologySize:
    """What a topology has and was given, which needs no statistics."""

    tasks: int
    executors: int
    workers: int
    memory_mb: float
    cpu: float

    @staticmethod
    def of(*topologies: TopologyView) -> "TopologySize":
        """The size of all of them together."""
        tasks = 0
        executors = 0
        for topology in topologies:
            if topology.tasks is None:
                continue
            tasks += sum(len(part.ids) for part in topology.tasks.components.values())
            groups = executors_of(topology.tasks, topology.base.executors)
            executors += sum(map(len, groups.values()))
        workers = [worker for topology in topologies for worker in topology.workers]
        return TopologySize(
            tasks=tasks,
            executors=executors,
            workers=len(workers),
            memory_mb=sum(worker.memory_bytes for worker in workers) / 2**20,
            cpu=float(sum(worker.cpu for worker in workers)),
        )


def topologies_by_owner(
    view: ClusterView, owner: str | None = None
) -> dict[str, list[TopologyView]]:
    """Owner -> his topologies; those without one belong to ``""``. With ``owner`` only his."""
    topologies = (
        topology for topology in view.topologies.values() if owner in (None, topology.base.owner)
    )
    return dict(
        sorted(multimap((topology.base.owner, topology) for topology in topologies).items())
    )


def supervisors_of(
    view: ClusterView, *, now_secs: int, workers: bool = False
) -> list[SupervisorSnapshot]:
    """Every live supervisor in order of host and id; with ``workers`` also what runs on it."""
    used = view.used_ports()
    running = workers_by_supervisor(view, now_secs=now_secs) if workers else {}
    memory_bytes = Counter[str]()
    cpu = Counter[str]()
    for topology in view.topologies.values():
        for slot in topology.workers:
            memory_bytes[slot.node] += slot.memory_bytes
            cpu[slot.node] += slot.cpu
    return [
        SupervisorSnapshot(
            id=supervisor_id,
            info=info,
            uptime_secs=max(0, now_secs - info.started),
            used=tuple(sorted(used.get(supervisor_id, ()))),
            blacklisted=info.host in view.blacklist,
            used_memory_mb=memory_bytes[supervisor_id] / 2**20,
            used_cpu=float(cpu[supervisor_id]),
            workers=tuple(running.get(supervisor_id, ())),
        )
        for supervisor_id, info in sorted(
            view.supervisors.items(), key=lambda pair: (pair[1].host, pair[0])
        )
    ]


def workers_by_supervisor(
    view: ClusterView, *, now_secs: int
) -> Mapping[str, list[WorkerSnapshot]]:
    """Supervisor id -> the workers on it by port, also of a supervisor that is gone."""
    by_supervisor = multimap(
        (worker.node, worker)
        for topology in view.topologies.values()
        for worker in workers_of(topology, now_secs=now_secs)
    )
    for workers in by_supervisor.values():
        workers.sort(key=lambda worker: (worker.port, worker.topology_id))
    return by_supervisor
