"""Session windows of each key: items without a pause of at least the gap.

Pure. A session ends at its newest stamp plus the gap, as soon as the watermark has reached that.
"""

from __future__ import annotations

import heapq
from bisect import insort
from itertools import count
from typing import Any, Generic, TypeVar

__all__ = ["Sessions"]

T = TypeVar("T")


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
