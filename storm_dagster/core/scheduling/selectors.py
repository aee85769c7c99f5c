"""Choice of a worker for each executor, by quota and by the chain of selectors
(``docs/decisions.md#task-choice``).

For a run of executors of one component the chain is a lexicographic order of workers. Between
supervisors and inside a supervisor it is kept in heaps, so that a topology of a hundred thousand
tasks on thousands of workers takes a logarithmic step for each, where trying all workers would take
thousands.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from storm_dagster.model.placement_reasons import Reason

_Inner = tuple[int, int, int, int]
"""(of the component, in all, minus related, number) of a worker: its order inside its
supervisor.
"""
Key = tuple[int, int, int, int, int, int, int]
"""The same with the supervisor's counts in between: the order of the whole chain, the worker's
number last.
"""

CHAIN = (
    Reason.COMPONENT_WORKER,
    Reason.COMPONENT_SUPERVISOR,
    Reason.TOTAL_WORKER,
    Reason.TOTAL_SUPERVISOR,
    Reason.INPUT_WORKER,
    Reason.INPUT_SUPERVISOR,
    Reason.FIRST,
)
"""Reasons of the selectors, in the order in which they decide."""


class FilledWorker:
    """A worker that is being filled."""

    __slots__ = ("counts", "node", "positions", "reasons")

    def __init__(self, node: str) -> None:
        self.node: str = node
        self.positions: list[int] = []
        self.reasons: list[int] = []
        self.counts: dict[int, int] = {}

    def put(self, position: int, component: int, why: int) -> None:
        """Add an executor."""
        self.positions.append(position)
        self.reasons.append(why)
        self.counts[component] = self.counts.get(component, 0) + 1


def fair_share(sizes: Iterable[int], waiting: int) -> tuple[int, int]:
    """(share, remainder): ``remainder`` workers get one more than the share; fuller ones are left
    out.
    """
    level = sorted(sizes, reverse=True)
    total = waiting + sum(level)
    for skipped, size in enumerate(level):
        share, remainder = divmod(total, len(level) - skipped)
        if size <= share:
            return share, remainder
        total -= size
    return 0, 0


@dataclass(eq=False)
class WorkerSelector:
    """Selector of workers with room for the executors of one topology, by quota and by the chain of
    selectors.

    The chain: fewest executors of the component, fewest executors, then - for user components -
    most executors of components that it trades tuples with; each compared between workers first and
    then between supervisors, counting this topology's workers of this event only. The first of
    equals wins.
    """

    workers: Sequence[FilledWorker]
    share: int
    remainder: int
    _related: Sequence[Sequence[int]]
    _system: Collection[int]

    def __post_init__(self) -> None:
        self._groups: dict[str, list[int]] = {}
        self._totals: dict[str, int] = {}
        self._counts: dict[str, dict[int, int]] = {}
        for number, worker in enumerate(self.workers):
            self._groups.setdefault(worker.node, []).append(number)
            self._totals[worker.node] = self._totals.get(worker.node, 0) + len(worker.positions)
            around = self._counts.setdefault(worker.node, {})
            for component, count in worker.counts.items():
                around[component] = around.get(component, 0) + count

    def place(
        self, waiting: Iterable[int], component: Sequence[int], apart: Mapping[int, set[str]]
    ) -> None:
        """Select workers for executors that must be apart, then the user's, then the system's; each
        by task id.
        """
        users: list[int] = []
        systems: list[int] = []
        for position in waiting:
            kind = component[position]
            if kind in apart:
                keys = heapq.nsmallest(2, self.apart_keys(kind, apart[kind]))
                self._add(keys[0][-1], position, kind, _difference(keys[0], keys[1:]))
            else:
                (systems if kind in self._system else users).append(position)
        for part in (users, systems):
            for kind, run in groupby(part, key=component.__getitem__):
                self._place_run(run, kind)

    def open_keys(self, component: int) -> list[Key]:
        """Workers with room for an executor of the component; the least is chosen."""
        return [
            self._key(number, component)
            for number in range(len(self.workers))
            if self._open(number)
        ]

    def apart_keys(self, component: int, blocked: Collection[str]) -> list[Key]:
        """Workers on supervisors that have none of the component; ``blocked`` are further ones that
        have.

        Being apart outranks the quota: with no room left on such a supervisor, the best worker
        there takes one more.
        """
        free = [
            number
            for number, worker in enumerate(self.workers)
            if worker.node not in blocked and not self._counts[worker.node].get(component)
        ]
        roomy = [number for number in free if self._open(number)] or free
        return [self._key(number, component) for number in roomy]

    def _open(self, number: int) -> bool:
        size = len(self.workers[number].positions)
        return size < self.share or (size == self.share and self.remainder > 0)

    def _inner(self, number: int, component: int, related: Sequence[int]) -> _Inner:
        worker = self.workers[number]
        return (
            worker.counts.get(component, 0),
            len(worker.positions),
            -_near(worker.counts, related),
            number,
        )

    def _outer(self, node: str, inner: _Inner, component: int, near: int) -> Key:
        same, total, minus_near, number = inner
        return (
            same,
            self._counts[node].get(component, 0),
            total,
            self._totals[node],
            minus_near,
            -near,
            number,
        )

    def _add(self, number: int, position: int, component: int, why: int) -> bool:
        """Add an executor; whether the last worker that may exceed the share has just done so."""
        worker = self.workers[number]
        worker.put(position, component, why)
        self._totals[worker.node] += 1
        around = self._counts[worker.node]
        around[component] = around.get(component, 0) + 1
        if len(worker.positions) <= self.share:
            return False
        self.remainder -= 1
        return self.remainder == 0

    def _key(self, number: int, component: int) -> Key:
        related, node = self._trades_with(component), self.workers[number].node
        return self._outer(
            node,
            self._inner(number, component, related),
            component,
            _near(self._counts[node], related),
        )

    def _trades_with(self, component: int) -> Sequence[int]:
        return () if component in self._system else self._related[component]

    def _place_run(self, positions: Iterable[int], component: int) -> None:
        """Put executors of one component, one after the other."""
        related = self._trades_with(component)
        to_itself = int(component in related)
        inner, outer, near = self._heaps(component, related)
        for position in positions:
            best = outer[0]
            number = best[-1]
            node = self.workers[number].node
            mine = inner[node]
            rivals: list[Key] = outer[1:3]
            if len(mine) > 1:
                rivals += [self._outer(node, key, component, near[node]) for key in mine[1:3]]
            if self._add(number, position, component, _difference(best, rivals)):
                inner, outer, near = self._heaps(component, related)
                continue
            near[node] += to_itself
            if self._open(number):
                same, total, minus_near, _ = mine[0]
                heapq.heapreplace(mine, (same + 1, total + 1, minus_near - to_itself, number))
            else:
                heapq.heappop(mine)
            if mine:
                heapq.heapreplace(outer, self._outer(node, mine[0], component, near[node]))
            else:
                heapq.heappop(outer)

    def _heaps(
        self, component: int, related: Sequence[int]
    ) -> tuple[dict[str, list[_Inner]], list[Key], dict[str, int]]:
        """Heaps: the open workers of each supervisor, and the best worker of each supervisor; and
        what each supervisor has of the related components, which only executors of a component that
        reads itself change meanwhile.
        """
        inner: dict[str, list[_Inner]] = {}
        outer: list[Key] = []
        near = {node: _near(around, related) for node, around in self._counts.items()}
        for node, numbers in self._groups.items():
            keys = [
                self._inner(number, component, related) for number in numbers if self._open(number)
            ]
            if keys:
                heapq.heapify(keys)
                inner[node] = keys
                outer.append(self._outer(node, keys[0], component, near[node]))
        heapq.heapify(outer)
        return inner, outer, near


def _near(counts: Mapping[int, int], related: Iterable[int]) -> int:
    """Number of executors of the related components."""
    return sum([counts.get(other, 0) for other in related])


def _difference(best: Key, rivals: Sequence[Key]) -> int:
    """Selector that decided against the last rival."""
    if not rivals:
        return Reason.ONLY
    rival = min(rivals)
    for step, why in enumerate(CHAIN):
        if best[step] != rival[step]:
            return why
    return Reason.FIRST
