"""Runs in Spark: which executors stay in the old slots that a rebalance uses on (design 8.6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["who_stays"]


def who_stays(
    reused: Mapping[int, tuple[tuple[str, int], list[int]]],
    component: Sequence[int],
    share: int,
    rest: int,
    apart: Mapping[int, set[str]],
    system: set[int],
) -> dict[int, list[int]]:
    """Seat -> executors that stay in it.

    ``reused`` maps a seat to its slot and to what is in it, ``apart`` a component that must not be
    twice on a supervisor to those that have it already. The fullest ``rest`` seats may keep one more than
    ``share``. Of a seat that is too full one of its most numerous component goes, and again: user components
    before system ones, higher task ids first.
    """
    met = {kind: set(nodes) for kind, nodes in apart.items()}
    slots = sorted(reused, key=lambda index: reused[index][0])
    lawful: dict[int, list[int]] = {}
    for index in slots:
        (node, _), positions = reused[index]
        lawful[index] = []
        for position in positions:
            kind = component[position]
            if kind in met:
                if node in met[kind]:
                    continue
                met[kind].add(node)
            lawful[index].append(position)
    for index in sorted(slots, key=lambda index: -len(lawful[index])):
        positions = lawful[index]
        keep = share
        if len(positions) > share and rest > 0:
            keep, rest = share + 1, rest - 1
        if len(positions) > keep:
            lawful[index] = _shed(positions, len(positions) - keep, component, system)
    return lawful


def _shed(positions: list[int], count: int, component: Sequence[int], system: set[int]) -> list[int]:
    stacks: dict[int, list[int]] = {}
    for position in positions:
        stacks.setdefault(component[position], []).append(position)
    gone: set[int] = set()
    for _ in range(count):
        kind = max(stacks, key=lambda kind: (len(stacks[kind]), kind not in system, stacks[kind][-1]))
        gone.add(stacks[kind].pop())
        if not stacks[kind]:
            del stacks[kind]
    return [position for position in positions if position not in gone]
