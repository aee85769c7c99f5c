"""Ids of Kafka's topics, requested in a thread.

A topic that is deleted and recreated has another id.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from storm_dagster.connectors.kafka_positions import topic_id_text
from storm_dagster.host.futures import in_thread

_RESPONSE_SECS = 2.0
"""Maximum wait for a response, after which the ids are unknown until the next request."""


class TopicIds:
    """Ids of the topics of one task.

    Only :meth:`read` waits, and may be called in any thread; all other methods are called in one.
    Ids may stay unknown: brokers before Kafka 2.8 have none, and a cluster without a controller
    gives none.
    """

    def __init__(self, kafka: Any, settings: Mapping[str, Any], topics: Sequence[str]) -> None:
        """Create the client; ``kafka`` is the module of the client library."""
        from confluent_kafka.admin import AdminClient

        self._kafka = kafka
        # Only an admin client gets ids.
        self.admin: Any = AdminClient({**settings, "log_level": 0})
        """Client for administration; ``None`` after :meth:`close`."""
        self._topics = sorted(set(topics))
        self._ids: dict[str, str] = {}
        """Topic -> its newest id."""
        self._replaced: set[str] = set()
        """Ids of topics that were deleted. A broker that is behind may still return them."""
        self._request: Future[dict[str, str]] | None = None
        """Response of the request under way; ``None`` without one."""
        self.is_answered = False
        """True if the newest request was answered, perhaps without an id."""
        self.has_ids = False
        """True if the last response had an id."""

    def of(self, topic: str) -> str | None:
        """Id of a topic; ``None``: unknown."""
        return self._ids.get(topic)

    def request(self) -> None:
        """Request the ids without waiting, unless a request is under way."""
        if self._request is None:
            self._request = in_thread("kafka-topic-ids", self.read)

    def request_newer(self) -> None:
        """Request the ids, which count as unanswered until the response.

        Has no effect if brokers give no ids.
        """
        if self.has_ids:
            self.is_answered = False
            self.request()

    def read(self) -> dict[str, str]:
        """Topic -> id, for topics whose id brokers return within 2 s; it waits."""
        topic_ids: dict[str, str] = {}
        # Unknown is not an error: the request for partitions reports faults of a topic.
        with suppress(self._kafka.KafkaException):
            topics = self._kafka.TopicCollection(self._topics)
            responses = self.admin.describe_topics(topics, request_timeout=_RESPONSE_SECS)
            for topic, response in responses.items():
                with suppress(self._kafka.KafkaException):
                    topic_id = topic_id_text(response.result().topic_id)
                    if topic_id is not None:
                        topic_ids[topic] = topic_id
        return topic_ids

    def poll(self) -> bool:
        """Process the response, if it has arrived. True if it has."""
        request = self._request
        if request is None or not request.done():
            return False
        self._request = None
        self.is_answered = True
        self.update(request.result())
        return True

    def update(self, topic_ids: Mapping[str, str]) -> None:
        """Store the ids that :meth:`read` returned; a topic without one keeps its last id."""
        self.has_ids = bool(topic_ids)
        for topic, topic_id in topic_ids.items():
            if topic_id in self._replaced:
                continue
            before = self._ids.get(topic)
            if before is not None and before != topic_id:
                self._replaced.add(before)
            self._ids[topic] = topic_id

    def close(self) -> None:
        """Disconnect, after the request that is under way."""
        if self._request is not None:
            wait([self._request])
        self.admin = None
