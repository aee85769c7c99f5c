"""Topics of Kafka as a source.

It is read on the worker's loop, where no call waits for a broker. Tasks are assigned partitions by
their index, without a consumer group's protocol: leases already decide which task reads. Positions
are committed as offsets of the group, so that Kafka's own tools see them. An offset is valid in one
topic only: when a topic was deleted and recreated, which its id shows, the position is lost.
"""

import logging
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from threading import Event, Thread
from typing import Any, ClassVar, Literal, cast

from storm_dagster.connectors.kafka_errors import readable_error
from storm_dagster.connectors.kafka_outage import LibraryLog, Outage
from storm_dagster.connectors.kafka_positions import (
    CommittedPosition,
    describe_restart,
    describe_stop,
    is_recreated,
    partition_name,
    position_metadata,
    start_position,
    start_time_ms,
    topic_id_in,
    topic_of,
)
from storm_dagster.connectors.kafka_reads import (
    REQUEST_SECS,
    BrokerReads,
    CleanupPolicies,
    partition_names,
    topic_partition,
)
from storm_dagster.connectors.kafka_requests import BrokerRequests
from storm_dagster.connectors.kafka_settings import FIXED_SETTINGS, check_settings, default_settings
from storm_dagster.connectors.kafka_topic_ids import TopicIds
from storm_dagster.connectors.settings import assets_of, client_library, client_settings
from storm_dagster.connectors.sources import Lag, Source
from storm_dagster.connectors.tracking import PartitionEnd, SourceRecord
from storm_dagster.model.errors import InvalidRequest, InvalidTopology, Unavailable

_log = logging.getLogger(__name__)
_CLOSE_SECS = 0.05
"""Maximum time for which the worker's loop waits for the last commit of a task that closes."""
_STALE_SECS = 1.0
"""Time without a read after which the ends of partitions may be stale.

Librdkafka then stops fetching, and so does not learn new ends.
"""


class KafkaSource(Source):
    """All partitions of one or several topics, named ``topic[0]`` and so on.

    ``start`` is the position of a partition without a committed offset: ``"earliest"``,
    ``"latest"``, or a time (ISO 8601, UTC without a time zone). ``on_lost`` decides when the
    committed offset is lost, because its record was deleted, or its topic was deleted and
    recreated: ``"stop"`` reports it and reads the other partitions, ``"earliest"`` and ``"latest"``
    continue there.

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
        is_time = start not in ("earliest", "latest")
        self._start_ms = start_time_ms(start) if is_time else None

    def open(self, conf: Mapping[str, Any], context: Any) -> None:
        """Create the consumer, which connects in the background."""
        with client_library("kafka"):
            import confluent_kafka
        self._kafka = confluent_kafka
        settings = client_settings(conf, "kafka.")
        check_settings(settings)
        self.brokers: str = settings["bootstrap.servers"]
        self.system = f"Kafka at {self.brokers}"
        # In the metadata of committed offsets, and the default id of the client.
        self._label = f"{context.topology_id} task {context.task_id}"
        consumer_settings = {**default_settings(context, self._label, settings), **settings}
        self._may_write = context.may_write
        self._reset()
        self._outage = Outage(self.brokers)
        self._requests = BrokerRequests(self._add_error)
        self._consumer = confluent_kafka.Consumer(
            {
                **consumer_settings,
                **FIXED_SETTINGS,
                "error_cb": self._add_error,
                "logger": LibraryLog(_log),
            }
        )
        # Another client for requests: calls of one client wait for each other.
        self._requester = confluent_kafka.Consumer(
            {**consumer_settings, **FIXED_SETTINGS, "log_level": 0}
        )
        self._reads = BrokerReads(confluent_kafka, self._requester, self.start, self._start_ms)
        self._topic_ids = TopicIds(confluent_kafka, consumer_settings, self.topics)
        self._policies = CleanupPolicies(confluent_kafka, self._topic_ids.admin, self.topics)
        self._late = Event()
        """Set when the task may have another owner: then no offset is committed."""

    def _reset(self) -> None:
        """Create the state of one task: no partition is assigned, and no response has come."""
        self._errors: deque[Exception] = deque(maxlen=100)
        """Errors that the next :meth:`read` returns, the newest 100."""
        self._partitions: list[str] | None = None
        """All partitions of the topics, those without a leader last; ``None``: no response yet."""
        self._first: list[str] = []
        """Partitions of the first response.

        Later ones are new: ``latest`` must not skip their records.
        """
        self._assigned: set[str] = set()
        """Own partitions that the consumer reads."""
        self._waiting: set[str] = set()
        """Own partitions whose position is requested, or lost."""
        self._paused: set[str] = set()
        """Partitions that the consumer does not fetch, because the spout has enough records."""
        self._to_commit: dict[str, int] = {}
        """Partition -> offset before which all is finished."""
        self._stored: dict[str, CommittedPosition] = {}
        """Partition -> position that the brokers have, by their last response."""
        self._read_ids: dict[str, str] = {}
        """Partition -> id of the topic in which its position is valid."""
        self._interrupted: dict[str, CommittedPosition] = {}
        """Partition whose reading was interrupted -> position before which all was finished."""
        self._recreated: set[str] = set()
        """Partitions of which the spout may still have records of a deleted topic."""
        self._ends: dict[str, int] = {}
        """Partition -> its end by the last request; for the lag of those that are not fetched."""
        self._next_lookup = 0.0
        """Time from which on the positions of waiting partitions are requested once more."""
        self._read_at = 0.0
        """Time of the last :meth:`read`."""
        self._closed = False

    def _process_responses(self) -> None:
        """Handle the responses that have arrived, and make the next request."""
        was_answered = self._topic_ids.is_answered
        if self._topic_ids.poll():
            self._on_topic_ids()
            if not was_answered:
                # No position is requested before the ids are known: it is due now.
                self._next_lookup = 0.0
        self._requests.process()

    def _add_error(self, error: Any) -> None:
        """Return an error of the library, or of a request, from the next :meth:`read`."""
        is_outage = self._outage.is_under_way
        readable = readable_error(error, self._kafka, self.brokers, is_outage=is_outage)
        if isinstance(readable, Unavailable):
            self._outage.on_error(time.monotonic())
        self._errors.append(readable)

    def _on_answer(self) -> None:
        """Report the end of an outage, after a response of a broker."""
        recovered = self._outage.on_response(time.monotonic())
        if recovered is not None:
            self._errors.append(recovered)

    def _topic_partition(self, name: str, offset: int = -1001, metadata: str = "") -> Any:
        return topic_partition(self._kafka, name, offset, metadata)

    # -- ids of topics -----------------------------------------------------------------------------

    def _on_topic_ids(self) -> None:
        """Interrupt partitions whose topic was deleted and recreated."""
        for name in [*self._assigned, *self._waiting]:
            current_id = self._topic_ids.of(topic_of(name))
            if is_recreated(self._read_ids.get(name), current_id):
                self._interrupt(name)
                self._recreated.add(name)
                self._to_commit.pop(name, None)
                self._stored.pop(name, None)
                self._read_ids.pop(name)
            elif current_id is not None and name in self._assigned:
                self._read_ids[name] = current_id

    def _interrupt(self, name: str) -> None:
        """Stop reading a partition until its position was requested once more.

        The records that librdkafka has fetched of it are discarded.
        """
        # Without an entry reading has not begun, or the position of an earlier interruption stays.
        if name in self._to_commit:
            stored = self._stored.get(name)
            offset = self._to_commit[name] if stored is None else stored.offset
            self._interrupted[name] = CommittedPosition(offset, self._read_ids.get(name))
        if name in self._assigned:
            self._unassign({name})
        self._waiting.add(name)
        self._next_lookup = 0.0

    def _unassign(self, names: set[str]) -> None:
        """Stop fetching assigned partitions.

        Librdkafka keeps the pause of a partition beyond its assignment: paused ones are resumed.
        """
        paused = self._paused & names
        if paused:
            self._consumer.resume([self._topic_partition(name) for name in paused])
        self._consumer.incremental_unassign([self._topic_partition(name) for name in names])
        self._assigned -= names
        self._paused -= names

    def recreated(self) -> Collection[str]:
        """Partitions whose topic was deleted and recreated.

        Each is returned once. Its reading continues only after this call.
        """
        names = self._recreated
        self._recreated = set()
        return names

    # -- partitions --------------------------------------------------------------------------------

    def partitions(self) -> Collection[str] | None:
        """The partitions of the last response; a newer one is requested.

        ``None`` before the first response. Until then an error of the client is raised here, since
        the spout does not call :meth:`read`.
        """
        self._process_responses()
        if self._partitions is None:
            # Calls error_cb, which adds the client's errors.
            self._consumer.poll(0)
            if self._errors:
                raise self._errors.pop()
        self._topic_ids.request()
        read_topics = partial(self._reads.topics, self.topics)
        self._requests.add("partitions", read_topics, self._on_topics)
        self._name_compacted()
        assigned = [
            self._topic_partition(name) for name in self._to_commit if name in self._assigned
        ]
        if assigned:
            # A late commit of the earlier reader may have replaced that of this task.
            read_stored = partial(self._requester.committed, assigned, timeout=REQUEST_SECS)
            self._requests.add("stored", read_stored, self._on_committed_offsets)
        self._process_responses()
        return self._partitions

    def _on_topics(self, responses: Sequence[Any]) -> None:
        """Store the names of all partitions.

        Raises :class:`InvalidRequest` if a topic cannot be read; the former names stay.
        """
        self._partitions = partition_names(self._kafka, responses)
        self._first = self._first or self._partitions
        self._on_answer()

    def _name_compacted(self) -> None:
        """Name topics that have become compacted."""
        for topic in self._policies.poll(time.monotonic()):
            self._errors.append(
                RuntimeError(
                    f"topic {topic!r} is compacted now: Kafka may delete records that are not read "
                    "yet, when a later one has their key, and writes tombstones, on which on_null "
                    "of the spout decides. Set its cleanup.policy to delete if all are needed"
                )
            )

    def assign(self, mine: Mapping[str, Any]) -> None:
        """Read these partitions, as soon as their committed offsets are known."""
        removed = self._assigned - mine.keys()
        if removed:
            self._unassign(removed)
        self._waiting = mine.keys() - self._assigned
        for values in (self._to_commit, self._read_ids, self._interrupted):
            for name in values.keys() - mine.keys():
                del values[name]
        self._recreated &= mine.keys()
        self._next_lookup = 0.0

    def _begin(
        self,
        name: str,
        requested_id: str | None,
        position: tuple[CommittedPosition | None, int, int, Any],
    ) -> None:
        """Read a partition from the position of ``BrokerReads.position``.

        ``requested_id``: id of its topic when the position was requested. No effect if the
        partition no longer waits, or its topic may have been recreated since: then the position is
        requested once more. Raises :class:`InvalidRequest` if the position is lost and ``on_lost``
        is ``"stop"``; the partition then waits, until another position is committed.
        """
        if name not in self._waiting:
            return
        topic_id = self._topic_ids.of(topic_of(name))
        if name in self._recreated or topic_id != requested_id:
            # The response may be about the topic before.
            self._next_lookup = 0.0
            return
        if not self._topic_ids.is_answered:
            return
        stored, first, end, start = position
        self._ends[name] = end
        if stored is None:
            self._stored.pop(name, None)
        else:
            self._stored[name] = stored
        # Kafka deletes the offsets of a group with their topic; this task remembers the last one.
        committed = stored or self._interrupted.get(name)
        begin = start_position(committed, topic_id, first, end, start=start, on_lost=self.on_lost)
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
        # Committed at once: from now on it can be lost, and a later start begins here.
        self._to_commit[name] = begin.offset
        self._consumer.incremental_assign([self._topic_partition(name, begin.offset)])
        self._waiting.discard(name)
        self._assigned.add(name)

    # -- reading -----------------------------------------------------------------------------------

    def read(
        self, most: int, full: Collection[str]
    ) -> Sequence[SourceRecord | PartitionEnd | Exception]:
        """The records that librdkafka has fetched."""
        self._process_responses()
        now = time.monotonic()
        self._read_at = now
        if self._waiting and self._topic_ids.is_answered and now >= self._next_lookup:
            self._next_lookup = now + self.refresh_secs
            self._request_positions()
        if self._paused or full:
            self._pause(self._assigned.intersection(full))
        records: list[SourceRecord | PartitionEnd | Exception] = []
        for message in cast("list[Any]", self._consumer.consume(most, 0)):
            name = partition_name(message.topic(), message.partition())
            error = message.error()
            if error is None:
                records.append(self._record_of(name, message))
            elif error.code() == self._kafka.KafkaError._PARTITION_EOF:
                records.append(PartitionEnd(name, message.offset()))
            elif (
                error.code() == self._kafka.KafkaError._AUTO_OFFSET_RESET and name in self._assigned
            ):
                # Retention has deleted the record, or the topic is a new one, which its id shows.
                self._interrupt(name)
                self._topic_ids.request_newer()
            else:
                self._add_error(error)
        records += self._errors
        self._errors.clear()
        return records

    def _request_positions(self) -> None:
        """Request the positions of the partitions that wait for one."""
        for name in self._partitions or ():
            if name in self._waiting:
                begin = partial(self._begin, name, self._topic_ids.of(topic_of(name)))
                read_position = partial(self._reads.position, name, name not in self._first)
                self._requests.add(f"position of {name}", read_position, begin)

    def _record_of(self, name: str, message: Any) -> SourceRecord:
        kind, at_ms = message.timestamp()
        headers = message.headers() or ()
        return SourceRecord(
            message.value(),
            name,
            after=message.offset() + 1,
            key=message.key(),
            at_ms=at_ms if kind else None,
            headers=dict(headers),
            topic_id=self._read_ids.get(name),
            header_list=headers,
        )

    def _pause(self, full: set[str]) -> None:
        """Pause these assigned partitions, and resume all others."""
        paused = self._paused & self._assigned
        if full - paused:
            self._consumer.pause([self._topic_partition(name) for name in full - paused])
        if paused - full:
            self._consumer.resume([self._topic_partition(name) for name in paused - full])
        self._paused = full

    def commit(self, after: Mapping[str, Any]) -> None:
        """Store offsets; the next call retries those that could not be stored."""
        self._process_responses()
        for name, offset in after.items():
            if name in self._to_commit:
                self._to_commit[name] = offset
        changed: dict[str, CommittedPosition] = {}
        for name, offset in self._to_commit.items():
            position = CommittedPosition(offset, self._read_ids.get(name))
            if self._stored.get(name) != position:
                changed[name] = position
        if changed:
            # A close cannot wait for ids: its positions have the id of their topic.
            checks_ids = self._topic_ids.has_ids and not self._closed
            send = partial(self._send_commit, changed, checks_ids)
            self._requests.add("commit", send, self._on_commit_response)
            self._process_responses()

    def _send_commit(
        self, positions: Mapping[str, CommittedPosition], checks_ids: bool
    ) -> tuple[Mapping[str, str] | None, Sequence[Any]]:
        """Commit positions, except those of a deleted topic; it waits.

        Returns the ids of the topics, ``None`` if not requested, and the committed offsets.
        """
        topic_ids = self._topic_ids.read() if checks_ids else None
        current_ids = topic_ids or {}
        offsets: list[Any] = []
        for name, position in positions.items():
            if not is_recreated(position.topic_id, current_ids.get(topic_of(name))):
                metadata = position_metadata(self._label, position.topic_id)
                offsets.append(self._topic_partition(name, position.offset, metadata))
        has_lost_task = checks_ids and (self._late.is_set() or not self._may_write())
        if not offsets or has_lost_task:
            return topic_ids, []
        return topic_ids, self._requester.commit(offsets=offsets, asynchronous=False)

    def _on_commit_response(self, response: tuple[Mapping[str, str] | None, Sequence[Any]]) -> None:
        topic_ids, offsets = response
        if topic_ids is not None:
            self._topic_ids.update(topic_ids)
            self._on_topic_ids()
        self._on_committed_offsets(offsets)

    def _on_committed_offsets(self, offsets: Sequence[Any]) -> None:
        """Store the positions that the brokers have; a negative offset is none."""
        for entry in offsets:
            name = partition_name(entry.topic, entry.partition)
            if entry.error is not None:
                self._add_error(entry.error)
            elif entry.offset >= 0:
                self._stored[name] = CommittedPosition(entry.offset, topic_id_in(entry.metadata))
            else:
                self._stored.pop(name, None)

    def _committed_offset(self, name: str) -> int | None:
        """Offset in the current topic before which all is finished; ``None``: unknown."""
        # Kafka deletes the offsets of a group with their topic: then the position counts that was
        # valid before the interruption.
        position = self._stored.get(name) or self._interrupted.get(name)
        if position is None:
            return None
        # No record of a recreated topic is finished.
        if is_recreated(position.topic_id, self._topic_ids.of(topic_of(name))):
            return 0
        return position.offset

    def lag(self) -> Mapping[str, Lag]:
        """Number of records after the committed offset, by the newest known ends.

        The lag is unknown for a partition without a known end or committed offset.
        """
        lags: dict[str, Lag] = {}
        unfetched: list[str] = []
        is_stale = time.monotonic() - self._read_at > _STALE_SECS
        for name in (*self._assigned, *self._waiting):
            end = -1
            if name in self._assigned and name not in self._paused:
                # Cached: the end in the last response to a fetch, negative before the first.
                _, end = self._consumer.get_watermark_offsets(
                    self._topic_partition(name), cached=True
                )
            committed = self._committed_offset(name)
            if (end < 0 or is_stale) and committed is not None:
                unfetched.append(name)
                end = max(end, self._ends.get(name, -1))
            if end < 0 or committed is None:
                lags[name] = Lag(None)
            else:
                lags[name] = Lag(max(0, end - committed))
        if unfetched:
            # A fetch, which would update the ends, does not run for these partitions.
            self._requests.add("ends", partial(self._reads.ends, unfetched), self._ends.update)
        return lags

    def close(self) -> None:
        """Store the finished positions, and close the consumer, in a thread.

        The loop waits for the thread for 50 ms: positions that were not sent to the brokers by then
        are not stored, since the task may have another owner.
        """
        if self._closed:
            return
        self._closed = True
        # The thread below waits for the request that is under way, and then makes one more commit.
        self._requests.clear()
        stored = Event()

        def end() -> None:
            try:
                self._await_pending()
                if not self._late.is_set() and self._may_write():
                    self.commit({})
                self._await_pending()
            finally:
                stored.set()
                self._requester.close()
                self._consumer.close()
                self._policies.close()
                self._topic_ids.close()

        Thread(target=end, name="kafka-close", daemon=True).start()
        if not stored.wait(_CLOSE_SECS):
            self._late.set()

    def _await_pending(self) -> None:
        """Wait for the request that is under way, and process its response."""
        self._requests.wait_for_response()
        self._process_responses()
