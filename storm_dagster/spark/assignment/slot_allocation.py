"""Slots that one topology takes from a cluster's free ports. Runs in Spark."""

from __future__ import annotations

from storm_dagster.model.placement_reasons import Reason, Refusal, short_of_slots_refusal
from storm_dagster.spark.assignment.free_ports import FreePorts, Slot
from storm_dagster.spark.assignment.history import worker_need
from storm_dagster.spark.assignment.schema import Row


class PlacementRefused(Exception):
    """The topology gets no slot."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class SlotAllocation:
    """Slots of one topology, in the order in which workers of equal merit are preferred."""

    def __init__(self, about: Row, request: Row, ports: FreePorts) -> None:
        self.about = about
        self.request = request
        self.ports = ports
        self.slots: list[Row] = []
        self.freed: list[int] = []
        """Live workers whose slots are released."""
        nodes = ports.nodes_of(about["isolation"])
        self.within: list[str] | None = nodes or None
        """Supervisors of its isolation hosts, if any is there; ``None``: all."""
        self.reserve: int = max(0, about["reserve"])
        self._released: set[Slot] = set()
        self._taken: list[Slot] = []
        for slot in request["own"]:
            self.release_own((slot["node"], slot["port"]))

    @property
    def nodes(self) -> list[str]:
        """Supervisors that it may use, by ascending id."""
        return list(self.ports.host) if self.within is None else self.within

    @property
    def free(self) -> int:
        """Slots that it may use."""
        if self.within is None:
            return self.ports.total
        return sum(len(self.ports.free[node]) for node in self.within)

    def may_use(self, slot: Slot) -> bool:
        """Whether the slot is free, and on a supervisor that it may use."""
        return self.ports.has(slot) and (self.within is None or slot[0] in self.within)

    def release_own(self, slot: Slot) -> None:
        """Free a slot that the topology holds, for this topology only, if it is still offered."""
        if self.ports.may_keep(slot) and slot not in self._released:
            self._released.add(slot)
            self.ports.put(slot)

    def take(self, slot: Slot, role: str, why: Reason, ref: int | None = None) -> None:
        """Take a free slot."""
        self.ports.take(slot)
        self._taken.append(slot)
        host = self.ports.host[slot[0]]
        self.slots.append({"node": slot[0], "port": slot[1], "host": host, "role": role, "why": int(why), "ref": ref})

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
        usable = self.free - self.reserve + self.request["staying"]
        fits = None
        for workers in (usable, usable - 1) if with_remedy else ():
            if workers >= 1 and worker_need({**self.about, "workers": workers})[0] <= usable:
                fits = workers
                break
        free = [(node, len(self.ports.free[node])) for node in self.nodes]
        name, isolated = self.about["name"], self.within is not None
        return PlacementRefused(
            short_of_slots_refusal(name, count, free, reserve=self.reserve, workers=fits, isolated=isolated)
        )
