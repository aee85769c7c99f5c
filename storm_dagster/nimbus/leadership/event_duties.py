"""Events that the leader forwards to the cluster's Dagster, and events that are too old.

Events of declared topologies are pulled by their code location instead.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from storm_dagster.core import event_log as rules
from storm_dagster.host.waiting import Backoff
from storm_dagster.model.dagster_events import is_target_key
from storm_dagster.model.errors import (
    Fenced,
    InvalidRequest,
    Misconfigured,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.model.event_log import EventLogSummary, TakenEvent
from storm_dagster.nimbus.leadership.duties import LeaderRounds
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.event_pulls import live_source
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live import event_logs

_POLL_SECS = 5.0
"""Seconds between two polls of the logs while no event is taken here."""
_DROP_SECS = 60.0
"""Seconds between two searches for events that are too old."""
_PAGE_EVENTS = 50
"""Events that are forwarded before they are acknowledged together."""
_PAGE_SECS = 10.0
"""Time after which the rest of them is left for the next page."""
_FORWARD_SECS = 10.0
"""Time after which forwarding leaves the rest to the next round of duties."""
_MIN_PAUSE_SECS = 0.5
_MAX_PAUSE_SECS = 15.0
"""The pause after a response without success grows from the smaller to the larger one."""


class LeaderEvents(LeaderRounds):
    """Forwarding of events in a separate thread.

    Dagster may be slow, or away for days. The events of a log are forwarded in order, those of
    different logs in turns. They are acknowledged after each page: if the leader is lost before
    that, a page is repeated.
    """

    def __init__(self, nimbus: Nimbus) -> None:
        self._pauses = Backoff(_MIN_PAUSE_SECS, _MAX_PAUSE_SECS)
        super().__init__(nimbus)

    def _forget(self) -> None:
        self._pauses.reset()
        self._retry_at = 0.0
        """Monotonic time before which Dagster gets no event."""
        self._next_poll = 0.0
        """Monotonic time of the next poll while no event is taken here."""
        self._next_drop = 0.0
        """Monotonic time of the next search for events that are too old."""

    def _duties(self) -> Iterable[Callable[[OperationsContext], None]]:
        return self._drop_old, self._forward

    def _drop_old(self, ctx: OperationsContext) -> None:
        """Drop the events that have waited for too long."""
        now = time.monotonic()
        if now < self._next_drop:
            return
        self._next_drop = now + _DROP_SECS
        oldest_secs = ctx.now_secs() - rules.MAX_AGE_SECS
        for name, summary in ctx.cluster.event_logs().items():
            if summary.since is not None and summary.since < oldest_secs:
                self._attempt(name, lambda name=name: event_logs.drop_old_events(ctx, name))

    def _forward(self, ctx: OperationsContext) -> None:
        """Forward the events for the cluster's Dagster, until it does not respond."""
        now = time.monotonic()
        taken = self._nimbus.events_taken
        if now < self._retry_at or not (taken.is_set() or now >= self._next_poll):
            return
        taken.clear()
        self._next_poll = now + _POLL_SECS
        # Read for each turn: a log that never gets empty must not keep others waiting, nor
        # those of a topology that a code location has declared since then go here.
        while names := self._names_to_forward(ctx, ctx.cluster.event_logs()):
            has_more = False
            for name in names:
                if self._attempt(name, lambda name=name: self._forward_page(ctx, name)):
                    has_more = True
                if time.monotonic() < self._retry_at:
                    # Events that are taken during the pause are found by the poll after it.
                    self._next_poll = self._retry_at
                    return
            if not has_more:
                return
            if time.monotonic() > now + _FORWARD_SECS:
                # The other duty, and the end of nimbus, come before the rest.
                taken.set()
                return

    def _names_to_forward(
        self, ctx: OperationsContext, summaries: dict[str, EventLogSummary]
    ) -> list[str]:
        """Names of the logs with events for the cluster's Dagster.

        The destination of a topology that was deployed since its last event is noted in its log.
        """
        names: list[str] = []
        waiting = {name: summary for name, summary in summaries.items() if summary.waiting}
        if not waiting:
            return names
        view = self._nimbus.shown_view()
        for name, summary in waiting.items():

            def is_forwarded(name: str = name, summary: EventLogSummary = summary) -> bool:
                source = live_source(self._nimbus, view, name)
                if source is None:
                    return not summary.declared
                if (source.declared, source.owner) != (summary.declared, summary.owner):
                    event_logs.change_source(ctx, name, source)
                return not source.declared

            if self._attempt(name, is_forwarded):
                names.append(name)
        return names

    def _attempt(self, name: str, action: Callable[[], object]) -> bool:
        """Run an action on a log; an error is logged, and does not stop those on others.

        Returns the truth of its result, false after an error; :class:`Fenced` is raised.
        """
        duty = f"the events of {name}"
        try:
            result = bool(action())
        except Fenced:
            raise
        except StormDagsterError as error:
            self._log_failure(duty, error)
            return False
        self._failures.pop(duty, None)
        return result

    def _forward_page(self, ctx: OperationsContext, name: str) -> bool:
        """Forward and acknowledge the oldest events of a log; true if more may wait.

        If Dagster does not respond, the next attempt is after a pause.
        """
        page = event_logs.read_page(ctx, name, None, 0, _PAGE_EVENTS)
        if page.head is None or not page.events:
            return False
        number = self._send(ctx, page.events)
        if number is None:
            return False
        head = event_logs.acknowledge_events(ctx, name, page.head.log, number)
        return head is not None and head.waiting > 0

    def _send(self, ctx: OperationsContext, events: Sequence[TakenEvent]) -> int | None:
        """Report events to Dagster; return the number of the last one that is done.

        ``None`` if Dagster did not take even the first one. An event that Dagster refuses is an
        error of the task that reported it.
        """
        deadline = time.monotonic() + _PAGE_SECS
        number: int | None = None
        for taken_event in events:
            if number is not None and time.monotonic() > deadline:
                break
            if is_target_key(taken_event.event.key):
                # A sink's report is for the location that declares the topology: none does now.
                number = taken_event.number
                continue
            origin = {"storm/topology": taken_event.topology, "storm/event": taken_event.event.id}
            try:
                self._nimbus.dagster.report_event(taken_event.event, origin)
            except (Misconfigured, Unavailable) as error:
                self._retry_at = time.monotonic() + self._pauses.next_pause()
                self._log_failure("forwarding of events", error)
                return number
            except InvalidRequest as error:
                event_logs.report_refused(ctx, taken_event, f"was refused: {error.message}")
            number = taken_event.number
        self._pauses.reset()
        self._failures.pop("forwarding of events", None)
        return number
