"""Requests of a Kafka source that wait for their responses: each runs in a thread."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, cast

from storm_dagster.connectors.kafka_errors import is_not_ready
from storm_dagster.connectors.kafka_positions import (
    CommittedPosition,
    number_of,
    partition_name,
    topic_id_in,
    topic_of,
)
from storm_dagster.host.futures import in_thread
from storm_dagster.model.errors import InvalidRequest

REQUEST_SECS = 10.0
"""Maximum wait of a request's thread for its response."""
_POLICY_SECS = 60.0
"""Pause between two requests for the cleanup policies of the topics."""
_POLICY_WAIT_SECS = 2.0
"""Maximum wait for the policies."""


def topic_partition(kafka: Any, name: str, offset: int = -1001, metadata: str = "") -> Any:
    """The library's form of a partition; -1001 is its constant for no offset."""
    return kafka.TopicPartition(topic_of(name), number_of(name), offset, metadata)


class BrokerReads:
    """Reads of partitions, positions and ends, by a client that is used for nothing else."""

    def __init__(self, kafka: Any, client: Any, start: str, start_ms: int | None) -> None:
        """Keep the client; ``kafka`` is the module of the client library."""
        self._kafka = kafka
        self.client = client
        """Client of librdkafka for requests."""
        self._start = start
        self._start_ms = start_ms

    def topics(self, topics: Sequence[str]) -> list[Any]:
        """The responses that describe the topics."""
        return [self.client.list_topics(name, timeout=REQUEST_SECS) for name in topics]

    def position(self, name: str, is_new: bool) -> tuple[CommittedPosition | None, int, int, Any]:
        """(committed position, first, end, where to start) of a partition.

        ``is_new``: it was added while the topic was read; ``latest`` must not skip its records.
        """
        start = cast("Any", self._start)
        partition = topic_partition(self._kafka, name)
        (stored,) = self.client.committed([partition], timeout=REQUEST_SECS)
        if stored.error is not None:
            raise self._kafka.KafkaException(stored.error)
        first, end = self.client.get_watermark_offsets(stored, timeout=REQUEST_SECS)
        # A negative offset is the library's form of a partition without a committed one.
        if start == "latest" and is_new:
            start = "earliest"
        elif stored.offset < 0 and start not in ("earliest", "latest"):
            start = self._offset_at_start_time(name, end)
        committed = None
        if stored.offset >= 0:
            committed = CommittedPosition(stored.offset, topic_id_in(stored.metadata))
        return committed, first, end, start

    def _offset_at_start_time(self, name: str, end: int) -> int:
        """Offset of the first record after the start time; ``end`` without such a record."""
        assert self._start_ms is not None
        at_start = topic_partition(self._kafka, name, self._start_ms)
        (first_after,) = self.client.offsets_for_times([at_start], timeout=REQUEST_SECS)
        return end if first_after.offset < 0 else first_after.offset

    def ends(self, names: Sequence[str]) -> dict[str, int]:
        """Partition -> its end."""
        ends: dict[str, int] = {}
        for name in names:
            _, ends[name] = self.client.get_watermark_offsets(
                topic_partition(self._kafka, name), timeout=REQUEST_SECS
            )
        return ends


def partition_names(kafka: Any, responses: Sequence[Any]) -> list[str]:
    """Names of all partitions, those without a leader last: a request for their positions waits.

    Raises :class:`InvalidRequest` if a topic cannot be read, and the library's error if its brokers
    are not ready yet. ``kafka`` is the module of the library.
    """
    names: list[tuple[bool, str]] = []
    for response in responses:
        for topic, metadata in response.topics.items():
            if metadata.error is not None:
                if is_not_ready(metadata.error):
                    raise kafka.KafkaException(metadata.error)
                raise InvalidRequest(
                    f"topic {topic!r} cannot be read, {metadata.error.str()}: "
                    "create it, or change topics"
                )
            for number, partition in metadata.partitions.items():
                has_no_leader = partition.leader < 0
                names.append((has_no_leader, partition_name(topic, number)))
    return [name for _, name in sorted(names)]


class CleanupPolicies:
    """Cleanup policies of topics, to notice one that becomes compacted.

    They are requested in a thread of their own: brokers without this request do not respond, and
    other requests must not wait for them.
    """

    def __init__(self, kafka: Any, admin: Any, topics: Sequence[str]) -> None:
        """Keep the admin client; ``kafka`` is the module of the client library."""
        self._kafka = kafka
        self._admin: Any = admin
        self._topics = sorted(set(topics))
        self._is_compacted: dict[str, bool] = {}
        """Topic -> True if it was compacted at the last response."""
        self._request: Future[dict[str, str]] | None = None
        """Response of the request under way; ``None`` without one."""
        self._next_request = 0.0
        """Time of the next request."""

    def poll(self, now: float) -> list[str]:
        """Request the policies once a minute, without waiting.

        Returns the topics that have become compacted, once each.
        """
        request = self._request
        if request is None:
            if now >= self._next_request:
                self._next_request = now + _POLICY_SECS
                self._request = in_thread("kafka-policies", self.read)
            return []
        if not request.done():
            return []
        self._request = None
        return self.newly_compacted(request.result())

    def close(self) -> None:
        """Wait for the request that is under way."""
        if self._request is not None:
            wait([self._request])
        self._admin = None

    def read(self) -> dict[str, str]:
        """Topic -> policy, of topics whose policy the brokers return; it waits, for up to 2 s."""
        kind = self._kafka.admin.ConfigResource
        resources = [kind(kind.Type.TOPIC, name) for name in self._topics]
        policies: dict[str, str] = {}
        # Without the right to describe configurations the policy is unknown, which is no error.
        with suppress(self._kafka.KafkaException):
            responses = self._admin.describe_configs(resources, request_timeout=_POLICY_WAIT_SECS)
            for resource, response in responses.items():
                with suppress(self._kafka.KafkaException, KeyError):
                    policies[resource.name] = str(response.result()["cleanup.policy"].value)
        return policies

    def newly_compacted(self, policies: Mapping[str, str]) -> list[str]:
        """Topics that have become compacted since the response before."""
        names: list[str] = []
        for topic, policy in policies.items():
            is_compacted = "compact" in policy
            if is_compacted and self._is_compacted.get(topic) is False:
                names.append(topic)
            self._is_compacted[topic] = is_compacted
        return names
