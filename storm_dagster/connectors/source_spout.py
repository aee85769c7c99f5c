"""Spout that reads a source, at least once.

It has retries, dead letters, committed positions and lag.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from storm_dagster.api.spouts import Spout
from storm_dagster.connectors.sources import Lag, Source
from storm_dagster.connectors.tracking import SPAN, OpenRecord, Retries, SourceRecord, Tracker
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.groupings import reader_of

_from_json = msgspec.json.Decoder().decode
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "json": lambda raw: _from_json(raw) if type(raw) is bytes or type(raw) is str else raw,
    "text": lambda raw: raw.decode() if type(raw) is bytes else raw,
    "none": lambda raw: raw,
}
_NOTHING = object()
_BATCH = 500
_COMMIT_SECS = 1.0
_LAG_SECS = 2.0
_ERROR_SECS = 60.0
_LOOP_SECS = 0.004
"""Longest call on the loop without a tuple; after it the task pauses for about as long."""
_THREAD_SECS = 0.02
"""The same for a task with a thread."""
_MAX_LAGS = 100
"""Partitions of a task whose lag is published: those with the most records."""

_LETTER_FIELDS = ("partition", "after", "key", "headers", "value", "at_ms")
"""Fields of a record that its dead letter has."""


class _Undecoded:
    """Value of a dead letter that cannot be re-emitted: it was never decoded."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"not decoded: {self.value!r}"


class SourceSpout(Spout):
    """Spout that emits the records of its ``source``, one tuple for each.

    A subclass sets attributes. A record is emitted until it is acked. Its position is committed
    when it and all earlier ones in its partition are finished, at most once a second. Each
    partition is read by one task; when the number of tasks changes, the next one continues at the
    committed position.
    """

    source: ClassVar[Source]
    """Source of the records; each task has its own copy."""
    decode: ClassVar[Literal["json", "text", "none"] | Callable[[Any], Any]] = "json"
    """Decoder of values.

    With one output field the decoded value is emitted, with several fields its entries of these
    names. A record that cannot be decoded becomes a dead letter at once.
    """
    max_open: ClassVar[int] = 1000
    """Bound on open records per partition.

    A partition at its bound is not read, but others are. A partition is also not read further than
    ten times as many records after the first open one.
    """
    retries: ClassVar[Retries] = Retries()
    on_poison: ClassVar[Literal["dead_letter", "block", "skip"]] = "dead_letter"
    """Handling of a record that failed more often than ``retries.most``.

    ``dead_letter``: it becomes one. ``block``: it is retried permanently, and its partition stops
    ten times ``max_open`` records after it. ``skip``: it is logged and dropped.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "source"):
            # Kept positions are files of the state, whose storage may be slow.
            cls.blocking = cls.source.blocking or not cls.source.keeps_positions

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Conf that names the assets of the source."""
        if not hasattr(cls, "source"):
            return {}
        return {"topology.component.assets": list(cls.source.assets)}

    @classmethod
    def _check_kind(cls) -> str:
        if not hasattr(cls, "source"):
            raise InvalidTopology(f"{cls.__name__} has no source: set source = ... in its class")
        return super()._check_kind()

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Open the source.

        Partitions are assigned at the first ``next_tuple``, when the former reader has closed.
        """
        decode = type(self).decode
        self._decode = _DECODERS[decode] if isinstance(decode, str) else decode
        self._fields: list[str] = context.output_fields() if context.streams else []
        self._tracker = Tracker(self.max_open, self.retries)
        self._store: Any = None
        self._assigned: frozenset[str] | None = None
        """Partitions of this task; ``None`` while they are unknown."""
        self._missing: dict[str, float] = {}
        """Partition that no longer exists -> time at which it was first missed."""
        self._committed: dict[str, Any] = {}
        self._finished_handles: list[Any] = []
        self._next_commit = 0.0
        self._next_lag = 0.0
        self._next_refresh = 0.0
        self._active = True
        self._reported: dict[str, float] = {}
        """Key of an error -> time of its last report."""
        self._source = copy.copy(self.source)
        self._source.open(conf, context)

    # -- reading -----------------------------------------------------------------------------------

    def next_tuple(self) -> None:
        """Emit one record; skipped records and immediate dead letters cost no turn."""
        until = 0.0
        while True:
            open_record = self._tracker.take(time.monotonic())
            if open_record is None:
                self._fill(time.monotonic())
                open_record = self._tracker.take(time.monotonic())
            if open_record is None or self._emit_record(open_record):
                return
            now = time.monotonic()
            until = until or now + (_THREAD_SECS if self.blocking else _LOOP_SECS)
            if now >= until:
                return

    def _fill(self, now: float) -> None:
        """Read more records into the tracker, unless it has enough."""
        if now >= self._next_refresh:
            self._try(self._refresh, now)
        if self._assigned is None:
            return
        self._try(self._drop_recreated)
        tracker = self._tracker
        # Some records are read beyond the bound, since a source may need long to continue with a
        # partition that was full.
        full = tracker.full if tracker.held >= _BATCH else set[str]()
        if full and full >= (self._assigned or {""}):
            return
        if full and tracker.held >= (4 + len(full)) * _BATCH:
            return
        for record in self._try(self._source.read, _BATCH, full) or ():
            if isinstance(record, Exception):
                self._report_error(record)
            else:
                tracker.read(record)

    def _refresh(self, now: float) -> None:
        """Find new and removed partitions, and read those of this task."""
        source = self._source
        tracker = self._tracker
        self._next_refresh = now + source.refresh_secs
        # While the source does not respond, no partition counts as missing.
        missing = self._missing
        self._missing = {}
        partitions = source.partitions()
        if partitions is None:
            self._missing = missing
            self._next_refresh = now + 0.01
            return
        if self._store is None and partitions and not source.keeps_positions:
            self._store = self.context._open_positions(self.context)
        kept = self._store.found if self._store is not None else {}
        index = self.context.task_index
        tasks = len(self.context.component_tasks(self.context.component))
        assigned = frozenset(name for name in partitions if reader_of(name, tasks) == index)
        if assigned != self._assigned:
            removed = tracker.partitions.keys() - assigned if partitions else ()
            for name in removed:
                self._release(name)
                text = f"partition {name} no longer exists: its open records are dropped"
                self._report_error(RuntimeError(text))
            source.assign({name: kept.get(name) for name in sorted(assigned)})
            self._assigned = assigned
        self._missing = {name: missing.get(name, now) for name in kept.keys() - assigned}

    def _release(self, name: str) -> None:
        """Forget a partition, and return its unfinished records to a queue."""
        handles = [open_record.record.handle for open_record in self._tracker.release(name)]
        self._source.nack([handle for handle in handles if handle is not None])

    def _drop_recreated(self) -> None:
        """Drop the records of partitions that were deleted and recreated.

        Their positions are not valid there.
        """
        for name in self._source.recreated():
            if name in self._tracker.partitions:
                self._release(name)
            self._committed.pop(name, None)

    def values(self, record: SourceRecord) -> Sequence[Any] | None:
        """Values of the tuple for a record; ``None``: the record is skipped.

        An error makes the record a dead letter. Override this to use key, headers or time.
        """
        decoded = self._decode(record.value)
        if len(self._fields) == 1:
            return [decoded]
        if isinstance(decoded, Mapping):
            return [decoded[name] for name in self._fields]
        return decoded

    def _emit_record(self, open_record: OpenRecord) -> bool:
        """Emit a record; ``False`` if it has no tuple."""
        try:
            values = self.values(open_record.record)
        except Exception as error:
            # A retry would raise the same error.
            self._tracker.fail(open_record, time.monotonic())
            self._handle_poison(open_record, error)
            return False
        if values is None:
            self._finish(open_record)
            return False
        try:
            self.emit(values, open_record)
        except Exception as error:
            self.raise_exception(error)
            self._fail_record(open_record, error)
        return True

    # -- verdicts ----------------------------------------------------------------------------------

    def ack(self, tup_id: OpenRecord) -> None:
        """Finish the record."""
        self._finish(tup_id)

    def fail(self, tup_id: OpenRecord) -> None:
        """Retry the record later, or handle it as poison."""
        self._fail_record(tup_id, None)

    def _lost(self, tup_id: OpenRecord) -> None:
        self._tracker.fail(tup_id, time.monotonic(), counts=False)

    def _finish(self, open_record: OpenRecord) -> None:
        handle = open_record.record.handle
        if self._tracker.finish(open_record) and handle is not None:
            self._finished_handles.append(handle)

    def _fail_record(self, open_record: OpenRecord, reason: Exception | None) -> None:
        if self._tracker.fail(open_record, time.monotonic()):
            self._handle_poison(open_record, reason)

    def _handle_poison(self, open_record: OpenRecord, reason: Exception | None) -> None:
        """Handle a record that fails always, by :attr:`on_poison`.

        ``reason`` is an error of its values or its emit; without one its tuple failed.
        """
        if self.on_poison == "skip":
            text = f"{open_record} is skipped after {open_record.tries} tries"
            self.log(f"{text}: {reason or 'it failed'}", "error")
            self._finish(open_record)
        elif self.on_poison == "dead_letter":
            record = open_record.record
            position = {name: getattr(record, name) for name in _LETTER_FIELDS}
            if reason is not None:
                values: list[Any] = [_Undecoded(record.value)]
            else:
                values = list(self.values(record) or ())
            # A record whose letter could not be kept is retried, not lost.
            if self.give_up(open_record, values, None, None, reason, _as_text(position)):
                self._finish(open_record)
        elif not open_record.reported:
            open_record.reported = True
            distance = SPAN * self._tracker.max_open
            text = f"{open_record} failed {open_record.tries} times and is retried permanently"
            self.raise_exception(
                RuntimeError(
                    f"{text}: its partition stops {distance} records after it (on_poison of the "
                    "source is block)"
                )
            )

    def deactivate(self) -> None:
        """Commit ten times a second: the worker may end when all records are finished."""
        self._active = False
        self._next_commit = 0.0

    def activate(self) -> None:
        """Commit once a second."""
        self._active = True

    # -- clock -------------------------------------------------------------------------------------

    def _on_clock(self) -> None:
        now = time.monotonic()
        if not self.context.may_write():
            return
        if self._finished_handles:
            self._try(self._ack_handles)
        if self._assigned is not None and now >= self._next_refresh:
            # Also while no record is read: new partitions count for the lag.
            self._try(self._refresh, now)
        if now >= self._next_commit:
            self._next_commit = now + (_COMMIT_SECS if self._active else 0.1)
            self._try(self._commit, now)
        if now >= self._next_lag:
            self._try(self._report_lag)

    def _ack_handles(self) -> None:
        """Ack the finished records of a queue."""
        self._source.ack([*self._finished_handles])
        self._finished_handles.clear()

    def _commit(self, now: float) -> None:
        self._drop_recreated()
        changed = {
            name: position
            for name, position in self._tracker.positions()
            if self._committed.get(name, _NOTHING) != position
        }
        if self._source.keeps_positions:
            self._source.commit(changed)
        elif self._store is None:
            return
        else:
            self._save_positions(changed, now)
        self._committed.update(changed)
        for name in self._tracker.closed():
            self._tracker.release(name)
            self._committed.pop(name, None)

    def _save_positions(self, changed: Mapping[str, Any], now: float) -> None:
        """Save positions, and drop those of partitions that were missing for long."""
        expired: list[str] = []
        for name, since in self._missing.items():
            if now - since >= self._source.forget_secs:
                expired.append(name)
        if not changed and not expired:
            return
        try:
            self._store.save(changed, expired)
        except Exception:
            # The next refresh reopens it.
            self._store.close()
            self._store = None
            self._next_refresh = 0.0
            raise

    def _report_lag(self) -> None:
        now_ms = self.context.now_ms()
        lags: dict[str, Lag] = dict(self._source.lag())
        if not lags:
            self._next_lag = time.monotonic()
            return
        self._next_lag = time.monotonic() + _LAG_SECS
        total_records = 0
        max_secs = 0.0
        by_partition: dict[str, list[float | None]] = {}
        for name, lag in sorted(lags.items(), key=lambda entry: -(entry[1].records or 0)):
            secs = lag.secs
            if secs is None and lag.records is not None:
                behind_ms = self._tracker.behind_ms(name, now_ms) if lag.records else 0
                secs = None if behind_ms is None else behind_ms / 1000
            total_records += lag.records or 0
            max_secs = max(max_secs, secs or 0.0)
            if len(by_partition) < _MAX_LAGS:
                by_partition[name] = [lag.records, secs]
        self.report_metric("lag", total_records)
        self.report_metric("lag_secs", max_secs)
        self.report_metric("lag_by_partition", by_partition)

    def close(self) -> None:
        """Commit finished records, return those of a queue, and close the source."""
        self._assigned = None
        if self.context.may_write():
            self._next_commit = 0.0
            self._next_lag = 0.0
            self._on_clock()
        for name in list(self._tracker.partitions):
            self._try(self._release, name)
        if self._store is not None:
            self._store.close()
        self._source.close()

    # -- errors ------------------------------------------------------------------------------------

    def _try(self, call: Callable[..., Any], *args: Any) -> Any:
        """The result of a call; an error is reported, and the result is ``None``."""
        try:
            return call(*args)
        except Exception as error:
            self._report_error(error)
            return None

    def _report_error(self, error: Exception) -> None:
        """Report an error of the source, the same one at most once a minute."""
        now = time.monotonic()
        # Numbers after the first colon of the text change from one report to the next.
        key = type(error).__name__ + ":" + str(error).partition(":")[0]
        last_report = self._reported.get(key)
        if last_report is not None and now - last_report < _ERROR_SECS:
            return
        self._reported = {
            other: at for other, at in self._reported.items() if now - at < _ERROR_SECS
        }
        self._reported[key] = now
        self.raise_exception(error)


def _as_text(value: Any) -> Any:
    """Convert bytes to text, for a reader of the letter."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        return {key: _as_text(part) for key, part in value.items()}
    return value
