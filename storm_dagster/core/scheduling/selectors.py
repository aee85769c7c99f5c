"""Choice of a worker for each executor, by quota and by a chain of selectors.

See ``docs/decisions.md#task-choice``. For a run of executors of one component the chain is a
lexicographic order of workers. It is kept in heaps, one for the supervisors and one inside each
supervisor. A topology of a hundred thousand tasks on thousands of workers so takes a logarithmic
step for each task, where a comparison of all workers would take thousands.

These loops are measured (``benchmarks/assignment.py``); that is why they work on tuples.
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
        """Supervisor id."""
        self.positions: list[int] = []
        """Executors in it."""
        self.reasons: list[int] = []
        """Reason of each of them, a number of ``Reason``."""
        self.counts: dict[int, int] = {}
        """Component -> number of its executors in it."""

    def put(self, position: int, component: int, reason: int) -> None:
        """Add an executor."""
        self.positions.append(position)
        self.reasons.append(reason)
        self.counts[component] = self.counts.get(component, 0) + 1


def fair_share(sizes: Iterable[int], waiting: int) -> tuple[int, int]:
    """Return (share, remainder) of an even spread over workers.

    ``sizes`` are the numbers of executors that the workers have already, ``waiting`` is the number
    of those to be added. ``remainder`` workers get one more than the share. Workers that are fuller
    than the share do not count. (0, 0) without workers.
    """
    descending = sorted(sizes, reverse=True)
    total = waiting + sum(descending)
    for skipped, size in enumerate(descending):
        share, remainder = divmod(total, len(descending) - skipped)
        if size <= share:
            return share, remainder
        total -= size
    return 0, 0


@dataclass(eq=False)
class WorkerSelector:
    """Selector of workers for the executors of one topology.

    It chooses among workers with room, by quota and by the chain of selectors. The chain: fewest
    executors of the component, fewest executors, then - for user components - most executors of
    components that it trades tuples with; each compared between workers first and then between
    supervisors, counting this topology's workers of this event only. The first of equals wins.
    """

    workers: Sequence[FilledWorker]
    """The workers to fill: executors are added to them."""
    share: int
    """Quota of each worker."""
    remainder: int
    """Number of workers that may still get one executor more than the share."""
    _related: Sequence[Sequence[int]]
    """``TopologySummary.related``."""
    _system: Collection[int]
    """``TopologySummary.system``."""

    def __post_init__(self) -> None:
        self._groups: dict[str, list[int]] = {}
        """Supervisor -> numbers of its workers."""
        self._totals: dict[str, int] = {}
        """Supervisor -> number of executors in its workers."""
        self._counts: dict[str, dict[int, int]] = {}
        """Supervisor -> component -> number of its executors in these workers."""
        for number, worker in enumerate(self.workers):
            self._groups.setdefault(worker.node, []).append(number)
            self._totals[worker.node] = self._totals.get(worker.node, 0) + len(worker.positions)
            around = self._counts.setdefault(worker.node, {})
            for component, count in worker.counts.items():
                around[component] = around.get(component, 0) + count

    def place(
        self, waiting: Iterable[int], component: Sequence[int], apart: Mapping[int, set[str]]
    ) -> None:
        """Put executors into the workers, each group by task id.

        ``waiting`` are ascending. The executors that must be apart come first, then the user's,
        then the system's. ``apart`` is that of ``keep_executors``.
        """
        users: list[int] = []
        systems: list[int] = []
        for position in waiting:
            kind = component[position]
            if kind in apart:
                keys = heapq.nsmallest(2, self.apart_keys(kind, apart[kind]))
                self._add(keys[0][-1], position, kind, _difference(keys[0], keys[1:]))
            elif kind in self._system:
                systems.append(position)
            else:
                users.append(position)
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
        """Workers on supervisors that have none of the component.

        ``blocked`` are further supervisors that have one. Being apart outranks the quota: if no
        worker there has room, the best of them takes one more.
        """
        free = [
            number
            for number, worker in enumerate(self.workers)
            if worker.node not in blocked and not self._counts[worker.node].get(component)
        ]
        roomy = [number for number in free if self._open(number)] or free
        return [self._key(number, component) for number in roomy]

    def _open(self, number: int) -> bool:
        """True if the worker has room by its quota."""
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
        of_component, total, minus_near, number = inner
        return (
            of_component,
            self._counts[node].get(component, 0),
            total,
            self._totals[node],
            minus_near,
            -near,
            number,
        )

    def _add(self, number: int, position: int, component: int, reason: int) -> bool:
        """Add an executor; True if it takes the last place above the share.

        Workers that have reached the share are then no longer open.
        """
        worker = self.workers[number]
        worker.put(position, component, reason)
        self._totals[worker.node] += 1
        around = self._counts[worker.node]
        around[component] = around.get(component, 0) + 1
        if len(worker.positions) <= self.share:
            return False
        self.remainder -= 1
        return self.remainder == 0

    def _key(self, number: int, component: int) -> Key:
        related = self._trades_with(component)
        node = self.workers[number].node
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
        # 1 if the component reads itself: then each executor counts as a related one of the next.
        to_itself = int(component in related)
        inner, outer, near = self._heaps(component, related)
        for position in positions:
            best = outer[0]
            number = best[-1]
            node = self.workers[number].node
            keys = inner[node]
            # The second least of a heap is a child of its root. It is the best worker of another
            # supervisor, or the second best of this one.
            rivals: list[Key] = outer[1:3]
            if len(keys) > 1:
                rivals += [self._outer(node, key, component, near[node]) for key in keys[1:3]]
            if self._add(number, position, component, _difference(best, rivals)):
                inner, outer, near = self._heaps(component, related)
                continue
            near[node] += to_itself
            if self._open(number):
                of_component, total, minus_near, _ = keys[0]
                key = (of_component + 1, total + 1, minus_near - to_itself, number)
                heapq.heapreplace(keys, key)
            else:
                heapq.heappop(keys)
            if keys:
                heapq.heapreplace(outer, self._outer(node, keys[0], component, near[node]))
            else:
                heapq.heappop(outer)

    def _heaps(
        self, component: int, related: Sequence[int]
    ) -> tuple[dict[str, list[_Inner]], list[Key], dict[str, int]]:
        """Return (open workers by supervisor, best worker of each, related counts).

        The first two are heaps. The last is the number of executors of related components on each
        supervisor. During the run it changes only for a component that reads itself.
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
    return sum([counts.get(component, 0) for component in related])


def _difference(best: Key, rivals: Sequence[Key]) -> int:
    """Reason by whose number ``best`` differs from the best of its rivals."""
    if not rivals:
        return Reason.ONLY
    rival = min(rivals)
    for step, reason in enumerate(CHAIN):
        if best[step] != rival[step]:
            return reason
    return Reason.FIRST
