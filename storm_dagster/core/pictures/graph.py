"""Picture of a topology: components from left to right, and their streams.

Colors are attributes, for viewers without a style sheet; the classes let a page choose others, for
a dark screen.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

from storm_dagster.core.pictures.layout import Point, lay_out
from storm_dagster.core.pictures.svg import FONT, clean, short
from storm_dagster.model.amounts import compact, percent

WIDTH = 184
"""Width of a box, in pixels."""
HEIGHT = 84
"""Height of a box, in pixels."""
_GAP = (84, 26)
"""Least distance of two boxes, across and down."""
_MARGIN = 16
"""Room around the graph."""

State = Literal["spout", "calm", "busy", "slow"]
"""Kind or load of a component, which its color shows."""
_FILLS: Mapping[State, tuple[str, str]] = {
    "spout": ("#f3effc", "#6d5bb5"),
    "calm": ("#eaf3fd", "#1f6fb8"),
    "busy": ("#fdf3e0", "#9a5b00"),
    "slow": ("#fde8e6", "#b3261e"),
}
"""State -> (ground, outline)."""
_ARROW = "".join(
    f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
    f'markerUnits="userSpaceOnUse" orient="auto"><path class="{name}" d="M0 0L8 4L0 8z" '
    f'fill="{fill}"/></marker>'
    for name, fill in (("head", "#6b7686"), ("head-waits", "#b3261e"))
)


@dataclass(frozen=True)
class DrawnComponent:
    """A component in the picture."""

    id: str
    state: State
    executors: int
    rows: tuple[str, ...] = ()
    """At most two lines below its name."""
    share: float | None = None
    """Capacity of its busiest task, as a bar with its number."""
    errors: int = 0
    link: str = ""
    """URL of its page; empty without a link."""


@dataclass(frozen=True)
class DrawnEdge:
    """All streams from one component to another."""

    source: str
    target: str
    rate: float
    """Tuples per second: the width of the line."""
    waits: bool = False
    """The receiver is behind: dashed."""


def graph_picture(
    components: Sequence[DrawnComponent], edges: Iterable[DrawnEdge], title: str
) -> str:
    """SVG text of the graph.

    Names are escaped, and cut where they do not fit; the whole name is the tooltip.
    """
    edge_of = {(edge.source, edge.target): edge for edge in edges}
    names = [component.id for component in components]
    layout = lay_out(names, edge_of, box=(WIDTH, HEIGHT), gap=_GAP)
    width = layout.width + 2 * _MARGIN
    height = layout.height + 2 * _MARGIN
    body = [_line(edge_of[ends], points) for ends, points in layout.lines.items()]
    body += [_box(component, layout.nodes[component.id]) for component in components]
    # Labels last: no thick line of another edge covers them.
    body += [_rate(edge_of[ends], points) for ends, points in layout.lines.items()]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" width="{width:.0f}" '
        f'height="{height:.0f}" '
        f'viewBox="{-_MARGIN} {-_MARGIN} {width:.0f} {height:.0f}" font-family="{FONT}" '
        f'role="group" aria-label={quoteattr(clean(title))}>{_ARROW}{"".join(body)}</svg>'
    )


def _line(edge: DrawnEdge, points: Sequence[Point]) -> str:
    """The line of an edge through its points, with its rate as the tooltip."""
    # 1.5 pixels without tuples, at most 9.5.
    width = 1.5 + min(8.0, 2.2 * math.log10(1 + edge.rate))
    text = f"{edge.source} to {edge.target}: {compact(edge.rate)} tuples/s"
    if edge.waits:
        name = "waits"
        color = "#b3261e"
        head = "head-waits"
        dashes = ' stroke-dasharray="7 4"'
        text += ", the receiver is behind"
    else:
        name = "flow"
        color = "#8a95a5"
        head = "head"
        dashes = ""
    return (
        f"<g><title>{escape(clean(text))}</title>"
        f'<path class="{name}" d="{_path(points)}" fill="none" stroke="{color}" '
        f'stroke-width="{width:.1f}" marker-end="url(#{head})"{dashes}/></g>'
    )


def _path(points: Sequence[Point]) -> str:
    """A line that leaves and arrives level, through all points."""
    first_x, first_y = points[0]
    parts = [f"M{first_x:.0f} {first_y:.0f}"]
    for (x, y), (next_x, next_y) in pairwise(points):
        if y == next_y:
            parts.append(f"H{next_x:.0f}")
            continue
        middle = (x + next_x) / 2
        parts.append(f"C{middle:.0f} {y:.0f} {middle:.0f} {next_y:.0f} {next_x:.0f} {next_y:.0f}")
    return "".join(parts)


def _rate(edge: DrawnEdge, points: Sequence[Point]) -> str:
    """The label of an edge."""
    # In the last gap, where lines of one receiver are still apart.
    x, y = points[-2]
    end_x, end_y = points[-1]
    text_x = (x + end_x) / 2
    text_y = (y + end_y) / 2 - 4
    return (
        f'<text class="rate" x="{text_x:.0f}" y="{text_y:.0f}" font-size="11" text-anchor="middle" '
        'fill="#374151" stroke="#ffffff" stroke-width="4" stroke-linejoin="round" '
        f'paint-order="stroke">{compact(edge.rate)}/s</text>'
    )


def _share_bar(x: float, y: float, share: float, state: State) -> list[str]:
    """A bar from ``x`` on, whose part ``share`` (0 to 1) has the color of the state."""
    room = WIDTH - 70
    _, color = _FILLS[state]
    return [
        f'<rect class="bar" x="{x:.0f}" y="{y:.0f}" width="{room}" height="6" '
        'rx="3" fill="#d5dae1"/>',
        f'<rect class="part {state}" x="{x:.0f}" y="{y:.0f}" '
        f'width="{room * share:.0f}" height="6" rx="3" fill="{color}"/>',
    ]


def _box(component: DrawnComponent, place: Point) -> str:
    """The box of a component with its upper left corner at ``place``."""
    x, y = place
    right = x + WIDTH - 12
    fill, outline = _FILLS[component.state]
    weight = 2.5 if component.state == "slow" else 1.2
    at_end = ' text-anchor="end"'
    parts = [
        f'<rect class="box {component.state}" x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" '
        f'height="{HEIGHT}" rx="6" fill="{fill}" '
        f'stroke="{outline}" stroke-width="{weight}"/>',
        _text(x + 12, y + 21, short(component.id, 19), 14, "name", "#111827", ' font-weight="600"'),
        _text(right, y + 21, f"\u00d7{component.executors}", 12, "dim", "#4b5563", at_end),
    ]
    for row, text in enumerate(component.rows[:2]):
        parts.append(_text(x + 12, y + 39 + 16 * row, short(text, 29), 11.5, "dim", "#374151"))
    if component.share is not None:
        share = min(1.0, component.share)
        parts += _share_bar(x + 12, y + 66, share, component.state)
        parts.append(_text(right, y + 72, percent(share), 11.5, "dim", "#374151", at_end))
    tooltip = [component.id, *component.rows]
    if component.errors:
        tooltip.append(f"{component.errors} errors")
        parts += _error_mark(x + WIDTH - 4, y + 2, component.errors)
    title = escape(clean(", ".join(tooltip).rstrip(", ")))
    content = f"<title>{title}</title>{''.join(parts)}"
    if component.link:
        return f"<a href={quoteattr(clean(component.link))}>{content}</a>"
    return f"<g>{content}</g>"


def _error_mark(x: float, y: float, errors: int) -> Iterator[str]:
    """A red circle with the number of errors, around this point."""
    yield f'<circle class="mark" cx="{x:.0f}" cy="{y:.0f}" r="10" fill="#b3261e"/>'
    yield _text(x, y + 4, compact(errors), 11, "count", "#ffffff", ' text-anchor="middle"')


def _text(
    x: float, y: float, text: str, size: float, name: str, color: str, extra: str = ""
) -> str:
    return (
        f'<text class="{name}" x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{color}"{extra}>'
        f"{escape(clean(text))}</text>"
    )
