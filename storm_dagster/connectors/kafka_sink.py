"""Kafka as a sink."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from storm_dagster.connectors.settings import assets_of, client_library, client_settings
from storm_dagster.connectors.sinks import Row, write_or_reject
from storm_dagster.model.errors import Unavailable

_SECS = 30.0
"""Longest wait for an answer of the brokers, after which the batch is tried again."""


class KafkaSink:
    """Writes each row as a message of ``topic``: as JSON, or what ``value(row)`` returns. Needs the extra ``kafka``.

    ``key`` names the field whose text is the message's key. All replicas have a message before its row counts as
    written. With ``exactly_once`` each batch is a transaction of the producer that has the owner's name, and fences
    earlier ones; the token is the offset that the consumer group of this name has committed for partition 0. Readers need
    ``isolation.level: read_committed``, which is librdkafka's own.

    The conf has the settings of librdkafka below ``prefix``: ``kafka.bootstrap.servers``, ``kafka.sasl.password.file``.
    Rows that cannot be encoded or are longer than ``kafka.message.max.bytes`` are rejected."""

    def __init__(
        self,
        topic: str,
        key: str | None = None,
        value: Callable[[Mapping[str, Any]], bytes | None] = msgspec.json.encode,
        *,
        prefix: str = "kafka.",
    ) -> None:
        self._topic, self._key, self._value, self._prefix = topic, key, value, prefix
        self.assets = assets_of("kafka", topic)
        self._producer: Any = None
        self._group: Any = None

    def open(self, conf: Mapping[str, Any], owner: str) -> int | None:
        """Connect; with an owner, fence its earlier producers, whose open transaction is aborted."""
        with client_library("kafka"):
            from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
        settings = client_settings(conf, self._prefix)
        # Brokers count more than key and value.
        self._most_bytes = int(settings.get("message.max.bytes", 1_000_000)) - 512
        own = {"enable.idempotence": True, "acks": "all", **({"transactional.id": owner} if owner else {})}
        self._producer = Producer({"linger.ms": 5, **settings, **own})
        if not owner:
            return None
        self._producer.init_transactions(_SECS)
        self._group = Consumer({**settings, "group.id": owner, "enable.auto.commit": False})
        self._token = TopicPartition(self._topic, 0)
        (committed,) = self._group.committed([self._token], _SECS)
        if committed.error is not None:
            raise KafkaException(committed.error)
        return max(committed.offset, 0)

    def write(self, rows: Sequence[Row], token: int) -> None:
        """Send all rows, and wait until the brokers have them."""
        messages: list[tuple[bytes | None, bytes | None]] = []
        write_or_reject(rows, lambda part: messages.extend([self._message(row) for row in part]), lambda error: True)
        if self._group is not None:
            self._producer.begin_transaction()
        self._send(messages)
        if self._group is not None:
            self._token.offset = token
            self._producer.send_offsets_to_transaction([self._token], self._group.consumer_group_metadata(), _SECS)
            self._producer.commit_transaction(_SECS)

    def close(self) -> None:
        """Drop what is not sent, and disconnect."""
        if self._producer is not None:
            self._producer.purge()
        if self._group is not None:
            self._group.close()
        self._producer = self._group = None

    def _message(self, row: Row) -> tuple[bytes | None, bytes | None]:
        key = None if self._key is None else str(row.values[self._key]).encode()
        value = self._value(row.values)
        size = len(key or b"") + len(value or b"")
        if size > self._most_bytes:
            raise ValueError(f"{size} bytes are more than {self._prefix}message.max.bytes allows")
        return key, value

    def _send(self, messages: Sequence[tuple[bytes | None, bytes | None]]) -> None:
        errors: list[str] = []
        how = {"on_delivery": lambda error, message: error is None or errors.append(error.str())}
        for key, value in messages:
            until = time.monotonic() + _SECS
            while True:
                try:
                    self._producer.produce(self._topic, value=value, key=key, **how)
                    break
                except BufferError:
                    # The client's queue is full of what the brokers have not taken yet.
                    if time.monotonic() > until:
                        raise
                    self._producer.poll(0.1)
        left = self._producer.flush(_SECS)
        if errors or left:
            raise Unavailable(f"topic {self._topic} has not taken a batch: {[*errors, f'{left} messages wait'][0]}")
