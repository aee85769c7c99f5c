"""Outbox of unreported Dagster events in a worker, with the tuples whose acks wait for them.

Pure: the caller passes the time, sends the batches and carries out the results. ``H`` stands for a
tuple whose ack waits for an event. At most one batch is in flight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from storm_dagster.model.dagster_events import DagsterEvent

H = TypeVar("H")

MOST_EVENTS = 1000
"""Events that may wait for one task."""
MOST_BATCH = 32
"""Events of a batch. With the longest metadata they fit into a request of 1 MiB."""
LONGEST_PAUSE_SECS = 15.0


@dataclass(frozen=True)
class ReportResponse:
    """Response to a batch. Events that it does not name are sent again."""

    stored: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Id -> reason why Dagster will never store it."""
    undefined: Mapping[str, str] = field(default_factory=dict)
    """Id of a stored event whose asset that Dagster does not define -> the consequence and the
    remedy.
    """
    trouble: str | None = None
    """Reason why the rest is not stored yet."""


@dataclass
class OutboxEntry(Generic[H]):
    """An event that no response has named yet."""

    task: int
    event: DagsterEvent
    holders: list[tuple[H, float]] = field(default_factory=list)
    """(tuple whose ack waits, since when)."""
    alone: bool = False
    """Whether it was also reported without a tuple, so that no replay would report it again."""


@dataclass
class OutboxResult(Generic[H]):
    """Actions that follow from a response."""

    ack: list[H] = field(default_factory=list)
    refused: list[tuple[OutboxEntry[H], str]] = field(default_factory=list)
    undefined: list[tuple[OutboxEntry[H], str]] = field(default_factory=list)


class EventOutbox(Generic[H]):
    """Unreported events of all tasks of a worker, in the order in which they were added."""

    def __init__(self, hold_secs: float) -> None:
        """``hold_secs``: a tuple has certainly timed out after that, so that its ack need not
        wait.
        """
        self._hold_secs = hold_secs
        self._waiting: dict[tuple[int, str], OutboxEntry[H]] = {}
        self._counts: dict[int, int] = {}
        self._sent: frozenset[str] = frozenset()
        self._retry_at = 0.0
        self._pause = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, task: int, event: DagsterEvent, holder: H | None, now: float) -> bool:
        """Add an event; one that equals a waiting one of the task joins it. ``False``: there is no
        room.
        """
        entry = self._waiting.get((task, event.id))
        if entry is None:
            if self._counts.get(task, 0) >= MOST_EVENTS:
                return False
            entry = self._waiting[task, event.id] = OutboxEntry(task, event)
            self._counts[task] = self._counts.get(task, 0) + 1
        if holder is None:
            entry.alone = True
        else:
            entry.holders.append((holder, now))
        return True

    def next_batch(self, now: float) -> list[DagsterEvent]:
        """The oldest events, each once; none while a batch is in flight, or during a pause."""
        if self._sent or now < self._retry_at:
            return []
        batch: dict[str, DagsterEvent] = {}
        for entry in self._waiting.values():
            batch[entry.event.id] = entry.event
            if len(batch) >= MOST_BATCH:
                break
        self._sent = frozenset(batch)
        return list(batch.values())

    def handle_response(self, answer: ReportResponse, now: float) -> OutboxResult[H]:
        """Handle the response to the batch in flight. Trouble is followed by a pause, a longer one
        each time.
        """
        self._sent = frozenset()
        self._pause = (
            0.0 if answer.trouble is None else min(LONGEST_PAUSE_SECS, max(0.5, 2 * self._pause))
        )
        self._retry_at = now + self._pause
        outcome: OutboxResult[H] = OutboxResult()
        for entry in list(self._waiting.values()):
            number = entry.event.id
            if number in answer.stored:
                outcome.ack += [holder for holder, _ in entry.holders]
                if number in answer.undefined:
                    outcome.undefined.append((entry, answer.undefined[number]))
            elif number in answer.refused:
                outcome.refused.append((entry, answer.refused[number]))
            else:
                continue
            self._remove(entry)
        return outcome

    def expire(self, now: float) -> list[H]:
        """Drop tuples that have timed out at their spout, and return them; their events stay."""
        gone: list[H] = []
        for entry in self._waiting.values():
            gone += [holder for holder, since in entry.holders if now - since > self._hold_secs]
            entry.holders = [held for held in entry.holders if now - held[1] <= self._hold_secs]
        return gone

    def close(self, task: int) -> list[H]:
        """End a task and return its tuples, which are to fail. Their replay reports their events
        again; events reported without a tuple stay.
        """
        gone: list[H] = []
        for entry in [entry for entry in self._waiting.values() if entry.task == task]:
            gone += [holder for holder, _ in entry.holders]
            entry.holders = []
            if not entry.alone:
                self._remove(entry)
        return gone

    def entries(self) -> list[OutboxEntry[H]]:
        """All entries."""
        return list(self._waiting.values())

    def _remove(self, entry: OutboxEntry[H]) -> None:
        del self._waiting[entry.task, entry.event.id]
        self._counts[entry.task] -= 1
        if not self._counts[entry.task]:
            del self._counts[entry.task]
