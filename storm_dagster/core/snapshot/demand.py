"""Slots that topologies request and have: the numbers by which a cluster is scaled."""

from dataclasses import dataclass

from storm_dagster.core.scheduling.units import worker_count
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.view import ClusterView, TopologyView


@dataclass(frozen=True)
class SlotDemand:
    """Slots of one topology."""

    name: str
    """Name of the topology."""
    requested: int
    """Workers that it requests, as many as it can use, and one for a topology master that is
    alone.
    """
    assigned: int
    """Slots of its assignment."""
    has_unplaced: bool
    """True if a task has no slot."""


def slot_demands(view: ClusterView) -> list[SlotDemand]:
    """The demand of each topology, by id, without those that are being killed."""
    return [
        _demand_of(topology)
        for _, topology in sorted(view.topologies.items())
        if topology.base.status != "KILLED"
    ]


def _demand_of(topology: TopologyView) -> SlotDemand:
    base = topology.base
    executors = sum(
        count for component, count in base.executors.items() if component != TOPOLOGY_MASTER
    )
    requested = base.workers
    if executors:
        # More workers than executors stay empty.
        requested, _ = worker_count(base.workers, executors, _is_master_alone(topology))
    placed: set[int] = set()
    for worker in topology.workers:
        placed.update(worker.ids)
    tasks = topology.tasks.component_of().keys() if topology.tasks is not None else ()
    return SlotDemand(
        name=base.name,
        requested=requested,
        assigned=len(topology.workers),
        has_unplaced=not placed.issuperset(tasks),
    )


def _is_master_alone(topology: TopologyView) -> bool | None:
    """True if a worker has the topology master alone; ``None`` if it has no slot.

    The view has no conf of the topology, which decides it; its placement shows the decision.
    """
    if topology.tasks is None:
        return None
    components = topology.tasks.component_of()
    masters = {task for task, name in components.items() if name == TOPOLOGY_MASTER}
    for worker in topology.workers:
        tasks = {*worker.ids}
        if tasks & masters:
            return tasks <= masters
    return None
