"""Positions in Kafka's partitions: the topic of each, and where reading begins.

An offset is only a number. A topic that is deleted and recreated has the same numbers for other
records, and another id. So the id of the topic is stored with each committed offset, in the
metadata beside the name of the task. All functions are pure.
"""

import re
from datetime import datetime, timedelta, timezone
from typing import Literal

import msgspec

from storm_dagster.model.errors import InvalidTopology

# A topic's id is 16 bytes, which are 22 letters of URL-safe base64.
_TOPIC_ID_IN_METADATA = re.compile(r" topic_id=([A-Za-z0-9_-]{22})$")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_NO_TOPIC_ID = "A" * 22
"""Id in the response of a broker that gives its topics no ids."""


class CommittedPosition(msgspec.Struct, frozen=True):
    """Offset before which all records are finished, and its topic."""

    offset: int
    topic_id: str | None = None
    """``None``: stored by an earlier release or by a tool, or the brokers gave no id then."""


class StartPosition(msgspec.Struct, frozen=True):
    """Decision where the reading of a partition begins."""

    offset: int | None
    """``None``: the partition is not read."""
    reason: str = ""
    """Why the committed position is lost; empty if it is valid, or does not exist."""


def start_time_ms(start: str) -> int:
    """A start time as milliseconds since 1970; it is in UTC without a time zone.

    Raises :class:`InvalidTopology` if it is not a time of ISO 8601.
    """
    # Python 3.10 does not read "Z".
    text = f"{start[:-1]}+00:00" if start.endswith("Z") else start
    try:
        start_time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidTopology(
            f'start of a KafkaSource is {start!r}: make it "earliest", "latest", '
            'or a time such as "2026-11-24T10:00:00"'
        ) from None
    if start_time.tzinfo is None:
        start_time = start_time.replace(tzinfo=timezone.utc)
    return (start_time - _EPOCH) // timedelta(milliseconds=1)


def partition_name(topic: str, number: int) -> str:
    """Name of a partition: ``topic[0]``."""
    return f"{topic}[{number}]"


def topic_of(name: str) -> str:
    """Topic of a partition's name."""
    return name[:-1].rpartition("[")[0]


def number_of(name: str) -> int:
    """Number of a partition, from its name."""
    return int(name[:-1].rpartition("[")[2])


def topic_id_text(topic_id: object) -> str | None:
    """Id of a topic as Kafka's tools print it; ``None`` if the broker gave none."""
    text = str(topic_id or "").replace("+", "-").replace("/", "_")
    return None if text in ("", _NO_TOPIC_ID) else text


def position_metadata(task: str, topic_id: str | None) -> str:
    """Metadata of a committed offset: the task, and the topic's id if known."""
    return task if topic_id is None else f"{task} topic_id={topic_id}"


def topic_id_in(metadata: str | None) -> str | None:
    """Topic id in an offset's metadata; ``None`` in that of other programs."""
    match = _TOPIC_ID_IN_METADATA.search(metadata or "")
    return match.group(1) if match else None


def is_recreated(topic_id: str | None, current_id: str | None) -> bool:
    """True if the topic was recreated.

    ``None`` is an unknown id: then the result is False.
    """
    return topic_id is not None and current_id is not None and topic_id != current_id


def start_position(
    committed: CommittedPosition | None,
    current_id: str | None,
    first: int,
    end: int,
    *,
    start: Literal["earliest", "latest"] | int,
    on_lost: Literal["stop", "earliest", "latest"],
) -> StartPosition:
    """Decide where the reading of a partition begins.

    Its records from offset ``first`` to before ``end`` exist. Without a committed position, reading
    begins at ``start``, an offset or one of the two ends. A committed position is lost if it
    belongs to a topic of another id than ``current_id``, or if its record was deleted; then
    ``on_lost`` decides.
    """
    ends = {"earliest": first, "latest": end}
    if committed is None:
        return StartPosition(ends[start] if isinstance(start, str) else start)
    records = f"the source has {first} to {end}"
    if is_recreated(committed.topic_id, current_id):
        reason = (
            f"it is one of the topic with id {committed.topic_id}, which was deleted; "
            f"the topic that was created after it has id {current_id}, and {records}"
        )
    elif not first <= committed.offset <= end:
        reason = records
    else:
        return StartPosition(committed.offset)
    # "stop" is neither end: the offset is None.
    return StartPosition(ends.get(on_lost), reason)


def describe_stop(name: str, committed: CommittedPosition, reason: str) -> str:
    """Error text of a partition that is not read: its position is lost."""
    return (
        f"{name} stands still: its committed position {committed.offset} is lost, {reason}. "
        'Set on_lost of its source to "earliest" or "latest" to go on there, '
        "or commit another position (kafka-consumer-groups --reset-offsets)"
    )


def describe_restart(
    name: str, offset: int, committed: CommittedPosition, reason: str, on_lost: str
) -> str:
    """Error text of a partition that is read from elsewhere: its position is lost."""
    lost = f"its committed position {committed.offset} was lost, {reason}"
    return f"{name} goes on at {offset}: {lost}; on_lost is {on_lost}"
