"""Outbox of events of the leader that have no Dagster run.

They are kept in ZooKeeper until Dagster accepts them (best effort), in one bounded record at
``/unreported``, which a new leader takes over. The oldest events are dropped first.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from storm_dagster.model import paths
from storm_dagster.model.errors import Corrupt, Misconfigured, StormDagsterError, Unavailable
from storm_dagster.model.records import decode_record, encode_record
from storm_dagster.model.unreported import UnreportedEvent, UnreportedEvents
from storm_dagster.nimbus.dagster.client import DagsterClient
from storm_dagster.operations.context import OperationsContext
from storm_dagster.zk.state_protocol import read_children

_log = logging.getLogger(__name__)

_MAX_EVENTS = 200
"""Limit of the events that wait, and of the ids of removed topologies: they are one node."""
_MAX_TEXT = 1000
"""Limit of the characters of a description, for the same reason."""
_STORED_TOGETHER = 10
"""Reported events after which the record is stored."""
_MAX_TAKEN = 100
"""Limit of the events that one transaction moves into the record."""
_ACTIVE_TOPOLOGY = ("storm", "active_topology")
"""Key of the asset that has a partition for each topology."""


@dataclass(frozen=True)
class _UnansweredMove:
    """Transaction that moved events into the record, without an answer: it may have landed."""

    nodes: tuple[str, ...]
    """Names of the nodes below ``/unreported`` that the transaction deletes."""
    events: tuple[UnreportedEvent, ...]
    """Events of these nodes, without the damaged ones."""


class LeaderOutbox:
    """Unreported events of one leader, in ZooKeeper.

    The event of a verb is a node that the verb's own transaction creates; the leader moves it into
    the record at once.
    """

    def __init__(self) -> None:
        self._events: list[UnreportedEvent] = []
        """Events that wait, oldest first. The list is replaced, never changed."""
        self._record = UnreportedEvents()
        """Record that was adopted, with the fields of a newer release. Its field ``removed`` is
        kept current, its field ``events`` is not.
        """
        self._unanswered: _UnansweredMove | None = None
        """Move whose outcome is found out before the record is written: if it landed, its events
        are only in the record, and :attr:`_events` lacks them.
        """
        self._silence: str | None = None
        """Reason why Dagster did not accept the last report, if it was logged."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._events)

    def adopt(self, ctx: OperationsContext) -> None:
        """Begin as the leader, with the events that former leaders did not report.

        A damaged record counts as empty.
        """
        with self._lock:
            self._read(ctx)
        self.take_noted(ctx)

    def _read(self, ctx: OperationsContext) -> None:
        """Replace record and events by the stored ones; none if the record is damaged."""
        raw = ctx.cluster.state.get_data(paths.UNREPORTED)
        record = UnreportedEvents()
        if raw:
            try:
                record = decode_record(UnreportedEvents, raw, paths.UNREPORTED)
            except Corrupt as error:
                _log.error(
                    "the events of former leaders cannot be reported to Dagster: %s", error.message
                )
        self._record = record
        self._events = list(record.events)
        self._unanswered = None

    def take_noted(self, ctx: OperationsContext) -> None:
        """Move the events that transactions left below ``/unreported`` into the record.

        Events that cannot be moved now stay for the next call or a later leader.
        """
        try:
            with self._lock:
                while self._take_some(ctx):
                    pass
        except StormDagsterError as error:
            _log.warning("events for Dagster are taken later: %s", error.message)

    def _take_some(self, ctx: OperationsContext) -> bool:
        """Move the oldest events in one transaction; return False if there are none.

        A damaged event is deleted and logged. If the commit fails, the events in memory are those
        from before.
        """
        self._find_outcome(ctx)
        all_nodes = read_children(ctx.cluster.state, paths.UNREPORTED)
        nodes = list(all_nodes.items())[:_MAX_TAKEN]
        if not nodes:
            return False
        moved: list[UnreportedEvent] = []
        transaction = ctx.cluster.fenced(ctx.current_epoch())
        for name, (raw, _) in nodes:
            path = f"{paths.UNREPORTED}/{name}"
            transaction.delete(path)
            try:
                moved.append(decode_record(UnreportedEvent, raw, path))
            except Corrupt as error:
                _log.error("an event for Dagster is dropped: %s", error.message)
        before = self._events
        self._append(*moved)
        transaction.set(paths.UNREPORTED, self._encode(), -1)
        try:
            transaction.commit()
        except StormDagsterError:
            self._events = before
            names = tuple(name for name, _ in nodes)
            self._unanswered = _UnansweredMove(names, tuple(moved))
            raise
        return True

    def _find_outcome(self, ctx: OperationsContext) -> None:
        """Add the events of an unanswered move if it landed.

        Only the leader deletes the nodes of events, so a node that is left means that the move did
        not land. The read is synchronized: a server that lags would still show the nodes.
        """
        unanswered = self._unanswered
        if unanswered is None:
            return
        ctx.cluster.state.sync_path(paths.UNREPORTED)
        node_names = set(ctx.cluster.state.find_children(paths.UNREPORTED) or ())
        if node_names.isdisjoint(unanswered.nodes):
            self._append(*unanswered.events)
        self._unanswered = None

    def add(
        self,
        ctx: OperationsContext,
        partition: str,
        description: str,
        asset: tuple[str, ...] = _ACTIVE_TOPOLOGY,
    ) -> None:
        """Add a materialization of the asset's partition.

        It is stored at once. If that fails, it is kept in memory, and stored with the next event.
        """
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
        """Add an observation of the topology's asset, as :meth:`add`.

        ``removed`` is the id of the topology that the change removed: the code location then
        removes the partition key of its name.
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

    def _append(self, *added: UnreportedEvent) -> None:
        """Add events in memory; the oldest ones above the limit are dropped and logged."""
        events = [*self._events, *added]
        for dropped in events[:-_MAX_EVENTS]:
            _log.warning(
                "%d events wait for Dagster, and the oldest is dropped: %s",
                _MAX_EVENTS,
                dropped.description,
            )
        self._events = events[-_MAX_EVENTS:]

    def _store(self, ctx: OperationsContext) -> None:
        """Write the record with the events in memory; an error is only logged."""
        try:
            self._find_outcome(ctx)
            # Only the leader writes the record, and the epoch proves that it leads: any version.
            transaction = ctx.cluster.fenced(ctx.current_epoch())
            transaction.set(paths.UNREPORTED, self._encode(), -1)
            transaction.commit()
        except StormDagsterError as error:
            _log.warning("events for Dagster are kept in memory only: %s", error.message)

    def _encode(self) -> bytes:
        """Content of the record with the events in memory."""
        return encode_record(self._record.model_copy(update={"events": tuple(self._events)}))

    def flush(self, ctx: OperationsContext, dagster: DagsterClient) -> int:
        """Report the events, oldest first, until Dagster does not respond.

        Return the number of reported events. An event that Dagster refuses is logged and dropped.
        The record is stored after every few events: if the leader is lost before that, at most
        that many appear twice.
        """
        reported = 0
        with self._lock:
            events = list(self._events)
        handled: list[UnreportedEvent] = []
        for event in events:
            try:
                _report(dagster, event)
                reported += 1
            except (Misconfigured, Unavailable) as error:
                self._log_silence(error, len(events) - reported)
                break
            except StormDagsterError as error:
                _log.warning("not reported to Dagster: %s (%s)", event.description, error)
            handled.append(event)
            if len(handled) >= _STORED_TOGETHER:
                self._remove(ctx, handled)
                handled = []
        else:
            self._silence = None  # Dagster responded to all: the next silence is logged.
        if handled:
            self._remove(ctx, handled)
        return reported

    def _remove(self, ctx: OperationsContext, handled: list[UnreportedEvent]) -> None:
        """Remove events that need no report any longer, also from the stored record."""
        # By identity: two events may have the same fields.
        identities = {id(event) for event in handled}
        with self._lock:
            self._events = [event for event in self._events if id(event) not in identities]
            self._store(ctx)

    def _log_silence(self, error: StormDagsterError, waiting: int) -> None:
        """Log the reason why ``waiting`` events are not reported, if it is a new one."""
        if self._silence != error.message:
            self._silence = error.message
            _log.warning("%d events wait for Dagster: %s", waiting, error.message)


def _report(dagster: DagsterClient, event: UnreportedEvent) -> None:
    if event.metadata:
        dagster.report_observation(event.asset, event.partition, event.description, event.metadata)
    else:
        dagster.report(event.asset, event.partition, event.description)
