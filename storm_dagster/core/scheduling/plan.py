"""Local planner, with the rules of the PySpark assignment (``docs/decisions.md#placement-on-spark``).

Healing uses it when Spark is out of reach, tests hold the two against each other. They share the value
types and the vocabulary of ``model``, and nothing else.
"""

from __future__ import annotations

from collections import Counter

from storm_dagster.core.scheduling.balanced import place_balanced
from storm_dagster.core.scheduling.even import fixed_workers, ignored_requests, is_unchanged, place_even
from storm_dagster.core.scheduling.history import History, read_history
from storm_dagster.core.scheduling.outcome import NoRoom, failed, staying_bins, succeeded
from storm_dagster.core.scheduling.selectors import Bin
from storm_dagster.core.scheduling.slots import Offer, Pool, offer_for
from storm_dagster.core.scheduling.units import Unit, units_of
from storm_dagster.model.placement import PlacementBatch, PlacementResult, TopologyPlacement, TopologyToPlace
from storm_dagster.model.placement_reasons import (
    Reason,
    local_refusal,
    no_supervisor_refusal,
    short_of_slots_refusal,
)


def plan_placement(batch: PlacementBatch) -> PlacementResult:
    """Place every topology of the batch, in order of priority (lower first), then name.

    No slot is given to two topologies; slots that any topology's ``old`` names are given to no other one.
    A topology that does not fit fails alone, with the reason, and takes no slot. The same batch always gives
    the same result, in whatever order supervisors, topologies, ports and tasks are listed.
    """
    holders = Counter(
        slot for topology in batch.topologies for slot in {(worker.node, worker.port) for worker in topology.old}
    )
    pool = Pool(batch.supervisors, holders)
    served = sorted(batch.topologies, key=lambda topology: (topology.priority, topology.name))
    return PlacementResult(placements=tuple(_place(topology, pool) for topology in served), planner="python")


def _place(topology: TopologyToPlace, pool: Pool) -> TopologyPlacement:
    """Place one topology. An allocated slot that stays empty is free again in the next event."""
    units = units_of(topology)
    history = read_history(topology, units)
    offer = offer_for(topology, pool, history.own)
    try:
        bins, warnings = _bins(topology, units, history, offer)
    except NoRoom as error:
        offer.close(refused=True)
        return failed(topology, units, history, error)
    offer.close(refused=False)
    return succeeded(topology, bins, warnings)


def _bins(
    topology: TopologyToPlace, units: tuple[Unit, ...], history: History, offer: Offer
) -> tuple[list[Bin], list[str]]:
    staying = staying_bins(topology, history)
    even = topology.strategy == "even"
    warnings = ignored_requests(topology) if even else []
    respread = even and topology.event == "monitor"
    if is_unchanged(topology, units, history, offer) if respread else not history.needed:
        return staying, warnings
    if not offer.hosts:
        raise NoRoom(no_supervisor_refusal(topology.name))
    if topology.strategy == "local":
        return [*staying, _local(topology, history, offer)], warnings
    if even:
        fixed = {worker.slot for worker in fixed_workers(topology, history, offer)}
        placed = place_even(topology, units, history, offer)
        return [*(bin for bin in staying if bin.slot in fixed), *placed], warnings
    placed, warnings = place_balanced(topology, units, history, offer)
    return [*staying, *placed], warnings


def _local(topology: TopologyToPlace, history: History, offer: Offer) -> Bin:
    """One worker on the only supervisor, at its first free port; JStorm's local mode."""
    if len(offer.hosts) != 1:
        raise NoRoom(local_refusal(topology.name, len(offer.hosts)))
    if not offer.total:
        raise NoRoom(short_of_slots_refusal(topology.name, 1, offer.counts(), isolated=offer.isolated))
    (node,) = offer.hosts
    old = [worker.slot for worker in history.lost if offer.has(worker.slot)]
    slot = old[0] if old and topology.event == "rebalance" else (node, offer.ports(node)[0])
    offer.take(slot)
    bin = Bin(slot, offer.hosts[node], Reason.SLOT_LOCAL, topology.memory_bytes, topology.cpu)
    for unit in history.needed:
        bin.put(unit, Reason.LOCAL)
    return bin
