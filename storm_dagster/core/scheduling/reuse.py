"""Old slots that a rebalance reuses, and executors that stay there: the fewest tasks move.

See ``docs/decisions.md#fewest-moves``.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from storm_dagster.core.scheduling.requested_workers import ReusableSlot
from storm_dagster.model.multimap import multimap
from storm_dagster.model.slot import Slot

_Order = tuple[int, int, str, int]


class Saving:
    """Moves that reusing an old slot saves, for workers that hold ``share`` executors, or one
    more.
    """

    __slots__ = ("base", "more", "worker")

    def __init__(self, worker: ReusableSlot, share: int) -> None:
        self.worker = worker
        self.base = self.more = 0
        room = share
        # ``weights`` are descending: how many tasks an executor has here, and how many such
        # executors there are.
        for weight, number in zip(worker.weights, worker.numbers, strict=True):
            fit = min(room, number)
            self.base += fit * weight
            if number > fit:
                self.more = weight
                break
            room -= fit

    def order(self, value: int) -> _Order:
        """Sort key: most saved first, then the fullest, then the lower slot."""
        return (-value, -self.worker.size, self.worker.node, self.worker.port)


def balanced_savings(
    savings: Iterable[Saving], slots: Iterable[tuple[Any, str]], count: int
) -> list[Saving]:
    """Old slots among the ``count`` that an allocation from nothing would take.

    ``slots`` are (rank, supervisor) of each slot that it might take, the old ones included; it
    takes those with the lowest ranks. Of equal ones those come first where reusing saves most.
    """
    best_last = sorted(
        savings, key=lambda saving: saving.order(saving.base + saving.more), reverse=True
    )
    waiting = multimap((saving.worker.node, saving) for saving in best_last)
    line = sorted(slots)[:count]
    before = [node for rank, node in line if rank < line[-1][0]]
    kept = [waiting[node].pop() for node in before if waiting.get(node)]
    last = [
        waiting[node][-1]
        for rank, node in slots
        if line and rank == line[-1][0] and waiting.get(node)
    ]
    last.sort(key=lambda saving: saving.order(saving.base + saving.more))
    return kept + last[: len(line) - len(before)]


def choose_reused(
    savings: list[Saving], places: int, remainder: int
) -> tuple[int, list[ReusableSlot], list[ReusableSlot]]:
    """(tasks that stay, slots with the share, slots with one more), at most ``places``,
    ``remainder`` with more.

    Those that get one more can always be chosen before those that do not, in the order of what it
    saves: it is enough to move a border along that order.
    """
    places = max(0, min(places, len(savings)))
    remainder = min(remainder, places)
    line = sorted(savings, key=lambda saving: (-saving.more, *saving.order(saving.base)))
    tail = [0] * (len(line) + 1)
    best_behind: list[int] = []
    for index in range(len(line) - 1, -1, -1):
        heapq.heappush(best_behind, line[index].base)
        lost = heapq.heappop(best_behind) if len(best_behind) > places - remainder else 0
        tail[index] = tail[index + 1] + line[index].base - lost
    most, border, head = -1, 0, 0
    best_before: list[int] = []
    for index in range(len(line) + 1):
        if remainder <= index <= len(line) - (places - remainder) and head + tail[index] > most:
            most, border = head + tail[index], index
        if index < len(line):
            value = line[index].base + line[index].more
            heapq.heappush(best_before, value)
            head += value - (heapq.heappop(best_before) if len(best_before) > remainder else 0)
    fuller = sorted(line[:border], key=lambda saving: saving.order(saving.base + saving.more))[
        :remainder
    ]
    plain = sorted(line[border:], key=lambda saving: saving.order(saving.base))[
        : places - remainder
    ]
    return most, [saving.worker for saving in plain], [saving.worker for saving in fuller]


class Reused(NamedTuple):
    """An old worker whose slot is reused."""

    slot: Slot
    holds: list[int]
    """Executors in it."""
    weights: list[int]
    """Number of tasks of each in this worker."""
    limit: int
    """Most executors that may stay."""


def keep_executors(
    reused: Mapping[int, Reused],
    component: Sequence[int],
    apart: Mapping[int, set[str]],
    system: Collection[int],
) -> dict[int, list[int]]:
    """Slot number -> executors that stay in it.

    ``apart`` maps a component that must not be twice on a supervisor to those that have it already.
    Of a worker that is too full the executors with the fewest tasks go, of these one of the most
    numerous component, and again: user components before system ones, higher task ids first.
    """
    met = {kind: set(nodes) for kind, nodes in apart.items()}
    stays: dict[int, list[int]] = {}
    for index in sorted(reused, key=lambda index: reused[index].slot):
        worker = reused[index]
        lawful: list[tuple[int, int]] = []
        for position, weight in zip(worker.holds, worker.weights, strict=True):
            kind = component[position]
            if kind in met:
                if worker.slot.node in met[kind]:
                    continue
                met[kind].add(worker.slot.node)
            lawful.append((weight, position))
        stays[index] = _kept(lawful, worker.limit, component, system)
    return stays


def _kept(
    held: list[tuple[int, int]], limit: int, component: Sequence[int], system: Collection[int]
) -> list[int]:
    counts = Counter(component[position] for _, position in held)
    stacks: dict[int, dict[int, list[int]]] = {}
    for weight, position in held:
        stacks.setdefault(weight, {}).setdefault(component[position], []).append(position)
    gone: set[int] = set()
    for weight in sorted(stacks):
        piles = stacks[weight]
        while piles and len(held) - len(gone) > limit:
            kind = max(piles, key=lambda kind: (counts[kind], kind not in system, piles[kind][-1]))
            gone.add(piles[kind].pop())
            counts[kind] -= 1
            if not piles[kind]:
                del piles[kind]
    return [position for _, position in held if position not in gone]
