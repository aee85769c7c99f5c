"""Checkpoints of stateful bolts, and the acks that wait for them."""

import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from storm_dagster.api.bolts import StatefulBolt
from storm_dagster.api.tuples import Tuple
from storm_dagster.api.windows import WindowedBolt
from storm_dagster.core.keyed_state import (
    Checkpoint,
    Contents,
    Partitioning,
    encode_value,
    key_of,
    stored_key,
)
from storm_dagster.model.errors import InvalidRequest, InvalidTopology, Unavailable
from storm_dagster.model.groupings import stable_hash
from storm_dagster.model.wire import StateQuery
from storm_dagster.worker.state.log import StateLog
from storm_dagster.worker.tasks.sink_batches import SinkBatches

if TYPE_CHECKING:
    from storm_dagster.worker.tasks.runner import Runner
    from storm_dagster.worker.tasks.windows import WindowDriver

_PAUSE_SECS = 0.01
"""Least time between two checkpoints; one costs about 50 microseconds."""
_FORGET = 20_000
"""Ids that are freed in one go, in about two milliseconds."""
_REMEMBERED_TIMEOUTS = 4
"""Message timeouts for which an applied id is remembered: a tuple may be replayed repeatedly."""
_ABSENT: Any = object()
_PLAIN = frozenset({str, int, bytes})
_TRIES = 20
_PAGE_BYTES, _VALUE_BYTES, _SHOWN = 256 << 10, 16 << 10, 1000


def remember_secs(conf: Mapping[str, Any]) -> int:
    """Least time for which a stateful bolt remembers applied ids, seconds."""
    return _REMEMBERED_TIMEOUTS * int(conf.get("topology.message.timeout.secs") or 30)


class KeyedState:
    """See :class:`storm_dagster.api.bolts.KeyValueState`."""

    def __init__(self, contents: Contents, division: Partitioning, index: int) -> None:
        self._values = contents.values
        self._division = division
        self._index = index
        self._alone = division.tasks == 1 or not division.by_key
        self.changed: dict[Any, msgspec.Raw | None] = {}
        """Key -> encoded value, ``None`` if removed; since the last checkpoint."""
        self._journal: list[tuple[Any, Any, Any]] = []
        """(key, value before, change before) of each change by the current tuple."""
        self.refused: dict[Any, tuple[Tuple, Any]] = {}
        """Id -> tuple and reason, of what the current tuple's or batch's code failed: copies fail
        with it.
        """

    def _own_key(self, key: Any) -> Any:
        key = key_of(key)
        try:
            known = key in self._values
        except TypeError:
            raise InvalidRequest(
                f"{type(key).__name__} {key!r:.60} cannot be a key of the state: use a string, a number, bytes or a "
                "tuple of them"
            ) from None
        if not known and not self._alone:
            owner = self._division.owner(key)
            if owner != self._index:
                raise InvalidRequest(
                    f"the state of key {key!r:.80} belongs to task number {owner} of this component, not to number "
                    f"{self._index}: use the value that the input is grouped by as the key"
                )
        return key

    def get(self, key: Any, default: Any = None) -> Any:
        """The value, or ``default``."""
        return self._values.get(self._own_key(key), default)

    def __getitem__(self, key: Any) -> Any:
        return self._values[self._own_key(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        key = self._own_key(key)
        stored_key(key)
        raw = encode_value(value, key)
        self._journal.append((key, self._values.get(key, _ABSENT), self.changed.get(key, _ABSENT)))
        self._values[key] = value
        self.changed[key] = raw

    def __delitem__(self, key: Any) -> None:
        key = self._own_key(key)
        before = self._values.pop(key)
        self._journal.append((key, before, self.changed.get(key, _ABSENT)))
        self.changed[key] = None

    def __contains__(self, key: Any) -> bool:
        return self._own_key(key) in self._values

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """The (key, value) pairs of this task."""
        return iter(list(self._values.items()))

    def page(self, query: StateQuery) -> dict[str, Any]:
        """Current entries, some maybe not saved yet: ``{"entries": [{"key", "value"}], "next"}``.

        ``next`` is the offset of the next entry, ``None`` at the end. At most about 256 KiB. For a
        value longer than 16 KiB, or not valid in JSON, ``shown`` is the beginning of its ``repr``.
        Any thread.
        """
        if query.keys:
            pairs = [
                (key, self._values[key]) for key in map(key_of, query.keys) if key in self._values
            ]
            return {
                "entries": [_entry(key, value)[0] for key, value in pairs[: query.limit]],
                "next": None,
            }
        for _ in range(_TRIES):
            try:
                pairs = list(
                    islice(self._values.items(), query.offset, query.offset + query.limit + 1)
                )
                break
            except RuntimeError:  # The task's thread added a key meanwhile.
                continue
        else:
            raise Unavailable(
                f"the state of task {query.task} changes too fast to be listed: ask for a key"
            )
        entries: list[dict[str, Any]] = []
        size = 0
        for key, value in pairs[: query.limit]:
            entry, length = _entry(key, value)
            size += length
            if entries and size > _PAGE_BYTES:
                break
            entries.append(entry)
        after = query.offset + len(entries)
        return {"entries": entries, "next": after if len(entries) < len(pairs) else None}

    def _begin(self) -> None:
        self._journal.clear()
        self.refused.clear()

    def _undo(self) -> None:
        for key, value, change in reversed(self._journal):
            for target, before in ((self._values, value), (self.changed, change)):
                if before is _ABSENT:
                    target.pop(key, None)
                else:
                    target[key] = before
        self._journal.clear()


def _entry(key: Any, value: Any) -> tuple[dict[str, Any], int]:
    """An entry as a JSON document, and its length in bytes."""
    try:
        raw = msgspec.json.encode([key, value])
    except (TypeError, ValueError, OverflowError, RecursionError):
        raw = b""
    if raw and len(raw) <= _VALUE_BYTES:
        return {"key": key, "value": value}, len(raw)
    shown, named = repr(value)[:_SHOWN], key
    if len(repr(key)) > _SHOWN or not isinstance(key, str | int | float | bool | None):
        named = repr(key)[:_SHOWN]
    return {"key": named, "value": None, "shown": shown}, len(shown) + len(repr(named))


class StateDriver:
    """State of one task. Used by the thread that runs the bolt, except :meth:`has_pending_acks`."""

    def __init__(
        self,
        bolt: StatefulBolt | WindowedBolt,
        runner: "Runner",
        log: StateLog,
        windows: "WindowDriver | None" = None,
    ) -> None:
        self.bolt = bolt
        self.runner = runner
        self.windows = windows
        """Its tuples and results are in the same checkpoints as the state."""
        self.by_fields = by_fields = grouped_by_fields(runner)
        self._id_at = self._id_places(by_fields)
        self.log = log
        self._group_at = (
            by_fields if by_fields and log.division.by_key and log.division.tasks > 1 else {}
        )
        if log.older:
            older = f"task {runner.task_id} ({runner.component}) goes on with older state than it last acknowledged"
            runner.report(
                Unavailable(f"{older}, since topology.state.local is set: {log.older}"), "state"
            )
        self.state = KeyedState(log.contents, log.division, log.index)
        if isinstance(bolt, StatefulBolt):
            bolt.state = self.state
            bolt._sink_batches = SinkBatches(self)
        self.pending_acks: list[Tuple] = []
        """Acks deferred to the next checkpoint."""
        self._process = bolt.process
        # Of a windowed bolt: a tuple that comes again is in its windows.
        self._again: Callable[[Tuple], None] = getattr(bolt, "process_again", lambda tup: None)
        self._acks_itself = bolt.auto_ack and not getattr(bolt, "_gathers", False)
        collector = bolt._bound()
        self._ack: Callable[[Tuple], None] = collector.ack
        # From here on, the bolt's acks and the worker's `process` calls go through this driver.
        collector.ack = self.defer_ack  # type: ignore[method-assign]
        collector.ack_all = self._defer_acks  # type: ignore[method-assign]
        self._fail: Callable[..., None] = collector.fail
        collector.fail = self.fail  # type: ignore[method-assign]
        bolt.process = self.apply  # type: ignore[method-assign]
        self._ids: dict[Any, tuple[int, Any]] = {}
        """Id -> (hash of the grouping key, encoded id), since the last checkpoint."""
        self._hashed: tuple[Tuple | None, int] = (None, 0)
        """The newest tuple whose grouping key was hashed, and the hash."""
        self._rejected: Tuple | None = None
        """The tuple that the bolt failed last."""
        self._rotate_ms = remember_secs(runner.conf) * 1000
        self._rotate_at = runner.shared.now_ms() + self._rotate_ms
        self._forgotten: MutableMapping[Any, int] = {}
        """Ids that are remembered no longer: freed little by little, since all at once would stop
        the loop.
        """
        self._interval = (
            float(runner.conf.get("topology.state.checkpoint.interval.ms") or 1000) / 1000
        )
        self._saved_at = time.monotonic()
        self._failed = False
        self._saving = False
        """Between a checkpoint and the last of its acks."""

    def _id_places(
        self, by_fields: dict[tuple[str, str], list[int]] | None
    ) -> dict[tuple[str, str], tuple[list[int], list[int]]]:
        names = self.bolt.message_id
        if names is None:
            return {}
        if (
            by_fields is None
            and len(self.runner.context.component_tasks(self.runner.component)) == 1
        ):
            inputs = [(item.component, item.stream) for item in self.runner.part.inputs]
            by_fields = {source: [] for source in inputs if not source[0].startswith("__")}
        if by_fields is None:
            raise InvalidTopology(
                f"bolt {self.runner.component!r} has a message_id, but several tasks and an input that is not grouped "
                "by fields: a repeated tuple could reach a task that does not know it"
            )
        wanted = [names] if isinstance(names, str) else list(names)
        found: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        for source, grouped in by_fields.items():
            fields = self.runner.context.source_fields(*source)
            missing = [name for name in wanted if name not in fields]
            if missing:
                raise InvalidTopology(
                    f"bolt {self.runner.component!r} has message_id {missing[0]!r}, but stream {source[1]!r} of "
                    f"{source[0]!r} has: {', '.join(fields)}"
                )
            found[source] = ([fields.index(name) for name in wanted], grouped)
        return found

    # -- tuples ------------------------------------------------------------------------------------

    def apply(self, tup: Tuple) -> None:
        """Process a tuple, unless it was applied before; if that raises, restore the state."""
        if self._failed:
            raise Unavailable("the task restarts, because its state could not be saved")
        if self._group_at and self._goes_elsewhere(tup):
            return
        self.state._begin()
        contents = self.log.contents
        name = self.id_of(tup)
        known = name is not None and (name in contents.ids or name in contents.old_ids)
        try:
            if known:
                self._again(tup)
            else:
                self._process(tup)
            if self.windows is not None:
                if self._rejected is tup:
                    self.windows.staged.clear()
                self.windows.hold()
            default = getattr(type(self.bolt), "process_again", None) in (
                None,
                StatefulBolt.process_again,
            )
            if (self._acks_itself and self._rejected is not tup) or (
                known and (self.windows is not None or default)
            ):
                self.defer_ack(tup)
        except BaseException:
            self.state._undo()
            self._withdraw(tup)
            if self.windows is not None:
                self.windows.staged.clear()
            raise

    def _goes_elsewhere(self, tup: Tuple) -> bool:
        """Pass a tuple on whose key another task has: its sender knows another number of tasks,
        while that changes.
        """
        places = self._group_at.get((tup.component, tup.stream))
        if places is None:
            return False
        key = (
            tup.values[places[0]] if len(places) == 1 else tuple([tup.values[at] for at in places])
        )
        # A key with a value is this task's; found much faster than its hash is computed.
        if key.__class__ in _PLAIN and key in self.log.contents.values:
            return False
        number = stable_hash(key)
        owner = number % self.log.division.tasks
        if owner == self.log.index:
            self._hashed = (tup, number)
            return False
        task = self.runner.context.component_tasks(self.runner.component)[owner]
        self.runner.call_in_loop(lambda: self.runner.shared.redirect(tup, task))
        return True

    def id_of(self, tup: Tuple) -> Any:
        """Id of a tuple by the bolt's ``message_id``; ``None`` without one."""
        places = self._id_at.get((tup.component, tup.stream))
        return (
            None
            if places is None
            else key_of([tup.component, tup.stream, *(tup.values[at] for at in places[0])])
        )

    def defer_ack(self, tup: Tuple) -> None:
        """Defer the ack of a tuple to the next checkpoint, which also saves its id."""
        name = self.id_of(tup)
        if name is not None and name in self.state.refused:
            first, reason = self.state.refused[name]
            if tup is not first:
                self._fail(tup, reason)
            return
        if name is not None:
            number = self.key_hash(tup)
            # Checked now: one that cannot be saved fails its own tuple, not all of the checkpoint.
            stored_key(name)
            self._ids[name] = (number, name)
            self.log.contents.ids[name] = number
        self.pending_acks.append(tup)

    def fail(self, tup: Tuple, reason: Any = None) -> None:
        """Fail a tuple, unless it is acked. It does not count as applied: a replay is processed."""
        if tup not in self.pending_acks:
            self._rejected = tup
            self.state.refused[self.id_of(tup)] = (tup, reason)
            self._fail(tup, reason)

    def _withdraw(self, tup: Tuple) -> None:
        if tup in self.pending_acks:
            self.pending_acks.remove(tup)
            name = self.id_of(tup)
            self._ids.pop(name, None)
            self.log.contents.ids.pop(name, None)

    def key_hash(self, tup: Tuple) -> int:
        """Hash of the grouping key of a tuple that has an id."""
        return self._key_hash(tup, self._id_at[(tup.component, tup.stream)][1])

    def _key_hash(self, tup: Tuple, places: list[int]) -> int:
        key = [tup.values[at] for at in places]
        return stable_hash(key[0] if len(key) == 1 else key)

    def owner_hash(self, tup: Tuple) -> int:
        """Hash of what the tuple was grouped by; 0 if state is not divided by key."""
        if self._hashed[0] is tup:
            return self._hashed[1]
        return (
            self._key_hash(tup, self.by_fields[(tup.component, tup.stream)])
            if self.by_fields is not None
            else 0
        )

    def _defer_acks(self, tups: Sequence[Tuple]) -> None:
        for tup in tups:
            self.defer_ack(tup)

    def has_pending_acks(self) -> bool:
        """Whether acks wait for a checkpoint, or results for those before them, which are
        complete.
        """
        return self._unsaved() or self._saving or self._results_wait()

    def _results_wait(self) -> bool:
        return self.windows is not None and bool(
            self.windows.to_send and self.windows.results.acked
        )

    def _unsaved(self) -> bool:
        return bool(self.pending_acks) or (self.windows is not None and self.windows.changed)

    def idle_secs(self) -> float | None:
        """Seconds until :meth:`on_idle` takes a checkpoint, or sends results; ``None``: there are
        none.
        """
        if not self._unsaved():
            return _PAUSE_SECS if self._results_wait() else None
        return max(0.0, self._saved_at + _PAUSE_SECS - time.monotonic())

    def on_idle(self) -> bool:
        """Take a checkpoint, if the last one is old enough. Called when the queue is empty."""
        if self.windows is not None:
            self.windows.collect()
        if (
            not (self._unsaved() or self.state.changed)
            or time.monotonic() - self._saved_at < _PAUSE_SECS
        ):
            return False
        self.checkpoint()
        return True

    def pulse(self) -> None:
        """Evaluate windows that are due, take a checkpoint that is overdue, and drop old ids."""
        self.state._begin()  # What ticks have changed is not undone.
        for _ in range(min(len(self._forgotten), _FORGET)):
            self._forgotten.popitem()
        if self.windows is not None:
            self.windows.pulse()
        unsent = self.windows is not None and self.windows.unsent
        if (
            time.monotonic() - self._saved_at >= self._interval
            or unsent
            or not self.runner.waiting()
        ):
            self.checkpoint()

    def checkpoint(self) -> None:
        """Save the changes, then ack. If saving fails, the task restarts, and the tuples come
        again.
        """
        state = self.state
        rotate = self.runner.shared.now_ms() >= self._rotate_at
        if self._failed or not (state.changed or self._ids or self._unsaved() or rotate):
            return
        changes = state.changed
        record = Checkpoint(
            values=[(key, raw) for key, raw in changes.items() if raw is not None],
            removed=[key for key, raw in changes.items() if raw is None],
            ids=list(self._ids.values()),
        )
        if self.windows is not None and self.windows.changed:
            self.windows.save_to(record)
        self._saving = True
        try:
            self._save(record, rotate)
        finally:
            self._saving = False

    def _save(self, record: Checkpoint, rotate: bool) -> None:
        state = self.state
        pending_acks, self.pending_acks = self.pending_acks, []
        try:
            if state.changed or self._ids or record.windows is not None:
                self.log.append(record)
        except Exception as error:
            self.crash(error)
            return
        state.changed, self._ids = {}, {}
        for tup in pending_acks:
            self._ack(tup)
        if self.windows is not None:
            self.windows.on_saved()
        if rotate:
            self._rotate_at = self.runner.shared.now_ms() + self._rotate_ms
            self._forgotten = self.log.contents.rotate_ids()
            self.log.append(Checkpoint(rotated=True))
        self.log.compact()
        self._saved_at = time.monotonic()

    def metrics(self) -> dict[str, Any]:
        """Its metrics: keys and bytes of the state, how long something waits to be saved, and the
        watermark. Any thread.
        """
        waits = bool(self.state.changed) or self.has_pending_acks()
        found: dict[str, Any] = {
            "state_keys": len(self.state),
            "state_bytes": self.log.size,
            "unsaved_secs": round(time.monotonic() - self._saved_at, 1) if waits else 0.0,
        }
        watermark = self.windows.windows.watermark if self.windows is not None else None
        return found if watermark is None else {**found, "watermark_ms": watermark}

    def crash(self, error: Exception) -> None:
        """Report that state could not be saved; the task restarts."""
        self._failed = True
        self.runner.report(error, "checkpoint")
        self.runner.crashed = True

    def abandon(self) -> None:
        """Close without a checkpoint: the task crashed, and the tuples since the last one come
        again.
        """
        self._failed = True
        self.pending_acks.clear()
        self.log.close()

    def close(self) -> None:
        """Take a last checkpoint."""
        if self.windows is not None:
            self.windows.collect()
            self.windows.closing = True
        try:
            self.checkpoint()
        finally:
            self.log.close()


def grouped_by_fields(runner: "Runner") -> dict[tuple[str, str], list[int]] | None:
    """(component, stream) -> indices of the fields that the input is grouped by; ``None`` if one is
    not.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for item in runner.part.inputs:
        if item.component.startswith("__"):
            continue
        if item.grouping.type != "fields":
            return None
        fields = runner.context.source_fields(item.component, item.stream)
        found[(item.component, item.stream)] = [fields.index(name) for name in item.grouping.fields]
    return found
