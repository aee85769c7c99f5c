"""Slots that topologies request and have: the numbers by which a cluster is scaled."""

from dataclasses import dataclass

from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.view import ClusterView, TopologyView


@dataclass(frozen=True)
class SlotDemand:
    """Slots of one topology."""

    name: str
    """Name of the topology."""
    requested: int
    """Workers that it requests: as many as it can use, without one for the topology master."""
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
    # More workers than executors stay empty.
    executors = sum(
        count for component, count in base.executors.items() if component != TOPOLOGY_MASTER
    )
    placed: set[int] = set()
    for worker in topology.workers:
        placed.update(worker.ids)
    tasks = topology.tasks.component_of().keys() if topology.tasks is not None else ()
    return SlotDemand(
        name=base.name,
        requested=min(base.workers, executors) if executors else base.workers,
        assigned=len(topology.workers),
        has_unplaced=not placed.issuperset(tasks),
    )
