"""Pictures of a whole cluster: supervisors x slots, coloured by topology, and curves over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from storm_dagster.defs.svg import box, clean, colour, document, label, short

__all__ = ["DrawnSlot", "DrawnSupervisor", "cluster_picture", "curves_picture"]

_MARGIN = 12
_WIDTH = 760
_ROW = 30
_LABEL = 84
_HEADER = 28
_MOST_SUPERVISORS = 40
_PLOT_HEIGHT = 150
_MOST_CURVES = 10


@dataclass(frozen=True)
class DrawnSlot:
    """A slot as it is drawn; free without a ``topology``."""

    port: int
    topology: str | None = None
    components: Mapping[str, int] | None = None
    """Component -> how many of its tasks are in the slot."""
    state: str = "running"
    """``running``, ``starting`` (hatched) or ``dead`` (red frame)."""


@dataclass(frozen=True)
class DrawnSupervisor:
    """A supervisor as it is drawn; with ``gone``, one that assignments name but that does not live."""

    id: str
    host: str
    slots: Sequence[DrawnSlot]
    gone: bool = False


def cluster_picture(supervisors: Sequence[DrawnSupervisor], title: str) -> str:
    """SVG text: one frame for each supervisor, one row for each slot.

    A row has the colour of its topology and one segment for each component, as wide as its share of the
    tasks. Free slots are dashed, those of dead workers framed in red. Beyond 40 supervisors the rest are counted.
    """
    drawn = list(supervisors[:_MOST_SUPERVISORS])
    names = sorted({slot.topology for item in supervisors for slot in item.slots if slot.topology})
    colours = {name: colour(index) for index, name in enumerate(names)}
    column = (_WIDTH - 3 * _MARGIN) // 2
    tops = [_MARGIN + _HEADER, _MARGIN + _HEADER]
    body: list[str] = []
    for item in drawn:
        # Each frame goes below the shorter column, so that many supervisors fit on one screen.
        side = 0 if tops[0] <= tops[1] else 1
        left, top = _MARGIN + side * (column + _MARGIN), tops[side]
        height = _HEADER + max(1, len(item.slots)) * _ROW + 6
        line = "#dc2626" if item.gone else "#c3c9d1"
        body.append(box(left, top, column, height, "#f5f6f8", line))
        words = f"{short(item.id)} on {short(item.host)}{' (gone)' if item.gone else ''}"
        body.append(label(left + 8, top + 18, words, 12, "#2b2f36", bold=True))
        for row, slot in enumerate(item.slots):
            body.extend(_slot(slot, left + 8, top + _HEADER + row * _ROW, column - 16, colours))
        tops[side] = top + height + _MARGIN
    y = max(tops)
    if len(supervisors) > len(drawn):
        body.append(
            label(_MARGIN, y + 8, f"and {len(supervisors) - len(drawn)} more supervisors", 12, "#6b7280")
        )
        y += 24
    legend, y = _legend(colours, y)
    return document(_WIDTH, y, title, [*body, *legend])


def _slot(slot: DrawnSlot, x: float, y: float, width: float, colours: Mapping[str, str]) -> Iterable[str]:
    dead = slot.state == "dead"
    yield label(
        x,
        y + 17,
        str(slot.port) + (" \u2717" if dead else ""),
        12,
        "#dc2626" if dead else "#374151",
        bold=dead,
    )
    left, room = x + _LABEL - 30, width - _LABEL + 30
    if slot.topology is None:
        yield box(left, y, room, _ROW - 6, "#ffffff", "#9aa4b2", ' stroke-dasharray="4 3"')
        yield label(left + 8, y + 16, "free", 11, "#6b7280")
        return
    fill = colours[slot.topology]
    counts = dict(sorted((slot.components or {}).items(), key=lambda item: (item[0].startswith("__"), item)))
    total = sum(counts.values())
    at = left
    for index, (component, count) in enumerate(counts.items()):
        share = room * count / total
        words = f"{slot.topology}: {component} x{count}"
        opacity = 0.45 if slot.state == "starting" else (1.0, 0.82)[index % 2]
        yield (
            f'<g><title>{escape(clean(words))}</title><rect x="{at:.1f}" y="{y}" width="{max(1.0, share):.1f}" '
            f'height="{_ROW - 6}" fill="{fill}" fill-opacity="{opacity}"/></g>'
        )
        text = f"{component} x{count}" if count > 1 else component
        letters = int((share - 8) / 6.2)
        if len(text) > letters > 3:
            text = text[: letters - 1] + "\u2026"
        if len(text) <= letters:
            yield label(at + 5, y + 16, text, 11, "#1f2937" if slot.state == "starting" else "#ffffff")
        at += share
    if not total:
        yield box(left, y, room, _ROW - 6, fill, fill)
    if dead:
        yield box(left, y, room, _ROW - 6, "none", "#dc2626", ' stroke-width="2.5"')


def _legend(colours: Mapping[str, str], y: float) -> tuple[list[str], int]:
    parts: list[str] = []
    x = float(_MARGIN)
    for name, fill in list(colours.items())[:60]:
        words = short(name)
        span = 26 + 7 * len(words)
        if x + span > _WIDTH - _MARGIN and x > _MARGIN:
            x, y = float(_MARGIN), y + 22
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{fill}"/>')
        parts.append(label(x + 19, y + 11.5, words, 12, "#374151"))
        x += span
    return parts, int(y + 22 + _MARGIN)


def curves_picture(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], title: str) -> str:
    """SVG text: one panel below the other, each with one curve for every name in it.

    A point is (epoch seconds, value). Panels share the time axis. Above ten curves the largest ten are drawn
    and the rest are counted.
    """
    names = sorted({name for curves in panels.values() for name in curves})
    colours = {name: colour(index) for index, name in enumerate(names)}
    times = [at for curves in panels.values() for points in curves.values() for at, _ in points]
    begin, end = (min(times), max(times)) if times else (0.0, 1.0)
    body: list[str] = []
    y = _MARGIN + _HEADER
    for panel, curves in panels.items():
        body.extend(_panel(panel, curves, y, begin, max(end, begin + 1.0), colours))
        y += _PLOT_HEIGHT + 58
    legend, bottom = _legend({name: colours[name] for name in names[:_MOST_CURVES]}, y)
    return document(_WIDTH, bottom, title, [*body, *legend])


def _panel(
    name: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    top: float,
    begin: float,
    end: float,
    colours: Mapping[str, str],
) -> Iterable[str]:
    left, right = _MARGIN + 64.0, _WIDTH - _MARGIN - 10.0
    upper, lower = top + 20.0, top + 20.0 + _PLOT_HEIGHT
    shown = sorted(curves, key=lambda key: -max((value for _, value in curves[key]), default=0.0))[
        :_MOST_CURVES
    ]
    highest = _nice(max((value for key in shown for _, value in curves[key]), default=0.0))
    yield label(_MARGIN, top + 12, name, 12, "#2b2f36", bold=True)
    if len(curves) > len(shown):
        yield label(right - 150, top + 12, f"and {len(curves) - len(shown)} lower curves", 11, "#6b7280")
    for part in range(5):
        height = lower - (lower - upper) * part / 4
        yield (
            f'<line x1="{left}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}" stroke="#e5e7eb"/>'
            f'<text x="{left - 6}" y="{height + 4:.1f}" font-size="11" text-anchor="end" fill="#6b7280">'
            f"{_number(highest * part / 4)}</text>"
        )
    minutes = (end - begin) / 60
    yield label(
        left,
        lower + 16,
        f"{minutes:.0f} min ago" if minutes >= 1 else f"{end - begin:.0f} s ago",
        11,
        "#6b7280",
    )
    yield label(right - 22, lower + 16, "now", 11, "#6b7280")
    for key in shown:
        points = [
            (
                left + (right - left) * (at - begin) / (end - begin),
                lower - (lower - upper) * min(1.0, max(0.0, value) / highest),
            )
            for at, value in curves[key]
        ]
        if not points:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colours[key]}" stroke-width="2" stroke-linejoin="round"/>'
        x, y = points[-1]
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[key]}"/>'


def _nice(value: float) -> float:
    """The next of 1, 2, 2.5, 5, 10 times a power of ten."""
    if not value > 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= value * 0.999)


def _number(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:.3g}"
