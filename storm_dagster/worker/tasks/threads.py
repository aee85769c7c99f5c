"""Tasks with their own thread, for components that block or are ``async``.

The thread never touches routes, trees or queues of the loop. Emits, acks and fails are queued in order and run by the
loop; only an emit with ``need_task_ids`` waits for the result.
"""

from __future__ import annotations

import logging
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
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.worker.dataplane.sending import check_travels, check_types, check_values, route_of
from storm_dagster.worker.dataplane.tree import anchor_tree, joint_anchor
from storm_dagster.worker.tasks.drivers import attach_drivers
from storm_dagster.worker.tasks.runner import Runner, make_component

_log = logging.getLogger("storm_dagster.component")
_MOST_LOOP_CALLS = 20_000
"""Queued calls at which the thread waits for the loop."""
STOP = object()
"""In an inbox: stop."""
TICK = object()
"""In an inbox: a tick is due."""
PULSE = object()
"""In an inbox: timers of windows and state are due."""
CLOSE_SECS = 5.0
"""Time that a thread has to stop."""


class ThreadMixin(Runner):
    """Runner with a thread: ``inbox`` to the component, ``loop_calls`` back to the loop."""

    _thread: threading.Thread | None = None
    _detached = False

    def _prepare(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.loop_calls: deque[Callable[[], Any]] = deque()
        self.in_flight = 0
        """Tuples passed to the thread and not finished (counted by the loop)."""
        self._woken = False
        self._detached = False
        """Whether the task is closed: the thread may not execute anything or call the loop any more."""
        self._ended = threading.Event()
        self._opened: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    # -- loop's side ------------------------------------------------------------------------------------

    def start(self, now: float) -> bool:
        """Initialize in the thread, so that a slow ``initialize`` does not block the loop."""
        if self.status == "running":
            return True
        if self._thread is None:
            if now < self._retry_at:
                return False
            self._prepare()
            self._thread = threading.Thread(target=self._main, name=f"{self.component}-{self.task_id}", daemon=True)
            self._thread.start()
            return False
        self.run_loop_calls()
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
        self.next_tick: float = now + (self.tick_secs or 0.0)
        return True

    def run_loop_calls(self) -> bool:
        """Run the calls queued by the thread. Whether there were any."""
        self._woken = False
        loop_calls = self.loop_calls
        if not loop_calls:
            return False
        for _ in range(len(loop_calls)):
            try:
                loop_calls.popleft()()
            except Exception as error:
                self.report(error, "a call of the component's thread")
        return True

    def waiting(self) -> int:
        """Number of tuples in the queue and in the thread."""
        return len(self.queue) + (self.in_flight if self._thread is not None else 0)

    def busy_elsewhere(self) -> bool:
        """Whether the thread has work."""
        return self._thread is not None and (self.in_flight > 0 or bool(self.loop_calls) or self.status != "running")

    def close(self) -> None:
        """Stop the thread; one that blocks too long is detached from the loop."""
        if self._thread is not None:
            waiting: list[Tuple] = []
            verdicts: list[Any] = []
            try:
                while True:
                    item = self.inbox.get_nowait()
                    if isinstance(item, Tuple):
                        waiting.append(item)
                    elif isinstance(item, tuple):
                        verdicts.append(item)
            except queue.Empty:
                pass
            for item in (*verdicts, STOP):
                self.inbox.put(item)
            if self.status == "running" and not self._ended.wait(CLOSE_SECS):
                self.report(
                    TimeoutError(f"its thread did not stop within {CLOSE_SECS:g} s and is detached"),
                    "close",
                )
            self.run_loop_calls()
            self._detached = True
            for tup in waiting:
                self.shared.ledger.fail(tup)
        self.context.close()

    def report(self, error: BaseException, where: str) -> None:
        """As :meth:`Runner.report`; any thread."""
        if threading.current_thread() is self._thread:
            self.call_in_loop(lambda: Runner.report(self, error, where))
        else:
            super().report(error, where)

    def restart(self) -> None:
        """Stop the thread, and recreate the component in another one in a second."""

        def in_loop() -> None:
            self.close()
            self._thread = None
            self._retry_at = self.shared.clock() + 1.0
            self.status = "starting"

        self.call_in_loop(in_loop)

    # -- thread's side ----------------------------------------------------------------------------------

    def call_in_loop(self, action: Callable[[], Any]) -> None:
        """Run ``action`` in the loop, after earlier calls."""
        while len(self.loop_calls) >= _MOST_LOOP_CALLS and not (self._detached or self.shared.closing):
            time.sleep(0.001)
        if self._detached:
            return
        self.loop_calls.append(action)
        if not self._woken:
            self._woken = True
            self.shared.wake()

    def call_in_loop_and_wait(self, action: Callable[[], Any]) -> Any:
        """As :meth:`call_in_loop`, and return the result."""
        answer: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def in_loop() -> None:
            try:
                answer.put((action(), None))
            except Exception as error:
                answer.put((None, error))

        self.call_in_loop(in_loop)
        result, error = answer.get(timeout=60.0)
        if error is not None:
            raise error
        return result

    def check_emit(self, tup: Any, stream: str | None) -> list[Any]:
        """Check an emit in the component's thread, which gets the error, and return a copy of its values."""
        check_values(tup, route_of(self.routes, stream or "default", self.component))
        declared = self.part.outputs[stream or "default"]
        if declared.types:
            check_types(tup, declared, stream or "default", self.component)
        if self.conf.get("topology.testing.always.try.serialize"):
            check_travels(tup, stream or "default", self.component)
        if self.debug:
            _log.info("%s-%d emits %r %s", self.component, self.task_id, tup, stream or "")
        return [*tup]

    def await_lease(self) -> None:
        """Wait until the worker's lease is valid."""
        while not self.shared.owns() and not (self._detached or self.shared.closing):
            time.sleep(0.02)

    def report_from_thread(self, error: BaseException, where: str) -> None:
        """Report an error from the thread."""
        self.call_in_loop(lambda: self.report(error, where))

    def _main(self) -> None:
        try:
            self._open_in_thread()
        except BaseException as error:
            self._opened.put(error)
            self.shared.wake()
            return
        self._opened.put(None)
        self.shared.wake()
        try:
            self._work()
        finally:
            self.close_instance()
            self._ended.set()

    def _open_in_thread(self) -> None:
        component = make_component(self.part)
        wanted = Spout if self.kind == "spout" else Bolt
        if not isinstance(component, wanted):
            raise TypeError(f"{self.part.object.python} is not a {wanted.__name__}")
        collector: Collector = _ThreadCollector(self)
        component._collector = collector
        self.context.restrict(lambda: self.shared.owns() and not self._detached)
        component.context, component.conf = self.context, self.conf
        attach_drivers(component, self)
        component.initialize(self.conf, self.context)
        self.instance = component
        self.next_pulse: float = 0.0

    def _work(self) -> None:
        raise NotImplementedError

    def current_anchors(self) -> Any:
        """Default anchors of an emit."""
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
        """Emit from the component's thread."""
        raise NotImplementedError


class _ThreadCollector:
    """Collector of a component with its own thread."""

    def __init__(self, runner: ThreadMixin) -> None:
        self._runner = runner
        self.emit = runner.emit_from_thread

    def ack(self, tup: Tuple) -> None:
        """See ``Bolt.ack``."""
        runner = self._runner
        runner.call_in_loop(lambda: ack_in_loop(runner, tup))

    def ack_all(self, tups: Any) -> None:
        """See ``Collector.ack_all``: one call of the loop for the thousands of tuples of a micro-batch."""
        runner, batch = self._runner, tuple(tups)

        def in_loop() -> None:
            ack = runner.shared.ledger.ack
            for tup in batch:
                ack(tup)
            runner.stats.acked += len(batch)

        runner.call_in_loop(in_loop)

    def fail(self, tup: Tuple) -> None:
        """See ``Bolt.fail``."""
        runner = self._runner
        runner.call_in_loop(lambda: fail_in_loop(runner, tup))

    def event(self, event: DagsterEvent, anchors: Any) -> None:
        """See ``Collector.event``."""
        runner = self._runner
        of = runner.current_anchors() if anchors is None else anchors
        of = tuple(of) if isinstance(of, list) else of
        runner.call_in_loop(lambda: runner.shared.events.add(runner, event, anchor_tree(of) if of else None))

    def joint(self, tups: Any) -> Tuple:
        """See ``Collector.joint``."""
        return joint_anchor(tups)

    def send_to_peer(self, task: int, values: Any) -> None:
        """See ``Runner.send_to_peer``."""
        self._runner.call_in_loop(lambda: self._runner.send_to_peer(task, values))

    def error(self, error: BaseException, tup: Any = None) -> None:
        """See ``Component.raise_exception``."""
        self._runner.report_from_thread(error, "raise_exception")

    def metric(self, name: str, value: Any) -> None:
        """See ``Component.report_metric``."""
        self._runner.call_in_loop(lambda: self._runner.metric(name, value))


def ack_in_loop(runner: Runner, tup: Tuple) -> None:
    """Ack in the loop's thread."""
    runner.shared.ledger.ack(tup)
    runner.stats.acked += 1


def fail_in_loop(runner: Runner, tup: Tuple) -> None:
    """Fail in the loop's thread."""
    runner.shared.ledger.fail(tup)
    runner.stats.failed += 1
