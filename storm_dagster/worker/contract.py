"""What a worker's loop asks of the engine that runs its tasks.

The loop owns the process, the lease, the sockets and the clock; an engine owns tasks and tuples. All
methods are called from the loop's thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from storm_dagster.model.wire import Frame, TaskReport

__all__ = ["Engine", "Placement"]


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


class Engine(Protocol):
    """A way to run the tasks of a worker."""

    def place(self, placement: Placement) -> None:
        """Open the tasks in ``placement.open`` that are not, close all others, send to the new places."""
        ...

    def close_tasks(self, tasks: Collection[int]) -> None:
        """End these tasks: afterwards nothing of theirs is executed, emitted or acked."""
        ...

    def deliver(self, frame: Frame) -> None:
        """Take the tuples and acks that a peer sent."""
        ...

    def activate(self, active: bool) -> None:
        """Let spouts emit, or stop them; tuples under way are processed in any case."""
        ...

    def run(self, now: float) -> bool:
        """One pass: process what is there, ask spouts for more, hand results over. Whether anything was done."""
        ...

    def idle_secs(self, now: float) -> float | None:
        """How long nothing needs to be run unless something arrives."""
        ...

    def drained(self) -> bool:
        """Whether no tuple waits or is under way in this worker."""
        ...

    def statuses(self) -> dict[int, str]:
        """Task id -> ``starting`` or ``running``."""
        ...

    def stats(self) -> dict[str, TaskReport]:
        """State and statistics of all tasks, by task id."""
        ...

    def close(self) -> None:
        """End all tasks in good order."""
        ...
