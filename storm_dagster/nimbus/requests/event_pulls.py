"""Events that a code location pulls from the leader, and acknowledges."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from storm_dagster.core import event_log as rules
from storm_dagster.core.event_log import EventSource
from storm_dagster.model.errors import Conflict, StormDagsterError, Unavailable
from storm_dagster.model.event_log import EventLogHead, EventLogSummary
from storm_dagster.model.names import check_topology_reference, conf_key
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live import event_logs
from storm_dagster.zk.storm_cluster_state import StormClusterState

_NOTHING: dict[str, Any] = {
    "log": None,
    "owner": None,
    "declared": False,
    "events": [],
    "waiting": 0,
    "since": None,
    "bytes": 0,
    "dropped": 0,
}
"""Answer without an event log."""


class EventPulls:
    """Answers to the code locations that pull events; safe to share between threads."""

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus

    def _source(self, name: str, head: EventLogHead | None) -> EventSource | None:
        """Destination of the events of that name.

        It is that of the topology that runs under the name, else that of the log. ``None`` without
        either. :class:`Unavailable` if the conf of the topology cannot be read now.
        """
        source = live_source(self._nimbus, self._nimbus.shown_view(), name)
        if source is None and head is not None:
            return rules.source_of_head(head)
        return source

    def page(
        self, name: str, owner: str, log: str | None, after: int, limit: int
    ) -> dict[str, Any]:
        """The response of ``GET /v1/topologies/{name}/events``.

        :class:`Conflict` if the topology has another owner. No events for a topology that is not
        declared: the leader forwards them.
        """
        ctx = self._nimbus.operations(self._nimbus.status.require())
        page = event_logs.read_page(ctx, name, log, after, min(limit, rules.MAX_PAGE_EVENTS))
        source = self._source(name, page.head)
        _check_owner(name, source, owner)
        document = dict(_NOTHING)
        if source is not None:
            document.update(owner=source.owner, declared=source.declared)
        if page.head is None:
            return document
        document.update(
            {**EventLogSummary.of(page.head).to_document(), "log": page.head.log},
            owner=document["owner"],
            declared=document["declared"],
        )
        if document["declared"]:
            document["events"] = [msgspec.to_builtins(event) for event in page.events]
        return document

    def acknowledge(
        self, name: str, owner: str, log: str, number: int, undefined: Mapping[int, str]
    ) -> dict[str, Any]:
        """The response of ``POST /v1/topologies/{name}/events/taken``.

        Every event up to ``number`` is removed. ``undefined`` has a reason for each event that the
        location has no use for, by its number. :class:`Conflict` for another owner or log.
        """
        ctx = self._nimbus.operations(self._nimbus.status.require())
        head = self._nimbus.cluster.event_log_head(name)
        source = self._source(name, head)
        _check_owner(name, source, owner)
        if source is not None and not source.declared:
            raise Conflict(
                f"topology {name!r} is not declared: its events go to the cluster's Dagster"
            )
        if head is not None and head.log == log and not rules.is_ahead(head, number):
            self._report_undefined(ctx, name, head, number, undefined)
        new_head = event_logs.acknowledge_events(ctx, name, log, number)
        return {"waiting": 0 if new_head is None else new_head.waiting}

    def _report_undefined(
        self,
        ctx: OperationsContext,
        name: str,
        head: EventLogHead,
        number: int,
        undefined: Mapping[int, str],
    ) -> None:
        """Record the reasons as errors of the tasks that reported the events.

        This comes before the events are removed: if nimbus dies between the two, the repetition
        reports them once more.
        """
        reasons = {
            event_number: reason
            for event_number, reason in undefined.items()
            if head.acknowledged < event_number <= number
        }
        after = min(reasons, default=0) - 1
        while reasons:
            page = event_logs.read_page(ctx, name, head.log, after, rules.MAX_PAGE_EVENTS)
            if page.head is None or page.head.log != head.log or not page.events:
                return
            for event in page.events:
                reason = reasons.pop(event.number, None)
                if reason is not None:
                    event_logs.report_refused(ctx, event, reason)
            after = page.events[-1].number


def live_source(nimbus: Nimbus, view: ClusterView, name: str) -> EventSource | None:
    """Destination of the events of the topology that runs under that name.

    ``None`` without one. :class:`Unavailable` if its conf cannot be read now.
    """
    topology = view.topology_named(name)
    if topology is None:
        return None
    return stored_source(nimbus, topology)


def stored_source(nimbus: Nimbus, topology: TopologyView) -> EventSource:
    """Destination of the events of a running topology.

    :class:`Unavailable` if its conf cannot be read now.
    """
    try:
        conf = json.loads(nimbus.blobs.read(conf_key(topology.code_dir)))
    except (StormDagsterError, ValueError) as error:
        raise Unavailable(
            f"the conf of topology {topology.id} cannot be read by this nimbus, and with it where "
            f"its events go ({error}): start the nimbus that holds its code"
        ) from None
    return rules.source_of(topology.id, conf if isinstance(conf, Mapping) else {})


def _check_owner(name: str, source: EventSource | None, owner: str) -> None:
    """Raise :class:`Conflict` if the events belong to another owner."""
    if source is not None and source.owner is not None and source.owner != owner:
        raise Conflict(
            f"topology {name!r} is owned by {source.owner!r}, its events are not for {owner!r}: "
            "take the topology over first"
        )


def authorization_conf_of_events(
    cluster: StormClusterState, name: str
) -> dict[str, list[str]] | None:
    """Conf by which requests for events of a topology that is gone are authorized.

    The user who submitted it may pull them. ``None`` without an event log or such a user.
    """
    head = cluster.event_log_head(check_topology_reference(name))
    if head is None or not head.user:
        return None
    return {"topology.users": [head.user]}
