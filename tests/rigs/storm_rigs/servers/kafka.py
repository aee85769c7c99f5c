"""Brokers of Kafka for tests: those of ``KAFKA_BOOTSTRAP``, else librdkafka's own, in this process
on real ports.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from storm_dagster.testing.waiting import eventually, patience

REAL = os.environ.get("KAFKA_BOOTSTRAP", "")


class KafkaRig:
    """Topics, records and offsets."""

    def __init__(self) -> None:
        self._mock: Any = None
        self._clients: dict[str, Consumer] = {}
        self.bootstrap: str = REAL
        if not REAL:
            settings = {
                "bootstrap.servers": "127.0.0.1:1",
                "test.mock.num.brokers": 1,
                "log_level": 0,
            }
            self._mock = Producer(settings)
            brokers = self._mock.list_topics(timeout=patience(10)).brokers.values()
            self.bootstrap = ",".join(f"{one.host}:{one.port}" for one in brokers)
        self.conf: dict[str, Any] = {"bootstrap.servers": self.bootstrap, "log_level": 0}
        self.admin = AdminClient(self.conf)
        if REAL:
            self._await_coordinator()

    def _await_coordinator(self) -> None:
        """Wait until the broker keeps positions: a new one first makes their topic."""
        with contextlib.closing(Consumer({**self.conf, "group.id": "storm-rig"})) as consumer:

            def knows_positions() -> bool:
                try:
                    consumer.committed([TopicPartition("storm-rig", 0)], timeout=patience(10))
                except KafkaException as error:
                    return error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
                return True

            eventually(knows_positions, what="the broker's coordinator of positions")

    def topic(self, partitions: int = 4, **config: str) -> str:
        """A new topic. Librdkafka's brokers give each four partitions."""
        name = f"t-{uuid.uuid4().hex[:8]}"
        self._create(name, partitions, config)
        return name

    def _create(self, name: str, partitions: int, config: dict[str, str]) -> None:
        if REAL:
            self.admin.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result(
                30
            )
        else:
            assert partitions == 4 and not config

        def known() -> bool:
            # Asked for by name, librdkafka's brokers make it.
            Producer(self.conf).list_topics(name, timeout=patience(10))
            found = self.admin.list_topics(name, timeout=patience(10)).topics[name]
            return found.error is None and len(found.partitions) == partitions

        eventually(known, what=f"topic {name} is there")

    def recreate(self, topic: str, partitions: int = 4) -> None:
        """Delete a topic of a real broker, and create it again."""
        self.admin.delete_topics([topic])[topic].result(30)
        self._create(topic, partitions, {})

    def topic_id(self, topic: str) -> str | None:
        """Id of a topic as Kafka prints it. Librdkafka's brokers give none."""
        if not REAL:
            return None
        described = self.admin.describe_topics(TopicCollection([topic]))[topic].result(30)
        return str(described.topic_id).replace("+", "-").replace("/", "_")

    def produce(
        self,
        topic: str,
        values: Iterable[Any],
        partitions: int = 4,
        *,
        transaction: bool | None = None,
        **how: Any,
    ) -> None:
        """Records around the partitions; in a transaction that is committed (``True``) or
        aborted.
        """
        settings: dict[str, Any] = {
            **self.conf,
            "linger.ms": 20,
            "queue.buffering.max.messages": 1_000_000,
        }
        if transaction is not None:
            settings["transactional.id"] = uuid.uuid4().hex
        producer = Producer(settings)
        if transaction is not None:
            producer.init_transactions(30)
            producer.begin_transaction()
        for number, value in enumerate(values):
            producer.produce(topic, str(value).encode(), partition=number % partitions, **how)
            if number % 10_000 == 9999:
                producer.poll(0.1)
        assert producer.flush(60) == 0
        if transaction is not None:
            (producer.commit_transaction if transaction else producer.abort_transaction)(30)

    def _client(self, group: str) -> Consumer:
        if group not in self._clients:
            self._clients[group] = Consumer({**self.conf, "group.id": group})
        return self._clients[group]

    def _partitions(self, topic: str) -> list[TopicPartition]:
        numbers = (
            self._client("ends").list_topics(topic, timeout=patience(10)).topics[topic].partitions
        )
        return [TopicPartition(topic, number) for number in sorted(numbers)]

    def ends(self, topic: str) -> dict[str, int]:
        """Partition -> end offset."""
        look = self._client("ends").get_watermark_offsets
        return {
            f"{topic}[{one.partition}]": look(one, timeout=patience(10))[1]
            for one in self._partitions(topic)
        }

    def first(self, topic: str, partition: int) -> int:
        """First offset that is there."""
        return self._client("ends").get_watermark_offsets(
            TopicPartition(topic, partition), timeout=patience(10)
        )[0]

    def offsets(self, group: str, topic: str) -> list[TopicPartition]:
        """Committed offsets of a group. A broker that has just started may not know its groups
        yet.
        """
        ask = self._client(group).committed
        return eventually(
            lambda: ask(self._partitions(topic), timeout=patience(10)),
            60,
            "offsets",
            ignore=(KafkaException,),
        )

    def committed(self, group: str, topic: str) -> dict[str, int]:
        """Partition -> committed offset, where there is one."""
        return {
            f"{topic}[{one.partition}]": one.offset
            for one in self.offsets(group, topic)
            if one.offset >= 0
        }

    def commit(self, group: str, topic: str, offsets: Sequence[int], metadata: str = "") -> None:
        """Commit offsets of the first partitions."""
        found = [
            TopicPartition(topic, number, offset, metadata) for number, offset in enumerate(offsets)
        ]
        self._client(group).commit(offsets=found, asynchronous=False)

    def wait_for_end(self, group: str, topic: str, timeout: float = 60.0) -> None:
        """Until the group has committed the end of each partition."""
        # A broker that was away leads its partitions again after some time.
        ends = eventually(
            lambda: self.ends(topic), timeout, f"{topic} has ends", ignore=(KafkaException,)
        )
        at_end = lambda: self.committed(group, topic) == ends  # noqa: E731
        eventually(at_end, timeout, f"{group} is at {ends}", interval=0.2, ignore=(KafkaException,))

    def close(self) -> None:
        """Disconnect, and end librdkafka's brokers."""
        for client in self._clients.values():
            client.close()
        self._mock = None
