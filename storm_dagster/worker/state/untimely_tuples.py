"""Tuples that enter no window of a windowed bolt: late ones, and those from the future."""

import logging
from collections.abc import Callable

import msgspec

from storm_dagster.api.tuples import Tuple
from storm_dagster.core.dataplane.keyed_state import encode_value, join_encoded
from storm_dagster.core.dataplane.time_stamps import FutureStamp, future_stamp
from storm_dagster.core.dataplane.window_state import WindowShape
from storm_dagster.worker.state.host import StateTask

_log = logging.getLogger("storm_dagster.component")

STAMP: str = "topology.bolts.tuple.timestamp.field.name"
"""Conf key of the field with the time stamp."""
_LOG_MS = 10_000
"""Pause between two log lines about late tuples."""


class UntimelyTuples:
    """Counts, reports and stream of the tuples of one task that enter no window.

    Used by the thread that runs the task.
    """

    def __init__(
        self,
        runner: StateTask,
        shape: WindowShape,
        add_results: Callable[[list[msgspec.Raw]], None],
    ) -> None:
        """``add_results`` takes results, which are sent after the next checkpoint."""
        self._runner = runner
        self._shape = shape
        self._add_results = add_results
        self._late_count = 0
        self._future_count = 0
        self._logged_at = -_LOG_MS
        """Time of the last log line about a late tuple, in milliseconds since 1970."""

    def on_future(self, tup: Tuple, stamp: int, now: int) -> None:
        """Count and report a tuple from the future, which goes where late ones go."""
        runner = self._runner
        self._future_count += 1
        runner.call_in_loop(lambda: runner.metric("future", self._future_count))
        error = future_stamp(
            stamp,
            now,
            self._shape.max_ahead_ms,
            field=str(runner.conf.get(STAMP)),
            source=tup.component,
        )
        try:
            # Raised for its place: all such errors are one group, whatever their stamps are.
            raise error
        except FutureStamp:
            runner.report(error, "time stamp")
        self._pass_to_late_stream(tup)

    def on_late(self, tup: Tuple, stamp: int, watermark: int | None) -> None:
        """Count a late tuple, and pass it to the late stream, or drop it."""
        runner = self._runner
        self._late_count += 1
        runner.call_in_loop(lambda: runner.metric("late", self._late_count))
        if self._pass_to_late_stream(tup):
            return
        now = runner.shared.now_ms()
        if now - self._logged_at >= _LOG_MS:
            self._logged_at = now
            _log.info(
                "%s-%d: a tuple of %s is late (stamp %d, watermark %s) and dropped, the %dth: %r",
                runner.component,
                runner.task_id,
                tup.component,
                stamp,
                watermark,
                self._late_count,
                tup.values,
            )

    def _pass_to_late_stream(self, tup: Tuple) -> bool:
        """Emit a tuple on the stream of late ones. False without such a stream."""
        stream = self._shape.late_stream
        if stream is None:
            return False
        values = encode_value([list(tup.values), tup.component, tup.stream], stream)
        self._add_results([join_encoded([stream, values, None])])
        return True
