"""Ids of Kafka's topics, read in a thread.

A topic that is deleted and recreated has another id.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from storm_dagster.connectors.kafka_positions import topic_id_text
from storm_dagster.host.futures import in_thread

_RESPONSE_SECS = 2.0
"""Longest wait for a response; without it the ids are unknown until the next query."""


class TopicIds:
    """Ids of the topics of one task.

    Only :meth:`read` waits, and may be called in any thread; the other methods are called in one.
    Ids may stay unknown: brokers before Kafka 2.8 have none, and a cluster without a controller
    returns none.
    """

    def __init__(self, kafka: Any, settings: Mapping[str, Any], topics: Sequence[str]) -> None:
        """Connect; ``kafka`` is the module of the client library."""
        from confluent_kafka.admin import AdminClient

        self._kafka = kafka
        # Of all clients, only this one returns ids.
        self._admin: Any = AdminClient({**settings, "log_level": 0})
        self._topics = sorted(set(topics))
        self._ids: dict[str, str] = {}
        self._replaced: set[str] = set()
        """Ids of topics that were deleted; a broker that is behind may still return them."""
        self._response: Future[dict[str, str]] | None = None
        self.is_answered = False
        """True if the newest query has a response, perhaps without an id."""
        self.has_ids = False
        """True if the last response had an id."""

    def of(self, topic: str) -> str | None:
        """Id of a topic; ``None``: unknown."""
        return self._ids.get(topic)

    def query(self) -> None:
        """Query the ids without waiting, unless a query is under way."""
        if self._response is None:
            self._response = in_thread("kafka-topic-ids", self.read)

    def refresh(self) -> None:
        """Query the ids; the old ones do not count, if brokers have ids at all."""
        if self.has_ids:
            self.is_answered = False
            self.query()

    def read(self) -> dict[str, str]:
        """Topic -> id, if brokers return it within 2 s; this waits."""
        topic_ids: dict[str, str] = {}
        # An unknown id is not an error: the query of partitions reports faults of a topic.
        with suppress(self._kafka.KafkaException):
            topics = self._kafka.TopicCollection(self._topics)
            responses = self._admin.describe_topics(topics, request_timeout=_RESPONSE_SECS)
            for topic, response in responses.items():
                with suppress(self._kafka.KafkaException):
                    topic_id = topic_id_text(response.result().topic_id)
                    if topic_id is not None:
                        topic_ids[topic] = topic_id
        return topic_ids

    def take(self) -> bool:
        """Store the response of the query; ``False`` if there is none yet."""
        response = self._response
        if response is None or not response.done():
            return False
        self._response = None
        self.is_answered = True
        self.update(response.result())
        return True

    def update(self, topic_ids: Mapping[str, str]) -> None:
        """Store the result of :meth:`read`."""
        self.has_ids = bool(topic_ids)
        for topic, topic_id in topic_ids.items():
            if topic_id in self._replaced:
                continue
            before = self._ids.get(topic)
            if before is not None and before != topic_id:
                self._replaced.add(before)
            self._ids[topic] = topic_id

    def close(self) -> None:
        """Disconnect, after waiting for the query that is under way."""
        if self._response is not None:
            wait([self._response])
        self._admin = None
