"""Strategies of placement: their interface, and their registry.

Each step of a placement calls the strategy of the topology: the PySpark assignment in its Arrow
groups, the local planner in process.
"""

import importlib
import json
from collections.abc import Iterable
from functools import cache
from typing import Protocol

from storm_dagster.core.scheduling.history import EventHistory, read_history
from storm_dagster.core.scheduling.requested_workers import (
    Grants,
    SlotRequest,
    grant_requests,
    slot_request,
    slot_request_without_history,
)
from storm_dagster.core.scheduling.slot_allocation import (
    FreePorts,
    PlacementRefused,
    SlotAllocation,
)
from storm_dagster.core.scheduling.task_assignment import Allocated, TaskAssignment
from storm_dagster.core.scheduling.units import Executors, Row, TopologySummary
from storm_dagster.model.placement_reasons import Reason
from storm_dagster.model.strategies import STRATEGIES


class Strategy(Protocol):
    """Rules of one strategy, without state.

    They choose the slots of a topology and the executors in each slot.
    """

    chain: tuple[Reason, ...] = ()
    """Comparisons by which workers are chosen for executors, in the order in which they decide;
    empty without any.
    """
    grants_requests: bool = False
    """True if it grants requested workers and a worker for the topology master alone."""
    respreads: bool = False
    """True if a monitor event without lost workers may change live workers."""
    spreads: bool = True
    """True if it spreads executors.

    Sizes of workers then differ by one at most, and ``task.on.differ.node`` holds.
    """

    def workers(self, about: TopologySummary) -> tuple[int, bool]:
        """Number of workers, and True if one is the topology master's alone."""
        ...

    def allocate(self, allocation: SlotAllocation) -> None:
        """Take the slots of one topology.

        Raises ``PlacementRefused`` if they do not suffice.
        """

    def fill(self, assignment: TaskAssignment) -> None:
        """Assign executors to the allocated slots, and list the workers."""

    def warnings(self, about: TopologySummary, grants: Grants) -> list[str]:
        """Requests of the conf that are not followed, and why."""
        return []


@cache
def strategy_of(name: str) -> Strategy:
    """Return the strategy with this ``topology.scheduler.strategy``.

    A name that is not registered gets ``balanced``.
    """
    module, _, attribute = STRATEGIES.get(name, STRATEGIES["balanced"]).partition(":")
    strategy: Strategy = getattr(importlib.import_module(module), attribute)()
    return strategy


def request_without_history(about: TopologySummary) -> SlotRequest:
    """Slot request of a topology without assignment and user-defined workers."""
    strategy = strategy_of(about.strategy)
    return slot_request_without_history(
        about,
        grants_requests=strategy.grants_requests,
        respread=strategy.respreads and about.event == "monitor",
    )


class TopologyEvent:
    """An event of one topology, from the rows of its history."""

    def __init__(self, about: TopologySummary, executors: Executors, rows: Iterable[Row]) -> None:
        self.about = about
        self.executors = executors
        self.strategy = strategy_of(about.strategy)
        self.history: EventHistory = read_history(about.event, executors, rows)
        self._grants: Grants | None = None if self.strategy.grants_requests else Grants()
        """Granted workers; ``None`` until they are computed, which needs the history."""

    def request(self) -> SlotRequest:
        """The slots that it wants."""
        if self.history.is_empty:
            return request_without_history(self.about)
        if self._grants is None:
            self._grants = grant_requests(self.about, self.executors, self.history)
        respread = self.strategy.respreads and self.about.event == "monitor"
        return slot_request(
            self.about, self.executors, self.history, self._grants, respread=respread
        )

    def assign(self, allocated: Allocated) -> list[Row]:
        """Rows of all its workers, including those that stay unchanged.

        See :class:`TaskAssignment`. A refused topology has a single row without a node: its
        ``units`` are the executors without a slot, its ``text`` is the refusal. Otherwise the
        ``text`` of the first row holds the warnings, if there are any.
        """
        if self._grants is None and self.history.is_empty:
            # Without a history no worker is requested; the slots name the other grants.
            self._grants = Grants()
        if self._grants is None:
            self._grants = grant_requests(self.about, self.executors, self.history)
        assignment = TaskAssignment(
            self.about, self.executors, self.history, self._grants, allocated
        )
        if allocated.refusal is not None:
            assignment.fail(allocated.refusal)
            return assignment.out
        assignment.stay()
        if allocated.slots:
            self.strategy.fill(assignment)
        if assignment.out:
            warnings = self.strategy.warnings(self.about, self._grants)
            if warnings:
                assignment.out[0]["text"] = json.dumps(warnings)
        return assignment.out


def allocate(about: TopologySummary, request: SlotRequest, ports: FreePorts) -> Allocated:
    """Take the slots of one topology from ``ports``, and return them.

    A topology that is refused takes none: the result has the refusal.
    """
    if request.unchanged:
        return Allocated()
    allocation = SlotAllocation(about, request, ports)
    try:
        strategy_of(about.strategy).allocate(allocation)
    except PlacementRefused as refused:
        allocation.close(refused=True)
        return Allocated(refusal=refused.refusal)
    allocation.close(refused=False)
    return Allocated(allocation.slots, allocation.freed)
