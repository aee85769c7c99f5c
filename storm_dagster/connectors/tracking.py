"""Open and finished records of a source, and the position of each partition.

Pure: time is an argument. The position after the longest run of finished records, in reading order,
may be committed. Positions are never computed, so that gaps (compaction, transaction markers) do
not matter. A failed record is re-emitted from memory. The bounds on open records, and on the
records after the first of them, stop reading, never a retry.

:meth:`Tracker.take`, :meth:`Tracker.read` and :meth:`Tracker.finish` run for every record.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

SPAN = 10
"""Limit of the records after the first open one, in multiples of the bound on open records.

All of them stay in memory.
"""


class SourceRecord(msgspec.Struct, frozen=True):
    """One record of a source; the spout decodes its ``value``."""

    value: Any
    partition: str = ""
    after: Any = None
    """Position to commit when this record and all before it are finished.

    It is a JSON value, or ``None`` in a queue.
    """
    key: Any = None
    at_ms: int | None = None
    """Event time, milliseconds since 1970."""
    headers: dict[str, Any] = {}
    handle: Any = None
    """Value with which a queue acks this record."""
    topic_id: str | None = None
    """Kafka's id of the topic, which changes if it is deleted and recreated.

    ``None``: unknown.
    """


class PartitionEnd(msgspec.Struct, frozen=True):
    """End of a partition: it has no further records now.

    When the records before it are finished, ``after`` is the position.
    """

    partition: str
    after: Any
    closed: bool = False
    """True if there will never be further records, as at the end of a file."""


@dataclass(frozen=True)
class Retries:
    """Retries of a failed record.

    It is re-emitted ``most`` times, after ``first_secs``, then after twice as long each time.
    """

    most: int = 5
    first_secs: float = 0.1
    longest_secs: float = 60.0

    def pause(self, tries: int) -> float:
        """Seconds before the next try, after ``tries`` failures."""
        return min(self.longest_secs, self.first_secs * 2.0 ** min(tries - 1, 60))


@dataclass(slots=True, eq=False)
class OpenRecord:
    """A record that was read and is not finished; it is the tuple id of its emits."""

    progress: "PartitionProgress"
    record: SourceRecord
    tries: int = 0
    waits: bool = False
    """True while it waits for a retry."""
    finished: bool = False
    reported: bool = False
    """True if it was reported as one that always fails."""

    def __repr__(self) -> str:
        return f"{self.record.partition or 'record'} before {self.record.after!r}"


@dataclass(slots=True, eq=False)
class PartitionProgress:
    """Progress of one partition."""

    position: Any = None
    """Position after the longest run of finished records."""
    records: deque[OpenRecord | PartitionEnd] = field(default_factory=deque)
    """Records after the position, in reading order."""
    held: deque[OpenRecord] = field(default_factory=deque)
    """Records beyond the bound, which are not open yet."""
    open: int = 0
    """Number of records that may be emitted and are not finished."""
    closed: bool = False
    released: bool = False
    watermark_ms: int = 0
    """Largest event time before the position; 0: unknown."""

    def advance(self) -> None:
        """Move the position over the finished records."""
        records = self.records
        while records:
            first = records[0]
            if isinstance(first, OpenRecord):
                if not first.finished:
                    return
                record = first.record
                if record.at_ms is not None and record.at_ms > self.watermark_ms:
                    self.watermark_ms = record.at_ms
                if record.after is not None:
                    self.position = record.after
            else:
                self.position = first.after
                self.closed = first.closed
            records.popleft()


class Tracker:
    """Open records of one task, in all of its partitions."""

    def __init__(self, max_open: int = 1000, retries: Retries | None = None) -> None:
        self.max_open = max_open
        self.retries = retries or Retries()
        self.partitions: defaultdict[str, PartitionProgress] = defaultdict(PartitionProgress)
        self.full: set[str] = set()
        """Partitions that are not to be read now, until half of their bound is free."""
        self.held = 0
        """Number of records that were read beyond a bound."""
        self._ready: deque[OpenRecord] = deque()
        self._retries: list[tuple[float, int, OpenRecord]] = []
        self._numbers = count()

    def release(self, partition: str) -> list[OpenRecord]:
        """Forget a partition, and return its unfinished records.

        Later results of these records are ignored.
        """
        progress = self.partitions.pop(partition)
        progress.released = True
        self.full.discard(partition)
        self.held -= len(progress.held)
        records = [record for record in progress.records if isinstance(record, OpenRecord)]
        return [record for record in records if not record.finished]

    def read(self, record: SourceRecord | PartitionEnd) -> None:
        """Add a record or end of the source, in its order."""
        progress = self.partitions[record.partition]
        if progress.records and isinstance(progress.records[-1], PartitionEnd):
            # The partition has continued: the position of the new record replaces the end.
            progress.records.pop()
        if isinstance(record, PartitionEnd):
            progress.records.append(record)
            progress.advance()
            return
        open_record = OpenRecord(progress, record)
        progress.records.append(open_record)
        progress.held.append(open_record)
        self.held += 1
        self._open_held(progress)
        if progress.held or progress.open >= self.max_open:
            self.full.add(record.partition)

    def _open_held(self, progress: PartitionProgress) -> None:
        """Open held records up to the bound."""
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
            _, _, record = heapq.heappop(retries)
            if record.waits and not record.finished and not record.progress.released:
                record.waits = False
                return record
        ready = self._ready
        while ready:
            record = ready.popleft()
            if not record.finished and not record.progress.released:
                return record
        return None

    def finish(self, record: OpenRecord) -> bool:
        """Finish a record: it is acked, a dead letter, or skipped.

        Returns ``False`` if it was finished before, or is no longer tracked.
        """
        progress = record.progress
        if record.finished or progress.released:
            return False
        record.finished = True
        progress.open -= 1
        if progress.records[0] is record:
            progress.advance()
        elif (
            record.record.after is None
            and len(progress.records) - len(progress.held) > 2 * progress.open + SPAN
        ):
            # A queue has no position that would wait for the first record.
            progress.records = deque(
                part
                for part in progress.records
                if isinstance(part, PartitionEnd) or not part.finished
            )
        if progress.held:
            self._open_held(progress)
        half_free = (
            progress.open <= self.max_open // 2
            and len(progress.records) <= SPAN * self.max_open // 2
        )
        if half_free and not progress.held:
            self.full.discard(record.record.partition)
        return True

    def fail(self, record: OpenRecord, now: float, *, counts: bool = True) -> bool:
        """Note a failed try; the record waits for the next one.

        Returns ``True`` if it failed more often than there are retries; it then waits only in case
        that the caller cannot finish it. With ``counts=False`` the record is not the cause.
        """
        if record.finished or record.waits or record.progress.released:
            return False
        record.tries += counts
        record.waits = True
        retry_at = now + self.retries.pause(max(1, record.tries))
        heapq.heappush(self._retries, (retry_at, next(self._numbers), record))
        return record.tries > self.retries.most

    def positions(self) -> Iterator[tuple[str, Any]]:
        """Yield (partition, position that may be committed), if there is a position."""
        for name, progress in self.partitions.items():
            if progress.position is not None:
                yield name, progress.position

    def closed(self) -> list[str]:
        """Partitions at their end, of which all records are finished."""
        return [
            name
            for name, progress in self.partitions.items()
            if progress.closed and not progress.records
        ]

    def behind_ms(self, partition: str, now_ms: int) -> int | None:
        """Age of the oldest unfinished record by event time.

        Without one it is the age of the newest finished record; ``None``: unknown.
        """
        progress = self.partitions.get(partition)
        if progress is None:
            return None
        at_ms: int | None = progress.watermark_ms or None
        first = progress.records[0] if progress.records else None
        if isinstance(first, OpenRecord) and first.record.at_ms is not None:
            at_ms = first.record.at_ms
        if at_ms is None:
            return None
        return max(0, now_ms - at_ms)
