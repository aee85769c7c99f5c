"""The choice of a worker for each executor: quotas and JStorm's selectors (``docs/decisions.md#task-choice``)."""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from storm_dagster.core.scheduling.history import Slot
from storm_dagster.core.scheduling.units import Unit
from storm_dagster.model.placement_reasons import Reason

Key = tuple[int, ...]
"""A worker as the chain of selectors sees it: smaller is better, selector by selector, its number last."""


@dataclass
class Bin:
    """A worker that is being filled."""

    slot: Slot
    host: str
    why: Reason
    memory_bytes: int
    cpu: int
    against: str = ""
    """The next best supervisor for the slot."""
    units: list[Unit] = field(default_factory=list)
    reasons: dict[int, Reason] = field(default_factory=dict)
    """First task of a unit -> why it is here."""
    locked: bool = False
    """Takes nothing more, whatever the quota: it is the topology master's own."""

    @property
    def size(self) -> int:
        """Executors in it."""
        return len(self.units)

    def put(self, unit: Unit, why: Reason) -> None:
        """Add an executor."""
        self.units.append(unit)
        self.reasons[unit.first] = why


def fair_share(sizes: Iterable[int], waiting: int) -> tuple[int, int]:
    """(average, remainder) of the final sizes when ``waiting`` executors are spread over workers of ``sizes``.

    A worker that is fuller than its share already is left out, and the others share what remains:
    afterwards ``remainder`` workers may hold one more than the average, all others hold the average.
    """
    open_sizes = sorted(sizes)
    while open_sizes:
        average, remainder = divmod(waiting + sum(open_sizes), len(open_sizes))
        if open_sizes[-1] <= average:
            return average, remainder
        # Full: it holds more than its share already.
        open_sizes.pop()
    return 0, 0


CHAIN = (
    Reason.COMPONENT_WORKER,
    Reason.COMPONENT_SUPERVISOR,
    Reason.TOTAL_WORKER,
    Reason.TOTAL_SUPERVISOR,
    Reason.INPUT_WORKER,
    Reason.INPUT_SUPERVISOR,
)
"""Reasons of the selectors, in the order in which they decide."""


class Selector:
    """Selector of a worker for one executor at a time, by quota and by the chain of selectors.

    The chain: fewest executors of the component, fewest executors, then - for user components - most
    executors of components that it trades tuples with; each compared between workers first and then
    between supervisors, counting this topology's workers of this event only. The first of equals wins.
    """

    def __init__(self, bins: list[Bin], average: int, remainder: int, related: Mapping[str, frozenset[str]]) -> None:
        self.bins = bins
        self.average = average
        self.remainder: int = remainder
        self._related = related
        self._in_bin: list[Counter[str]] = [Counter(unit.component for unit in bin.units) for bin in bins]
        self._on_node: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._node_total: Counter[str] = Counter()
        for bin in bins:
            self._on_node[bin.slot[0]].update(unit.component for unit in bin.units)
            self._node_total[bin.slot[0]] += bin.size

    def is_open(self, index: int) -> bool:
        """Whether the worker may still take an executor by its quota."""
        size = self.bins[index].size
        return size < self.average or (size == self.average and self.remainder > 0)

    def candidates(self, unit: Unit) -> list[Key]:
        """Workers with room for this executor in the order of the chain, the best first."""
        return sorted(self._key(unit, index) for index in range(len(self.bins)) if self.is_open(index))

    def place_all(self, units: Iterable[Unit]) -> None:
        """Place executors in this order, each in the first worker of the chain that has room."""
        for _, run in groupby(units, key=lambda unit: unit.component):
            waiting = list(run)
            while waiting:
                waiting = self._place_run(waiting)

    def _place_run(self, units: list[Unit]) -> list[Unit]:
        """Place executors of one component until a worker beside the chosen one closes; returns the rest.

        Within a supervisor the order of workers depends on the workers alone, and a choice changes the keys of
        one supervisor only. So two kinds of sorted lists are kept: the workers of each supervisor, and the best
        worker of each.
        """
        first = units[0]
        inner: dict[str, list[Key]] = defaultdict(list)
        for index, bin in enumerate(self.bins):
            if self.is_open(index):
                inner[bin.slot[0]].append(self._inner(first, index))
        best_of: list[Key] = []
        for keys in inner.values():
            keys.sort()
            best_of.append(self._key(first, keys[0][-1]))
        best_of.sort()
        for done, unit in enumerate(units, 1):
            best = best_of.pop(0)
            index = best[-1]
            node = self.bins[index].slot[0]
            mine = inner[node]
            rivals = best_of[:1]
            if len(mine) > 1:
                rivals.append(self._key(unit, mine[1][-1]))
            swept = self._put(unit, index, _decided(best, rivals))
            if swept:
                return units[done:]
            del mine[0]
            if self.is_open(index):
                insort(mine, self._inner(unit, index))
            if mine:
                insort(best_of, self._key(unit, mine[0][-1]))
        return []

    def place_apart(self, unit: Unit, blocked: frozenset[str]) -> None:
        """Place an executor on a supervisor without one of its component; the caller knows that there is one.

        ``blocked`` are further supervisors that hold one. Being apart outranks the quota: with no room
        left on such a supervisor, the best worker there takes one more.
        """
        best, *rivals = self.apart_candidates(unit, blocked)
        self._put(unit, best[-1], _decided(best, rivals[:1]))

    def apart_candidates(self, unit: Unit, blocked: frozenset[str]) -> list[Key]:
        """Workers that :meth:`place_apart` can choose from, the best first."""
        apart = [
            index
            for index, bin in enumerate(self.bins)
            if bin.slot[0] not in blocked and not self._on_node[bin.slot[0]][unit.component]
        ]
        roomy = [index for index in apart if self.is_open(index)] or apart
        return sorted(self._key(unit, index) for index in roomy)

    def _put(self, unit: Unit, index: int, why: Reason) -> bool:
        """Place it; whether it was the last that may exceed the average: all workers with the average close."""
        bin = self.bins[index]
        node = bin.slot[0]
        bin.put(unit, why)
        self._in_bin[index][unit.component] += 1
        self._on_node[node][unit.component] += 1
        self._node_total[node] += 1
        if bin.size <= self.average:
            return False
        self.remainder -= 1
        return self.remainder == 0

    def _inner(self, unit: Unit, index: int) -> Key:
        """Sort key among workers of one supervisor: counts of the supervisor are the same for all of them."""
        inside = self._in_bin[index]
        related = () if unit.is_system else self._related.get(unit.component, ())
        near = sum(inside[component] for component in related)
        return (inside[unit.component], self.bins[index].size, -near, index)

    def _key(self, unit: Unit, index: int) -> Key:
        node = self.bins[index].slot[0]
        around = self._on_node[node]
        same, size, minus_near, _ = self._inner(unit, index)
        related = () if unit.is_system else self._related.get(unit.component, ())
        near = sum(around[component] for component in related)
        return (same, around[unit.component], size, self._node_total[node], minus_near, -near, index)


def _decided(best: Key, rivals: Sequence[Key]) -> Reason:
    """The selector that left no other candidate."""
    if not rivals:
        return Reason.ONLY
    rival = min(rivals)
    return next((why for why, mine, other in zip(CHAIN, best, rival, strict=False) if mine != other), Reason.FIRST)
