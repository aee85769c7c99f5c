"""Outbox of a worker: Dagster events that the cluster has not taken yet.

It also holds the tuples whose acks wait for events. Pure: the caller passes the time, sends the
batches and carries out the results. ``H`` is the type of a tuple whose ack waits for an event. At
most one batch is in flight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from storm_dagster.model.dagster_events import DagsterEvent

H = TypeVar("H")

FULL_EVENTS = 1000
"""Waiting events of a task from which on it takes no more tuples."""
ROOM_EVENTS = 500
"""Waiting events of such a task up to which it takes tuples again."""
MAX_TASK_EVENTS = 10_000
"""Limit of the waiting events of one task, which a single call can reach: it is not interrupted."""
MAX_BATCH = 100
"""Events of a batch."""
MAX_BATCH_BYTES = 512 * 1024
"""Bytes of the events of a batch; a request may have 1 MiB."""
MAX_PAUSE_SECS = 15.0
"""Longest pause after a response with a problem."""


@dataclass(frozen=True)
class ReportResponse:
    """Response to a batch; events that it does not name are sent with the next one."""

    stored: frozenset[str] = frozenset()
    """Ids of the events that the cluster has taken."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Id -> reason why it will never be taken."""
    undefined: Mapping[str, str] = field(default_factory=dict)
    """Id of a taken event whose component does not declare its asset -> consequence and remedy.

    A nimbus of an earlier release names events whose asset its Dagster does not define.
    """
    problem: str | None = None
    """Reason why the other events are not taken yet."""
    full: bool = False
    """True if the reason is that the event log of the topology is full."""


@dataclass
class OutboxEntry(Generic[H]):
    """An event that no response has named yet."""

    task: int
    event: DagsterEvent
    holders: list[tuple[H, float]] = field(default_factory=list)
    """(tuple whose ack waits, time at which it began to wait)."""
    without_tuple: bool = False
    """True if it was also reported without a tuple, so that no replay would report it."""
    size: int = 0
    """Bytes of the event as JSON."""
    is_offered: bool = False
    """True if it was offered, and does not count against the limit of its task."""


@dataclass
class OutboxResult(Generic[H]):
    """Actions that follow from a response."""

    ack: list[H] = field(default_factory=list)
    """Tuples whose event is taken."""
    refused: list[tuple[OutboxEntry[H], str]] = field(default_factory=list)
    """(entry, reason) of events that will never be taken."""
    undefined: list[tuple[OutboxEntry[H], str]] = field(default_factory=list)
    """(entry, consequence and remedy) of stored events whose asset is not declared."""


class EventOutbox(Generic[H]):
    """Events of all tasks of a worker that are not taken yet, oldest first."""

    def __init__(self, hold_secs: float) -> None:
        """Start with an empty outbox.

        After ``hold_secs`` a tuple has certainly timed out, so that its ack need not wait.
        """
        self._hold_secs = hold_secs
        self._waiting: dict[tuple[int, str], OutboxEntry[H]] = {}
        """(Task, event id) -> entry, oldest first."""
        self._counts: dict[int, int] = {}
        """Task -> number of its entries."""
        self._sent: frozenset[str] = frozenset()
        """Event ids of the batch in flight; empty without one."""
        self._retry_at = 0.0
        """Time before which no batch is sent."""
        self._pause = 0.0
        """Last pause in seconds; 0 without a problem."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, task: int, event: DagsterEvent, holder: H | None, now: float) -> bool:
        """Add an event; return ``False`` if there is no room.

        An event that equals a waiting one of the task joins it.
        """
        entry = self._waiting.get((task, event.id))
        if entry is None:
            if self._counts.get(task, 0) >= MAX_TASK_EVENTS:
                return False
            entry = OutboxEntry(task, event, size=len(msgspec.json.encode(event)))
            self._waiting[task, event.id] = entry
            self._counts[task] = self._counts.get(task, 0) + 1
        if holder is None:
            entry.without_tuple = True
        else:
            entry.holders.append((holder, now))
        return True

    def count(self, task: int) -> int:
        """Number of the events of a task that wait."""
        return self._counts.get(task, 0)

    def offer(self, task: int, event: DagsterEvent) -> bool:
        """Add an event that may be dropped, and holds no tuple back.

        Return ``False`` if there is no room: while a task takes no tuples for its events, or
        another offered event for the same asset. Offered events do not count as waiting ones.
        """
        if self._counts.get(task, 0) >= FULL_EVENTS:
            return False
        for entry in self._waiting.values():
            if entry.is_offered and entry.task == task and entry.event.key == event.key:
                return False
        size = len(msgspec.json.encode(event))
        entry = OutboxEntry[H](task, event, without_tuple=True, size=size, is_offered=True)
        self._waiting[task, event.id] = entry
        return True

    def next_batch(self, now: float) -> list[OutboxEntry[H]]:
        """The oldest events, each once; none during a pause or a batch in flight.

        They are the batch in flight until :meth:`handle_response`.
        """
        if self._sent or now < self._retry_at:
            return []
        batch: dict[str, OutboxEntry[H]] = {}
        size = 0
        for entry in self._waiting.values():
            if entry.event.id in batch:
                continue
            size += entry.size
            if batch and size > MAX_BATCH_BYTES:
                break
            batch[entry.event.id] = entry
            if len(batch) >= MAX_BATCH:
                break
        self._sent = frozenset(batch)
        return list(batch.values())

    def handle_response(self, response: ReportResponse, now: float) -> OutboxResult[H]:
        """Handle the response to the batch in flight.

        A problem is followed by a pause, which is longer each time.
        """
        self._sent = frozenset()
        if response.problem is None:
            self._pause = 0.0
        else:
            self._pause = min(MAX_PAUSE_SECS, max(0.5, 2 * self._pause))
        self._retry_at = now + self._pause
        result: OutboxResult[H] = OutboxResult()
        for entry in list(self._waiting.values()):
            event_id = entry.event.id
            if event_id in response.stored:
                result.ack += [holder for holder, _ in entry.holders]
                if event_id in response.undefined:
                    result.undefined.append((entry, response.undefined[event_id]))
            elif event_id in response.refused:
                result.refused.append((entry, response.refused[event_id]))
            else:
                continue
            self._remove(entry)
        return result

    def expire(self, now: float) -> list[H]:
        """Drop and return tuples that have timed out at their spout; their events stay."""
        dropped: list[H] = []
        for entry in self._waiting.values():
            waiting: list[tuple[H, float]] = []
            for holder, since in entry.holders:
                if now - since > self._hold_secs:
                    dropped.append(holder)
                else:
                    waiting.append((holder, since))
            entry.holders = waiting
        return dropped

    def postpone_expiry(self, now: float) -> None:
        """Begin the waiting time of all tuples once more.

        For the time in which no message timeout runs at their spouts.
        """
        for entry in self._waiting.values():
            entry.holders = [(holder, now) for holder, _ in entry.holders]

    def close(self, task: int) -> list[H]:
        """End a task and return its tuples, which must be failed.

        Their replay reports their events once more; events reported without a tuple stay.
        """
        dropped: list[H] = []
        for entry in [entry for entry in self._waiting.values() if entry.task == task]:
            dropped += [holder for holder, _ in entry.holders]
            entry.holders = []
            if not entry.without_tuple:
                self._remove(entry)
        return dropped

    def entries(self) -> list[OutboxEntry[H]]:
        """All entries."""
        return list(self._waiting.values())

    def _remove(self, entry: OutboxEntry[H]) -> None:
        del self._waiting[entry.task, entry.event.id]
        if entry.is_offered:
            return
        self._counts[entry.task] -= 1
        if not self._counts[entry.task]:
            del self._counts[entry.task]
