"""The ``balanced`` strategy: JStorm's assignment without its quirks
(``docs/decisions.md#supervisor-choice``).

Healing, too, fails when slots are short: nothing is squeezed into fewer workers than were asked
for. The dead tasks wait with the reason, what lives goes on, and the next attempt places them as
soon as there are slots.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from storm_dagster.core.scheduling.history import LOST
from storm_dagster.core.scheduling.requested_workers import Grants, RequestedSlot
from storm_dagster.core.scheduling.reuse import balanced_savings, choose_reused
from storm_dagster.core.scheduling.selectors import CHAIN, FilledWorker, WorkerSelector, fair_share
from storm_dagster.core.scheduling.slot_allocation import (
    AllocatedSlot,
    PlacementRefused,
    SlotAllocation,
)
from storm_dagster.core.scheduling.strategy import Strategy
from storm_dagster.core.scheduling.task_assignment import TaskAssignment
from storm_dagster.core.scheduling.units import TopologySummary, worker_count
from storm_dagster.model.placement_reasons import Reason, refusal, too_many_requests_refusal
from storm_dagster.model.slot import Slot


class Balanced(Strategy):
    """Strategy ``balanced``."""

    chain = CHAIN
    grants_requests = True

    def workers(self, about: TopologySummary) -> tuple[int, bool]:
        """As in JStorm: a topology master that is to be alone has one more."""
        return worker_count(about.workers, about.executors, about.single_master)

    def warnings(self, about: TopologySummary, grants: Grants) -> list[str]:
        """Requested workers that were dropped, while something is placed."""
        return grants.warnings

    def allocate(self, allocation: SlotAllocation) -> None:
        """Allocate requested workers first, then old slots that a rebalance keeps, then the least
        loaded supervisors.

        Refused when slots are short, or on too few supervisors for a component whose tasks must be
        apart.
        """
        about, request = allocation.about, allocation.request
        allocation.require_supervisor()
        count, requested, alone = request.wanted, request.requested, request.alone
        if request.clash:
            raise PlacementRefused(too_many_requests_refusal(about.name, *request.clash))
        if allocation.free - allocation.reserve < count:
            raise allocation.short(count, with_remedy=True)
        blocked: dict[int, set[str]] = {need.component: set(need.blocked) for need in request.needs}
        held = {worker.slot for worker in request.reusable}
        usable = sum(map(allocation.may_use, held))
        unplaced: list[int] = []
        for number, wanted in enumerate(requested):
            slot = _slot_for(wanted, allocation)
            if slot is None:
                unplaced.append(number)
                continue
            allocation.take(
                slot, Reason.SLOT_OLD if wanted.old else Reason.SLOT_USER, "requested", number
            )
            _block(blocked, wanted, slot)
        own_master: Slot | None = None
        if about.keeps:
            kept = min(usable, count) - sum(slot.slot in held for slot in allocation.slots)
            if requested and len(requested) + kept > count:
                raise PlacementRefused(
                    too_many_requests_refusal(about.name, len(requested), kept, count)
                )
            own_master = _reuse(allocation, count - len(requested) - int(alone), alone)
        used = [slot.node for slot in allocation.slots]
        if own_master is not None:
            allocation.take(own_master, Reason.SLOT_REUSED, "master")
        first_new = len(allocation.slots)
        _spread(allocation, count - first_new, used, blocked, alone and own_master is None)
        # Requests without a usable host come first in the order of workers, as in JStorm; they take
        # new slots too.
        for slot, number in zip(allocation.slots[first_new:], unplaced, strict=False):
            slot.role, slot.ref = "requested", number
            _block(blocked, requested[number], slot.slot)
        if alone and own_master is None:
            _choose_master(allocation.slots)
        able = {slot.node for slot in allocation.slots if slot.role != "master"}
        for need in request.needs:
            left = able - blocked[need.component]
            if len(left) < need.units:
                which = about.differ_names[about.differ.index(need.component)]
                numbers = {"needed": need.units, "supervisors": len(left)}
                raise PlacementRefused(
                    refusal("differ node", about.name, component=which, **numbers)
                )

    def fill(self, assignment: TaskAssignment) -> None:
        """Fill requested workers, keep what stays, then choose a worker for each executor by the
        selectors.
        """
        about, component = assignment.about, assignment.executors.component
        requested = assignment.grants.requested
        unassigned = assignment.grants.unassigned(assignment.history.needed)
        slots = assignment.slots
        workers = [FilledWorker(slot.node) for slot in slots]
        open_workers: list[FilledWorker] = []
        for slot, worker in zip(slots, workers, strict=True):
            if slot.role == "master":
                alone = next(
                    position for position in unassigned if component[position] == about.master
                )
                worker.put(alone, about.master, Reason.MASTER)
                unassigned = [position for position in unassigned if position != alone]
                continue
            open_workers.append(worker)
            if slot.role == "requested" and slot.ref is not None:
                wanted = requested[slot.ref]
                for position in wanted.holds:
                    worker.put(
                        position,
                        component[position],
                        Reason.OLD if wanted.slot.old else Reason.USER,
                    )
        share, remainder = fair_share(
            (len(worker.positions) for worker in open_workers), len(unassigned)
        )
        apart = _apart(assignment, open_workers)
        stays = assignment.stays(unassigned, share, apart)
        for index, positions in stays.items():
            for position in positions:
                workers[index].put(position, component[position], Reason.STAYS)
            remainder -= len(positions) > share
        staying = {position for positions in stays.values() for position in positions}
        WorkerSelector(open_workers, share, remainder, about.related, about.system).place(
            [p for p in unassigned if p not in staying] if staying else unassigned, component, apart
        )
        for slot, worker in zip(slots, workers, strict=True):
            memory, cpu = 0, 0
            if slot.role == "requested" and slot.ref is not None:
                memory, cpu = requested[slot.ref].memory, requested[slot.ref].cpu
            if about.master_memory is not None and about.master in worker.counts:
                memory = about.master_memory
            assignment.add(slot, worker.positions, worker.reasons, memory, cpu)


def _block(blocked: dict[int, set[str]], wanted: RequestedSlot, slot: Slot) -> None:
    for component in wanted.components:
        if component in blocked:
            blocked[component].add(slot.node)


def _slot_for(wanted: RequestedSlot, allocation: SlotAllocation) -> Slot | None:
    """The requested port if it is free on the requested host, else another port there."""
    # The supervisor itself comes before others of its host.
    there = {wanted.node, *allocation.ports.nodes_of([wanted.host])}
    usable = (node for node in there if node and allocation.ports_of(node))
    nodes = sorted(usable, key=lambda node: (node != wanted.node, node))
    if wanted.port is not None:
        for node in nodes:
            if allocation.ports.has(Slot(node, wanted.port)):
                return Slot(node, wanted.port)
    elif wanted.hint is not None and allocation.may_use(wanted.hint):
        return wanted.hint
    return Slot(nodes[0], allocation.ports_of(nodes[0])[0]) if nodes else None


def _reuse(allocation: SlotAllocation, places: int, alone: bool) -> Slot | None:
    """Take the old slots that save most moves; returns the one where the topology master stays
    alone.

    The topology master stays where it is when nothing else stays there, which is so when that saves
    a move.
    """
    request = allocation.request
    sizes = [wanted.size for wanted in request.requested] + [0] * places
    share, remainder = fair_share(sizes, request.unassigned - int(alone))
    homes = (
        worker
        for worker in request.reusable
        if alone and worker.master and allocation.may_use(worker.slot)
    )
    home, savings = next(homes, None), allocation.savings(share)
    free = {node: len(allocation.ports.free[node]) for node in allocation.nodes}
    # Components that must be apart decide more about supervisors than free ports do.
    by_ports = not request.needs
    balanced = (
        balanced_savings(savings, _by_free_ports(free), places + int(alone))
        if by_ports
        else savings
    )
    saved, plain, fuller = choose_reused(balanced, places, remainder)
    stays = False
    if home is not None:
        free[home.node] -= 1
        others = [saving for saving in savings if saving.worker is not home]
        others = balanced_savings(others, _by_free_ports(free), places) if by_ports else others
        without, *others_kept = choose_reused(others, places, remainder)
        beside = [saving.worker for saving in others]
        stays = all(worker in beside for worker in (*plain, *fuller))
        if without + 1 > saved + stays:
            (plain, fuller), stays = others_kept, True
    for worker in sorted([*plain, *fuller], key=lambda worker: (-worker.size, worker.slot)):
        allocation.take(
            worker.slot,
            Reason.SLOT_REUSED,
            "fuller" if worker in fuller else "reuse",
            worker.worker,
        )
    return home.slot if home is not None and stays else None


def _by_free_ports(free: Mapping[str, int]) -> list[tuple[int, str]]:
    """Free slots in the order in which new workers take them: of the supervisor with the most free
    ports.
    """
    return [(-ports, node) for node, most in free.items() for ports in range(1, most + 1)]


def _spread(
    allocation: SlotAllocation,
    count: int,
    used: Iterable[str],
    blocked: dict[int, set[str]],
    alone: bool,
) -> None:
    """Allocate new slots one at a time, each on the supervisor with the most free ports.

    ``used`` are the supervisors that the topology already has workers on in this event. Only when
    so few slots remain to be chosen that a ``task.on.differ.node`` component would be left without
    enough supervisors is the choice narrowed to supervisors that help it; with ``alone`` one of the
    slots goes to the topology master and helps nobody.
    """
    ports, chosen = allocation.ports, set(used)
    needs = [(need.units, blocked[need.component]) for need in allocation.request.needs]
    for remaining in range(count, 0, -1):
        node, why, against = ports.best(allocation.within)
        useful = max(1, remaining - 1 if alone else remaining)
        if tight := [nodes for units, nodes in needs if units - len(chosen - nodes) >= useful]:
            helpful = [
                other
                for other in allocation.nodes
                if ports.free[other]
                and other not in chosen
                and not any(other in nodes for nodes in tight)
            ]
            if helpful and node not in helpful:
                node, why, against = min(helpful, key=ports.load), Reason.SLOT_DIFFER, ""
        allocation.take(Slot(node, ports.free[node][0]), why, text=against)
        chosen.add(node)


def _choose_master(slots: list[AllocatedSlot]) -> None:
    """Give the master an empty slot on the supervisor that has most slots of the topology."""
    crowd = Counter(slot.node for slot in slots)
    max(
        (slot for slot in slots if slot.role == "empty"), key=lambda slot: crowd[slot.node]
    ).role = "master"


def _apart(assignment: TaskAssignment, workers: Sequence[FilledWorker]) -> dict[int, set[str]]:
    """Component that must be apart -> supervisors that hold one of it already."""
    component, differ = assignment.executors.component, assignment.about.differ
    if not differ:
        return {}
    held = [
        (worker.node, component[position])
        for worker in assignment.history.old
        if worker.state != LOST
        for position in worker.holds
    ]
    held.extend((worker.node, kind) for worker in workers for kind in worker.counts)
    return {kind: {node for node, holder in held if holder == kind} for kind in differ}
