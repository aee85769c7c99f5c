"""Topics of Kafka as a source, read on the worker's loop: no call there waits for a broker.

Tasks are assigned partitions by their index, without a consumer group's protocol: leases say already who reads. Positions
are committed as offsets of the group, so that Kafka's own tools see them.
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

from storm_dagster.connectors.settings import assets_of, client_library, client_settings
from storm_dagster.connectors.sources import Lag, Source
from storm_dagster.connectors.tracking import PartitionEnd, SourceRecord, first_position
from storm_dagster.model.errors import InvalidRequest, InvalidTopology, Unavailable
from storm_dagster.model.futures import in_thread

_log = logging.getLogger(__name__)
_OURS = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
}
_ASK_SECS, _CLOSE_SECS = 10.0, 0.05
_STALE_SECS = 1.0
"""Time without a read, after which librdkafka may fetch nothing more, and learn of no new end of a partition."""
_AWAY = ("_ALL_BROKERS_DOWN", "_TRANSPORT", "_TIMED_OUT", "_RESOLVE", "_WAIT_COORD", "REQUEST_TIMED_OUT")


class KafkaSource(Source):
    """All partitions of one or several topics, named ``topic[0]`` and so on.

    ``start``: where a partition begins that has no committed offset: ``"earliest"``, ``"latest"``, or a time (ISO 8601, UTC
    unless it says otherwise). ``on_lost``: what happens when the committed offset is not there any more: ``"stop"`` reports
    it and reads the other partitions, else ``"earliest"`` or ``"latest"``.

    Keys of the conf that begin with ``kafka.`` are settings of librdkafka, at least ``kafka.bootstrap.servers``. The group
    is ``kafka.group.id``, by default ``<topology>.<component>``. A task fetches at most 16 MiB and two answers
    ahead; raise ``kafka.fetch.max.bytes`` (1 MB) for brokers that are far away."""

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
        self.on_lost = on_lost
        self.start = start
        if on_lost not in ("stop", "earliest", "latest"):
            raise InvalidTopology(f'on_lost of a KafkaSource is {on_lost!r}: make it "stop", "earliest" or "latest"')
        if start not in ("earliest", "latest"):
            try:
                at = datetime.fromisoformat(start)
            except ValueError:
                what = '"earliest", "latest", or a time such as "2026-11-24T10:00:00"'
                raise InvalidTopology(f"start of a KafkaSource is {start!r}: make it {what}") from None
            self._start_ms = int((at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp() * 1000)

    def open(self, conf: Mapping[str, Any], context: Any) -> None:
        """Make the consumer, which connects by itself."""
        with client_library("kafka"):
            import confluent_kafka
        self._kafka = confluent_kafka
        settings = client_settings(conf, "kafka.")
        if "bootstrap.servers" not in settings:
            raise InvalidRequest("no Kafka broker is known: set kafka.bootstrap.servers in the conf of the topology")
        if ours := sorted(_OURS.keys() & settings.keys()):
            raise InvalidRequest(f"kafka.{ours[0]} is set by the source itself: remove it from the conf")
        self.brokers: str = settings["bootstrap.servers"]
        self._label = f"{context.topology_id} task {context.task_id}"
        defaults = {
            "group.id": f"{context.topology_name}.{context.component}",
            "client.id": self._label.replace(" ", "-"),
            "queued.max.messages.kbytes": 16_384,
            # A small record takes 400 bytes, which are not counted: so the queue is bounded by what two answers bring.
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
        """Partitions of the first answer: what comes later is new, and has no records that ``latest`` would leave out."""
        self._assigned: set[str] = set()
        self._waiting: set[str] = set()
        """Partitions whose position is asked for, or lost."""
        self._paused: set[str] = set()
        self._may_write = context.may_write
        self._wanted: dict[str, int] = {}
        self._stored: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._next_lookup = self._read_at = 0.0
        self._closed = False
        self._asked: deque[tuple[str, Callable[[], Any], Callable[[Any], None]]] = deque()
        self._answer: tuple[str, Future[Any], Callable[[Any], None]] | None = None
        on_error = {"error_cb": lambda error: self._errors.append(self._readable(error)), "logger": _log}
        self._consumer = confluent_kafka.Consumer({**defaults, **settings, **_OURS, **on_error})
        # Calls of one client wait for each other.
        self._asker = confluent_kafka.Consumer({**defaults, **settings, **_OURS, "log_level": 0})

    # -- questions, in a thread of their own while they last ------------------------------------------------

    def _ask(self, what: str, question: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Ask the brokers without waiting, one question after the other, commits first, the same one once."""
        if (self._answer is None or self._answer[0] != what) and all(name != what for name, *_ in self._asked):
            (self._asked.appendleft if what == "commit" else self._asked.append)((what, question, then))

    def _serve(self) -> None:
        """Take the answer, if it is there, and ask the next question."""
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
        inner = error.args[0] if isinstance(error, self._kafka.KafkaException) else error
        if isinstance(inner, self._kafka.KafkaError):
            if inner.name() in _AWAY:
                return Unavailable(f"Kafka at {self.brokers} does not answer: {inner.str()}; it is tried again")
            # Its name first: by that the spout tells errors apart.
            return RuntimeError(f"{inner.name()} of Kafka at {self.brokers}: {inner.str()}")
        return error

    def _at(self, name: str, offset: int = -1001, metadata: str = "") -> Any:
        topic, _, number = name[:-1].rpartition("[")
        return self._kafka.TopicPartition(topic, int(number), offset, metadata)

    # -- partitions -----------------------------------------------------------------------------------------

    def partitions(self) -> Collection[str] | None:
        """Those of the last answer; it is asked for again."""
        self._serve()
        if self._known is None:
            self._consumer.poll(0)
            if self._errors:
                raise self._errors.pop()
        self._ask(
            "partitions",
            lambda: [self._asker.list_topics(name, timeout=_ASK_SECS) for name in self.topics],
            self._on_topics,
        )
        if names := [self._at(name) for name in self._wanted if name in self._assigned]:
            # A commit of a reader before, which was on its way, may have come after ours.
            self._ask("stored", lambda: self._asker.committed(names, timeout=_ASK_SECS), self._on_commit)
        self._serve()
        return self._known

    def _on_topics(self, found: Sequence[Any]) -> None:
        names: list[tuple[bool, str]] = []
        for metadata in found:
            for topic, one in metadata.topics.items():
                if one.error is not None:
                    why = one.error.str()
                    raise InvalidRequest(f"topic {topic!r} cannot be read, {why}: create it, or change topics")
                names += [(part.leader < 0, _name_of(topic, number)) for number, part in one.partitions.items()]
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
        self._next_lookup = 0.0

    def _read_position(self, name: str) -> tuple[str, int | None, int, int, Any]:
        """(partition, committed offset, first, end, where to start); it waits."""
        consumer, start = self._asker, cast("Any", self.start)
        (one,) = consumer.committed([self._at(name)], timeout=_ASK_SECS)
        if one.error is not None:
            raise self._kafka.KafkaException(one.error)
        first, end = consumer.get_watermark_offsets(one, timeout=_ASK_SECS)
        if start == "latest" and name not in self._first:
            start = "earliest"
        elif one.offset < 0 and start not in ("earliest", "latest"):
            start = consumer.offsets_for_times([self._at(name, self._start_ms)], timeout=_ASK_SECS)[0].offset
            start = end if start < 0 else start
        return name, one.offset if one.offset >= 0 else None, first, end, start

    def _begin(self, found: tuple[str, int | None, int, int, Any]) -> None:
        name, committed, first, end, start = found
        if name not in self._waiting:
            return
        self._ends[name] = end
        if committed is not None:
            self._stored[name] = committed
        begin = first_position(committed, first, end, start=start, on_lost=self.on_lost, name=name)
        if committed is not None and begin != committed:
            why = f"its committed position {committed} was lost, and on_lost is {self.on_lost}"
            self._errors.append(RuntimeError(f"{name} goes on at {begin}: {why}"))
        # Committed at once: from now on it can be lost, and a later start begins here.
        self._wanted[name] = begin
        self._consumer.incremental_assign([self._at(name, begin)])
        self._waiting.discard(name)
        self._assigned.add(name)

    # -- reading --------------------------------------------------------------------------------------------

    def read(self, most: int, full: Collection[str]) -> Sequence[SourceRecord | PartitionEnd | Exception]:
        """What librdkafka has fetched."""
        self._serve()
        self._read_at = time.monotonic()
        if self._waiting and (now := time.monotonic()) >= self._next_lookup:
            self._next_lookup = now + self.refresh_secs
            for name in filter(self._waiting.__contains__, self._known or ()):
                self._ask(f"position of {name}", partial(self._read_position, name), self._begin)
        if self._paused or full:
            self._pause(self._assigned.intersection(full))
        found: list[SourceRecord | PartitionEnd | Exception] = []
        for message in cast("list[Any]", self._consumer.consume(most, 0)):
            name = _name_of(message.topic(), message.partition())
            error = message.error()
            if error is None:
                kind, at_ms = message.timestamp()
                value, key, headers = message.value(), message.key(), dict(message.headers() or ())
                found.append(SourceRecord(value, name, message.offset() + 1, key, at_ms if kind else None, headers))
            elif error.code() == self._kafka.KafkaError._PARTITION_EOF:
                found.append(PartitionEnd(name, message.offset()))
            elif error.code() == self._kafka.KafkaError._AUTO_OFFSET_RESET and name in self._assigned:
                # The reader was overtaken by retention, or the topic is a new one.
                self._consumer.incremental_unassign([self._at(name)])
                self._assigned.discard(name)
                self._waiting.add(name)
                self._paused.discard(name)
                self._next_lookup = 0.0
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
        self._wanted.update((name, offset) for name, offset in after.items() if name in self._wanted)
        changed = {name: offset for name, offset in self._wanted.items() if self._stored.get(name) != offset}
        self._serve()
        if changed:
            offsets = [self._at(name, offset, self._label) for name, offset in changed.items()]
            self._ask("commit", lambda: self._asker.commit(offsets=offsets, asynchronous=False), self._on_commit)
            self._serve()

    def _on_commit(self, offsets: Sequence[Any]) -> None:
        for one in offsets:
            name = _name_of(one.topic, one.partition)
            if one.error is not None:
                self._errors.append(self._readable(one.error))
            elif one.offset >= 0:
                self._stored[name] = one.offset
            else:
                self._stored.pop(name, None)

    def lag(self) -> Mapping[str, Lag]:
        """Records after the committed offset, by the newest ends that are known."""
        found: dict[str, Lag] = {}
        asked: list[str] = []
        stale = time.monotonic() - self._read_at > _STALE_SECS
        for name in (*self._assigned, *self._waiting):
            end = -1
            if name in self._assigned and name not in self._paused:
                end = self._consumer.get_watermark_offsets(self._at(name), cached=True)[1]
            if (end < 0 or stale) and name in self._stored:
                asked.append(name)
                end = max(end, self._ends.get(name, -1))
            stored = self._stored.get(name)
            found[name] = Lag(None if end < 0 or stored is None else max(0, end - stored))
        if asked:
            # Nothing is fetched of them now, which would bring their ends.
            read_end = partial(self._asker.get_watermark_offsets, timeout=_ASK_SECS)
            self._ask("ends", lambda: {name: read_end(self._at(name))[1] for name in asked}, self._ends.update)
        return found

    def close(self) -> None:
        """Store what is to be committed, and close the consumer, in a thread. The loop waits for it for 50 ms: what was
        not sent to the brokers by then is not stored, since the task may have another owner."""
        if self._closed:
            return
        self._closed = True
        self._asked.clear()
        stored, late = Event(), Event()

        def end() -> None:
            try:
                for last in (False, True):
                    if self._answer is not None:
                        wait([self._answer[1]])
                    self._serve()
                    if not last and not late.is_set() and self._may_write():
                        self.commit({})
            finally:
                stored.set()
                self._asker.close()
                self._consumer.close()

        Thread(target=end, name="kafka-close", daemon=True).start()
        if not stored.wait(_CLOSE_SECS):
            late.set()


def _name_of(topic: str, number: int) -> str:
    return f"{topic}[{number}]"
