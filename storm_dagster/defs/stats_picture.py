"""Throughput and latency of topologies over time, as one SVG picture for the Dagster UI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from storm_dagster.defs.svg import box, clean, colour, document, label, short

__all__ = ["Point", "stats_picture"]

_WIDTH, _HEIGHT = 760, 190
_LEFT, _RIGHT, _TOP, _GAP = 64, 44, 40, 46
_MOST_LINES = 12


@dataclass(frozen=True)
class Point:
    """What one component did between two samples."""

    series: str
    """``topology / component``."""
    at: datetime
    per_second: float
    """Tuples executed (by a spout: emitted) a second."""
    latency_ms: float
    """Complete latency of a spout, execute latency of a bolt."""


def stats_picture(points: Sequence[Point], title: str) -> str:
    """SVG text: throughput above, latency below, over the same time; one line for each component.

    The twelve busiest components are drawn. A single sample is a dot.
    """
    by_series: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda one: one.at):
        by_series.setdefault(point.series, []).append(point)
    busiest = sorted(by_series, key=lambda name: (-max(p.per_second for p in by_series[name]), name))
    shown = {name: by_series[name] for name in busiest[:_MOST_LINES]}
    times = [point.at.timestamp() for line in shown.values() for point in line]
    first, last = min(times, default=0.0), max(times, default=0.0)
    colours = {name: colour(index) for index, name in enumerate(shown)}
    body: list[str] = []
    y = _TOP
    for caption, values in (
        ("tuples a second", {name: [p.per_second for p in line] for name, line in shown.items()}),
        ("latency, ms", {name: [p.latency_ms for p in line] for name, line in shown.items()}),
    ):
        body.extend(_panel(y, caption, shown, values, colours, first, last))
        y += _HEIGHT + _GAP
    y -= 8
    for index, name in enumerate(shown):
        x = _LEFT + (index % 3) * 228
        body.append(
            f'<rect x="{x}" y="{y}" width="14" height="4" fill="{colours[name]}"/>'
            + label(x + 20, y + 6, short(name), 11, "#374151")
        )
        if index % 3 == 2:
            y += 18
    hidden = len(by_series) - len(shown)
    if hidden > 0:
        body.append(label(_LEFT, y + 22, f"and {hidden} more components", 11, "#6b7280"))
    return document(_WIDTH, int(y + 34), title, body)


def _panel(
    y: int,
    caption: str,
    lines: Mapping[str, Sequence[Point]],
    values: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
    first: float,
    last: float,
) -> Iterable[str]:
    width = _WIDTH - _LEFT - _RIGHT
    top = _nice(max((value for line in values.values() for value in line), default=0.0))
    yield label(_LEFT, y + 6, caption, 12, "#374151", bold=True)
    y += 14
    height = _HEIGHT - 14
    yield box(_LEFT, y, width, height, "#f9fafb", "#d1d5db")
    for step in range(5):
        level = y + height * (1 - step / 4)
        if 0 < step < 4:
            yield f'<path d="M{_LEFT} {level:.1f}H{_LEFT + width}" stroke="#e5e7eb"/>'
        yield _right(_LEFT - 6, level + 4, _short_number(top * step / 4))
    span = last - first
    for step in range(5):
        at = first + span * step / 4
        x = _LEFT + width * step / 4
        if span or not step:
            yield _middle(x, y + height + 16, datetime.fromtimestamp(at).astimezone().strftime("%d %b %H:%M"))
        if not span:
            break
    for name, line in lines.items():
        spots = [
            (
                _LEFT + (width * (point.at.timestamp() - first) / span if span else width / 2),
                y + height * (1 - value / top),
            )
            for point, value in zip(line, values[name], strict=True)
        ]
        path = "L".join(f"{x:.1f} {z:.1f}" for x, z in spots)
        yield f"<g><title>{clean(name).replace('&', '&amp;').replace('<', '&lt;')}</title>"
        if len(spots) > 1:
            yield f'<path d="M{path}" fill="none" stroke="{colours[name]}" stroke-width="2"/>'
        if len(spots) <= 60:
            for x, z in spots:
                yield f'<circle cx="{x:.1f}" cy="{z:.1f}" r="2.5" fill="{colours[name]}"/>'
        yield "</g>"


def _nice(most: float) -> float:
    """The least of 1, 2, 4, 8 and their powers of ten that is not below ``most``."""
    if most <= 0:
        return 1.0
    scale = 1e-3
    while scale * 10 < most:
        scale *= 10
    return next(step * scale for step in (1, 2, 4, 8, 10) if step * scale >= most * 0.999)


def _short_number(value: float) -> str:
    for size, sign in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{sign}"
    return f"{value:.3g}"


def _right(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y:.1f}" font-size="10" fill="#6b7280" text-anchor="end">{text}</text>'


def _middle(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="10" fill="#6b7280" text-anchor="middle">{text}</text>'
