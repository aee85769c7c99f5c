"""The ``local`` strategy, JStorm's local mode.

It places one worker on the only supervisor, at its first free port.
"""

from storm_dagster.core.scheduling.requested_workers import Grants, request_keys
from storm_dagster.core.scheduling.slot_allocation import PlacementRefused, SlotAllocation
from storm_dagster.core.scheduling.strategy import Strategy
from storm_dagster.core.scheduling.task_assignment import TaskAssignment
from storm_dagster.core.scheduling.units import TopologySummary
from storm_dagster.model.placement_reasons import Reason, ignored_requests, refusal
from storm_dagster.model.slot import Slot


class Local(Strategy):
    """Strategy ``local``. One supervisor takes everything."""

    spreads = False

    def workers(self, about: TopologySummary) -> tuple[int, bool]:
        """One."""
        return 1, False

    def warnings(self, about: TopologySummary, grants: Grants) -> list[str]:
        """Requests of the conf, which one worker cannot follow."""
        ignored = request_keys(about)
        if about.use_old:
            ignored.append("use.old.assignment")
        return [ignored_requests("local", ignored)] if ignored else []

    def allocate(self, allocation: SlotAllocation) -> None:
        """Allocate one slot on the only supervisor, in a rebalance the old one.

        ``jstorm.reserve.workers`` is ignored.
        """
        allocation.require_supervisor()
        allocation.reserve = 0
        nodes = allocation.nodes
        if len(nodes) != 1:
            raise PlacementRefused(refusal("local", allocation.about.name, supervisors=len(nodes)))
        free = allocation.ports_of(nodes[0])
        if not free:
            raise allocation.short(1, with_remedy=False)
        slot = Slot(nodes[0], free[0])
        if allocation.about.event == "rebalance":
            for worker in allocation.request.reusable:
                if allocation.may_use(worker.slot):
                    slot = worker.slot
                    break
        allocation.take(slot, Reason.SLOT_LOCAL)

    def fill(self, assignment: TaskAssignment) -> None:
        """Put all executors into the one slot."""
        needed = assignment.history.needed
        assignment.add(assignment.slots[0], needed, [int(Reason.LOCAL)] * len(needed))
