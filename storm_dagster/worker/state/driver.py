"""Checkpoints of stateful bolts, and the acks that wait for them."""

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from storm_dagster.api.bolts import StatefulBolt
from storm_dagster.api.tuples import Tuple
from storm_dagster.api.windows import WindowedBolt
from storm_dagster.core.dataplane.keyed_state import (
    Checkpoint,
    id_key,
    stored_key,
)
from storm_dagster.model.errors import InvalidTopology, Unavailable
from storm_dagster.model.groupings import stable_hash
from storm_dagster.worker.state.host import StateTask
from storm_dagster.worker.state.keyed import KeyedState
from storm_dagster.worker.state.log import StateLog
from storm_dagster.worker.state.sink_batches import SinkBatches
from storm_dagster.worker.state.windows import WindowDriver

_PAUSE_SECS = 0.01
"""Shortest time between two checkpoints; one costs about 50 microseconds."""
_FORGET = 20_000
"""Ids that are freed in one pulse, in about two milliseconds."""
_REMEMBERED_TIMEOUTS = 4
"""Message timeouts for which an applied id is remembered: a tuple may be replayed repeatedly."""
_MAP_KEY_TYPES = frozenset({str, int, bytes})
"""Types of grouping keys that are in the state's map in the same form."""


def remember_secs(conf: Mapping[str, Any]) -> int:
    """Shortest time for which a bolt remembers applied ids, seconds."""
    return _REMEMBERED_TIMEOUTS * int(conf.get("topology.message.timeout.secs") or 30)


class StateDriver:
    """State of one task.

    Used by the thread that runs the bolt, except :meth:`has_pending_acks`.
    """

    def __init__(
        self,
        bolt: StatefulBolt | WindowedBolt,
        runner: StateTask,
        log: StateLog,
        windows: WindowDriver | None = None,
    ) -> None:
        self.bolt = bolt
        self.runner = runner
        self.windows = windows
        """Windows of the bolt: their tuples and results are in the checkpoints of the state."""
        self.by_fields = grouped_by_fields(runner)
        """(component, stream) -> indices of the grouping fields; ``None`` if an input is not
        grouped by fields.
        """
        self._id_at = self._id_places(self.by_fields)
        """(component, stream) -> (indices of the id's fields, indices of the grouping fields).

        Empty without a message id.
        """
        self.log = log
        is_divided = log.division.by_key and log.division.tasks > 1
        self._group_at = self.by_fields if self.by_fields and is_divided else {}
        """As :attr:`by_fields`, if keys are divided over several tasks; else empty.

        By it :meth:`apply` checks if a tuple belongs to this task.
        """
        if log.older:
            error = Unavailable(
                f"task {runner.task_id} ({runner.component}) continues with older state than it "
                f"last acknowledged, since topology.state.local is set: {log.older}"
            )
            runner.report(error, "state")
        self.state = KeyedState(log.contents, log.division, log.index)
        if isinstance(bolt, StatefulBolt):
            bolt.state = self.state
            bolt._sink_batches = SinkBatches(self)
        self.pending_acks: list[Tuple] = []
        """Acks deferred to the next checkpoint."""
        self._take_over(bolt)
        self._hashed: tuple[Tuple | None, int] = (None, 0)
        """The newest tuple whose grouping key was hashed, and the hash."""
        self._rejected: Tuple | None = None
        """The tuple that the bolt failed last."""
        self._init_ids()
        interval_ms = float(runner.conf.get("topology.state.checkpoint.interval.ms") or 1000)
        self._interval = interval_ms / 1000
        """Seconds after which a task that is never idle takes a checkpoint."""
        self._saved_at = time.monotonic()
        """Monotonic clock of the last checkpoint, or of the opening."""
        self._failed = False
        """True if the task has crashed: there are no further checkpoints."""
        self._saving = False
        """True between a checkpoint and the last of its acks. These are no longer in
        :attr:`pending_acks` then, and :meth:`has_pending_acks` is called by other threads.
        """

    def _take_over(self, bolt: StatefulBolt | WindowedBolt) -> None:
        """Replace methods of the bolt: its acks and the worker's calls come to this driver first.

        The replaced methods are kept, for this driver to call.
        """
        self._process = bolt.process
        # A windowed bolt without it needs no call: a tuple that was applied is in its windows.
        self._process_again: Callable[[Tuple], None] = getattr(
            bolt, "process_again", lambda tup: None
        )
        """Called instead of ``process`` for a tuple whose id was applied before."""
        # None: a windowed bolt, which has no such method.
        default_methods = (None, StatefulBolt.process_again)
        has_default = getattr(type(bolt), "process_again", None) in default_methods
        self._acks_repeated = self.windows is not None or has_default
        """True if this driver acks a repeated tuple: no code of the bolt runs that could."""
        # A gathering bolt (``GatheringBolt``) acks its tuples later itself.
        self._auto_acks = bolt.auto_ack and not getattr(bolt, "_gathers", False)
        """True if a tuple is acked when ``process`` returns."""
        collector = bolt._bound()
        self._ack: Callable[[Tuple], None] = collector.ack
        self._fail: Callable[..., None] = collector.fail
        collector.ack = self.defer_ack  # type: ignore[method-assign]
        collector.ack_all = self._defer_acks  # type: ignore[method-assign]
        collector.fail = self.fail  # type: ignore[method-assign]
        bolt.process = self.apply  # type: ignore[method-assign]

    def _init_ids(self) -> None:
        """Set the fields with the ids of applied tuples, and when they are forgotten."""
        self._ids: dict[Any, tuple[int, Any]] = {}
        """Id -> (hash of the grouping key, id), since the last checkpoint."""
        self._generation_ms = remember_secs(self.runner.conf) * 1000
        """Time in which one generation of ids is collected (``Contents.rotate_ids``)."""
        # By the worker's clock, as the message timeouts that it is derived from: the test harness
        # simulates that clock.
        self._rotate_ids_at = self.runner.shared.now_ms() + self._generation_ms
        """Time at which the next generation begins, and the one before the current is forgotten."""
        self._forgotten: MutableMapping[Any, int] = {}
        """Ids that are no longer remembered. They are freed in parts, since all in one pass would
        stop the loop.
        """

    def _id_places(
        self, by_fields: dict[tuple[str, str], list[int]] | None
    ) -> dict[tuple[str, str], tuple[list[int], list[int]]]:
        """Return the places of id and grouping fields by input.

        (component, stream) -> (indices of the id's fields, indices of the grouping's). Empty
        without a message id. ``by_fields``: as the attribute. ``InvalidTopology`` if an input lacks
        a field of the id, or a repeated tuple could reach another task.
        """
        names = self.bolt.message_id
        if names is None:
            return {}
        if by_fields is None:
            by_fields = self._inputs_of_only_task()
        if by_fields is None:
            raise InvalidTopology(
                f"bolt {self.runner.component!r} has a message_id, but several tasks and an input "
                "that is not grouped by fields: a repeated tuple could reach a task that does not "
                "know it"
            )
        id_fields = [names] if isinstance(names, str) else list(names)
        places: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        for source, grouping_places in by_fields.items():
            component, stream = source
            fields = self.runner.context.source_fields(component, stream)
            missing = [name for name in id_fields if name not in fields]
            if missing:
                raise InvalidTopology(
                    f"bolt {self.runner.component!r} has message_id {missing[0]!r}, but stream "
                    f"{stream!r} of {component!r} has: {', '.join(fields)}"
                )
            places[source] = ([fields.index(name) for name in id_fields], grouping_places)
        return places

    def _inputs_of_only_task(self) -> dict[tuple[str, str], list[int]] | None:
        """Inputs of a component's only task, without grouping fields.

        ``None`` if the component has more tasks.
        """
        if len(self.runner.context.component_tasks(self.runner.component)) != 1:
            return None
        inputs = [(item.component, item.stream) for item in self.runner.part.inputs]
        return {source: [] for source in inputs if not source[0].startswith("__")}

    # -- tuples ------------------------------------------------------------------------------------

    def apply(self, tup: Tuple) -> None:
        """Process a tuple, or call ``process_again`` if it was applied before.

        If that raises, the state is restored, and the tuple's ack is withdrawn. A tuple whose key
        belongs to another task is sent to that one.
        """
        # Called per tuple, measured by benchmarks/dataplane.py.
        if self._failed:
            raise Unavailable("the task restarts, because its state could not be saved")
        if self._group_at and self._goes_elsewhere(tup):
            return
        self.state._begin()
        contents = self.log.contents
        tuple_id = self.id_of(tup)
        is_applied = tuple_id is not None and (
            tuple_id in contents.ids or tuple_id in contents.old_ids
        )
        try:
            if is_applied:
                self._process_again(tup)
            else:
                self._process(tup)
            if self.windows is not None:
                if self._rejected is tup:
                    # The replay of a failed tuple enters the windows, not this copy.
                    self.windows.staged.clear()
                self.windows.enter_windows()
            is_accepted = self._auto_acks and self._rejected is not tup
            if is_accepted or (is_applied and self._acks_repeated):
                self.defer_ack(tup)
        except BaseException:
            self.state._undo()
            self._withdraw(tup)
            if self.windows is not None:
                self.windows.staged.clear()
            raise

    def _goes_elsewhere(self, tup: Tuple) -> bool:
        """Pass a tuple on if another task has its key, and return True then.

        Its sender knows another number of tasks, while that changes.
        """
        # Called per tuple, measured by benchmarks/dataplane.py.
        places = self._group_at.get((tup.component, tup.stream))
        if places is None:
            return False
        key = (
            tup.values[places[0]] if len(places) == 1 else tuple([tup.values[at] for at in places])
        )
        # A key with a value is this task's; a look-up is much faster than the hash of the key.
        if key.__class__ in _MAP_KEY_TYPES and key in self.log.contents.values:
            return False
        key_hash = stable_hash(key)
        owner = key_hash % self.log.division.tasks
        if owner == self.log.index:
            self._hashed = (tup, key_hash)
            return False
        task = self.runner.context.component_tasks(self.runner.component)[owner]
        self.runner.call_in_loop(lambda: self.runner.shared.redirect(tup, task))
        return True

    def id_of(self, tup: Tuple) -> Any:
        """Return the id of a tuple by the bolt's ``message_id``.

        ``None`` without one.
        """
        places = self._id_at.get((tup.component, tup.stream))
        if places is None:
            return None
        id_places, _ = places
        values = tup.values
        return (tup.component, tup.stream, *[id_key(values[at]) for at in id_places])

    def defer_ack(self, tup: Tuple) -> None:
        """Defer the ack of a tuple to the next checkpoint.

        The checkpoint also saves its id. Without effect for a tuple that the bolt failed in the
        same call; another copy of that tuple fails for the same reason. ``InvalidRequest`` if the
        id cannot be saved.
        """
        tuple_id = self.id_of(tup)
        if tuple_id is not None and tuple_id in self.state.refused:
            first, reason = self.state.refused[tuple_id]
            if tup is not first:
                self._fail(tup, reason)
            return
        if tuple_id is not None:
            key_hash = self.key_hash(tup)
            # Checked here: an id that cannot be saved fails its tuple, not the whole checkpoint.
            stored_key(tuple_id)
            self._ids[tuple_id] = (key_hash, tuple_id)
            self.log.contents.ids[tuple_id] = key_hash
        self.pending_acks.append(tup)

    def fail(self, tup: Tuple, reason: Any = None) -> None:
        """Fail a tuple. Without effect if its ack waits for a checkpoint.

        It does not count as applied: a replay is processed.
        """
        if tup not in self.pending_acks:
            self._rejected = tup
            self.state.refused[self.id_of(tup)] = (tup, reason)
            self._fail(tup, reason)

    def _withdraw(self, tup: Tuple) -> None:
        """Undo :meth:`defer_ack` of a tuple whose ``process`` raised."""
        if tup in self.pending_acks:
            self.pending_acks.remove(tup)
            tuple_id = self.id_of(tup)
            self._ids.pop(tuple_id, None)
            self.log.contents.ids.pop(tuple_id, None)

    def key_hash(self, tup: Tuple) -> int:
        """Return the hash of the grouping key of a tuple that has an id."""
        _, grouping_places = self._id_at[(tup.component, tup.stream)]
        return self._key_hash(tup, grouping_places)

    def _key_hash(self, tup: Tuple, places: list[int]) -> int:
        key = [tup.values[at] for at in places]
        return stable_hash(key[0] if len(key) == 1 else key)

    def owner_hash(self, tup: Tuple) -> int:
        """Return the hash of a tuple's grouping key.

        0 if state is not divided by key.
        """
        hashed_tuple, key_hash = self._hashed
        if hashed_tuple is tup:
            return key_hash
        if self.by_fields is None:
            return 0
        return self._key_hash(tup, self.by_fields[(tup.component, tup.stream)])

    def _defer_acks(self, tups: Sequence[Tuple]) -> None:
        for tup in tups:
            self.defer_ack(tup)

    def has_pending_acks(self) -> bool:
        """True if acks wait for a checkpoint.

        Also if complete results wait for earlier ones.
        """
        return self._has_unsaved() or self._saving or self._has_waiting_results()

    def _has_waiting_results(self) -> bool:
        return self.windows is not None and bool(
            self.windows.to_send and self.windows.results.acked
        )

    def _has_unsaved(self) -> bool:
        return bool(self.pending_acks) or (self.windows is not None and self.windows.changed)

    def idle_secs(self) -> float | None:
        """Return the seconds until :meth:`on_idle` has work.

        ``None`` if there is neither a checkpoint to take, nor a result to send.
        """
        if not self._has_unsaved():
            return _PAUSE_SECS if self._has_waiting_results() else None
        return max(0.0, self._saved_at + _PAUSE_SECS - time.monotonic())

    def on_idle(self) -> bool:
        """Take a checkpoint if there are changes, and the last one is old enough.

        Called when the queue is empty. Returns True if one was taken.
        """
        # Runs in each pass, measured by benchmarks/dataplane.py.
        if self.windows is not None:
            self.windows.collect()
        if not (self._has_unsaved() or self.state.changed):
            return False
        if time.monotonic() - self._saved_at < _PAUSE_SECS:
            return False
        self.checkpoint()
        return True

    def pulse(self) -> None:
        """Evaluate due windows, and take an overdue checkpoint.

        One that is not overdue is taken, too, if results of windows wait for it, or no tuple waits
        for the task. Forgotten ids are freed.
        """
        # Changes by ticks are not undone.
        self.state._begin()
        for _ in range(min(len(self._forgotten), _FORGET)):
            self._forgotten.popitem()
        if self.windows is not None:
            self.windows.pulse()
        has_unsent = self.windows is not None and bool(self.windows.unsent)
        is_overdue = time.monotonic() - self._saved_at >= self._interval
        if is_overdue or has_unsent or not self.runner.waiting():
            self.checkpoint()

    def checkpoint(self) -> None:
        """Save the changes, then ack.

        Without effect after a crash, or if there is no change, no pending ack, and no generation
        of ids to forget. If saving fails, the task restarts, and the tuples are replayed.
        """
        state = self.state
        rotates_ids = self.runner.shared.now_ms() >= self._rotate_ids_at
        if self._failed or not (state.changed or self._ids or self._has_unsaved() or rotates_ids):
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
            self._save(record, rotates_ids)
        finally:
            self._saving = False

    def _save(self, record: Checkpoint, rotates_ids: bool) -> None:
        """Append a checkpoint, and ack its tuples.

        ``rotates_ids``: begin a generation of ids then. If it cannot be appended, the task crashes.
        """
        state = self.state
        pending_acks = self.pending_acks
        self.pending_acks = []
        try:
            if state.changed or self._ids or record.windows is not None:
                self.log.append(record)
        except Exception as error:
            self.crash(error)
            return
        state.changed = {}
        self._ids = {}
        for tup in pending_acks:
            self._ack(tup)
        if self.windows is not None:
            self.windows.on_saved()
        self._saved_at = time.monotonic()
        if rotates_ids and not self._rotate_ids():
            return
        self._compact()

    def _rotate_ids(self) -> bool:
        """Begin a generation of ids. False if that cannot be saved: the task crashes then."""
        self._rotate_ids_at = self.runner.shared.now_ms() + self._generation_ms
        self._forgotten = self.log.contents.rotate_ids()
        try:
            self.log.append(Checkpoint(rotated=True))
        except Exception as error:
            self.crash(error)
            return False
        return True

    def _compact(self) -> None:
        """Rewrite the log if it is long.

        An error is reported. While checkpoints can be appended to the log as it is, the task
        continues with it; if its file is closed, the task crashes, and opens the state again.
        """
        try:
            self.log.compact()
        except Exception as error:
            if self.log.is_open:
                self.runner.report(error, "rewriting the state")
            else:
                self.crash(error)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the state. Any thread.

        They are keys and bytes of the state, the time for which a change has waited to be saved,
        and the watermark.
        """
        waits = bool(self.state.changed) or self.has_pending_acks()
        metrics: dict[str, Any] = {
            "state_keys": len(self.state),
            "state_bytes": self.log.size,
            "unsaved_secs": round(time.monotonic() - self._saved_at, 1) if waits else 0.0,
        }
        watermark = self.windows.windows.watermark if self.windows is not None else None
        if watermark is not None:
            metrics["watermark_ms"] = watermark
        return metrics

    def crash(self, error: Exception) -> None:
        """Report that state could not be saved; the engine restarts the task."""
        self._failed = True
        self.runner.report(error, "checkpoint")
        self.runner.crashed = True

    def abandon(self) -> None:
        """Close without a checkpoint, because the task crashed.

        The tuples since the last checkpoint are replayed.
        """
        self._failed = True
        self.pending_acks.clear()
        self.log.close()

    def close(self) -> None:
        """Take a last checkpoint, and close the log, also if that raises.

        No result of a window is sent after it: the next opening of the state sends them.
        """
        if self.windows is not None:
            self.windows.collect()
            self.windows.closing = True
        try:
            self.checkpoint()
        finally:
            self.log.close()


def grouped_by_fields(runner: StateTask) -> dict[tuple[str, str], list[int]] | None:
    """Return the fields that each input is grouped by.

    (component, stream) -> indices. ``None`` if an input is not grouped by fields.
    """
    places: dict[tuple[str, str], list[int]] = {}
    for item in runner.part.inputs:
        if item.component.startswith("__"):
            continue
        if item.grouping.type != "fields":
            return None
        fields = runner.context.source_fields(item.component, item.stream)
        indices = [fields.index(name) for name in item.grouping.fields]
        places[(item.component, item.stream)] = indices
    return places
