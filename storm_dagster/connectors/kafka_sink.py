"""Kafka as a sink."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from storm_dagster.connectors.settings import assets_of, client_library, client_settings
from storm_dagster.connectors.sinks import Rejected, Row, write_or_reject
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.json_text import type_name

_SECS = 30.0
"""Maximum wait for a response of the brokers, after which the batch is retried."""


def encode_key(field: str, value: Any) -> bytes | None:
    """Encode the value of a field as the key of a message.

    Bytes are unchanged, text is UTF-8, a whole number is its decimal text, ``None`` is a message
    without a key. Raises ``ValueError`` for any other value, whose text would depend on the version
    of Python or of a library.
    """
    if value is None:
        return None
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            reason = f"{field!r} has half of a surrogate pair at position {error.start}"
            raise ValueError(f"the key {reason}, and is not UTF-8: remove it in row_of") from None
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            # Not the name of a member of an enumeration.
            return int.__repr__(value).encode()
        except ValueError as error:
            raise ValueError(f"the key {field!r} cannot be written: {error}") from None
    raise ValueError(
        f"the key {field!r} is of type {type_name(value)}, and a key is bytes, text, "
        "a whole number or None: make it one of these in row_of, or set key of the KafkaSink "
        "to another field"
    )


class KafkaSink:
    """Sink that writes each row as a message of ``topic``.

    The message is JSON, or the result of ``value(row)``. Needs the extra ``kafka``.

    ``key`` names the field whose value is the message's key: bytes unchanged, text as UTF-8, a
    whole number as its decimal text, and ``None`` as no key. All replicas have a message before its
    row counts as written. With ``exactly_once`` each batch is a transaction of the producer that
    has the owner's name, which fences earlier producers; the token is the offset that the consumer
    group of this name has committed for partition 0. Readers need ``isolation.level:
    read_committed``, which is librdkafka's default.

    The conf has the settings of librdkafka below ``prefix``: ``kafka.bootstrap.servers``,
    ``kafka.sasl.password.file``. Rows are rejected that cannot be encoded, have a key of another
    type, are longer than ``kafka.message.max.bytes``, or have no key if the topic is compacted.
    """

    def __init__(
        self,
        topic: str,
        key: str | None = None,
        value: Callable[[Mapping[str, Any]], bytes | None] = msgspec.json.encode,
        *,
        prefix: str = "kafka.",
    ) -> None:
        self._topic = topic
        self._key = key
        self._value = value
        self._prefix = prefix
        self.assets = assets_of("kafka", topic)
        uri = f"kafka://{{{prefix}bootstrap.servers}}/{topic}"
        self.asset_metadata = {self.assets[0]: {"dagster/uri": uri}}
        self._producer: Any = None
        self._group: Any = None
        """Consumer whose group keeps the token; ``None`` without an owner, and while closed."""
        self._is_aborted = False
        """True if a transaction was aborted: librdkafka's numbers of messages are then wrong."""

    def open(self, conf: Mapping[str, Any], owner: str) -> int | None:
        """Connect; with an owner, fence its earlier producers, and return its token.

        Their open transaction is aborted.
        """
        with client_library("kafka"):
            from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
        settings = client_settings(conf, self._prefix)
        self._kafka_exception = KafkaException
        self._is_aborted = False
        # The limit of brokers includes more than key and value: 512 bytes are left for the rest.
        self._max_bytes = int(settings.get("message.max.bytes", 1_000_000)) - 512
        producer_settings = {
            "linger.ms": 5,
            **settings,
            "enable.idempotence": True,
            "acks": "all",
        }
        if owner:
            producer_settings["transactional.id"] = owner
        self._producer = Producer(producer_settings)
        if not owner:
            return None
        self._producer.init_transactions(_SECS)
        self._group = Consumer({**settings, "group.id": owner, "enable.auto.commit": False})
        # The group's offset for partition 0 is the token, and not an offset of the topic.
        self._token = TopicPartition(self._topic, 0)
        (committed,) = self._group.committed([self._token], _SECS)
        if committed.error is not None:
            raise KafkaException(committed.error)
        # A negative offset means that the group has committed none.
        return max(committed.offset, 0)

    def write(self, rows: Sequence[Row], token: int) -> None:
        """Send all rows, and wait until the brokers have them.

        Raises :class:`Rejected` for rows that cannot be encoded, or that a broker refuses, and
        :class:`Unavailable` if the brokers have not taken all others after 30 s.
        """
        if self._is_aborted:
            # The caller reopens the sink. A SinkBolt does so only while it may write, and so does
            # not fence another worker.
            raise Unavailable(
                f"topic {self._topic} has refused rows of the last batch: "
                "the rest waits for a new producer"
            )
        messages: list[tuple[bytes | None, bytes | None]] = []

        def encode(part: Sequence[Row]) -> None:
            messages.extend([self._message(row) for row in part])

        write_or_reject(rows, encode, lambda error: True)
        if self._group is not None:
            self._producer.begin_transaction()
        self._send(messages)
        if self._group is not None:
            # The token is committed as an offset of the group, in the transaction of the rows.
            self._token.offset = token
            self._producer.send_offsets_to_transaction(
                [self._token], self._group.consumer_group_metadata(), _SECS
            )
            self._producer.commit_transaction(_SECS)

    def close(self) -> None:
        """Drop the messages that are not sent, and disconnect."""
        if self._producer is not None:
            self._producer.purge()
        if self._group is not None:
            self._group.close()
        self._producer = None
        self._group = None

    def _message(self, row: Row) -> tuple[bytes | None, bytes | None]:
        key = None if self._key is None else self._key_of(row, self._key)
        value = self._value(row.values)
        size = len(key or b"") + len(value or b"")
        if size > self._max_bytes:
            raise ValueError(f"{size} bytes are more than {self._prefix}message.max.bytes allows")
        return key, value

    def _key_of(self, row: Row, field: str) -> bytes | None:
        if field not in row.values:
            fields = ", ".join(map(str, row.values))
            raise ValueError(
                f"the row has no field {field!r} for the key of its message, only: {fields}: "
                "add the field, with None for no key"
            )
        return encode_key(field, row.values[field])

    def _send(self, messages: Sequence[tuple[bytes | None, bytes | None]]) -> None:
        """Send (key, value) pairs, and wait for their delivery.

        Raises :class:`Rejected` for messages without a key that a compacted topic refuses, with
        their indexes; a transaction is then aborted. Other errors are raised as they are, or as
        :class:`Unavailable`.
        """
        # Index of a message -> the error of its delivery.
        errors: dict[int, Any] = {}
        failure: Exception | None = None
        try:
            for index, (key, value) in enumerate(messages):
                self._produce(index, key, value, errors)
        except self._kafka_exception as error:
            # A transaction accepts no message after one that a broker has refused.
            failure = error
        unsent = self._flush(errors)
        refused: dict[int, str] = {}
        for index, error in errors.items():
            # The first error of a transaction may be reported for all its messages: a message with
            # a key is not at fault.
            if error.name() == "INVALID_RECORD" and messages[index][0] is None:
                refused[index] = self._refusal(error)
        if refused:
            # The messages beside them failed, too; the next call has them.
            if self._group is not None:
                self._producer.abort_transaction(_SECS)
                self._is_aborted = True
            raise Rejected(refused)
        if failure is not None:
            raise failure
        if errors or unsent:
            reasons = [error.str() for error in errors.values()]
            reasons.append(f"{unsent} messages wait")
            raise Unavailable(f"topic {self._topic} has not taken a batch: {reasons[0]}")

    def _produce(
        self, index: int, key: bytes | None, value: bytes | None, errors: dict[int, Any]
    ) -> None:
        """Send a message; an error of its delivery is added to ``errors``, by its index.

        Raises ``BufferError`` if the client's queue is full for 30 s.
        """

        def on_delivery(error: Any, message: Any) -> None:
            if error is not None:
                errors[index] = error

        until = time.monotonic() + _SECS
        while True:
            try:
                self._producer.produce(self._topic, value=value, key=key, on_delivery=on_delivery)
                return
            except BufferError:
                # The client's queue is full of messages that the brokers have not accepted yet.
                if time.monotonic() > until:
                    raise
                self._producer.poll(0.1)

    def _flush(self, errors: Mapping[int, Any]) -> int:
        """Wait until the brokers have all messages, and return the number of unsent ones.

        It does not wait for a transaction with an error: the transaction is lost.
        """
        until = time.monotonic() + _SECS
        while True:
            unsent = self._producer.flush(min(0.5, _SECS))
            is_lost = bool(errors) and self._group is not None
            if not unsent or is_lost or time.monotonic() >= until:
                return unsent

    def _refusal(self, error: Any) -> str:
        return (
            f"topic {self._topic} refuses a message without a key ({error.str()}), "
            "as a compacted topic does: "
            "set key of the KafkaSink to a field whose value is not None"
        )
