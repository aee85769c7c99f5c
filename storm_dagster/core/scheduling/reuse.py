"""Old slots that a rebalance reuses, and executors that stay there.

The fewest tasks move; see ``docs/decisions.md#fewest-moves``.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from storm_dagster.core.scheduling.requested_workers import ReusableSlot
from storm_dagster.model.slot import Slot

_Order = tuple[int, int, str, int]
"""Result of :meth:`Saving.order`."""


class Saving:
    """Moves that reusing an old slot saves.

    ``base`` is the number for a worker that holds ``share`` executors; ``more`` comes on top if it
    holds one more.
    """

    __slots__ = ("base", "more", "worker")

    def __init__(self, worker: ReusableSlot, share: int) -> None:
        self.worker = worker
        self.base = 0
        self.more = 0
        room = share
        # The executors with the most tasks stay first. The first that finds no room is the gain of
        # one more place.
        # ``weights`` are the numbers of tasks that an executor has here, descending;
        # ``numbers`` are the numbers of executors of each weight.
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
    """Old slots among the ``count`` that an allocation without history would take.

    ``slots`` are (rank, supervisor) of each slot that it might take, the old ones included; it
    takes those with the lowest ranks. Of equal ranks the slots come first whose reuse saves most.
    A supervisor has at most one slot of a rank.
    """
    chosen = sorted(slots)[:count]
    if not chosen:
        return []
    # Supervisor -> its savings as a stack, the best on top.
    waiting: dict[str, list[Saving]] = {}
    for saving in sorted(savings, key=_order_with_more, reverse=True):
        waiting.setdefault(saving.worker.node, []).append(saving)
    # Slots below the last rank are taken in any case, those of the last rank only in part: there
    # the best savings decide.
    last_rank, _ = chosen[-1]
    certain_nodes = [node for rank, node in chosen if rank < last_rank]
    reused = [waiting[node].pop() for node in certain_nodes if waiting.get(node)]
    rivals = [waiting[node][-1] for rank, node in slots if rank == last_rank and waiting.get(node)]
    rivals.sort(key=_order_with_more)
    return reused + rivals[: len(chosen) - len(certain_nodes)]


def _order_with_more(saving: Saving) -> _Order:
    return saving.order(saving.base + saving.more)


def choose_reused(
    savings: list[Saving], places: int, remainder: int
) -> tuple[int, list[ReusableSlot], list[ReusableSlot]]:
    """Return (tasks that stay, slots with the share, slots with one more).

    The slots are those for which most tasks stay. There are at most ``places`` slots, ``remainder``
    of them with one executor more than the share. A slot that gets one more can always be chosen
    before those that do not, in the order of the gain: it is enough to move a border along that
    order.
    """
    places = max(0, min(places, len(savings)))
    remainder = min(remainder, places)
    at_share_places = places - remainder
    by_gain = sorted(savings, key=lambda saving: (-saving.more, *saving.order(saving.base)))
    # Index of the border -> tasks that stay in the best slots before it, and behind it.
    before = _best_sums([saving.base + saving.more for saving in by_gain], remainder)
    behind = _best_sums([saving.base for saving in reversed(by_gain)], at_share_places)
    behind.reverse()
    most = -1
    border = 0
    for index in range(remainder, len(by_gain) - at_share_places + 1):
        stays = before[index] + behind[index]
        if stays > most:
            most = stays
            border = index
    fuller = sorted(by_gain[:border], key=_order_with_more)[:remainder]
    at_share = sorted(by_gain[border:], key=lambda saving: saving.order(saving.base))
    at_share = at_share[:at_share_places]
    return most, [saving.worker for saving in at_share], [saving.worker for saving in fuller]


def _best_sums(values: Sequence[int], count: int) -> list[int]:
    """Index -> sum of the ``count`` largest values before it, 0 to all of them."""
    sums = [0]
    best: list[int] = []
    for value in values:
        heapq.heappush(best, value)
        dropped = heapq.heappop(best) if len(best) > count else 0
        sums.append(sums[-1] + value - dropped)
    return sums


class Reused(NamedTuple):
    """An old worker whose slot is reused."""

    slot: Slot
    holds: list[int]
    """Executors in it."""
    weights: list[int]
    """Number of tasks of each in this worker."""
    limit: int
    """Maximum number of executors that stay."""


def keep_executors(
    reused: Mapping[int, Reused],
    component: Sequence[int],
    apart: Mapping[int, set[str]],
    system: Collection[int],
) -> dict[int, list[int]]:
    """Slot number -> executors that stay in it.

    ``reused`` is by slot number, ``component`` has the component of each executor. ``apart`` maps a
    component that must not be twice on a supervisor to the supervisors that have it already; it is
    not changed. ``system`` are the system's components.

    A worker that is too full loses executors one by one. The executor with the fewest tasks moves
    first, of these one of the most numerous component: user components before system ones, higher
    task ids first.
    """
    used = {kind: set(nodes) for kind, nodes in apart.items()}
    stays: dict[int, list[int]] = {}
    for index in sorted(reused, key=lambda index: reused[index].slot):
        worker = reused[index]
        allowed: list[tuple[int, int]] = []
        for position, weight in zip(worker.holds, worker.weights, strict=True):
            kind = component[position]
            if kind in used:
                if worker.slot.node in used[kind]:
                    continue
                used[kind].add(worker.slot.node)
            allowed.append((weight, position))
        stays[index] = _limit_executors(allowed, worker.limit, component, system)
    return stays


def _limit_executors(
    weighted: list[tuple[int, int]], limit: int, component: Sequence[int], system: Collection[int]
) -> list[int]:
    """Positions of the ``limit`` executors that stay, out of (weight, position)."""
    counts = Counter(component[position] for _, position in weighted)
    # Weight -> component -> positions, ascending: the last one moves first.
    stacks: dict[int, dict[int, list[int]]] = {}
    for weight, position in weighted:
        stacks.setdefault(weight, {}).setdefault(component[position], []).append(position)
    moved: set[int] = set()
    for weight in sorted(stacks):
        piles = stacks[weight]
        while piles and len(weighted) - len(moved) > limit:
            kind = max(piles, key=lambda kind: (counts[kind], kind not in system, piles[kind][-1]))
            moved.add(piles[kind].pop())
            counts[kind] -= 1
            if not piles[kind]:
                del piles[kind]
    return [position for _, position in weighted if position not in moved]
