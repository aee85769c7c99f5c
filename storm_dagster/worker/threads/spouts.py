"""Runner of blocking spouts."""

from __future__ import annotations

import queue
import time
from typing import Any

from storm_dagster.api.error_pauses import ErrorPauses
from storm_dagster.api.outages import SystemUnavailable
from storm_dagster.api.tuples import Tuple
from storm_dagster.worker.tasks.dead_letters import Verdict
from storm_dagster.worker.tasks.spouts import VERDICTS, SpoutBase
from storm_dagster.worker.threads.base import STOP, ThreadMixin

_CLOCK_SECS = 0.1
"""Pause between two calls of the spout's clock method."""
_RETIRE = object()
"""Item of an inbox: stop emitting."""


class BlockingSpoutRunner(ThreadMixin, SpoutBase):
    """Runner of a spout with ``blocking = True``."""

    def _prepare(self) -> None:
        super()._prepare()
        self._emit = self.make_emit()
        self._tracked = 0
        self._muted = False
        if not self.shared.active:
            self.inbox.put("deactivate")

    def _open_in_thread(self) -> None:
        self.letters.open()
        super()._open_in_thread()

    def run(self, now: float) -> bool:
        """Run the calls of the spout's thread, and pass verdicts to it."""
        worked = self.run_loop_calls()
        if self.queue:
            # Messages of the other tasks; a spout gets no other tuples.
            for message in self.queue:
                self.inbox.put(message)
            self.queue.clear()
            worked = True
        return self.deliver_verdicts(now, self._queue_verdict) or worked

    def _queue_verdict(self, verdict: Verdict, tup_id: Any) -> None:
        self.inbox.put((verdict, tup_id))

    def on_active(self, active: bool) -> None:
        if self._thread is not None:
            self.inbox.put("activate" if active else "deactivate")

    def _last_item(self, retire: bool) -> Any:
        return _RETIRE if retire and self.status == "running" else STOP

    def _return_pending(self) -> None:
        """Queue the last verdicts, and ``STOP``; in the loop.

        The pending tuples get the verdict ``lost``.
        """
        # Runs after the spout's last emit, so that all its pending tuples are known.
        self.deliver_verdicts(self.shared.clock(), self._queue_verdict)
        for tup_id in self.take_pending():
            self.inbox.put(("lost", tup_id))
        self.inbox.put(STOP)

    def stuck_calls(self, since: float) -> list[tuple[float, str, str]]:
        """Return calls as for bolts.

        ``next_tuple`` may wait for data while no item waits for the spout.
        """
        calls = super().stuck_calls(since)
        if self.inbox.empty():
            return [
                (start, method, stack) for start, method, stack in calls if method != "next_tuple"
            ]
        return calls

    def busy_elsewhere(self) -> bool:
        return self._thread is not None and (bool(self.loop_calls) or self.status != "running")

    def _may_emit(self) -> bool:
        """True if ``next_tuple`` may be called now. In the thread."""
        if not self.may_emit() or self._muted or self.crashed:
            return False
        if self.shared.clock() < self.retry_at() or self.system_wait.is_pausing():
            return False
        return self.max_pending is None or len(self.pending) + self._tracked < self.max_pending

    def _work(self) -> None:
        # Items of the inbox: a message of another task (Tuple), (verdict, tuple id), the name of a
        # method, _RETIRE, STOP. Without an item, `next_tuple` is called.
        spout = self.instance
        calls = self._calls
        catches = self.shared.catches
        pause = 0.0
        next_clock = 0.0
        while True:
            try:
                item = self.inbox.get(timeout=pause) if pause else self.inbox.get_nowait()
            except queue.Empty:
                item = None
            if item is STOP:
                return
            self.await_lease()
            if time.monotonic() >= next_clock and not self._detached:
                next_clock = time.monotonic() + _CLOCK_SECS
                self._run_clock()
            # Verdicts from before the end are still passed.
            if self._detached or (self.shared.closing and not isinstance(item, tuple)):
                continue
            args: list[Any] = []
            if isinstance(item, Tuple):
                method = "_on_peer_message"
                args = [item.task, item.values]
            elif isinstance(item, tuple):
                verdict, *args = item
                method = VERDICTS[verdict]
            elif isinstance(item, str):
                method = item
            elif item is _RETIRE:
                self._muted = True
                self.call_in_loop(self._return_pending)
                method = "deactivate"
            elif self._may_emit():
                method = "next_tuple"
            else:
                pause = 0.005
                continue
            before = self._emitted
            calls[0] = (time.monotonic(), method, None)
            try:
                getattr(spout, method)(*args)
                # After an empty call, a pause that doubles up to 20 ms.
                idle = method == "next_tuple" and self._emitted == before
                pause = min(0.02, (pause or 0.0005) * 2) if idle else 0.0
                self._on_success(method, idle)
            except catches as error:
                self._on_call_error(method, error)
                pause = 0.1
            finally:
                calls.clear()

    def _run_clock(self) -> None:
        """Call the spout's clock method, unless its errors pause it. In the thread."""
        if self.shared.clock() < self.clock_errors.until:
            return
        try:
            self.instance._on_clock()
        except self.shared.catches as error:
            self.on_error(error, "the spout's clock")
            self.clock_errors.on_error(self.shared.clock())
        else:
            self.clock_errors.on_success()

    def _on_success(self, method: str, idle: bool) -> None:
        """End the pauses of a method that returned; ``idle``: ``next_tuple`` emitted nothing."""
        if idle:
            self.call_errors.on_empty(self.shared.clock())
        else:
            self._pauses_of(method).on_success()
        if method == "next_tuple" and self.system_wait.is_waiting:
            self.system_wait.end()

    def _on_call_error(self, method: str, error: BaseException) -> None:
        """Report an error, or wait for the system that ``next_tuple`` named."""
        if method == "next_tuple" and isinstance(error, SystemUnavailable):
            self.system_wait.begin(error)
            return
        self.on_error(error, method)
        self._pauses_of(method).on_error(self.shared.clock())

    def _pauses_of(self, method: str) -> ErrorPauses:
        """Pauses for the errors of a method: those of ``next_tuple``, or of all others."""
        return self.call_errors if method == "next_tuple" else self.verdict_errors

    def _emit_in_loop(
        self, values: list[Any], stream: str, anchors: Any, direct_task: int | None, tup_id: Any
    ) -> list[int] | None:
        self._tracked -= tup_id is not None
        return self._emit(values, tup_id, stream, direct_task, True)
