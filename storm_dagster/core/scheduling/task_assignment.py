"""Assignment of one topology's executors to its slots."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from storm_dagster.core.scheduling.history import KEPT, LOST, EventHistory
from storm_dagster.core.scheduling.requested_workers import Grants
from storm_dagster.core.scheduling.reuse import Reused, keep_executors
from storm_dagster.core.scheduling.slot_allocation import AllocatedSlot
from storm_dagster.core.scheduling.units import Executors, Row, TopologySummary
from storm_dagster.model.placement_reasons import Reason, Refusal


@dataclass
class Allocated:
    """Result of the slot allocation for one topology."""

    slots: list[AllocatedSlot] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    """Old workers that live and whose slots are released."""
    refusal: Refusal | None = None


class TaskAssignment:
    """Assignment of one topology's executors to workers.

    ``out`` are its rows, one for each worker. A row has the worker's slot, the first tasks of its
    executors (``units``) with the reason of each, and its resources; ``number`` is its place among
    equals, ``against`` compares its slot with the next best supervisor.
    """

    def __init__(
        self,
        about: TopologySummary,
        executors: Executors,
        history: EventHistory,
        grants: Grants,
        allocated: Allocated,
    ) -> None:
        self.about = about
        self.executors = executors
        self.history = history
        self.grants = grants
        self.slots = allocated.slots
        self.freed: frozenset[int] = frozenset(allocated.freed)
        """Numbers of live old workers whose executors are placed once more."""
        self.out: list[Row] = []

    def fail(self, refusal: Refusal) -> None:
        """Add the single row of a refused topology, with the executors that have no worker now.

        In a rebalance those with a worker stay there.
        """
        without = self.history.needed
        if self.about.event == "rebalance":
            placed: set[int] = set()
            for worker in self.history.old:
                placed.update(worker.holds)
            without = [position for position in without if position not in placed]
        units = [self.executors.unit[position] for position in without]
        self.out.append({"node": None, "text": json.dumps(refusal._asdict()), "units": units})

    def stay(self) -> None:
        """Add the rows of the workers that the event does not touch."""
        for number, worker in enumerate(self.history.old):
            if worker.state == LOST or number in self.freed or not worker.holds:
                continue
            if worker.state == KEPT:
                slot_reason = Reason.SLOT_KEPT
                task_reason = Reason.KEPT
            else:
                slot_reason = Reason.SLOT_UNSTOPPED
                task_reason = Reason.UNSTOPPED
            slot = AllocatedSlot(worker.node, worker.host, worker.port, int(slot_reason))
            reasons = [int(task_reason)] * len(worker.holds)
            self.add(slot, worker.holds, reasons, worker.memory, worker.cpu)

    def add(
        self,
        slot: AllocatedSlot,
        positions: list[int],
        reasons: list[int],
        memory: int = 0,
        cpu: int = 0,
    ) -> None:
        """Add the row of a worker, unless it has no executors.

        ``positions`` are its executors, ``reasons`` those of each (numbers of ``Reason``).
        Resources of 0 are replaced by the topology's.
        """
        if positions:
            self.out.append(
                {
                    "node": slot.node,
                    "host": slot.host,
                    "port": slot.port,
                    "why": slot.why,
                    "number": len(self.out),
                    "against": slot.text,
                    "memory": memory if memory and memory > 0 else self.about.memory,
                    "cpu": cpu if cpu and cpu > 0 else self.about.cpu,
                    "units": [self.executors.unit[position] for position in positions],
                    "reasons": reasons,
                    "text": None,
                }
            )

    def stays(
        self, unassigned: Iterable[int], share: int, apart: Mapping[int, set[str]]
    ) -> dict[int, list[int]]:
        """Index of a reused slot -> those of the ``unassigned`` executors that stay there.

        ``share`` is the maximum number for a slot; a ``fuller`` one takes one more. ``apart`` is
        that of :func:`keep_executors`.
        """
        reused: dict[int, Reused] = {}
        # The set is made only if there is a reused slot: most events have none.
        waiting: set[int] | None = None
        for index, slot in enumerate(self.slots):
            if slot.role not in ("reuse", "fuller") or slot.ref is None:
                continue
            if waiting is None:
                waiting = set(unassigned)
            worker = self.history.old[slot.ref]
            holds = [position for position in worker.holds if position in waiting]
            limit = share + (slot.role == "fuller")
            reused[index] = Reused(slot.slot, holds, worker.weights(holds, self.executors), limit)
        if not reused:
            return {}
        return keep_executors(reused, self.executors.component, apart, self.about.system)
