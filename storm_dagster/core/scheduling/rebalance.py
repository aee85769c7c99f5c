"""Rebalance with the fewest moves: kept slots, and executors that stay in them (``docs/decisions.md#fewest-moves``)."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storm_dagster.core.scheduling.history import OldWorker, Slot
from storm_dagster.core.scheduling.slots import Offer
from storm_dagster.core.scheduling.units import Unit


@dataclass(frozen=True)
class Reuse:
    """Old workers whose slots are reused."""

    kept: tuple[OldWorker, ...]
    """Those with most executors first."""
    fuller: frozenset[Slot]
    """Slots that may keep one executor more than the average."""
    master: Slot | None
    """Old slot in which the topology master stays alone."""


@dataclass(frozen=True)
class _Share:
    """Tasks that an old worker would keep."""

    worker: OldWorker
    executors: int
    base: int
    """Tasks that stay when it keeps the average number of executors."""
    extra: int
    """Tasks that stay beside them when it may keep one more."""


def choose_reused(
    old: Sequence[OldWorker],
    offer: Offer,
    unassigned: set[int],
    slots: int,
    level: tuple[int, int],
    master: Unit | None = None,
) -> Reuse:
    """Choose at most ``slots`` old slots that save the most moves of tasks.

    ``unassigned`` are first tasks of the executors that may stay; ``level`` is the average number of executors of
    a worker, and how many workers hold one more; ``master`` is the topology master when it is to be alone:
    it stays where it is when nothing else stays there, which is so chosen when it saves a move.
    """
    usable = [worker for worker in old if offer.has(worker.slot)]
    shares = [_share(worker, unassigned, level[0], master) for worker in usable]
    shares = [share for share in shares if share.executors]
    saved, plain, fuller = _most_saved(shares, slots, level[1])
    home = next((worker for worker in usable if master is not None and master in worker.units), None)
    if home is not None:
        elsewhere = [share for share in shares if share.worker is not home]
        other = _most_saved(elsewhere, slots, level[1])
        if other[0] + 1 > saved:
            _, plain, fuller = other
    kept = sorted((*plain, *fuller), key=lambda share: (-share.executors, share.worker.slot))
    workers = tuple(share.worker for share in kept)
    return Reuse(
        workers,
        frozenset(share.worker.slot for share in fuller),
        home.slot if home is not None and home not in workers else None,
    )


def _share(worker: OldWorker, unassigned: set[int], average: int, master: Unit | None) -> _Share:
    sizes = sorted(
        (worker.weight(unit) for unit in worker.units if unit.first in unassigned and unit is not master),
        reverse=True,
    )
    return _Share(worker, len(sizes), sum(sizes[:average]), sum(sizes[average : average + 1]))


def _most_saved(shares: list[_Share], slots: int, more: int) -> tuple[int, list[_Share], list[_Share]]:
    """(tasks that stay, workers with the average, workers with one more): the best of all choices.

    At most ``slots`` workers, at most ``more`` of them with one executor more. In the order of what one more
    saves, those that get it stand before those that do not, or two of them could change places; so trying
    every border between the two kinds finds the best.
    """
    slots = max(0, min(slots, len(shares)))
    more = min(more, slots)
    ranked = sorted(shares, key=lambda share: (-share.extra, -share.base, -share.executors, share.worker.slot))
    before = _sums_of_largest([share.base + share.extra for share in ranked], more)
    after = _sums_of_largest([share.base for share in reversed(ranked)], slots - more)[::-1]
    borders = range(more, len(ranked) - (slots - more) + 1)
    border = max(borders, key=lambda border: (before[border] + after[border], -border))
    fuller = sorted(
        ranked[:border], key=lambda share: (-share.base - share.extra, -share.executors, share.worker.slot)
    )[:more]
    plain = sorted(ranked[border:], key=lambda share: (-share.base, -share.executors, share.worker.slot))[
        : slots - more
    ]
    return before[border] + after[border], plain, fuller


def _sums_of_largest(values: Sequence[int], count: int) -> list[int]:
    """Entry ``n``: the sum of the ``count`` largest of the first ``n`` values."""
    sums, largest = [0], []
    for value in values:
        heapq.heappush(largest, value)
        gone = heapq.heappop(largest) if len(largest) > count else 0
        sums.append(sums[-1] + value - gone)
    return sums


def trim(
    reuse: Reuse, unassigned: set[int], average: int, holding: Mapping[str, frozenset[str]]
) -> dict[Slot, tuple[Unit, ...]]:
    """Old slot -> executors that stay in it: as many as its share allows.

    ``holding`` maps each ``task.on.differ.node`` component to supervisors that hold one already: what is
    forbidden by it goes first. Of a worker that is too full the executors with the fewest tasks go, of these
    those of its most numerous component, user components before system ones, higher ids first.
    """
    seen = {(component, node) for component, nodes in holding.items() for node in nodes}
    stays: dict[Slot, tuple[Unit, ...]] = {}
    for worker in sorted(reuse.kept, key=lambda worker: worker.slot):
        mine: list[Unit] = []
        for unit in worker.units:
            if unit.first not in unassigned:
                continue
            if unit.component in holding:
                if (unit.component, worker.slot[0]) in seen:
                    continue
                seen.add((unit.component, worker.slot[0]))
            mine.append(unit)
        stays[worker.slot] = _shed(worker, mine, average + (worker.slot in reuse.fuller))
    return stays


def _shed(worker: OldWorker, mine: Sequence[Unit], limit: int) -> tuple[Unit, ...]:
    counts = Counter(unit.component for unit in mine)
    piles: dict[tuple[int, str], list[Unit]] = defaultdict(list)
    for unit in mine:
        piles[worker.weight(unit), unit.component].append(unit)
    gone: set[int] = set()
    while len(mine) - len(gone) > limit:
        weight, component = max(
            piles,
            key=lambda pile: (
                -pile[0],
                counts[pile[1]],
                not piles[pile][-1].is_system,
                piles[pile][-1].first,
            ),
        )
        gone.add(piles[weight, component].pop().first)
        counts[component] -= 1
        if not piles[weight, component]:
            del piles[weight, component]
    return tuple(unit for unit in mine if unit.first not in gone)
