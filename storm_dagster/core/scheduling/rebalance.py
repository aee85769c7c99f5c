"""Fewest moves (design 8.6): which old slots a rebalance keeps, and which executors stay in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from storm_dagster.core.scheduling.history import OldWorker, Slot
from storm_dagster.core.scheduling.slots import Offer
from storm_dagster.core.scheduling.units import Unit

__all__ = ["Reuse", "choose_reused", "trim"]


@dataclass(frozen=True)
class Reuse:
    """Old workers whose slots are used on, fullest first."""

    kept: tuple[OldWorker, ...]
    master: Slot | None
    """Old slot in which the topology master stays alone."""


def choose_reused(
    old: Sequence[OldWorker], offer: Offer, loose: set[int], seats: int, master: Unit | None
) -> Reuse:
    """The ``seats`` old slots that save the most moves, the lower slot when equal.

    ``loose`` are first tasks of the executors that may stay; ``master`` is the topology master when it is
    to be alone: it stays where it is if it is alone there already, or if its slot is not kept for others.
    """

    def count(worker: OldWorker) -> int:
        return sum(1 for unit in worker.units if unit.first in loose and unit is not master)

    usable = [worker for worker in old if offer.has(worker.slot)]
    ranked = sorted(
        (worker for worker in usable if count(worker)), key=lambda worker: (-count(worker), worker.slot)
    )
    kept = tuple(ranked[: max(0, seats)])
    home = next((worker for worker in usable if master is not None and master in worker.units), None)
    return Reuse(kept, home.slot if home is not None and home not in kept else None)


def trim(
    kept: Iterable[OldWorker],
    loose: set[int],
    average: int,
    remainder: int,
    holding: Mapping[str, frozenset[str]],
) -> dict[Slot, tuple[Unit, ...]]:
    """Old slot -> executors that stay in it: as many as its share allows.

    ``holding`` maps each ``task.on.differ.node`` component to supervisors that hold one already: what is
    forbidden by it goes first. Of a worker that is too full those of its most
    numerous component go, user components before system ones, higher ids first. The fullest workers are the
    ones that may hold one more than the average.
    """
    seen = {(component, node) for component, nodes in holding.items() for node in nodes}
    allowed: dict[Slot, list[Unit]] = {}
    for worker in sorted(kept, key=lambda worker: worker.slot):
        mine = allowed.setdefault(worker.slot, [])
        for unit in worker.units:
            if unit.first not in loose:
                continue
            if unit.component in holding:
                if (unit.component, worker.slot[0]) in seen:
                    continue
                seen.add((unit.component, worker.slot[0]))
            mine.append(unit)
    stays: dict[Slot, tuple[Unit, ...]] = {}
    for slot in sorted(allowed, key=lambda slot: (-len(allowed[slot]), slot)):
        mine = allowed[slot]
        limit = average
        if len(mine) > average and remainder > 0:
            limit, remainder = average + 1, remainder - 1
        counts = Counter(unit.component for unit in mine)
        while len(mine) > limit:
            gone = max(mine, key=lambda unit: (counts[unit.component], not unit.is_system, unit.first))
            mine.remove(gone)
            counts[gone.component] -= 1
        stays[slot] = tuple(mine)
    return stays
