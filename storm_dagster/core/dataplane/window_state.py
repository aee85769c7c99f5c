"""Windows of a task as values: their shape, what checkpoints hold of them, and how they move to
other tasks.

Pure. The tuples of windows are numbered by their arrival. In the order of (stamp, number) a prefix
of them, the log, has entered the windows; the rest waits for the watermark.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec

from storm_dagster.model.errors import InvalidTopology

DEFAULT_WATERMARK_MS = 1000
DEFAULT_IDLE_MS = 10_000
"""Longer than a worker takes to start again, so that a sending task that restarts is not taken for
a silent one.
"""


@dataclass(frozen=True)
class WindowShape:
    """Shape of a bolt's windows, from its conf. One of the lengths, or a gap, is set."""

    length_count: int | None = None
    length_ms: int | None = None
    slide_count: int | None = None
    slide_ms: int | None = None
    gap_ms: int | None = None
    """Sessions: a key that was silent for this long has ended its session."""
    event_time: bool = False
    lag_ms: int = 0
    watermark_ms: int = DEFAULT_WATERMARK_MS
    late_stream: str | None = None
    idle_ms: int = DEFAULT_IDLE_MS
    """Silence after which the watermark does not wait for a sending task."""

    @property
    def parts(self) -> list[Any]:
        """What positions in a log of tuples depend on."""
        return [
            self.length_count,
            self.length_ms,
            self.slide_count,
            self.slide_ms,
            self.gap_ms,
            self.event_time,
        ]


def window_shape(conf: Mapping[str, Any], owner: str) -> WindowShape:
    """The shape in ``conf`` (the component's conf over the topology's).

    :class:`InvalidTopology` for no length or two of them, and a late stream without a timestamp
    field.
    """

    def value(key: str) -> Any:
        return conf.get(f"topology.bolts.{key}")

    length_count, length_ms = value("window.length.count"), value("window.length.duration.ms")
    slide_count = value("window.sliding.interval.count")
    slide_ms = value("window.sliding.interval.duration.ms")
    gap_ms = value("window.session.gap.ms")
    event_time = value("tuple.timestamp.field.name") is not None or bool(
        value("tuple.timestamp.extractor")
    )
    for name, two in (
        ("window lengths", (length_count, length_ms)),
        ("sliding intervals", (slide_count, slide_ms)),
    ):
        if None not in two:
            raise InvalidTopology(
                f"{owner} has two {name}, a count and a duration: remove one of them"
            )
    if gap_ms is not None:
        if any(part is not None for part in (length_count, length_ms, slide_count, slide_ms)):
            raise InvalidTopology(
                f"{owner} has a session gap and a window length: a session has no length"
            )
    elif length_count is None and length_ms is None:
        raise InvalidTopology(
            f"{owner} has no window length: set window = Window.tumbling(...), Window.sliding(...) or Window.session(...)"
        )
    elif slide_count is None and slide_ms is None:
        slide_count = 1
    if value("late.tuple.stream") is not None and not event_time:
        raise InvalidTopology(
            f"{owner} names a stream for late tuples, but no timestamp field: only stamped tuples can be late"
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
    )


class HeldTuple(msgspec.Struct, eq=False):
    """One tuple of a window."""

    stamp: int
    number: int
    item: Any
    key: Any = None
    """Of its session."""
    seen: int | None = None
    """It moved here from a task that had evaluated its windows up to this end."""


class Position(msgspec.Struct, omit_defaults=True):
    """State of the windows beside their tuples."""

    shape: list[Any] = []
    watermark: int | None = None
    newest: list[tuple[Any, int]] = []
    """(sending task, its newest stamp)."""
    last_end: int | None = None
    """End of the last evaluated time window."""
    since: int = 0
    """Tuples since the last window, for counted slides."""
    entered: int = 0
    """Tuples of the log. The rest are indices in it."""
    start: int = 0
    """First one that a later window may contain."""
    first: int = 0
    """First one of the last evaluated window."""
    last: int = 0
    """One after that window's last one."""


place = attrgetter("stamp", "number")
"""Place of an entry in the order of windows."""


def in_order(entries: Iterable[HeldTuple]) -> list[HeldTuple]:
    """The entries by stamp and arrival."""
    return sorted(entries, key=place)


def detach(position: Position, entries: Iterable[HeldTuple]) -> list[HeldTuple]:
    """The entries that windows still need where ``position`` means nothing: another task, or
    another shape.

    Of tuples that were in a window already only those of windows in time are kept: they remember
    its end.
    """
    _, length_ms, _, slide_ms, *_ = position.shape
    kept: list[HeldTuple] = []
    for at, entry in enumerate(in_order(entries)):
        if at < position.last:
            if at < position.start or length_ms is None or slide_ms is None:
                continue
            entry.seen = max(entry.seen or 0, position.last_end or 0)
        elif at < position.start:
            continue
        kept.append(entry)
    return kept


def join(positions: list[Position]) -> Position | None:
    """Position of a task that goes on with tuples of several ones: the earliest of them, so that
    nothing that was in time becomes late. Its log is empty.
    """
    if not positions:
        return None
    newest: dict[Any, int] = {}
    for position in positions:
        for source, stamp in position.newest:
            source = tuple(source)
            newest[source] = min(stamp, newest.get(source, stamp))
    marks = [position.watermark for position in positions]
    ends = [position.last_end for position in positions]
    known = None not in marks
    return Position(
        shape=positions[-1].shape,
        watermark=min(mark for mark in marks if mark is not None) if known else None,
        newest=list(newest.items()),
        last_end=min(end for end in ends if end is not None)
        if known and None not in ends
        else None,
    )
