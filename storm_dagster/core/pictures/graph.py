"""Picture of a topology: components from left to right, and what flows between them.

Colors stand in attributes for viewers without a style sheet; the classes let a page choose others,
for a dark screen.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

from storm_dagster.core.pictures.layout import Point, lay_out
from storm_dagster.core.pictures.svg import FONT, clean, short
from storm_dagster.model.amounts import compact, percent

WIDTH, HEIGHT = 184, 84
_GAP = (84, 26)
_MARGIN = 16

State = Literal["spout", "calm", "busy", "slow"]
_FILLS: Mapping[State, tuple[str, str]] = {
    "spout": ("#f3effc", "#6d5bb5"),
    "calm": ("#eaf3fd", "#1f6fb8"),
    "busy": ("#fdf3e0", "#9a5b00"),
    "slow": ("#fde8e6", "#b3261e"),
}
"""Ground and line."""


@dataclass(frozen=True)
class DrawnComponent:
    """A component as it is drawn."""

    id: str
    state: State
    executors: int
    rows: tuple[str, ...] = ()
    """At most two lines below its name."""
    share: float | None = None
    """Capacity of its busiest task, as a bar with its number."""
    errors: int = 0
    link: str = ""


@dataclass(frozen=True)
class DrawnEdge:
    """What flows from one component to another, all streams together."""

    source: str
    target: str
    rate: float
    """Tuples per second: the width of the line."""
    waits: bool = False
    """The receiver is behind: dashed."""


def graph_picture(
    components: Sequence[DrawnComponent], edges: Iterable[DrawnEdge], title: str
) -> str:
    """SVG text of the graph. Names are escaped, and cut where they do not fit; the whole name is
    the tooltip.
    """
    drawn = {(one.source, one.target): one for one in edges}
    found = lay_out([one.id for one in components], drawn, box=(WIDTH, HEIGHT), gap=_GAP)
    width, height = found.width + 2 * _MARGIN, found.height + 2 * _MARGIN
    body = [
        *(_line(drawn[edge], points) for edge, points in found.lines.items()),
        *(_box(one, found.nodes[one.id]) for one in components),
        # Labels last: no thick line of another edge runs over them.
        *(_rate(drawn[edge], points) for edge, points in found.lines.items()),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="{-_MARGIN} {-_MARGIN} {width:.0f} {height:.0f}" font-family="{FONT}" '
        f'role="group" aria-label={quoteattr(clean(title))}>{_ARROW}{"".join(body)}</svg>'
    )


_ARROW = "".join(
    f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
    f'markerUnits="userSpaceOnUse" orient="auto"><path class="{name}" d="M0 0L8 4L0 8z" fill="{fill}"/></marker>'
    for name, fill in (("head", "#6b7686"), ("head-waits", "#b3261e"))
)


def _line(edge: DrawnEdge, points: Sequence[Point]) -> str:
    width = 1.5 + min(8.0, 2.2 * math.log10(1 + edge.rate))
    extra, name = (' stroke-dasharray="7 4"', "waits") if edge.waits else ("", "flow")
    color, head = ("#b3261e", "head-waits") if edge.waits else ("#8a95a5", "head")
    words = f"{edge.source} to {edge.target}: {compact(edge.rate)} tuples/s{', the receiver is behind' if edge.waits else ''}"
    return (
        f"<g><title>{escape(clean(words))}</title>"
        f'<path class="{name}" d="{_path(points)}" fill="none" stroke="{color}" stroke-width="{width:.1f}" '
        f'marker-end="url(#{head})"{extra}/></g>'
    )


def _path(points: Sequence[Point]) -> str:
    """A line that leaves and arrives level, through all points."""
    parts = [f"M{points[0][0]:.0f} {points[0][1]:.0f}"]
    for (x, y), (a, b) in pairwise(points):
        middle = (x + a) / 2
        parts.append(
            f"C{middle:.0f} {y:.0f} {middle:.0f} {b:.0f} {a:.0f} {b:.0f}" if y != b else f"H{a:.0f}"
        )
    return "".join(parts)


def _rate(edge: DrawnEdge, points: Sequence[Point]) -> str:
    # In the last gap, where lines of one receiver are still apart.
    (x, y), (a, b) = points[-2], points[-1]
    at, text = ((x + a) / 2, (y + b) / 2), f"{compact(edge.rate)}/s"
    return (
        f'<text class="rate" x="{at[0]:.0f}" y="{at[1] - 4:.0f}" font-size="11" text-anchor="middle" fill="#374151" '
        f'stroke="#ffffff" stroke-width="4" stroke-linejoin="round" paint-order="stroke">{text}</text>'
    )


def _box(one: DrawnComponent, place: Point) -> str:
    x, y = place
    fill, line = _FILLS[one.state]
    weight = 2.5 if one.state == "slow" else 1.2
    parts = [
        f'<rect class="box {one.state}" x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" '
        f'stroke="{line}" stroke-width="{weight}"/>',
        _text(x + 12, y + 21, short(one.id, 19), 14, "name", "#111827", ' font-weight="600"'),
        _text(
            x + WIDTH - 12,
            y + 21,
            f"\u00d7{one.executors}",
            12,
            "dim",
            "#4b5563",
            ' text-anchor="end"',
        ),
    ]
    for row, words in enumerate(one.rows[:2]):
        parts.append(_text(x + 12, y + 39 + 16 * row, short(words, 29), 11.5, "dim", "#374151"))
    if one.share is not None:
        room = WIDTH - 70
        parts += [
            f'<rect class="bar" x="{x + 12:.0f}" y="{y + 66:.0f}" width="{room}" height="6" rx="3" fill="#d5dae1"/>',
            f'<rect class="part {one.state}" x="{x + 12:.0f}" y="{y + 66:.0f}" width="{room * min(1.0, one.share):.0f}" '
            f'height="6" rx="3" fill="{line}"/>',
            _text(
                x + WIDTH - 12,
                y + 72,
                percent(min(1.0, one.share)),
                11.5,
                "dim",
                "#374151",
                ' text-anchor="end"',
            ),
        ]
    if one.errors:
        parts.append(
            f'<circle class="mark" cx="{x + WIDTH - 4:.0f}" cy="{y + 2:.0f}" r="10" fill="#b3261e"/>'
        )
        parts.append(
            _text(
                x + WIDTH - 4,
                y + 6,
                compact(one.errors),
                11,
                "count",
                "#ffffff",
                ' text-anchor="middle"',
            )
        )
    words = ", ".join([one.id, *one.rows, f"{one.errors} errors" if one.errors else ""]).rstrip(
        ", "
    )
    inner = f"<title>{escape(clean(words))}</title>{''.join(parts)}"
    return f"<a href={quoteattr(clean(one.link))}>{inner}</a>" if one.link else f"<g>{inner}</g>"


def _text(
    x: float, y: float, text: str, size: float, name: str, color: str, extra: str = ""
) -> str:
    return f'<text class="{name}" x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{color}"{extra}>{escape(clean(text))}</text>'
