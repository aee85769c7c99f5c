"""Windows of a task as values: what checkpoints hold of them, and how they move to other tasks.

Pure. The tuples of windows are numbered by their arrival. In the order of (stamp, number) a prefix of them, the log,
has entered the windows; the rest waits for the watermark.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec


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


def in_order(entries: Iterable[HeldTuple]) -> list[HeldTuple]:
    """The entries by stamp and arrival."""
    return sorted(entries, key=lambda entry: (entry.stamp, entry.number))


def detach(position: Position, entries: Iterable[HeldTuple]) -> list[HeldTuple]:
    """The entries that windows still need where ``position`` means nothing: another task, or another shape.

    Of tuples that were in a window already only those of windows in time are kept: they remember its end.
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
    """Position of a task that goes on with tuples of several ones: the earliest of them, so that nothing that was in
    time becomes late. Its log is empty."""
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
        last_end=min(end for end in ends if end is not None) if known and None not in ends else None,
    )
