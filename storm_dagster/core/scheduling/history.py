"""History of a topology: what an event leaves of its current assignment, and executors to place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from storm_dagster.core.scheduling.units import Unit
from storm_dagster.model.placement import PlacedWorker, TopologyToPlace

Slot = tuple[str, int]
"""(supervisor id, port)."""


@dataclass(frozen=True)
class OldWorker:
    """A worker of the current assignment and the executors in it now."""

    slot: Slot
    host: str
    memory_bytes: int
    cpu: int
    tasks: frozenset[int]
    """Its tasks as the assignment lists them."""
    units: tuple[Unit, ...]

    def weight(self, unit: Unit) -> int:
        """Number of the executor's tasks here: so many need not move when it stays."""
        return 1 if len(unit.tasks) == 1 else len(self.tasks.intersection(unit.tasks))


@dataclass(frozen=True)
class History:
    """Effect of an event on one topology."""

    old: tuple[OldWorker, ...]
    """All workers of the assignment, by supervisor id and port."""
    kept: tuple[OldWorker, ...]
    """Monitor only: workers without a dead task. They stay exactly as they are."""
    unstopped: tuple[OldWorker, ...]
    """Workers that beat although their supervisor is gone. They stay exactly as they are."""
    needed: tuple[Unit, ...]
    """Executors that the event places."""
    own: frozenset[Slot]
    """Slots that the topology holds, or held, and may be given again in this event."""

    @property
    def lost(self) -> tuple[OldWorker, ...]:
        """Old workers that neither stay nor keep their tasks without question."""
        staying = {worker.slot for worker in (*self.kept, *self.unstopped)}
        return tuple(worker for worker in self.old if worker.slot not in staying)


def _homes(units: Iterable[Unit], old: Iterable[PlacedWorker]) -> dict[int, Slot]:
    """First task of a unit -> the old slot that holds most of its tasks; the lower slot when equal."""
    slot_of: dict[int, Slot] = {}
    for worker in old:
        for task in worker.tasks:
            slot_of.setdefault(task, (worker.node, worker.port))
    homes: dict[int, Slot] = {}
    for unit in units:
        held = Counter(slot_of[task] for task in unit.tasks if task in slot_of)
        if held:
            homes[unit.first] = min(held, key=lambda slot: (-held[slot], slot))
    return homes


def read_history(topology: TopologyToPlace, units: tuple[Unit, ...]) -> History:
    """Read the effect of the event on each old worker and each executor."""
    old_workers = sorted(topology.old, key=lambda worker: (worker.node, worker.port))
    homes = _homes(units, old_workers)
    by_slot: dict[Slot, list[Unit]] = {}
    for unit in units:
        if unit.first in homes:
            by_slot.setdefault(homes[unit.first], []).append(unit)
    old = tuple(
        OldWorker(
            (worker.node, worker.port),
            worker.host,
            worker.memory_bytes,
            worker.cpu,
            frozenset(worker.tasks),
            tuple(by_slot.get((worker.node, worker.port), ())),
        )
        for worker in old_workers
    )
    if topology.event == "new":
        return History(old, (), (), units, frozenset(worker.slot for worker in old))
    dead = frozenset(topology.dead) if topology.event == "monitor" else frozenset()
    beating = frozenset(topology.unstopped)
    unstopped = tuple(worker for worker in old if worker.tasks & beating and not worker.tasks & dead)
    rest = tuple(worker for worker in old if worker not in unstopped)
    kept = tuple(worker for worker in rest if not worker.tasks & dead) if topology.event == "monitor" else ()
    staying = {unit.first for worker in (*kept, *unstopped) for unit in worker.units}
    needed = tuple(unit for unit in units if unit.first not in staying)
    # Judged dead by nimbus: the port of that worker is not offered in this round, for its process may not have ended.
    own = frozenset(worker.slot for worker in rest) if topology.event == "rebalance" else frozenset()
    return History(old, kept, unstopped, needed, own)


def moved_tasks(old: Iterable[PlacedWorker], new: Iterable[PlacedWorker]) -> int:
    """Number of tasks that had a slot and have another one now."""
    before = {task: (worker.node, worker.port) for worker in old for task in worker.tasks}
    return sum(
        1 for worker in new for task in worker.tasks if task in before and before[task] != (worker.node, worker.port)
    )
