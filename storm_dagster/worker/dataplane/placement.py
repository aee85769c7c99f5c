"""Placement of a topology's tasks, as one worker needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from storm_dagster.model.records import StateHome


@dataclass(frozen=True)
class Placement:
    """Slots and addresses of all tasks, and the tasks of this worker."""

    version: int
    """Version of the assignment."""
    slots: Mapping[int, tuple[str, int]]
    """Task id -> (supervisor id, port), of all tasks."""
    addresses: Mapping[tuple[str, int], str]
    """Slot -> ``host:port``."""
    components: Mapping[int, str]
    """Task id -> component, of all tasks."""
    mine: frozenset[int]
    """Tasks assigned to this worker's slot."""
    open: frozenset[int]
    """Those of them that it may run now, because no other worker still owns them."""
    tokens: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Start tokens of the topology's live workers -> slot."""
    ready: frozenset[tuple[str, int]] = frozenset()
    """Slots whose worker runs all its tasks."""
    state: StateHome = field(default_factory=lambda: StateHome(marker=""))


def by_component(components: Mapping[int, str]) -> dict[str, list[int]]:
    """Component -> its tasks, ascending."""
    found: dict[str, list[int]] = {}
    for task in sorted(components):
        found.setdefault(components[task], []).append(task)
    return found
