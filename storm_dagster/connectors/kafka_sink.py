"""Kafka as a sink."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from storm_dagster.api.outages import SystemUnavailable
from storm_dagster.connectors.json_rows import json_bytes
from storm_dagster.connectors.kafka_values import Headers, encode_headers, encode_key
from storm_dagster.connectors.settings import assets_of, client_library, client_settings
from storm_dagster.connectors.sinks import Rejected, Row, write_or_reject
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.json_text import NoJsonForm, type_name

_SECS = 20.0
"""Maximum wait for a response of the brokers, after which the batch is retried.

It is shorter than a message timeout, after which the worker reports a call that does not return.
"""

_LOG_LEVEL = 2
"""Lines of librdkafka that are logged: fatal ones. ``log_level`` of the settings replaces it."""


class _Message(NamedTuple):
    """The parts of a message, encoded."""

    key: bytes | None
    value: bytes | None
    headers: Headers


class KafkaSink:
    """Sink that writes each row as a message of ``topic``.

    The message is JSON, from which a reader gets an equal row, or the result of ``value(row)``.
    Needs the extra ``kafka``.

    ``key`` names the field whose value is the message's key: bytes unchanged, text as UTF-8, a
    whole number as its decimal text, and ``None`` as no key. ``headers`` names the field with the
    headers: (name, value) pairs, which may repeat a name, or a map; the JSON is without this field.
    All replicas have a message before its
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
        value: Callable[[Mapping[str, Any]], bytes | None] | None = None,
        *,
        headers: str | None = None,
        prefix: str = "kafka.",
    ) -> None:
        self._topic = topic
        self._key = key
        self._headers = headers
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
            # Errors of connections raise: a line for each attempt would fill the worker's log.
            "log_level": _LOG_LEVEL,
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
        self._group = Consumer(
            {
                "log_level": _LOG_LEVEL,
                **settings,
                "group.id": owner,
                "enable.auto.commit": False,
            }
        )
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
        :class:`Unavailable` if the brokers have not taken all others after 20 s.
        """
        if self._is_aborted:
            # The caller reopens the sink. A SinkBolt does so only while it may write, and so does
            # not fence another worker.
            raise Unavailable(
                f"topic {self._topic} has refused rows of the last batch: "
                "the rest waits for a new producer"
            )
        messages: list[_Message] = []

        def encode(part: Sequence[Row]) -> None:
            messages.extend([self._message(row) for row in part])

        # A system that the function value needs, such as a schema registry, is no fault of a row.
        write_or_reject(rows, encode, lambda error: not isinstance(error, SystemUnavailable))
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

    def _message(self, row: Row) -> _Message:
        key = None if self._key is None else self._key_of(row, self._key)
        headers: Headers = []
        if self._headers is not None:
            headers = encode_headers(self._headers, row.values.get(self._headers))
        value = self._json_of(row) if self._value is None else self._made_value(row)
        size = len(key or b"") + len(value or b"")
        for name, content in headers:
            size += len(name.encode()) + len(content or b"")
        if size > self._max_bytes:
            raise ValueError(f"{size} bytes are more than {self._prefix}message.max.bytes allows")
        return _Message(key, value, headers)

    def _made_value(self, row: Row) -> bytes | None:
        """What the function ``value`` makes of a row; text is UTF-8, ``None`` a tombstone."""
        assert self._value is not None
        made: Any = self._value(row.values)
        if made is None:
            return None
        if isinstance(made, str):
            try:
                return made.encode()
            except UnicodeEncodeError:
                raise ValueError(
                    f"the function value of the KafkaSink for topic {self._topic} returned text "
                    "with half of a surrogate pair, which is not UTF-8: remove it"
                ) from None
        if not isinstance(made, bytes | bytearray | memoryview):
            raise ValueError(
                f"the function value of the KafkaSink for topic {self._topic} returned a value of "
                f"type {type_name(made)}: return bytes, or None for a message without a value"
            )
        return bytes(made)

    def _json_of(self, row: Row) -> bytes:
        values = {name: value for name, value in row.values.items() if name != self._headers}
        try:
            return json_bytes(values)
        except NoJsonForm as error:
            raise ValueError(
                f"the row for topic {self._topic}, {error} in row_of, "
                "or set value of the KafkaSink to a function that encodes rows"
            ) from None

    def _key_of(self, row: Row, field: str) -> bytes | None:
        if field not in row.values:
            fields = ", ".join(map(str, row.values))
            raise ValueError(
                f"the row has no field {field!r} for the key of its message, only: {fields}: "
                "add the field, with None for no key"
            )
        return encode_key(field, row.values[field])

    def _send(self, messages: Sequence[_Message]) -> None:
        """Send messages, and wait for their delivery.

        Raises :class:`Rejected` for messages without a key that a compacted topic refuses, with
        their indexes; a transaction is then aborted. Other errors are raised as they are, or as
        :class:`Unavailable`.
        """
        # Index of a message -> the error of its delivery.
        errors: dict[int, Any] = {}
        failure: Exception | None = None
        try:
            for index, message in enumerate(messages):
                self._produce(index, message, errors)
        except self._kafka_exception as error:
            # A transaction accepts no message after one that a broker has refused.
            failure = error
        unsent = self._flush(errors)
        refused: dict[int, str] = {}
        for index, error in errors.items():
            # The first error of a transaction may be reported for all its messages: a message with
            # a key is not at fault.
            if error.name() == "INVALID_RECORD" and messages[index].key is None:
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

    def _produce(self, index: int, message: _Message, errors: dict[int, Any]) -> None:
        """Send a message; an error of its delivery is added to ``errors``, by its index.

        Raises :class:`Unavailable` if the client's queue is full for 20 s.
        """

        def on_delivery(error: Any, delivered: Any) -> None:
            if error is not None:
                errors[index] = error

        until = time.monotonic() + _SECS
        while True:
            try:
                self._producer.produce(
                    self._topic,
                    value=message.value,
                    key=message.key,
                    headers=message.headers,
                    on_delivery=on_delivery,
                )
                return
            except BufferError as error:
                # The client's queue is full of messages that the brokers have not accepted yet.
                if time.monotonic() > until:
                    raise Unavailable(
                        f"topic {self._topic} has not taken the messages before for {_SECS:g} s: "
                        f"{error}"
                    ) from error
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
