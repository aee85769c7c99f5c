"""The choice of a worker for each executor: quotas and the chain of selectors (JStorm f, seed 004)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from storm_dagster.core.scheduling.history import Slot
from storm_dagster.core.scheduling.units import Unit
from storm_dagster.model.placement_reasons import Reason

__all__ = ["Bin", "Selector", "water_level"]


@dataclass
class Bin:
    """A worker that is being filled."""

    slot: Slot
    host: str
    why: Reason
    memory_bytes: int
    cpu: int
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
        """Adds an executor."""
        self.units.append(unit)
        self.reasons[unit.first] = why


def water_level(sizes: Iterable[int], waiting: int) -> tuple[int, int]:
    """(average, remainder) of the final sizes when ``waiting`` executors are poured over workers of ``sizes``.

    A worker that is fuller than its share already is left out, and the others share what remains:
    afterwards ``remainder`` workers may hold one more than the average, all others hold the average.
    """
    open_sizes = sorted(sizes)
    while open_sizes:
        average, remainder = divmod(waiting + sum(open_sizes), len(open_sizes))
        if open_sizes[-1] <= average:
            return average, remainder
        # Full: at least its share and one more, so it is no part of what is shared out.
        open_sizes.pop()
    return 0, 0


_STEPS = (
    Reason.COMPONENT_WORKER,
    Reason.COMPONENT_SUPERVISOR,
    Reason.TOTAL_WORKER,
    Reason.TOTAL_SUPERVISOR,
    Reason.INPUT_WORKER,
    Reason.INPUT_SUPERVISOR,
)


class Selector:
    """Puts executors into workers, one at a time, by quota and by the chain of selectors.

    The chain: fewest executors of the component, fewest executors, then - for user components - most
    executors of components that it trades tuples with; each compared between workers first and then
    between supervisors, counting this topology's workers of this event only. The first of equals wins.
    """

    def __init__(
        self, bins: list[Bin], average: int, remainder: int, related: Mapping[str, frozenset[str]]
    ) -> None:
        self.bins = bins
        self.average = average
        self.remainder = remainder
        self._related = related
        self._in_bin: list[Counter[str]] = [Counter(unit.component for unit in bin.units) for bin in bins]
        self._on_node: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for bin in bins:
            self._on_node[bin.slot[0]].update(unit.component for unit in bin.units)

    def is_open(self, index: int) -> bool:
        """Whether the worker may still take an executor by its quota."""
        size = self.bins[index].size
        return size < self.average or (size == self.average and self.remainder > 0)

    def place(self, unit: Unit) -> None:
        """Puts an executor where the chain wants it, among workers with room."""
        self._put(unit, [index for index in range(len(self.bins)) if self.is_open(index)])

    def place_apart(self, unit: Unit, blocked: frozenset[str]) -> None:
        """Puts an executor on a supervisor without one of its component; the caller knows that there is one.

        ``blocked`` are further supervisors that hold one. Being apart outranks the quota: with no room
        left on such a supervisor, the best worker there takes one more.
        """
        apart = [
            index
            for index, bin in enumerate(self.bins)
            if bin.slot[0] not in blocked and not self._on_node[bin.slot[0]][unit.component]
        ]
        self._put(unit, [index for index in apart if self.is_open(index)] or apart)

    def _put(self, unit: Unit, candidates: list[int]) -> None:
        keys = {index: self._key(unit, index) for index in candidates}
        best = min(candidates, key=lambda index: (keys[index], index))
        others = [index for index in candidates if index != best]
        bin = self.bins[best]
        bin.put(unit, self._decided(keys[best], [keys[index] for index in others]))
        self._in_bin[best][unit.component] += 1
        self._on_node[bin.slot[0]][unit.component] += 1
        if bin.size > self.average:
            self.remainder -= 1

    def _key(self, unit: Unit, index: int) -> tuple[int, ...]:
        inside, around = self._in_bin[index], self._on_node[self.bins[index].slot[0]]
        key = (inside[unit.component], around[unit.component], inside.total(), around.total())
        if unit.is_system:
            return key
        related = self._related.get(unit.component, frozenset())
        return (
            *key,
            -sum(inside[component] for component in related),
            -sum(around[component] for component in related),
        )

    @staticmethod
    def _decided(best: tuple[int, ...], others: list[tuple[int, ...]]) -> Reason:
        """Which selector left no other candidate."""
        if not others:
            return Reason.ONLY
        for position, reason in enumerate(_STEPS[: len(best)]):
            others = [key for key in others if key[position] == best[position]]
            if not others:
                return reason
        return Reason.FIRST
