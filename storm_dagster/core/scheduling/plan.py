"""The plain-Python planner: the twin of the PySpark assignment (design 8.2).

Healing uses it when Spark is out of reach, tests hold the two against each other. They share the value
types and the vocabulary of ``model``, and nothing else.
"""

from __future__ import annotations

from collections import Counter

from storm_dagster.core.scheduling.balanced import place_balanced
from storm_dagster.core.scheduling.even import fixed_workers, is_settled, place_even
from storm_dagster.core.scheduling.history import History, Slot, read_history
from storm_dagster.core.scheduling.outcome import NoRoom, failed, staying_bins, succeeded
from storm_dagster.core.scheduling.selectors import Bin
from storm_dagster.core.scheduling.slots import Offer, free_ports, offer_for
from storm_dagster.core.scheduling.units import Unit, units_of
from storm_dagster.model.placement import (
    PlacementBatch,
    PlacementResult,
    TopologyPlacement,
    TopologyToPlace,
)
from storm_dagster.model.placement_reasons import (
    Reason,
    local_refusal,
    no_supervisor_refusal,
    short_of_slots_refusal,
)

__all__ = ["plan_placement"]


def plan_placement(batch: PlacementBatch) -> PlacementResult:
    """Places every topology of the batch, in order of priority (lower first), then name.

    No slot is given to two topologies; slots that any topology's ``old`` names are given to no other one.
    A topology that does not fit fails alone, with the reason, and takes no slot. The same batch always gives
    the same result, in whatever order supervisors, topologies, ports and tasks are listed.
    """
    holders = Counter(
        slot
        for topology in batch.topologies
        for slot in {(worker.node, worker.port) for worker in topology.old}
    )
    free = free_ports(batch.supervisors, holders)
    contested = frozenset(slot for slot, count in holders.items() if count > 1)
    placements: list[TopologyPlacement] = []
    for topology in sorted(batch.topologies, key=lambda topology: (topology.priority, topology.name)):
        placement, taken = _place(topology, batch, free, contested)
        for node, port in taken:
            if port in free.get(node, ()):
                free[node].remove(port)
        placements.append(placement)
    return PlacementResult(placements=tuple(placements), planner="python")


def _place(
    topology: TopologyToPlace, batch: PlacementBatch, free: dict[str, list[int]], contested: frozenset[Slot]
) -> tuple[TopologyPlacement, list[Slot]]:
    """The outcome, and the slots that were allotted: one that stayed empty is free again in the next event."""
    units = units_of(topology)
    history = read_history(topology, units)
    offer = offer_for(topology, batch.supervisors, free, history.own, contested)
    try:
        bins = _bins(topology, units, history, offer)
    except NoRoom as error:
        return failed(topology, units, history, error), []
    return succeeded(topology, bins), [bin.slot for bin in bins]


def _bins(topology: TopologyToPlace, units: tuple[Unit, ...], history: History, offer: Offer) -> list[Bin]:
    staying = staying_bins(topology, history)
    even = topology.strategy == "even"
    respread = even and topology.event == "monitor"
    if is_settled(topology, units, history, offer) if respread else not history.needed:
        return staying
    if not offer.hosts:
        raise NoRoom(no_supervisor_refusal(topology.name))
    if topology.strategy == "local":
        return [*staying, _local(topology, history, offer)]
    if even:
        fixed = {worker.slot for worker in fixed_workers(topology, history, offer)}
        return [*(bin for bin in staying if bin.slot in fixed), *place_even(topology, units, history, offer)]
    return [*staying, *place_balanced(topology, units, history, offer)]


def _local(topology: TopologyToPlace, history: History, offer: Offer) -> Bin:
    """One worker on the only supervisor, at its first free port (JStorm cases L1 to L3)."""
    if len(offer.hosts) != 1:
        raise NoRoom(local_refusal(topology.name, len(offer.hosts)))
    if not offer.total:
        free = [(node, len(ports)) for node, ports in offer.free.items()]
        raise NoRoom(short_of_slots_refusal(topology.name, 1, free, isolated=offer.isolated))
    (node, ports), *_ = offer.free.items()
    old = [worker.slot for worker in history.lost if offer.has(worker.slot)]
    slot = offer.take(old[0] if old and topology.event == "rebalance" else (node, ports[0]))
    bin = Bin(slot, offer.hosts[node], Reason.SLOT_LOCAL, topology.memory_bytes, topology.cpu)
    for unit in history.needed:
        bin.put(unit, Reason.LOCAL)
    return bin
