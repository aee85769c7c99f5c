"""Events for Dagster that wait in a worker: which go next, and which tuples wait with them.

Pure: the caller brings the time, sends the batches and carries out what comes of their answers. ``H`` stands for
a tuple whose ack waits for an event. There is one batch under way at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from storm_dagster.model.dagster_events import DagsterEvent

__all__ = ["Answer", "EventOutbox", "Outcome", "Waiting"]

H = TypeVar("H")

MOST_EVENTS = 1000
"""Events that may wait for one task."""
MOST_BATCH = 32
"""Events of a batch. With the longest metadata they fit into a request of 1 MiB."""
LONGEST_PAUSE_SECS = 15.0


@dataclass(frozen=True)
class Answer:
    """What became of a batch. What it does not name is sent again."""

    stored: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Id -> why Dagster will never take it."""
    trouble: str | None = None
    """Why the rest is not stored yet."""


@dataclass
class Waiting(Generic[H]):
    """An event that no answer has named yet."""

    task: int
    event: DagsterEvent
    holders: list[tuple[H, float]] = field(default_factory=list)
    """(tuple whose ack waits, since when)."""
    alone: bool = False
    """Whether it was reported without a tuple too, so that nobody would report it again."""


@dataclass
class Outcome(Generic[H]):
    """What an answer asks for."""

    ack: list[H] = field(default_factory=list)
    refused: list[tuple[Waiting[H], str]] = field(default_factory=list)


class EventOutbox(Generic[H]):
    """The events of all tasks of a worker, in the order in which they were reported."""

    def __init__(self, hold_secs: float) -> None:
        """``hold_secs``: after which a tuple has timed out for certain, so that nothing needs to wait with it."""
        self._hold_secs = hold_secs
        self._waiting: dict[tuple[int, str], Waiting[H]] = {}
        self._counts: dict[int, int] = {}
        self._sent: frozenset[str] = frozenset()
        self._retry_at = 0.0
        self._pause = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, task: int, event: DagsterEvent, holder: H | None, now: float) -> bool:
        """Keep an event; one that equals a waiting one of the task joins it. ``False``: there is no room."""
        entry = self._waiting.get((task, event.id))
        if entry is None:
            if self._counts.get(task, 0) >= MOST_EVENTS:
                return False
            entry = self._waiting[task, event.id] = Waiting(task, event)
            self._counts[task] = self._counts.get(task, 0) + 1
        if holder is None:
            entry.alone = True
        else:
            entry.holders.append((holder, now))
        return True

    def next_batch(self, now: float) -> list[DagsterEvent]:
        """The oldest events, each once; none while a batch is under way, or soon after trouble."""
        if self._sent or now < self._retry_at:
            return []
        batch: dict[str, DagsterEvent] = {}
        for entry in self._waiting.values():
            batch[entry.event.id] = entry.event
            if len(batch) >= MOST_BATCH:
                break
        self._sent = frozenset(batch)
        return list(batch.values())

    def answered(self, answer: Answer, now: float) -> Outcome[H]:
        """Take the answer to the batch under way. Trouble is followed by a pause, a longer one each time."""
        self._sent = frozenset()
        self._pause = 0.0 if answer.trouble is None else min(LONGEST_PAUSE_SECS, max(0.5, 2 * self._pause))
        self._retry_at = now + self._pause
        outcome: Outcome[H] = Outcome()
        for entry in list(self._waiting.values()):
            number = entry.event.id
            if number in answer.stored:
                outcome.ack += [holder for holder, _ in entry.holders]
            elif number in answer.refused:
                outcome.refused.append((entry, answer.refused[number]))
            else:
                continue
            self._remove(entry)
        return outcome

    def expire(self, now: float) -> list[H]:
        """Tuples that have timed out at their spout; their events go on waiting."""
        gone: list[H] = []
        for entry in self._waiting.values():
            gone += [holder for holder, since in entry.holders if now - since > self._hold_secs]
            entry.holders = [held for held in entry.holders if now - held[1] <= self._hold_secs]
        return gone

    def close(self, task: int) -> list[H]:
        """The task ends here: its tuples, which are to fail. Their replay reports their events again; what was
        reported without a tuple goes on waiting."""
        gone: list[H] = []
        for entry in [entry for entry in self._waiting.values() if entry.task == task]:
            gone += [holder for holder, _ in entry.holders]
            entry.holders = []
            if not entry.alone:
                self._remove(entry)
        return gone

    def entries(self) -> list[Waiting[H]]:
        """All that waits."""
        return list(self._waiting.values())

    def _remove(self, entry: Waiting[H]) -> None:
        del self._waiting[entry.task, entry.event.id]
        self._counts[entry.task] -= 1
        if not self._counts[entry.task]:
            del self._counts[entry.task]
