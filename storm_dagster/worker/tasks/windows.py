"""Evaluation of windowed bolts: timestamps, late tuples, due windows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from storm_dagster.api.tuples import Tuple
from storm_dagster.api.windows import TupleWindow, WindowedBolt
from storm_dagster.core.windowing import Windows, window_shape
from storm_dagster.model.errors import InvalidRequest, InvalidTopology

if TYPE_CHECKING:
    from storm_dagster.worker.tasks.runner import Runner

_log = logging.getLogger("storm_dagster.component")

_CHECK_SECS = 0.1
_STAMP = "topology.bolts.tuple.timestamp.field.name"
_KEY = "topology.bolts.window.session.key"


class WindowDriver:
    """Windows of one task. Used by the thread that runs the bolt."""

    def __init__(self, bolt: WindowedBolt, runner: Runner) -> None:
        self.bolt = bolt
        self.runner = runner
        conf = runner.conf
        self.shape = window_shape(conf, f"bolt {runner.component!r}")
        inputs = [item for item in runner.part.inputs if not item.component.startswith("__")]
        self._stamp_at = self._field_indices(conf.get(_STAMP)) if self.shape.event_time else {}
        self._key_at = self._field_indices(conf.get(_KEY)) if conf.get(_KEY) else {}
        late = self.shape.late_stream
        if late is not None and late not in runner.part.outputs:
            raise InvalidTopology(
                f"bolt {runner.component!r} sends late tuples to stream {late!r}, which it does not declare"
            )
        self.windows: Windows[Tuple] = Windows(self.shape, sources=max(1, len(inputs)))
        self._tries = 0
        self._next_watermark = 0
        bolt._pulse_secs = _CHECK_SECS if self.shape.needs_clock else None

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

    def add(self, tup: Tuple) -> None:
        """Add a tuple to its windows, and evaluate those that it completes."""
        source = (tup.component, tup.stream)
        now = self.runner.shared.now_ms()
        if not self.shape.event_time:
            stamp = now
        else:
            given = tup.values[self._stamp_at[source]]
            if isinstance(given, bool) or not isinstance(given, int | float):
                raise InvalidRequest(
                    f"the time stamp of a tuple of {tup.component!r} is {given!r:.60}: it must be milliseconds since 1970"
                )
            stamp = int(given)
        key = tup.values[self._key_at[source]] if self._key_at else None
        if not self.windows.add(tup, stamp, source, key):
            self._late(tup, stamp)
            return
        # Only counted windows become due by a tuple; the others by time.
        if self.shape.slide_count is not None and not self.shape.event_time:
            self.evaluate()

    def _late(self, tup: Tuple, stamp: int) -> None:
        stream = self.shape.late_stream
        if stream is not None:
            self.bolt.emit([list(tup.values), tup.component, tup.stream], stream=stream, anchors=[tup])
        else:
            _log.info(
                "%s-%d: a tuple of %s is late (stamp %d, watermark %s) and dropped: %r",
                self.runner.component,
                self.runner.task_id,
                tup.component,
                stamp,
                self.windows.watermark,
                tup.values,
            )
        self.bolt.ack(tup)

    def pulse(self) -> None:
        """Evaluate the windows that are due by time."""
        now = self.runner.shared.now_ms()
        if self.shape.event_time:
            if now < self._next_watermark:
                return
            self._next_watermark = now + self.shape.watermark_ms
        self.windows.advance(now)
        self.evaluate()

    def evaluate(self) -> None:
        """Process every window that is due. One that raises is retried later, then given up."""
        windows, bolt = self.windows, self.bolt
        while (pane := windows.due()) is not None:
            bolt._anchor_to(pane.items)
            bolt._begin()
            try:
                bolt.process_window(
                    TupleWindow(pane.items, pane.new, pane.expired, pane.start_ms, pane.end_ms, pane.key)
                )
            except Exception as error:
                bolt._undo()
                self._tries += 1
                self.runner.report(error, f"process_window (try {self._tries} of {bolt.window_tries})")
                if self._tries < bolt.window_tries:
                    break
                self._give_up()
            else:
                self._tries = 0
                windows.done()
            finally:
                bolt._anchor_to(None)
        finished = windows.take_finished()
        if bolt.auto_ack:
            for tup in finished:
                bolt.ack(tup)

    def _give_up(self) -> None:
        self._tries = 0
        for tup in self.windows.failed():
            if self.bolt.auto_fail:
                self.bolt.fail(tup)
