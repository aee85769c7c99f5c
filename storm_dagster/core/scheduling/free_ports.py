"""Free ports of a cluster while slots are allocated."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Collection, Iterable

from storm_dagster.core.scheduling.history import Slot
from storm_dagster.model.placement_reasons import Reason, slot_rival

_Load = tuple[int, int, str]


class FreePorts:
    """Free ports by supervisor, and the least loaded supervisor.

    A heap holds supervisors by (most free ports, fewest used, lowest id); stale entries are dropped when they
    come up.
    """

    def __init__(
        self,
        supervisors: Iterable[tuple[str, str, int]],
        slots: Iterable[tuple[str, int, int]],
        isolated: Collection[str] = (),
    ) -> None:
        """``supervisors`` are (id, host, ports in all), by ascending id; ``slots`` are (supervisor id, port, number
        of topologies that hold it), by ascending port: one that is held is free for nobody else. ``isolated`` are the
        hosts that topologies are isolated on."""
        self.host: dict[str, str] = {}
        """Supervisor id -> host, by ascending id."""
        self.free: dict[str, list[int]] = {}
        self.open: dict[str, None] = {}
        """Supervisors that are not on an isolated host, by ascending id."""
        self._ports: dict[str, int] = {}
        self._reusable: set[Slot] = set()
        self._nodes_of: dict[str, list[str]] = {}
        for node, host, ports in supervisors:
            self.host[node], self._ports[node], self.free[node] = host, ports, []
            self._nodes_of.setdefault(host, []).append(node)
            if host not in isolated:
                self.open[node] = None
        for node, port, holders in slots:
            if not holders:
                self.free[node].append(port)
            elif holders == 1:
                self._reusable.add((node, port))
        self.total: int = sum(len(self.free[node]) for node in self.open)
        """Free ports of the open supervisors."""
        self._heap: list[_Load] = [self.load(node) for node in self.open]
        heapq.heapify(self._heap)

    def load(self, node: str) -> _Load:
        """The order in which supervisors get workers: most free ports first."""
        free = len(self.free[node])
        return (-free, self._ports[node] - free, node)

    def nodes_of(self, hosts: Iterable[str | None]) -> list[str]:
        """Supervisors on these hosts, by ascending id."""
        return sorted({node for host in hosts if host is not None for node in self._nodes_of.get(host, ())})

    def has(self, slot: Slot) -> bool:
        """Whether the slot is free."""
        return slot[1] in self.free.get(slot[0], ())

    def may_keep(self, slot: Slot) -> bool:
        """Whether the slot, held by one topology, exists and is nobody else's."""
        return slot in self._reusable

    def take(self, slot: Slot) -> None:
        """Mark the slot as used."""
        self.free[slot[0]].remove(slot[1])
        self._changed(slot[0], -1)

    def put(self, slot: Slot) -> None:
        """Mark the slot as free."""
        insort(self.free[slot[0]], slot[1])
        self._changed(slot[0], 1)

    def _changed(self, node: str, step: int) -> None:
        if node in self.open:
            self.total += step
            heapq.heappush(self._heap, self.load(node))

    def best(self, within: list[str] | None) -> tuple[str, Reason, str]:
        """(supervisor for the next worker, what decided, against whom), while there is a free port.

        ``within`` restricts the choice; ``None`` means all open supervisors.
        """
        first, second = self._two_of(within) if within is not None else self._top_two()
        if second is None:
            return first[2], Reason.SLOT_ONLY, ""
        if first[0] != second[0]:
            why = Reason.SLOT_MOST_FREE
        else:
            why = Reason.SLOT_FEWEST_USED if first[1] != second[1] else Reason.SLOT_LOWEST_ID
        return first[2], why, slot_rival(why, first, second)

    def _two_of(self, nodes: list[str]) -> tuple[_Load, _Load | None]:
        loads = heapq.nsmallest(2, (self.load(node) for node in nodes if self.free[node]))
        return loads[0], loads[1] if len(loads) > 1 else None

    def _top_two(self) -> tuple[_Load, _Load | None]:
        first = self._pop()
        assert first is not None
        second = self._pop(first[2])
        heapq.heappush(self._heap, first)
        if second is not None:
            heapq.heappush(self._heap, second)
        return first, second

    def _pop(self, other_than: str | None = None) -> _Load | None:
        """Pop the next current entry with a free port; copies of an entry already popped are dropped."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if entry[0] and entry[2] != other_than and entry == self.load(entry[2]):
                return entry
        return None
