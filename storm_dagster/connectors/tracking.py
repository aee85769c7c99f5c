"""Open records of a source, and the finished positions of its partitions.

The module is pure: time is an argument. The position after the longest run of finished records, in
reading order, may be committed. Positions are never computed, so that gaps (compaction, transaction
markers) do not matter. A failed record is replayed from memory; the bounds on open records, and on
the records that are read after one of them, stop reading, never a retry.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

SPAN = 10
"""Limit of the records in memory, from the first open one on, as a multiple of ``max_open``."""


class SourceRecord(msgspec.Struct, frozen=True):
    """One record of a source; the spout decodes its ``value``."""

    value: Any
    partition: str = ""
    after: Any = None
    """Position to commit when this record and all records before it are finished.

    It consists of JSON values, and is ``None`` in a queue.
    """
    key: Any = None
    at_ms: int | None = None
    """Event time, milliseconds since 1970."""
    headers: dict[str, Any] = {}
    """Name -> value; of repeated headers it has the last."""
    handle: Any = None
    """Value with which a queue acks this record."""
    topic_id: str | None = None
    """Kafka's id of the topic, which is another one after a deletion and recreation.

    ``None``: unknown.
    """
    header_list: Sequence[tuple[str, Any]] = ()
    """(name, value) of all headers in their order, for sources whose headers may repeat."""
    line: int | None = None
    """Number of the line at which it begins, from 1 on, for errors; ``None``: unknown."""
    error: str = ""
    """Reason why it could not be read, such as a wrong number of fields.

    Then it becomes a dead letter at once, with ``value`` as it was read.
    """


class PartitionEnd(msgspec.Struct, frozen=True):
    """Mark that a partition has no further records now.

    When all records before it are finished, ``after`` is the partition's position.
    """

    partition: str
    after: Any
    closed: bool = False
    """True if the partition will never have further records, as at the end of a file."""


@dataclass(frozen=True)
class Retries:
    """Retries of failed records.

    A record is retried ``most`` times, after ``first_secs``, then after twice as long each time, at
    most after ``longest_secs``.
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
    """Progress of its partition; also after the tracker has released the partition."""
    record: SourceRecord
    tries: int = 0
    """Number of its failures that count."""
    waits: bool = False
    """True while it waits for a retry."""
    done: bool = False
    """True if it is finished: acked, a dead letter, or skipped."""
    reported: bool = False
    """True if it was reported as a record that always fails."""

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
    """Records that were read beyond the bound, and must not be emitted yet."""
    open: int = 0
    """Number of records that may be emitted, or were, and are not finished."""
    closed: bool = False
    """True if the position is at the end of a partition that gets no further records."""
    released: bool = False
    """True if the tracker has forgotten the partition."""
    watermark_ms: int = 0
    """Largest event time before the position; 0: unknown."""

    def advance(self) -> None:
        """Move the position over the finished records."""
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
        """Partitions that must not be read now, until half of their bound is free."""
        self.held = 0
        """Number of records that were read beyond a bound."""
        self._ready: deque[OpenRecord] = deque()
        """Records that were never emitted and may be now, in reading order.

        Those that were finished or released since are skipped when they are taken.
        """
        self._retries: list[tuple[float, int, OpenRecord]] = []
        """Heap of (time of the retry, number, record); outdated entries are skipped."""
        self._numbers = count()
        """Numbers of heap entries, because records of the same time have no order."""

    def release(self, partition: str) -> list[OpenRecord]:
        """Remove a partition, and return its unfinished records.

        Their later acks and failures are ignored.
        """
        progress = self.partitions.pop(partition)
        progress.released = True
        self.full.discard(partition)
        self.held -= len(progress.held)
        return [item for item in progress.records if isinstance(item, OpenRecord) and not item.done]

    def read(self, record: SourceRecord | PartitionEnd) -> None:
        """Add a record that the source has read, in its order."""
        progress = self.partitions[record.partition]
        if progress.records and isinstance(progress.records[-1], PartitionEnd):
            # That end is obsolete: the record after it has a later position.
            progress.records.pop()
        if isinstance(record, PartitionEnd):
            progress.records.append(record)
            progress.advance()
            return
        open_record = OpenRecord(progress, record)
        progress.records.append(open_record)
        progress.held.append(open_record)
        self.held += 1
        self._release_held(progress)
        if progress.held or progress.open >= self.max_open:
            self.full.add(record.partition)

    def _release_held(self, progress: PartitionProgress) -> None:
        """Make records ready for their emit, up to the bounds of their partition."""
        while progress.held and progress.open < self.max_open:
            span = len(progress.records) - len(progress.held)
            if progress.open and span >= SPAN * self.max_open:
                return
            progress.open += 1
            self.held -= 1
            self._ready.append(progress.held.popleft())

    def take(self, now: float) -> OpenRecord | None:
        """The record to emit next: one whose retry is due, else one that was read.

        ``None`` if there is neither.
        """
        retries = self._retries
        while retries and retries[0][0] <= now:
            _, _, open_record = heapq.heappop(retries)
            if open_record.waits and not open_record.done and not open_record.progress.released:
                open_record.waits = False
                return open_record
        ready = self._ready
        while ready:
            open_record = ready.popleft()
            if not open_record.done and not open_record.progress.released:
                return open_record
        return None

    def finish(self, open_record: OpenRecord) -> bool:
        """Finish a record: it is acked, a dead letter, or skipped.

        False if it was finished before, or is no longer tracked.
        """
        progress = open_record.progress
        if open_record.done or progress.released:
            return False
        open_record.done = True
        progress.open -= 1
        if progress.records[0] is open_record:
            progress.advance()
        elif open_record.record.after is None:
            # A queue has no position that would wait for the first record. Finished records are
            # removed when they are the majority, so that the cost for each is constant.
            span = len(progress.records) - len(progress.held)
            if span > 2 * progress.open + SPAN:
                progress.records = deque(
                    item
                    for item in progress.records
                    if isinstance(item, PartitionEnd) or not item.done
                )
        if progress.held:
            self._release_held(progress)
        # Not as soon as one record is free: sources pause and resume a full partition at a cost.
        is_half_free = (
            progress.open <= self.max_open // 2
            and len(progress.records) <= SPAN * self.max_open // 2
        )
        if is_half_free and not progress.held:
            self.full.discard(open_record.record.partition)
        return True

    def fail(self, open_record: OpenRecord, now: float, *, counts: bool = True) -> bool:
        """Retry a record after a failed try.

        True if it failed more often than ``retries.most``; its retry is then only for the case that
        the caller does not finish it. False, without effect, for a record that is finished, waits
        for a retry, or is no longer tracked. With ``counts=False`` the failure has a reason outside
        of the record.
        """
        if open_record.done or open_record.waits or open_record.progress.released:
            return False
        if counts:
            open_record.tries += 1
        open_record.waits = True
        retry_at = now + self.retries.pause(max(1, open_record.tries))
        heapq.heappush(self._retries, (retry_at, next(self._numbers), open_record))
        return open_record.tries > self.retries.most

    def positions(self) -> Iterator[tuple[str, Any]]:
        """(partition, position that may be committed) of partitions that have one."""
        for name, progress in self.partitions.items():
            if progress.position is not None:
                yield name, progress.position

    def closed(self) -> list[str]:
        """Names of closed partitions whose records are all finished."""
        names: list[str] = []
        for name, progress in self.partitions.items():
            if progress.closed and not progress.records:
                names.append(name)
        return names

    def behind_ms(self, partition: str, now_ms: int) -> int | None:
        """Age of the oldest unfinished record by event time; ``None``: unknown.

        Without an unfinished record it is the age of the newest finished one.
        """
        progress = self.partitions.get(partition)
        if progress is None:
            return None
        at_ms: int | None = progress.watermark_ms or None
        first = progress.records[0] if progress.records else None
        if isinstance(first, OpenRecord) and first.record.at_ms is not None:
            at_ms = first.record.at_ms
        return None if at_ms is None else max(0, now_ms - at_ms)
