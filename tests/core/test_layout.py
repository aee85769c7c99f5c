"""The layered layout: nothing overlaps, tuples flow to the right, and cycles are no exception."""

from __future__ import annotations

import time
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from storm_dagster.core.pictures.layout import Layout, lay_out, neighborhood

BOX, GAP = (100.0, 60.0), (50.0, 20.0)
NAMES = [f"n{number}" for number in range(12)]


def laid(nodes: list[str], edges: list[tuple[str, str]]) -> Layout:
    return lay_out(nodes, edges, box=BOX, gap=GAP)


def overlapping(layout: Layout) -> list[tuple[str, str]]:
    return [
        (one, other)
        for (one, (x, y)), (other, (a, b)) in combinations(layout.nodes.items(), 2)
        if abs(x - a) < BOX[0] + GAP[0] - 0.01 and abs(y - b) < BOX[1] + GAP[1] - 0.01
    ]


def test_a_chain_is_a_straight_line() -> None:
    found = laid(["count", "lines", "split"], [("lines", "split"), ("split", "count")])
    assert [found.nodes[name] for name in ("lines", "split", "count")] == [
        (0, 0),
        (150, 0),
        (300, 0),
    ]
    assert found.lines["lines", "split"] == [(100, 30), (150, 30)]
    assert (found.width, found.height) == (400, 60)


def test_a_long_edge_goes_around_what_is_between() -> None:
    found = laid(["a", "b", "c"], [("a", "b"), ("b", "c"), ("a", "c")])
    around = found.lines["a", "c"][1:-1]
    top = found.nodes["b"][1]
    assert around and all(y < top or y > top + BOX[1] for _, y in around)


def test_a_cycle_has_one_edge_that_goes_back() -> None:
    found = laid(["lines", "a", "b"], [("lines", "a"), ("a", "b"), ("b", "a")])
    assert found.nodes["lines"][0] < found.nodes["a"][0] < found.nodes["b"][0]
    assert found.lines["b", "a"][0][0] > found.lines["b", "a"][-1][0]


def test_nothing_is_a_picture_too() -> None:
    assert laid([], []) == Layout(0.0, 0.0, {}, {})
    assert laid(["a"], [("a", "a"), ("a", "unknown")]).lines == {}


@settings()
@given(
    count=st.integers(1, 12),
    edges=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=30),
)
def test_nothing_overlaps_whatever_the_graph(count: int, edges: list[tuple[str, str]]) -> None:
    nodes = NAMES[:count]
    found = laid(nodes, edges)
    assert set(found.nodes) == set(nodes)
    assert not overlapping(found)
    wanted = {edge for edge in edges if edge[0] != edge[1] and set(edge) <= set(nodes)}
    assert set(found.lines) == wanted
    for x, y in (
        *found.nodes.values(),
        *(point for line in found.lines.values() for point in line),
    ):
        assert -0.01 <= x <= found.width + 0.01 and -0.01 <= y <= found.height + 0.01
    assert found == laid(nodes, edges)


def test_three_hundred_components_are_laid_out_in_time() -> None:
    nodes = [f"c{number}" for number in range(300)]
    edges = [(nodes[number // 3], nodes[number]) for number in range(1, 300)]
    began = time.process_time()
    assert not overlapping(laid(nodes, edges))
    print(f"{time.process_time() - began:.2f} s")


def test_the_neighborhood_of_a_component() -> None:
    edges = [("a", "b"), ("b", "c"), ("c", "d"), ("x", "c")]
    assert neighborhood(edges, "b", 1) == {"a", "b", "c"}
    assert neighborhood(edges, "a") == {"a", "b", "c"}
