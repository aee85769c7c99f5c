"""The ``balanced`` strategy: JStorm's assignment without its quirks.

See ``docs/decisions.md#supervisor-choice``. Healing, too, fails when slots are short: tasks are
never put into fewer workers than the topology requests. The dead tasks wait with the reason, live
tasks continue, and the next attempt places the dead ones as soon as there are slots.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from storm_dagster.core.scheduling.history import LOST
from storm_dagster.core.scheduling.requested_workers import (
    Grants,
    RequestedSlot,
    ReusableSlot,
)
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
        """As in JStorm: one worker more for a topology master that is to be alone."""
        return worker_count(about.workers, about.executors, about.single_master)

    def warnings(self, about: TopologySummary, grants: Grants) -> list[str]:
        """Requested workers that were dropped although tasks are placed."""
        return grants.warnings

    def allocate(self, allocation: SlotAllocation) -> None:
        """Allocate requested, then reused, then new slots.

        A rebalance reuses old slots. New slots are on the least loaded supervisors. Refused when
        slots are short, or on too few supervisors for a component whose tasks must be apart.
        """
        about = allocation.about
        request = allocation.request
        allocation.require_supervisor()
        count = request.wanted
        requested = request.requested
        master_alone = request.master_alone
        if request.clash:
            raise PlacementRefused(too_many_requests_refusal(about.name, *request.clash))
        if allocation.available < count:
            raise allocation.short(count, with_remedy=True)
        blocked: dict[int, set[str]] = {need.component: set(need.blocked) for need in request.needs}
        old_slots = {worker.slot for worker in request.reusable}
        # Counted now: a slot that a requested worker takes is no longer usable.
        usable_old = sum(map(allocation.may_use, old_slots))
        unplaced = _take_requested(allocation, blocked)
        own_master: Slot | None = None
        if about.keeps:
            # The old slots that stay beside the requested workers must find room in the count.
            requested_old = sum(allocated.slot in old_slots for allocated in allocation.slots)
            keepable = min(usable_old, count) - requested_old
            if requested and len(requested) + keepable > count:
                raise PlacementRefused(
                    too_many_requests_refusal(about.name, len(requested), keepable, count)
                )
            places = count - len(requested) - int(master_alone)
            own_master = _reuse(allocation, places, master_alone)
        # Before the topology master's slot, which holds no component that must be apart.
        used = [allocated.node for allocated in allocation.slots]
        if own_master is not None:
            allocation.take(own_master, Reason.SLOT_REUSED, "master")
        new_master = master_alone and own_master is None
        first_new = len(allocation.slots)
        _spread(allocation, count - first_new, used, blocked, new_master)
        # Requests without a usable host come first in the order of workers, as in JStorm; they take
        # new slots, too.
        for allocated, number in zip(allocation.slots[first_new:], unplaced, strict=False):
            allocated.role = "requested"
            allocated.ref = number
            _block(blocked, requested[number], allocated.slot)
        if new_master:
            _choose_master(allocation.slots)
        _require_apart(allocation, blocked)

    def fill(self, assignment: TaskAssignment) -> None:
        """Fill the slots: requested workers, executors that stay, then the others.

        The selectors choose a worker for each of the others.
        """
        about = assignment.about
        component_at = assignment.executors.component
        slots = assignment.slots
        workers = [FilledWorker(slot.node) for slot in slots]
        unassigned = _put_requested(assignment, workers)
        open_workers = [
            worker for slot, worker in zip(slots, workers, strict=True) if slot.role != "master"
        ]
        # Only requested executors are in the workers yet: those that stay count as unassigned.
        sizes = [len(worker.positions) for worker in open_workers]
        share, remainder = fair_share(sizes, len(unassigned))
        apart = _apart(assignment, open_workers)
        stays = assignment.stays(unassigned, share, apart)
        staying: set[int] = set()
        for index, positions in stays.items():
            for position in positions:
                workers[index].put(position, component_at[position], Reason.STAYS)
            staying.update(positions)
            remainder -= len(positions) > share
        if staying:
            unassigned = [position for position in unassigned if position not in staying]
        selector = WorkerSelector(open_workers, share, remainder, about.related, about.system)
        selector.place(unassigned, component_at, apart)
        for slot, worker in zip(slots, workers, strict=True):
            _add_worker(assignment, slot, worker)


def _put_requested(assignment: TaskAssignment, workers: Sequence[FilledWorker]) -> list[int]:
    """Put requested executors, and a topology master that is alone, into the worker of each slot.

    Returns the executors that are still unassigned.
    """
    component_at = assignment.executors.component
    master = assignment.about.master
    unassigned = assignment.grants.unassigned(assignment.history.needed)
    for slot, worker in zip(assignment.slots, workers, strict=True):
        if slot.role == "master":
            masters = [position for position in unassigned if component_at[position] == master]
            worker.put(masters[0], master, Reason.MASTER)
            unassigned = [position for position in unassigned if position != masters[0]]
        elif slot.role == "requested" and slot.ref is not None:
            request = assignment.grants.requested[slot.ref]
            reason = Reason.OLD if request.slot.old else Reason.USER
            for position in request.holds:
                worker.put(position, component_at[position], reason)
    return unassigned


def _add_worker(assignment: TaskAssignment, slot: AllocatedSlot, worker: FilledWorker) -> None:
    """Add a filled worker to the result, with the memory and CPU that it requests."""
    memory = 0
    cpu = 0
    if slot.role == "requested" and slot.ref is not None:
        request = assignment.grants.requested[slot.ref]
        memory = request.memory
        cpu = request.cpu
    about = assignment.about
    if about.master_memory is not None and about.master in worker.counts:
        memory = about.master_memory
    assignment.add(slot, worker.positions, worker.reasons, memory, cpu)


def _block(blocked: dict[int, set[str]], requested: RequestedSlot, slot: Slot) -> None:
    """Add the slot's supervisor to those that have the worker's components."""
    for component in requested.components:
        if component in blocked:
            blocked[component].add(slot.node)


def _require_apart(allocation: SlotAllocation, blocked: Mapping[int, set[str]]) -> None:
    """Refuse the topology if a component has too few supervisors to be apart on."""
    about = allocation.about
    used = {slot.node for slot in allocation.slots if slot.role != "master"}
    for need in allocation.request.needs:
        open_nodes = used - blocked[need.component]
        if len(open_nodes) < need.units:
            name = about.differ_names[about.differ.index(need.component)]
            raise PlacementRefused(
                refusal(
                    "differ node",
                    about.name,
                    component=name,
                    needed=need.units,
                    supervisors=len(open_nodes),
                )
            )


def _slot_for(requested: RequestedSlot, allocation: SlotAllocation) -> Slot | None:
    """The requested port if it is free on the requested host, else another one there.

    Without a requested port the ``hint`` comes first. ``None`` if the host has no usable slot, or
    if no host is requested.
    """
    # The supervisor itself comes before others of its host.
    candidates = {requested.node, *allocation.ports.nodes_of([requested.host])}
    usable = (node for node in candidates if node and allocation.ports_of(node))
    nodes = sorted(usable, key=lambda node: (node != requested.node, node))
    if requested.port is not None:
        for node in nodes:
            if allocation.ports.has(Slot(node, requested.port)):
                return Slot(node, requested.port)
    elif requested.hint is not None and allocation.may_use(requested.hint):
        return requested.hint
    if not nodes:
        return None
    return Slot(nodes[0], allocation.ports_of(nodes[0])[0])


def _take_requested(allocation: SlotAllocation, blocked: dict[int, set[str]]) -> list[int]:
    """Take a slot for each requested worker that finds one; the numbers of the others.

    Hosts of the taken slots are added to ``blocked``.
    """
    unplaced: list[int] = []
    for number, requested_slot in enumerate(allocation.request.requested):
        slot = _slot_for(requested_slot, allocation)
        if slot is None:
            unplaced.append(number)
            continue
        reason = Reason.SLOT_OLD if requested_slot.old else Reason.SLOT_USER
        allocation.take(slot, reason, "requested", number)
        _block(blocked, requested_slot, slot)
    return unplaced


def _reuse(allocation: SlotAllocation, places: int, master_alone: bool) -> Slot | None:
    """Take at most ``places`` old slots, those that save most moves.

    Returns the slot where the topology master stays alone, which is not taken yet; ``None`` if it
    moves. It stays if no other executor stays in that worker, which is the case when its stay saves
    a move.
    """
    request = allocation.request
    sizes = [requested.size for requested in request.requested] + [0] * places
    share, remainder = fair_share(sizes, request.unassigned - int(master_alone))
    home = _master_home(allocation) if master_alone else None
    savings = allocation.savings(share)
    free = {node: len(allocation.ports.free[node]) for node in allocation.nodes}
    # Supervisor -> the number of its other ports, without those that the topology may take.
    used = {node: allocation.ports.load(node).used for node in allocation.nodes}
    # Components that must be apart decide more about supervisors than free ports do.
    by_ports = not request.needs
    candidates = savings
    if by_ports:
        count = places + int(master_alone)
        slots = _by_free_ports(free, used)
        candidates = balanced_savings(savings, slots, count)
        if home is not None and not _is_taken_on(home.node, slots, count):
            home = None
    saved, at_share, fuller = choose_reused(candidates, places, remainder)
    master_stays = False
    if home is not None:
        # The same choice beside the master's old slot. It is better if it saves more moves, its own
        # one of the master included. The master also stays if the first choice leaves its slot.
        free[home.node] -= 1
        used[home.node] += 1
        candidates = [saving for saving in savings if saving.worker is not home]
        if by_ports:
            candidates = balanced_savings(candidates, _by_free_ports(free, used), places)
        saved_beside, at_share_beside, fuller_beside = choose_reused(candidates, places, remainder)
        workers_beside = [saving.worker for saving in candidates]
        master_stays = all(worker in workers_beside for worker in (*at_share, *fuller))
        if saved_beside + 1 > saved + master_stays:
            at_share = at_share_beside
            fuller = fuller_beside
            master_stays = True
    for worker in sorted([*at_share, *fuller], key=lambda worker: (-worker.size, worker.slot)):
        role = "fuller" if worker in fuller else "reuse"
        allocation.take(worker.slot, Reason.SLOT_REUSED, role, worker.worker)
    return home.slot if home is not None and master_stays else None


def _is_taken_on(node: str, slots: Sequence[tuple[tuple[int, int], str]], count: int) -> bool:
    """True if a slot of the supervisor may be among the ``count`` with the lowest ranks.

    ``slots`` are those of :func:`_by_free_ports`. An equal rank counts: another supervisor is then
    no better.
    """
    ranks = sorted(rank for rank, _ in slots)
    last_rank = ranks[min(count, len(ranks)) - 1]
    return any(rank <= last_rank for rank, slot_node in slots if slot_node == node)


def _master_home(allocation: SlotAllocation) -> ReusableSlot | None:
    """The usable old slot that holds the topology master; ``None`` without one."""
    for worker in allocation.request.reusable:
        if worker.master and allocation.may_use(worker.slot):
            return worker
    return None


def _by_free_ports(
    free: Mapping[str, int], used: Mapping[str, int]
) -> list[tuple[tuple[int, int], str]]:
    """Free slots as (rank, supervisor); new workers take the lowest ranks first.

    The rank is the lower, the more free ports the supervisor has, and then the fewer used ones, as
    in :class:`FreePorts`: so a rebalance reaches the spread of a placement from nothing.
    """
    slots: list[tuple[tuple[int, int], str]] = []
    for node, count in free.items():
        ports = count + used[node]
        slots += [((-left, ports - left), node) for left in range(1, count + 1)]
    return slots


def _spread(
    allocation: SlotAllocation,
    count: int,
    used: Iterable[str],
    blocked: dict[int, set[str]],
    master_alone: bool,
) -> None:
    """Allocate new slots one at a time, on the supervisor with the most free ports.

    ``used`` are the supervisors that the topology already has workers on in this event. A
    ``task.on.differ.node`` component may need all slots that remain to get enough supervisors.
    Only then the choice is narrowed to supervisors that help it. With ``master_alone`` one of the
    slots goes to the topology master and does not help.
    """
    ports = allocation.ports
    chosen = set(used)
    needs = [(need.units, blocked[need.component]) for need in allocation.request.needs]
    for remaining in range(count, 0, -1):
        node, reason, comparison = ports.best(allocation.within)
        useful = max(1, remaining - 1 if master_alone else remaining)
        # Supervisors that hold a component which needs another one with every slot that is left.
        tight = [nodes for units, nodes in needs if units - len(chosen - nodes) >= useful]
        if tight:
            closed = chosen.union(*tight)
            helpful = [
                candidate
                for candidate in allocation.nodes
                if ports.free[candidate] and candidate not in closed
            ]
            if helpful and node not in helpful:
                node = min(helpful, key=ports.load)
                reason = Reason.SLOT_DIFFER
                comparison = ""
        allocation.take(Slot(node, ports.free[node][0]), reason, text=comparison)
        chosen.add(node)


def _choose_master(slots: list[AllocatedSlot]) -> None:
    """Give the master an empty slot on the supervisor with most of these slots.

    Sets the ``role`` of that slot. The others so stay on as many supervisors as possible.
    """
    slots_on = Counter(slot.node for slot in slots)
    empty = [slot for slot in slots if slot.role == "empty"]
    master_slot = max(empty, key=lambda slot: slots_on[slot.node])
    master_slot.role = "master"


def _apart(assignment: TaskAssignment, workers: Sequence[FilledWorker]) -> dict[int, set[str]]:
    """Component with ``task.on.differ.node`` -> its supervisors before the selectors choose.

    They have its executors in an old worker that is not ``LOST``, or in ``workers``, which hold
    only requested executors yet.
    """
    component_at = assignment.executors.component
    apart: dict[int, set[str]] = {component: set() for component in assignment.about.differ}
    if not apart:
        return {}
    for old in assignment.history.old:
        if old.state == LOST:
            continue
        for position in old.holds:
            component = component_at[position]
            if component in apart:
                apart[component].add(old.node)
    for worker in workers:
        for component in apart.keys() & worker.counts.keys():
            apart[component].add(worker.node)
    return apart
