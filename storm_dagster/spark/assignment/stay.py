"""Runs in Spark: which executors stay in the old slots that a rebalance uses on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Reused", "who_stays"]


class Reused(NamedTuple):
    """An old worker whose slot is used on."""

    slot: tuple[str, int]
    holds: list[int]
    """Executors in it."""
    weights: list[int]
    """How many tasks of each are here."""
    limit: int
    """How many executors may stay."""


def who_stays(
    reused: Mapping[int, Reused],
    component: Sequence[int],
    apart: Mapping[int, set[str]],
    system: set[int],
) -> dict[int, list[int]]:
    """Seat -> executors that stay in it.

    ``apart`` maps a component that must not be twice on a supervisor to those that have it already. Of a
    seat that is too full the executors with the fewest tasks go, of these one of the most numerous component,
    and again: user components before system ones, higher task ids first.
    """
    met = {kind: set(nodes) for kind, nodes in apart.items()}
    stays: dict[int, list[int]] = {}
    for index in sorted(reused, key=lambda index: reused[index].slot):
        worker = reused[index]
        lawful: list[tuple[int, int]] = []
        for position, weight in zip(worker.holds, worker.weights, strict=True):
            kind = component[position]
            if kind in met:
                if worker.slot[0] in met[kind]:
                    continue
                met[kind].add(worker.slot[0])
            lawful.append((weight, position))
        stays[index] = _kept(lawful, worker.limit, component, system)
    return stays


def _kept(held: list[tuple[int, int]], limit: int, component: Sequence[int], system: set[int]) -> list[int]:
    counts: dict[int, int] = {}
    stacks: dict[int, dict[int, list[int]]] = {}
    for weight, position in held:
        kind = component[position]
        counts[kind] = counts.get(kind, 0) + 1
        stacks.setdefault(weight, {}).setdefault(kind, []).append(position)
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
