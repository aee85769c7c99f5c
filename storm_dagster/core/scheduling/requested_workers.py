"""Requested workers: ``use.userdefine.assignment`` and ``use.old.assignment``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from storm_dagster.core.scheduling.history import LOST, UNSTOPPED, EventHistory, OldWorker, Slot
from storm_dagster.core.scheduling.units import Executors, Row, TopologySummary, worker_count
from storm_dagster.model.placement_reasons import dropped_requests


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


def grant_requests(about: TopologySummary, executors: Executors, history: EventHistory) -> Grants:
    """Grant requested workers, kind by kind, and count the slots.

    All executors of a requested worker must be to be placed, and in no other one. More requested workers of one
    kind than there are workers are dropped together, with a warning; user-defined and old workers that are
    too many together clash.
    """
    workers, alone = worker_count(about.workers, about.executors, about.single_master)
    component, master = executors.component, about.master
    masters = sum(component[position] == master for position in history.needed)
    # Something is to be placed, so one worker is needed however many stay; a master that is to be alone
    # needs a second one beside the rest. Workers beyond the executors would stay empty.
    least = 2 if alone and masters and len(history.needed) > masters else 1
    room = min(max(workers - history.staying, least), len(history.needed))
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
        named = any(component[position] == master for wanted in everyone for position in wanted.holds)
        left = room - int(bool(alone and masters and not named))
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
    best, most = None, 0
    for worker in history.old:
        share = len(wants.intersection(worker.holds))
        if worker.slot in history.own and worker.host == entry["host"] and share > most:
            best, most = worker.slot, share
    return best


def _old_requests(executors: Executors, history: EventHistory) -> list[RequestedWorker]:
    if not history.old:
        return []
    known = {task for tasks in executors.tasks() for task in tasks}
    requested: list[RequestedWorker] = []
    for worker in history.old:
        if worker.state == LOST and worker.holds and worker.tasks <= known:
            kinds = sorted({executors.component[position] for position in worker.holds})
            slot = RequestedSlot(worker.node, worker.port, worker.host, True, len(worker.holds), None, kinds)
            requested.append(RequestedWorker(slot, worker.holds, worker.memory, worker.cpu))
    return requested
