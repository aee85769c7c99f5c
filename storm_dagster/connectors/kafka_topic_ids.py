"""Ids of Kafka's topics, asked for in a thread.

A topic that is deleted and created again has another id.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from storm_dagster.connectors.kafka_positions import topic_id_text
from storm_dagster.host.futures import in_thread

_ANSWER_SECS = 2.0
"""Longest wait for an answer: without it the ids are unknown until the next question."""


class TopicIds:
    """Ids of the topics of one task.

    Only :meth:`read` waits, and may be called in any thread; the rest is called in one. Ids may
    stay unknown: brokers before Kafka 2.8 have none, and a cluster without a controller gives none.
    """

    def __init__(self, kafka: Any, settings: Mapping[str, Any], topics: Sequence[str]) -> None:
        """``kafka``: the module of the client library."""
        from confluent_kafka.admin import AdminClient

        self._kafka = kafka
        # Of the clients only this one is given ids.
        self._admin: Any = AdminClient({**settings, "log_level": 0})
        self._topics = sorted(set(topics))
        self._ids: dict[str, str] = {}
        self._replaced: set[str] = set()
        """Ids of topics that were deleted. A broker that is behind may still give them."""
        self._answer: Future[dict[str, str]] | None = None
        self.is_answered = False
        """Whether the newest question was answered, perhaps without an id."""
        self.is_given = False
        """Whether the last answer had an id."""

    def of(self, topic: str) -> str | None:
        """Id of a topic; ``None``: unknown."""
        return self._ids.get(topic)

    def ask(self) -> None:
        """Ask without waiting, unless a question is under way."""
        if self._answer is None:
            self._answer = in_thread("kafka-topic-ids", self.read)

    def ask_again(self) -> None:
        """Ask, and count as unanswered until then, if brokers give ids at all."""
        if self.is_given:
            self.is_answered = False
            self.ask()

    def read(self) -> dict[str, str]:
        """Topic -> id, of those whose id brokers give within 2 s; it waits."""
        topic_ids: dict[str, str] = {}
        # Unknown is not an error: the question about partitions reports faults of a topic.
        with suppress(self._kafka.KafkaException):
            topics = self._kafka.TopicCollection(self._topics)
            answers = self._admin.describe_topics(topics, request_timeout=_ANSWER_SECS)
            for topic, answer in answers.items():
                with suppress(self._kafka.KafkaException):
                    topic_id = topic_id_text(answer.result().topic_id)
                    if topic_id is not None:
                        topic_ids[topic] = topic_id
        return topic_ids

    def take(self) -> bool:
        """Take the answer, if it is there. ``True``: it is."""
        answer = self._answer
        if answer is None or not answer.done():
            return False
        self._answer = None
        self.is_answered = True
        self.update(answer.result())
        return True

    def update(self, topic_ids: Mapping[str, str]) -> None:
        """Take what :meth:`read` returned."""
        self.is_given = bool(topic_ids)
        for topic, topic_id in topic_ids.items():
            if topic_id in self._replaced:
                continue
            before = self._ids.get(topic)
            if before is not None and before != topic_id:
                self._replaced.add(before)
            self._ids[topic] = topic_id

    def close(self) -> None:
        """Disconnect; it waits for the answer that is under way."""
        if self._answer is not None:
            wait([self._answer])
        self._admin = None
