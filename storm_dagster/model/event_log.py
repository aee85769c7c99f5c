"""The event log of a topology: events for Dagster that the cluster has taken.

``/events/<name>`` is the head of the log of a topology's name, ``/events/<name>/<first>`` the index
of one of its batches, whose events are a blob. Every event of a log has a number; the numbers count
from 1 without a gap. Up to ``acknowledged`` they are removed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from storm_dagster.model.amounts import duration
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.errors import Corrupt
from storm_dagster.model.records import Record

LATE_SECS = 600.0
"""Time for which events for Dagster may wait before it is a problem."""
_BLOB_KEY = re.compile(r"events\.[0-9a-f]{32}\.[0-9]{12}\.[0-9a-f]{16}")


class EventLogHead(Record):
    """``/events/<name>``: state of the event log of a topology's name."""

    log: str
    """32 hex digits, random, made with the node: numbers of another log mean nothing."""
    next: int = 1
    """Number of the next event."""
    acknowledged: int = 0
    """Every event up to this number has reached its Dagster, or was dropped."""
    dropped: int = 0
    """Events that were dropped because they were too old."""
    bytes: int = 0
    """Size of the batches that are stored, acknowledged parts of the first one included."""
    since: int | None = None
    """Epoch seconds at which the oldest event that waits was taken; ``None`` without one."""
    topology: str
    """Newest topology id that reported."""
    owner: str | None = None
    """``declared.owner`` of that topology; ``None`` without one."""
    declared: bool = False
    """True if that topology was declared: a code location pulls its events."""
    user: str = ""
    """``topology.submitter.user`` of that topology; empty in a cluster without authentication."""

    @property
    def waiting(self) -> int:
        """Number of events that wait."""
        return self.next - 1 - self.acknowledged


class EventBatchIndex(Record):
    """``/events/<name>/<first>``: one stored batch."""

    first: int
    """Number of its first event."""
    count: int
    bytes: int
    """Size of its blob."""
    at: int
    """Epoch seconds at which its oldest event was taken."""
    newest_at: int
    """Epoch seconds at which its newest event was taken."""
    blob: str
    """Key of the blob with the events."""

    @property
    def last(self) -> int:
        """Number of its last event."""
        return self.first + self.count - 1


@dataclass(frozen=True)
class EventLogSummary:
    """Event log of a topology's name, for lists and checks."""

    log: str
    owner: str | None
    """Owner of the topology that reported last."""
    declared: bool
    """True if a code location pulls the events; else the leader forwards them."""
    waiting: int
    """Events that wait for Dagster."""
    since: int | None
    """Epoch seconds since which the oldest of them waits."""
    bytes: int
    """Size of the stored batches."""
    dropped: int
    """Events that were dropped because they were too old."""

    @staticmethod
    def of(head: EventLogHead) -> "EventLogSummary":
        """Summary of a log by its head."""
        return EventLogSummary(
            log=head.log,
            owner=head.owner,
            declared=head.declared,
            waiting=head.waiting,
            since=head.since if head.waiting else None,
            bytes=head.bytes,
            dropped=head.dropped,
        )

    def to_document(self) -> dict[str, Any]:
        """The field ``events`` of a topology's document."""
        return {
            "waiting": self.waiting,
            "since": self.since,
            "bytes": self.bytes,
            "dropped": self.dropped,
            "owner": self.owner,
            "declared": self.declared,
        }


def destination_text(declared: bool, owner: str | None) -> str:
    """The Dagster that the events of a log are for, in words."""
    if not declared:
        return "for the cluster's Dagster"
    if owner is None:
        return "for the code location that declares the topology"
    return f"for the code location of its owner {owner!r}"


def destination_remedy(declared: bool) -> str:
    """The remedy for events that wait for that Dagster."""
    if not declared:
        return "start the Dagster at dagster.graphql.url"
    return "start that code location, and its sensor topology_events_sensor"


def event_log_text(document: Mapping[str, Any], now_secs: float) -> str | None:
    """The events that wait and were dropped, in words; ``None`` if there are none.

    ``document`` is that of :meth:`EventLogSummary.to_document`.
    """
    parts: list[str] = []
    if document["waiting"]:
        waited_secs = max(0.0, now_secs - (document["since"] or now_secs))
        noun = "event waits" if document["waiting"] == 1 else "events wait"
        parts.append(
            f"{document['waiting']} {noun} "
            f"{destination_text(document['declared'], document['owner'])}, the oldest for "
            f"{duration(waited_secs)}"
        )
    if document["dropped"]:
        parts.append(f"{document['dropped']} were dropped, because they were too old")
    return "; ".join(parts) or None


class TakenEvent(msgspec.Struct, frozen=True):
    """An event that the cluster has taken.

    It is stored and sent to a code location in this form.
    """

    number: int
    topology: str
    """Id of the topology that reported it."""
    component: str | None
    """Component that reported it; ``None``: a worker of an earlier release does not say."""
    task: int | None
    at: int
    """Epoch seconds at which it was taken."""
    event: DagsterEvent


class _EventBatch(msgspec.Struct, frozen=True):
    """Content of a batch's blob."""

    events: list[TakenEvent]
    v: int = 1


def encode_batch(events: list[TakenEvent]) -> bytes:
    """The content of the blob of a batch."""
    return msgspec.json.encode(_EventBatch(events))


def decode_batch(raw: bytes, key: str) -> list[TakenEvent]:
    """The events of a batch's blob.

    :class:`Corrupt`, which names ``key``, for other content.
    """
    try:
        batch = msgspec.json.decode(raw, type=_EventBatch)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"{key} is not a batch of events ({error}): it was damaged") from None
    if batch.v != 1:
        raise Corrupt(
            f"{key} is a batch of events of version {batch.v}, this release reads version 1: run "
            "the release that wrote it"
        )
    return batch.events


def batch_key(log: str, first: int, random_hex: str) -> str:
    """Blob key of a batch; ``random_hex`` are 16 digits that make it the only one."""
    return f"events.{log}.{first:012d}.{random_hex}"


def is_batch_key(key: str) -> bool:
    """True if the blob is a batch of events."""
    return _BLOB_KEY.fullmatch(key) is not None
