"""Runners of blocking bolts and of bolts with an ``async`` ``process``."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import time
from typing import Any

from storm_dagster.api.outages import SystemUnavailable
from storm_dagster.api.tuples import Tuple
from storm_dagster.worker.dataplane.sending import route_of, send_to_targets
from storm_dagster.worker.dataplane.tree import anchor_tree
from storm_dagster.worker.state.opening import acks_itself
from storm_dagster.worker.tasks.bolts import count_inputs
from storm_dagster.worker.tasks.runner import PULSE_DUE, TICK_DUE, TURN_SECS
from storm_dagster.worker.threads.base import PULSE, STOP, TICK, ThreadMixin

_MAX_COUNTED = 64
"""Largest number of tuples that are counted in one call of the loop."""
_COUNT_NANOS = 5_000_000
"""Execution time after which fewer tuples are counted in one call."""


class BlockingBoltRunner(ThreadMixin):
    """Runner of a bolt with ``blocking = True``."""

    _name_values: Any = None
    """See :func:`namer_of`; set when the component is opened."""

    def run(self, now: float) -> bool:
        """Pass tuples to the thread, and run its calls."""
        worked = self.run_loop_calls()
        if self.queue:
            batch = self.queue.copy()
            self.queue.clear()
            if self._name_values is not None:
                self._name_values(batch)
            self.in_flight += len(batch)
            for tup in batch:
                self.inbox.put(tup)
            worked = True
        if self.ticks:
            due = self.ticks
            self.ticks = 0
            for bit, item in ((PULSE_DUE, PULSE), (TICK_DUE, TICK)):
                # Timers that are due while the thread is busy are one.
                if due & bit and item not in self._timers:
                    self._timers.add(item)
                    self.inbox.put(item)
        return worked

    def busy_elsewhere(self) -> bool:
        """True if the thread has work.

        To wait for a full target, for events to be taken, or for another system, does not count.
        """
        if self.instance is not None and self.shared.now_ms() < self.instance._room_at:
            return False
        if self.events_full or self.system_wait.is_pausing():
            return False
        if self._thread is None:
            return False
        return super().busy_elsewhere() or not self.inbox.empty() or bool(self._calls)

    def target_is_away(self) -> bool:
        """True while the bolt is full; see :meth:`Runner.target_is_away`."""
        bolt = self.instance
        is_away = bolt is not None and bolt._is_full and bolt._room_at > 0
        return is_away or super().target_is_away()

    def _count_executed(self, batch: list[Tuple], nanos: int) -> None:
        """Count tuples that the thread has executed in ``nanos`` together; in the loop."""
        number = len(batch)
        self.in_flight -= number
        stats = self.stats
        before = stats.executed_by.copy()
        count_inputs(self, batch)
        if stats.take_sample(number):
            stats.time_inputs(nanos, stats.executed_since(before))

    def _work(self) -> None:
        # Called per tuple, measured by benchmarks/dataplane.py.
        bolt = self.instance
        auto_ack = bolt.auto_ack and not acks_itself(bolt)
        auto_anchor = bolt.auto_anchor and not getattr(bolt, "_gathers", False)
        clock = time.perf_counter_ns
        inbox = self.inbox
        calls = self._calls
        catches = self.shared.catches
        self._anchors_itself = auto_anchor
        batch: list[Tuple] = []
        nanos = 0
        while not self.crashed:
            item = None if inbox.empty() else inbox.get()
            # Counted together: a call per tuple would cost more than a bolt that only gathers.
            if batch and (
                not isinstance(item, Tuple) or len(batch) >= _MAX_COUNTED or nanos >= _COUNT_NANOS
            ):
                self.call_in_loop(
                    lambda batch=batch, nanos=nanos: self._count_executed(batch, nanos)
                )
                batch = []
                nanos = 0
            if item is None:
                item = self._await_item()
                if item is None:
                    continue
            if item is STOP:
                return
            self._timers.discard(item)
            if isinstance(item, Tuple):
                self.note_unacked(item)
            while self._must_wait(item, bolt):
                self._wait_for_room(bolt)
            self.await_lease()
            if self._detached or self.shared.closing or self.crashed:
                # A tuple fails with the others in `unacked`, when the component is closed.
                continue
            if item is TICK or item is PULSE:
                self._run_timer(item)
                continue
            self._current = item
            # More than one pass only while a system of the component is unavailable.
            while True:
                begin = clock()
                emitted = self._emitted
                calls[0] = (begin / 1e9, "process", None)
                try:
                    bolt.process(item)
                except SystemUnavailable as error:
                    if self._await_repetition(error):
                        continue
                    # The task ends: the tuple fails with the others in `unacked`.
                    break
                except catches as error:
                    self._on_process_error(bolt, item, error)
                else:
                    if auto_ack:
                        self.call_in_loop(lambda tup=item: self.ack(tup))
                if self.system_wait.is_waiting:
                    self.system_wait.end()
                break
            self._current = None
            self._end_turn(emitted)
            calls.clear()
            nanos += clock() - begin
            batch.append(item)
            if self.state is not None and inbox.empty():
                self.state.on_idle()
        if batch:
            self.call_in_loop(lambda: self._count_executed(batch, nanos))

    def _await_item(self) -> Any:
        """Wait for the next item of the inbox; ``None`` if a checkpoint is due before.

        The wait of a bolt without state has no end. In the thread.
        """
        timeout = self.state.idle_secs() if self.state is not None else None
        try:
            return self.inbox.get(timeout=timeout)
        except queue.Empty:
            # Acks wait for the checkpoint of a task that is idle.
            self.await_lease()
            if self.state is not None:
                self.state.on_idle()
            return None

    def _wait_for_room(self, bolt: Any) -> None:
        """Let a bolt make room that cannot take an item now, and sleep. In the thread.

        A bolt that waits until its events are taken only sleeps.
        """
        if not self.events_full:
            self._calls[0] = (time.perf_counter_ns() / 1e9, "process", None)
            bolt._make_room()
            self._calls.clear()
        time.sleep(0.002)

    def _await_repetition(self, error: SystemUnavailable) -> bool:
        """Wait until the call that raised may be repeated. False if the task ends before."""
        self._calls.clear()
        self.system_wait.begin(error)
        return self._await_system()

    def _on_process_error(self, bolt: Any, tup: Tuple, error: BaseException) -> None:
        """Report an error of ``process``, and fail the tuple unless the bolt does that itself."""
        self.on_error(error, f"process of a tuple of {tup.component}")
        if bolt.auto_fail or self.crashed:
            reason = self.reason_of(error)
            self.call_in_loop(lambda: self.fail(tup, reason))

    def _await_system(self) -> bool:
        """Wait until the next call is due. False if the task ends before. In the thread."""
        while self.system_wait.is_pausing() or not self.shared.owns():
            if self._stopping or self._detached or self.shared.closing or self.crashed:
                return False
            time.sleep(0.002)
        return True

    def _must_wait(self, item: Any, bolt: Any) -> bool:
        """True while the component must not handle the item, a tuple or a timer.

        It waits until its events are taken, for back pressure, and for room in the bolt, unless
        the task ends. Called per tuple.
        """
        if self._stopping or self.shared.closing or self.crashed:
            return False
        if self.events_full and item is not PULSE:
            return True
        return isinstance(item, Tuple) and not (self.may_begin() and not bolt._is_full)

    def _run_timer(self, item: Any) -> None:
        """Run a due ``TICK``, or the timers of windows and state (``PULSE``)."""
        method = "process_tick" if item is TICK else "windows and state"
        self._calls[0] = (time.perf_counter_ns() / 1e9, method, None)
        if item is TICK:
            self.run_tick()
            while self.system_wait.is_of("tick"):
                self._calls.clear()
                if not self._await_system():
                    break
                self.run_tick()
        else:
            self.run_pulse()
        self._calls.clear()

    def _end_turn(self, emitted: int) -> None:
        """Pause a held task after a call that emitted more than it took."""
        if self.held and self._emitted > emitted + 1:
            self.next_turn = time.monotonic() + TURN_SECS

    def _emit_in_loop(
        self, values: list[Any], stream: str, anchors: Any, direct_task: int | None, tup_id: Any
    ) -> list[int]:
        tree = anchor_tree(anchors) if anchors else None
        route = route_of(self.routes, stream, self.component)
        route.emitted += 1
        links = send_to_targets(
            route, values, tree, self.shared.ledger, self.component, self.task_id, direct_task
        )
        return [link.task for link in links]


_processing: contextvars.ContextVar[Tuple | None] = contextvars.ContextVar(
    "processing", default=None
)


class AsyncBoltRunner(BlockingBoltRunner):
    """Runner of a bolt with an ``async`` ``process``.

    Several tuples are in flight on an event loop in the thread.
    """

    is_async = True
    _ending = False
    """True while the calls in flight are cancelled, because the thread ends."""

    def _work(self) -> None:
        self._ending = False
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        """Start a call for each item of the inbox.

        At most ``async_window`` are in flight. Returns when the inbox has ``STOP`` and the calls in
        flight are cancelled.
        """
        bolt = self.instance
        self._anchors_itself = bolt.auto_anchor
        window = asyncio.Semaphore(max(1, int(bolt.async_window)))
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        while True:
            tup = await loop.run_in_executor(None, self.inbox.get)
            if tup is STOP:
                break
            self._timers.discard(tup)
            if isinstance(tup, Tuple):
                self.note_unacked(tup)
            await window.acquire()
            if self.crashed:
                # The restart puts `STOP` into the inbox.
                window.release()
                continue
            task = loop.create_task(self._handle(tup, window))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        self._ending = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _handle(self, tup: Any, window: asyncio.Semaphore) -> None:
        """Process one item of the inbox, and leave the window."""
        try:
            while self._must_pause(tup) and not (self._stopping or self.shared.closing):
                await asyncio.sleep(0.002)
            while not self.shared.owns() and not self.shared.closing:
                await asyncio.sleep(0.02)
            begin = time.perf_counter_ns()
            if tup is TICK:
                await self._run_async_tick(begin)
                return
            _processing.set(tup)
            emitted = self._emitted
            while not await self._process(tup, time.perf_counter_ns()):
                while self.system_wait.is_pausing() and not (self._stopping or self.shared.closing):
                    await asyncio.sleep(0.002)
                if self._stopping or self.shared.closing:
                    # It fails with the others in `unacked`.
                    return
                begin = time.perf_counter_ns()
            self._end_turn(emitted)
            spent = time.perf_counter_ns() - begin
            self.call_in_loop(lambda: self._count_executed([tup], spent))
        except self.shared.catches as error:
            # When the task ends, its calls are cancelled; their tuples fail, like all others that
            # it has not acked.
            if not (self._ending and isinstance(error, asyncio.CancelledError)):
                self.on_error(error, "a call of the component")
        finally:
            window.release()

    def _must_pause(self, item: Any) -> bool:
        """True while an item must not be handled: see :meth:`BlockingBoltRunner._must_wait`."""
        if self.events_full or self.system_wait.is_pausing():
            return True
        return isinstance(item, Tuple) and not self.may_begin()

    async def _process(self, tup: Tuple, begin: int) -> bool:
        """Await ``process``, and ack or fail the tuple. False if it waits for a system."""
        bolt = self.instance
        try:
            self._calls[tup.id] = (begin / 1e9, "process", None)
            coroutine = bolt.process(tup)
            self._calls[tup.id] = (begin / 1e9, "process", coroutine)
            await coroutine
        except SystemUnavailable as error:
            self.system_wait.begin(error, "tuple", tup.id)
            return False
        except self.shared.catches as error:
            if self._ending and isinstance(error, asyncio.CancelledError):
                raise
            self._on_process_error(bolt, tup, error)
        else:
            if bolt.auto_ack:
                self.call_in_loop(lambda: self.ack(tup))
        finally:
            self._calls.pop(tup.id, None)
        # Other tuples, which need no answer of the system, do not show that it is back.
        self.system_wait.end("tuple", tup.id)
        return True

    async def _run_async_tick(self, begin: int) -> None:
        """Call ``process_tick``, which may be a coroutine, unless its errors pause it."""
        if self.shared.clock() < self.tick_errors.until:
            return
        try:
            coroutine = self.instance.process_tick(self.tick_tuple())
            if asyncio.iscoroutine(coroutine):
                self._calls[coroutine] = (begin / 1e9, "process_tick", coroutine)
                try:
                    await coroutine
                finally:
                    del self._calls[coroutine]
        except self.shared.catches as error:
            if self._ending and isinstance(error, asyncio.CancelledError):
                raise
            self.on_tick_error(error)
        else:
            self.tick_errors.on_success()
            self.system_wait.end("tick")

    def in_process(self) -> Tuple | None:
        return _processing.get()
