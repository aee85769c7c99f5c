"""Windowed bolts: timestamps, late tuples, due windows, what checkpoints hold of them, and delivery
of what they emit.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from storm_dagster.api.tuples import Tuple
from storm_dagster.api.windows import TupleWindow, WindowedBolt
from storm_dagster.core.dataplane.acking import PendingMap
from storm_dagster.core.dataplane.keyed_state import (
    Checkpoint,
    Contents,
    encode_value,
    join_encoded,
    key_of,
)
from storm_dagster.core.dataplane.window_state import HeldTuple, window_shape
from storm_dagster.core.dataplane.windowing import Windows
from storm_dagster.host.waiting import Backoff
from storm_dagster.model.dagster_events import DagsterEvent, decode_event
from storm_dagster.model.errors import InvalidRequest, InvalidTopology
from storm_dagster.model.values import decode_value, encode_own, own_values
from storm_dagster.worker.dataplane.named_values import namer_of
from storm_dagster.worker.dataplane.sending import route_of, send_to_targets
from storm_dagster.worker.dataplane.tree import Tree, next_edge
from storm_dagster.worker.state.host import MAX_RETRY_SECS, StateTask


class ResultTracker:
    """Roots of the results of a windowed task, as a spout has them. :meth:`take` belongs to the
    thread that runs the bolt, all else to the loop.
    """

    def __init__(self, runner: StateTask) -> None:
        self._runner = runner
        self.task_id = runner.task_id
        self.pending: PendingMap[Any] = PendingMap(
            float(runner.conf.get("topology.message.timeout.secs") or 30)
        )
        """Root -> (number of the result, how many tuples it has, tree)."""
        self.delayed = False
        """Whether back pressure stops the task, or a spout before it (:class:`Pressure`)."""
        self.acked: deque[int] = deque()
        """Roots of complete trees."""
        self.failed: deque[int] = deque()
        self.lost = self.failed
        """A result is sent again, whatever became of it."""

    def send(self, number: int, emitted: Sequence[Any], size: int) -> None:
        """Send the tuples (``size``) and events of a result: ``[stream, values, direct task]``, an
        event has no stream.

        A tuple that cannot be sent is reported, and the result is sent again after the message
        timeout.
        """
        runner = self._runner
        shared, component = runner.shared, runner.component
        root = next_edge() or 1
        tree = Tree(1, root, 0, self) if shared.acker_tasks else None
        self.pending.add(root, (number, size, tree), shared.clock())
        try:
            for stream, values, direct_task in emitted:
                if stream is None:
                    shared.events.add(runner, decode_event(values), tree)
                    continue
                route = route_of(runner.routes, stream, component)
                route.emitted += 1
                send_to_targets(
                    route, values, tree, shared.ledger, component, self.task_id, direct_task
                )
        except Exception as error:
            runner.report(error, "results of a window")
            return
        if tree is None:
            self.acked.append(root)
            return
        tree.count -= 1
        if not tree.count:
            shared.ledger.ack_tree(tree)

    def on_clock(self, now: float) -> None:
        """Fail the trees that have timed out."""
        if self._runner.awaits_target:
            self.pending.extend_deadlines(now)
        # A copy: the bolt's thread removes entries.
        self.failed += self.pending.overdue(now, list(self.pending.entries.items()))

    def take(self) -> list[tuple[int, int, bool, float]]:
        """(number, size, whether its tree is complete, clock at which it was sent) of the results
        that were acked or failed since the last call.
        """
        found: list[tuple[int, int, bool, float]] = []
        for roots, acked in ((self.acked, True), (self.failed, False)):
            while roots:
                entry = self.pending.pop(roots.popleft())
                if entry is not None:
                    found.append((*entry[0][:2], acked, entry[1]))
        return found


_log = logging.getLogger("storm_dagster.component")

_STAMP = "topology.bolts.tuple.timestamp.field.name"
_KEY = "topology.bolts.window.session.key"
_LATE_LOG_MS = 10_000
"""Pause between two log lines about late tuples."""
_CONNECT_MS = 3000
"""Time in which the other workers reach a task that has started."""
_PULSE_MS = 1000
"""Most time between two pulses that counts as silence of the sources: in a longer one the task
itself did not run.
"""
_SLICE = 10
"""Most tuples of a result. What a window emits is as many results as that takes, each with a tree
of its own.
"""
_FIRST_IN_FLIGHT, _LEAST_IN_FLIGHT = 1000, 100
"""Tuples in flight before it is known how fast the readers are, and while they finish nothing in
time.
"""


class WindowState(Protocol):
    """State of a windowed task; ``StateDriver`` of ``worker/state/driver.py``."""

    def owner_hash(self, tup: Tuple) -> int:
        """Hash of the grouping key, which decides the task that the tuple belongs to."""
        ...

    def defer_ack(self, tup: Tuple) -> None:
        """Ack the tuple after the next checkpoint."""
        ...


class WindowDriver:
    """Windows of one task. Used by the thread that runs the bolt.

    The tuples of the windows are in the task's checkpoints and are acked after that. So is what a
    window emitted, together with the end of the window; it is sent after the checkpoint, until its
    tree is complete.
    """

    def __init__(self, bolt: WindowedBolt, runner: StateTask) -> None:
        self.bolt = bolt
        self.runner = runner
        conf = runner.conf
        self.shape = window_shape(conf, f"bolt {runner.component!r}")
        self._stamp_at = self._field_indices(conf.get(_STAMP)) if self.shape.event_time else {}
        self._key_at = self._field_indices(conf.get(_KEY)) if conf.get(_KEY) else {}
        late = self.shape.late_stream
        if late is not None and late not in runner.part.outputs:
            what = f"sends late tuples to stream {late!r}, which it does not declare"
            raise InvalidTopology(f"bolt {runner.component!r} {what}")
        self._pauses_ms = Backoff(100, MAX_RETRY_SECS * 1000)
        self._retry_at = 0
        self._tries = 0
        self._next_watermark = self._pulsed_at = 0
        self._listened_ms = 0
        """Clock of the silence of sources. It stands still while they, or this task, are held or
        inactive.
        """
        self._late_count, self._late_logged_at = 0, -_LATE_LOG_MS
        self._emitted: list[msgspec.Raw] | None = None
        """What the window in process has emitted."""
        self._reported: list[msgspec.Raw] = []
        """Its events for Dagster."""
        self.changed = False
        """Whether the next checkpoint has anything of the windows."""
        self.staged: list[tuple[Tuple, int, Any, int, msgspec.Raw]] = []
        """Tuples of the current call of ``process``: (tuple, stamp, key, owner hash, encoded)."""
        self._added: dict[int, tuple[int, msgspec.Raw]] = {}
        self._ended: list[int] = []
        self.unsent: list[int] = []
        """Results that wait for a checkpoint."""
        self._confirmed: list[int] = []
        self.to_send: deque[int] = deque()
        """Saved results that wait to be sent."""
        self._failed: list[int] = []
        """Results that the next pulse sends again."""
        self._in_flight, self._slowed_at = 0, -1.0
        """Tuples of the results that are sent and not complete; clock at which fewer were allowed
        for the last time.
        """
        self._most_in_flight: float = _FIRST_IN_FLIGHT
        """As many as the readers finish long before the message timeout: else all would be sent
        again, for ever.
        """
        self.closing = False

    def _field_indices(self, field: Any) -> dict[tuple[str, str], int]:
        found: dict[tuple[str, str], int] = {}
        for item in self.runner.part.inputs:
            fields = self.runner.context.source_fields(item.component, item.stream)
            if field not in fields:
                raise InvalidTopology(
                    f"bolt {self.runner.component!r} needs field {field!r} of every tuple, but stream {item.stream!r} "
                    f"of {item.component!r} has: {', '.join(fields) or 'none'}"
                )
            found[(item.component, item.stream)] = fields.index(field)
        return found

    def read(self, contents: Contents) -> None:
        """Continue with the windows in the state. Any thread, before :meth:`attach`."""
        self._contents = contents
        entries = [*map(_with_tuple, contents.entries())]
        if (name_values := namer_of(self.bolt, self.runner.context)) is not None:
            name_values([entry.item for entry in entries])
        self.windows = Windows(self.shape, (), contents.windows, entries)

    def attach(self, state: WindowState) -> None:
        """Take tuples from now on."""
        self._state, contents = state, self._contents
        self.runner.results = self.results = ResultTracker(self.runner)
        self.to_send += contents.results
        self._next_result = max(contents.results, default=-1) + 1
        # What was sent to the task before others reach it again is replayed after the message
        # timeout. Until then nothing makes it late.
        timeout = float(self.runner.conf.get("topology.message.timeout.secs") or 30)
        if contents.windows is not None:
            self._next_watermark = self.runner.shared.now_ms() + round(timeout * 1000) + _CONNECT_MS
        collector = self.bolt._bound()
        self._report_event = collector.event
        collector.event = self._event  # type: ignore[method-assign]
        self._end_tuples()

    # -- tuples ------------------------------------------------------------------------------------

    def add(self, tup: Tuple) -> None:
        """Check a tuple, which :meth:`hold` adds to its windows when ``process`` has returned."""
        stream = (tup.component, tup.stream)
        now = self.runner.shared.now_ms()
        if not self.shape.event_time:
            stamp = now
        else:
            given = tup.values[self._stamp_at[stream]]
            if (
                isinstance(given, bool)
                or not isinstance(given, int | float)
                or not abs(given) < 1 << 62
            ):
                raise InvalidRequest(
                    f"the time stamp of a tuple of {tup.component!r} is {given!r:.60}: it must be milliseconds since 1970"
                )
            stamp = int(given)
        key = key_of(tup.values[self._key_at[stream]]) if self._key_at else None
        owner = self._state.owner_hash(tup)
        item = encode_value(
            [*stream, tup.task, tup.values], f"a window with a tuple of {tup.component}"
        )
        self.staged.append((tup, stamp, key, owner, item))

    def hold(self) -> None:
        """Add the checked tuples to their windows, and evaluate those that they complete."""
        staged, self.staged = self.staged, []
        for tup, stamp, key, owner, item in staged:
            self._state.defer_ack(tup)
            entry = self.windows.add(tup, stamp, (tup.component, tup.stream, tup.task), key)
            if entry is None:
                self._late(tup, stamp)
            else:
                raw = join_encoded([entry.stamp, item, encode_value(key, key), None])
                self._added[entry.number] = self._contents.held[entry.number] = (owner, raw)
            self.changed = True
        # Only counted windows become due by a tuple; the others by time.
        if self.shape.slide_count is not None and not self.shape.event_time:
            self.evaluate()

    def _late(self, tup: Tuple, stamp: int) -> None:
        self._late_count += 1
        self.runner.call_in_loop(lambda: self.runner.metric("late", self._late_count))
        stream = self.shape.late_stream
        if stream is not None:
            values = encode_value([list(tup.values), tup.component, tup.stream], stream)
            self._add_results([join_encoded([stream, values, None])])
            return
        now = self.runner.shared.now_ms()
        if now - self._late_logged_at >= _LATE_LOG_MS:
            self._late_logged_at = now
            late = "%s-%d: a tuple of %s is late (stamp %d, watermark %s) and dropped, the %dth: %r"
            what = (tup.component, stamp, self.windows.watermark, self._late_count, tup.values)
            _log.info(late, self.runner.component, self.runner.task_id, *what)

    # -- windows -----------------------------------------------------------------------------------

    def pulse(self) -> None:
        """Evaluate the windows that are due by time, and send what waits, or failed."""
        self.to_send += self._failed
        self._failed = []
        self.collect()
        shared, context = self.runner.shared, self.runner.context
        now = shared.now_ms()
        if shared.spouts_run and not self.results.delayed:
            self._listened_ms += min(now - self._pulsed_at, _PULSE_MS)
        self._pulsed_at = now
        if not self.shape.event_time:
            self.windows.advance(now)
        elif now >= self._next_watermark:
            self._next_watermark = now + self.shape.watermark_ms
            # Their number may have changed.
            self.windows.sources = frozenset(
                (item.component, item.stream, task)
                for item in self.runner.part.inputs
                for task in context.component_tasks(item.component)
                if not item.component.startswith("__")
            )
            self.windows.advance(self._listened_ms)
        self.evaluate()

    def evaluate(self) -> None:
        """Process every window that is due. One that raises is tried again after a pause; later
        ones wait.
        """
        windows, bolt = self.windows, self.bolt
        now = self.runner.shared.now_ms()
        while now >= self._retry_at and (pane := windows.due()) is not None:
            bolt._begin()
            emitted, reported = self._emitted, self._reported = [], []
            try:
                times = (pane.start_ms, pane.end_ms)
                # Copies: the pane comes again if this raises.
                bolt.process_window(
                    TupleWindow([*pane.items], [*pane.new], [*pane.expired], *times, pane.key)
                )
            except Exception as error:
                bolt._undo()
                emitted, reported = [], []
                self._tries += 1
                given_up = bolt.window_tries is not None and self._tries >= bolt.window_tries
                then = f": dropped with {len(pane.items)} tuples" if given_up else ""
                self.runner.report(
                    error, f"process_window (try {self._tries}, end {pane.end_ms}){then}"
                )
                if not given_up:
                    self._retry_at = now + round(self._pauses_ms.next_pause())
                    break
            finally:
                self._emitted = None
            self._pauses_ms.reset()
            self._tries = 0
            windows.done()
            self.changed = True
            self._add_results(emitted)
            self._add_results(reported)
        self._end_tuples()

    def _end_tuples(self) -> None:
        for entry in self.windows.take_finished():
            del self._contents.held[entry.number]
            if self._added.pop(entry.number, None) is None:
                self._ended.append(entry.number)
            self.changed = True

    # -- what windows emit -------------------------------------------------------------------------

    def emit(
        self,
        tup: Any,
        stream: str | None,
        anchors: Any,
        direct_task: int | None,
        need_task_ids: bool,
    ) -> Any:
        """Keep a tuple that a window emits for the checkpoint; send any other one."""
        if self._emitted is None or (anchors is not None and not anchors):
            return self.bolt._bound().emit(
                tup, stream, anchors or [], direct_task, need_task_ids, None
            )
        runner, name = self.runner, stream or "default"
        if need_task_ids:
            raise InvalidRequest(
                f"component {runner.component!r} asks for task ids in process_window, which emits after the checkpoint: "
                "emit without need_task_ids, or with anchors=[]"
            )
        route = runner.checked_route(tup, name)
        values = msgspec.Raw(
            encode_own(own_values(tup, route.fields, name, runner.component, runner.task_id))
        )
        self._emitted.append(join_encoded([name, values, encode_value(direct_task, "direct_task")]))
        return None

    def _event(self, event: DagsterEvent, anchors: Any) -> None:
        if self._emitted is None:
            self._report_event(event, anchors)
        else:
            document = encode_value(msgspec.to_builtins(event), event.asset)
            self._reported.append(join_encoded([None, document, None]))

    def _add_results(self, emitted: list[msgspec.Raw]) -> None:
        for at in range(0, len(emitted), _SLICE):
            self._contents.results[self._next_result] = join_encoded(emitted[at : at + _SLICE])
            self.unsent.append(self._next_result)
            self._next_result += 1

    def _send_waiting(self) -> None:
        while (
            self.to_send
            and self._in_flight < self._most_in_flight
            and not (self.closing or self.runner.held)
        ):
            self._send(self.to_send.popleft())

    def _send(self, number: int) -> None:
        emitted = decode_value(self._contents.results[number])
        # Events wait for Dagster, which may be away: they keep no tuple from being sent.
        size = sum(stream is not None for stream, *_ in emitted)
        self._in_flight += size
        self.runner.call_in_loop(lambda: self.results.send(number, emitted, size))

    def collect(self) -> None:
        """Take the results whose trees are complete or failed, and send what waits, as far as the
        readers take it.
        """
        now, timeout = self.runner.shared.clock(), self.results.pending.timeout
        for number, size, acked, sent_at in self.results.take():
            self._in_flight -= size
            share = (now - sent_at) / timeout
            if not acked:
                self._failed.append(number)
                if size and share >= 1 and sent_at > self._slowed_at:
                    # Once for all that were under way at the same time.
                    self._slowed_at = now
                    self._most_in_flight = max(_LEAST_IN_FLIGHT, self._most_in_flight / 2)
            elif self._contents.results.pop(number, None) is not None:
                self._confirmed.append(number)
                self.changed = True
                if self.to_send and share < 0.5:
                    # By less when twice as many would only just be in time.
                    self._most_in_flight += size if share < 0.25 else size / 2
        self._send_waiting()

    # -- checkpoints -------------------------------------------------------------------------------

    def save_to(self, record: Checkpoint) -> None:
        """Put the changes into a checkpoint."""
        contents: Contents = self._contents
        record.held = [(number, owner, raw) for number, (owner, raw) in self._added.items()]
        record.finished, record.confirmed = self._ended, self._confirmed
        record.results = [(number, contents.results[number]) for number in self.unsent]
        record.windows = contents.windows = self.windows.position()

    def on_saved(self) -> None:
        """Send the results that are in the checkpoint."""
        self._added, self._ended, self._confirmed = {}, [], []
        self.changed = False
        self.to_send += self.unsent
        self.unsent = []
        self._send_waiting()


def _with_tuple(entry: HeldTuple) -> HeldTuple:
    component, stream, task, values = entry.item
    entry.item = Tuple(0, component, stream, task, values)
    return entry
