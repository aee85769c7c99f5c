"""The ``balanced`` strategy: JStorm's assignment without its quirks (``docs/decisions.md#supervisor-choice``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storm_dagster.core.scheduling.history import History, Slot
from storm_dagster.core.scheduling.outcome import NoRoom
from storm_dagster.core.scheduling.rebalance import Reuse, choose_reused, trim
from storm_dagster.core.scheduling.requested_workers import RequestedWorker, requested_workers
from storm_dagster.core.scheduling.selectors import Bin, Selector, fair_share
from storm_dagster.core.scheduling.slots import DifferNeed, Offer, spread_workers
from storm_dagster.core.scheduling.units import Unit, exchanges, worker_count
from storm_dagster.model.placement import TopologyToPlace
from storm_dagster.model.placement_reasons import (
    Reason,
    Refusal,
    differ_node_refusal,
    short_of_slots_refusal,
    too_many_requests_refusal,
)


@dataclass(frozen=True)
class _SlotRequest:
    """Slots that an event wants, and the workers that are requested in it."""

    count: int
    staying: int
    """Workers that stay as they are, counted in ``topology.workers``."""
    alone: bool
    """One of the slots is for the topology master."""
    requested: tuple[RequestedWorker, ...]
    unassigned: tuple[Unit, ...]
    """Executors to place that no requested worker holds."""
    warnings: list[str]


def place_balanced(
    topology: TopologyToPlace, units: tuple[Unit, ...], history: History, offer: Offer
) -> tuple[list[Bin], list[str]]:
    """Place all executors of the event: workers and warnings, or :class:`NoRoom` when they do not fit.

    Slots that are used are taken out of ``offer``. Healing, too, fails when slots are short: nothing is
    squeezed into fewer workers than were asked for. The dead tasks wait, ``unassigned`` names them with the
    reason, what lives goes on, and the next attempt places them as soon as there are slots.
    """
    request = _slot_request(topology, units, history)
    reserved = max(0, topology.reserve)
    if offer.total - reserved < request.count:
        raise NoRoom(_short(topology, request, offer, reserved))
    old = [worker.slot for worker in history.lost if offer.has(worker.slot)]
    bins = _requested_bins(topology, request.requested, offer)
    master = next((unit for unit in request.unassigned if unit.is_master), None) if request.alone else None
    reuse = Reuse((), frozenset(), None)
    if topology.event == "rebalance" and not topology.reassign:
        kept = min(len(old), request.count) - sum(bin.slot in old for bin in bins)
        if request.requested and len(request.requested) + kept > request.count:
            raise NoRoom(too_many_requests_refusal(topology.name, len(request.requested), kept, request.count))
        slots = request.count - len(request.requested) - (1 if master else 0)
        firsts = {unit.first for unit in request.unassigned}
        sizes = [len(wanted.units) for wanted in request.requested] + [0] * slots
        level = fair_share(sizes, len(firsts) - (master is not None))
        reuse = choose_reused(history.lost, offer, firsts, slots, level, master)
        bins.extend(_bin(topology, offer.take(worker.slot), offer, Reason.SLOT_REUSED) for worker in reuse.kept)
    needs = _differ_needs(topology, request.unassigned, history, request.requested, bins)
    new = request.count - len(bins)
    if reuse.master is not None:
        bins.append(_bin(topology, offer.take(reuse.master), offer, Reason.SLOT_REUSED))
        new -= 1
    first_new = len(bins)
    picked = spread_workers(
        offer,
        new,
        [bin.slot[0] for bin in bins if bin.slot != reuse.master],
        needs,
        master is not None and reuse.master is None,
    )
    # Requests without a usable host come first in the order of workers, as in JStorm; they take picked slots too.
    unplaced = [wanted for wanted in request.requested if wanted.units[0].first not in _placed(bins)]
    for number, (slot, why, against) in enumerate(picked):
        wanted = unplaced[number] if number < len(unplaced) else None
        bins.append(_bin(topology, slot, offer, why, wanted))
        bins[-1].against = against
    if master is not None:
        _place_master(topology, bins, first_new, reuse.master, master)
    holding = _holding(topology, history, bins)
    _check_differ(topology, needs, holding, bins)
    _fill(topology, bins, [unit for unit in request.unassigned if unit is not master], reuse, holding)
    return bins, request.warnings


def _slot_request(topology: TopologyToPlace, units: tuple[Unit, ...], history: History) -> _SlotRequest:
    wanted, alone = worker_count(topology.workers, sum(topology.parallelism.values()), topology.single_master)
    masters = sum(1 for unit in history.needed if unit.is_master)
    staying = len(history.kept) + len(history.unstopped)
    # Something is to be placed, so one worker is needed however many stay; a master that is to be alone
    # needs a second one beside the rest. Workers beyond the executors would stay empty.
    least = 2 if alone and masters and len(history.needed) > masters else 1
    count = min(max(wanted - staying, least), len(history.needed))
    requested, warnings = requested_workers(topology, units, history, count, alone and masters > 0)
    held = {unit.first for wanted in requested for unit in wanted.units}
    unassigned = tuple(unit for unit in history.needed if unit.first not in held)
    alone = alone and any(unit.is_master for unit in unassigned)
    return _SlotRequest(min(count, len(requested) + len(unassigned)), staying, alone, requested, unassigned, warnings)


def _short(topology: TopologyToPlace, request: _SlotRequest, offer: Offer, reserved: int) -> Refusal:
    usable = offer.total - reserved + request.staying
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
        topology.name, request.count, offer.counts(), reserve=reserved, workers=fits, isolated=offer.isolated
    )


def _bin(
    topology: TopologyToPlace, slot: Slot, offer: Offer, why: Reason, wanted: RequestedWorker | None = None
) -> Bin:
    memory = wanted.memory_bytes if wanted and wanted.memory_bytes and wanted.memory_bytes > 0 else None
    cpu = wanted.cpu if wanted and wanted.cpu and wanted.cpu > 0 else None
    bin = Bin(slot, offer.hosts[slot[0]], why, memory or topology.memory_bytes, cpu or topology.cpu)
    for unit in wanted.units if wanted else ():
        bin.put(unit, wanted.task_why if wanted else Reason.ONLY)
    return bin


def _placed(bins: Iterable[Bin]) -> set[int]:
    return {unit.first for bin in bins for unit in bin.units}


def _requested_bins(topology: TopologyToPlace, requested: tuple[RequestedWorker, ...], offer: Offer) -> list[Bin]:
    """A worker for each request whose host has a free port: the requested port if it is free, else another."""
    bins: list[Bin] = []
    for wanted in requested:
        slot = _requested_slot(wanted, offer)
        if slot is not None:
            bins.append(_bin(topology, offer.take(slot), offer, wanted.why, wanted))
    return bins


def _requested_slot(wanted: RequestedWorker, offer: Offer) -> Slot | None:
    nodes = [node for node, host in offer.hosts.items() if host == wanted.host and offer.ports(node)]
    if wanted.node is not None and wanted.node in offer.hosts:
        # The supervisor itself is known: another one of the same host comes after it.
        nodes = [node for node in (wanted.node,) if offer.ports(node)] + [n for n in nodes if n != wanted.node]
    if wanted.port is not None:
        for node in nodes:
            if offer.has((node, wanted.port)):
                return (node, wanted.port)
    elif wanted.hint is not None and offer.has(wanted.hint):
        return wanted.hint
    return (nodes[0], offer.ports(nodes[0])[0]) if nodes else None


def _differ_needs(
    topology: TopologyToPlace,
    unassigned: tuple[Unit, ...],
    history: History,
    requested: tuple[RequestedWorker, ...],
    bins: list[Bin],
) -> tuple[DifferNeed, ...]:
    """Needs of components with ``task.on.differ.node``; supervisors that hold such a task already do not help."""
    counts = Counter(unit.component for unit in unassigned)
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
    held = [(worker.slot[0], unit.component) for worker in (*history.kept, *history.unstopped) for unit in worker.units]
    held.extend((bin.slot[0], unit.component) for bin in bins for unit in bin.units)
    return {
        component: frozenset(node for node, holder in held if holder == component) for component in topology.differ_node
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


def _place_master(topology: TopologyToPlace, bins: list[Bin], first_new: int, own: Slot | None, master: Unit) -> None:
    """Give the topology master a worker for itself: its own old one, else an empty one of this event on
    the supervisor with most of the topology's workers."""
    per_node = Counter(bin.slot[0] for bin in bins)
    empty = [index for index, bin in enumerate(bins) if not bin.units and index >= first_new]
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
    unassigned: list[Unit],
    reuse: Reuse,
    holding: Mapping[str, frozenset[str]],
) -> None:
    open_bins = [bin for bin in bins if not bin.locked]
    average, remainder = fair_share([bin.size for bin in open_bins], len(unassigned))
    firsts = {unit.first for unit in unassigned}
    stays = trim(reuse, firsts, average, holding)
    for bin in open_bins:
        for unit in stays.get(bin.slot, ()):
            bin.put(unit, Reason.STAYS)
            remainder -= bin.size > average
    staying = {unit.first for units in stays.values() for unit in units}
    waiting = [unit for unit in unassigned if unit.first not in staying]
    selector = Selector(open_bins, average, remainder, exchanges(topology))
    for unit in waiting:
        if unit.component in holding:
            selector.place_apart(unit, holding[unit.component])
    rest = [unit for unit in waiting if unit.component not in holding]
    selector.place_all(sorted(rest, key=lambda unit: (unit.is_system, unit.first)))
    for bin in open_bins:
        if topology.master_memory_bytes is not None and any(unit.is_master for unit in bin.units):
            bin.memory_bytes = topology.master_memory_bytes
