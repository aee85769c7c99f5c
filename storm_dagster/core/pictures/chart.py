"""Charts over time: a few lines, with gaps where values are unknown."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

from storm_dagster.core.pictures.svg import FONT, clean
from storm_dagster.model.amounts import compact, percent

# In pixels: the picture, and the margins around the area of the lines.
_WIDTH = 460
_HEIGHT = 170
_LEFT = 46
_RIGHT = 8
_TOP = 8
_BOTTOM = 22
_LABELS = 4
"""Number of times that are written below the chart."""
_COLORS = ("#1f6fb8", "#9a5b00", "#b3261e", "#2e7d4f")
_DASHES = ("", ' stroke-dasharray="7 3"', ' stroke-dasharray="2 3"', ' stroke-dasharray="9 3 2 3"')
"""Lines differ without their colors, too."""
_LEVELS = "0123456789abcdef"
"""Characters of a trend that are a level; any other is a gap."""


@dataclass(frozen=True)
class Line:
    """One line: (epoch seconds, value), oldest first; ``None`` for an unknown value."""

    label: str
    points: Sequence[tuple[float, float | None]]


def chart_picture(
    lines: Sequence[Line], title: str, *, since: float, until: float, interval: float
) -> str:
    """SVG text from ``since`` to ``until`` (epoch seconds, shown in UTC).

    Points further apart than two and a half ``interval`` are not joined, and the time between them
    is marked.
    """
    chart = _Chart(lines, since, until, interval)
    body = [*chart.gaps(), *chart.grid(), *chart.times()]
    for number, line in enumerate(lines):
        body += chart.line(number, line)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="{FONT}" role="img" aria-label={quoteattr(clean(title))}>'
        f"{''.join(body)}</svg>"
    )


class _Chart:
    """Scales of one chart, and its parts as SVG text."""

    def __init__(self, lines: Sequence[Line], since: float, until: float, interval: float) -> None:
        times: set[float] = set()
        values = [0.0]
        for line in lines:
            times.update(time for time, _ in line.points)
            values += [value for _, value in line.points if value is not None]
        self._times = sorted(times)
        """Times of all points, of unknown values too."""
        self._top = nice_top(max(values))
        """Value at the upper end of the chart."""
        self._since = since
        self._until = until
        self._span = max(1.0, until - since)
        """Seconds from the left to the right end."""
        self._max_distance = 2.5 * interval
        """Seconds above which two points are not joined."""

    def _x(self, time: float) -> float:
        return _LEFT + (time - self._since) / self._span * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self._top * (_HEIGHT - _TOP - _BOTTOM)

    def gaps(self) -> Iterator[str]:
        """The marks of times without points."""
        first = self._times[0] if self._times else self._until
        for start, end in [(self._since, first), *pairwise(self._times)]:
            if end - start > self._max_distance:
                x = self._x(start)
                width = self._x(end) - x
                yield (
                    "<g><title>no statistics: the topology master was not there</title>"
                    f'<rect class="gap" x="{x:.1f}" y="{_TOP}" width="{width:.1f}" '
                    f'height="{_HEIGHT - _TOP - _BOTTOM}" fill="#eceef1"/></g>'
                )

    def grid(self) -> Iterator[str]:
        """Three level lines with their values."""
        for share in (0.0, 0.5, 1.0):
            value = self._top * share
            y = self._y(value)
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#d5dae1"/>'
            yield _label(_LEFT - 6, y + 4, compact(value), "end")

    def times(self) -> Iterator[str]:
        """Times of day below the chart."""
        pattern = "%H:%M" if self._span >= 600 else "%H:%M:%S"
        for number in range(_LABELS):
            time = self._since + self._span * number / (_LABELS - 1)
            text = datetime.fromtimestamp(time, timezone.utc).strftime(pattern)
            anchor = "middle"
            if number == 0:
                anchor = "start"
            elif number == _LABELS - 1:
                anchor = "end"
            yield _label(self._x(time), _HEIGHT - 6, text, anchor)

    def line(self, number: int, line: Line) -> Iterator[str]:
        """The parts of the number-th line."""
        style = number % 4
        for part in _split_at_gaps(line.points, self._max_distance):
            path = _path([(self._x(time), self._y(value)) for time, value in part])
            yield (
                f'<path class="line{style}" d="{path}" fill="none" stroke="{_COLORS[style]}" '
                f'stroke-width="1.8" stroke-linejoin="round"{_DASHES[style]}/>'
            )


def trend_picture(trend: str) -> str:
    """A line without axes, of the characters of ``TaskBeats.trend``.

    Its colors come from the page. The picture is empty if no character is a level.
    """
    # Three pixels for each level, in a picture of 90 x 18 pixels.
    points: list[tuple[float, float | None]] = []
    for index, level in enumerate(trend[:30]):
        y = 16.0 - int(level, 16) if level in _LEVELS else None
        points.append((3.0 * index, y))
    parts = _split_at_gaps(points, 3)
    if not parts:
        return ""
    _, last_y = parts[-1][-1]
    text = f"last hour: at its end {percent((16 - last_y) / 15)} of the highest rate"
    path = "".join(_path(part, 0) for part in parts)
    return (
        f'<svg class="trend" width="90" height="18" role="img" aria-label="{text}">'
        f'<path class="line0" d="{path}"/></svg>'
    )


def key_picture(number: int) -> str:
    """The sample of the number-th line, for a legend."""
    style = number % 4
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" class="key" width="26" height="8" '
        'aria-hidden="true">'
        f'<path class="line{style}" d="M0 4H26" stroke="{_COLORS[style]}" '
        f'stroke-width="2"{_DASHES[style]}/></svg>'
    )


def nice_top(highest: float) -> float:
    """The end of an axis: 1, 2, 2.5 or 5 times a power of ten.

    It is at least ``highest``, and 1 if that is not a positive number.
    """
    if highest <= 0 or not math.isfinite(highest):
        return 1.0
    power = 10.0 ** math.floor(math.log10(highest))
    for step in (1, 2, 2.5, 5, 10):
        # A value that is above a step only by a rounding error does not need the next one.
        if step * power >= highest * 0.9999:
            return step * power
    return 20 * power


def _split_at_gaps(
    points: Iterable[tuple[float, float | None]], max_distance: float
) -> list[list[tuple[float, float]]]:
    """The parts of a line between gaps."""
    parts: list[list[tuple[float, float]]] = []
    last_x: float | None = None
    for x, value in points:
        if value is None:
            last_x = None
            continue
        if last_x is None or x - last_x > max_distance:
            parts.append([])
        parts[-1].append((x, value))
        last_x = x
    return parts


def _path(points: Sequence[tuple[float, float]], digits: int = 1) -> str:
    """The path through the points; a single point is a dot."""
    path = "M" + "L".join(f"{x:.{digits}f} {y:.{digits}f}" for x, y in points)
    if len(points) == 1:
        path += "h0.1"
    return path


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text class="dim" x="{x:.1f}" y="{y:.1f}" font-size="11" text-anchor="{anchor}" '
        f'fill="#4b5563">{escape(text)}</text>'
    )
