"""Layered layout of a graph: left to right, few crossings, no overlaps.

Pure; the same graph always has the same layout. Edges that close a cycle are drawn backwards. An
edge over several layers has a free place in each of them.

The functions call a place in a layer a spot: a node has one, and so has a long edge in each layer
that it passes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from statistics import fmean

from storm_dagster.model.multimap import multimap

_SWEEPS = 6
"""Sweeps over the layers to sort them, and half of those to move their spots."""

NodePair = tuple[str, str]
"""(source, target), names of nodes."""
Point = tuple[float, float]
"""(x, y); y grows downwards."""


@dataclass(frozen=True)
class Layout:
    """Upper left corners of nodes, and the points of the line of each edge."""

    width: float
    height: float
    nodes: Mapping[str, Point]
    lines: Mapping[NodePair, Sequence[Point]]


def neighborhood(edges: Iterable[NodePair], center: str, steps: int = 2) -> set[str]:
    """``center`` and the nodes at most so many edges away, in either direction."""
    edges = list(edges)
    names = {center}
    for _ in range(steps):
        neighbors: set[str] = set()
        for edge in edges:
            if not names.isdisjoint(edge):
                neighbors.update(edge)
        names |= neighbors
    return names


def lay_out(
    nodes: Iterable[str],
    edges: Iterable[NodePair],
    *,
    box: tuple[float, float],
    gap: tuple[float, float],
) -> Layout:
    """Place boxes of one size with at least ``gap`` (across, down) between them.

    Edges of unknown nodes, and of a node to itself, are omitted.
    """
    names = list(dict.fromkeys(nodes))
    node_names = set(names)
    drawn_edges = [
        (source, target)
        for source, target in dict.fromkeys(edges)
        if source in node_names and target in node_names and source != target
    ]
    chains, layers = _chains_and_layers(names, drawn_edges)
    neighbors = [pair for chain in chains.values() for pair in pairwise(chain)]
    after = multimap(neighbors)
    before = multimap((next_spot, spot) for spot, next_spot in neighbors)
    _order(layers, before, after)
    width, height = box
    gap_across, gap_down = gap
    heights: dict[str, float] = {}
    left: dict[str, float] = {}
    for index, layer in enumerate(layers):
        for spot in layer:
            heights[spot] = height if spot in node_names else height / 3
            left[spot] = index * (width + gap_across)
    middles = _middles(layers, before, after, heights, gap_down)
    lines: dict[NodePair, Sequence[Point]] = {}
    for source, target in drawn_edges:
        # An edge that closes a cycle was laid out in the other direction.
        is_reversed = (source, target) not in chains
        chain = chains[target, source] if is_reversed else chains[source, target]
        points = _points(chain, left, middles, width)
        if is_reversed:
            points.reverse()
        lines[source, target] = points
    total_width = len(layers) * (width + gap_across) - gap_across
    return Layout(
        width=max(0.0, total_width) if names else 0.0,
        height=max((middles[spot] + heights[spot] / 2 for spot in middles), default=0.0),
        nodes={name: (left[name], middles[name] - height / 2) for name in names},
        lines=lines,
    )


def _chains_and_layers(
    names: Sequence[str], edges: Sequence[NodePair]
) -> tuple[dict[NodePair, list[str]], list[list[str]]]:
    """Return (spots of each forward edge, spots of each layer).

    A forward edge leads to a later layer: an edge that closes a cycle is reversed.
    """
    forward = _without_cycles(names, edges)
    layer_of = _layers(names, forward)
    layers: list[list[str]] = [[] for _ in range(max(layer_of.values(), default=0) + 1)]
    for name in names:
        layers[layer_of[name]].append(name)
    chains: dict[NodePair, list[str]] = {}
    for source, target in forward:
        chain = [source]
        for index in range(layer_of[source] + 1, layer_of[target]):
            spot = f"{source}\0{target}\0{index}"
            chain.append(spot)
            layers[index].append(spot)
        chain.append(target)
        chains[source, target] = chain
    return chains, layers


def _points(
    chain: Sequence[str], left: Mapping[str, float], middles: Mapping[str, float], width: float
) -> list[Point]:
    """The points of a line from the first box to the last, through all spots."""
    points = [(left[chain[0]] + width, middles[chain[0]])]
    for spot in chain[1:-1]:
        points.append((left[spot], middles[spot]))
        points.append((left[spot] + width, middles[spot]))
    points.append((left[chain[-1]], middles[chain[-1]]))
    return points


def _without_cycles(names: Sequence[str], edges: Sequence[NodePair]) -> list[NodePair]:
    """The edges, each once; those that close a cycle are reversed."""
    after = multimap(edges)
    heads = {target for _, target in edges}
    # Spouts first: a cycle begins where tuples enter it.
    order = sorted(names, key=lambda name: name in heads)
    visited: set[str] = set()
    active: set[str] = set()
    forward: dict[NodePair, None] = {}
    for root in order:
        if root in visited:
            continue
        stack = [(root, iter(after.get(root, ())))]
        active.add(root)
        while stack:
            name, targets = stack[-1]
            target = next(targets, None)
            if target is None:
                stack.pop()
                active.discard(name)
                visited.add(name)
            elif target in active:
                forward[target, name] = None
            else:
                forward[name, target] = None
                if target not in visited:
                    active.add(target)
                    stack.append((target, iter(after.get(target, ()))))
    return list(forward)


def _layers(names: Sequence[str], edges: Sequence[NodePair]) -> dict[str, int]:
    """Node -> length of the longest path from a node without inputs."""
    sources_of: dict[str, list[str]] = {name: [] for name in names}
    for source, target in edges:
        sources_of[target].append(source)
    layer_of: dict[str, int] = {}
    for name in TopologicalSorter(sources_of).static_order():
        layer_of[name] = max((layer_of[source] + 1 for source in sources_of[name]), default=0)
    return layer_of


def _order(
    layers: list[list[str]], before: Mapping[str, list[str]], after: Mapping[str, list[str]]
) -> None:
    """Sort each of ``layers`` in place by the mean index of its neighbors: few lines cross then.

    Sweeps go forth, by the layer before, and back, by the layer after.
    """
    for sweep in range(_SWEEPS):
        if sweep % 2 == 0:
            for index in range(1, len(layers)):
                _sort_layer(layers, index, before)
        else:
            for index in reversed(range(len(layers) - 1)):
                _sort_layer(layers, index, after)


def _sort_layer(layers: list[list[str]], index: int, neighbors: Mapping[str, list[str]]) -> None:
    """Sort one layer in place; a spot without neighbors counts with its own index."""
    index_of: dict[str, int] = {}
    for layer in layers:
        index_of.update(zip(layer, range(len(layer)), strict=True))
    mean: dict[str, float] = {}
    for spot in layers[index]:
        mean[spot] = fmean([index_of[neighbor] for neighbor in neighbors.get(spot, [spot])])
    layers[index].sort(key=mean.__getitem__)


def _middles(
    layers: Sequence[Sequence[str]],
    before: Mapping[str, list[str]],
    after: Mapping[str, list[str]],
    heights: Mapping[str, float],
    gap: float,
) -> dict[str, float]:
    """Spot -> its vertical middle.

    It is near those of its neighbors; the spots of a layer keep their order and their distance.
    """
    middles: dict[str, float] = {}
    for layer in layers:
        middles.update(_stack(layer, 0.0, heights, gap))
    for sweep in range(2 * _SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            desired: dict[str, float] = {}
            for spot in layer:
                neighbors = [*before.get(spot, ()), *after.get(spot, ())]
                desired[spot] = middles[spot]
                if neighbors:
                    total = sum(middles[neighbor] for neighbor in neighbors)
                    desired[spot] = total / len(neighbors)
            middles.update(_spread(layer, desired, heights, gap))
    top = min((middles[spot] - heights[spot] / 2 for spot in middles), default=0.0)
    return {spot: middle - top for spot, middle in middles.items()}


@dataclass
class _Group:
    """Neighbors of a layer that are moved together."""

    spots: list[str]
    """From top to bottom."""
    top: float
    height: float
    """Height of all spots and of the gaps between them."""


def _spread(
    layer: Sequence[str], desired: Mapping[str, float], heights: Mapping[str, float], gap: float
) -> dict[str, float]:
    """Middles as near to the desired ones as the distances allow.

    Neighbors that come too close are moved as one group.
    """
    groups: list[_Group] = []
    for spot in layer:
        group = _Group([spot], desired[spot] - heights[spot] / 2, heights[spot])
        while groups and groups[-1].top + groups[-1].height + gap > group.top:
            group = _join(groups.pop(), group, gap)
        groups.append(group)
    middles: dict[str, float] = {}
    for group in groups:
        middles.update(_stack(group.spots, group.top, heights, gap))
    return middles


def _join(upper: _Group, lower: _Group, gap: float) -> _Group:
    """One group of both, at the mean of the tops that their spots desire for it."""
    lower_top = lower.top - upper.height - gap
    count = len(upper.spots) + len(lower.spots)
    top = (len(upper.spots) * upper.top + len(lower.spots) * lower_top) / count
    return _Group([*upper.spots, *lower.spots], top, upper.height + gap + lower.height)


def _stack(
    spots: Iterable[str], top: float, heights: Mapping[str, float], gap: float
) -> Iterator[tuple[str, float]]:
    """The middle of each spot, one below the other from ``top`` on."""
    for spot in spots:
        yield spot, top + heights[spot] / 2
        top += heights[spot] + gap
