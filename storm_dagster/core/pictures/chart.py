"""Charts over time: a few lines, with gaps where nothing is known."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

from storm_dagster.core.pictures.svg import FONT, clean
from storm_dagster.model.amounts import compact, percent

_WIDTH, _HEIGHT = 460, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 22
_COLORS = ("#1f6fb8", "#9a5b00", "#b3261e", "#2e7d4f")
_DASHES = ("", ' stroke-dasharray="7 3"', ' stroke-dasharray="2 3"', ' stroke-dasharray="9 3 2 3"')
"""Lines differ without their colors, too."""
_LEVELS = "0123456789abcdef"


@dataclass(frozen=True)
class Line:
    """One line: (epoch seconds, value), oldest first; ``None`` where there is none."""

    label: str
    points: Sequence[tuple[float, float | None]]


def chart_picture(
    lines: Sequence[Line], title: str, *, since: float, until: float, interval: float
) -> str:
    """SVG text from ``since`` to ``until`` (epoch seconds, shown in UTC); points further apart than
    two and a half ``interval`` are not joined, and the time between them is marked.
    """
    top = nice_top(
        max((value for line in lines for _, value in line.points if value is not None), default=0.0)
    )
    span = max(1.0, until - since)

    def place(at: float, value: float) -> tuple[float, float]:
        across = _LEFT + (at - since) / span * (_WIDTH - _LEFT - _RIGHT)
        return across, _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)

    body: list[str] = []
    times = sorted({at for line in lines for at, _ in line.points})
    for start, end in [(since, times[0] if times else until), *pairwise(times)]:
        if end - start > 2.5 * interval:
            x, a = place(start, 0)[0], place(end, 0)[0]
            words = "no figures: the topology master was not there"
            body.append(
                f'<g><title>{words}</title><rect class="gap" x="{x:.1f}" y="{_TOP}" width="{a - x:.1f}" '
                f'height="{_HEIGHT - _TOP - _BOTTOM}" fill="#eceef1"/></g>'
            )
    for share in (0.0, 0.5, 1.0):
        y = place(since, top * share)[1]
        body.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#d5dae1"/>')
        body.append(_label(_LEFT - 6, y + 4, compact(top * share), "end"))
    for number in range(4):
        at = since + span * number / 3
        words = (
            f"{datetime.fromtimestamp(at, timezone.utc):{'%H:%M' if span >= 600 else '%H:%M:%S'}}"
        )
        body.append(
            _label(
                place(at, 0)[0], _HEIGHT - 6, words, ("start", "middle", "middle", "end")[number]
            )
        )
    for number, line in enumerate(lines):
        body += [
            f'<path class="line{number % 4}" d="{_way([place(*one) for one in part])}" fill="none" '
            f'stroke="{_COLORS[number % 4]}" stroke-width="1.8" stroke-linejoin="round"{_DASHES[number % 4]}/>'
            for part in _joined(line.points, 2.5 * interval)
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="{FONT}" '
        f'role="img" aria-label={quoteattr(clean(title))}>{"".join(body)}</svg>'
    )


def trend_picture(trend: str) -> str:
    """A line without axes, of the characters of ``TaskBeats.trend``; its colors come from the page.
    Empty without any.
    """
    points = [
        (3.0 * at, 16.0 - int(one, 16) if one in _LEVELS else None)
        for at, one in enumerate(trend[:30])
    ]
    parts = _joined(points, 3)
    if not parts:
        return ""
    words = f"last hour: at its end {percent((16 - parts[-1][-1][1]) / 15)} of the highest rate"
    way = "".join(_way(part, 0) for part in parts)
    return f'<svg class="trend" width="90" height="18" role="img" aria-label="{words}"><path class="line0" d="{way}"/></svg>'


def key_picture(number: int) -> str:
    """The sample of the number-th line, for a legend."""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" class="key" width="26" height="8" aria-hidden="true">'
        f'<path class="line{number % 4}" d="M0 4H26" stroke="{_COLORS[number % 4]}" stroke-width="2"{_DASHES[number % 4]}/></svg>'
    )


def nice_top(most: float) -> float:
    """The end of an axis: 1, 2, 2.5 or 5 times a power of ten, at least ``most``; 1 without any
    value.
    """
    if most <= 0 or not math.isfinite(most):
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1, 2, 2.5, 5, 10, 20) if step * power >= most * 0.9999)


def _joined(
    points: Iterable[tuple[float, float | None]], most: float
) -> list[list[tuple[float, float]]]:
    """The parts of a line between gaps."""
    parts: list[list[tuple[float, float]]] = []
    last: float | None = None
    for at, value in points:
        if value is None:
            last = None
            continue
        if last is None or at - last > most:
            parts.append([])
        parts[-1].append((at, value))
        last = at
    return parts


def _way(points: Sequence[tuple[float, float]], digits: int = 1) -> str:
    """The path through the points; one alone is a dot."""
    return (
        "M"
        + "L".join(f"{x:.{digits}f} {y:.{digits}f}" for x, y in points)
        + ("h0.1" if len(points) == 1 else "")
    )


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="dim" x="{x:.1f}" y="{y:.1f}" font-size="11" text-anchor="{anchor}" fill="#4b5563">{escape(text)}</text>'
