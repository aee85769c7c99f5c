"""Free ports of a cluster, and the slots that one topology takes from them."""

import heapq
from bisect import insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from storm_dagster.core.scheduling.free_slots import confined_to, slots_beyond
from storm_dagster.core.scheduling.requested_workers import SlotRequest
from storm_dagster.core.scheduling.reuse import Saving
from storm_dagster.core.scheduling.units import TopologySummary, worker_count
from storm_dagster.model.placement_reasons import (
    Reason,
    Refusal,
    refusal,
    short_of_slots_refusal,
    slot_rival,
)
from storm_dagster.model.slot import Slot

if TYPE_CHECKING:
    from storm_dagster.model.records import SupervisorInfo


class _Load(NamedTuple):
    """Sort key of supervisors for new workers: the least is the least loaded one."""

    minus_free: int
    """Number of free ports, negated: most come first."""
    used: int
    """Number of its other ports."""
    node: str
    """Supervisor id."""


class FreePorts:
    """Free ports by supervisor, and the least loaded supervisor.

    A heap holds supervisors by (most free ports, fewest used, lowest id). Stale entries are dropped
    when they reach the top.
    """

    def __init__(
        self,
        supervisors: Iterable[tuple[str, "SupervisorInfo"]],
        slots: Iterable[tuple[Slot, int]],
        isolated: Collection[str] = (),
    ) -> None:
        """Read supervisors and slots.

        ``supervisors`` are (id, record), by ascending id. ``slots`` are (slot, number of topologies
        that hold it), by ascending port; a slot that a topology holds is not free for others.
        ``isolated`` are the hosts that topologies are isolated on.
        """
        self.info: dict[str, SupervisorInfo] = {}
        """Supervisor id -> its record, by ascending id."""
        self.free: dict[str, list[int]] = {}
        """Supervisor id -> its free ports, ascending."""
        self.open: dict[str, None] = {}
        """Supervisors that are not on an isolated host, by ascending id."""
        self._port_counts: dict[str, int] = {}
        """Supervisor id -> number of its ports, used ones included."""
        self._reusable: set[Slot] = set()
        """Slots that exactly one topology holds."""
        self._nodes_of: dict[str, list[str]] = {}
        """Host -> its supervisors."""
        for node, info in supervisors:
            self.info[node] = info
            self.free[node] = []
            self._port_counts[node] = len(set(info.ports))
            self._nodes_of.setdefault(info.host, []).append(node)
            if info.host not in isolated:
                self.open[node] = None
        for slot, holders in slots:
            if not holders:
                self.free[slot.node].append(slot.port)
            elif holders == 1:
                self._reusable.add(slot)
        self.total: int = sum(len(self.free[node]) for node in self.open)
        """Free ports of the open supervisors."""
        self._heap: list[_Load] = [self.load(node) for node in self.open]
        """Loads of the open supervisors, some of them stale: each change adds the new load."""
        heapq.heapify(self._heap)

    def load(self, node: str) -> _Load:
        """Sort key of the supervisor for new workers: most free ports first."""
        free = len(self.free[node])
        return _Load(-free, self._port_counts[node] - free, node)

    def nodes_of(self, hosts: Iterable[str | None]) -> list[str]:
        """Supervisors on these hosts, by ascending id."""
        nodes: set[str] = set()
        for host in hosts:
            if host is not None:
                nodes.update(self._nodes_of.get(host, ()))
        return sorted(nodes)

    def has(self, slot: Slot) -> bool:
        """True if the slot is free."""
        return slot.port in self.free.get(slot.node, ())

    def may_keep(self, slot: Slot) -> bool:
        """True if the slot exists and exactly one topology holds it."""
        return slot in self._reusable

    def take(self, slot: Slot) -> None:
        """Mark the slot as used."""
        self.free[slot.node].remove(slot.port)
        self._changed(slot.node, -1)

    def put(self, slot: Slot) -> None:
        """Mark the slot as free."""
        insort(self.free[slot.node], slot.port)
        self._changed(slot.node, 1)

    def _changed(self, node: str, step: int) -> None:
        """Count ``step`` free ports more on a supervisor whose ``free`` was changed."""
        if node in self.open:
            self.total += step
            heapq.heappush(self._heap, self.load(node))

    def best(self, within: list[str] | None) -> tuple[str, Reason, str]:
        """Return (supervisor for the next worker, reason, comparison with the next best one).

        The comparison is a text for the explanation; it is empty if no other supervisor has a free
        port. There must be a free port. ``within`` restricts the choice; ``None`` means all open
        supervisors.
        """
        if within is None:
            first, second = self._top_two()
        else:
            first, second = self._two_of(within)
        if second is None:
            return first.node, Reason.SLOT_ONLY, ""
        if first.minus_free != second.minus_free:
            reason = Reason.SLOT_MOST_FREE
        elif first.used != second.used:
            reason = Reason.SLOT_FEWEST_USED
        else:
            reason = Reason.SLOT_LOWEST_ID
        return first.node, reason, slot_rival(reason, first, second)

    def _two_of(self, nodes: list[str]) -> tuple[_Load, _Load | None]:
        """Loads of the two least loaded of these supervisors; ``None`` without a second."""
        loads = heapq.nsmallest(2, (self.load(node) for node in nodes if self.free[node]))
        if len(loads) == 1:
            return loads[0], None
        return loads[0], loads[1]

    def _top_two(self) -> tuple[_Load, _Load | None]:
        """As :meth:`_two_of`, of all open supervisors; both stay in the heap."""
        first = self._pop()
        assert first is not None
        second = self._pop(first.node)
        heapq.heappush(self._heap, first)
        if second is not None:
            heapq.heappush(self._heap, second)
        return first, second

    def _pop(self, other_than: str | None = None) -> _Load | None:
        """Pop the next load that is current and has a free port; ``None`` without any.

        Stale loads are dropped, and so are copies of the load of ``other_than``, which the caller
        has popped already.
        """
        while self._heap:
            entry = heapq.heappop(self._heap)
            is_current = entry == self.load(entry.node)
            if entry.minus_free and entry.node != other_than and is_current:
                return entry
        return None


class PlacementRefused(Exception):
    """Error for a topology that gets no slot, with reason and remedy.

    It never leaves the planner.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass
class AllocatedSlot:
    """A slot that a topology gets."""

    node: str
    host: str
    port: int
    why: int
    """Number of the reason, a ``Reason.SLOT_...``."""
    role: str = "empty"
    """``empty``, ``requested``, ``reuse``, ``fuller`` or ``master``.

    ``fuller`` is a reused slot with one executor more than the share.
    """
    ref: int | None = None
    """Number of the requested or old worker."""
    text: str = ""
    """Comparison with the next best supervisor, for the explanation; empty without one."""

    @property
    def slot(self) -> Slot:
        """Its supervisor and port."""
        return Slot(self.node, self.port)


class SlotAllocation:
    """Slots of one topology; of equal workers those in the first slots are preferred."""

    def __init__(self, about: TopologySummary, request: SlotRequest, ports: FreePorts) -> None:
        self.about = about
        self.request = request
        self.ports = ports
        self.slots: list[AllocatedSlot] = []
        """Slots that the topology takes, in this order."""
        self.freed: list[int] = []
        """Numbers of the live workers whose slots are released."""
        hosts = {node: info.host for node, info in ports.info.items()} if about.isolation else {}
        self.within: list[str] | None = confined_to(hosts, about.isolation)
        """Supervisors of its isolation hosts, if one is alive.

        ``None``: all supervisors on hosts that no topology is isolated on.
        """
        self.reserve: int = max(0, about.reserve)
        """Slots that must stay free (``jstorm.reserve.workers``)."""
        self._released: set[Slot] = set()
        """Own slots that are free for this topology only."""
        self._taken: list[Slot] = []
        # The topology may choose its own slots once more; :meth:`close` withdraws those left over.
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

    @property
    def available(self) -> int:
        """Slots that it may take: those that must stay free are left out."""
        return slots_beyond(self.free, self.reserve)

    def may_use(self, slot: Slot) -> bool:
        """True if the slot is free, and on a supervisor that it may use."""
        return slot.port in self.ports_of(slot.node)

    def may_keep(self, slot: Slot) -> bool:
        """True if a slot that the topology holds is on a supervisor that can release it."""
        return self.ports.may_keep(slot) and self._may_be_on(slot.node)

    def release_own(self, slot: Slot) -> None:
        """Free a slot that the topology holds, for this topology only.

        A slot that its supervisor no longer offers is ignored.
        """
        if self.ports.may_keep(slot) and slot not in self._released:
            self._released.add(slot)
            self.ports.put(slot)

    def ports_of(self, node: str) -> list[int]:
        """Free ports of a supervisor, ascending; none if the topology cannot use it."""
        return self.ports.free.get(node, []) if self._may_be_on(node) else []

    def _may_be_on(self, node: str) -> bool:
        if self.within is None:
            return node in self.ports.open
        return node in self.within

    def savings(self, share: int) -> list[Saving]:
        """Old slots that can be reused, with the moves that this saves.

        ``share`` is the one of :class:`Saving`.
        """
        reusable = self.request.reusable
        usable = [worker for worker in reusable if worker.size and self.may_use(worker.slot)]
        return [Saving(worker, share) for worker in usable]

    def take(
        self,
        slot: Slot,
        reason: Reason,
        role: str = "empty",
        ref: int | None = None,
        text: str = "",
    ) -> None:
        """Take a free slot."""
        self.ports.take(slot)
        self._taken.append(slot)
        host = self.ports.info[slot.node].host
        self.slots.append(AllocatedSlot(slot.node, host, slot.port, int(reason), role, ref, text))

    def close(self, refused: bool) -> None:
        """End the allocation: withdraw the slots that were free for this topology only.

        A refused topology also returns the slots that it took.
        """
        for slot in self._released:
            if self.ports.has(slot):
                self.ports.take(slot)
        if refused:
            for slot in self._taken:
                if slot not in self._released:
                    self.ports.put(slot)

    def short(self, count: int, with_remedy: bool) -> PlacementRefused:
        """The error for too few slots for ``count`` workers.

        ``with_remedy``: it names the number of workers that the slots suffice for.
        """
        about = self.about
        usable = self.available + self.request.staying
        fits = self._fitting_workers(usable) if with_remedy else None
        free = [(node, len(self.ports.free[node])) for node in self.nodes]
        isolated = self.within is not None
        return PlacementRefused(
            short_of_slots_refusal(
                about.name, count, free, reserve=self.reserve, workers=fits, isolated=isolated
            )
        )

    def _fitting_workers(self, usable: int) -> int | None:
        """The largest ``topology.workers`` that needs at most ``usable`` slots.

        ``None`` without such a number.
        """
        about = self.about
        # A topology master that is to be alone needs one slot more than the workers.
        for workers in (usable, usable - 1):
            if workers < 1:
                continue
            needed, _ = worker_count(workers, about.executors, about.single_master)
            if needed <= usable:
                return workers
        return None

    def require_supervisor(self) -> None:
        """Refuse the topology when no supervisor is alive."""
        if not self.ports.info:
            raise PlacementRefused(refusal("no supervisor", self.about.name))
