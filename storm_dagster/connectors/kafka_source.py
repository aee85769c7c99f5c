"""Topics of Kafka as a source, read on the worker's loop: no call there waits for a broker.

Tasks are assigned partitions by their index, without a consumer group's protocol: leases say
already who reads. Positions are committed as offsets of the group, so that Kafka's own tools see
them. An offset counts in one topic only: when a topic was deleted and created again, which its id
shows, the position is lost.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import datetime, timezone
from functools import partial
from threading import Event, Thread
from typing import Any, ClassVar, Literal, cast

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
from storm_dagster.connectors.kafka_topic_ids import TopicIds
from storm_dagster.connectors.settings import assets_of, client_library, client_settings
from storm_dagster.connectors.sources import Lag, Source
from storm_dagster.connectors.tracking import PartitionEnd, SourceRecord
from storm_dagster.host.futures import in_thread
from storm_dagster.model.errors import InvalidRequest, InvalidTopology

_log = logging.getLogger(__name__)
_OURS = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
}
_ASK_SECS, _CLOSE_SECS = 10.0, 0.05
_STALE_SECS = 1.0
"""Time without a read, after which librdkafka may fetch nothing more, and learn of no new end of a
partition.
"""


class KafkaSource(Source):
    """All partitions of one or several topics, named ``topic[0]`` and so on.

    ``start``: where a partition begins that has no committed offset: ``"earliest"``, ``"latest"``,
    or a time (ISO 8601, UTC unless it says otherwise). ``on_lost``: what happens when the committed
    offset is lost, because its record was deleted, or its topic was deleted and created again:
    ``"stop"`` reports it and reads the other partitions, else ``"earliest"`` or ``"latest"``.

    Keys of the conf that begin with ``kafka.`` are settings of librdkafka, at least
    ``kafka.bootstrap.servers``. The group is ``kafka.group.id``, by default
    ``<topology>.<component>``. A task fetches at most 16 MiB and two answers ahead; raise
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
                at = datetime.fromisoformat(start)
            except ValueError:
                what = '"earliest", "latest", or a time such as "2026-11-24T10:00:00"'
                raise InvalidTopology(
                    f"start of a KafkaSource is {start!r}: make it {what}"
                ) from None
            self._start_ms = int(
                (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp() * 1000
            )

    def open(self, conf: Mapping[str, Any], context: Any) -> None:
        """Make the consumer, which connects by itself."""
        with client_library("kafka"):
            import confluent_kafka
        self._kafka = confluent_kafka
        settings = client_settings(conf, "kafka.")
        if "bootstrap.servers" not in settings:
            raise InvalidRequest(
                "no Kafka broker is known: set kafka.bootstrap.servers in the conf of the topology"
            )
        if ours := sorted(_OURS.keys() & settings.keys()):
            raise InvalidRequest(
                f"kafka.{ours[0]} is set by the source itself: remove it from the conf"
            )
        self.brokers: str = settings["bootstrap.servers"]
        self._label = f"{context.topology_id} task {context.task_id}"
        defaults = {
            "group.id": f"{context.topology_name}.{context.component}",
            "client.id": self._label.replace(" ", "-"),
            "queued.max.messages.kbytes": 16_384,
            # A small record takes 400 bytes, which are not counted: so the queue is bounded by what
            # two answers bring.
            "queued.min.messages": 10_000,
            # Librdkafka wants no less than this of a sink.
            **({} if "message.max.bytes" in settings else {"fetch.max.bytes": 1_000_000}),
            "fetch.message.max.bytes": 131_072,
            "fetch.queue.backoff.ms": 50,
            # As long may a partition wait that was full, until the others' fetch is answered.
            "fetch.wait.max.ms": 100,
            # A broker that hangs would be an error after a minute only.
            "socket.timeout.ms": 10_000,
        }
        self._errors: deque[Exception] = deque(maxlen=100)
        self._known: list[str] | None = None
        self._first: list[str] = []
        """Partitions of the first answer: what comes later is new, and has no records that
        ``latest`` would leave out.
        """
        self._assigned: set[str] = set()
        self._waiting: set[str] = set()
        """Partitions whose position is asked for, or lost."""
        self._paused: set[str] = set()
        self._may_write = context.may_write
        self._wanted: dict[str, int] = {}
        self._stored: dict[str, CommittedPosition] = {}
        self._read_ids: dict[str, str] = {}
        """Partition -> id of the topic in which its position counts."""
        self._interrupted: dict[str, CommittedPosition] = {}
        """Partition -> position at which its reading ended, because it is lost."""
        self._recreated: set[str] = set()
        """Partitions of which the spout may still have records of a deleted topic."""
        self._ends: dict[str, int] = {}
        self._next_lookup = self._read_at = 0.0
        self._closed = False
        self._asked: deque[tuple[str, Callable[[], Any], Callable[[Any], None]]] = deque()
        self._answer: tuple[str, Future[Any], Callable[[Any], None]] | None = None
        on_error = {
            "error_cb": lambda error: self._errors.append(self._readable(error)),
            "logger": _log,
        }
        self._consumer = confluent_kafka.Consumer({**defaults, **settings, **_OURS, **on_error})
        # Calls of one client wait for each other.
        self._asker = confluent_kafka.Consumer({**defaults, **settings, **_OURS, "log_level": 0})
        self._topic_ids = TopicIds(confluent_kafka, {**defaults, **settings}, self.topics)
        self._late = Event()
        """Set when the task may have another owner: then nothing is committed."""

    # -- questions, in a thread of their own while they last ---------------------------------------

    def _ask(self, what: str, question: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Ask the brokers without waiting, one question after the other, commits first, the same
        one once.
        """
        if (self._answer is None or self._answer[0] != what) and all(
            name != what for name, *_ in self._asked
        ):
            (self._asked.appendleft if what == "commit" else self._asked.append)(
                (what, question, then)
            )

    def _serve(self) -> None:
        """Take the answers that are there, and ask the next question."""
        was_answered = self._topic_ids.is_answered
        if self._topic_ids.take():
            self._on_topic_ids()
            if not was_answered:
                # Partitions wait for it.
                self._next_lookup = 0.0
        if self._answer is not None and self._answer[1].done():
            (_, future, then), self._answer = self._answer, None
            try:
                then(future.result())
            except Exception as error:
                self._errors.append(self._readable(error))
        if self._answer is None and self._asked:
            what, question, then = self._asked.popleft()
            self._answer = (what, in_thread(f"kafka-{what}", question), then)

    def _readable(self, error: Any) -> Exception:
        return readable_error(error, self._kafka, self.brokers)

    def _at(self, name: str, offset: int = -1001, metadata: str = "") -> Any:
        return self._kafka.TopicPartition(topic_of(name), number_of(name), offset, metadata)

    # -- ids of topics -----------------------------------------------------------------------------

    def _on_topic_ids(self) -> None:
        """Interrupt partitions whose topic was deleted and created again."""
        for name in [*self._assigned, *self._waiting]:
            current_id = self._topic_ids.of(topic_of(name))
            if is_recreated(self._read_ids.get(name), current_id):
                self._interrupt(name)
                self._recreated.add(name)
                self._wanted.pop(name, None)
                self._stored.pop(name, None)
                self._read_ids.pop(name)
            elif current_id is not None and name in self._assigned:
                self._read_ids[name] = current_id

    def _interrupt(self, name: str) -> None:
        """Read no more of a partition until its position was asked for again.

        What librdkafka has fetched of it is discarded.
        """
        if name in self._wanted:
            stored = self._stored.get(name)
            offset = self._wanted[name] if stored is None else stored.offset
            self._interrupted[name] = CommittedPosition(offset, self._read_ids.get(name))
        if name in self._assigned:
            self._consumer.incremental_unassign([self._at(name)])
        self._assigned.discard(name)
        self._paused.discard(name)
        self._waiting.add(name)
        self._next_lookup = 0.0

    def recreated(self) -> Collection[str]:
        """Partitions whose topic was deleted and created again.

        They are read again only after this call.
        """
        names = self._recreated
        self._recreated = set()
        return names

    # -- partitions --------------------------------------------------------------------------------

    def partitions(self) -> Collection[str] | None:
        """Those of the last answer; it is asked for again."""
        self._serve()
        if self._known is None:
            self._consumer.poll(0)
            if self._errors:
                raise self._errors.pop()
        self._topic_ids.ask()
        self._ask(
            "partitions",
            lambda: [self._asker.list_topics(name, timeout=_ASK_SECS) for name in self.topics],
            self._on_topics,
        )
        if names := [self._at(name) for name in self._wanted if name in self._assigned]:
            # A commit of a reader before, which was on its way, may have come after ours.
            self._ask(
                "stored", lambda: self._asker.committed(names, timeout=_ASK_SECS), self._on_commit
            )
        self._serve()
        return self._known

    def _on_topics(self, found: Sequence[Any]) -> None:
        names: list[tuple[bool, str]] = []
        for metadata in found:
            for topic, one in metadata.topics.items():
                if one.error is not None:
                    why = one.error.str()
                    raise InvalidRequest(
                        f"topic {topic!r} cannot be read, {why}: create it, or change topics"
                    )
                names += [
                    (part.leader < 0, partition_name(topic, number))
                    for number, part in one.partitions.items()
                ]
        # Those without a leader last: whoever asks for their positions waits.
        self._known = [name for _, name in sorted(names)]
        self._first = self._first or self._known

    def assign(self, mine: Mapping[str, Any]) -> None:
        """Read these partitions, as soon as their committed offsets are known."""
        gone = self._assigned - mine.keys()
        if gone:
            self._consumer.incremental_unassign([self._at(name) for name in gone])
        self._assigned -= gone
        self._waiting = mine.keys() - self._assigned
        self._wanted = {name: offset for name, offset in self._wanted.items() if name in mine}
        self._read_ids = {
            name: topic_id for name, topic_id in self._read_ids.items() if name in mine
        }
        self._interrupted = {
            name: position for name, position in self._interrupted.items() if name in mine
        }
        self._recreated &= mine.keys()
        self._next_lookup = 0.0

    def _read_position(self, name: str) -> tuple[CommittedPosition | None, int, int, Any]:
        """(committed position, first, end, where to start) of a partition; it waits."""
        consumer, start = self._asker, cast("Any", self.start)
        (one,) = consumer.committed([self._at(name)], timeout=_ASK_SECS)
        if one.error is not None:
            raise self._kafka.KafkaException(one.error)
        first, end = consumer.get_watermark_offsets(one, timeout=_ASK_SECS)
        if start == "latest" and name not in self._first:
            start = "earliest"
        elif one.offset < 0 and start not in ("earliest", "latest"):
            start = consumer.offsets_for_times([self._at(name, self._start_ms)], timeout=_ASK_SECS)[
                0
            ].offset
            start = end if start < 0 else start
        committed = (
            CommittedPosition(one.offset, topic_id_in(one.metadata)) if one.offset >= 0 else None
        )
        return committed, first, end, start

    def _begin(
        self,
        name: str,
        asked_id: str | None,
        position: tuple[CommittedPosition | None, int, int, Any],
    ) -> None:
        """Read a partition from the position that ``_read_position`` returned.

        ``asked_id``: id of its topic when the position was asked for.
        """
        if name not in self._waiting:
            return
        topic_id = self._topic_ids.of(topic_of(name))
        if name in self._recreated or topic_id != asked_id:
            # The answer may be about the topic before.
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
        # Kafka deletes the offsets of a group with their topic; the last one is here.
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
        self._wanted[name] = begin.offset
        self._consumer.incremental_assign([self._at(name, begin.offset)])
        self._waiting.discard(name)
        self._assigned.add(name)

    # -- reading -----------------------------------------------------------------------------------

    def read(
        self, most: int, full: Collection[str]
    ) -> Sequence[SourceRecord | PartitionEnd | Exception]:
        """What librdkafka has fetched."""
        self._serve()
        self._read_at = time.monotonic()
        if (
            self._waiting
            and self._topic_ids.is_answered
            and (now := time.monotonic()) >= self._next_lookup
        ):
            self._next_lookup = now + self.refresh_secs
            for name in filter(self._waiting.__contains__, self._known or ()):
                then = partial(self._begin, name, self._topic_ids.of(topic_of(name)))
                self._ask(f"position of {name}", partial(self._read_position, name), then)
        if self._paused or full:
            self._pause(self._assigned.intersection(full))
        found: list[SourceRecord | PartitionEnd | Exception] = []
        for message in cast("list[Any]", self._consumer.consume(most, 0)):
            name = partition_name(message.topic(), message.partition())
            error = message.error()
            if error is None:
                kind, at_ms = message.timestamp()
                value, key, headers = message.value(), message.key(), dict(message.headers() or ())
                topic_id = self._read_ids.get(name)
                after = message.offset() + 1
                at_ms = at_ms if kind else None
                found.append(
                    SourceRecord(value, name, after, key, at_ms, headers, topic_id=topic_id)
                )
            elif error.code() == self._kafka.KafkaError._PARTITION_EOF:
                found.append(PartitionEnd(name, message.offset()))
            elif (
                error.code() == self._kafka.KafkaError._AUTO_OFFSET_RESET and name in self._assigned
            ):
                # The reader was overtaken by retention, or the topic is a new one: its id says
                # which.
                self._interrupt(name)
                self._topic_ids.ask_again()
            else:
                self._errors.append(self._readable(error))
        found += self._errors
        self._errors.clear()
        return found

    def _pause(self, full: set[str]) -> None:
        paused = self._paused & self._assigned
        if full - paused:
            self._consumer.pause([self._at(name) for name in full - paused])
        if paused - full:
            self._consumer.resume([self._at(name) for name in paused - full])
        self._paused = full

    def commit(self, after: Mapping[str, Any]) -> None:
        """Store offsets; what could not be stored is tried again at the next call."""
        self._serve()
        self._wanted.update(
            (name, offset) for name, offset in after.items() if name in self._wanted
        )
        positions = {
            name: CommittedPosition(offset, self._read_ids.get(name))
            for name, offset in self._wanted.items()
        }
        changed = {
            name: position
            for name, position in positions.items()
            if self._stored.get(name) != position
        }
        if changed:
            # A close cannot wait: its positions carry the id of their topic.
            checks_ids = self._topic_ids.is_given and not self._closed
            self._ask("commit", partial(self._send_commit, changed, checks_ids), self._on_sent)
            self._serve()

    def _send_commit(
        self, positions: Mapping[str, CommittedPosition], checks_ids: bool
    ) -> tuple[Mapping[str, str] | None, Sequence[Any]]:
        """Commit positions, but none of a topic that was deleted; it waits.

        Returns the ids of the topics, ``None`` if not asked for, and the committed offsets.
        """
        topic_ids = self._topic_ids.read() if checks_ids else None
        current_ids = topic_ids or {}
        offsets: list[Any] = []
        for name, position in positions.items():
            if not is_recreated(position.topic_id, current_ids.get(topic_of(name))):
                offsets.append(
                    self._at(
                        name, position.offset, position_metadata(self._label, position.topic_id)
                    )
                )
        has_lost_task = checks_ids and (self._late.is_set() or not self._may_write())
        if not offsets or has_lost_task:
            return topic_ids, []
        return topic_ids, self._asker.commit(offsets=offsets, asynchronous=False)

    def _on_sent(self, answer: tuple[Mapping[str, str] | None, Sequence[Any]]) -> None:
        topic_ids, offsets = answer
        if topic_ids is not None:
            self._topic_ids.update(topic_ids)
            self._on_topic_ids()
        self._on_commit(offsets)

    def _on_commit(self, offsets: Sequence[Any]) -> None:
        for one in offsets:
            name = partition_name(one.topic, one.partition)
            if one.error is not None:
                self._errors.append(self._readable(one.error))
            elif one.offset >= 0:
                self._stored[name] = CommittedPosition(one.offset, topic_id_in(one.metadata))
            else:
                self._stored.pop(name, None)

    def _committed_offset(self, name: str) -> int | None:
        """Offset in the current topic before which all is finished; ``None``: unknown."""
        position = self._stored.get(name) or self._interrupted.get(name)
        if position is None:
            return None
        # Of a topic that was created again no record is finished.
        if is_recreated(position.topic_id, self._topic_ids.of(topic_of(name))):
            return 0
        return position.offset

    def lag(self) -> Mapping[str, Lag]:
        """Records after the committed offset, by the newest ends that are known."""
        found: dict[str, Lag] = {}
        asked: list[str] = []
        stale = time.monotonic() - self._read_at > _STALE_SECS
        for name in (*self._assigned, *self._waiting):
            end = -1
            if name in self._assigned and name not in self._paused:
                end = self._consumer.get_watermark_offsets(self._at(name), cached=True)[1]
            stored = self._committed_offset(name)
            if (end < 0 or stale) and stored is not None:
                asked.append(name)
                end = max(end, self._ends.get(name, -1))
            found[name] = Lag(None if end < 0 or stored is None else max(0, end - stored))
        if asked:
            # Nothing is fetched of them now, which would bring their ends.
            read_end = partial(self._asker.get_watermark_offsets, timeout=_ASK_SECS)
            self._ask(
                "ends",
                lambda: {name: read_end(self._at(name))[1] for name in asked},
                self._ends.update,
            )
        return found

    def close(self) -> None:
        """Store what is to be committed, and close the consumer, in a thread. The loop waits for it
        for 50 ms: what was not sent to the brokers by then is not stored, since the task may have
        another owner.
        """
        if self._closed:
            return
        self._closed = True
        self._asked.clear()
        stored = Event()

        def end() -> None:
            try:
                for last in (False, True):
                    if self._answer is not None:
                        wait([self._answer[1]])
                    self._serve()
                    if not last and not self._late.is_set() and self._may_write():
                        self.commit({})
            finally:
                stored.set()
                self._asker.close()
                self._consumer.close()
                self._topic_ids.close()

        Thread(target=end, name="kafka-close", daemon=True).start()
        if not stored.wait(_CLOSE_SECS):
            self._late.set()
