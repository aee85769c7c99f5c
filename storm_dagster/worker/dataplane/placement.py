"""Where the tasks of a topology run: what the cluster's state tells a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """Where the tasks of the topology run, as far as this worker is concerned."""

    version: int
    """Version of the assignment."""
    slots: Mapping[int, tuple[str, int]]
    """Task id -> (supervisor id, port), of all tasks."""
    addresses: Mapping[tuple[str, int], str]
    """Slot -> ``host:port``."""
    components: Mapping[int, str]
    """Task id -> component, of all tasks."""
    mine: frozenset[int]
    """Tasks that this worker's slot is to run."""
    open: frozenset[int]
    """Those of them that it may run now: nobody else still claims them."""
    tokens: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Start tokens of the topology's live workers -> slot."""
    ready: frozenset[tuple[str, int]] = frozenset()
    """Slots whose worker reports that all its tasks run."""
