"""Components that block, or are ``async``: each task has a thread of its own.

The thread never touches routes, trees or queues of the loop. What a component does (emit, ack, fail) is
written down in order and carried out by the loop; only an emit that wants its receivers' ids waits for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from storm_dagster.api.bolt import Bolt
from storm_dagster.api.component import Collector
from storm_dagster.api.spout import Spout
from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.worker.bolts import count_inputs
from storm_dagster.worker.runner import Runner, make_component
from storm_dagster.worker.sending import check_values, route_of, spread
from storm_dagster.worker.spouts import SpoutBase
from storm_dagster.worker.tree import anchor_tree

__all__ = ["AsyncBoltRunner", "BlockingBoltRunner", "BlockingSpoutRunner", "ThreadMixin"]

_MOST_ORDERS = 20_000
"""Orders that may wait for the loop before the thread waits for it."""
_STOP = object()
_TICK = object()
_CLOSE_SECS = 5.0


class ThreadMixin(Runner):
    """A runner with a thread: ``inbox`` towards the component, ``orders`` back to the loop."""

    _thread: threading.Thread | None = None
    _cut = False

    def _prepare(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.orders: deque[Callable[[], Any]] = deque()
        self.inside = 0
        """Tuples handed to the thread and not yet done with (the loop's count)."""
        self._woken = False
        self._cut = False
        """The task was closed: the thread may neither execute nor order anything any more."""
        self._ended = threading.Event()
        self._opened: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    # -- loop's side ------------------------------------------------------------------------------------

    def start(self, now: float) -> bool:
        """Initialize in the thread, so that a slow ``initialize`` holds up nothing."""
        if self.status == "running":
            return True
        if self._thread is None:
            if now < self._retry_at:
                return False
            self._prepare()
            self._thread = threading.Thread(
                target=self._main, name=f"{self.component}-{self.task_id}", daemon=True
            )
            self._thread.start()
            return False
        self.carry_out()
        try:
            error = self._opened.get_nowait()
        except queue.Empty:
            return False
        if error is not None:
            self._thread = None
            self.report(error, "initialize")
            self._retry_at = now + self._pause
            self._pause = min(self._pause * 2, 60.0)
            return False
        self.status = "running"
        self.next_tick = now + (self.tick_secs or 0.0)
        return True

    def carry_out(self) -> bool:
        """Carry out what the component ordered; whether there was anything."""
        self._woken = False
        orders = self.orders
        if not orders:
            return False
        for _ in range(len(orders)):
            try:
                orders.popleft()()
            except Exception as error:
                self.report(error, "an order of the component's thread")
        return True

    def waiting(self) -> int:
        """Tuples in the queue and in the thread."""
        return len(self.queue) + (self.inside if self._thread is not None else 0)

    def busy_elsewhere(self) -> bool:
        """Whether the thread has work."""
        return self._thread is not None and (self.inside > 0 or bool(self.orders) or self.status != "running")

    def close(self) -> None:
        """Ask the thread to end; one that blocks for long is left behind, cut off from the loop."""
        if self._thread is not None:
            waiting: list[Tuple] = []
            try:
                while True:
                    item = self.inbox.get_nowait()
                    if isinstance(item, Tuple):
                        waiting.append(item)
            except queue.Empty:
                pass
            self.inbox.put(_STOP)
            if self.status == "running" and not self._ended.wait(_CLOSE_SECS):
                self.report(
                    TimeoutError(f"its thread did not end within {_CLOSE_SECS:g} s and is left behind"),
                    "close",
                )
            self.carry_out()
            self._cut = True
            for tup in waiting:
                self.shared.ledger.reject(tup)
        self.context.close()

    # -- thread's side ----------------------------------------------------------------------------------

    def order(self, action: Callable[[], Any]) -> None:
        """Have the loop do something, after everything that was ordered before."""
        while len(self.orders) >= _MOST_ORDERS and not (self._cut or self.shared.closing):
            time.sleep(0.001)
        if self._cut:
            return
        self.orders.append(action)
        if not self._woken:
            self._woken = True
            self.shared.wake()

    def ask(self, action: Callable[[], Any]) -> Any:
        """As :meth:`order`, and wait for the result."""
        answer: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def carry_out() -> None:
            try:
                answer.put((action(), None))
            except Exception as error:
                answer.put((None, error))

        self.order(carry_out)
        result, error = answer.get(timeout=60.0)
        if error is not None:
            raise error
        return result

    def checked(self, tup: Any, stream: str | None) -> list[Any]:
        """The values, checked in the caller's thread so that the caller gets the error."""
        check_values(tup, route_of(self.routes, stream or "default", self.component))
        return [*tup]

    def await_lease(self) -> None:
        """Wait while the worker's lease is over: nothing may be executed then."""
        while not self.shared.owns() and not (self._cut or self.shared.closing):
            time.sleep(0.02)

    def failed_here(self, error: BaseException, where: str) -> None:
        """Report from the thread."""
        self.order(lambda: self.report(error, where))

    def _main(self) -> None:
        try:
            self._open_here()
        except BaseException as error:
            self._opened.put(error)
            self.shared.wake()
            return
        self._opened.put(None)
        self.shared.wake()
        try:
            self._work()
        finally:
            try:
                self.instance.close()
            except Exception as error:
                self.failed_here(error, "close")
            self._ended.set()

    def _open_here(self) -> None:
        component = make_component(self.part)
        wanted = Spout if self.kind == "spout" else Bolt
        if not isinstance(component, wanted):
            raise TypeError(f"{self.part.object.python} is no {wanted.__name__}")
        collector: Collector = _ThreadCollector(self)
        component._collector = collector
        self.context.restrict(lambda: self.shared.owns() and not self._cut)
        component.context, component.conf = self.context, self.conf
        component.initialize(self.conf, self.context)
        self.instance = component

    def _work(self) -> None:
        raise InvalidRequest("a task with a thread must say what it does")

    def current_anchors(self) -> Any:
        """Anchors of an emit that names none."""
        return ()

    def emit_from_thread(
        self,
        tup: Any,
        stream: str | None,
        anchors: Any,
        direct_task: int | None,
        need_task_ids: bool,
        tup_id: Any,
    ) -> Any:
        """The component's ``emit``."""
        raise InvalidRequest("a task with a thread must say how it emits")


class _ThreadCollector:
    """What the methods of a component with a thread talk to."""

    def __init__(self, runner: ThreadMixin) -> None:
        self._runner = runner
        self.emit = runner.emit_from_thread

    def ack(self, tup: Tuple) -> None:
        """See ``Bolt.ack``."""
        runner = self._runner
        runner.order(lambda: _settle(runner, tup))

    def fail(self, tup: Tuple) -> None:
        """See ``Bolt.fail``."""
        runner = self._runner
        runner.order(lambda: _reject(runner, tup))

    def error(self, error: BaseException, tup: Any = None) -> None:
        """See ``Component.raise_exception``."""
        self._runner.failed_here(error, "raise_exception")

    def metric(self, name: str, value: Any) -> None:
        """See ``Component.report_metric``."""
        self._runner.order(lambda: self._runner.metric(name, value))


def _settle(runner: Runner, tup: Tuple) -> None:
    runner.shared.ledger.settle(tup)
    runner.stats.acked += 1


def _reject(runner: Runner, tup: Tuple) -> None:
    runner.shared.ledger.reject(tup)
    runner.stats.failed += 1


class BlockingBoltRunner(ThreadMixin):
    """A bolt with ``blocking = True``."""

    kind = "bolt"
    _anchor: Tuple | None = None

    def run(self, now: float) -> bool:
        """Hand tuples to the thread, and carry out what it ordered."""
        worked = self.carry_out()
        if self.queue:
            batch = self.queue.copy()
            self.queue.clear()
            self.inside += len(batch)
            for tup in batch:
                self.inbox.put(tup)
            worked = True
        if self.ticks:
            self.ticks = 0
            self.inbox.put(_TICK)
        return worked

    def _done(self, tup: Tuple, nanos: int) -> None:
        self.inside -= 1
        stats = self.stats
        count_inputs(self, [tup])
        stats.execute_ns += nanos
        stats.timed += 1
        stats.process_ns += nanos
        stats.processed += 1

    def _work(self) -> None:
        bolt = self.instance
        gathers = getattr(bolt, "_gathers", False)
        auto_ack, auto_anchor = bolt.auto_ack and not gathers, bolt.auto_anchor and not gathers
        clock = time.perf_counter_ns
        while True:
            tup = self.inbox.get()
            if tup is _STOP:
                return
            self.await_lease()
            if self._cut or self.shared.closing:
                continue
            if tup is _TICK:
                try:
                    bolt.process_tick(self.tick_tuple())
                except Exception as error:
                    self.failed_here(error, "process_tick")
                continue
            begin = clock()
            self._anchor = tup if auto_anchor else None
            try:
                bolt.process(tup)
            except Exception as error:
                self.failed_here(error, f"process of a tuple of {tup.component}")
                if bolt.auto_fail:
                    self.order(lambda tup=tup: _reject(self, tup))
            else:
                if auto_ack:
                    self.order(lambda tup=tup: _settle(self, tup))
            self._anchor = None
            spent = clock() - begin
            self.order(lambda tup=tup, spent=spent: self._done(tup, spent))

    def current_anchors(self) -> Any:
        """The tuple in process."""
        anchor = self._anchor
        return () if anchor is None else anchor

    def emit_from_thread(
        self,
        tup: Any,
        stream: str | None,
        anchors: Any,
        direct_task: int | None,
        need_task_ids: bool,
        tup_id: Any,
    ) -> Any:
        """See ``Bolt.emit``."""
        values = self.checked(tup, stream)
        of = self.current_anchors() if anchors is None else anchors
        # A list that the component goes on to change must not change what was ordered.
        of = tuple(of) if isinstance(of, list) else of

        def carry_out() -> list[int]:
            tree = anchor_tree(of) if of else None
            route = route_of(self.routes, stream or "default", self.component)
            route.emitted += 1
            links = spread(route, values, tree, self.shared.ledger, self.component, self.task_id, direct_task)
            return [link.task for link in links]

        if need_task_ids:
            return self.ask(carry_out)
        self.order(carry_out)
        return None


_processing: contextvars.ContextVar[Tuple | None] = contextvars.ContextVar("processing", default=None)


class AsyncBoltRunner(BlockingBoltRunner):
    """A bolt whose ``process`` is ``async``: several tuples are in flight, on an event loop in the thread."""

    def _work(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        bolt = self.instance
        window = asyncio.Semaphore(max(1, int(bolt.async_window)))
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        while True:
            tup = await loop.run_in_executor(None, self.inbox.get)
            if tup is _STOP:
                break
            await window.acquire()
            task = loop.create_task(self._one(tup, window))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, tup: Any, window: asyncio.Semaphore) -> None:
        bolt = self.instance
        try:
            while not self.shared.owns() and not self.shared.closing:
                await asyncio.sleep(0.02)
            if tup is _TICK:
                answer = bolt.process_tick(self.tick_tuple())
                if asyncio.iscoroutine(answer):
                    await answer
                return
            begin = time.perf_counter_ns()
            _processing.set(tup if bolt.auto_anchor else None)
            try:
                await bolt.process(tup)
            except Exception as error:
                self.failed_here(error, f"process of a tuple of {tup.component}")
                if bolt.auto_fail:
                    self.order(lambda: _reject(self, tup))
            else:
                if bolt.auto_ack:
                    self.order(lambda: _settle(self, tup))
            spent = time.perf_counter_ns() - begin
            self.order(lambda: self._done(tup, spent))
        except Exception as error:
            self.failed_here(error, "process_tick")
        finally:
            window.release()

    def current_anchors(self) -> Any:
        """The tuple whose ``process`` this is."""
        anchor = _processing.get()
        return () if anchor is None else anchor


class BlockingSpoutRunner(ThreadMixin, SpoutBase):
    """A spout with ``blocking = True``."""

    kind = "spout"

    def _prepare(self) -> None:
        super()._prepare()
        self._emit = self.make_emit()
        self._emitted = 0
        """Emits ordered; the thread's own count."""
        self._tracked = 0
        """Tracked emits that were ordered and not carried out: they are pending already."""
        self._was_active: bool | None = None

    def run(self, now: float) -> bool:
        """Carry out the spout's orders, and hand verdicts to its thread."""
        worked = self.carry_out()
        if self.verdicts(now, lambda acked, tup_id: self.inbox.put((acked, tup_id))):
            worked = True
        return worked

    def activate(self) -> None:
        """Tell the spout, in its thread."""
        if self._thread is not None:
            self.inbox.put("activate")

    def deactivate(self) -> None:
        """Tell the spout, in its thread."""
        if self._thread is not None:
            self.inbox.put("deactivate")

    def busy_elsewhere(self) -> bool:
        """Whether the thread has verdicts or orders under way."""
        return self._thread is not None and (bool(self.orders) or self.status != "running")

    def _may_emit(self) -> bool:
        if not self.shared.spouts_run:
            return False
        return self.max_pending is None or len(self.pending) + self._tracked < self.max_pending

    def _work(self) -> None:
        spout = self.instance
        pause = 0.0
        while True:
            try:
                item = self.inbox.get(timeout=pause) if pause else self.inbox.get_nowait()
            except queue.Empty:
                item = None
            if item is _STOP:
                return
            self.await_lease()
            if self._cut or self.shared.closing:
                continue
            try:
                if isinstance(item, tuple):
                    (spout.ack if item[0] else spout.fail)(item[1])
                    pause = 0.0
                    continue
                if isinstance(item, str):
                    getattr(spout, item)()
                    continue
                if not self._may_emit():
                    pause = 0.005
                    continue
                before = self._emitted
                spout.next_tuple()
                pause = 0.0 if self._emitted != before else min(0.02, (pause or 0.0005) * 2)
            except Exception as error:
                self.failed_here(error, "spout")
                pause = 0.1

    def emit_from_thread(
        self,
        tup: Any,
        stream: str | None,
        anchors: Any,
        direct_task: int | None,
        need_task_ids: bool,
        tup_id: Any,
    ) -> Any:
        """See ``Spout.emit``."""
        values = self.checked(tup, stream)
        self._emitted += 1
        tracked = tup_id is not None
        if tracked:
            self._tracked += 1

        def carry_out() -> Any:
            if tracked:
                self._tracked -= 1
            return self._emit(values, tup_id, stream, direct_task, need_task_ids)

        if need_task_ids:
            return self.ask(carry_out)
        self.order(carry_out)
        return None
