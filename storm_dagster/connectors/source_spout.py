"""Spout that reads a source at least once.

It has retries, dead letters, committed positions and lag.
"""

import copy
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

from storm_dagster.api.callbacks import check_source
from storm_dagster.api.outages import SystemUnavailable
from storm_dagster.api.spouts import Spout
from storm_dagster.connectors.decoding import OnNull, check_on_null, decoder_of, tuple_of
from storm_dagster.connectors.source_errors import SourceErrors
from storm_dagster.connectors.sources import Lag, LostPosition, Source
from storm_dagster.connectors.tracking import SPAN, OpenRecord, Retries, SourceRecord, Tracker
from storm_dagster.model.errors import InvalidRequest, InvalidTopology, Unavailable
from storm_dagster.model.groupings import reader_of

_MISSING = object()
"""Stands for a position that was never committed, since ``None`` may be a position."""
_BATCH = 500
"""Number of records that one read of the source asks for."""
_COMMIT_SECS = 1.0
"""Pause between two commits while the topology is active."""
_LAG_SECS = 2.0
"""Pause between two reports of the lag."""
_LOOP_SECS = 0.004
"""Maximum duration of a call without a tuple, on the worker's loop.

The task then pauses for about as long.
"""
_THREAD_SECS = 0.02
"""Maximum duration of a call without a tuple, in the task's own thread."""
_MAX_LAGS = 100
"""Maximum number of partitions of a task whose lag is shown: those with the most records."""

_MAX_EXCERPT = 256 << 10
"""Bytes or characters that the letter of an undecoded record keeps of its value."""
_LETTER_FIELDS = ("partition", "after", "key", "headers", "value", "at_ms")
"""Fields of a record that its dead letter contains."""


class UnreadableRecord(ValueError):
    """Record of a source without a tuple; the message names its place, such as file and line."""


class _Undecoded:
    """Value of a dead letter that cannot be replayed: it was never decoded."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"not decoded: {self.value!r}"


class SourceSpout(Spout):
    """Spout that emits the records of its ``source``, one tuple for each.

    A subclass sets the attributes. A record is emitted until it is acked. Its position is committed
    when it and all records before it in its partition are finished, at most once a second. Each
    partition is read by one task; when the number of tasks changes, its next task continues at the
    committed position.
    """

    source: ClassVar[Source]
    """The source that is read; each task has its own copy."""
    decode: ClassVar[Literal["json", "text", "none"] | Callable[[Any], Any]] = "json"
    """Conversion of a record's value to a tuple.

    With one output field the decoded value is emitted, with several its entries of these names. A
    record that cannot be decoded, or whose value does not have these fields, becomes a dead letter
    at once.
    """
    on_null: ClassVar[OnNull] = "emit"
    """Handling of a record whose decoded value is ``None``: JSON's ``null``, a tombstone of Kafka.

    ``"emit"``: it is a value, ``None``; with several output fields it does not have them, and is a
    dead letter. ``"skip"``: it is dropped. ``"dead_letter"``: it becomes a dead letter at once.
    """
    max_open: ClassVar[int] = 1000
    """Maximum number of open records per partition.

    At the maximum the partition is not read, and others are. It is also not read further than ten
    times as many records after the first open one.
    """
    retries: ClassVar[Retries] = Retries()
    on_poison: ClassVar[Literal["dead_letter", "block", "skip"]] = "dead_letter"
    """Handling of a record that failed more often than ``retries.most``.

    ``"dead_letter"``: it becomes a dead letter. ``"block"``: it is retried permanently, and its
    partition stops ten times ``max_open`` records after it. ``"skip"``: it is logged and dropped.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "source"):
            # Positions that the spout stores are files of the state, perhaps on slow storage.
            cls.blocking = cls.source.blocking or not cls.source.keeps_positions

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Conf with the assets of the source."""
        if not hasattr(cls, "source"):
            return {}
        return {"topology.component.assets": list(cls.source.assets)}

    @classmethod
    def _require_kind(cls) -> str:
        if not hasattr(cls, "source"):
            raise InvalidTopology(f"{cls.__name__} has no source: set source = ... in its class")
        check_on_null(cls.__name__, cls.on_null)
        check_source(cls.source)
        return super()._require_kind()

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Open the source.

        Partitions are assigned at the first ``next_tuple``, when their earlier reader has closed.
        """
        self._decode = decoder_of(type(self).decode)
        self._fields: list[str] = context.output_fields() if context.streams else []
        self._tracker = Tracker(self.max_open, self.retries)
        self._store: Any = None
        """Positions in the task's state; ``None`` until opened, or if the source keeps them."""
        self._own_partitions: frozenset[str] | None = None
        """Partitions that this task reads; ``None``: not assigned yet, or closed."""
        self._missing_since: dict[str, float] = {}
        """Partition that no longer exists -> time when it was first missing."""
        self._unidentified: set[str] = set()
        """Partitions whose stored position has no identity: the next commits store it."""
        self._committed: dict[str, Any] = {}
        """Partition -> position that was stored last, so that only changes are stored."""
        self._finished_handles: list[Any] = []
        """Handles of finished records of a queue, which the next clock acks at the source."""
        # The next times are of the monotonic clock; 0 is now.
        self._next_commit = 0.0
        self._next_lag = 0.0
        self._next_refresh = 0.0
        self._active = True
        """True while the topology is active; else positions are committed more often."""
        self._source = copy.copy(self.source)
        self._source.open(conf, context)
        system = self._source.system or f"the source {type(self.source).__name__}"
        self._errors = SourceErrors(self, system)

    # -- reading -----------------------------------------------------------------------------------

    def next_tuple(self) -> None:
        """Emit one record.

        Records before it that are skipped, or become dead letters at once, do not end the call,
        except after ``_LOOP_SECS`` or ``_THREAD_SECS`` from the first of them.
        """
        until = 0.0
        while True:
            open_record = self._tracker.take(time.monotonic())
            if open_record is None:
                self._fill(time.monotonic())
                open_record = self._tracker.take(time.monotonic())
            if open_record is None or self._emit_record(open_record):
                return
            now = time.monotonic()
            if not until:
                until = now + (_THREAD_SECS if self.blocking else _LOOP_SECS)
            if now >= until:
                return

    def _fill(self, now: float) -> None:
        """Read records of the source into the tracker, and report its errors.

        No effect before partitions are assigned, or while too many records wait for their emit.
        """
        if now >= self._next_refresh:
            self._errors.call("refresh", self._refresh, now)
        if self._own_partitions is None:
            return
        self._errors.call("recreated", self._drop_recreated)
        # A source may need long to continue with a partition that was full: some records are read
        # beyond the bound.
        full = self._tracker.full if self._tracker.held >= _BATCH else ()
        if full:
            # Without partitions (a queue) all records are of the partition "".
            all_are_full = full >= (self._own_partitions or {""})
            # Bounds the memory: a few batches of records that the source returns nevertheless.
            if all_are_full or self._tracker.held >= (4 + len(full)) * _BATCH:
                return
        for record in self._errors.call("read", self._source.read, _BATCH, full) or ():
            if isinstance(record, Exception):
                is_outage = isinstance(record, Unavailable | SystemUnavailable)
                self._errors.on_returned(record, is_outage=is_outage)
            else:
                self._tracker.read(record)

    def _refresh(self, now: float) -> None:
        """Read the list of partitions, and assign those of this task.

        The source is notified only if they have changed. While the list is not known, the call is
        repeated every 10 ms.
        """
        source = self._source
        self._next_refresh = now + source.refresh_secs
        # If partitions() raises, no partition counts as missing.
        missing_since = self._missing_since
        self._missing_since = {}
        partitions = source.partitions()
        if partitions is None:
            self._missing_since = missing_since
            self._next_refresh = now + 0.01
            return
        if self._store is None and partitions and not source.keeps_positions:
            self._store = self.context._open_positions(self.context)
        context = self.context
        task_count = len(context.component_tasks(context.component))
        own_partitions = frozenset(
            name for name in partitions if reader_of(name, task_count) == context.task_index
        )
        stored = self._store.current if self._store is not None else {}
        if own_partitions != self._own_partitions:
            # An empty list is that of a queue, whose records have the partition "".
            if partitions:
                self._release_removed(own_partitions)
            source.assign({name: self._resume(name) for name in sorted(own_partitions)})
            self._own_partitions = own_partitions
            self._unidentified = self._without_identity(own_partitions)
        for name in stored.keys() - own_partitions:
            self._missing_since[name] = missing_since.get(name, now)

    def _resume(self, name: str) -> Any:
        """Position from which the source reads a partition; ``None``: its beginning.

        A position that is of another partition is reported, and lost.
        """
        store = self._store
        if store is None or store.current.get(name) is None:
            return None
        try:
            return self._source.resume(name, store.current[name], store.identities.get(name))
        except LostPosition as error:
            self._errors.report(error)
            return None

    def _without_identity(self, names: Collection[str]) -> set[str]:
        """Partitions of which a position is stored, and no identity."""
        if self._store is None:
            return set()
        return {
            name
            for name in names
            if name in self._store.current and name not in self._store.identities
        }

    def _release_removed(self, own_partitions: frozenset[str]) -> None:
        """Drop the open records of partitions that are no longer among these."""
        for name in self._tracker.partitions.keys() - own_partitions:
            self._release(name)
            self._errors.report(
                RuntimeError(f"partition {name} is there no more: its open records are dropped")
            )

    def _release(self, name: str) -> None:
        """Forget the open records of a partition; those of a queue are returned to it."""
        records = [item.record for item in self._tracker.release(name)]
        self._source.nack([record.handle for record in records if record.handle is not None])

    def _drop_recreated(self) -> None:
        """Drop the records of partitions that were deleted and recreated.

        Their positions are no longer valid.
        """
        for name in self._source.recreated():
            if name in self._tracker.partitions:
                self._release(name)
            self._committed.pop(name, None)

    def values(self, record: SourceRecord) -> Sequence[Any] | None:
        """Values of the tuple that is emitted for a record; ``None`` skips the record.

        An error but :class:`SystemUnavailable` makes it a dead letter. Override it to use the key.
        """
        return tuple_of(self._decode(record.value), self._fields, self.on_null)

    def _emit_record(self, open_record: OpenRecord) -> bool:
        """Emit the tuple of a record. False if it has none, and is finished or a dead letter.

        If the emit fails for a reason outside of the record, the record is retried, and the result
        is true.
        """
        record = open_record.record
        try:
            if record.error:
                raise UnreadableRecord(record.error)
            values = self.values(record)
        except SystemUnavailable:
            # The record is not at fault: the call is repeated after a pause of the worker.
            self._lost(open_record)
            raise
        except Exception as error:
            self._reject(open_record, error)
            return False
        if values is None:
            self._finish(open_record)
            return False
        try:
            self.emit(values, open_record)
        except InvalidRequest as error:
            # The values do not fit the stream.
            self._reject(open_record, error)
            return False
        except Exception as error:
            self.raise_exception(error)
            self._handle_failure(open_record, error)
        return True

    def _reject(self, open_record: OpenRecord, error: Exception) -> None:
        """Handle a record without a tuple as poison at once: a retry would fail, too."""
        record = open_record.record
        if record.line is not None and not record.error:
            place = f"{record.partition}, line {record.line}"
            error = UnreadableRecord(f"{place}: {type(error).__name__}: {error}")
        # The tracker counts the try, and retries the record if the next line does not finish it.
        self._tracker.fail(open_record, time.monotonic())
        self._handle_poison(open_record, error)

    # -- acks and failures -------------------------------------------------------------------------

    def ack(self, tup_id: OpenRecord) -> None:
        """Finish the record."""
        self._finish(tup_id)

    def fail(self, tup_id: OpenRecord) -> None:
        """Retry the record later, or handle it as poison."""
        self._handle_failure(tup_id, None)

    def _lost(self, tup_id: OpenRecord) -> None:
        # A worker ended: the record is not at fault.
        self._tracker.fail(tup_id, time.monotonic(), counts=False)

    def _finish(self, open_record: OpenRecord) -> None:
        if self._tracker.finish(open_record) and open_record.record.handle is not None:
            self._finished_handles.append(open_record.record.handle)

    def _handle_failure(self, open_record: OpenRecord, error: Exception | None) -> None:
        if self._tracker.fail(open_record, time.monotonic()):
            self._handle_poison(open_record, error)

    def _handle_poison(self, open_record: OpenRecord, error: Exception | None) -> None:
        """Handle a record that always fails, as ``on_poison`` tells.

        ``error`` is that of its decoding or emit, if there was one.
        """
        if self.on_poison == "skip":
            reason = error or "it failed"
            self.log(f"{open_record} is skipped after {open_record.tries} tries: {reason}", "error")
            self._finish(open_record)
        elif self.on_poison == "dead_letter":
            self._give_up_record(open_record, error)
        elif not open_record.reported:
            open_record.reported = True
            span = SPAN * self._tracker.max_open
            reason = f" ({error})" if error is not None else ""
            self.raise_exception(
                RuntimeError(
                    f"{open_record} failed {open_record.tries} times{reason} and is retried "
                    f"permanently: its partition stops {span} records after it "
                    "(on_poison of the source is block)"
                )
            )

    def _give_up_record(self, open_record: OpenRecord, error: Exception | None) -> None:
        """Make a record a dead letter, and finish it.

        With ``error`` its value could not be decoded or emitted, so the letter has it as it was
        read.
        """
        source_record = open_record.record
        fields = {name: getattr(source_record, name) for name in _LETTER_FIELDS}
        if source_record.line is not None:
            fields["line"] = source_record.line
        if len(source_record.header_list) > len(source_record.headers):
            fields["header_list"] = source_record.header_list
        if error is not None:
            fields["value"] = _excerpt(source_record.value)
            values: list[Any] = [_Undecoded(fields["value"])]
        else:
            values = list(self.values(source_record) or ())
        # If the letter could not be stored, the record is retried.
        if self.give_up(open_record, values, None, None, error, _as_text(fields)):
            self._finish(open_record)

    def deactivate(self) -> None:
        """Commit ten times a second from now on.

        The worker may end when all records are finished.
        """
        self._active = False
        self._next_commit = 0.0

    def activate(self) -> None:
        """Commit once a second."""
        self._active = True

    # -- clock -------------------------------------------------------------------------------------

    def _on_clock(self) -> None:
        """Ack, refresh, commit and report the lag, each when it is due.

        No effect while the task may belong to another process.
        """
        now = time.monotonic()
        if not self.context.may_write():
            return
        if self._finished_handles:
            self._errors.call("ack", self._ack_finished)
        if self._own_partitions is not None and now >= self._next_refresh:
            # Also while the spout does not read: new partitions count for the lag.
            self._errors.call("refresh", self._refresh, now)
        if now >= self._next_commit:
            self._next_commit = now + (_COMMIT_SECS if self._active else 0.1)
            self._errors.call("commit", self._commit, now)
        if now >= self._next_lag:
            self._errors.call("lag", self._report_lag)

    def _ack_finished(self) -> None:
        """Ack the finished records of a queue.

        The next call repeats a failed one.
        """
        self._source.ack(list(self._finished_handles))
        self._finished_handles.clear()

    def _commit(self, now: float) -> None:
        """Store the changed positions, in the source or in the state."""
        self._drop_recreated()
        committed = self._committed
        positions = self._tracker.positions()
        changed = {
            name: after for name, after in positions if committed.get(name, _MISSING) != after
        }
        if self._source.keeps_positions:
            self._source.commit(changed)
        elif self._store is None:
            return
        else:
            self._save_positions(changed, now)
        self._committed.update(changed)
        # Their last positions are stored now.
        for name in self._tracker.closed():
            self._tracker.release(name)
            self._committed.pop(name, None)

    def _save_positions(self, changed: Mapping[str, Any], now: float) -> None:
        """Store positions in the state, and delete those of long missing partitions."""
        expired: list[str] = []
        for name, since in self._missing_since.items():
            if now - since >= self._source.forget_secs:
                expired.append(name)
        identities = self._identities_of(changed)
        if not changed and not expired and not identities:
            return
        try:
            self._store.save(changed, expired, identities)
        except Exception:
            # The next refresh reopens it.
            self._store.close()
            self._store = None
            self._next_refresh = 0.0
            raise

    def _identities_of(self, changed: Collection[str]) -> dict[str, Any]:
        """Identities of partitions whose positions change, and of some that have none stored."""
        names = [*changed]
        for _ in range(min(_BATCH, len(self._unidentified))):
            name = self._unidentified.pop()
            if name in self._store.current and name not in changed:
                names.append(name)
        identities: dict[str, Any] = {}
        for name in names:
            identity = self._errors.call("identity", self._source.identity, name)
            if identity is not None:
                identities[name] = identity
        return identities

    def _report_lag(self) -> None:
        """Report the metrics of the lag; none if the source knows no lag yet."""
        now_ms = self.context.now_ms()
        lags: dict[str, Lag] = dict(self._source.lag())
        self._next_lag = time.monotonic() + (_LAG_SECS if lags else 0.0)
        if not lags:
            return
        lag_by_partition: dict[str, list[float | None]] = {}
        records = 0
        ages: list[float] = []
        for name, lag in sorted(lags.items(), key=lambda item: -(item[1].records or 0)):
            secs = self._lag_secs(name, lag, now_ms)
            records += lag.records or 0
            ages.append(secs or 0.0)
            if len(lag_by_partition) < _MAX_LAGS:
                lag_by_partition[name] = [lag.records, secs]
        self.report_metric("lag", records)
        self.report_metric("lag_secs", max(ages))
        self.report_metric("lag_by_partition", lag_by_partition)

    def _lag_secs(self, name: str, lag: Lag, now_ms: int) -> float | None:
        """Age of the oldest unfinished record of a partition; ``None``: unknown."""
        if lag.secs is not None or lag.records is None:
            return lag.secs
        behind_ms = self._tracker.behind_ms(name, now_ms) if lag.records else 0
        return None if behind_ms is None else behind_ms / 1000

    def close(self) -> None:
        """Commit the finished records, nack the others of a queue, and close the source."""
        # So the last clock does not refresh, and assigns no partition.
        self._own_partitions = None
        if self.context.may_write():
            self._next_commit = 0.0
            self._next_lag = 0.0
            self._errors.end_pauses()
            self._on_clock()
        for name in list(self._tracker.partitions):
            self._errors.call("release", self._release, name)
        if self._store is not None:
            self._store.close()
        self._source.close()


def _excerpt(value: Any) -> Any:
    """The beginning of a long value, which would fill the room of all letters.

    The letter cannot be replayed, and has the place of the record.
    """
    if not isinstance(value, bytes | str) or len(value) <= _MAX_EXCERPT:
        return value
    end = f"... ({len(value)} in all)"
    if isinstance(value, bytes):
        return value[:_MAX_EXCERPT] + end.encode()
    return value[:_MAX_EXCERPT] + end


def _as_text(value: Any) -> Any:
    """The value with text in place of bytes, also inside of maps, for a dead letter."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        return {key: _as_text(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(member) for member in value]
    return value
