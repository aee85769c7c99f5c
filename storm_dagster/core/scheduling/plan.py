"""Local planner: the steps of a placement in process, one topology after the other.

It serves reassignment, the leader's own healing and scheduled dry runs; submissions and rebalances are placed by
the PySpark assignment, with the same steps (``docs/decisions.md#placement-on-spark``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from storm_dagster.core.scheduling.free_ports import FreePorts
from storm_dagster.core.scheduling.history import history_rows
from storm_dagster.core.scheduling.outcome import placement_of
from storm_dagster.core.scheduling.steps import TopologyEvent, allocate
from storm_dagster.core.scheduling.units import Codes, executors_of, service_order, summary_of
from storm_dagster.model.placement import (
    PlacementBatch,
    PlacementResult,
    SupervisorSlots,
    TopologyPlacement,
    TopologyToPlace,
)


def plan_placement(batch: PlacementBatch) -> PlacementResult:
    """Place every topology of the batch, in order of priority (lower first), then name.

    No slot is given to two topologies; slots that any topology's ``old`` names are given to no other one.
    A topology that does not fit fails alone, with the reason, and takes no slot. The same batch always gives
    the same result, in whatever order supervisors, topologies, ports and tasks are listed.
    """
    ports = _free_ports(batch.supervisors, batch.topologies)
    placements = tuple(_place(topology, ports) for topology in service_order(batch.topologies))
    return PlacementResult(placements=placements, planner="python")


def _free_ports(supervisors: Sequence[SupervisorSlots], topologies: Sequence[TopologyToPlace]) -> FreePorts:
    holders = Counter(
        slot for topology in topologies for slot in {(worker.node, worker.port) for worker in topology.old}
    )
    ordered = sorted(supervisors, key=lambda supervisor: supervisor.id)
    return FreePorts(
        ((node.id, node.host, len(set(node.ports))) for node in ordered),
        ((node.id, port, holders[node.id, port]) for node in ordered for port in sorted({*node.ports} - {*node.used})),
        {host for topology in topologies for host in topology.isolation},
    )


def event_of(topology: TopologyToPlace) -> TopologyEvent:
    """The event of a topology as the rules read it."""
    codes: Codes = {}
    executors = executors_of(topology, codes)
    rows = list(history_rows(topology, codes))
    counts = Counter(executors.component)
    about = summary_of(topology, codes, [counts[component] for component in codes.values()])
    return TopologyEvent(about, executors, rows)


def _place(topology: TopologyToPlace, ports: FreePorts) -> TopologyPlacement:
    event = event_of(topology)
    return placement_of(topology, event.assign(allocate(event.about, event.request(), ports)))
