"""Which records of a source are finished, and up to which position each partition is: pure, time is
an argument.

The position after the longest run of finished records, in reading order, may be committed.
Positions are never computed, so that gaps (compaction, transaction markers) mean nothing. A failed
record is emitted again from memory; the bounds on open records, and on what is read after one of
them, stop reading, never a retry.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

SPAN = 10
"""So many times the bound on open records are read from the first of them on: all of that stays in
memory.
"""


class SourceRecord(msgspec.Struct, frozen=True):
    """One record of a source. ``value`` is what the spout decodes."""

    value: Any
    partition: str = ""
    after: Any = None
    """Position to commit when this record and all before it are finished; JSON values, ``None`` in
    a queue.
    """
    key: Any = None
    at_ms: int | None = None
    """Event time, milliseconds since 1970."""
    headers: dict[str, Any] = {}
    handle: Any = None
    """What a queue needs to ack this record."""
    topic_id: str | None = None
    """Kafka's id of the topic; another one after it was deleted and created again. ``None``:
    unknown.
    """


class PartitionEnd(msgspec.Struct, frozen=True):
    """A source has no more records of a partition now: once those before are finished, ``after`` is
    its position.
    """

    partition: str
    after: Any
    closed: bool = False
    """There will never be more, as at the end of a file."""


@dataclass(frozen=True)
class Retries:
    """A failed record is emitted again ``most`` times, after ``first_secs``, then after twice as
    long each time.
    """

    most: int = 5
    first_secs: float = 0.1
    longest_secs: float = 60.0

    def pause(self, tries: int) -> float:
        """Seconds before the next try, after ``tries`` failures."""
        return min(self.longest_secs, self.first_secs * 2.0 ** min(tries - 1, 60))


@dataclass(slots=True, eq=False)
class OpenRecord:
    """A record that was read and is not finished. It is the tuple id of its emits."""

    progress: "PartitionProgress"
    record: SourceRecord
    tries: int = 0
    waits: bool = False
    """Whether it waits for a retry."""
    done: bool = False
    reported: bool = False
    """Whether it was reported as one that always fails."""

    def __repr__(self) -> str:
        return f"{self.record.partition or 'record'} before {self.record.after!r}"


@dataclass(slots=True, eq=False)
class PartitionProgress:
    """Progress of one partition."""

    position: Any = None
    """After the longest run of finished records."""
    records: deque[OpenRecord | PartitionEnd] = field(default_factory=deque)
    """Read and not passed by the position, in reading order."""
    held: deque[OpenRecord] = field(default_factory=deque)
    """Read beyond the bound, not yet given out."""
    open: int = 0
    """Given out and not finished."""
    closed: bool = False
    released: bool = False
    watermark_ms: int = 0
    """Largest event time before the position; 0: unknown."""

    def advance(self) -> None:
        """Move the position over what is finished."""
        records = self.records
        while records:
            first = records[0]
            if isinstance(first, OpenRecord):
                if not first.done:
                    return
                record = first.record
                if record.at_ms is not None and record.at_ms > self.watermark_ms:
                    self.watermark_ms = record.at_ms
                if record.after is not None:
                    self.position = record.after
            else:
                self.position, self.closed = first.after, first.closed
            records.popleft()


class Tracker:
    """Open records of one task, in all of its partitions."""

    def __init__(self, max_open: int = 1000, retries: Retries | None = None) -> None:
        self.max_open = max_open
        self.retries = retries or Retries()
        self.partitions: defaultdict[str, PartitionProgress] = defaultdict(PartitionProgress)
        self.full: set[str] = set()
        """Partitions of which no more is to be read now. Each is read again when half of its bound
        is free.
        """
        self.held = 0
        """Records that were read beyond a bound."""
        self._ready: deque[OpenRecord] = deque()
        self._retries: list[tuple[float, int, OpenRecord]] = []
        self._numbers = count()

    def release(self, partition: str) -> list[OpenRecord]:
        """Forget a partition, and return its unfinished records; what happens to them later is
        ignored.
        """
        progress = self.partitions.pop(partition)
        progress.released = True
        self.full.discard(partition)
        self.held -= len(progress.held)
        return [one for one in progress.records if isinstance(one, OpenRecord) and not one.done]

    def read(self, record: SourceRecord | PartitionEnd) -> None:
        """Take what the source has read, in its order."""
        progress = self.partitions[record.partition]
        if progress.records and isinstance(progress.records[-1], PartitionEnd):
            # An end that was none: the position of what follows says more.
            progress.records.pop()
        if isinstance(record, PartitionEnd):
            progress.records.append(record)
            progress.advance()
            return
        one = OpenRecord(progress, record)
        progress.records.append(one)
        progress.held.append(one)
        self.held += 1
        self._give_out(progress)
        if progress.held or progress.open >= self.max_open:
            self.full.add(record.partition)

    def _give_out(self, progress: PartitionProgress) -> None:
        while progress.held and progress.open < self.max_open:
            if progress.open and len(progress.records) - len(progress.held) >= SPAN * self.max_open:
                return
            progress.open += 1
            self.held -= 1
            self._ready.append(progress.held.popleft())

    def take(self, now: float) -> OpenRecord | None:
        """The record to emit next: one whose retry is due, else one that was read."""
        retries = self._retries
        while retries and retries[0][0] <= now:
            one = heapq.heappop(retries)[2]
            if one.waits and not one.done and not one.progress.released:
                one.waits = False
                return one
        ready = self._ready
        while ready:
            one = ready.popleft()
            if not one.done and not one.progress.released:
                return one
        return None

    def finish(self, one: OpenRecord) -> bool:
        """A record is finished: acked, a dead letter, or skipped. ``False`` if it was before, or is
        not tracked any more.
        """
        progress = one.progress
        if one.done or progress.released:
            return False
        one.done = True
        progress.open -= 1
        if progress.records[0] is one:
            progress.advance()
        elif (
            one.record.after is None
            and len(progress.records) - len(progress.held) > 2 * progress.open + SPAN
        ):
            # A queue has no position that would wait for the first record.
            progress.records = deque(
                each for each in progress.records if isinstance(each, PartitionEnd) or not each.done
            )
        if progress.held:
            self._give_out(progress)
        few = (
            progress.open <= self.max_open // 2
            and len(progress.records) <= SPAN * self.max_open // 2
        )
        if few and not progress.held:
            self.full.discard(one.record.partition)
        return True

    def fail(self, one: OpenRecord, now: float, *, counts: bool = True) -> bool:
        """A try has failed: the record waits for the next one. ``True``: it failed more often than
        there are retries, and only waits in case that it is not finished now. ``counts=False``: the
        failure says nothing about the record.
        """
        if one.done or one.waits or one.progress.released:
            return False
        one.tries += counts
        one.waits = True
        heapq.heappush(
            self._retries, (now + self.retries.pause(max(1, one.tries)), next(self._numbers), one)
        )
        return one.tries > self.retries.most

    def positions(self) -> Iterator[tuple[str, Any]]:
        """(partition, position that may be committed) of those that have one."""
        for name, progress in self.partitions.items():
            if progress.position is not None:
                yield name, progress.position

    def closed(self) -> list[str]:
        """Partitions of which everything is finished, and that are at their end."""
        return [
            name
            for name, progress in self.partitions.items()
            if progress.closed and not progress.records
        ]

    def behind_ms(self, partition: str, now_ms: int) -> int | None:
        """Age of the oldest unfinished record by event time, else of the newest finished one;
        ``None``: unknown.
        """
        progress = self.partitions.get(partition)
        if progress is None:
            return None
        at_ms: int | None = progress.watermark_ms or None
        if (
            progress.records
            and isinstance(first := progress.records[0], OpenRecord)
            and first.record.at_ms is not None
        ):
            at_ms = first.record.at_ms
        return None if at_ms is None else max(0, now_ms - at_ms)
