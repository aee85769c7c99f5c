"""Windowed bolts: due windows, late tuples, and results.

Checkpoints have the tuples of the windows, and the results, which are delivered until they are
acked.
"""

import logging
from collections import deque
from typing import Any, Protocol

import msgspec

from storm_dagster.api.outages import SystemUnavailable
from storm_dagster.api.tuples import Tuple
from storm_dagster.api.windows import TupleWindow, WindowedBolt
from storm_dagster.core.dataplane.keyed_state import (
    Checkpoint,
    Contents,
    encode_value,
    join_encoded,
    key_of,
)
from storm_dagster.core.dataplane.time_stamps import (
    date_of,
    is_too_far_ahead,
)
from storm_dagster.core.dataplane.window_state import WAITS_METRIC, HeldTuple, window_shape
from storm_dagster.core.dataplane.windowing import Pane, Windows
from storm_dagster.host.waiting import Backoff
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.errors import InvalidRequest, InvalidTopology
from storm_dagster.model.values import decode_value, encode_own, own_values
from storm_dagster.worker.dataplane.named_values import namer_of
from storm_dagster.worker.state.host import MAX_RETRY_SECS, StateTask
from storm_dagster.worker.state.untimely_tuples import STAMP, UntimelyTuples
from storm_dagster.worker.state.window_results import ResultTracker

_log = logging.getLogger("storm_dagster.component")

_KEY = "topology.bolts.window.session.key"
_CONNECT_MS = 3000
"""Time in which the other workers reach a task that has started."""
_PULSE_MS = 1000
"""Longest time between two pulses that counts as silence of the sources: in a longer one the task
itself did not run.
"""
_SLICE = 10
"""Largest number of tuples of a result. A window emits as many results as it needs, each with a
separate tree.
"""
_FIRST_IN_FLIGHT = 1000
"""Tuples in flight before the speed of the readers is known."""
_MIN_IN_FLIGHT = 100
"""Tuples in flight while the readers finish none in time."""


class WindowState(Protocol):
    """State of a windowed task.

    ``StateDriver`` of ``worker/state/driver.py``.
    """

    def owner_hash(self, tup: Tuple) -> int:
        """Return the hash of the grouping key.

        It decides the tuple's task.
        """
        ...

    def defer_ack(self, tup: Tuple) -> None:
        """Ack the tuple after the next checkpoint."""
        ...


class WindowDriver:
    """Windows of one task. Used by the thread that runs the bolt.

    The tuples of the windows are in the task's checkpoints and are acked after that. The results of
    a window are in the checkpoint with its end; they are sent after the checkpoint, until their
    trees are complete.
    """

    def __init__(self, bolt: WindowedBolt, runner: StateTask) -> None:
        self.bolt = bolt
        self.runner = runner
        conf = runner.conf
        self.shape = window_shape(conf, f"bolt {runner.component!r}")
        self._stamp_at = self._field_indices(conf.get(STAMP)) if self.shape.event_time else {}
        """Index of the time stamp by input; empty if the time of arrival counts."""
        self._key_at = self._field_indices(conf.get(_KEY)) if conf.get(_KEY) else {}
        """Index of the session's key by input; empty without one."""
        late = self.shape.late_stream
        if late is not None and late not in runner.part.outputs:
            raise InvalidTopology(
                f"bolt {runner.component!r} sends late tuples to stream {late!r}, which it does "
                "not declare"
            )
        self._pauses_ms = Backoff(100, MAX_RETRY_SECS * 1000)
        self._retry_at = 0
        """Time before which no window is processed. This and the next two times are milliseconds
        since 1970.
        """
        self._tries = 0
        """Tries of the due window that raised."""
        self._next_watermark = 0
        """Time before which the watermark does not advance."""
        self._replayed_at = 0
        """Time at which all tuples have come again that were in flight before a restart."""
        self._pulsed_at = 0
        """Time of the last pulse."""
        self._listened_ms = 0
        """Clock of the silence of sources. It stops while they, or this task, are held or inactive.
        """
        self._untimely = UntimelyTuples(runner, self.shape, self._add_results)
        self._waits_for = ""
        """Published reason why no window is due."""
        self._emitted: list[msgspec.Raw] | None = None
        """Tuples that the window in process has emitted; ``None`` between windows."""
        self._reported: list[msgspec.Raw] = []
        """Events for Dagster of the window in process."""
        self.changed = False
        """True if the next checkpoint has changes of the windows."""
        self.staged: list[tuple[Tuple, int, Any, int, msgspec.Raw]] = []
        """Tuples of the current call of ``process``: (tuple, stamp, key, owner hash, encoded)."""
        self._added: dict[int, tuple[int, msgspec.Raw]] = {}
        """Tuples that entered windows since the last checkpoint, as in ``Contents.held``."""
        self._ended: list[int] = []
        """Numbers of saved tuples that no window has needed since the last checkpoint."""
        self.unsent: list[int] = []
        """Results that wait for a checkpoint."""
        self._confirmed: list[int] = []
        """Results that were completed since the last checkpoint."""
        self.to_send: deque[int] = deque()
        """Saved results that wait to be sent."""
        self._failed: list[int] = []
        """Results that the next pulse resends."""
        self._in_flight = 0
        """Tuples of the results that are sent and not complete."""
        self._slowed_at = -1.0
        """Clock at which :attr:`_max_in_flight` was lowered for the last time."""
        self._max_in_flight: float = _FIRST_IN_FLIGHT
        """Tuples in flight that readers can ack well within the message timeout. More would all
        time out and be resent.
        """
        self.closing = False
        """True during the last checkpoint: results are no longer sent."""

    def _field_indices(self, field: Any) -> dict[tuple[str, str], int]:
        """(component, stream) -> index of a field that every input must have."""
        indices: dict[tuple[str, str], int] = {}
        for item in self.runner.part.inputs:
            fields = self.runner.context.source_fields(item.component, item.stream)
            if field not in fields:
                raise InvalidTopology(
                    f"bolt {self.runner.component!r} needs field {field!r} of every tuple, but "
                    f"stream {item.stream!r} of {item.component!r} has: "
                    f"{', '.join(fields) or 'none'}"
                )
            indices[(item.component, item.stream)] = fields.index(field)
        return indices

    def read(self, contents: Contents) -> None:
        """Continue with the windows in the state, which is kept and changed from now on.

        Any thread, before :meth:`attach`.
        """
        self._contents = contents
        entries = [_with_tuple(entry) for entry in contents.entries()]
        name_values = namer_of(self.bolt, self.runner.context)
        if name_values is not None:
            name_values([entry.item for entry in entries])
        self.windows = Windows(self.shape, (), contents.windows, entries)
        former = self.windows.reset_ahead(self.runner.shared.now_ms())
        if former is not None:
            _log.warning(
                "%s-%d: the watermark of the state was %s, which is in the future "
                "(topology.windows.max.ahead.secs): it is set back to %s",
                self.runner.component,
                self.runner.task_id,
                date_of(former),
                date_of(self.windows.watermark or 0),
            )

    def attach(self, state: WindowState) -> None:
        """Begin to take tuples, and queue the saved results that are not complete."""
        contents = self._contents
        self._state = state
        self.results = ResultTracker(self.runner)
        self.runner.results = self.results
        self.to_send += contents.results
        self._next_result = max(contents.results, default=-1) + 1
        # Tuples that were sent to the task before others reached it are replayed after the message
        # timeout. Until then the watermark does not advance, so that they are not late.
        timeout = float(self.runner.conf.get("topology.message.timeout.secs") or 30)
        if contents.windows is not None:
            self._replayed_at = self.runner.shared.now_ms() + round(timeout * 1000) + _CONNECT_MS
            self._next_watermark = self._replayed_at
        collector = self.bolt._bound()
        self._report_event = collector.event
        collector.event = self._event  # type: ignore[method-assign]
        self._end_tuples()

    # -- tuples ------------------------------------------------------------------------------------

    def stage(self, tup: Tuple) -> None:
        """Check and stage a tuple. :meth:`enter_windows` adds it to its windows after ``process``.

        ``InvalidRequest`` without a usable time stamp, or for values that cannot be saved.
        """
        stream = (tup.component, tup.stream)
        now = self.runner.shared.now_ms()
        stamp = now
        if self.shape.event_time:
            stamp_value = tup.values[self._stamp_at[stream]]
            if (
                isinstance(stamp_value, bool)
                or not isinstance(stamp_value, int | float)
                or not abs(stamp_value) < 1 << 62
            ):
                raise InvalidRequest(
                    f"the time stamp of a tuple of {tup.component!r} is {stamp_value!r:.60}: it "
                    "must be milliseconds since 1970"
                )
            stamp = int(stamp_value)
        key = key_of(tup.values[self._key_at[stream]]) if self._key_at else None
        owner = self._state.owner_hash(tup)
        item = encode_value(
            [*stream, tup.task, tup.values], f"a window with a tuple of {tup.component}"
        )
        self.staged.append((tup, stamp, key, owner, item))

    def enter_windows(self) -> None:
        """Add the staged tuples to their windows, and defer their acks.

        Windows that a number of tuples completes are evaluated.
        """
        staged = self.staged
        self.staged = []
        now = self.runner.shared.now_ms()
        for tup, stamp, key, owner, item in staged:
            self._state.defer_ack(tup)
            if self.shape.event_time and is_too_far_ahead(stamp, now, self.shape.max_ahead_ms):
                self._untimely.on_future(tup, stamp, now)
                self.changed = True
                continue
            entry = self.windows.add(tup, stamp, (tup.component, tup.stream, tup.task), key)
            if entry is None:
                self._untimely.on_late(tup, stamp, self.windows.watermark)
            else:
                raw = join_encoded([entry.stamp, item, encode_value(key, key), None])
                self._added[entry.number] = (owner, raw)
                self._contents.held[entry.number] = (owner, raw)
            self.changed = True
        # Only counted windows become due by a tuple; the others by time.
        if self.shape.slide_count is not None and not self.shape.event_time:
            self.evaluate()

    # -- windows -----------------------------------------------------------------------------------

    def pulse(self) -> None:
        """Evaluate the windows that are due by time.

        Waiting and failed results are sent.
        """
        self.to_send += self._failed
        self._failed = []
        self.collect()
        shared = self.runner.shared
        now = shared.now_ms()
        if shared.spouts_run and not self.results.delayed:
            self._listened_ms += min(now - self._pulsed_at, _PULSE_MS)
        self._pulsed_at = now
        if not self.shape.event_time:
            self.windows.advance(now)
        elif now >= self._next_watermark:
            self._next_watermark = now + self.shape.watermark_ms
            self.windows.sources = self._sources()
            self.windows.advance(self._listened_ms)
            self._publish_reason(self.windows.waits_for())
        elif now < self._replayed_at:
            self._publish_reason(
                "the watermark does not advance after a restart, until tuples in flight have come "
                "again (topology.message.timeout.secs)"
            )
        self.evaluate()

    def _publish_reason(self, reason: str) -> None:
        """Publish why no window is due, as a metric, if that has changed."""
        if reason != self._waits_for:
            self._waits_for = reason
            self.runner.call_in_loop(lambda: self.runner.metric(WAITS_METRIC, reason))

    def _sources(self) -> frozenset[tuple[str, str, int]]:
        """(component, stream, task) of all senders.

        Their number may have changed.
        """
        sources: set[tuple[str, str, int]] = set()
        for item in self.runner.part.inputs:
            if item.component.startswith("__"):
                continue
            for task in self.runner.context.component_tasks(item.component):
                sources.add((item.component, item.stream, task))
        return frozenset(sources)

    def evaluate(self) -> None:
        """Process every window that is due. Its emits wait for the next checkpoint.

        A window that raises is reported, and retried after a pause; later ones wait. After
        ``window_tries`` it is dropped.
        """
        windows = self.windows
        bolt = self.bolt
        now = self.runner.shared.now_ms()
        while now >= self._retry_at:
            pane = windows.due()
            if pane is None:
                break
            bolt._begin()
            emitted: list[msgspec.Raw] = []
            reported: list[msgspec.Raw] = []
            self._emitted = emitted
            self._reported = reported
            # Copies: the pane is processed once more if this raises.
            window = TupleWindow(
                [*pane.items],
                [*pane.new],
                [*pane.expired],
                pane.start_ms,
                pane.end_ms,
                pane.key,
            )
            try:
                bolt.process_window(window)
            except Exception as error:
                bolt._undo()
                emitted = []
                reported = []
                if not self._give_up(error, pane, now):
                    break
            finally:
                self._emitted = None
            self._pauses_ms.reset()
            self._tries = 0
            self.runner.system_wait.end("window")
            windows.done()
            self.changed = True
            self._add_results(emitted)
            self._add_results(reported)
        self._end_tuples()

    def _give_up(self, error: Exception, pane: Pane, now: int) -> bool:
        """Report the error of a window, and set the time of its retry.

        True if it had its last try. A window that waits for a system has any number of tries.
        """
        system_wait = self.runner.system_wait
        if isinstance(error, SystemUnavailable):
            system_wait.begin(error, "window")
            pause_secs = system_wait.pause_secs() or 0.0
            self._retry_at = now + round(pause_secs * 1000)
            return False
        system_wait.end("window")
        self._tries += 1
        max_tries = self.bolt.window_tries
        is_last = max_tries is not None and self._tries >= max_tries
        consequence = f": dropped with {len(pane.items)} tuples" if is_last else ""
        self.runner.report(
            error, f"process_window (try {self._tries}, end {pane.end_ms}){consequence}"
        )
        if not is_last:
            self._retry_at = now + round(self._pauses_ms.next_pause())
        return is_last

    def _end_tuples(self) -> None:
        """Remove the tuples that no window still needs from the state."""
        for entry in self.windows.take_finished():
            del self._contents.held[entry.number]
            # A tuple that was not saved yet is not mentioned in the next checkpoint.
            if self._added.pop(entry.number, None) is None:
                self._ended.append(entry.number)
            self.changed = True

    # -- results -----------------------------------------------------------------------------------

    def emit(
        self,
        tup: Any,
        stream: str | None,
        anchors: Any,
        direct_task: int | None,
        need_task_ids: bool,
    ) -> Any:
        """Keep a tuple that a window emits for the checkpoint.

        Any other tuple is sent.
        """
        # Without anchors (``anchors=[]``) a window, too, emits at once.
        if self._emitted is None or (anchors is not None and not anchors):
            return self.bolt._bound().emit(
                tup, stream, anchors or [], direct_task, need_task_ids, None
            )
        runner = self.runner
        name = stream or "default"
        if need_task_ids:
            raise InvalidRequest(
                f"component {runner.component!r} asks for task ids in process_window, which emits "
                "after the checkpoint: emit without need_task_ids, or with anchors=[]"
            )
        route = runner.checked_route(tup, name)
        values = own_values(tup, route.fields, name, runner.component, runner.task_id)
        raw = msgspec.Raw(encode_own(values))
        self._emitted.append(join_encoded([name, raw, encode_value(direct_task, "direct_task")]))
        return None

    def _event(self, event: DagsterEvent, anchors: Any) -> None:
        """Keep an event that a window reports for the checkpoint; send any other."""
        if self._emitted is None:
            self._report_event(event, anchors)
        else:
            document = encode_value(msgspec.to_builtins(event), event.asset)
            self._reported.append(join_encoded([None, document, None]))

    def _add_results(self, emitted: list[msgspec.Raw]) -> None:
        """Number the results in parts of :data:`_SLICE`; the next checkpoint saves them."""
        for at in range(0, len(emitted), _SLICE):
            self._contents.results[self._next_result] = join_encoded(emitted[at : at + _SLICE])
            self.unsent.append(self._next_result)
            self._next_result += 1

    def _send_waiting(self) -> None:
        """Send waiting results, as many as may be in flight; none while the task is held."""
        while (
            self.to_send
            and self._in_flight < self._max_in_flight
            and not (self.closing or self.runner.held)
        ):
            self._send(self.to_send.popleft())

    def _send(self, number: int) -> None:
        emitted = decode_value(self._contents.results[number])
        # Events wait for Dagster, which may be away: they do not delay tuples.
        size = sum(stream is not None for stream, *_ in emitted)
        self._in_flight += size
        self.runner.call_in_loop(lambda: self.results.send(number, emitted, size))

    def collect(self) -> None:
        """Take complete and failed results, and send waiting ones.

        As many are sent as the readers can take.
        """
        now = self.runner.shared.clock()
        timeout = self.results.pending.timeout
        for number, size, acked, sent_at in self.results.take():
            self._in_flight -= size
            # Part of the message timeout that the result took.
            share = (now - sent_at) / timeout
            if not acked:
                self._failed.append(number)
                # A result that failed before its timeout does not show that readers are slow.
                if size and share >= 1 and sent_at > self._slowed_at:
                    # Once for all results that were in flight at the same time.
                    self._slowed_at = now
                    self._max_in_flight = max(_MIN_IN_FLIGHT, self._max_in_flight / 2)
            elif self._contents.results.pop(number, None) is not None:
                self._confirmed.append(number)
                self.changed = True
                if self.to_send and share < 0.5:
                    # By less if twice as many would barely be in time.
                    self._max_in_flight += size if share < 0.25 else size / 2
        self._send_waiting()

    # -- checkpoints -------------------------------------------------------------------------------

    def save_to(self, record: Checkpoint) -> None:
        """Put the changes since the last checkpoint into ``record``."""
        contents: Contents = self._contents
        record.held = [(number, owner, raw) for number, (owner, raw) in self._added.items()]
        record.finished = self._ended
        record.confirmed = self._confirmed
        record.results = [(number, contents.results[number]) for number in self.unsent]
        record.windows = contents.windows = self.windows.position()

    def on_saved(self) -> None:
        """Forget the saved changes, and send the results that are in the checkpoint."""
        self._added = {}
        self._ended = []
        self._confirmed = []
        self.changed = False
        self.to_send += self.unsent
        self.unsent = []
        self._send_waiting()


def _with_tuple(entry: HeldTuple) -> HeldTuple:
    """Replace the encoded form of an entry's item by a tuple, in place."""
    component, stream, task, values = entry.item
    entry.item = Tuple(0, component, stream, task, values)
    return entry
