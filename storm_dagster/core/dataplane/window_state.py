"""Windows of a task as values: their shape and their state in checkpoints.

Pure. Windows also move to other tasks. The tuples of windows are numbered by their arrival. In the
order of (stamp, number) a prefix of them, the log, has entered the windows; the others wait for the
watermark.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec

from storm_dagster.model.errors import InvalidTopology

MAX_AHEAD = "topology.windows.max.ahead.secs"
"""Conf key of the time by which a stamp may be ahead of the worker's clock, seconds."""
WAITS_METRIC = "why no window is due"
"""Metric with the reason why the next window of a task is not due; empty if no tuple waits."""
DEFAULT_WATERMARK_MS = 1000
"""Default interval between two computations of the watermark."""
DEFAULT_IDLE_MS = 10_000
"""Longer than a worker takes to restart, so that a sending task that restarts is not silent."""


@dataclass(frozen=True)
class WindowShape:
    """Shape of a bolt's windows, from its conf; a length or a gap is set.

    Lengths and sliding intervals are a number of tuples or milliseconds, never both.
    """

    length_count: int | None = None
    length_ms: int | None = None
    slide_count: int | None = None
    slide_ms: int | None = None
    gap_ms: int | None = None
    """Sessions: silence of a key after which its session has ended."""
    event_time: bool = False
    """True if a tuple has its own timestamp; else the time of its arrival counts."""
    lag_ms: int = 0
    """Time by which the watermark is behind the newest stamps, for tuples out of order."""
    watermark_ms: int = DEFAULT_WATERMARK_MS
    """Interval between two computations of the watermark."""
    late_stream: str | None = None
    """Stream that late tuples are emitted on; ``None``: they are dropped."""
    idle_ms: int = DEFAULT_IDLE_MS
    """Silence after which the watermark does not wait for a sending task."""

    max_ahead_ms: int = 0
    """Time by which a stamp may be ahead of the worker's clock; 0: any time."""

    @property
    def parts(self) -> list[Any]:
        """The settings that positions in a log of tuples depend on."""
        return [
            self.length_count,
            self.length_ms,
            self.slide_count,
            self.slide_ms,
            self.gap_ms,
            self.event_time,
        ]


def _refuse_both(owner: str, name: str, count: Any, duration_ms: Any) -> None:
    """Raise :class:`InvalidTopology` if a window has both a count and a duration."""
    if count is not None and duration_ms is not None:
        raise InvalidTopology(f"{owner} has two {name}, a count and a duration: remove one of them")


def window_shape(conf: Mapping[str, Any], owner: str) -> WindowShape:
    """Read the shape from ``conf`` (the component's conf over the topology's).

    Without a sliding interval the windows slide with every tuple. Raises :class:`InvalidTopology`
    without a length, with two lengths or two intervals, with a session gap beside one of these, and
    for a late stream without timestamps. ``owner`` names the component in the error.
    """

    def value(key: str) -> Any:
        return conf.get(f"topology.bolts.{key}")

    length_count = value("window.length.count")
    length_ms = value("window.length.duration.ms")
    slide_count = value("window.sliding.interval.count")
    slide_ms = value("window.sliding.interval.duration.ms")
    gap_ms = value("window.session.gap.ms")
    has_timestamp_field = value("tuple.timestamp.field.name") is not None
    event_time = has_timestamp_field or bool(value("tuple.timestamp.extractor"))
    _refuse_both(owner, "window lengths", length_count, length_ms)
    _refuse_both(owner, "sliding intervals", slide_count, slide_ms)
    if gap_ms is not None:
        lengths = (length_count, length_ms, slide_count, slide_ms)
        if any(length is not None for length in lengths):
            raise InvalidTopology(
                f"{owner} has a session gap and a window length: a session has no length"
            )
    elif length_count is None and length_ms is None:
        raise InvalidTopology(
            f"{owner} has no window length: set window = Window.tumbling(...), "
            "Window.sliding(...) or Window.session(...)"
        )
    elif slide_count is None and slide_ms is None:
        slide_count = 1
    if value("late.tuple.stream") is not None and not event_time:
        raise InvalidTopology(
            f"{owner} names a stream for late tuples, but no timestamp field: only stamped tuples "
            "can be late"
        )
    return WindowShape(
        length_count,
        length_ms,
        slide_count,
        slide_ms,
        gap_ms,
        event_time=event_time,
        lag_ms=int(value("tuple.timestamp.max.lag.ms") or 0),
        watermark_ms=int(value("watermark.event.interval.ms") or DEFAULT_WATERMARK_MS),
        late_stream=value("late.tuple.stream"),
        idle_ms=int(value("watermark.idle.timeout.ms") or DEFAULT_IDLE_MS),
        max_ahead_ms=round(1000 * float(conf.get(MAX_AHEAD) or 0)),
    )


class HeldTuple(msgspec.Struct, eq=False):
    """One tuple of a window."""

    stamp: int
    """Milliseconds: its timestamp, or the time of its arrival."""
    number: int
    """Number of its arrival in this task."""
    item: Any
    """The tuple itself."""
    key: Any = None
    """Key of its session; ``None`` for other windows, and for sessions without a key."""
    evaluated_until: int | None = None
    """End up to which the task that it came from had evaluated its windows."""


class WindowPosition(msgspec.Struct, omit_defaults=True):
    """State of the windows beside their tuples."""

    shape: list[Any] = []
    """:attr:`WindowShape.parts` of the windows."""
    watermark: int | None = None
    """Milliseconds; ``None`` before the first one."""
    newest: list[tuple[Any, int]] = []
    """(sending task, its newest stamp)."""
    last_end: int | None = None
    """End of the last evaluated time window."""
    since: int = 0
    """Tuples since the last window, for counted slides."""
    entered: int = 0
    """Number of tuples in the log."""
    start: int = 0
    """Index in the log of the first tuple that a later window may contain."""
    first: int = 0
    """Index of the first tuple of the last evaluated window."""
    last: int = 0
    """Index after the last tuple of that window."""


window_order = attrgetter("stamp", "number")
"""Sort key of the entries of windows: by stamp, then by arrival."""


def in_order(entries: Iterable[HeldTuple]) -> list[HeldTuple]:
    """Sort the entries by stamp and arrival."""
    return sorted(entries, key=window_order)


def entries_for_other_windows(
    position: WindowPosition, entries: Iterable[HeldTuple]
) -> list[HeldTuple]:
    """The entries that windows of another task, or of another shape, need.

    ``position`` is not valid there. Of tuples that were in a window already, only those of time
    windows are needed: they remember the end of that window, in ``evaluated_until``, which is
    changed. The result is in the order of :func:`in_order`.
    """
    _, length_ms, _, slide_ms, *_ = position.shape
    needed: list[HeldTuple] = []
    for index, entry in enumerate(in_order(entries)):
        if index < position.start:
            continue
        if index < position.last:
            if length_ms is None or slide_ms is None:
                continue
            entry.evaluated_until = max(entry.evaluated_until or 0, position.last_end or 0)
        needed.append(entry)
    return needed


def join_positions(positions: list[WindowPosition]) -> WindowPosition | None:
    """Position of a task that continues with the tuples of several tasks.

    It is the earliest of them, so that no tuple that was in time becomes late. Its log is empty.
    ``None`` without positions.
    """
    if not positions:
        return None
    newest: dict[Any, int] = {}
    for position in positions:
        for source, stamp in position.newest:
            # A list, as it was read from a log.
            source = tuple(source)
            newest[source] = min(stamp, newest.get(source, stamp))
    watermark = _earliest(position.watermark for position in positions)
    last_end: int | None = None
    if watermark is not None:
        last_end = _earliest(position.last_end for position in positions)
    return WindowPosition(
        shape=positions[-1].shape,
        watermark=watermark,
        newest=list(newest.items()),
        last_end=last_end,
    )


def _earliest(times: Iterable[int | None]) -> int | None:
    """The least time; ``None`` if one of them is unknown."""
    known_times: list[int] = []
    for time in times:
        if time is None:
            return None
        known_times.append(time)
    return min(known_times)
