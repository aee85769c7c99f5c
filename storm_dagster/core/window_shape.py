"""Shape of a bolt's windows, from its conf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storm_dagster.model.errors import InvalidTopology

DEFAULT_WATERMARK_MS = 1000
DEFAULT_IDLE_MS = 10_000
"""Longer than a worker takes to start again, so that a sending task that restarts is not taken for a silent one."""


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
        return [self.length_count, self.length_ms, self.slide_count, self.slide_ms, self.gap_ms, self.event_time]


def window_shape(conf: Mapping[str, Any], owner: str) -> WindowShape:
    """The shape in ``conf`` (the component's conf over the topology's).

    :class:`InvalidTopology` for no length or two of them, and a late stream without a timestamp field.
    """

    def value(key: str) -> Any:
        return conf.get(f"topology.bolts.{key}")

    length_count, length_ms = value("window.length.count"), value("window.length.duration.ms")
    slide_count = value("window.sliding.interval.count")
    slide_ms = value("window.sliding.interval.duration.ms")
    gap_ms = value("window.session.gap.ms")
    event_time = value("tuple.timestamp.field.name") is not None or bool(value("tuple.timestamp.extractor"))
    for name, two in (("window lengths", (length_count, length_ms)), ("sliding intervals", (slide_count, slide_ms))):
        if None not in two:
            raise InvalidTopology(f"{owner} has two {name}, a count and a duration: remove one of them")
    if gap_ms is not None:
        if any(part is not None for part in (length_count, length_ms, slide_count, slide_ms)):
            raise InvalidTopology(f"{owner} has a session gap and a window length: a session has no length")
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
