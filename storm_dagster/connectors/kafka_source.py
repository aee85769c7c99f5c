"""Topics of Kafka as a source, read on the worker's loop.

No call on the loop waits for a broker. Tasks are assigned partitions by their index, without a
consumer group's protocol: leases already decide which task reads. Positions are committed as
offsets of the group, so that Kafka's own tools see them. An offset is valid in one topic only: if a
topic was deleted and recreated, which its id shows, the position is lost.
"""

import logging
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from threading import Event, Thread
from typing import Any, ClassVar, Literal, NamedTuple, cast

from storm_dagster.connectors.kafka_errors import readable_error
from storm_dagster.connectors.kafka_positions import (
    CommittedPosition,
    describe_restart,
    describe_stop,
    is_recreated,
    number_of,
    partition_name,
    position_metadata,
    start_position,
    topic_id_in,
    topic_of,
)
from storm_dagster.connectors.kafka_queries import COMMIT, KafkaQueries
from storm_dagster.connectors.kafka_topic_ids import TopicIds
from storm_dagster.connectors.settings import assets_of, client_library, client_settings
from storm_dagster.connectors.sources import Lag, Source
from storm_dagster.connectors.tracking import PartitionEnd, SourceRecord
from storm_dagster.model.errors import InvalidRequest, InvalidTopology

_log = logging.getLogger(__name__)
_FIXED_SETTINGS = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
}
_QUERY_SECS = 10.0
_CLOSE_SECS = 0.05
_STALE_SECS = 1.0
"""Time without a read after which known ends of partitions may be old.

Librdkafka may have stopped fetching by then.
"""


class _Position(NamedTuple):
    """Position and ends of a partition, as the brokers have them."""

    committed: CommittedPosition | None
    first: int
    end: int
    start: Any
    """Start without a committed position: an offset, ``"earliest"`` or ``"latest"``."""


class KafkaSource(Source):
    """All partitions of one or several topics, named ``topic[0]`` and so on.

    ``start`` is the start of a partition without a committed offset: ``"earliest"``, ``"latest"``,
    or a time (ISO 8601, by default UTC). ``on_lost`` decides when the committed offset is lost,
    because its record was deleted, or its topic was deleted and recreated: ``"stop"`` reports it
    and reads the other partitions; the others are ``"earliest"`` and ``"latest"``.

    Keys of the conf that begin with ``kafka.`` are settings of librdkafka, at least
    ``kafka.bootstrap.servers``. The group is ``kafka.group.id``, by default
    ``<topology>.<component>``. A task fetches at most 16 MiB and two responses ahead; raise
    ``kafka.fetch.max.bytes`` (1 MB) for brokers that are far away.
    """

    blocking: ClassVar[bool] = False
    keeps_positions: ClassVar[bool] = True

    def __init__(
        self,
        topics: str | Sequence[str],
        *,
        start: str = "earliest",
        on_lost: Literal["stop", "earliest", "latest"] = "stop",
    ) -> None:
        self.topics = [topics] if isinstance(topics, str) else list(topics)
        self.assets = assets_of("kafka", *self.topics)
        self.on_lost: Literal["stop", "earliest", "latest"] = on_lost
        self.start = start
        if on_lost not in ("stop", "earliest", "latest"):
            raise InvalidTopology(
                f'on_lost of a KafkaSource is {on_lost!r}: make it "stop", "earliest" or "latest"'
            )
        if start not in ("earliest", "latest"):
            try:
                start_time = datetime.fromisoformat(start)
            except ValueError:
                raise InvalidTopology(
                    f'start of a KafkaSource is {start!r}: make it "earliest", "latest", or a time '
                    'such as "2026-11-24T10:00:00"'
                ) from None
            if start_time.tzinfo is None:
                start_time = start_time.replace(tzinfo=timezone.utc)
            self._start_ms = int(start_time.timestamp() * 1000)

    def open(self, conf: Mapping[str, Any], context: Any) -> None:
        """Create the consumer, which connects in the background."""
        with client_library("kafka"):
            import confluent_kafka
        self._kafka = confluent_kafka
        settings = client_settings(conf, "kafka.")
        if "bootstrap.servers" not in settings:
            raise InvalidRequest(
                "no Kafka broker is known: set kafka.bootstrap.servers in the conf of the topology"
            )
        for key in sorted(_FIXED_SETTINGS):
            if key in settings:
                raise InvalidRequest(
                    f"kafka.{key} is set by the source itself: remove it from the conf"
                )
        self.brokers: str = settings["bootstrap.servers"]
        self._label = f"{context.topology_id} task {context.task_id}"
        defaults = {
            "group.id": f"{context.topology_name}.{context.component}",
            "client.id": self._label.replace(" ", "-"),
            "queued.max.messages.kbytes": 16_384,
            # A small record takes 400 bytes, which are not counted: so the queue is bounded by two
            # responses.
            "queued.min.messages": 10_000,
            "fetch.message.max.bytes": 131_072,
            "fetch.queue.backoff.ms": 50,
            # A partition that was full waits so long at most, until the fetch of others ends.
            "fetch.wait.max.ms": 100,
            # By default a broker that hangs is an error only after a minute.
            "socket.timeout.ms": 10_000,
        }
        if "message.max.bytes" not in settings:
            # Librdkafka refuses a value below the sink's message.max.bytes.
            defaults["fetch.max.bytes"] = 1_000_000
        self._errors: deque[Exception] = deque(maxlen=100)
        self._names: list[str] | None = None
        """All partitions of the last response; ``None`` before the first."""
        self._first_names: list[str] = []
        """Partitions of the first response.

        Later ones are new, and have no records that ``latest`` would skip.
        """
        self._assigned: set[str] = set()
        self._waiting: set[str] = set()
        """Partitions whose position is being read, or is lost."""
        self._paused: set[str] = set()
        self._may_write = context.may_write
        self._finished: dict[str, int] = {}
        """Partition -> offset to commit."""
        self._stored: dict[str, CommittedPosition] = {}
        """Partition -> committed position."""
        self._read_ids: dict[str, str] = {}
        """Partition -> id of the topic in which its position is valid."""
        self._interrupted: dict[str, CommittedPosition] = {}
        """Partition -> position at which its reading ended, because it is lost."""
        self._recreated: set[str] = set()
        """Partitions of which the spout may still have records of a deleted topic."""
        self._ends: dict[str, int] = {}
        self._next_lookup = 0.0
        self._read_at = 0.0
        self._closed = False
        self._queries = KafkaQueries()
        client = {**defaults, **settings, **_FIXED_SETTINGS}
        self._consumer = confluent_kafka.Consumer(
            {**client, "error_cb": self._add_error, "logger": _log}
        )
        # Calls of one client wait for each other, so queries have a second one.
        self._query_client = confluent_kafka.Consumer({**client, "log_level": 0})
        self._topic_ids = TopicIds(confluent_kafka, {**defaults, **settings}, self.topics)
        self._late = Event()
        """Set when the task may have another owner: then no position is committed."""

    # -- queries -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Handle results that have come, and start the next query."""
        was_answered = self._topic_ids.is_answered
        if self._topic_ids.take():
            self._on_topic_ids()
            if not was_answered:
                # Partitions wait for the ids.
                self._next_lookup = 0.0
        self._queries.serve(self._add_error)

    def _add_error(self, error: Any) -> None:
        self._errors.append(self._readable(error))

    def _readable(self, error: Any) -> Exception:
        return readable_error(error, self._kafka, self.brokers)

    def _at(self, name: str, offset: int = -1001, metadata: str = "") -> Any:
        """The library's value for a partition and an offset in it."""
        return self._kafka.TopicPartition(topic_of(name), number_of(name), offset, metadata)

    # -- ids of topics -----------------------------------------------------------------------------

    def _on_topic_ids(self) -> None:
        """Interrupt partitions whose topic was deleted and recreated."""
        for name in [*self._assigned, *self._waiting]:
            current_id = self._topic_ids.of(topic_of(name))
            if is_recreated(self._read_ids.get(name), current_id):
                self._interrupt(name)
                self._recreated.add(name)
                self._finished.pop(name, None)
                self._stored.pop(name, None)
                self._read_ids.pop(name)
            elif current_id is not None and name in self._assigned:
                self._read_ids[name] = current_id

    def _interrupt(self, name: str) -> None:
        """Stop reading a partition until a new query of its position.

        Records that librdkafka has fetched from it are discarded.
        """
        if name in self._finished:
            stored = self._stored.get(name)
            offset = self._finished[name] if stored is None else stored.offset
            self._interrupted[name] = CommittedPosition(offset, self._read_ids.get(name))
        if name in self._assigned:
            self._consumer.incremental_unassign([self._at(name)])
        self._assigned.discard(name)
        self._paused.discard(name)
        self._waiting.add(name)
        self._next_lookup = 0.0

    def recreated(self) -> Collection[str]:
        """Partitions whose topic was deleted and recreated.

        Reading them continues only after this call.
        """
        names = self._recreated
        self._recreated = set()
        return names

    # -- partitions --------------------------------------------------------------------------------

    def partitions(self) -> Collection[str] | None:
        """The partitions of the last response; the next query is started."""
        self._serve()
        if self._names is None:
            self._consumer.poll(0)
            if self._errors:
                raise self._errors.pop()
        self._topic_ids.query()
        self._queries.add("partitions", self._list_topics, self._on_topics)
        partitions = [self._at(name) for name in self._finished if name in self._assigned]
        if partitions:
            # A late commit of the former reader may have replaced that of this task.
            read = partial(self._query_client.committed, partitions, timeout=_QUERY_SECS)
            self._queries.add("stored", read, self._on_commit)
        self._serve()
        return self._names

    def _list_topics(self) -> list[Any]:
        """Metadata of the topics; this waits."""
        return [self._query_client.list_topics(name, timeout=_QUERY_SECS) for name in self.topics]

    def _on_topics(self, responses: Sequence[Any]) -> None:
        names: list[tuple[bool, str]] = []
        for response in responses:
            for topic, metadata in response.topics.items():
                if metadata.error is not None:
                    reason = metadata.error.str()
                    raise InvalidRequest(
                        f"topic {topic!r} cannot be read, {reason}: create it, or change topics"
                    )
                for number, partition in metadata.partitions.items():
                    names.append((partition.leader < 0, partition_name(topic, number)))
        # Partitions without a leader are last, since a query of their positions waits.
        self._names = [name for _, name in sorted(names)]
        self._first_names = self._first_names or self._names

    def assign(self, mine: Mapping[str, Any]) -> None:
        """Read these partitions, as soon as their committed offsets are known."""
        removed = self._assigned - mine.keys()
        if removed:
            self._consumer.incremental_unassign([self._at(name) for name in removed])
        self._assigned -= removed
        self._waiting = mine.keys() - self._assigned
        for by_name in (self._finished, self._read_ids, self._interrupted):
            for name in by_name.keys() - mine.keys():
                del by_name[name]
        self._recreated &= mine.keys()
        self._next_lookup = 0.0

    def _read_position(self, name: str) -> "_Position":
        """Committed position and ends of a partition; this waits."""
        client = self._query_client
        start = cast("Any", self.start)
        (offset,) = client.committed([self._at(name)], timeout=_QUERY_SECS)
        if offset.error is not None:
            raise self._kafka.KafkaException(offset.error)
        first, end = client.get_watermark_offsets(offset, timeout=_QUERY_SECS)
        committed: CommittedPosition | None = None
        if offset.offset >= 0:
            committed = CommittedPosition(offset.offset, topic_id_in(offset.metadata))
        if start == "latest" and name not in self._first_names:
            start = "earliest"
        elif committed is None and start not in ("earliest", "latest"):
            times = [self._at(name, self._start_ms)]
            (at_start,) = client.offsets_for_times(times, timeout=_QUERY_SECS)
            start = end if at_start.offset < 0 else at_start.offset
        return _Position(committed, first, end, start)

    def _begin(self, name: str, queried_id: str | None, position: "_Position") -> None:
        """Read a partition from its position.

        ``queried_id`` is the id of its topic when the query of the position was made.
        """
        if name not in self._waiting:
            return
        topic_id = self._topic_ids.of(topic_of(name))
        if name in self._recreated or topic_id != queried_id:
            # The position may be that of the deleted topic.
            self._next_lookup = 0.0
            return
        if not self._topic_ids.is_answered:
            return
        self._ends[name] = position.end
        if position.committed is None:
            self._stored.pop(name, None)
        else:
            self._stored[name] = position.committed
        # Kafka deletes the offsets of a group with their topic; the last one is kept here.
        committed = position.committed or self._interrupted.get(name)
        begin = start_position(
            committed,
            topic_id,
            position.first,
            position.end,
            start=position.start,
            on_lost=self.on_lost,
        )
        if begin.offset is None:
            assert committed is not None
            raise InvalidRequest(describe_stop(name, committed, begin.reason))
        if committed is not None and begin.reason:
            text = describe_restart(name, begin.offset, committed, begin.reason, self.on_lost)
            self._errors.append(RuntimeError(text))
        if topic_id is not None:
            self._read_ids[name] = topic_id
        elif committed is not None and committed.topic_id is not None:
            self._read_ids[name] = committed.topic_id
        self._interrupted.pop(name, None)
        # Committed at once: it can be lost from here on, and a later start begins here.
        self._finished[name] = begin.offset
        self._consumer.incremental_assign([self._at(name, begin.offset)])
        self._waiting.discard(name)
        self._assigned.add(name)

    # -- reading -----------------------------------------------------------------------------------

    def read(
        self, most: int, full: Collection[str]
    ) -> Sequence[SourceRecord | PartitionEnd | Exception]:
        """The records that librdkafka has fetched."""
        self._serve()
        now = time.monotonic()
        self._read_at = now
        if self._waiting and self._topic_ids.is_answered and now >= self._next_lookup:
            self._next_lookup = now + self.refresh_secs
            self._query_positions()
        if self._paused or full:
            self._pause(self._assigned.intersection(full))
        records: list[SourceRecord | PartitionEnd | Exception] = []
        for message in cast("list[Any]", self._consumer.consume(most, 0)):
            name = partition_name(message.topic(), message.partition())
            error = message.error()
            if error is None:
                records.append(self._record(name, message))
            elif error.code() == self._kafka.KafkaError._PARTITION_EOF:
                records.append(PartitionEnd(name, message.offset()))
            elif (
                error.code() == self._kafka.KafkaError._AUTO_OFFSET_RESET and name in self._assigned
            ):
                # Retention has deleted the next record, or the topic is a new one: its id decides.
                self._interrupt(name)
                self._topic_ids.refresh()
            else:
                self._add_error(error)
        records += self._errors
        self._errors.clear()
        return records

    def _record(self, name: str, message: Any) -> SourceRecord:
        kind, at_ms = message.timestamp()
        return SourceRecord(
            message.value(),
            name,
            message.offset() + 1,
            message.key(),
            at_ms if kind else None,
            dict(message.headers() or ()),
            topic_id=self._read_ids.get(name),
        )

    def _query_positions(self) -> None:
        """Query the positions of partitions that wait for them."""
        for name in self._names or ():
            if name in self._waiting:
                begin = partial(self._begin, name, self._topic_ids.of(topic_of(name)))
                read = partial(self._read_position, name)
                self._queries.add(f"position of {name}", read, begin)

    def _pause(self, full: set[str]) -> None:
        paused = self._paused & self._assigned
        if full - paused:
            self._consumer.pause([self._at(name) for name in full - paused])
        if paused - full:
            self._consumer.resume([self._at(name) for name in paused - full])
        self._paused = full

    def commit(self, after: Mapping[str, Any]) -> None:
        """Store offsets; those that could not be stored are retried at the next call."""
        self._serve()
        for name, offset in after.items():
            if name in self._finished:
                self._finished[name] = offset
        changed: dict[str, CommittedPosition] = {}
        for name, offset in self._finished.items():
            position = CommittedPosition(offset, self._read_ids.get(name))
            if self._stored.get(name) != position:
                changed[name] = position
        if changed:
            # A close cannot wait: its positions have the id of their topic.
            checks_ids = self._topic_ids.has_ids and not self._closed
            send = partial(self._send_commit, changed, checks_ids)
            self._queries.add(COMMIT, send, self._on_sent)
            self._serve()

    def _send_commit(
        self, positions: Mapping[str, CommittedPosition], checks_ids: bool
    ) -> tuple[Mapping[str, str] | None, Sequence[Any]]:
        """Commit positions, but none of a deleted topic; this waits.

        Returns the ids of the topics, or ``None`` if they were not read, and the committed offsets.
        """
        topic_ids = self._topic_ids.read() if checks_ids else None
        current_ids = topic_ids or {}
        offsets: list[Any] = []
        for name, position in positions.items():
            if is_recreated(position.topic_id, current_ids.get(topic_of(name))):
                continue
            metadata = position_metadata(self._label, position.topic_id)
            offsets.append(self._at(name, position.offset, metadata))
        has_lost_task = checks_ids and (self._late.is_set() or not self._may_write())
        if not offsets or has_lost_task:
            return topic_ids, []
        return topic_ids, self._query_client.commit(offsets=offsets, asynchronous=False)

    def _on_sent(self, result: tuple[Mapping[str, str] | None, Sequence[Any]]) -> None:
        topic_ids, offsets = result
        if topic_ids is not None:
            self._topic_ids.update(topic_ids)
            self._on_topic_ids()
        self._on_commit(offsets)

    def _on_commit(self, offsets: Sequence[Any]) -> None:
        for offset in offsets:
            name = partition_name(offset.topic, offset.partition)
            if offset.error is not None:
                self._add_error(offset.error)
            elif offset.offset >= 0:
                topic_id = topic_id_in(offset.metadata)
                self._stored[name] = CommittedPosition(offset.offset, topic_id)
            else:
                self._stored.pop(name, None)

    def _committed_offset(self, name: str) -> int | None:
        """Offset in the current topic before which all is finished; ``None``: unknown."""
        position = self._stored.get(name) or self._interrupted.get(name)
        if position is None:
            return None
        # No record of a recreated topic is finished.
        if is_recreated(position.topic_id, self._topic_ids.of(topic_of(name))):
            return 0
        return position.offset

    def lag(self) -> Mapping[str, Lag]:
        """Records after the committed offset, by the newest known ends."""
        lags: dict[str, Lag] = {}
        old_ends: list[str] = []
        stale = time.monotonic() - self._read_at > _STALE_SECS
        for name in (*self._assigned, *self._waiting):
            end = -1
            if name in self._assigned and name not in self._paused:
                _, end = self._consumer.get_watermark_offsets(self._at(name), cached=True)
            committed = self._committed_offset(name)
            if (end < 0 or stale) and committed is not None:
                old_ends.append(name)
                end = max(end, self._ends.get(name, -1))
            records: int | None = None
            if end >= 0 and committed is not None:
                records = max(0, end - committed)
            lags[name] = Lag(records)
        if old_ends:
            # No records of them are fetched now, which would update their ends.
            self._queries.add("ends", partial(self._read_ends, old_ends), self._ends.update)
        return lags

    def _read_ends(self, names: Sequence[str]) -> dict[str, int]:
        """Partition -> its end; this waits."""
        ends: dict[str, int] = {}
        for name in names:
            partition = self._at(name)
            _, end = self._query_client.get_watermark_offsets(partition, timeout=_QUERY_SECS)
            ends[name] = end
        return ends

    def close(self) -> None:
        """Store the positions, and close the consumer, in a thread.

        The loop waits 50 ms for it. Positions that were not sent to the brokers by then are not
        stored, since the task may have another owner.
        """
        if self._closed:
            return
        self._closed = True
        self._queries.waiting.clear()
        stored = Event()

        def end() -> None:
            try:
                self._queries.wait()
                self._serve()
                if not self._late.is_set() and self._may_write():
                    self.commit({})
                self._queries.wait()
                self._serve()
            finally:
                stored.set()
                self._query_client.close()
                self._consumer.close()
                self._topic_ids.close()

        Thread(target=end, name="kafka-close", daemon=True).start()
        if not stored.wait(_CLOSE_SECS):
            self._late.set()
