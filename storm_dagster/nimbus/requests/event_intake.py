"""Taking of workers' events by the leader, in groups.

At most one batch a second and topology is stored: the requests that come within the second are
committed together.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from storm_dagster.core.event_log import EventSource
from storm_dagster.host.futures import in_thread
from storm_dagster.model.errors import Fenced, StormDagsterError, Unavailable, typed_error_text
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.operations.live import event_logs
from storm_dagster.operations.live.event_logs import EventReport

_log = logging.getLogger(__name__)

_COMMIT_SECS = 1.0
"""Shortest time between two commits of a topology."""
_MAX_WAITING = 64
"""Batches of workers that wait for a commit, of all topologies."""


@dataclass(frozen=True)
class IntakeResult:
    """Outcome of a worker's batch."""

    taken: int
    """Number of its first events that the cluster has taken."""
    problem: str | None = None
    """Reason why the others are not taken yet; ``None``: they are to be sent again at once."""
    full: bool = False
    """True if the log has no room for them."""


@dataclass(frozen=True)
class _Batch:
    """A worker's batch that waits for a commit."""

    source: EventSource
    reports: Sequence[EventReport]
    result: Future[IntakeResult]


class EventIntake:
    """Commits the batches of workers; safe to share between threads.

    A thread for each topology that reports ends a second after its last commit.
    """

    def __init__(self, nimbus: Nimbus, *, commit_secs: float = _COMMIT_SECS) -> None:
        self._nimbus = nimbus
        self._commit_secs = commit_secs
        self._lock = threading.Lock()
        """Guards the queues."""
        self._queues: dict[str, deque[_Batch]] = {}
        """Name of a topology whose thread runs -> its batches, oldest first."""

    def submit(
        self, name: str, source: EventSource, reports: Sequence[EventReport]
    ) -> Future[IntakeResult]:
        """Queue a batch for the next commit of that topology's name.

        The future gets the outcome, and never an error; cancelling it before the commit withdraws
        the batch. :class:`Unavailable` if too many batches wait, or nimbus
        has no thread for them.
        """
        batch = _Batch(source, reports, Future())
        with self._lock:
            waiting = sum(len(queue) for queue in self._queues.values())
            if waiting >= _MAX_WAITING:
                raise Unavailable(f"{waiting} batches of events wait to be stored: send it again")
            queue = self._queues.get(name)
            if queue is not None:
                queue.append(batch)
                return batch.result
            self._queues[name] = deque([batch])
            try:
                in_thread("nimbus-events", lambda: self._run(name))
            except RuntimeError as error:
                # Without a thread nothing would ever empty the queue.
                del self._queues[name]
                raise Unavailable(
                    f"nimbus cannot start a thread that stores events ({error}): send it again"
                ) from None
        return batch.result

    def _run(self, name: str) -> None:
        """Commit the batches of a topology until none comes for a second."""
        while True:
            began_at = time.monotonic()
            self._commit(name)
            time.sleep(max(0.0, self._commit_secs - (time.monotonic() - began_at)))
            with self._lock:
                if not self._queues[name]:
                    del self._queues[name]
                    return

    def _commit(self, name: str) -> None:
        """Commit the batches that wait, as far as one commit takes them."""
        with self._lock:
            queue = self._queues[name]
            batches = [batch for batch in queue if not batch.result.cancelled()]
            queue.clear()
        if not batches:
            return
        reports = [report for batch in batches for report in batch.reports]
        problem = None
        try:
            epoch = self._nimbus.status.require()
            # The newest topology of the name decides where the events go.
            source = batches[-1].source
            result = event_logs.take_events(self._nimbus.operations(epoch), name, source, reports)
            if result.full is not None:
                problem = event_logs.full_text(name, result.full, int(time.time()))
        except Exception as error:
            self._answer_error(batches, error)
            return
        if result.count:
            self._nimbus.events_taken.set()
        self._answer(name, batches, result.count, problem)

    def _answer_error(self, batches: Sequence[_Batch], error: Exception) -> None:
        """Answer all batches with the reason why none was taken."""
        if isinstance(error, Fenced):
            self._nimbus.wake_election()
        if isinstance(error, StormDagsterError):
            text = error.message
        else:
            text = typed_error_text(error)
            _log.error("events cannot be stored", exc_info=error)
        for batch in batches:
            _set(batch.result, IntakeResult(0, text))

    def _answer(
        self, name: str, batches: Sequence[_Batch], count: int, problem: str | None
    ) -> None:
        """Answer batches by the number of the first of all their events that were taken.

        Batches without a taken event wait for the next commit, unless the log is full.
        """
        later: list[_Batch] = []
        for batch in batches:
            taken = min(count, len(batch.reports))
            count -= taken
            if taken == len(batch.reports):
                _set(batch.result, IntakeResult(taken))
            elif problem is not None:
                _set(batch.result, IntakeResult(taken, problem, full=True))
            elif taken:
                _set(batch.result, IntakeResult(taken))
            else:
                later.append(batch)
        if later:
            with self._lock:
                self._queues[name].extendleft(reversed(later))


def _set(result: Future[IntakeResult], value: IntakeResult) -> None:
    """Set the result, unless its reader has withdrawn."""
    if result.set_running_or_notify_cancel():
        result.set_result(value)
