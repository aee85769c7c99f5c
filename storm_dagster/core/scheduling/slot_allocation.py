"""Slots that one topology takes from a cluster's free ports."""

from __future__ import annotations

from dataclasses import dataclass

from storm_dagster.core.scheduling.free_ports import FreePorts
from storm_dagster.core.scheduling.history import Slot
from storm_dagster.core.scheduling.reuse import Saving
from storm_dagster.core.scheduling.slot_requests import SlotRequest
from storm_dagster.core.scheduling.units import TopologySummary, worker_count
from storm_dagster.model.placement_reasons import Reason, Refusal, refusal, short_of_slots_refusal


class PlacementRefused(Exception):
    """The topology gets no slot; the text says why and what to do. Never leaves the planner."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass
class AllocatedSlot:
    """A slot that a topology was given."""

    node: str
    host: str
    port: int
    why: int
    """Number of the reason."""
    role: str = "empty"
    """``empty``, ``requested``, ``reuse``, ``fuller`` (reused, with one executor more than the share) or ``master``."""
    ref: int | None = None
    """Number of the requested or old worker."""
    text: str = ""
    """The next best supervisor for it."""

    @property
    def slot(self) -> Slot:
        """Its supervisor and port."""
        return (self.node, self.port)


class SlotAllocation:
    """Slots of one topology, in the order in which workers of equal merit are preferred."""

    def __init__(self, about: TopologySummary, request: SlotRequest, ports: FreePorts) -> None:
        self.about = about
        self.request = request
        self.ports = ports
        self.slots: list[AllocatedSlot] = []
        self.freed: list[int] = []
        """Live workers whose slots are released."""
        nodes = ports.nodes_of(about.isolation)
        self.within: list[str] | None = nodes or None
        """Supervisors of its isolation hosts, if any is there; ``None``: all that no topology is isolated on."""
        self.reserve: int = max(0, about.reserve)
        self._released: set[Slot] = set()
        self._taken: list[Slot] = []
        for slot in sorted(request.own):
            self.release_own(slot)

    @property
    def nodes(self) -> list[str]:
        """Supervisors that it may use, by ascending id."""
        return list(self.ports.open) if self.within is None else self.within

    @property
    def free(self) -> int:
        """Slots that it may use."""
        if self.within is None:
            return self.ports.total
        return sum(len(self.ports.free[node]) for node in self.within)

    def may_use(self, slot: Slot) -> bool:
        """Whether the slot is free, and on a supervisor that it may use."""
        return slot[1] in self.ports_of(slot[0])

    def may_keep(self, slot: Slot) -> bool:
        """Whether a slot that the topology holds is on a usable supervisor, which can release it."""
        return self.ports.may_keep(slot) and self._may_be_on(slot[0])

    def release_own(self, slot: Slot) -> None:
        """Free a slot that the topology holds, for this topology only, if it is still offered."""
        if self.ports.may_keep(slot) and slot not in self._released:
            self._released.add(slot)
            self.ports.put(slot)

    def ports_of(self, node: str) -> list[int]:
        """Free ports of a supervisor, ascending; none when the topology may not use it."""
        return self.ports.free.get(node, []) if self._may_be_on(node) else []

    def _may_be_on(self, node: str) -> bool:
        return node in (self.ports.open if self.within is None else self.within)

    def savings(self, share: int) -> list[Saving]:
        """Old slots that may be used again, with what that saves; ``share`` as in :class:`Saving`."""
        usable = (worker for worker in self.request.reusable if worker.size and self.may_use(worker.slot))
        return [Saving(worker, share) for worker in usable]

    def take(self, slot: Slot, why: Reason, role: str = "empty", ref: int | None = None, text: str = "") -> None:
        """Take a free slot."""
        self.ports.take(slot)
        self._taken.append(slot)
        self.slots.append(AllocatedSlot(slot[0], self.ports.host[slot[0]], slot[1], int(why), role, ref, text))

    def close(self, refused: bool) -> None:
        """Leave to the next topology what is free for all; release everything when it was refused."""
        for slot in self._released:
            if self.ports.has(slot):
                self.ports.take(slot)
        if refused:
            for slot in self._taken:
                if slot not in self._released:
                    self.ports.put(slot)

    def short(self, count: int, with_remedy: bool) -> PlacementRefused:
        """The error for too few slots for ``count`` workers."""
        about = self.about
        usable = self.free - self.reserve + self.request.staying
        fits = None
        for workers in (usable, usable - 1) if with_remedy else ():
            if workers >= 1 and worker_count(workers, about.executors, about.single_master)[0] <= usable:
                fits = workers
                break
        free = [(node, len(self.ports.free[node])) for node in self.nodes]
        isolated = self.within is not None
        return PlacementRefused(
            short_of_slots_refusal(about.name, count, free, reserve=self.reserve, workers=fits, isolated=isolated)
        )

    def require_supervisor(self) -> None:
        """Refuse the topology when no supervisor is alive."""
        if not self.ports.host:
            raise PlacementRefused(refusal("no supervisor", self.about.name))
