"""Event logs of topologies, as daemons, runs and checks read them.

They are ``/events/<name>``. The leader writes them: see ``operations/live/event_logs.py``.
"""

import logging
from typing import Any, NamedTuple

from storm_dagster.model import paths
from storm_dagster.model.errors import Corrupt
from storm_dagster.model.event_log import EventBatchIndex, EventLogHead, EventLogSummary
from storm_dagster.model.records import decode_record
from storm_dagster.zk.state_protocol import ClusterState, read_children

_log = logging.getLogger(__name__)


class StoredLog(NamedTuple):
    """An event log, read for a change."""

    head: EventLogHead
    version: int
    """Data version of the head's node."""
    batches: list[EventBatchIndex]
    """Its batches in the order of their numbers."""


class EventLogs:
    """Part of the cluster's state: events for Dagster that the cluster has taken."""

    state: ClusterState

    def event_logs(self) -> dict[str, EventLogSummary]:
        """Name of a topology -> summary of its event log, for each log that has a node.

        Costs two requests. A log whose record is damaged is logged and left out.
        """
        return summarize_event_logs(self.state)

    def event_log(self, name: str) -> EventLogSummary | None:
        """Summary of the event log of that name; ``None`` without one."""
        head = self.event_log_head(name)
        return None if head is None else EventLogSummary.of(head)

    def event_log_document(self, name: str) -> dict[str, Any] | None:
        """Field ``events`` of a topology's document; ``None`` if no event was ever taken.

        ``None`` also for a damaged log, which is logged: it must not hide the topology.
        """
        try:
            summary = self.event_log(name)
        except Corrupt as error:
            _log.error("%s", error.message)
            return None
        return None if summary is None else summary.to_document()

    def event_log_head(self, name: str) -> EventLogHead | None:
        """Head of the event log of that name; ``None`` without one.

        :class:`Corrupt` if the record is damaged.
        """
        path = paths.event_log(name)
        raw = self.state.get_data(path)
        return None if raw is None else decode_record(EventLogHead, raw, path)

    def read_event_log(self, name: str) -> StoredLog | None:
        """The event log of that name with its batches; ``None`` without one.

        A batch that is removed between the reads is left out. :class:`Corrupt` if a record is
        damaged.
        """
        path = paths.event_log(name)
        node = self.state.get_data_with_version(path)
        if node is None:
            return None
        raw, at = node
        head = decode_record(EventLogHead, raw, path)
        batches: list[EventBatchIndex] = []
        for child, (batch_raw, _) in read_children(self.state, path).items():
            batches.append(decode_record(EventBatchIndex, batch_raw, f"{path}/{child}"))
        return StoredLog(head, at.version, batches)


def summarize_event_logs(state: ClusterState) -> dict[str, EventLogSummary]:
    """As :meth:`EventLogs.event_logs`, by any state, such as cached reads."""
    summaries: dict[str, EventLogSummary] = {}
    for name, (raw, _) in read_children(state, paths.EVENTS).items():
        try:
            head = decode_record(EventLogHead, raw, paths.event_log(name))
        except Corrupt as error:
            _log.error("%s", error.message)
            continue
        summaries[name] = EventLogSummary.of(head)
    return summaries
