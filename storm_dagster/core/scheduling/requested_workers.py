"""Requested workers, and the slot request of a topology.

Workers are requested by ``use.userdefine.assignment`` and ``use.old.assignment``. The request is
the only input of slot allocation from a topology: the allocation never sees tasks.
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
    """Desired slot of a requested worker."""

    node: str | None
    """Supervisor that is tried before others of the host."""
    port: int | None
    """``None``: any port."""
    host: str | None
    """``None``: any host, in which case it gets one of the new slots."""
    old: bool
    """By ``use.old.assignment``, not by the user."""
    size: int
    """Executors that it holds."""
    hint: Slot | None
    """Slot of the topology that saves moves, for a worker without a requested port."""
    components: Sequence[int]
    """Components of its executors, ascending."""


class RequestedWorker(NamedTuple):
    """A worker whose executors are chosen, and whose slot is to be allocated."""

    slot: RequestedSlot
    holds: list[int]
    """Executors in it, ascending."""
    memory: int
    """Bytes; 0: those of the topology, as for ``cpu``."""
    cpu: int


@dataclass
class Grants:
    """Requested workers that an event grants, and the slots that it wants."""

    requested: list[RequestedWorker] = field(default_factory=list)
    count: int = 0
    """Slots wanted."""
    master_alone: bool = False
    """The topology master is to be placed, and alone."""
    warnings: list[str] = field(default_factory=list)
    """Requests that were dropped, in words."""
    clash: list[int] | None = None
    """(user-defined workers, old workers, room) when these are too many together."""

    def unassigned(self, needed: list[int]) -> list[int]:
        """Executors to place that no requested worker holds."""
        requested: set[int] = set()
        for worker in self.requested:
            requested.update(worker.holds)
        if not requested:
            return needed
        return [position for position in needed if position not in requested]


def workers_to_place(
    about: TopologySummary, executors: int, masters: int, staying: int
) -> tuple[int, bool]:
    """Number of workers to place, and True if one is the topology master's alone.

    ``executors`` are to be placed, ``masters`` of them of the topology master; ``staying`` is the
    number of workers that stay unchanged.
    """
    workers, master_alone = worker_count(about.workers, about.executors, about.single_master)
    if not masters:
        master_alone = False
    # There are executors to place, so one worker is needed even if enough workers stay; a master
    # that is to be alone needs a second worker beside it. More workers than executors would be
    # empty.
    minimum = 2 if master_alone and executors > masters else 1
    return min(max(workers - staying, minimum), executors), master_alone


def request_keys(about: TopologySummary) -> list[str]:
    """Conf keys of a topology by which it requests workers that not every strategy grants."""
    keys: list[str] = []
    if about.user_workers:
        keys.append("use.userdefine.assignment")
    if about.differ_names:
        keys.append(f"task.on.differ.node ({', '.join(about.differ_names)})")
    if about.single_master:
        keys.append("topology.master.single.worker")
    return keys


def grant_requests(about: TopologySummary, executors: Executors, history: EventHistory) -> Grants:
    """Grant requested workers, kind by kind, and count the slots.

    A worker is granted only if all its executors are to be placed, and are in no worker granted
    before. If one kind requests more workers than there are, all workers of this kind are dropped,
    with a warning. User-defined and old workers that are too many together clash.
    """
    masters = [
        position for position in history.needed if executors.component[position] == about.master
    ]
    room, master_alone = workers_to_place(about, len(history.needed), len(masters), history.staying)
    grants = Grants()
    free = set[int]() if history.is_empty else set(history.needed)
    kinds = [("use.userdefine.assignment", _user_requests(executors, history))]
    if about.use_old and about.event != "rebalance":
        kinds.append(("use.old.assignment", _old_requests(executors, history)))
    for key, requested in kinds:
        granted: list[RequestedWorker] = []
        still_free = set(free)
        for worker in requested:
            if still_free.issuperset(worker.holds):
                granted.append(worker)
                still_free.difference_update(worker.holds)
        candidates = grants.requested + granted
        # A master that is to be alone, and that no candidate holds, needs one of the workers.
        master_requested = any(_holds_any(worker, masters) for worker in candidates)
        max_requests = room - int(master_alone and not master_requested)
        if len(candidates) <= max_requests:
            grants.requested = candidates
            free = still_free
        elif grants.requested:
            # User-defined workers are granted already. The strategy refuses the topology.
            grants.clash = [len(grants.requested), len(granted), room]
        else:
            grants.warnings.append(dropped_requests(key, len(granted), max_requests))
    unassigned = grants.unassigned(history.needed)
    grants.count = min(room, len(grants.requested) + len(unassigned))
    grants.master_alone = master_alone and not set(masters).isdisjoint(unassigned)
    return grants


def _holds_any(worker: RequestedWorker, positions: Sequence[int]) -> bool:
    return not set(positions).isdisjoint(worker.holds)


def _user_requests(executors: Executors, history: EventHistory) -> list[RequestedWorker]:
    """The workers of ``use.userdefine.assignment``, without those that an unstopped worker meets.

    An entry takes executors with the lowest task ids of each component, until they have as many
    tasks as it names. Executors in unstopped workers, and of earlier entries, are not taken. An
    entry that finds none is left out.
    """
    if not history.entries:
        return []
    tasks = executors.tasks()
    unstopped = [worker for worker in history.old if worker.state == UNSTOPPED]
    running: set[int] = set()
    for worker in unstopped:
        running.update(worker.holds)
    # Component -> its executors, descending: the last one is taken first.
    queues: dict[int, list[int]] = {}
    for position in range(len(executors) - 1, -1, -1):
        if position not in running:
            queues.setdefault(executors.component[position], []).append(position)
    requested: list[RequestedWorker] = []
    for entry in history.entries:
        if any(_is_met(entry, worker, executors) for worker in unstopped):
            continue
        positions: list[int] = []
        for component, count in zip(entry["components"], entry["counts"], strict=True):
            queue = queues.get(component, [])
            assigned = 0
            while queue and assigned < count:
                position = queue.pop()
                positions.append(position)
                assigned += len(tasks[position])
        if positions:
            positions.sort()
            slot = RequestedSlot(
                node=None,
                port=entry["port"],
                host=entry["host"],
                old=False,
                size=len(positions),
                hint=_hint(positions, entry, history),
                components=sorted({executors.component[position] for position in positions}),
            )
            requested.append(RequestedWorker(slot, positions, entry["memory"], entry["cpu"]))
    return requested


def _is_met(entry: Row, worker: OldWorker, executors: Executors) -> bool:
    """True if a worker that still runs is the one that the user requested.

    ``entry`` is a row of a user-defined worker; what it leaves open does not count.
    """
    tasks = executors.tasks()
    counts = Counter[int]()
    for position in worker.holds:
        counts[executors.component[position]] += len(tasks[position])
    entry_counts = zip(entry["components"], entry["counts"], strict=True)
    requested_counts = {component: count for component, count in entry_counts if count > 0}
    return (
        entry["host"] in (None, worker.host)
        and entry["port"] in (None, worker.port)
        and entry["memory"] in (0, worker.memory)
        and entry["cpu"] in (0, worker.cpu)
        and counts == requested_counts
    )


def _hint(positions: list[int], entry: Row, history: EventHistory) -> Slot | None:
    """The topology's slot on the requested host with most of these executors.

    ``None`` if none of them is in a slot there.
    """
    best: OldWorker | None = None
    best_shared = 0
    for worker in history.old:
        if worker.slot not in history.own or worker.host != entry["host"]:
            continue
        shared = len(set(positions).intersection(worker.holds))
        if shared > best_shared:
            best = worker
            best_shared = shared
    return None if best is None else best.slot


def _old_requests(executors: Executors, history: EventHistory) -> list[RequestedWorker]:
    """The lost workers all of whose tasks still exist, as ``use.old.assignment`` requests."""
    if not history.old:
        return []
    existing: set[int] = set()
    for tasks in executors.tasks():
        existing.update(tasks)
    requested: list[RequestedWorker] = []
    for worker in history.old:
        if worker.state == LOST and worker.holds and worker.tasks <= existing:
            slot = RequestedSlot(
                node=worker.node,
                port=worker.port,
                host=worker.host,
                old=True,
                size=len(worker.holds),
                hint=None,
                components=sorted({executors.component[position] for position in worker.holds}),
            )
            requested.append(RequestedWorker(slot, worker.holds, worker.memory, worker.cpu))
    return requested


class ReusableSlot(NamedTuple):
    """The slot of an old worker that may be reused."""

    worker: int
    """Number of the old worker."""
    node: str
    port: int
    size: int
    """Executors that may stay there, without a topology master that is to be alone."""
    weights: Sequence[int]
    """Numbers of tasks that one executor has there, descending."""
    numbers: Sequence[int]
    """Number of executors of each weight."""
    master: bool
    """True if the topology master, which is to be alone, is in this worker."""

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
    """The event places no executor and changes no worker: no slot is allocated."""
    wanted: int
    """Slots, requested workers and the topology master's included."""
    staying: int
    """Workers that stay unchanged, counted in ``topology.workers``."""
    master_alone: bool
    """One of the slots is for the topology master."""
    requested: Sequence[RequestedSlot]
    own: Sequence[Slot]
    """Slots of the topology that it may reuse."""
    reusable: Sequence[ReusableSlot]
    needs: Sequence[DifferNeed]
    """One for each component with ``task.on.differ.node`` and executors to place."""
    fixed: Sequence[int]
    """Sizes of unstopped workers."""
    total: int
    """Number of all executors."""
    missing: int
    """Number of executors to place."""
    unassigned: int
    """Number of executors to place that no requested worker holds."""
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
    """Return the slot request of one event.

    With ``respread`` it may change live workers although none is lost.
    """
    unassigned = grants.unassigned(history.needed)
    return SlotRequest(
        unchanged=not history.needed and not respread,
        wanted=grants.count,
        staying=history.staying,
        master_alone=grants.master_alone,
        requested=[worker.slot for worker in grants.requested],
        own=history.own,
        reusable=_reusable_slots(about, executors, history, unassigned, grants.master_alone),
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


def _reusable_slots(
    about: TopologySummary,
    executors: Executors,
    history: EventHistory,
    unassigned: Sequence[int],
    master_alone: bool,
) -> list[ReusableSlot]:
    """Slots of old workers that the event may reuse.

    In a monitor event they are those of live workers, else those of lost ones. Of a lost worker
    only executors that no requested worker holds may stay.
    """
    if about.event == "new" or not history.old:
        return []
    monitor = about.event == "monitor"
    state = KEPT if monitor else LOST
    free = set(unassigned)
    master = about.master if master_alone else -1
    slots: list[ReusableSlot] = []
    for number, worker in enumerate(history.old):
        if worker.state != state:
            continue
        holds = worker.holds
        if not monitor:
            holds = [position for position in holds if position in free]
        slots.append(_reusable(number, worker, holds, executors, master))
    return slots


def _reusable(
    number: int, worker: OldWorker, holds: list[int], executors: Executors, master: int
) -> ReusableSlot:
    """The reusable slot of a worker, of whose executors ``holds`` may stay.

    ``number`` is the number of the worker. ``master`` is the component that is to be alone, -1
    without one.
    """
    movable = [position for position in holds if executors.component[position] != master]
    by_weight = Counter(worker.weights(movable, executors))
    weights = sorted(by_weight, reverse=True)
    return ReusableSlot(
        worker=number,
        node=worker.node,
        port=worker.port,
        size=len(movable),
        weights=weights,
        numbers=[by_weight[weight] for weight in weights],
        master=len(movable) < len(holds),
    )


def slot_request_without_history(
    about: TopologySummary, *, grants_requests: bool, respread: bool
) -> SlotRequest:
    """The request of an event without assignment and user-defined workers.

    It is a function of the summary: all executors are to be placed, and none stays. Without
    ``grants_requests`` the strategy counts its workers itself.
    """
    total = sum(about.units)
    masters = about.units[about.master] if about.master >= 0 else 0
    count = 0
    master_alone = False
    if grants_requests:
        count, master_alone = workers_to_place(about, total, masters, 0)
    return SlotRequest(
        unchanged=not total and not respread,
        wanted=count,
        staying=0,
        master_alone=master_alone,
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
    """Needs of the components with executors to place.

    ``units`` and ``blocked`` are by component.
    """
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
    """Component -> supervisors where a worker that stays holds one of its executors."""
    blocked: dict[int, set[str]] = {component: set() for component in components}
    for worker in history.old:
        if worker.state == LOST:
            continue
        for position in worker.holds:
            component = executors.component[position]
            if component in blocked:
                blocked[component].add(worker.node)
    return blocked
