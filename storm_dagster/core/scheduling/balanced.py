"""The ``balanced`` strategy: JStorm's assignment without its quirks (``docs/decisions.md#supervisor-choice``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storm_dagster.core.scheduling.history import History, Slot
from storm_dagster.core.scheduling.outcome import NoRoom
from storm_dagster.core.scheduling.rebalance import Reuse, choose_reused, trim
from storm_dagster.core.scheduling.selectors import Bin, Selector, water_level
from storm_dagster.core.scheduling.slots import DifferNeed, Offer, spread_workers
from storm_dagster.core.scheduling.units import Unit, exchanges, worker_count
from storm_dagster.core.scheduling.wishes import Claim, claims_of
from storm_dagster.model.placement import TopologyToPlace
from storm_dagster.model.placement_reasons import (
    Reason,
    Refusal,
    differ_node_refusal,
    short_of_slots_refusal,
    too_many_wishes_refusal,
)

__all__ = ["place_balanced"]


@dataclass(frozen=True)
class _Demand:
    """How many slots an event wants, and which of them are spoken for."""

    count: int
    staying: int
    """Workers that stay as they are, counted in ``topology.workers``."""
    alone: bool
    """One of the slots is for the topology master."""
    claims: tuple[Claim, ...]
    loose: tuple[Unit, ...]
    """Executors to place that no claim holds."""
    warnings: list[str]


def place_balanced(
    topology: TopologyToPlace, units: tuple[Unit, ...], history: History, offer: Offer
) -> tuple[list[Bin], list[str]]:
    """Workers for all executors that the event places, and warnings; :class:`NoRoom` when they do not fit.

    Slots that are used are taken out of ``offer``. Healing, too, fails when slots are short: nothing is
    squeezed into fewer workers than were asked for. The dead tasks wait, ``unassigned`` names them with the
    reason, what lives goes on, and the next attempt places them as soon as there are slots.
    """
    demand = _demand(topology, units, history)
    reserved = max(0, topology.reserve)
    if offer.total - reserved < demand.count:
        raise NoRoom(_short(topology, demand, offer, reserved))
    old = [worker.slot for worker in history.lost if offer.has(worker.slot)]
    bins = _claimed_bins(topology, demand.claims, offer)
    master = next((unit for unit in demand.loose if unit.is_master), None) if demand.alone else None
    reuse = Reuse((), frozenset(), None)
    if topology.event == "rebalance" and not topology.reassign:
        kept = min(len(old), demand.count) - sum(bin.slot in old for bin in bins)
        if demand.claims and len(demand.claims) + kept > demand.count:
            raise NoRoom(too_many_wishes_refusal(topology.name, len(demand.claims), kept, demand.count))
        seats = demand.count - len(demand.claims) - (1 if master else 0)
        firsts = {unit.first for unit in demand.loose}
        sizes = [len(claim.units) for claim in demand.claims] + [0] * seats
        level = water_level(sizes, len(firsts) - (master is not None))
        reuse = choose_reused(history.lost, offer, firsts, seats, level, master)
        bins.extend(
            _bin(topology, offer.take(worker.slot), offer, Reason.SLOT_REUSED) for worker in reuse.kept
        )
    needs = _differ_needs(topology, demand.loose, history, demand.claims, bins)
    new = demand.count - len(bins)
    if reuse.master is not None:
        bins.append(_bin(topology, offer.take(reuse.master), offer, Reason.SLOT_REUSED))
        new -= 1
    seated = len(bins)
    picked = spread_workers(
        offer,
        new,
        [bin.slot[0] for bin in bins if bin.slot != reuse.master],
        needs,
        master is not None and reuse.master is None,
    )
    # Claims without a usable host come first in the order of workers, as in JStorm; they take picked slots too.
    homeless = [claim for claim in demand.claims if claim.units[0].first not in _placed(bins)]
    for number, (slot, why, against) in enumerate(picked):
        claim = homeless[number] if number < len(homeless) else None
        bins.append(_bin(topology, slot, offer, why, claim))
        bins[-1].against = against
    if master is not None:
        _seat_master(topology, bins, seated, reuse.master, master)
    holding = _holding(topology, history, bins)
    _check_differ(topology, needs, holding, bins)
    _fill(topology, bins, [unit for unit in demand.loose if unit is not master], reuse, holding)
    return bins, demand.warnings


def _demand(topology: TopologyToPlace, units: tuple[Unit, ...], history: History) -> _Demand:
    wanted, alone = worker_count(topology.workers, sum(topology.parallelism.values()), topology.single_master)
    masters = sum(1 for unit in history.needed if unit.is_master)
    staying = len(history.kept) + len(history.unstopped)
    # Something is to be placed, so one worker is needed however many stay; a master that is to be alone
    # needs a second one beside the rest. Workers beyond the executors would stay empty.
    least = 2 if alone and masters and len(history.needed) > masters else 1
    count = min(max(wanted - staying, least), len(history.needed))
    claims, warnings = claims_of(topology, units, history, count, alone and masters > 0)
    claimed = {unit.first for claim in claims for unit in claim.units}
    loose = tuple(unit for unit in history.needed if unit.first not in claimed)
    alone = alone and any(unit.is_master for unit in loose)
    return _Demand(min(count, len(claims) + len(loose)), staying, alone, claims, loose, warnings)


def _short(topology: TopologyToPlace, demand: _Demand, offer: Offer, reserved: int) -> Refusal:
    usable = offer.total - reserved + demand.staying
    executors = sum(topology.parallelism.values())
    fits = next(
        (
            workers
            for workers in (usable, usable - 1)
            if workers >= 1 and worker_count(workers, executors, topology.single_master)[0] <= usable
        ),
        None,
    )
    return short_of_slots_refusal(
        topology.name, demand.count, offer.counts(), reserve=reserved, workers=fits, isolated=offer.isolated
    )


def _bin(topology: TopologyToPlace, slot: Slot, offer: Offer, why: Reason, claim: Claim | None = None) -> Bin:
    memory = claim.memory_bytes if claim and claim.memory_bytes and claim.memory_bytes > 0 else None
    cpu = claim.cpu if claim and claim.cpu and claim.cpu > 0 else None
    bin = Bin(slot, offer.hosts[slot[0]], why, memory or topology.memory_bytes, cpu or topology.cpu)
    for unit in claim.units if claim else ():
        bin.put(unit, claim.task_why if claim else Reason.ONLY)
    return bin


def _placed(bins: Iterable[Bin]) -> set[int]:
    return {unit.first for bin in bins for unit in bin.units}


def _claimed_bins(topology: TopologyToPlace, claims: tuple[Claim, ...], offer: Offer) -> list[Bin]:
    """A worker for each claim whose host has a free port: the wanted port if it is free, else another."""
    bins: list[Bin] = []
    for claim in claims:
        slot = _claimed_slot(claim, offer)
        if slot is not None:
            bins.append(_bin(topology, offer.take(slot), offer, claim.why, claim))
    return bins


def _claimed_slot(claim: Claim, offer: Offer) -> Slot | None:
    nodes = [node for node, host in offer.hosts.items() if host == claim.host and offer.ports(node)]
    if claim.node is not None and claim.node in offer.hosts:
        # The supervisor itself is known: another one of the same host comes after it.
        nodes = [node for node in (claim.node,) if offer.ports(node)] + [n for n in nodes if n != claim.node]
    if claim.port is not None:
        for node in nodes:
            if offer.has((node, claim.port)):
                return (node, claim.port)
    elif claim.hint is not None and offer.has(claim.hint):
        return claim.hint
    return (nodes[0], offer.ports(nodes[0])[0]) if nodes else None


def _differ_needs(
    topology: TopologyToPlace,
    loose: tuple[Unit, ...],
    history: History,
    claims: tuple[Claim, ...],
    bins: list[Bin],
) -> tuple[DifferNeed, ...]:
    """What ``task.on.differ.node`` asks of the slots: supervisors that hold such a task already are no help."""
    counts = Counter(unit.component for unit in loose)
    staying: list[tuple[str, Unit]] = [
        (worker.slot[0], unit) for worker in (*history.kept, *history.unstopped) for unit in worker.units
    ]
    staying.extend((bin.slot[0], unit) for bin in bins for unit in bin.units)
    return tuple(
        DifferNeed(
            component,
            counts[component],
            frozenset(node for node, unit in staying if unit.component == component),
        )
        for component in sorted(set(topology.differ_node))
        if counts[component]
    )


def _holding(topology: TopologyToPlace, history: History, bins: list[Bin]) -> dict[str, frozenset[str]]:
    """Component with ``task.on.differ.node`` -> supervisors that hold one of its executors already."""
    held = [
        (worker.slot[0], unit.component)
        for worker in (*history.kept, *history.unstopped)
        for unit in worker.units
    ]
    held.extend((bin.slot[0], unit.component) for bin in bins for unit in bin.units)
    return {
        component: frozenset(node for node, holder in held if holder == component)
        for component in topology.differ_node
    }


def _check_differ(
    topology: TopologyToPlace,
    needs: tuple[DifferNeed, ...],
    holding: Mapping[str, frozenset[str]],
    bins: list[Bin],
) -> None:
    for need in needs:
        able = {bin.slot[0] for bin in bins if not bin.locked} - holding[need.component]
        if len(able) < need.units:
            raise NoRoom(differ_node_refusal(topology.name, need.component, need.units, len(able)))


def _seat_master(
    topology: TopologyToPlace, bins: list[Bin], seated: int, own: Slot | None, master: Unit
) -> None:
    """Gives the topology master a worker for itself: its own old one, else an empty one of this event on
    the supervisor with most of the topology's workers."""
    per_node = Counter(bin.slot[0] for bin in bins)
    empty = [index for index, bin in enumerate(bins) if not bin.units and index >= seated]
    index = (
        next(index for index, bin in enumerate(bins) if bin.slot == own)
        if own is not None
        else max(empty, key=lambda candidate: (per_node[bins[candidate].slot[0]], -candidate))
    )
    bins[index].put(master, Reason.MASTER)
    bins[index].locked = True
    if topology.master_memory_bytes is not None:
        bins[index].memory_bytes = topology.master_memory_bytes


def _fill(
    topology: TopologyToPlace,
    bins: list[Bin],
    loose: list[Unit],
    reuse: Reuse,
    holding: Mapping[str, frozenset[str]],
) -> None:
    open_bins = [bin for bin in bins if not bin.locked]
    average, remainder = water_level([bin.size for bin in open_bins], len(loose))
    firsts = {unit.first for unit in loose}
    stays = trim(reuse, firsts, average, holding)
    for bin in open_bins:
        for unit in stays.get(bin.slot, ()):
            bin.put(unit, Reason.STAYS)
            remainder -= bin.size > average
    staying = {unit.first for units in stays.values() for unit in units}
    waiting = [unit for unit in loose if unit.first not in staying]
    selector = Selector(open_bins, average, remainder, exchanges(topology))
    for unit in waiting:
        if unit.component in holding:
            selector.place_apart(unit, holding[unit.component])
    rest = [unit for unit in waiting if unit.component not in holding]
    selector.place_all(sorted(rest, key=lambda unit: (unit.is_system, unit.first)))
    for bin in open_bins:
        if topology.master_memory_bytes is not None and any(unit.is_master for unit in bin.units):
            bin.memory_bytes = topology.master_memory_bytes
