"""Slot request of a topology: what slot allocation knows of it, which never sees tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from storm_dagster.core.scheduling.history import KEPT, LOST, UNSTOPPED, EventHistory, OldWorker, Slot
from storm_dagster.core.scheduling.requested_workers import Grants, RequestedSlot
from storm_dagster.core.scheduling.units import Executors, TopologySummary


class ReusableSlot(NamedTuple):
    """The slot of an old worker that may be used again."""

    worker: int
    """Number of the old worker."""
    node: str
    port: int
    size: int
    """Executors that may stay there, without a topology master that is to be alone."""
    weights: Sequence[int]
    """Numbers of tasks, descending, that one executor has there, and ``numbers`` of executors that have so many."""
    numbers: Sequence[int]
    master: bool
    """Whether the topology master that is to be alone is there."""

    @property
    def slot(self) -> Slot:
        """Its supervisor and port."""
        return (self.node, self.port)


class DifferNeed(NamedTuple):
    """A component whose executors run on different supervisors."""

    component: int
    units: int
    """Number still to be placed."""
    blocked: Sequence[str]
    """Supervisors that hold one already."""


class SlotRequest(NamedTuple):
    """Slots that an event wants."""

    unchanged: bool
    wanted: int
    """Slots, requested workers and the topology master's included."""
    staying: int
    """Workers that stay as they are, counted in ``topology.workers``."""
    alone: bool
    """One of the slots is for the topology master."""
    requested: Sequence[RequestedSlot]
    own: Sequence[Slot]
    """Slots that the topology may be given again."""
    reusable: Sequence[ReusableSlot]
    needs: Sequence[DifferNeed]
    fixed: Sequence[int]
    """Sizes of unstopped workers."""
    total: int
    """Executors."""
    missing: int
    """Executors to place."""
    unassigned: int
    """Executors to place that no requested worker holds."""
    clash: Sequence[int] | None
    """(user-defined workers, old workers, room) when these are too many together."""


def slot_request(
    about: TopologySummary, executors: Executors, history: EventHistory, grants: Grants, *, respread: bool
) -> SlotRequest:
    """The request of one event. With ``respread`` it may change live workers although none is lost."""
    unassigned = grants.unassigned(history.needed)
    monitor = about.event == "monitor"
    free = set(unassigned) if history.old and not monitor else set[int]()
    return SlotRequest(
        unchanged=not history.needed and not respread,
        wanted=grants.count,
        staying=history.staying,
        alone=grants.alone,
        requested=[wanted.slot for wanted in grants.requested],
        own=history.own,
        reusable=[
            _reusable(
                number,
                worker,
                worker.holds if monitor else [position for position in worker.holds if position in free],
                executors,
                about.master if grants.alone else -1,
            )
            for number, worker in enumerate(history.old)
            if about.event != "new" and worker.state == (KEPT if monitor else LOST)
        ],
        needs=_needs(about, executors, history, unassigned),
        fixed=[len(worker.holds) for worker in history.old if worker.state == UNSTOPPED],
        total=len(executors),
        missing=len(history.needed),
        unassigned=len(unassigned),
        clash=grants.clash,
    )


def _reusable(number: int, worker: OldWorker, holds: list[int], executors: Executors, master: int) -> ReusableSlot:
    others = [position for position in holds if executors.component[position] != master]
    weights = dict(sorted(Counter(worker.weights(others, executors)).items(), reverse=True))
    return ReusableSlot(
        number, *worker.slot, len(others), list(weights), list(weights.values()), len(others) < len(holds)
    )


def _needs(
    about: TopologySummary, executors: Executors, history: EventHistory, unassigned: list[int]
) -> list[DifferNeed]:
    needs: list[DifferNeed] = []
    for component in about.differ:
        count = sum(executors.component[position] == component for position in unassigned)
        blocked = {
            worker.node
            for worker in history.old
            if worker.state != LOST and any(executors.component[position] == component for position in worker.holds)
        }
        if count:
            needs.append(DifferNeed(component, count, sorted(blocked)))
    return needs
