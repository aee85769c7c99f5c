"""The ``even`` strategy: the rules of Storm's even and default schedulers
(``docs/decisions.md#even-strategy``).
"""

from itertools import zip_longest

from storm_dagster.core.scheduling.requested_workers import Grants, ReusableSlot
from storm_dagster.core.scheduling.reuse import balanced_savings, choose_reused
from storm_dagster.core.scheduling.slot_allocation import PlacementRefused, SlotAllocation
from storm_dagster.core.scheduling.strategy import Strategy
from storm_dagster.core.scheduling.task_assignment import TaskAssignment
from storm_dagster.core.scheduling.units import TopologySummary
from storm_dagster.model.multimap import multimap
from storm_dagster.model.placement_reasons import Reason, even_ignores, refusal
from storm_dagster.model.slot import Slot


class Even(Strategy):
    """Strategy ``even``. The topology master is placed like any task."""

    respreads = True

    def workers(self, about: TopologySummary) -> tuple[int, bool]:
        """As many as asked for; the topology master counts as an executor and is never alone."""
        return min(about.workers, sum(about.units)), False

    def warnings(self, about: TopologySummary, grants: Grants) -> list[str]:
        """Conf keys that are ignored for a topology that runs already."""
        ignored = [
            *_unsupported_requests(about),
            *(["use.old.assignment"] if about.use_old else []),
        ]
        return [even_ignores(ignored)] if ignored else []

    def allocate(self, allocation: SlotAllocation) -> None:
        """Allocate as many of the wanted slots as there are; refused only when there is none at
        all.

        In a monitor event live workers whose size is no share of an even spread give their slots
        back, as with Storm's default scheduler; a rebalance keeps the fullest old slots.
        """
        about, request = allocation.about, allocation.request
        unsupported = _unsupported_requests(about)
        if unsupported and about.event == "new":
            raise PlacementRefused(refusal("even", about.name, keys=", no ".join(unsupported)))
        alive: list[ReusableSlot] = []
        fixed = sum(request.fixed)
        if about.event == "monitor":
            # A slot can be released only where the supervisor is there to stop its worker.
            alive = [worker for worker in request.reusable if allocation.may_keep(worker.slot)]
            fixed += sum(worker.size for worker in request.reusable if worker not in alive)
        mine = request.total - fixed
        wanted = min(max(1, min(about.workers, request.total) - request.staying + len(alive)), mine)
        total = min(wanted, len(alive) + max(0, allocation.free - allocation.reserve))
        if about.event == "monitor" and not request.missing and total <= len(alive):
            return
        allocation.require_supervisor()
        if total < 1:
            raise allocation.short(1, with_remedy=False)
        shares = _shares(mine, total)
        kept = 0
        if about.event == "monitor":
            kept = _keep_fitting(allocation, alive, shares)
        elif about.keeps:
            _keep_fullest(allocation, shares)
        # In turn from host to host, hosts with more free slots first, as in Storm.
        for slot in _interleave(_slots_of_hosts(allocation))[
            : total - kept - len(allocation.slots)
        ]:
            allocation.take(slot, Reason.SLOT_INTERLEAVED)

    def fill(self, assignment: TaskAssignment) -> None:
        """Assign executors round robin, by ascending task id, to slots that are below their share.

        The fullest slots have the largest shares.
        """
        slots, freed = assignment.slots, assignment.freed
        waiting = assignment.history.needed
        if freed:
            waiting = sorted(
                [*waiting, *(p for number in freed for p in assignment.history.old[number].holds)]
            )
        shares = _shares(len(waiting), len(slots))
        stays = assignment.stays(waiting, shares[-1], {})
        here = {position for positions in stays.values() for position in positions}
        filled = [list(stays.get(index, ())) for index in range(len(slots))]
        reasons = [[int(Reason.STAYS)] * len(positions) for positions in filled]
        ranked = sorted(range(len(slots)), key=lambda index: -len(filled[index]))
        share_of = dict(zip(ranked, shares, strict=True))
        turn = 0
        for position in waiting:
            if position in here:
                continue
            while len(filled[turn]) >= share_of[turn]:
                turn = (turn + 1) % len(slots)
            filled[turn].append(position)
            reasons[turn].append(int(Reason.DEALT))
            turn = (turn + 1) % len(slots)
        for slot, positions, whys in zip(slots, filled, reasons, strict=True):
            assignment.add(slot, positions, whys)


def _unsupported_requests(about: TopologySummary) -> list[str]:
    """Conf keys that round-robin assignment cannot honor; a new topology with one of them is
    refused.
    """
    keys = ["use.userdefine.assignment"] if about.user_workers else []
    if about.differ_names:
        keys.append(f"task.on.differ.node ({', '.join(about.differ_names)})")
    if about.single_master:
        keys.append("topology.master.single.worker")
    return keys


def _shares(count: int, total: int) -> list[int]:
    """Sizes of an even spread of ``count`` executors over ``total`` slots, larger ones first."""
    average, remainder = divmod(count, total)
    return [average + 1] * remainder + [average] * (total - remainder)


def _keep_fitting(allocation: SlotAllocation, alive: list[ReusableSlot], shares: list[int]) -> int:
    """Number of live workers that stay, as their size is still a share of the spread; the others
    are freed.
    """
    left, kept = list(shares), 0
    for worker in alive:
        if worker.size in left:
            left.remove(worker.size)
            kept += 1
        else:
            allocation.release_own(worker.slot)
            allocation.freed.append(worker.worker)
    return kept


def _keep_fullest(allocation: SlotAllocation, shares: list[int]) -> None:
    by_host = _slots_of_hosts(allocation)
    turns = [
        ((turn, -len(slots)), node) for slots in by_host for turn, (node, _) in enumerate(slots)
    ]
    savings = balanced_savings(allocation.savings(shares[-1]), turns, len(shares))
    _, plain, fuller = choose_reused(
        savings, len(shares), sum(share > shares[-1] for share in shares)
    )
    for worker in sorted([*plain, *fuller], key=lambda worker: worker.worker):
        allocation.take(
            worker.slot,
            Reason.SLOT_REUSED,
            "fuller" if worker in fuller else "reuse",
            worker.worker,
        )


def _slots_of_hosts(allocation: SlotAllocation) -> list[list[Slot]]:
    """Free slots of each host, in turn from supervisor to supervisor. Equal ones go by the lower
    supervisor id.
    """
    ports = allocation.ports
    by_host = multimap(
        (ports.info[node].host, [Slot(node, port) for port in ports.free[node]])
        for node in allocation.nodes
    )
    return [_interleave(groups) for groups in by_host.values()]


def _interleave(groups: list[list[Slot]]) -> list[Slot]:
    by_size = sorted(groups, key=lambda group: -len(group))
    return [slot for turn in zip_longest(*by_size) for slot in turn if slot is not None]
