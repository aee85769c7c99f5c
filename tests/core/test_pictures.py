"""Charts and the graph of a topology: gaps are marked, names are text, and a viewer without a style
sheet sees the same.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from storm_dagster.core.pictures.chart import Line, chart_picture, nice_top, trend_picture
from storm_dagster.core.pictures.graph import DrawnComponent, DrawnEdge, graph_picture

SVG = "{http://www.w3.org/2000/svg}"


def classed(svg: str, name: str) -> list[ET.Element]:
    return [one for one in ET.fromstring(svg).iter() if name in (one.get("class") or "").split()]


def test_a_line_ends_where_nothing_is_known() -> None:
    points: list[tuple[float, float | None]] = [(at, 5.0) for at in (0, 10, 20, 30)]
    points += [(at, None if at == 320 else 7.0) for at in (300, 310, 320, 330)]
    svg = chart_picture([Line("rate", points)], "Rates", since=0, until=330, interval=10)
    assert len(classed(svg, "line0")) == 3, "apart by the gap, and by the value that is missing"
    (gap,) = classed(svg, "gap")
    assert float(gap.get("width") or 0) == pytest.approx(270 / 330 * (460 - 46 - 8), abs=0.5)
    assert ET.fromstring(svg).get("aria-label") == "Rates"


def test_a_chart_of_nothing_is_one_gap() -> None:
    svg = chart_picture([Line("rate", [])], "Rates", since=0, until=3600, interval=10)
    assert len(classed(svg, "gap")) == 1 and not classed(svg, "line0")


def test_a_trend_is_a_line_with_gaps_and_words() -> None:
    svg = trend_picture("..0f.8")
    assert '<path class="line0" d="M6 16L9 1M15 8h0.1"/>' in svg
    assert 'aria-label="last hour: at its end 53 % of the highest rate"' in svg
    assert trend_picture("") == trend_picture("..") == ""
    hostile = trend_picture('"><script>8' + "f" * 500)
    assert "script" not in hostile and len(hostile) < 500


@pytest.mark.parametrize(
    ("most", "top"), [(0, 1), (-1, 1), (0.3, 0.5), (1, 1), (7, 10), (18_200, 20_000), (24, 25)]
)
def test_an_axis_ends_at_a_round_number(most: float, top: float) -> None:
    assert nice_top(most) == pytest.approx(top)


def test_names_are_text_and_tooltips_have_them_in_full() -> None:
    name = "a<script>alert(1)</script>\x07" + "x" * 60
    svg = graph_picture(
        [
            DrawnComponent("lines", "spout", 1, ("9/s", "lag 3")),
            DrawnComponent(
                name, "slow", 2, ("9/s", "7 wait"), 1.4, errors=3, link='/t?focus="><script>'
            ),
        ],
        [DrawnEdge("lines", name, 1234.0, waits=True), DrawnEdge("lines", "unknown", 1.0)],
        "Components of <b>",
    )
    root = ET.fromstring(svg)
    assert not list(root.iter(f"{SVG}script")) and "\x07" not in svg
    titles = [one.text or "" for one in root.iter(f"{SVG}title")]
    assert any(name.replace("\x07", "") in title and "3 errors" in title for title in titles)
    (link,) = root.iter(f"{SVG}a")
    assert link.get("href") == '/t?focus="><script>'
    (line,) = classed(svg, "waits")
    assert line.get("stroke-dasharray") and line.get("stroke") == "#b3261e"
    assert [one.text for one in classed(svg, "rate")] == ["1.23k/s"]
    (part,), (bar,) = classed(svg, "part"), classed(svg, "bar")
    assert part.get("width") == bar.get("width"), "a share above one fills the bar"


def test_more_tuples_make_a_thicker_line() -> None:
    parts = [DrawnComponent(name, "calm", 1) for name in "abcd"]
    edges = [
        DrawnEdge("a", name, rate) for name, rate in (("b", 0.0), ("c", 100.0), ("d", 10_000.0))
    ]
    widths = [
        float(one.get("stroke-width") or 0)
        for one in classed(graph_picture(parts, edges, "t"), "flow")
    ]
    assert sorted(widths) == widths and len(set(widths)) == 3 and 0 < widths[0] < widths[-1] < 12
