"""Outbox of what the leader does without a Dagster run, in ZooKeeper until Dagster takes it (best
effort).

One bounded record at ``/unreported``, which a new leader takes over; the oldest events are dropped
first.
"""

import logging
import threading
from collections.abc import Mapping

from storm_dagster.model import paths
from storm_dagster.model.errors import Corrupt, Misconfigured, StormDagsterError, Unavailable
from storm_dagster.model.records import decode_record, encode_record
from storm_dagster.model.unreported import UnreportedEvent, UnreportedEvents
from storm_dagster.nimbus.dagster.client import DagsterClient
from storm_dagster.operations.context import OperationsContext

_log = logging.getLogger(__name__)

_MAX_EVENTS = 200
_MAX_TEXT = 1000
_ACTIVE_TOPOLOGY = ("storm", "active_topology")


class LeaderOutbox:
    """The unreported events of one leader, stored in ZooKeeper with each change."""

    def __init__(self) -> None:
        self._events: list[UnreportedEvent] = []
        self._record = UnreportedEvents()
        """The record as it was taken over, with the fields of a newer release."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._events)

    def take_over(self, ctx: OperationsContext) -> None:
        """Begin as the leader, with what former leaders did not report; a damaged record counts as
        empty.
        """
        raw = ctx.cluster.state.get_data(paths.UNREPORTED)
        record = UnreportedEvents()
        try:
            record = decode_record(UnreportedEvents, raw, paths.UNREPORTED) if raw else record
        except Corrupt as error:
            _log.error("what former leaders did cannot be reported to Dagster: %s", error.message)
        with self._lock:
            self._record, self._events = record, list(record.events)

    def add(
        self,
        ctx: OperationsContext,
        partition: str,
        description: str,
        asset: tuple[str, ...] = _ACTIVE_TOPOLOGY,
    ) -> None:
        """Add a materialization of the asset's partition."""
        event = UnreportedEvent(
            asset=asset, partition=partition, description=description[:_MAX_TEXT]
        )
        with self._lock:
            self._append(event)
            self._store(ctx)

    def add_change(
        self,
        ctx: OperationsContext,
        partition: str,
        description: str,
        metadata: Mapping[str, str],
        *,
        removed: str | None = None,
    ) -> None:
        """Add an observation of the topology's asset. ``removed``: id of the topology that the
        change removed, so that the code location removes the partition key of its name.
        """
        event = UnreportedEvent(
            asset=_ACTIVE_TOPOLOGY,
            partition=partition,
            description=description[:_MAX_TEXT],
            gone=removed is not None,
            metadata=dict(metadata),
        )
        with self._lock:
            self._append(event)
            if removed is not None:
                newest = (*self._record.removed, removed)[-_MAX_EVENTS:]
                self._record = self._record.model_copy(update={"removed": newest})
            self._store(ctx)

    def _append(self, event: UnreportedEvent) -> None:
        self._events = [*self._events, event][-_MAX_EVENTS:]

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
                _report(dagster, event)
                reported += 1
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


def _report(dagster: DagsterClient, event: UnreportedEvent) -> None:
    if event.metadata:
        dagster.report_observation(event.asset, event.partition, event.description, event.metadata)
    else:
        dagster.report(event.asset, event.partition, event.description)
