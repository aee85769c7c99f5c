"""Event logs of topologies: events are taken, read, and removed when Dagster has them.

Only the leader changes them. The events of a batch are a blob, which is stored first. The index of
the batch and the head of the log are then written in one fenced transaction: after that the events
are taken. A blob without an index is garbage.
"""

import uuid
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from storm_dagster.core import event_log as rules
from storm_dagster.core.event_log import EventSource
from storm_dagster.model import paths
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.errors import Conflict, Corrupt, KeyNotFound, Unavailable
from storm_dagster.model.event_log import (
    EventBatchIndex,
    EventLogHead,
    EventLogSummary,
    TakenEvent,
    batch_key,
    decode_batch,
    destination_remedy,
    destination_text,
    encode_batch,
    event_log_text,
)
from storm_dagster.model.names import SYSTEM
from storm_dagster.model.records import encode_record
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.steps import operation, step
from storm_dagster.operations.transactions import commit, lost_race
from storm_dagster.zk.event_logs import StoredLog

TAKE_EVENTS = operation("take_events", "events.blob", "events.index", "events.forget")
ACKNOWLEDGE_EVENTS = operation("acknowledge_events", "events.remove", "events.forget")
CHANGE_SOURCE = operation("change_event_source", "events.source")

_ATTEMPTS = 10
"""Attempts at a change that loses a race."""
_MAX_REMOVED = 200
"""Batches that one transaction removes."""
_MAX_WRITE_SECS = 30.0
"""Longest time from the write of a blob to its index.

It is shorter than the grace of the cleaner, so that no blob is cleaned before its index exists.
"""
_MAX_READS = 3
"""Attempts at a read during which batches are merged or removed."""
_TOPOLOGY_TASK = -1
"""Task of an error of a topology that no task caused."""


@dataclass(frozen=True)
class EventReport:
    """An event as a worker reports it."""

    topology: str
    """Id of the topology that reports it."""
    component: str | None
    """``None`` from a worker of an earlier release."""
    task: int | None
    event: DagsterEvent


@dataclass(frozen=True)
class TakeResult:
    """Outcome of an attempt to take events."""

    count: int
    """Number of the first events that were taken."""
    full: EventLogHead | None
    """Head of the log if it has no room for the others."""


@dataclass(frozen=True)
class EventPage:
    """The oldest events that wait, of one log."""

    head: EventLogHead | None
    """``None`` if there is no log."""
    events: tuple[TakenEvent, ...]


def take_events(
    ctx: OperationsContext, name: str, source: EventSource, reports: Sequence[EventReport]
) -> TakeResult:
    """Take the events of a topology's name in one transaction, as far as they fit.

    When this returns they are stored as durably as the code of topologies. After an error none of
    them counts as taken; some may be stored nevertheless, and are taken twice if they are repeated.
    :class:`Fenced` if this nimbus no longer leads, :class:`Unavailable` if the events cannot be
    stored now.
    """
    epoch = ctx.current_epoch()
    for _ in range(_ATTEMPTS):
        try:
            return _take_once(ctx, epoch, name, source, reports)
        except Conflict as error:
            if not lost_race(error):
                raise
            ctx.log.info("events of %s: lost a race (%s), trying again", name, error.message)
    raise Unavailable(f"the event log of {name!r} changes all the time: send the events again")


def _take_once(
    ctx: OperationsContext,
    epoch: int,
    name: str,
    source: EventSource,
    reports: Sequence[EventReport],
) -> TakeResult:
    """Take events as :func:`take_events`.

    :class:`Conflict` if the log changes at the same time.
    """
    stored = ctx.cluster.read_event_log(name)
    if stored is None:
        head = rules.new_head(uuid.uuid4().hex, source)
        batches: list[EventBatchIndex] = []
    else:
        head = rules.with_source(stored.head, source)
        batches = stored.batches
    now = ctx.now_secs()
    events = _number_events(head, reports, now)
    tail = batches[-1] if batches else None
    plan = rules.plan_take(head, tail, _sizes(events), now)
    events = events[: plan.count]
    if not events:
        return TakeResult(0, head if plan.full else None)
    joined = tail if plan.joins else None
    former = None if joined is None else _find_batch(ctx, joined)
    if former is None:
        joined = None
        former = []
    content = encode_batch([*former, *events])
    first = head.next if joined is None else joined.first
    key = batch_key(head.log, first, uuid.uuid4().hex[:16])
    new_head, index = rules.add_batch(
        head, joined, count=len(events), blob=key, size=len(content), now=now
    )
    _store(ctx, epoch, name, stored, new_head, index, joined, content)
    if joined is not None:
        _delete_blobs(ctx, [joined.blob])
    return TakeResult(len(events), new_head if plan.full else None)


def _number_events(
    head: EventLogHead, reports: Sequence[EventReport], now: int
) -> list[TakenEvent]:
    """The events with the next numbers of the log, taken ``now``."""
    return [
        TakenEvent(
            number=head.next + place,
            topology=report.topology,
            component=report.component,
            task=report.task,
            at=now,
            event=report.event,
        )
        for place, report in enumerate(reports)
    ]


def _sizes(events: Iterable[TakenEvent]) -> list[int]:
    """Bytes of each event in a batch."""
    return [len(msgspec.json.encode(event)) + 1 for event in events]


def _find_batch(ctx: OperationsContext, index: EventBatchIndex) -> list[TakenEvent] | None:
    """Find the events of a batch; ``None`` if its blob is not here now."""
    try:
        return _read_batch(ctx, index)
    except (KeyNotFound, Corrupt):
        return None


def _read_batch(ctx: OperationsContext, index: EventBatchIndex) -> list[TakenEvent]:
    """The events of a batch; :class:`KeyNotFound` if its blob is not here now."""
    return decode_batch(ctx.blobs.read(index.blob), index.blob)


def _store(
    ctx: OperationsContext,
    epoch: int,
    name: str,
    stored: StoredLog | None,
    head: EventLogHead,
    index: EventBatchIndex,
    joined: EventBatchIndex | None,
    content: bytes,
) -> None:
    """Store a batch's blob, and then its index and the head of the log.

    :class:`Conflict` if the log has changed since it was read: the blob is deleted then.
    """
    began_at = ctx.monotonic()
    with step(ctx, "events.blob"):
        ctx.blobs.put(index.blob, content)
    if ctx.monotonic() - began_at > _MAX_WRITE_SECS:
        raise Unavailable(f"blob {index.blob!r} took longer than {_MAX_WRITE_SECS:g} s: try again")
    path = paths.event_log(name)
    if stored is None:
        ctx.cluster.state.mkdirs(paths.EVENTS)
    transaction = ctx.cluster.fenced(epoch)
    transaction.put(path, encode_record(head), None if stored is None else stored.version)
    # The version of the head is that of the whole log.
    joined_version = None if joined is None else -1
    transaction.put(paths.event_batch(name, index.first), encode_record(index), joined_version)
    try:
        commit(ctx, transaction, "events.index")
    except Conflict:
        # Certainly not applied, so that no index names the blob.
        _delete_blobs(ctx, [index.blob])
        raise


def read_page(
    ctx: OperationsContext, name: str, log: str | None, after: int, limit: int
) -> EventPage:
    """The oldest events of a log that have higher numbers than ``after`` and wait.

    ``after`` counts in the log ``log``: if the name has another log by now, or one that has had no
    such number, its oldest events are read. At most ``limit`` events and about 1 MiB.
    :class:`Unavailable` if this nimbus does not have their blob yet.
    """
    missing = ""
    for _ in range(_MAX_READS):
        stored = ctx.cluster.read_event_log(name)
        if stored is None:
            return EventPage(None, ())
        start, batches = rules.batches_after(stored.head, stored.batches, log, after)
        try:
            return EventPage(stored.head, _read_events(ctx, batches, start, limit))
        except KeyNotFound as error:
            # The batch was merged with later events, or removed, since its index was read.
            missing = error.message
    raise Unavailable(
        f"the event log of {name!r} cannot be read now, this nimbus lacks a part of it "
        f"({missing}): it is fetched from another nimbus; start the nimbus that holds it"
    )


def _read_events(
    ctx: OperationsContext, batches: Sequence[EventBatchIndex], start: int, limit: int
) -> tuple[TakenEvent, ...]:
    """Events after the number ``start``.

    :class:`KeyNotFound` if a blob is not here.
    """
    events: list[TakenEvent] = []
    for batch in batches:
        events += [event for event in _read_batch(ctx, batch) if event.number > start]
        count = rules.page_count(_sizes(events), limit)
        if count < len(events) or count >= limit:
            return tuple(events[:count])
    return tuple(events)


def acknowledge_events(
    ctx: OperationsContext, name: str, log: str, number: int
) -> EventLogHead | None:
    """Remove every event up to ``number``, which Dagster has; return the log's head.

    Repeating it has no effect, and neither has a number ahead of the log, which a code location
    names after a restored backup. ``None`` without a log. :class:`Conflict` if the name has another
    log.
    """
    return _remove(ctx, name, log, number, dropped=False)


def drop_old_events(ctx: OperationsContext, name: str) -> int:
    """Drop the events of a log that have waited for seven days; return their number.

    It is counted in the log, and reported as an error of the topology if that runs.
    """
    stored = ctx.cluster.read_event_log(name)
    if stored is None:
        return 0
    number = rules.expired_number(stored.batches, ctx.now_secs())
    count = number - stored.head.acknowledged
    if count <= 0:
        return 0
    _remove(ctx, name, stored.head.log, number, dropped=True)
    days = rules.MAX_AGE_SECS // 86_400
    report_topology_error(
        ctx,
        stored.head.topology,
        f"{count} events for Dagster are dropped, they waited for more than {days} days "
        f"{destination_text(stored.head.declared, stored.head.owner)}: "
        f"{destination_remedy(stored.head.declared)}",
    )
    return count


def _remove(
    ctx: OperationsContext, name: str, log: str, number: int, *, dropped: bool
) -> EventLogHead | None:
    """Remove the events up to ``number``, some batches in each transaction."""
    epoch = ctx.current_epoch()
    attempts = 0
    while True:
        stored = ctx.cluster.read_event_log(name)
        if stored is None:
            return None
        if stored.head.log != log:
            raise Conflict(
                f"the event log of {name!r} is another one now ({stored.head.log}): read its "
                "events from the beginning"
            )
        if rules.is_ahead(stored.head, number):
            return stored.head
        # Few batches at a time, so that the transaction stays small.
        part = number
        if len(stored.batches) > _MAX_REMOVED:
            part = min(number, stored.batches[_MAX_REMOVED - 1].last)
        removal = _plan_removal(ctx, stored, part, dropped)
        if removal is None:
            return stored.head
        try:
            _commit_removal(ctx, epoch, name, stored.version, removal)
        except Conflict as error:
            attempts += 1
            if not lost_race(error) or attempts >= _ATTEMPTS:
                raise
            continue
        if part == number:
            return removal.head


def _plan_removal(
    ctx: OperationsContext, stored: StoredLog, number: int, dropped: bool
) -> rules.Removal | None:
    """The removal of the events up to ``number``; ``None`` if they are gone."""
    since = None
    partial = rules.partial_batch(stored.batches, number)
    if partial is not None and number > stored.head.acknowledged:
        for event in _find_batch(ctx, partial) or ():
            if event.number == number + 1:
                since = event.at
    return rules.remove_events(stored.head, stored.batches, number, since=since, dropped=dropped)


def _commit_removal(
    ctx: OperationsContext, epoch: int, name: str, version: int, removal: rules.Removal
) -> None:
    """Write the head without the removed batches, and then delete their blobs."""
    transaction = ctx.cluster.fenced(epoch)
    transaction.set(paths.event_log(name), encode_record(removal.head), version)
    for batch in removal.batches:
        transaction.delete(paths.event_batch(name, batch.first))
    commit(ctx, transaction, "events.remove")
    _delete_blobs(ctx, [batch.blob for batch in removal.batches])


def _delete_blobs(ctx: OperationsContext, keys: Iterable[str]) -> None:
    """Delete blobs that no index names; the cleaner deletes those that remain."""
    for key in keys:
        with suppress(KeyNotFound, Conflict, Unavailable), step(ctx, "events.forget"):
            ctx.blobs.delete(key)


def change_source(ctx: OperationsContext, name: str, source: EventSource) -> None:
    """Note in the log where its events go now; no write if that has not changed.

    Without a log no node is made.
    """
    epoch = ctx.current_epoch()
    stored = ctx.cluster.read_event_log(name)
    if stored is None:
        return
    head = rules.with_source(stored.head, source)
    if head == stored.head:
        return
    transaction = ctx.cluster.fenced(epoch)
    transaction.set(paths.event_log(name), encode_record(head), stored.version)
    commit(ctx, transaction, "events.source")


def used_event_logs(
    ctx: OperationsContext, alive: Collection[str]
) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """Blob keys that event logs name, and the logs that are no longer of use.

    These are the empty logs of names that are not in ``alive``. Instead of the keys ``None`` if a
    log is damaged: then no blob of events is known to be garbage.
    """
    keys: set[str] = set()
    ended: list[str] = []
    is_damaged = False
    for name in ctx.cluster.state.find_children(paths.EVENTS) or ():
        try:
            stored = ctx.cluster.read_event_log(name)
        except Corrupt as error:
            ctx.log.error("%s", error.message)
            is_damaged = True
            continue
        if stored is None:
            continue
        keys.update(batch.blob for batch in stored.batches)
        if name not in alive and _is_empty(stored):
            ended.append(name)
    return None if is_damaged else frozenset(keys), tuple(ended)


def _is_empty(stored: StoredLog) -> bool:
    return not stored.head.waiting and not stored.batches


def remove_log(ctx: OperationsContext, epoch: int, name: str) -> bool:
    """Remove an empty log; true if it was removed.

    A log with events stays: its Dagster may still get them.
    """
    stored = ctx.cluster.read_event_log(name)
    if stored is None or not _is_empty(stored):
        return False
    transaction = ctx.cluster.fenced(epoch)
    # The version was read with the head: no event has come since.
    transaction.delete(paths.event_log(name), stored.version)
    commit(ctx, transaction, "clean.node")
    return True


def report_refused(ctx: OperationsContext, event: TakenEvent, reason: str) -> None:
    """Record that Dagster has no use for an event: an error of its task.

    ``reason`` says why, and the remedy. If the topology that reported it is gone, the text is only
    logged.
    """
    text = f"the {event.event.kind} of {event.event.asset!r} {reason}"
    if event.component is None or event.task is None:
        report_topology_error(ctx, event.topology, text)
        return
    _report_error(ctx, event.topology, event.component, event.task, text)


def report_topology_error(ctx: OperationsContext, topology_id: str, text: str) -> None:
    """Record an error of a topology that no task caused.

    It is only logged if the topology is gone.
    """
    _report_error(ctx, topology_id, SYSTEM, _TOPOLOGY_TASK, text)


def _report_error(
    ctx: OperationsContext, topology_id: str, component: str, task: int, text: str
) -> None:
    """Log an error, and record it if its topology exists; equal ones are one record."""
    ctx.log.warning("%s, %s: %s", topology_id, component, text)
    if not ctx.cluster.state.exists(paths.topology(topology_id)):
        return
    ctx.cluster.report_error(
        topology_id,
        task,
        text,
        component=component,
        time=ctx.now_secs(),
        group=f"events: {text[:200]}",
    )


def full_text(name: str, head: EventLogHead, now: int) -> str:
    """The reason why a log takes no events."""
    text = event_log_text(EventLogSummary.of(head).to_document(), now)
    return (
        f"the event log of {name!r} is full ({head.bytes} bytes): {text}: "
        f"{destination_remedy(head.declared)}"
    )
