"""Snapshots of supervisors, owners and sizes, which need no statistics."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from storm_dagster.core.snapshot.workers import WorkerSnapshot, workers_of
from storm_dagster.core.submission.tasks import executors_of
from storm_dagster.model.multimap import multimap
from storm_dagster.model.records import SupervisorInfo, WorkerSlot
from storm_dagster.model.view import ClusterView, TopologyView


@dataclass(frozen=True)
class SupervisorSnapshot:
    """One supervisor and its workers."""

    id: str
    info: SupervisorInfo
    uptime_secs: int
    used: tuple[int, ...]
    """Ports that an assignment uses, ascending."""
    blacklisted: bool
    """True if its host gets no new work."""
    used_memory_mb: float = 0.0
    """Memory that is assigned to its workers, in MiB."""
    used_cpu: float = 0.0
    """CPU that is assigned to its workers, in percent points of one core."""
    workers: tuple[WorkerSnapshot, ...] = ()
    """In order of their ports."""

    @property
    def slots(self) -> dict[int, WorkerSnapshot | None]:
        """Port -> its worker, ``None`` in a free slot, in order of the ports.

        A worker may run in a slot that the supervisor no longer offers.
        """
        slots: dict[int, WorkerSnapshot | None] = dict.fromkeys(self.info.ports)
        for worker in self.workers:
            slots[worker.port] = worker
        return dict(sorted(slots.items()))


@dataclass(frozen=True)
class TopologySize:
    """Size of topologies: tasks, executors, workers, assigned resources."""

    tasks: int
    executors: int
    workers: int
    memory_mb: float
    """In MiB."""
    cpu: float
    """In percent points of one core."""

    @staticmethod
    def of(*topologies: TopologyView) -> "TopologySize":
        """The size of all these topologies together.

        A topology without a task table counts with its workers and resources only.
        """
        tasks = 0
        executors = 0
        for topology in topologies:
            if topology.tasks is None:
                continue
            tasks += len(topology.tasks.component_of())
            groups = executors_of(topology.tasks, topology.base.executors)
            executors += sum(map(len, groups.values()))
        workers: list[WorkerSlot] = []
        for topology in topologies:
            workers += topology.workers
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
    """Owner -> topologies, in order of the owners.

    Topologies without an owner belong to ``""``. With ``owner``, only the topologies of that owner.
    """
    by_owner = multimap((topology.base.owner, topology) for topology in view.topologies.values())
    if owner is None:
        return dict(sorted(by_owner.items()))
    return {owner: by_owner[owner]} if owner in by_owner else {}


def supervisors_of(
    view: ClusterView, *, now_secs: int, workers: bool = False
) -> list[SupervisorSnapshot]:
    """Live supervisors in order of host and id.

    They have their workers only with ``workers``.
    """
    used = view.used_ports()
    running = workers_by_supervisor(view, now_secs=now_secs) if workers else {}
    memory_bytes = Counter[str]()
    cpu = Counter[str]()
    for topology in view.topologies.values():
        for worker in topology.workers:
            memory_bytes[worker.node] += worker.memory_bytes
            cpu[worker.node] += worker.cpu
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
    """Supervisor id -> its workers in order of their ports.

    A supervisor that is gone is included while an assignment uses it.
    """
    workers: list[WorkerSnapshot] = []
    for topology in view.topologies.values():
        workers += workers_of(topology, now_secs=now_secs)
    workers.sort(key=lambda worker: (worker.port, worker.topology_id))
    return multimap((worker.node, worker) for worker in workers)
