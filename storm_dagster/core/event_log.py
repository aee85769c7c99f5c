"""Decisions about the event log of a topology: which events fit, and which are removed.

Pure: times, sizes, keys and ids are arguments. The leader carries the decisions out
(``operations/live/event_logs.py``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storm_dagster.core.submission.conf import OWNER_KEY
from storm_dagster.model.dagster_names import DECLARED_OWNER_KEY, DECLARED_VERSION_KEY
from storm_dagster.model.event_log import EventBatchIndex, EventLogHead

MAX_LOG_EVENTS = 100_000
"""Events of one log that may wait."""
MAX_BYTES = 64_000_000
"""Bytes of the stored batches of one log."""
MAX_AGE_SECS = 7 * 86_400
"""Age from which on an event is dropped."""
MAX_PAGE_EVENTS = 200
"""Events of one answer to a code location."""
MAX_PAGE_BYTES = 1 << 20
"""Bytes of the events of such an answer; one event alone may have more."""

_MAX_BATCH_EVENTS = 1000
"""Events of one batch."""
_MAX_BATCH_BYTES = 4 << 20
"""Bytes of one batch."""
_MERGED_EVENTS = 200
_MERGED_BYTES = 256 * 1024
"""Events and bytes up to which new events join the last batch.

So a log that waits for long has few nodes, however slowly its events came.
"""
_MERGE_SECS = 3600
"""Age of the last batch up to which new events join it: the events of a batch expire together."""


@dataclass(frozen=True)
class EventSource:
    """The topology that reports events, and the Dagster that they are for."""

    topology: str
    """Topology id."""
    declared: bool = False
    owner: str | None = None
    """``declared.owner``."""
    user: str = ""
    """``topology.submitter.user``."""


@dataclass(frozen=True)
class TakePlan:
    """Decision about events that were reported, in their order."""

    count: int
    """Number of the first events that are taken now."""
    joins: bool
    """True if they join the last batch."""
    full: bool
    """True if the others do not fit until events are acknowledged."""


@dataclass(frozen=True)
class Removal:
    """A log without events that reached their Dagster, or were too old."""

    head: EventLogHead
    batches: tuple[EventBatchIndex, ...]
    """Batches that are removed as a whole."""


def source_of(topology_id: str, conf: Mapping[str, Any]) -> EventSource:
    """Destination of the events of a topology, by its stored conf."""
    owner = conf.get(DECLARED_OWNER_KEY)
    user = conf.get(OWNER_KEY)
    return EventSource(
        topology=topology_id,
        declared=DECLARED_VERSION_KEY in conf,
        owner=str(owner) if owner else None,
        user=str(user) if user else "",
    )


def source_of_head(head: EventLogHead) -> EventSource:
    """Destination that a log remembers."""
    return EventSource(head.topology, head.declared, head.owner, head.user)


def new_head(log: str, source: EventSource) -> EventLogHead:
    """The head of an empty log; ``log`` is its random id."""
    return with_source(EventLogHead(log=log, topology=source.topology), source)


def with_source(head: EventLogHead, source: EventSource) -> EventLogHead:
    """The head with the destination of the topology that reports now."""
    return head.model_copy(
        update={
            "topology": source.topology,
            "declared": source.declared,
            "owner": source.owner,
            "user": source.user,
        }
    )


def plan_take(
    head: EventLogHead, tail: EventBatchIndex | None, sizes: Sequence[int], now: int
) -> TakePlan:
    """Decide how many events are taken.

    ``sizes`` are their bytes, ``tail`` is the last batch, and ``now`` in epoch seconds. At least
    one event is taken, unless the log is full.
    """
    count_room = MAX_LOG_EVENTS - head.waiting
    byte_room = MAX_BYTES - head.bytes
    count = 0
    taken_bytes = 0
    for size in sizes:
        is_full = count + 1 > count_room or taken_bytes + size > byte_room
        if is_full:
            return TakePlan(count, _joins(head, tail, count, taken_bytes, now), full=True)
        if count and (count >= _MAX_BATCH_EVENTS or taken_bytes + size > _MAX_BATCH_BYTES):
            break
        count += 1
        taken_bytes += size
    return TakePlan(count, _joins(head, tail, count, taken_bytes, now), full=False)


def _joins(
    head: EventLogHead, tail: EventBatchIndex | None, count: int, taken_bytes: int, now: int
) -> bool:
    """True if these events join the last batch, no event of which is acknowledged."""
    if tail is None or not count:
        return False
    return (
        tail.last == head.next - 1
        and tail.first > head.acknowledged
        and tail.count + count <= _MERGED_EVENTS
        and tail.bytes + taken_bytes <= _MERGED_BYTES
        and 0 <= now - tail.at < _MERGE_SECS
    )


def add_batch(
    head: EventLogHead,
    joined: EventBatchIndex | None,
    *,
    count: int,
    blob: str,
    size: int,
    now: int,
) -> tuple[EventLogHead, EventBatchIndex]:
    """The head and the index with ``count`` new events.

    ``joined`` is the last batch if they join it. ``blob`` and ``size`` are key and bytes of the
    blob, which has the events of the joined batch, too.
    """
    former_bytes = 0
    if joined is None:
        index = EventBatchIndex(
            first=head.next, count=count, bytes=size, at=now, newest_at=now, blob=blob
        )
    else:
        former_bytes = joined.bytes
        index = joined.model_copy(
            update={
                "count": joined.count + count,
                "bytes": size,
                "newest_at": max(now, joined.newest_at),
                "blob": blob,
            }
        )
    changes = {
        "next": head.next + count,
        "bytes": head.bytes - former_bytes + size,
        "since": head.since if head.waiting else now,
    }
    return head.model_copy(update=changes), index


def remove_events(
    head: EventLogHead,
    batches: Iterable[EventBatchIndex],
    number: int,
    *,
    since: int | None = None,
    dropped: bool = False,
) -> Removal | None:
    """Remove every event up to ``number``; ``None`` if that changes nothing.

    ``batches`` are all of the log, in order. ``since`` is the time of the first event that stays,
    if it is known; else that of its batch is taken. ``dropped``: the events are counted as dropped.
    A number that no event of the log has had removes nothing: see :func:`is_ahead`.
    """
    if number <= head.acknowledged or is_ahead(head, number):
        return None
    removed: list[EventBatchIndex] = []
    kept: list[EventBatchIndex] = []
    for batch in batches:
        if batch.last <= number:
            removed.append(batch)
        else:
            kept.append(batch)
    waits_since = None
    if kept:
        waits_since = kept[0].at if since is None else since
    changes = {
        "acknowledged": number,
        "bytes": sum(batch.bytes for batch in kept),
        "since": waits_since,
    }
    if dropped:
        changes["dropped"] = head.dropped + number - head.acknowledged
    return Removal(head.model_copy(update=changes), tuple(removed))


def is_ahead(head: EventLogHead, number: int) -> bool:
    """True if the log has had no event of that number, though its reader names it.

    This happens after ZooKeeper was restored from a backup: the log counts once more from the
    number of the backup, and the events that wait are others than those that the reader has.
    """
    return number >= head.next


def partial_batch(batches: Iterable[EventBatchIndex], number: int) -> EventBatchIndex | None:
    """The batch that keeps only a part of its events if all up to ``number`` go.

    ``None`` without one.
    """
    for batch in batches:
        if batch.first <= number < batch.last:
            return batch
    return None


def expired_number(batches: Iterable[EventBatchIndex], now: int) -> int:
    """Number up to which all events are too old; 0 without one.

    A batch expires with its newest event, at most an hour after its oldest one.
    """
    number = 0
    for batch in batches:
        if batch.newest_at >= now - MAX_AGE_SECS:
            break
        number = batch.last
    return number


def batches_after(
    head: EventLogHead, batches: Iterable[EventBatchIndex], log: str | None, after: int
) -> tuple[int, list[EventBatchIndex]]:
    """Number after which events are sent, and the batches that have them, in order.

    ``after`` counts in the log ``log``: for another log, and for a number ahead of the log, all
    events that wait are sent.
    """
    start = head.acknowledged
    if log == head.log and not is_ahead(head, after):
        start = max(start, after)
    return start, [batch for batch in batches if batch.last > start]


def page_count(sizes: Iterable[int], limit: int) -> int:
    """Number of the first events that fit into an answer; ``sizes`` are their bytes.

    At least one, and at most ``limit``.
    """
    count = 0
    page_bytes = 0
    for size in sizes:
        page_bytes += size
        if count and (count >= limit or page_bytes > MAX_PAGE_BYTES):
            break
        count += 1
    return count
