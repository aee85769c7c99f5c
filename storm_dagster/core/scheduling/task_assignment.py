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
    """What slot allocation gave to a topology."""

    slots: list[AllocatedSlot] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    """Old workers that live and whose slots are released."""
    refusal: Refusal | None = None


class TaskAssignment:
    """Assignment of one topology's executors to workers; ``out`` are its rows, one for each worker.

    A row has the worker's slot, the first tasks of its executors (``units``) with the reason of
    each, and its resources; ``number`` is its place among equals, ``against`` the next best
    supervisor for its slot.
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
        self.out: list[Row] = []

    def fail(self, refusal: Refusal) -> None:
        """List the executors that have no worker now; in a rebalance all others stay where they
        are.
        """
        without = self.history.needed
        if self.about.event == "rebalance":
            held = {position for worker in self.history.old for position in worker.holds}
            without = [position for position in without if position not in held]
        units = [self.executors.unit[position] for position in without]
        self.out.append({"node": None, "text": json.dumps(refusal._asdict()), "units": units})

    def stay(self) -> None:
        """List the workers that the event does not touch."""
        for number, worker in enumerate(self.history.old):
            if worker.state == LOST or number in self.freed or not worker.holds:
                continue
            kept = worker.state == KEPT
            slot_why = Reason.SLOT_KEPT if kept else Reason.SLOT_UNSTOPPED
            slot = AllocatedSlot(worker.node, worker.host, worker.port, int(slot_why))
            task_why = int(Reason.KEPT if kept else Reason.UNSTOPPED)
            self.add(slot, worker.holds, [task_why] * len(worker.holds), worker.memory, worker.cpu)

    def add(
        self,
        slot: AllocatedSlot,
        positions: list[int],
        reasons: list[int],
        memory: int = 0,
        cpu: int = 0,
    ) -> None:
        """List a worker; without resources of its own it has the topology's. One without executors
        is not listed.
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
        """Index of a reused slot -> executors that stay there."""
        reused: dict[int, Reused] = {}
        waiting: set[int] | None = None
        for index, slot in enumerate(self.slots):
            if slot.role not in ("reuse", "fuller") or slot.ref is None:
                continue
            waiting = set(unassigned) if waiting is None else waiting
            worker = self.history.old[slot.ref]
            holds = [position for position in worker.holds if position in waiting]
            limit = share + (slot.role == "fuller")
            reused[index] = Reused(slot.slot, holds, worker.weights(holds, self.executors), limit)
        return (
            keep_executors(reused, self.executors.component, apart, self.about.system)
            if reused
            else {}
        )
