"""The ``even`` strategy: the rules of Storm's even and default schedulers.

See ``docs/decisions.md#even-strategy``.
"""

from storm_dagster.core.scheduling.requested_workers import Grants, ReusableSlot, request_keys
from storm_dagster.core.scheduling.reuse import balanced_savings, choose_reused
from storm_dagster.core.scheduling.slot_allocation import PlacementRefused, SlotAllocation
from storm_dagster.core.scheduling.strategy import Strategy
from storm_dagster.core.scheduling.task_assignment import TaskAssignment
from storm_dagster.core.scheduling.units import TopologySummary
from storm_dagster.model.placement_reasons import Reason, ignored_requests, refusal
from storm_dagster.model.slot import Slot


class Even(Strategy):
    """Strategy ``even``. The topology master is placed like any task."""

    respreads = True

    def workers(self, about: TopologySummary) -> tuple[int, bool]:
        """As many as the conf says; the topology master is never alone.

        It counts as an executor.
        """
        return min(about.workers, sum(about.units)), False

    def warnings(self, about: TopologySummary, grants: Grants) -> list[str]:
        """Conf keys that are ignored for a topology that runs already."""
        ignored = request_keys(about)
        if about.use_old:
            ignored.append("use.old.assignment")
        return [ignored_requests("even", ignored)] if ignored else []

    def allocate(self, allocation: SlotAllocation) -> None:
        """Allocate as many of the wanted slots as are free; refused only without any.

        In a monitor event live workers whose size is not a share of an even spread release their
        slots, as with Storm's default scheduler. A rebalance keeps the fullest old slots.
        """
        about = allocation.about
        request = allocation.request
        # A new topology with a request that round-robin assignment cannot follow is refused.
        unsupported = request_keys(about)
        if unsupported and about.event == "new":
            raise PlacementRefused(refusal("even", about.name, keys=", no ".join(unsupported)))
        # Live workers that may be released, and the number of executors in those that must stay.
        alive: list[ReusableSlot] = []
        fixed = sum(request.fixed)
        if about.event == "monitor":
            # A slot can be released only where the supervisor is alive and stops its worker.
            for worker in request.reusable:
                if allocation.may_keep(worker.slot):
                    alive.append(worker)
                else:
                    fixed += worker.size
        movable = request.total - fixed
        # ``staying`` counts the live workers, too, but these may be released.
        workers = min(about.workers, request.total) - request.staying + len(alive)
        usable = len(alive) + allocation.available
        total = min(max(1, workers), movable, usable)
        if about.event == "monitor" and not request.missing and total <= len(alive):
            # No executor is lost and no slot is free for one more worker: all stay.
            return
        allocation.require_supervisor()
        if total < 1:
            raise allocation.short(1, with_remedy=False)
        shares = _shares(movable, total)
        staying = 0
        if about.event == "monitor":
            staying = _keep_fitting(allocation, alive, shares)
        elif about.keeps:
            _keep_fullest(allocation, shares)
        # In turn from host to host, hosts with more free slots first, as in Storm. A slot that was
        # taken for its old worker is its host's first turn, so that the spread is the same as that
        # of a placement from nothing.
        taken = {slot.slot for slot in allocation.slots}
        interleaved = _interleave(_slots_of_hosts(allocation))
        candidates = [slot for slot in interleaved if slot not in taken]
        missing = total - staying - len(allocation.slots)
        for slot in candidates[:missing]:
            allocation.take(slot, Reason.SLOT_INTERLEAVED)

    def fill(self, assignment: TaskAssignment) -> None:
        """Assign executors round robin, by ascending task id.

        A slot takes executors up to its share; the fullest slots have the largest shares.
        """
        slots = assignment.slots
        waiting = list(assignment.history.needed)
        for number in assignment.freed:
            waiting += assignment.history.old[number].holds
        waiting.sort()
        shares = _shares(len(waiting), len(slots))
        stays = assignment.stays(waiting, shares[-1], {})
        filled = [list(stays.get(index, ())) for index in range(len(slots))]
        reasons = [[int(Reason.STAYS)] * len(positions) for positions in filled]
        staying: set[int] = set()
        for positions in filled:
            staying.update(positions)
        ranked = sorted(range(len(slots)), key=lambda index: -len(filled[index]))
        share_of = dict(zip(ranked, shares, strict=True))
        # Index of the slot whose turn it is; slots that are full are skipped.
        turn = 0
        for position in waiting:
            if position in staying:
                continue
            while len(filled[turn]) >= share_of[turn]:
                turn = (turn + 1) % len(slots)
            filled[turn].append(position)
            reasons[turn].append(int(Reason.DEALT))
            turn = (turn + 1) % len(slots)
        for slot, positions, slot_reasons in zip(slots, filled, reasons, strict=True):
            assignment.add(slot, positions, slot_reasons)


def _shares(count: int, total: int) -> list[int]:
    """Sizes, descending, of ``count`` executors spread evenly over ``total`` slots."""
    average, remainder = divmod(count, total)
    return [average + 1] * remainder + [average] * (total - remainder)


def _keep_fitting(allocation: SlotAllocation, alive: list[ReusableSlot], shares: list[int]) -> int:
    """Free the live workers that do not fit; return the number of those that stay.

    A worker fits if its size is still a share of the spread.
    """
    open_shares = list(shares)
    staying = 0
    for worker in alive:
        if worker.size in open_shares:
            open_shares.remove(worker.size)
            staying += 1
        else:
            allocation.release_own(worker.slot)
            allocation.freed.append(worker.worker)
    return staying


def _keep_fullest(allocation: SlotAllocation, shares: list[int]) -> None:
    """Take the old slots that save most moves, of those that interleaving would take.

    ``shares`` are the sizes of all slots, descending.
    """
    turns = _interleaving_turns(allocation)
    savings = balanced_savings(allocation.savings(shares[-1]), turns, len(shares))
    remainder = sum(share > shares[-1] for share in shares)
    _, at_share, fuller = choose_reused(savings, len(shares), remainder)
    for worker in sorted([*at_share, *fuller], key=lambda worker: worker.worker):
        role = "fuller" if worker in fuller else "reuse"
        allocation.take(worker.slot, Reason.SLOT_REUSED, role, worker.worker)


def _interleaving_turns(allocation: SlotAllocation) -> list[tuple[tuple[int, int], str]]:
    """((turn on the host, minus the host's slots), supervisor) of each slot.

    This is the order in which :func:`_interleave` takes the slots.
    """
    turns: list[tuple[tuple[int, int], str]] = []
    for slots in _slots_of_hosts(allocation):
        for turn, slot in enumerate(slots):
            turns.append(((turn, -len(slots)), slot.node))
    return turns


def _slots_of_hosts(allocation: SlotAllocation) -> list[list[Slot]]:
    """Slots of each host that are free or taken by this allocation.

    The taken ones come first, the others in turn from supervisor to supervisor. Of equal
    supervisors the one with the lower id comes first.
    """
    ports = allocation.ports
    taken = [slot.slot for slot in allocation.slots]
    by_host: dict[str, list[list[Slot]]] = {}
    for node in allocation.nodes:
        slots = [slot for slot in taken if slot.node == node]
        slots += [Slot(node, port) for port in ports.free[node]]
        by_host.setdefault(ports.info[node].host, []).append(slots)
    # False sorts first: a stable sort keeps the turns of the supervisors.
    return [
        sorted(_interleave(groups), key=lambda slot: slot not in taken)
        for groups in by_host.values()
    ]


def _interleave(groups: list[list[Slot]]) -> list[Slot]:
    """The first slot of every group, then the second ones; larger groups first."""
    by_size = sorted(groups, key=lambda group: -len(group))
    turns = max((len(group) for group in groups), default=0)
    slots: list[Slot] = []
    for turn in range(turns):
        slots += [group[turn] for group in by_size if turn < len(group)]
    return slots
