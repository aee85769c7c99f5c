"""Delivery of a worker's Dagster events through the leading nimbus.

HTTP requests run in a separate thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from storm_dagster.api.outages import OutageReports
from storm_dagster.api.tuples import Tuple
from storm_dagster.core.dataplane.event_outbox import (
    FULL_EVENTS,
    ROOM_EVENTS,
    EventOutbox,
    ReportResponse,
)
from storm_dagster.host.worker_spec import WorkerSpec
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.errors import (
    InvalidRequest,
    Unavailable,
    typed_error_text,
)
from storm_dagster.security.settings import Security
from storm_dagster.worker.dataplane.task_reports import ReportingTask, TaskReporter
from storm_dagster.worker.dataplane.tree import LOST, Ledger

if TYPE_CHECKING:
    import httpx

    from storm_dagster.worker.dataplane.tree import Tree
    from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)

_REQUEST_SECS = 30.0
"""Longest time that a nimbus may take to respond."""
_CLUSTER = "the cluster, for its events for Dagster,"
"""Subject of the outage in the reports of a task."""
_SOURCE = "events"
"""Source of the texts on the systems that a task waits for."""
_KIND = "events"
"""Kind of the report that events wait; there is only this one."""
_LOG_SECS = 60.0
"""Shortest time between two log lines on a problem."""
_EXPIRE_SECS = 5.0
"""Interval of the checks for events whose tuples have timed out."""


class EventTask(ReportingTask, Protocol):
    """A task that reports events; ``Runner`` of ``worker/tasks/runner.py``."""

    task_id: int
    component: str
    events_full: bool
    """True while the task takes no tuples, because its events are not taken."""
    events_wait: bool
    """True while some of its events wait for a cluster that does not take them."""


class EventWorker(Protocol):
    """The worker of such tasks; ``Shared`` of ``worker/tasks/runner.py``."""

    conf: Mapping[str, Any]
    wake: Callable[[], None]
    clock: Callable[[], float]
    ledger: Ledger

    def now_ms(self) -> int:
        """Return milliseconds since 1970."""
        ...


class ReportedEvent(NamedTuple):
    """An event, and the task that reports it."""

    component: str
    task: int
    event: DagsterEvent

    def to_document(self) -> dict[str, Any]:
        """The event in a request.

        A nimbus of an earlier release ignores component and task.
        """
        document: dict[str, Any] = msgspec.to_builtins(self.event)
        return {**document, "component": self.component, "task": self.task}


class EventDelivery:
    """Event outbox of a worker.

    Used only by the loop, except :meth:`on_response`. An event is like a tuple anchored to the
    current one. It keeps the tree open until the cluster has taken the event, no matter when the
    bolt acks. If the worker dies before, the tuple is replayed.

    A task whose events wait in large number, or for a full event log, takes no tuples: its
    ``events_full`` is set. As for a sink whose target is away, its spouts are held back and no
    message timeout runs. With fewer events the stream continues, and no message timeout runs while
    the cluster takes none (``events_wait``).
    """

    def __init__(self, shared: EventWorker) -> None:
        self._shared = shared
        self._runners: dict[int, EventTask] = {}
        """Task id -> the task, for its reports; every task that has added an event."""
        self.outbox: EventOutbox[Tuple] = EventOutbox(
            2 * float(shared.conf.get("topology.message.timeout.secs") or 30)
        )
        self._responses: deque[ReportResponse] = deque()
        """Results that the next :meth:`run` handles. Any thread appends."""
        self._expire_at = 0.0
        self._outages: dict[int, OutageReports] = {}
        """Task id -> its reports on a cluster that does not take its events."""
        self._has_problem = False
        """True if the last response names a problem."""
        self._is_log_full = False
        """True if the event log of the topology had no room at the last response."""
        self.send: Callable[[list[ReportedEvent]], None] | None = None
        """Sends a batch, and calls :meth:`on_response` with the result."""

    @property
    def pending(self) -> bool:
        """True if :meth:`run` has work to do."""
        return bool(self._responses) or len(self.outbox) > 0

    def on_response(self, response: ReportResponse) -> None:
        """Receive the result of the batch in flight; any thread."""
        self._responses.append(response)
        self._shared.wake()

    def add(self, runner: EventTask, event: DagsterEvent, tree: Tree | None) -> None:
        """Add an event of a task, as part of ``tree``.

        A task at its bound takes no further tuples. If its call in process reports very many more
        events, the tuple of such an event fails; one without a tuple is dropped. Both are reported.
        """
        self._runners[runner.task_id] = runner
        ledger = self._shared.ledger
        now = self._shared.clock()
        holder = None
        if tree is not None:
            ledger.add(tree)
            holder = Tuple(0, runner.component, "__dagster", runner.task_id, [], tree)
        if self.outbox.add(runner.task_id, event, holder, now):
            self._update_hold(runner)
            return
        if holder is not None:
            ledger.fail(holder)
        consequence = "it is dropped" if holder is None else "its tuple fails"
        error = Unavailable(
            f"the {event.kind} of {event.asset!r} was refused, {self.outbox.count(runner.task_id)} "
            "events of this task wait to be taken by the cluster: "
            f"{consequence}; report fewer events in one call"
        )
        self._report(runner, error)

    def offer(self, runner: EventTask, event: DagsterEvent) -> bool:
        """Add a sink's report on its table, which has no tuple; false if there is no room."""
        self._runners[runner.task_id] = runner
        return self.outbox.offer(runner.task_id, event)

    def run(self, now: float) -> bool:
        """Ack or fail the tuples of sent events, and send the next batch.

        Returns True if there was a response or a batch.
        """
        ledger = self._shared.ledger
        outbox = self.outbox
        worked = bool(self._responses)
        while self._responses:
            self._handle(self._responses.popleft(), now)
        if now >= self._expire_at:
            self._expire_at = now + _EXPIRE_SECS
            if any(runner.events_full or runner.events_wait for runner in self._runners.values()):
                outbox.postpone_expiry(now)
            for holder in outbox.expire(now):
                ledger.fail(holder)
        if self.send is None:
            return worked
        batch = outbox.next_batch(now)
        if not batch:
            return worked
        self.send(
            [
                ReportedEvent(self._runners[entry.task].component, entry.task, entry.event)
                for entry in batch
            ]
        )
        return True

    def _update_hold(self, runner: EventTask) -> None:
        """Set if the task takes tuples, and if its events wait."""
        count = self.outbox.count(runner.task_id)
        bound = ROOM_EVENTS if runner.events_full else FULL_EVENTS
        runner.events_full = count >= bound or (self._is_log_full and count > 0)
        runner.events_wait = self._has_problem and count > 0

    def _handle(self, response: ReportResponse, now: float) -> None:
        """Ack or fail the tuples of a batch, and report the events that were not stored."""
        ledger = self._shared.ledger
        outcome = self.outbox.handle_response(response, now)
        for holder in outcome.ack:
            ledger.ack(holder)
        for entry, reason in outcome.refused:
            for holder, _ in entry.holders:
                ledger.fail(holder)
            error = InvalidRequest(
                f"the {entry.event.kind} of {entry.event.asset!r} was refused: {reason}"
            )
            self._report(self._runners[entry.task], error)
        for entry, reason in outcome.undefined:
            if entry.is_offered:
                # A nimbus of the release before stores it in a Dagster without the table.
                continue
            error = InvalidRequest(f"the {entry.event.kind} of {entry.event.asset!r} {reason}")
            self._report(self._runners[entry.task], error)
        self._has_problem = response.problem is not None
        self._report_problem(response.problem)
        # A nimbus that does not respond says nothing about the log.
        if response.full or response.problem is None:
            self._is_log_full = response.full
        for runner in self._runners.values():
            self._update_hold(runner)

    def _report_problem(self, problem: str | None) -> None:
        """Report begin and end of an outage, for each task whose events wait for the cluster."""
        if problem is None:
            for reports in self._outages.values():
                reports.end()
            return
        # No tuple waits for a sink's report on its table.
        waiting = Counter(entry.task for entry in self.outbox.entries() if not entry.is_offered)
        for task, count in waiting.items():
            if task not in self._outages:
                reporter = TaskReporter(self._runners[task])
                self._outages[task] = OutageReports(reporter, self._shared.now_ms, _SOURCE)
            text = f"{count} events wait to be taken by the cluster, and their tuples with them"
            error = Unavailable(f"{text}: {problem}")
            self._outages[task].report_waiting(
                _CLUSTER, _KIND, problem, lambda since, error=error: error
            )

    def close(self, task: int) -> None:
        """Drop the events of a task that closes here."""
        reports = self._outages.pop(task, None)
        if reports is not None:
            reports.drop()
        for holder in self.outbox.close(task):
            self._shared.ledger.fail(holder, LOST)

    def drop(self) -> None:
        """Report the events that are lost when the worker ends: those without a tuple.

        Any other comes once more, when its tuple is replayed. A lost report of a sink on its table
        is not an error: the next report makes the table new as well.
        """
        for entry in self.outbox.entries():
            if entry.without_tuple and not entry.is_offered:
                error = Unavailable(
                    f"the {entry.event.kind} of {entry.event.asset!r} is lost: it has no tuple to "
                    "be replayed, and the worker ends"
                )
                self._report(self._runners[entry.task], error)

    def _report(self, runner: EventTask, error: Exception) -> None:
        runner.report(error, "events for Dagster")


@dataclass(eq=False)
class EventSender:
    """Thread that posts batches to the leading nimbus.

    It starts with the first batch.
    """

    spec: WorkerSpec
    cluster: StormClusterState
    on_response: Callable[[ReportResponse], None]

    def __post_init__(self) -> None:
        self._batches: queue.SimpleQueue[list[ReportedEvent]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._logged_problem: str | None = None
        """Trouble that was logged last; ``None`` after its end."""
        self._log_at = 0.0
        """Time from which on a problem may be logged (monotonic clock)."""

    def send(self, batch: list[ReportedEvent]) -> None:
        """Queue a batch."""
        self._batches.put(batch)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dagster-events", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Post batches forever; the body of the daemon thread."""
        http: httpx.Client | None = None
        while True:
            batch = self._batches.get()
            try:
                if http is None:
                    http = self._client()
                response = self._post(http, batch)
            except Exception as error:
                # A nimbus that is away, or that answers in another form. The thread must not end:
                # the events would wait permanently, without a reason.
                response = ReportResponse(problem=typed_error_text(error))
            self._log_problem(response.problem)
            self.on_response(response)

    def _log_problem(self, problem: str | None) -> None:
        """Log a problem that is new, at most once a minute, and the end of one that was logged."""
        if problem is None:
            if self._logged_problem is not None:
                _log.warning("events for Dagster: they are taken again")
            self._logged_problem = None
            return
        now = time.monotonic()
        if problem != self._logged_problem and now >= self._log_at:
            self._logged_problem = problem
            self._log_at = now + _LOG_SECS
            _log.warning("events for Dagster: %s", problem)

    def _client(self) -> httpx.Client:
        """A client for nimbus; :class:`InvalidRequest` if a file of its TLS cannot be used."""
        # Most workers report no events, and need no HTTP client.
        import httpx

        options = Security.of(self.spec.conf).client_options()
        return httpx.Client(timeout=httpx.Timeout(_REQUEST_SECS, connect=2.0), **options)

    def _post(self, http: httpx.Client, batch: list[ReportedEvent]) -> ReportResponse:
        """Post a batch once.

        Raises the error of the leader, or that of a response in another form.
        """
        from storm_dagster.client.leader import NamedLeader, call_leader

        content = msgspec.json.encode({"events": [reported.to_document() for reported in batch]})
        headers = {
            "Authorization": f"Bearer {self.spec.token}",
            "Content-Type": "application/json",
        }

        def send(base: str) -> httpx.Response:
            url = f"{base}/v1/topologies/{self.spec.topology_id}/events"
            return http.post(url, content=content, headers=headers)

        # One attempt: the outbox sends the batch once more, with the events added since.
        response = call_leader(
            NamedLeader(self.cluster.leader_http),
            send,
            doing=f"storing {len(batch)} events",
            deadline=time.monotonic(),
            resend=False,
        )
        document: Mapping[str, Any] = response.json()
        return ReportResponse(
            stored=frozenset(document["stored"]),
            refused=dict(document["refused"]),
            # A nimbus of an earlier release does not look for the asset.
            undefined=dict(document.get("undefined", {})),
            problem=document["problem"],
            # A nimbus of an earlier release has no event log.
            full=bool(document.get("full", False)),
        )
