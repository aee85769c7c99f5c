"""Strategies of placement: their interface, and their registry.

Each step of a placement calls the strategy of the topology: the PySpark assignment in its Arrow groups, the local
planner in process.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Protocol

from storm_dagster.core.scheduling.requested_workers import Grants
from storm_dagster.core.scheduling.slot_allocation import SlotAllocation
from storm_dagster.core.scheduling.task_assignment import TaskAssignment
from storm_dagster.core.scheduling.units import TopologySummary
from storm_dagster.model.placement_reasons import Reason
from storm_dagster.model.strategies import STRATEGIES


class Strategy(Protocol):
    """Rules of one strategy, without state: which slots a topology gets, and which executors go into them."""

    chain: tuple[Reason, ...] = ()
    """Comparisons by which workers are chosen for executors, in the order in which they decide; empty without any."""
    grants_requests: bool = False
    """Whether requested workers and a worker for the topology master alone are granted."""
    respreads: bool = False
    """Whether a monitor event in which nothing is lost may change workers that live."""
    spreads: bool = True
    """Whether it spreads executors: sizes of workers differ by one at most, and ``task.on.differ.node`` holds."""

    def workers(self, about: TopologySummary) -> tuple[int, bool]:
        """Number of workers that the topology wants, and whether its topology master is alone in one."""
        ...

    def allocate(self, allocation: SlotAllocation) -> None:
        """Take the slots of one topology. Raises ``PlacementRefused`` when they do not suffice."""
        ...

    def fill(self, assignment: TaskAssignment) -> None:
        """Assign executors to the slots that the topology was given, and list the workers."""
        ...

    def warnings(self, about: TopologySummary, grants: Grants) -> list[str]:
        """Requests of the conf that are not followed, and why."""
        return []


@cache
def strategy_of(name: str) -> Strategy:
    """The strategy with this ``topology.scheduler.strategy``; ``balanced`` for one that is not registered."""
    module, _, attribute = STRATEGIES.get(name, STRATEGIES["balanced"]).partition(":")
    strategy: Strategy = getattr(importlib.import_module(module), attribute)()
    return strategy
