"""Windows over a stream of tuples: their tuples, when a window is due, and when a tuple is finished.

Pure: the clock is an argument. Times are whole milliseconds. A time window ends at ``end`` and holds what is
stamped in ``(end - length, end]``; ends are the multiples of the sliding interval, so that they are the same
in every task and after every restart (Storm's windowing, docs/Windowing.md there). Empty windows are not
evaluated. In event time tuples enter windows in the order of their stamps, once the watermark has passed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter
from typing import Any, Generic, TypeVar

from storm_dagster.model.errors import InvalidTopology

T = TypeVar("T")

DEFAULT_WATERMARK_MS = 1000


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

    @property
    def needs_clock(self) -> bool:
        """Whether windows may become due without a tuple arriving."""
        return self.event_time or self.slide_ms is not None or self.gap_ms is not None


def window_shape(conf: Mapping[str, Any], owner: str) -> WindowShape:
    """The shape in ``conf`` (the component's conf over the topology's).

    :class:`InvalidTopology` as Storm's WindowedBoltExecutor has it: no length; longer than the message
    timeout, or than ``topology.max.spout.pending`` tuples, so that tuples would be replayed while they wait
    in a window; a late stream without a timestamp field.
    """

    def value(key: str) -> Any:
        return conf.get(f"topology.bolts.{key}")

    length_count, length_ms = value("window.length.count"), value("window.length.duration.ms")
    slide_count = value("window.sliding.interval.count")
    slide_ms = value("window.sliding.interval.duration.ms")
    gap_ms = value("window.session.gap.ms")
    event_time = value("tuple.timestamp.field.name") is not None or bool(value("tuple.timestamp.extractor"))
    for name, two in (
        ("window lengths", (length_count, length_ms)),
        ("sliding intervals", (slide_count, slide_ms)),
    ):
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
    _check_limits(conf, owner, length_count, slide_count, (length_ms or 0) + (slide_ms or 0) + (gap_ms or 0))
    return WindowShape(
        length_count=length_count,
        length_ms=length_ms,
        slide_count=slide_count,
        slide_ms=slide_ms,
        gap_ms=gap_ms,
        event_time=event_time,
        lag_ms=int(value("tuple.timestamp.max.lag.ms") or 0),
        watermark_ms=int(value("watermark.event.interval.ms") or DEFAULT_WATERMARK_MS),
        late_stream=value("late.tuple.stream"),
    )


def _check_limits(conf: Mapping[str, Any], owner: str, length: int | None, slide: int | None, span_ms: int) -> None:
    timeout = float(conf.get("topology.message.timeout.secs") or 30)
    if span_ms > timeout * 1000:
        raise InvalidTopology(
            f"{owner}: window length + sliding interval are {span_ms / 1000:g} s, more than the message timeout of "
            f"{timeout:g} s, so that tuples would be replayed while they wait: raise topology.message.timeout.secs"
        )
    pending = conf.get("topology.max.spout.pending")
    wanted = (length or 0) + ((slide or 0) if length else 0)
    if pending is not None and wanted > pending:
        raise InvalidTopology(
            f"{owner}: window length + sliding interval are {wanted} tuples, but topology.max.spout.pending allows "
            f"{pending} at once, so that a window would never fill: raise it"
        )


@dataclass
class Pane(Generic[T]):
    """One window that is due."""

    items: list[T]
    new: list[T] = field(default_factory=list)
    """Those that were in no window before."""
    expired: list[T] = field(default_factory=list)
    """Items of the previous window that are not in this one."""
    start_ms: int | None = None
    end_ms: int | None = None
    key: Any = None
    """Of a session."""
    first: int = 0
    last: int = 0


class Windows(Generic[T]):
    """The windows of one task. :meth:`add` tuples, :meth:`advance` the clock, then take :meth:`due` panes one
    by one, each answered by :meth:`done` or :meth:`failed`; :meth:`take_finished` tells what no window needs
    any more."""

    def __init__(self, shape: WindowShape, sources: int = 1) -> None:
        self.shape = shape
        self._sources = sources
        self._newest: dict[Any, int] = {}
        self.watermark: int | None = None
        """Event time: nothing stamped before it is expected. Processing time: the newest time seen."""
        self._numbers = count()
        self._early: list[tuple[int, int, T]] = []
        """Heap of what the watermark has not passed: (stamp, order of arrival, item)."""
        self._log: list[tuple[int, T]] = []
        """(stamp, item) of what has entered and may be in a window yet, by stamp."""
        self._base = 0
        """Number of the first entry of the log, counted from the beginning of time."""
        self._since = 0
        """Entries since the last window, for counted slides."""
        self._last_end: int | None = None
        self._previous: tuple[int, int, list[T]] = (0, 0, [])
        self._finished: list[T] = []
        self._pane: Pane[T] | None = None
        self._sessions: Sessions[T] | None = Sessions(shape.gap_ms) if shape.gap_ms is not None else None

    def __len__(self) -> int:
        """Tuples that are kept."""
        return len(self._early) + len(self._log) + (len(self._sessions) if self._sessions else 0)

    # -- what comes ---------------------------------------------------------------------------------------

    def add(self, item: T, stamp: int, source: Any = None, key: Any = None) -> bool:
        """Take an item; ``False`` when it is late: its window may have been evaluated, nothing is kept of it.

        In processing time ``stamp`` is the time now, and nothing is ever late.
        """
        mark = self.watermark
        if not self.shape.event_time:
            if self._last_end is not None and stamp <= self._last_end:
                stamp = self._last_end + 1
        else:
            before = self._newest.get(source)
            if before is None or stamp > before:
                self._newest[source] = stamp
            if mark is not None and (stamp < mark or (stamp == mark and stamp == self._last_end)):
                return False
        if self._sessions is not None:
            self._sessions.add(item, stamp, key)
        else:
            heapq.heappush(self._early, (stamp, next(self._numbers), item))
        return True

    def advance(self, now_ms: int) -> None:
        """Set the clock to ``now_ms``. In event time the watermark becomes the least of the sources'
        newest stamps, less the lag, once every source has sent something; it never goes back."""
        if self.shape.event_time:
            if len(self._newest) < self._sources or not self._newest:
                return
            now_ms = min(self._newest.values()) - self.shape.lag_ms
        if self.watermark is None or now_ms > self.watermark:
            self.watermark = now_ms

    # -- what is due --------------------------------------------------------------------------------------

    def due(self) -> Pane[T] | None:
        """The next window to evaluate; the same one until it is answered."""
        if self._pane is not None:
            return self._pane
        if self.shape.slide_count is not None:
            if self.watermark is not None or not self.shape.event_time:
                self._pane = self._by_count(self.shape.slide_count)
        elif self.watermark is not None:
            if self._sessions is not None:
                closed = self._sessions.closed(self.watermark)
                if closed is not None:
                    key, start, end, items = closed
                    self._pane = Pane(items, list(items), [], start, end, key)
            else:
                self._pane = self._by_time(self.shape.slide_ms or 1)
        return self._pane

    def done(self) -> None:
        """Mark the pane as evaluated."""
        pane, self._pane = self._pane, None
        assert pane is not None
        if self._sessions is not None:
            self._finished += pane.items
            return
        self._previous = (pane.first, pane.last, pane.items)
        self._since = 0
        self._last_end = pane.end_ms if self.shape.slide_ms is not None else None
        self._drop(self._first_needed(pane))

    def failed(self) -> list[T]:
        """Give the pane up; returns its items, which are in no later window."""
        pane, self._pane = self._pane, None
        assert pane is not None
        if self._sessions is not None:
            return pane.items
        kept = [entry for at, entry in enumerate(self._log, self._base) if not pane.first <= at < pane.last]
        # Items before the pane are in no later window either.
        before = pane.first - self._base
        self._finished += [item for _, item in kept[:before]]
        self._log = kept[before:]
        self._base = pane.last
        self._previous = (pane.last, pane.last, [])
        self._since = 0
        self._last_end = pane.end_ms if self.shape.slide_ms is not None else None
        return pane.items

    def take_finished(self) -> list[T]:
        """The items that no window needs any more, since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _release(self, most: int) -> bool:
        # The next item whose time has come enters the log; whether there was one.
        if not self._early or self._early[0][0] > most:
            return False
        stamp, _, item = heapq.heappop(self._early)
        self._log.append((stamp, item))
        return True

    def _by_time(self, slide: int) -> Pane[T] | None:
        mark = self.watermark
        assert mark is not None
        while self._release(mark):
            pass
        newest_used = self._previous[1]
        while self._log:
            end = self._next_end(slide, newest_used)
            if end is None or end > mark:
                return None
            last = self._base + self._count_until(end)
            if self.shape.length_count is not None:
                first = max(self._base, last - self.shape.length_count)
            else:
                first = self._base + self._count_until(end - (self.shape.length_ms or 0))
            if first < last:
                return self._make(first, last, end)
            # The interval is longer than the window, and everything fell between two windows.
            self._last_end = end
            self._drop(last)
        return None

    def _next_end(self, slide: int, newest_used: int) -> int | None:
        if self.shape.length_count is not None:
            # The same tuples are not evaluated again because time passes: wait for a new one.
            at = max(0, newest_used - self._base)
            if at >= len(self._log):
                return None
            stamp = self._log[at][0]
        else:
            stamp = self._log[0][0]
        end = -(-stamp // slide) * slide
        if self._last_end is not None and end <= self._last_end:
            end = self._last_end + slide
        return end

    def _count_until(self, stamp: int) -> int:
        # Entries with stamps up to and including this one; the log is sorted by stamp.
        return bisect_right(self._log, stamp, key=itemgetter(0))

    def _by_count(self, slide: int) -> Pane[T] | None:
        # In processing time what has come is in; in event time the watermark decides.
        most = self.watermark if self.shape.event_time else (1 << 62)
        assert most is not None
        while self._release(most):
            self._since += 1
            newest = self._log[-1][0]
            length = self.shape.length_ms
            if length is not None:
                self._drop(self._base + self._count_until(newest - length))
            if self._since < slide:
                continue
            last = self._base + len(self._log)
            wanted = self.shape.length_count
            first = self._base if wanted is None else max(self._base, last - wanted)
            return self._make(first, last, newest)
        return None

    def _make(self, first: int, last: int, end: int) -> Pane[T]:
        items = [item for _, item in self._log[first - self._base : last - self._base]]
        old_first, old_last, old_items = self._previous
        new = items[max(0, old_last - first) :]
        expired = old_items[: max(0, min(first, old_last) - old_first)]
        length = self.shape.length_ms
        return Pane(items, new, expired, None if length is None else end - length, end, None, first, last)

    def _first_needed(self, pane: Pane[T]) -> int:
        shape = self.shape
        assert pane.end_ms is not None
        if shape.length_ms is not None:
            next_end = pane.end_ms + (shape.slide_ms or 0)
            return self._base + self._count_until(next_end - shape.length_ms)
        assert shape.length_count is not None
        # After a counted slide so many more tuples will have come; after a timed one at least one.
        return max(pane.first, pane.last - shape.length_count + (shape.slide_count or 1))

    def _drop(self, first: int) -> None:
        number = min(first - self._base, len(self._log))
        if number > 0:
            self._finished += [item for _, item in self._log[:number]]
            del self._log[:number]
            self._base += number


class Sessions(Generic[T]):
    """Open sessions of all keys of a task."""

    def __init__(self, gap_ms: int) -> None:
        self._gap = gap_ms
        self._numbers = count()
        self._open: dict[Any, list[tuple[int, int, T]]] = {}
        """Key -> (stamp, order of arrival, item), by stamp."""
        self._ends: list[tuple[int, int, Any]] = []
        """Heap of (stamp + gap, order, key): the times at which a session may turn out to have ended."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, item: T, stamp: int, key: Any) -> None:
        """Add an item to the session of its timestamp; it may join two sessions into one."""
        number = next(self._numbers)
        insort(self._open.setdefault(key, []), (stamp, number, item), key=lambda entry: entry[:2])
        heapq.heappush(self._ends, (stamp + self._gap, number, key))
        self._size += 1

    def closed(self, watermark: int) -> tuple[Any, int, int, list[T]] | None:
        """Remove and return the next ended session: (key, first stamp, end, items)."""
        while self._ends and self._ends[0][0] <= watermark:
            end, _, key = heapq.heappop(self._ends)
            entries = self._open.get(key, [])
            until = 0
            while until < len(entries):
                stamp = entries[until][0]
                until += 1
                if until == len(entries) or entries[until][0] - stamp >= self._gap:
                    break
            if not until or entries[until - 1][0] + self._gap != end:
                # Another tuple has prolonged the session, or it was handed out with an equal stamp.
                continue
            session, rest = entries[:until], entries[until:]
            if rest:
                self._open[key] = rest
            else:
                del self._open[key]
            self._size -= until
            return key, session[0][0], end, [item for _, _, item in session]
        return None
