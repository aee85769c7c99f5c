"""Layered layout of a graph: left to right, few crossings, no overlaps. Pure, and the same for the
same graph.

Edges that close a cycle are drawn backwards. The way of an edge over several layers is kept free of
nodes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from statistics import fmean

from storm_dagster.model.multimap import multimap

_SWEEPS = 6

Edge = tuple[str, str]
Point = tuple[float, float]


@dataclass(frozen=True)
class Layout:
    """Upper left corners of nodes, and for each edge the points that its line goes through."""

    width: float
    height: float
    nodes: Mapping[str, Point]
    lines: Mapping[Edge, Sequence[Point]]


def neighborhood(edges: Iterable[Edge], center: str, steps: int = 2) -> set[str]:
    """``center`` and what is at most so many edges away from it, in either direction."""
    edges, found = list(edges), {center}
    for _ in range(steps):
        found |= {one for edge in edges for one in edge if not found.isdisjoint(edge)}
    return found


def lay_out(
    nodes: Iterable[str],
    edges: Iterable[Edge],
    *,
    box: tuple[float, float],
    gap: tuple[float, float],
) -> Layout:
    """Place boxes of one size with at least ``gap`` (across, down) between them. Edges of unknown
    nodes are left out.
    """
    names = list(dict.fromkeys(nodes))
    known = set(names)
    wanted = list(
        dict.fromkeys(edge for edge in edges if known.issuperset(edge) and edge[0] != edge[1])
    )
    forward = _without_cycles(names, wanted)
    layer_of = _layers(names, forward)
    chains = {edge: _chain(edge, layer_of) for edge in forward}
    rows: list[list[str]] = [[] for _ in range(max(layer_of.values(), default=0) + 1)]
    for name in names:
        rows[layer_of[name]].append(name)
    for (source, _), chain in chains.items():
        for step, one in enumerate(chain[1:-1], layer_of[source] + 1):
            rows[step].append(one)
    pairs = [pair for chain in chains.values() for pair in pairwise(chain)]
    below, above = multimap(pairs), multimap((other, one) for one, other in pairs)
    _order(rows, above, below)
    width, height = box
    heights = {one: height if one in known else height / 3 for row in rows for one in row}
    middles = _middles(rows, above, below, heights, gap[1])
    left = {one: index * (width + gap[0]) for index, row in enumerate(rows) for one in row}
    places = {name: (left[name], middles[name] - height / 2) for name in names}
    lines: dict[Edge, Sequence[Point]] = {}
    for edge in wanted:
        back = edge not in chains
        chain = chains.get(edge) or chains[edge[1], edge[0]]
        inner = [(left[one] + x, middles[one]) for one in chain[1:-1] for x in (0.0, width)]
        ends = [(left[chain[0]] + width, middles[chain[0]]), (left[chain[-1]], middles[chain[-1]])]
        points = [ends[0], *inner, ends[1]]
        lines[edge] = points[::-1] if back else points
    total = max((middles[one] + heights[one] / 2 for one in middles), default=0.0)
    return Layout(
        max(0.0, len(rows) * (width + gap[0]) - gap[0]) if names else 0.0, total, places, lines
    )


def _without_cycles(names: Sequence[str], edges: Sequence[Edge]) -> list[Edge]:
    """The edges with those that close a cycle turned round, each once."""
    after = multimap(edges)
    heads = {target for _, target in edges}
    # Spouts first: a cycle begins where tuples come in.
    order = sorted(names, key=lambda name: name in heads)
    done: set[str] = set()
    active: set[str] = set()
    found: dict[Edge, None] = {}
    for root in order:
        if root in done:
            continue
        stack = [(root, iter(after.get(root, ())))]
        active.add(root)
        while stack:
            name, rest = stack[-1]
            target = next(rest, None)
            if target is None:
                stack.pop()
                active.discard(name)
                done.add(name)
            elif target in active:
                found[target, name] = None
            else:
                found[name, target] = None
                if target not in done:
                    active.add(target)
                    stack.append((target, iter(after.get(target, ()))))
    return list(found)


def _layers(names: Sequence[str], edges: Sequence[Edge]) -> dict[str, int]:
    """The longest way from a node without inputs."""
    before = {name: [source for source, target in edges if target == name] for name in names}
    found: dict[str, int] = {}
    for name in TopologicalSorter(before).static_order():
        found[name] = max((found[source] + 1 for source in before[name]), default=0)
    return found


def _chain(edge: Edge, layer_of: Mapping[str, int]) -> list[str]:
    """The edge with a place of its own in each layer between."""
    source, target = edge
    between = range(layer_of[source] + 1, layer_of[target])
    return [source, *(f"{source}\0{target}\0{layer}" for layer in between), target]


def _order(
    rows: list[list[str]], above: Mapping[str, list[str]], below: Mapping[str, list[str]]
) -> None:
    """Sort each row by the mean place of its neighbors, forth and back: few lines cross then."""
    for sweep in range(_SWEEPS):
        beside, indices = (
            (above, range(1, len(rows)))
            if sweep % 2 == 0
            else (below, range(len(rows) - 2, -1, -1))
        )
        for index in indices:
            at = {one: place for row in rows for place, one in enumerate(row)}
            mean = {
                one: fmean([at[other] for other in beside.get(one, [one])]) for one in rows[index]
            }
            rows[index].sort(key=mean.__getitem__)


def _middles(
    rows: Sequence[Sequence[str]],
    above: Mapping[str, list[str]],
    below: Mapping[str, list[str]],
    heights: Mapping[str, float],
    gap: float,
) -> dict[str, float]:
    """Vertical middles: near those of the neighbors, in the order of the row, apart from each
    other.
    """
    found = {one: middle for row in rows for one, middle in _stack(row, 0.0, heights, gap)}
    for sweep in range(2 * _SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = {}
            for one in row:
                beside = [*above.get(one, ()), *below.get(one, ())]
                wanted[one] = (
                    sum(found[other] for other in beside) / len(beside) if beside else found[one]
                )
            found.update(_apart(row, wanted, heights, gap))
    least = min((found[one] - heights[one] / 2 for one in found), default=0.0)
    return {one: middle - least for one, middle in found.items()}


def _apart(
    row: Sequence[str], wanted: Mapping[str, float], heights: Mapping[str, float], gap: float
) -> dict[str, float]:
    """As near to ``wanted`` as the distances allow: neighbors that come too close are moved as one
    group.
    """
    groups: list[tuple[list[str], float, float]] = []  # (members, middle of the group, its height)
    for one in row:
        members, middle, height = [one], wanted[one], heights[one]
        while groups and groups[-1][1] + groups[-1][2] / 2 + gap > middle - height / 2:
            before, at, size = groups.pop()
            count, total = len(before) + len(members), size + gap + height
            # Where each would be in the middle of what it wants, as a group.
            first = (
                len(before) * (at - size / 2) + len(members) * (middle - height / 2 - size - gap)
            ) / count
            members, middle, height = [*before, *members], first + total / 2, total
        groups.append((members, middle, height))
    stacks = (
        _stack(members, middle - height / 2, heights, gap) for members, middle, height in groups
    )
    return {one: middle for stack in stacks for one, middle in stack}


def _stack(
    row: Iterable[str], top: float, heights: Mapping[str, float], gap: float
) -> Iterator[tuple[str, float]]:
    """The middle of each, one below the other from ``top`` on."""
    for one in row:
        yield one, top + heights[one] / 2
        top += heights[one] + gap
