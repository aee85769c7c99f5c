"""Outbox of what leaders did while Dagster was away, in ZooKeeper until Dagster takes it (best
effort).

One bounded record at ``/unreported``, which a new leader takes over; the oldest events are dropped
first.
"""

import logging
import threading

from pydantic import Field

from storm_dagster.model import paths
from storm_dagster.model.dagster_names import SUBMIT_JOB
from storm_dagster.model.errors import Corrupt, Misconfigured, StormDagsterError, Unavailable
from storm_dagster.model.records import Record, decode_record, encode_record
from storm_dagster.nimbus.dagster.client import DagsterClient
from storm_dagster.operations.context import OperationsContext

_log = logging.getLogger(__name__)

_MOST_EVENTS = 200
_MOST_TEXT = 1000


class UnreportedEvent(Record):
    """A change that was made without a Dagster run."""

    asset: tuple[str, ...]
    partition: str
    description: str
    gone: bool = False
    """The topology was removed: its partition key goes once nobody uses the name."""


class _UnreportedEvents(Record):
    events: tuple[UnreportedEvent, ...] = Field(default=(), alias="deeds")
    requests: tuple[str, ...] = ()


class LeaderOutbox:
    """The unreported events of one leader, stored in ZooKeeper with each change."""

    def __init__(self) -> None:
        self._events: list[UnreportedEvent] = []
        self._record = _UnreportedEvents()
        """The record as it was taken over, with the fields of a newer release."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._events)

    def take_over(self, ctx: OperationsContext) -> None:
        """Begin as the leader, with what former leaders did not report; a damaged record counts as
        empty.
        """
        raw = ctx.cluster.state.get_data(paths.UNREPORTED)
        record = _UnreportedEvents()
        try:
            record = decode_record(_UnreportedEvents, raw, paths.UNREPORTED) if raw else record
        except Corrupt as error:
            _log.error("what former leaders did cannot be reported to Dagster: %s", error.message)
        with self._lock:
            self._record, self._events = record, list(record.events)

    def add(
        self,
        ctx: OperationsContext,
        partition: str,
        description: str,
        asset: tuple[str, ...] = ("storm", "active_topology"),
        *,
        gone: bool = False,
    ) -> None:
        """Add an event. ``gone``: the topology was removed, so that its partition key is to go."""
        event = UnreportedEvent(
            asset=asset, partition=partition, description=description[:_MOST_TEXT], gone=gone
        )
        with self._lock:
            self._events = [*self._events, event][-_MOST_EVENTS:]
            self._store(ctx)

    def take(self, ctx: OperationsContext, request: str) -> None:
        """Note that the leader does this request itself: a run of it that Dagster launches after
        all does nothing.
        """
        with self._lock:
            requests = (*self._record.requests, request)[-_MOST_EVENTS:]
            self._record = self._record.model_copy(update={"requests": requests})
            self._store(ctx)

    def _store(self, ctx: OperationsContext) -> None:
        record = encode_record(self._record.model_copy(update={"events": tuple(self._events)}))
        try:
            # Only the leader writes it, and the epoch shows who that is: any version.
            ctx.cluster.fenced(ctx.current_epoch()).set(paths.UNREPORTED, record, -1).commit()
        except StormDagsterError as error:
            _log.warning(
                "what is to be reported to Dagster is kept in memory only: %s", error.message
            )

    def flush(self, ctx: OperationsContext, dagster: DagsterClient) -> int:
        """Report the events, oldest first, until Dagster does not answer; how many were
        reported.
        """
        reported = 0
        done: set[int] = set()
        with self._lock:
            events = list(self._events)
        for event in events:
            try:
                dagster.report(event.asset, event.partition, event.description)
                reported += 1
                if event.gone and _name_is_free(ctx, dagster, event.partition):
                    dagster.drop_partition(event.partition)
            except (Misconfigured, Unavailable):
                break
            except StormDagsterError as error:
                _log.warning("not reported to Dagster: %s (%s)", event.description, error)
            done.add(id(event))
        if done:
            with self._lock:
                self._events = [event for event in self._events if id(event) not in done]
                self._store(ctx)
        return reported


def _name_is_free(ctx: OperationsContext, dagster: DagsterClient, name: str) -> bool:
    """Whether no topology of the name lives and none is being submitted: else its key must stay."""
    if ctx.cluster.load_view().topology_named(name) is not None:
        return False
    run = dagster.find_run("dagster/partition", name, job=SUBMIT_JOB)
    return run is None or run.finished
