"""Windows over a stream of tuples: their tuples, and when a window is due.

Pure: the clock is an argument. Times are whole milliseconds. A time window ends at ``end`` and
holds the tuples with stamps in ``(end - length, end]``. Ends are the multiples of the sliding
interval, so that they are the same in every task and after every restart (Storm's windowing,
docs/Windowing.md there). Empty windows are not evaluated. In event time tuples enter windows in the
order of their stamps, once the watermark has passed.

:meth:`Windows.add` and the methods that :meth:`Windows.due` calls run for every tuple and are
measured (``benchmarks/dataplane.py``); that is why they work on plain lists, heaps and numbers.
"""

import heapq
from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from storm_dagster.core.dataplane.time_stamps import date_of, is_too_far_ahead
from storm_dagster.core.dataplane.window_state import (
    HeldTuple,
    WindowPosition,
    WindowShape,
    entries_for_other_windows,
    in_order,
    join_positions,
    window_order,
)

_stamp = attrgetter("stamp")


def describe_source(source: Any) -> str:
    """Name of a sender: (component, stream, task)."""
    component, stream, task = source
    return f"{component}[{task}]" if stream == "default" else f"{component}[{task}] {stream}"


class Sessions:
    """Open sessions of all keys of a task."""

    def __init__(self, gap_ms: int) -> None:
        self._gap = gap_ms
        """Milliseconds of silence after which a session has ended."""
        self._open: dict[Any, list[HeldTuple]] = {}
        """Key -> entries by stamp."""
        self._ends: list[tuple[int, int, Any]] = []
        """Heap of (stamp + gap, number, key): the times at which a session may have ended."""

    def add(self, entry: HeldTuple) -> None:
        """Add an entry to the session of its timestamp; it may join two sessions."""
        insort(self._open.setdefault(entry.key, []), entry, key=window_order)
        heapq.heappush(self._ends, (entry.stamp + self._gap, entry.number, entry.key))

    def closed(self, watermark: int) -> tuple[Any, int, int, list[HeldTuple]] | None:
        """Remove and return the next ended session: (key, first stamp, end, entries).

        ``None`` if no other session has ended by ``watermark``.
        """
        while self._ends and self._ends[0][0] <= watermark:
            end, _, key = heapq.heappop(self._ends)
            entries = self._open.get(key, [])
            length = self._first_session_length(entries)
            if not length or entries[length - 1].stamp + self._gap != end:
                # Another tuple has prolonged the session, or an entry with an equal stamp has
                # returned it already.
                continue
            session = entries[:length]
            later = entries[length:]
            if later:
                self._open[key] = later
            else:
                del self._open[key]
            return key, session[0].stamp, end, session
        return None

    def first_end(self) -> int | None:
        """Time at which the first session may have ended; ``None`` without a session."""
        return self._ends[0][0] if self._ends else None

    def _first_session_length(self, entries: list[HeldTuple]) -> int:
        """Number of entries before the first gap."""
        for index in range(1, len(entries)):
            if entries[index].stamp - entries[index - 1].stamp >= self._gap:
                return index
        return len(entries)


@dataclass
class Pane:
    """One window that is due."""

    items: list[Any]
    """Items of the window, in the order of their stamps."""
    new: list[Any] = field(default_factory=list)
    """Items that were not in a window before."""
    expired: list[Any] = field(default_factory=list)
    """Items of the previous window that are not in this one."""
    start_ms: int | None = None
    """Begin of a duration, which does not include it, or first stamp of a session.

    ``None`` for a number of tuples.
    """
    end_ms: int | None = None
    """End of a time window or session; for a counted slide the stamp of the last item."""
    key: Any = None
    """Key of the session; ``None`` for other windows."""
    first: int = 0
    """Number of the first entry; not set for a session, nor is ``last``."""
    last: int = 0
    """Number of the entry after the last one."""


class Windows:
    """The windows of one task.

    :meth:`add` tuples, :meth:`advance` the clock, then take :meth:`due` panes one by one, and call
    :meth:`done` after each. :meth:`take_finished` returns the entries that windows no longer need.
    ``sources`` are the tasks that send. :meth:`position` and the entries that are not finished
    restore the same windows.
    """

    def __init__(
        self,
        shape: WindowShape,
        sources: Iterable[Any] = (),
        position: WindowPosition | None = None,
        entries: Iterable[HeldTuple] = (),
    ) -> None:
        self.shape = shape
        self.sources = frozenset(sources)
        self._newest: dict[Any, int] = {}
        """Source -> its newest stamp, in event time."""
        self._fresh: set[Any] = set()
        """Sources that have sent since the last :meth:`advance`."""
        self._last_sent_at: dict[Any, int] = {}
        """Source -> time of the last :meth:`advance` after it had sent."""
        self.watermark: int | None = None
        """In event time no tuple with an older stamp is expected; else the newest time."""
        self._number = 0
        """Number of the next tuple, by arrival."""
        self._early: list[tuple[int, int, HeldTuple]] = []
        """Heap of entries that the watermark has not passed: (stamp, number, entry)."""
        self._log: list[HeldTuple] = []
        """Entries by stamp: those that may still be in a window, and the previous window."""
        self._base = 0
        """Number of the first entry of the log, counted from the first tuple ever."""
        self._start = 0
        """Number of the first entry that a later window may contain."""
        self._since = 0
        """Entries since the last window, for counted slides."""
        self._last_end: int | None = None
        """End of the last time window that was evaluated, here or by another task."""
        self._previous = (0, 0)
        """Numbers of the first entry of the previous window, and of the one after its last."""
        self._least = 0
        """Least stamp of the next tuple in processing time."""
        self._finished: list[HeldTuple] = []
        """Result of the next :meth:`take_finished`."""
        self._missing: list[Any] = []
        """Sources without a stamp that the watermark waits for."""
        self._slowest: Any = None
        """Source whose newest stamp the watermark follows; ``None`` if all are silent."""
        self._pane: Pane | None = None
        """Pane that is due and not done yet."""
        self._session: list[HeldTuple] = []
        """Entries of the pane, if it is a session."""
        self._sessions = Sessions(shape.gap_ms) if shape.gap_ms is not None else None
        if position is not None:
            self._restore(position, in_order(entries))

    def _restore(self, position: WindowPosition, entries: list[HeldTuple]) -> None:
        """Continue at a position with its entries, which are in the order of windows.

        If the shape is another one, only the entries that the new windows need are restored, and
        all others are finished.
        """
        shape = self.shape
        if position.shape != shape.parts:
            needed = entries_for_other_windows(position, entries)
            needed_numbers = {entry.number for entry in needed}
            self._finished += [entry for entry in entries if entry.number not in needed_numbers]
            entries = needed
            # Stamps of another kind of time are not comparable.
            *_, event_time = position.shape
            same_time = event_time == shape.event_time
            joined = join_positions([position]) if same_time else None
            position = joined or WindowPosition()
        self.watermark = position.watermark
        self._last_end = position.last_end
        self._since = position.since
        self._newest = {tuple(source): stamp for source, stamp in position.newest}
        self._number = max((entry.number for entry in entries), default=-1) + 1
        # In processing time, tuples go behind those of before, and into no evaluated window, even
        # if the clock was set back.
        newest_stamp = entries[-1].stamp if entries else 0
        self._least = max(newest_stamp, self.watermark or 0, (self._last_end or -1) + 1)
        if self._sessions is not None:
            for entry in entries:
                self._sessions.add(entry)
            return
        self._log = entries[: position.entered]
        self._start = position.start
        self._previous = (position.first, position.last)
        # A sorted list is a heap.
        self._early = [(entry.stamp, entry.number, entry) for entry in entries[position.entered :]]

    def position(self) -> WindowPosition:
        """State beside the tuples."""
        base = self._base
        return WindowPosition(
            shape=self.shape.parts,
            watermark=self.watermark,
            newest=list(self._newest.items()),
            last_end=self._last_end,
            since=self._since,
            entered=len(self._log),
            start=self._start - base,
            first=self._previous[0] - base,
            last=self._previous[1] - base,
        )

    # -- input -------------------------------------------------------------------------------------

    def add(self, item: Any, stamp: int, source: Any = None, key: Any = None) -> HeldTuple | None:
        """Add an item; return ``None`` if it is late.

        A late item is dropped: its window may have been evaluated. In processing time ``stamp`` is
        the current time, and an item is never late.
        """
        if not self.shape.event_time:
            stamp = max(stamp, self._least)
            self._least = stamp
        else:
            watermark = self.watermark
            before = self._newest.get(source)
            if before is None or stamp > before:
                self._newest[source] = stamp
            self._fresh.add(source)
            # At the watermark a tuple is late only if the window that ends there was evaluated.
            if watermark is not None and (
                stamp < watermark or (stamp == watermark and stamp == self._last_end)
            ):
                return None
        entry = HeldTuple(stamp, self._number, item, key)
        self._number += 1
        if self._sessions is not None:
            self._sessions.add(entry)
        else:
            heapq.heappush(self._early, (stamp, entry.number, entry))
        return entry

    def advance(self, now_ms: int) -> None:
        """Set the clock to ``now_ms``.

        In event time it is the clock of silence, and the watermark becomes the least of the newest
        stamps of all sources that are not silent, minus the lag. The watermark never goes back.
        """
        if self.shape.event_time:
            least_stamp = self._least_newest(now_ms)
            if least_stamp is None:
                return
            now_ms = least_stamp - self.shape.lag_ms
        if self.watermark is None or now_ms > self.watermark:
            self.watermark = now_ms

    def _least_newest(self, now_ms: int) -> int | None:
        """The least of the newest stamps of the sources that are not silent.

        The greatest of all stamps if all are silent. ``None`` while one of them has not sent a
        stamp, or without any stamp. Notes ``now_ms`` as the time of the sources that have sent
        since the last call.
        """
        last_sent_at = self._last_sent_at
        newest = self._newest
        for source in self._fresh:
            last_sent_at[source] = now_ms
        self._fresh.clear()
        # A source that has never sent has its time of silence from the first call on.
        for source in (*self.sources, *newest):
            last_sent_at.setdefault(source, now_ms)
        idle_ms = self.shape.idle_ms
        waiting = [source for source, sent_at in last_sent_at.items() if now_ms - sent_at < idle_ms]
        self._missing = [source for source in waiting if source not in newest]
        self._slowest = None
        if not waiting:
            # All are silent: no source delays the tuples of another one.
            return max(newest.values(), default=None)
        if self._missing:
            return None
        self._slowest = min(waiting, key=newest.__getitem__)
        return newest[self._slowest]

    def reset_ahead(self, now_ms: int) -> int | None:
        """Reset a watermark that is too far ahead of the clock ``now_ms``, and return the former.

        ``None`` if it is not. The watermark becomes the end of the last window that was evaluated
        before now, or, if that is not known, the last time before now at which one may have been.
        So no window is evaluated twice, and tuples of now are not late.
        """
        max_ahead = self.shape.max_ahead_ms
        former = self.watermark
        if not self.shape.event_time or former is None:
            return None
        if not is_too_far_ahead(former, now_ms, max_ahead):
            return None
        for source, stamp in list(self._newest.items()):
            if is_too_far_ahead(stamp, now_ms, max_ahead):
                del self._newest[source]
        last_end = self._last_end
        if last_end is None or last_end > now_ms:
            slide = self.shape.slide_ms or 1
            last_end = (now_ms - 1) // slide * slide
            if self.shape.slide_ms is not None:
                self._last_end = last_end
        self.watermark = last_end
        return former

    # -- output ------------------------------------------------------------------------------------

    def waits_for(self) -> str:
        """Describe why no window is due, in event time; empty if one is due or none is open."""
        if self._missing:
            names = ", ".join(describe_source(source) for source in self._missing[:5])
            more = ", ..." if len(self._missing) > 5 else ""
            return (
                f"no stamp came yet from {names}{more}: each counts until it was silent for "
                f"{self.shape.idle_ms // 1000} s"
            )
        next_end = self._upcoming_end()
        if self.watermark is None or next_end is None or next_end <= self.watermark:
            return ""
        text = f"the watermark is at {date_of(self.watermark)}"
        if self._slowest is not None:
            newest = date_of(self._newest[self._slowest])
            text += f": the newest stamp of {describe_source(self._slowest)} is {newest}"
        if self.shape.lag_ms:
            text += f", less the lag of {self.shape.lag_ms / 1000:g} s"
        return f"{text}. The next window is due at {date_of(next_end)}"

    def _upcoming_end(self) -> int | None:
        """Watermark at which the next window may be due; ``None`` if no tuple waits for one."""
        if self._sessions is not None:
            return self._sessions.first_end()
        slide = self.shape.slide_ms
        if slide is not None and self._start - self._base < len(self._log):
            return self._next_end(slide)
        if not self._early:
            return None
        stamp = self._early[0][0]
        return stamp if slide is None else -(-stamp // slide) * slide

    def due(self) -> Pane | None:
        """The next window to evaluate; the same one until :meth:`done`."""
        if self._pane is not None:
            return self._pane
        if self.shape.slide_count is not None:
            # Counted windows need no clock in processing time.
            if self.watermark is not None or not self.shape.event_time:
                self._pane = self._by_count(self.shape.slide_count)
        elif self.watermark is not None:
            if self._sessions is not None:
                self._pane = self._by_session(self._sessions, self.watermark)
            else:
                self._pane = self._by_time(self.shape.slide_ms or 1)
        return self._pane

    def _by_session(self, sessions: Sessions, watermark: int) -> Pane | None:
        """The next ended session; its entries become ``_session``."""
        closed = sessions.closed(watermark)
        if closed is None:
            return None
        key, start_ms, end_ms, self._session = closed
        items = [entry.item for entry in self._session]
        return Pane(items, list(items), [], start_ms, end_ms, key)

    def done(self) -> None:
        """Mark the due pane as evaluated, and finish the entries that no later one needs."""
        pane = self._pane
        self._pane = None
        assert pane is not None
        if self._sessions is not None:
            self._finished += self._session
            self._session = []
            return
        self._previous = (pane.first, pane.last)
        self._since = 0
        if self.shape.slide_ms is not None:
            self._pass_end(pane.end_ms)
        self._drop(self._first_needed(pane))

    def take_finished(self) -> list[HeldTuple]:
        """The entries that windows no longer need since the last call."""
        finished = self._finished
        self._finished = []
        return finished

    def _pass_end(self, end: int | None) -> None:
        """Begin the next time window after this end: later tuples do not enter an earlier one."""
        self._last_end = end
        self._least = max(self._least, (end or 0) + 1)

    def _release(self, until: int) -> bool:
        """Move the next entry up to this stamp into the log; ``False`` if there is none."""
        if not self._early or self._early[0][0] > until:
            return False
        self._log.append(heapq.heappop(self._early)[2])
        return True

    def _by_time(self, slide: int) -> Pane | None:
        """The next time window that has ended by the watermark and holds a tuple, or ``None``."""
        watermark = self.watermark
        assert watermark is not None
        while self._release(watermark):
            pass
        while self._start - self._base < len(self._log):
            end = self._next_end(slide)
            if end is None or end > watermark:
                return None
            last = self._base + self._count_until(end)
            if self.shape.length_count is not None:
                first = last - self.shape.length_count
            else:
                start_ms = end - (self.shape.length_ms or 0)
                first = self._base + self._count_until(start_ms)
            first = max(self._start, first)
            pane = self._pane_between(first, last, end)
            if pane is not None:
                return pane
            # The interval is longer than the window, and all tuples fell between two windows; or
            # another task has evaluated the window.
            self._pass_end(end)
            self._drop(first)
        return None

    def _next_end(self, slide: int) -> int | None:
        """End of the next window with a tuple; ``None`` if it needs a tuple that is not here."""
        at = self._start - self._base
        if self.shape.length_count is not None:
            # Time alone must not evaluate the same tuples twice: wait for a new one.
            at = max(at, self._previous[1] - self._base)
            if at >= len(self._log):
                return None
        stamp = self._log[at].stamp
        if self._last_end is not None:
            stamp = max(stamp, self._last_end + 1)
        # The least multiple of the interval that is not before the stamp.
        return -(-stamp // slide) * slide

    def _count_until(self, stamp: int) -> int:
        """Number of entries of the log with stamps up to and including this one."""
        return bisect_right(self._log, stamp, key=_stamp)

    def _by_count(self, slide: int) -> Pane | None:
        """The window after ``slide`` further entries, or ``None`` if there are fewer."""
        # In processing time all tuples enter, by a stamp above any other; in event time the
        # watermark decides.
        until = self.watermark if self.shape.event_time else (1 << 62)
        assert until is not None
        length_ms = self.shape.length_ms
        while self._since < slide:
            if not self._release(until):
                return None
            self._since += 1
            if length_ms is not None:
                self._drop(self._base + self._count_until(self._log[-1].stamp - length_ms))
        last = self._base + len(self._log)
        first = self._start
        if self.shape.length_count is not None:
            first = max(first, last - self.shape.length_count)
        return self._pane_between(first, last, self._log[-1].stamp)

    def _pane_between(self, first: int, last: int, end: int) -> Pane | None:
        """The window of the entries from number ``first`` to before ``last``, with its ``end``.

        ``None`` if it is empty, or if another task has evaluated all of it.
        """
        log = self._log
        base = self._base
        items = [
            entry.item
            for entry in log[first - base : last - base]
            if entry.evaluated_until is None or entry.evaluated_until < end
        ]
        if not items:
            return None
        old_first, old_last = self._previous
        fresh = log[max(first, old_last) - base : last - base]
        expired_last = max(old_first, min(first, old_last))
        expired = log[old_first - base : expired_last - base]
        start_ms = None
        if self.shape.length_ms is not None:
            start_ms = end - self.shape.length_ms
        return Pane(
            items=items,
            new=[entry.item for entry in fresh if entry.evaluated_until is None],
            expired=[entry.item for entry in expired],
            start_ms=start_ms,
            end_ms=end,
            first=first,
            last=last,
        )

    def _first_needed(self, pane: Pane) -> int:
        """Number of the first entry that the windows after this one may contain."""
        shape = self.shape
        assert pane.end_ms is not None
        if shape.length_ms is not None:
            next_end = pane.end_ms + (shape.slide_ms or 0)
            return self._base + self._count_until(next_end - shape.length_ms)
        assert shape.length_count is not None
        # A counted slide adds that many tuples, a timed one at least one.
        return max(pane.first, pane.last - shape.length_count + (shape.slide_count or 1))

    def _drop(self, first: int) -> None:
        """Drop the entries before ``first``, which no later window contains.

        The previous window stays for ``expired`` of the next one.
        """
        self._start = max(self._start, min(first, self._base + len(self._log)))
        old_first, old_last = self._previous
        if old_first == old_last:
            # The previous window is empty: it keeps no entry.
            old_first = self._start
            self._previous = (old_first, old_first)
        keep = min(self._start, old_first)
        if keep > self._base:
            self._finished += self._log[: keep - self._base]
            del self._log[: keep - self._base]
            self._base = keep
