"""Requested workers (``use.userdefine.assignment``, ``use.old.assignment``), and the slot request
of a topology.

The request is what slot allocation knows of a topology: it never sees tasks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from storm_dagster.core.scheduling.history import (
    KEPT,
    LOST,
    UNSTOPPED,
    EventHistory,
    OldWorker,
)
from storm_dagster.core.scheduling.units import Executors, Row, TopologySummary, worker_count
from storm_dagster.model.placement_reasons import dropped_requests
from storm_dagster.model.slot import Slot


class RequestedSlot(NamedTuple):
    """The slot that a requested worker is to get."""

    node: str | None
    """Supervisor that is tried before others of the host."""
    port: int | None
    host: str | None
    old: bool
    """By ``use.old.assignment``, not by the user."""
    size: int
    """Executors that it holds."""
    hint: Slot | None
    """Slot of the topology that would save moves when no port is asked for."""
    components: Sequence[int]


class RequestedWorker(NamedTuple):
    """A worker whose executors are given; its slot is to be found."""

    slot: RequestedSlot
    holds: list[int]
    memory: int
    cpu: int


@dataclass
class Grants:
    """Requested workers that an event grants, and the slots that it wants."""

    requested: list[RequestedWorker] = field(default_factory=list)
    count: int = 0
    """Slots wanted."""
    alone: bool = False
    """The topology master is to be placed, and alone."""
    warnings: list[str] = field(default_factory=list)
    clash: list[int] | None = None
    """(user-defined workers, old workers, room) when these are too many together."""

    def unassigned(self, needed: list[int]) -> list[int]:
        """Executors to place that no requested worker holds."""
        held = {position for wanted in self.requested for position in wanted.holds}
        return [position for position in needed if position not in held] if held else needed


def workers_to_place(
    about: TopologySummary, executors: int, masters: int, staying: int
) -> tuple[int, bool]:
    """Number of workers to place, and True if one of them is the topology master's alone.

    ``executors`` are to be placed, ``masters`` of them of the topology master; ``staying`` is the
    number of workers that stay as they are.
    """
    workers, alone = worker_count(about.workers, about.executors, about.single_master)
    alone = alone and masters > 0
    # Something is to be placed, so one worker is needed however many stay; a master that is to be
    # alone needs a second one beside the rest. Workers beyond the executors would stay empty.
    least = 2 if alone and executors > masters else 1
    return min(max(workers - staying, least), executors), alone


def grant_requests(about: TopologySummary, executors: Executors, history: EventHistory) -> Grants:
    """Grant requested workers, kind by kind, and count the slots.

    All executors of a requested worker must be to be placed, and in no other one. More requested
    workers of one kind than there are workers are dropped together, with a warning; user-defined
    and old workers that are too many together clash.
    """
    component, master = executors.component, about.master
    masters = sum(component[position] == master for position in history.needed)
    room, alone = workers_to_place(about, len(history.needed), masters, history.staying)
    grants = Grants()
    needed = set[int]() if history.is_empty else set(history.needed)
    taken: set[int] = set()
    kinds = [("use.userdefine.assignment", _user_requests(executors, history))]
    if about.use_old and about.event != "rebalance":
        kinds.append(("use.old.assignment", _old_requests(executors, history)))
    for key, requested in kinds:
        granted: list[RequestedWorker] = []
        fresh: set[int] = set()
        for wanted in requested:
            wants = set(wanted.holds)
            if wants <= needed and wants.isdisjoint(taken) and wants.isdisjoint(fresh):
                granted.append(wanted)
                fresh |= wants
        everyone = grants.requested + granted
        named = any(
            component[position] == master for wanted in everyone for position in wanted.holds
        )
        left = room - int(alone and not named)
        if len(everyone) <= left:
            grants.requested = everyone
            taken |= fresh
        elif grants.requested:
            grants.clash = [len(grants.requested), len(granted), room]
        else:
            grants.warnings.append(dropped_requests(key, len(granted), left))
    unassigned = grants.unassigned(history.needed)
    grants.count = min(room, len(grants.requested) + len(unassigned))
    grants.alone = alone and any(component[position] == master for position in unassigned)
    return grants


def _user_requests(executors: Executors, history: EventHistory) -> list[RequestedWorker]:
    if not history.entries:
        return []
    tasks = executors.tasks()
    unstopped = [worker for worker in history.old if worker.state == UNSTOPPED]
    beating = {position for worker in unstopped for position in worker.holds}
    queues: dict[int, list[int]] = {}
    for position in range(len(executors) - 1, -1, -1):
        if position not in beating:
            queues.setdefault(executors.component[position], []).append(position)
    requested: list[RequestedWorker] = []
    for entry in history.entries:
        if any(_is_met(entry, worker, executors) for worker in unstopped):
            continue
        mine: list[int] = []
        for component, count in zip(entry["components"], entry["counts"], strict=True):
            queue = queues.get(component, [])
            got = 0
            while queue and got < count:
                mine.append(queue.pop())
                got += len(tasks[mine[-1]])
        if mine:
            mine.sort()
            kinds = sorted({executors.component[position] for position in mine})
            hint = _hint(mine, entry, history)
            slot = RequestedSlot(None, entry["port"], entry["host"], False, len(mine), hint, kinds)
            requested.append(RequestedWorker(slot, mine, entry["memory"], entry["cpu"]))
    return requested


def _is_met(entry: Row, worker: OldWorker, executors: Executors) -> bool:
    """Whether a worker that still runs is what the user asked for."""
    tasks, counts = executors.tasks(), Counter[int]()
    for position in worker.holds:
        counts[executors.component[position]] += len(tasks[position])
    asked = {c: n for c, n in zip(entry["components"], entry["counts"], strict=True) if n > 0}
    return (
        entry["host"] in (None, worker.host)
        and entry["port"] in (None, worker.port)
        and entry["memory"] in (0, worker.memory)
        and entry["cpu"] in (0, worker.cpu)
        and counts == asked
    )


def _hint(mine: list[int], entry: Row, history: EventHistory) -> Slot | None:
    """The topology's own slot on the requested host that holds most of these executors already."""
    wants = set(mine)
    own = [
        worker
        for worker in history.old
        if worker.slot in history.own and worker.host == entry["host"]
    ]
    best = max(own, key=lambda worker: len(wants.intersection(worker.holds)), default=None)
    return best.slot if best is not None and not wants.isdisjoint(best.holds) else None


def _old_requests(executors: Executors, history: EventHistory) -> list[RequestedWorker]:
    if not history.old:
        return []
    known = {task for tasks in executors.tasks() for task in tasks}
    requested: list[RequestedWorker] = []
    for worker in history.old:
        if worker.state == LOST and worker.holds and worker.tasks <= known:
            kinds = sorted({executors.component[position] for position in worker.holds})
            slot = RequestedSlot(
                worker.node, worker.port, worker.host, True, len(worker.holds), None, kinds
            )
            requested.append(RequestedWorker(slot, worker.holds, worker.memory, worker.cpu))
    return requested


class ReusableSlot(NamedTuple):
    """The slot of an old worker that may be used again."""

    worker: int
    """Number of the old worker."""
    node: str
    port: int
    size: int
    """Executors that may stay there, without a topology master that is to be alone."""
    weights: Sequence[int]
    """Numbers of tasks, descending, that one executor has there, and ``numbers`` of executors that
    have so many.
    """
    numbers: Sequence[int]
    master: bool
    """Whether the topology master that is to be alone is there."""

    @property
    def slot(self) -> Slot:
        """Its supervisor and port."""
        return Slot(self.node, self.port)


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
    about: TopologySummary,
    executors: Executors,
    history: EventHistory,
    grants: Grants,
    *,
    respread: bool,
) -> SlotRequest:
    """The request of one event. With ``respread`` it may change live workers although none is
    lost.
    """
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
                worker.holds
                if monitor
                else [position for position in worker.holds if position in free],
                executors,
                about.master if grants.alone else -1,
            )
            for number, worker in enumerate(history.old)
            if about.event != "new" and worker.state == (KEPT if monitor else LOST)
        ],
        needs=_differ_needs(
            about,
            _units_of(about.differ, unassigned, executors),
            _blocked_supervisors(about.differ, history, executors),
        ),
        fixed=[len(worker.holds) for worker in history.old if worker.state == UNSTOPPED],
        total=len(executors),
        missing=len(history.needed),
        unassigned=len(unassigned),
        clash=grants.clash,
    )


def _reusable(
    number: int, worker: OldWorker, holds: list[int], executors: Executors, master: int
) -> ReusableSlot:
    others = [position for position in holds if executors.component[position] != master]
    weights = dict(sorted(Counter(worker.weights(others, executors)).items(), reverse=True))
    return ReusableSlot(
        number,
        *worker.slot,
        len(others),
        list(weights),
        list(weights.values()),
        len(others) < len(holds),
    )


def slot_request_without_history(
    about: TopologySummary, *, grants_requests: bool, respread: bool
) -> SlotRequest:
    """The request of an event without assignment and user-defined workers.

    It is a function of the summary: all executors are to be placed, and nothing is kept. Without
    ``grants_requests`` the strategy counts its workers itself.
    """
    total = sum(about.units)
    masters = about.units[about.master] if about.master >= 0 else 0
    count = 0
    alone = False
    if grants_requests:
        count, alone = workers_to_place(about, total, masters, 0)
    return SlotRequest(
        unchanged=not total and not respread,
        wanted=count,
        staying=0,
        alone=alone,
        requested=[],
        own=[],
        reusable=[],
        needs=_differ_needs(about, dict(enumerate(about.units)), {}),
        fixed=[],
        total=total,
        missing=total,
        unassigned=total,
        clash=None,
    )


def _differ_needs(
    about: TopologySummary, units: Mapping[int, int], blocked: Mapping[int, set[str]]
) -> list[DifferNeed]:
    """Needs of the components with executors to place; ``units`` and ``blocked`` by component."""
    needs: list[DifferNeed] = []
    for component in about.differ:
        count = units.get(component, 0)
        if count:
            needs.append(DifferNeed(component, count, sorted(blocked.get(component, ()))))
    return needs


def _units_of(
    components: Sequence[int], positions: Sequence[int], executors: Executors
) -> dict[int, int]:
    """Component -> number of its executors at these positions."""
    counts = dict.fromkeys(components, 0)
    for component in components:
        counts[component] = sum(
            executors.component[position] == component for position in positions
        )
    return counts


def _blocked_supervisors(
    components: Sequence[int], history: EventHistory, executors: Executors
) -> dict[int, set[str]]:
    """Component -> supervisors with a worker that stays and holds one of its executors."""
    blocked: dict[int, set[str]] = {component: set() for component in components}
    for worker in history.old:
        if worker.state == LOST:
            continue
        for position in worker.holds:
            component = executors.component[position]
            if component in blocked:
                blocked[component].add(worker.node)
    return blocked
