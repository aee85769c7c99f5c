"""Spout that reads a source: at least once, with retries, dead letters, committed positions and
lag.
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
_COMMIT_SECS, _LAG_SECS, _ERROR_SECS = 1.0, 2.0, 60.0
_LOOP_SECS, _THREAD_SECS = 0.004, 0.02
"""Longest turn without a tuple: after it the task pauses for about as long."""
_MOST_LAGS = 100
"""Partitions of a task whose lag is shown: those with the most records."""

_SHOWN = ("partition", "after", "key", "headers", "value", "at_ms")
"""What a dead letter says of its record."""


class _Undecoded:
    """Value of a dead letter that cannot be emitted again: it was never decoded."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"not decoded: {self.value!r}"


class SourceSpout(Spout):
    """Emits the records of its ``source``, one tuple for each: a subclass sets attributes.

    A record is emitted until it is acked. Its position is committed when it and all before it in
    its partition are finished, at most once a second. Each partition is read by one task; when the
    number of tasks changes, the next one continues at the committed position.
    """

    source: ClassVar[Source]
    """What is read; each task has its own copy."""
    decode: ClassVar[Literal["json", "text", "none"] | Callable[[Any], Any]] = "json"
    """How a value becomes a tuple. With one output field the decoded value is emitted, with several
    its entries of their names. What cannot be decoded is a dead letter at once.
    """
    max_open: ClassVar[int] = 1000
    """Bound on open records per partition: then the partition is not read, and others are. Nor is
    it read further than ten times as many records after the first open one.
    """
    retries: ClassVar[Retries] = Retries()
    on_poison: ClassVar[Literal["dead_letter", "block", "skip"]] = "dead_letter"
    """What becomes of a record that failed more often than ``retries.most``: a dead letter; or it
    is emitted again for ever, and its partition stops ten times ``max_open`` records after it; or
    it is logged and dropped.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "source"):
            # Kept positions are files of the state, which may lie on storage that is slow.
            cls.blocking = cls.source.blocking or not cls.source.keeps_positions

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Conf that names what is read."""
        return (
            {"topology.component.assets": list(cls.source.assets)} if hasattr(cls, "source") else {}
        )

    @classmethod
    def _require_kind(cls) -> str:
        if not hasattr(cls, "source"):
            raise InvalidTopology(f"{cls.__name__} has no source: set source = ... in its class")
        return super()._require_kind()

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Open the source. Partitions are assigned at the first ``next_tuple``, when the reader
        before has closed.
        """
        how = type(self).decode
        self._decode = _DECODERS[how] if isinstance(how, str) else how
        self._fields: list[str] = context.output_fields() if context.streams else []
        self._tracker = Tracker(self.max_open, self.retries)
        self._store: Any = None
        self._mine: frozenset[str] | None = None
        self._missing: dict[str, float] = {}
        """Partition that is not there any more -> since when."""
        self._committed: dict[str, Any] = {}
        self._done: list[Any] = []
        self._next_commit = self._next_lag = self._next_refresh = 0.0
        self._active = True
        self._reported: dict[str, float] = {}
        self._source = copy.copy(self.source)
        self._source.open(conf, context)

    # -- reading -----------------------------------------------------------------------------------

    def next_tuple(self) -> None:
        """Emit one record. Those before it that are skipped, or dead letters at once, cost no
        turn.
        """
        until = 0.0
        while True:
            one = self._tracker.take(time.monotonic())
            if one is None:
                self._fill(time.monotonic())
                one = self._tracker.take(time.monotonic())
            if one is None or self._emit_record(one):
                return
            now = time.monotonic()
            until = until or now + (_THREAD_SECS if self.blocking else _LOOP_SECS)
            if now >= until:
                return

    def _fill(self, now: float) -> None:
        if now >= self._next_refresh:
            self._guarded(self._refresh, now)
        if self._mine is None:
            return
        self._guarded(self._drop_recreated)
        # A source may need long to go on with a partition that was full: some records are read
        # beyond the bound.
        full = self._tracker.full if self._tracker.held >= _BATCH else ()
        if full and (
            full >= (self._mine or {""}) or self._tracker.held >= (4 + len(full)) * _BATCH
        ):
            return
        for record in self._guarded(lambda: self._source.read(_BATCH, full)) or ():
            if isinstance(record, Exception):
                self._complain(record)
            else:
                self._tracker.read(record)

    def _refresh(self, now: float) -> None:
        """Follow the partitions that there are, and read those of this task."""
        source, tracker = self._source, self._tracker
        self._next_refresh = now + source.refresh_secs
        # While it cannot be asked, nothing counts as gone.
        missing, self._missing = self._missing, {}
        found = source.partitions()
        if found is None:
            self._missing = missing
            self._next_refresh = now + 0.01
            return
        if self._store is None and found and not source.keeps_positions:
            self._store = self.context._open_positions(self.context)
        context = self.context
        index, tasks = context.task_index, len(context.component_tasks(context.component))
        mine = frozenset(name for name in found if reader_of(name, tasks) == index)
        if mine != self._mine:
            for name in tracker.partitions.keys() - mine if found else ():
                self._release(name)
                self._complain(
                    RuntimeError(f"partition {name} is there no more: its open records are dropped")
                )
            kept = self._store.current if self._store is not None else {}
            source.assign({name: kept.get(name) for name in sorted(mine)})
            self._mine = mine
        gone = {} if self._store is None else self._store.current.keys() - mine
        self._missing = {name: missing.get(name, now) for name in gone}

    def _release(self, name: str) -> None:
        self._source.nack(
            [
                one.record.handle
                for one in self._tracker.release(name)
                if one.record.handle is not None
            ]
        )

    def _drop_recreated(self) -> None:
        """Drop the records of partitions that were deleted and created again.

        Their positions count there no longer.
        """
        for name in self._source.recreated():
            if name in self._tracker.partitions:
                self._release(name)
            self._committed.pop(name, None)

    def values(self, record: SourceRecord) -> Sequence[Any] | None:
        """Values of the tuple that is emitted for a record; ``None``: it is skipped. What this
        raises makes the record a dead letter. Override it to use key, headers or time.
        """
        decoded = self._decode(record.value)
        if len(self._fields) == 1:
            return [decoded]
        if isinstance(decoded, Mapping):
            return [decoded[name] for name in self._fields]
        return decoded

    def _emit_record(self, one: OpenRecord) -> bool:
        """``False``: there was nothing to emit."""
        record = one.record
        try:
            values = self.values(record)
        except Exception as error:
            # It will be no better the next time.
            self._tracker.fail(one, time.monotonic())
            self._poisoned(one, error)
            return False
        if values is None:
            self._finish(one)
            return False
        try:
            self.emit(values, one)
        except Exception as error:
            self.raise_exception(error)
            self._failed(one, error)
        return True

    # -- verdicts ----------------------------------------------------------------------------------

    def ack(self, tup_id: OpenRecord) -> None:
        """The record is finished."""
        self._finish(tup_id)

    def fail(self, tup_id: OpenRecord) -> None:
        """The record is emitted again later, or is poison."""
        self._failed(tup_id, None)

    def _lost(self, tup_id: OpenRecord) -> None:
        self._tracker.fail(tup_id, time.monotonic(), counts=False)

    def _finish(self, one: OpenRecord) -> None:
        if self._tracker.finish(one) and one.record.handle is not None:
            self._done.append(one.record.handle)

    def _failed(self, one: OpenRecord, why: Exception | None) -> None:
        if self._tracker.fail(one, time.monotonic()):
            self._poisoned(one, why)

    def _poisoned(self, one: OpenRecord, why: Exception | None) -> None:
        record, undecoded = one.record, why is not None
        if self.on_poison == "skip":
            self.log(f"{one} is skipped after {one.tries} tries: {why or 'it failed'}", "error")
            self._finish(one)
        elif self.on_poison == "dead_letter":
            where = {name: getattr(record, name) for name in _SHOWN}
            values = [_Undecoded(record.value)] if undecoded else list(self.values(record) or ())
            # A letter that could not be kept is not lost: the record is tried again.
            if self.give_up(one, values, None, None, why, _as_text(where)):
                self._finish(one)
        elif not one.reported:
            one.reported = True
            most = SPAN * self._tracker.max_open
            then = f"its partition stops {most} records after it (on_poison of the source is block)"
            self.raise_exception(
                RuntimeError(f"{one} failed {one.tries} times and is tried for ever: {then}")
            )

    def deactivate(self) -> None:
        """Commit ten times a second from now on: the worker may end when all is finished."""
        self._active, self._next_commit = False, 0.0

    def activate(self) -> None:
        """Commit once a second."""
        self._active = True

    # -- clock -------------------------------------------------------------------------------------

    def _on_clock(self) -> None:
        now = time.monotonic()
        if not self.context.may_write():
            return
        if self._done:
            self._guarded(lambda: (self._source.ack([*self._done]), self._done.clear()))
        if self._mine is not None and now >= self._next_refresh:
            # Also while nothing is read: what is new counts for the lag.
            self._guarded(self._refresh, now)
        if now >= self._next_commit:
            self._next_commit = now + (_COMMIT_SECS if self._active else 0.1)
            self._guarded(lambda: self._commit(now))
        if now >= self._next_lag:
            self._guarded(self._report_lag)

    def _commit(self, now: float) -> None:
        self._drop_recreated()
        changed = {
            name: after
            for name, after in self._tracker.positions()
            if self._committed.get(name, _NOTHING) != after
        }
        if self._source.keeps_positions:
            self._source.commit(changed)
        elif self._store is None:
            return
        else:
            old = [
                name
                for name, since in self._missing.items()
                if now - since >= self._source.forget_secs
            ]
            if changed or old:
                try:
                    self._store.save(changed, old)
                except Exception:
                    # The next refresh opens it again.
                    self._store.close()
                    self._store, self._next_refresh = None, 0.0
                    raise
        self._committed.update(changed)
        for name in self._tracker.closed():
            self._tracker.release(name)
            self._committed.pop(name, None)

    def _report_lag(self) -> None:
        now_ms = self.context.now_ms()
        lags: dict[str, Lag] = dict(self._source.lag())
        self._next_lag = time.monotonic() + (_LAG_SECS if lags else 0.0)
        shown: dict[str, list[float | None]] = {}
        for name, lag in sorted(lags.items(), key=lambda pair: -(pair[1].records or 0)):
            secs = lag.secs
            if secs is None and lag.records is not None:
                behind = self._tracker.behind_ms(name, now_ms) if lag.records else 0
                secs = None if behind is None else behind / 1000
            shown[name] = [lag.records, secs]
        if not lags:
            return
        self.report_metric("lag", sum(records or 0 for records, _ in shown.values()))
        self.report_metric(
            "lag_secs", max((secs or 0.0 for _, secs in shown.values()), default=0.0)
        )
        self.report_metric("lag_by_partition", dict(list(shown.items())[:_MOST_LAGS]))

    def close(self) -> None:
        """Commit what is finished, return the rest of a queue, and close the source."""
        self._mine = None
        if self.context.may_write():
            self._next_commit = self._next_lag = 0.0
            self._on_clock()
        for name in list(self._tracker.partitions):
            self._guarded(lambda name=name: self._release(name))
        if self._store is not None:
            self._store.close()
        self._source.close()

    # -- errors ------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            self._complain(error)
            return None

    def _complain(self, error: Exception) -> None:
        """Report an error of the source, the same one at most once a minute."""
        # Numbers after the second colon change from one report to the next.
        now, text = time.monotonic(), ":".join([type(error).__name__, *str(error).split(":")[:1]])
        if now - self._reported.get(text, -_ERROR_SECS) >= _ERROR_SECS:
            self._reported = {
                key: at for key, at in self._reported.items() if now - at < _ERROR_SECS
            } | {text: now}
            self.raise_exception(error)


def _as_text(value: Any) -> Any:
    """Bytes as text, for a reader of the letter."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return {key: _as_text(one) for key, one in value.items()} if isinstance(value, dict) else value
