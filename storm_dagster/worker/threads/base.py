"""Tasks with their own thread, for components that block or are ``async``.

The thread never touches routes, trees or queues of the loop. Emits, acks and fails are queued in
order and run by the loop; only an emit with ``need_task_ids`` waits for the result.
"""

import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any

from storm_dagster.api.bolts import Bolt
from storm_dagster.api.component import Collector
from storm_dagster.api.outages import COMPONENT
from storm_dagster.api.spouts import Spout
from storm_dagster.api.tuples import Tuple, TupleId
from storm_dagster.host.futures import fulfill
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.values import own_values
from storm_dagster.worker.dataplane.named_values import namer_of
from storm_dagster.worker.dataplane.sending import sent_and_received
from storm_dagster.worker.dataplane.tree import LOST, anchor_tree
from storm_dagster.worker.state.opening import open_state
from storm_dagster.worker.tasks.collectors import BaseCollector, check_received
from storm_dagster.worker.tasks.runner import Runner, make_component
from storm_dagster.worker.tasks.stacks import component_stack

STOP = object()
"""Item of an inbox: stop."""
TICK = object()
"""Item of an inbox: a tick is due."""
PULSE = object()
"""Item of an inbox: timers of windows and state are due."""
_RESULT_SECS = 60.0
"""Longest wait of the component for the result of a call in the loop."""


class ThreadMixin(Runner, ABC):
    """Runner with a thread.

    ``inbox`` has the items for the component, ``loop_calls`` its calls for the loop.
    """

    _thread: threading.Thread | None = None
    """The newest thread, which may have ended; ``None`` until :meth:`start` begins one."""
    _detached = False
    _emitted = 0
    """Emits, counted by the thread."""
    _tracked = 0
    """Tracked emits that the loop has not run yet: they count as pending."""
    _muted = False
    """True if emits are dropped, because the component is closing."""
    _current: Tuple | None = None
    """The tuple in process, if only one can be."""
    _anchors_itself = True
    """True if an emit without anchors is anchored to the tuple in process."""
    _stopping = False
    """True if the thread must end. Only the loop."""

    def _prepare(self) -> None:
        """Create the state of one thread, just before :meth:`start` begins it.

        All of it is new for each thread: items, calls and results of the former one do not reach
        the next.
        """
        self.instance: Any = None
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._timers: set[Any] = set()
        """``TICK`` and ``PULSE``, if they are in the inbox."""
        self.loop_calls: deque[Callable[[], Any]] = deque()
        self.in_flight = 0
        """Tuples passed to the thread and not finished (counted by the loop)."""
        self._woken = False
        """True if the thread has woken the loop, which has not run :attr:`loop_calls` since."""
        self._detached = False
        """True if the task is closed: the thread must no longer execute or call the loop."""
        self._ended = threading.Event()
        """Set when the component is closed."""
        self._opened: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        """Result of the initialization, put once: ``None``, or its error."""
        self._calls: dict[Any, tuple[float, str, Any]] = {}
        """Calls of the component that have not returned, oldest first: (start, method, coroutine).

        The key is the id of a tuple, or anything else that no other call in flight has.
        """

    # -- loop's side -------------------------------------------------------------------------------

    def start(self, now: float) -> bool:
        """Begin to initialize in the thread, or return True if that has succeeded.

        So a slow ``initialize`` does not block the loop, which calls this in each pass.
        """
        if self.status == "running":
            return True
        if self._stopping:
            # Two threads of a task never run at the same time: the next one waits until `close`
            # has returned.
            if not self.has_ended():
                return False
            self._thread = None
            self._stopping = False
            self.crashed = False
            self.system_wait.drop()
            self.awaited.show(COMPONENT, "")
        if self._thread is None:
            if now < self._retry_at:
                return False
            self._prepare()
            self._thread = threading.Thread(
                target=self._main, name=f"{self.component}-{self.task_id}", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:
                self._thread = None
                self.start_failed(error, now)
            return False
        # `initialize` may emit.
        self.run_loop_calls()
        try:
            error = self._opened.get_nowait()
        except queue.Empty:
            return False
        if error is not None:
            self._thread = None
            self.start_failed(error, now)
            return False
        self.status = "running"
        self.start_failure = ""
        self.next_tick: float = now + (self.tick_secs or 0.0)
        return True

    def run_loop_calls(self) -> bool:
        """Run the calls queued by the thread.

        Returns True if there were any.
        """
        # Called per pass, with code per tuple; measured by benchmarks/dataplane.py.
        self._woken = False
        loop_calls = self.loop_calls
        if not loop_calls:
            return False
        for _ in range(len(loop_calls)):
            try:
                loop_calls.popleft()()
            except self.shared.catches as error:
                self.on_error(error, "a call of the component's thread")
        return True

    def waiting(self) -> int:
        """Return the number of tuples in the queue and in the thread."""
        return len(self.queue) + (self.in_flight if self._thread is not None else 0)

    def busy_elsewhere(self) -> bool:
        return self._thread is not None and (
            self.in_flight > 0 or bool(self.loop_calls) or self.status != "running"
        )

    def writers(self) -> list[threading.Thread]:
        """Return the threads that may write state, among them the one that initializes the task.

        Nothing waits for that one when the task closes; for the thread of a running task,
        ``close_runners`` does.
        """
        if self.status == "starting" and self._thread is not None:
            return [self._thread]
        return super().writers()

    def begin_close(self, *, retire: bool) -> None:
        """End the thread after its current call.

        Tracked tuples that wait for the thread fail, others are queued.
        """
        if self._thread is None:
            return
        self._stopping = True
        verdicts: list[Any] = []
        untracked: list[Tuple] = []
        with suppress(queue.Empty):
            while True:
                item = self.inbox.get_nowait()
                if isinstance(item, Tuple):
                    if item._tree is None:
                        untracked.append(item)
                    # Without effect on untracked tuples.
                    self.shared.ledger.fail(item, LOST)
                    # A message to a spout's task is not counted.
                    self.in_flight -= self.kind == "bolt"
                elif isinstance(item, tuple):
                    # The spout still gets its acks and fails; all other items are dropped.
                    verdicts.append(item)
        self.queue[:0] = untracked
        for item in verdicts:
            self.inbox.put(item)
        self.inbox.put(self._last_item(retire))

    def _last_item(self, retire: bool) -> Any:
        """Item of the inbox that makes the thread end."""
        return STOP

    def has_ended(self) -> bool:
        ended = self._thread is None or self.instance is None or self._ended.is_set()
        if self._thread is not None:
            self.run_loop_calls()
        return ended

    def close(self, *, retire: bool = False) -> None:
        """Detach the thread from the loop; from then on its calls have no effect.

        Call :meth:`begin_close`, and wait for :meth:`has_ended`, before. A thread that has not
        ended is reported and left behind, and its unacked tuples fail.
        """
        if self._thread is not None:
            if not self._stopping:
                self.begin_close(retire=retire)
            if not self.has_ended():
                stacks = "".join(f"\n{stack}" for _, _, stack in self.stuck_calls(float("inf")))
                error = TimeoutError(f"its thread did not end in time and is left behind{stacks}")
                self.report(error, "close")
                for tup in [*self.unacked]:
                    self.shared.ledger.fail(tup, LOST)
            self._detached = True
        self.context.close()

    def stuck_calls(self, since: float) -> list[tuple[float, str, str]]:
        if self._thread is None or self._thread.ident is None:
            return []
        frame = sys._current_frames().get(self._thread.ident)
        # A copy: the thread changes the calls.
        calls = [*self._calls.values()]
        return [
            (start, method, component_stack(frame, coroutine))
            for start, method, coroutine in calls
            if start < since
        ]

    def report(self, error: BaseException, activity: str) -> None:
        """Report as :meth:`Runner.report`; any thread."""
        if threading.current_thread() is self._thread:
            self.call_in_loop(lambda: Runner.report(self, error, activity))
        else:
            super().report(error, activity)

    def show_awaited(self, source: str, text: str) -> None:
        """Show as :meth:`Runner.show_awaited`; any thread."""
        if threading.current_thread() is self._thread:
            self.call_in_loop(lambda: self.awaited.show(source, text))
        else:
            super().show_awaited(source, text)

    def restart(self) -> None:
        """Restart as :meth:`Runner.restart`, with another thread.

        It begins when this one has ended.
        """
        if not self._stopping:
            self.begin_close(retire=True)
        self.status = "starting"
        self._retry_at = self.shared.clock() + 1.0

    # -- thread's side -----------------------------------------------------------------------------

    def call_in_loop(self, action: Callable[[], Any]) -> None:
        """Run ``action`` in the loop, after earlier calls.

        It is dropped if the task is closed. Waits while as many calls are queued as the task may
        emit tuples in one turn.
        """
        # Called per tuple, measured by benchmarks/dataplane.py.
        while len(self.loop_calls) >= self.quota and not (self._detached or self.shared.closing):
            time.sleep(0.001)
        if self._detached:
            return
        self.loop_calls.append(action)
        if not self._woken:
            self._woken = True
            self.shared.wake()

    def call_in_loop_and_wait(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` in the loop as :meth:`call_in_loop`.

        Returns its result, or raises its error. :class:`Unavailable` if the task is closed, or the
        worker does not run it in a minute.
        """
        result: Future[Any] = Future()
        self.call_in_loop(lambda: fulfill(result, action))
        until = time.monotonic() + _RESULT_SECS
        while not wait([result], timeout=0.5).done:
            if self._detached:
                reason = "the task is closed"
            elif time.monotonic() > until:
                reason = f"its worker was busy for {_RESULT_SECS:g} s"
            else:
                continue
            raise Unavailable(f"component {self.component!r}: the emit has no result, {reason}")
        return result.result()

    def emit_from_thread(
        self,
        tup: Any,
        stream: str | None,
        anchors: Any,
        direct_task: int | None,
        need_task_ids: bool,
        tup_id: Any,
    ) -> Any:
        """Emit from the component's thread.

        The thread gets the errors of a check here. With ``need_task_ids`` it waits for the
        receivers; without, this returns ``None``. See ``Bolt.emit``, ``Spout.emit``.
        """
        # Called per tuple, measured by benchmarks/dataplane.py.
        stream = stream or "default"
        route = self.checked_route(tup, stream)
        if self.conf.get("topology.testing.always.try.serialize"):
            values = sent_and_received(tup, route, self.task_id)
        else:
            values = own_values(tup, route.fields, stream, self.component, self.task_id)
        own_anchors = self.checked_anchors(anchors)
        if self._muted:
            return []
        self._emitted += 1
        self._tracked += tup_id is not None
        action = partial(self._emit_in_loop, values, stream, own_anchors, direct_task, tup_id)
        if need_task_ids:
            return self.call_in_loop_and_wait(action)
        self.call_or_reject(action, own_anchors)
        return None

    @abstractmethod
    def _emit_in_loop(
        self, values: list[Any], stream: str, anchors: Any, direct_task: int | None, tup_id: Any
    ) -> list[int] | None:
        """Run an emit in the loop, and return the receivers."""

    def await_lease(self) -> None:
        """Wait until the worker's lease is valid, or the task or the worker closes."""
        while not self.shared.owns() and not (self._detached or self.shared.closing):
            time.sleep(0.02)

    def call_or_reject(self, action: Callable[[], Any], anchors: Any) -> None:
        """Run ``action`` in the loop, after earlier calls.

        If it raises, the tuple in process and ``anchors`` fail, also if the component, which has
        continued since, acks them later.
        """
        current = self.in_process()

        def in_loop() -> None:
            try:
                action()
            except self.shared.catches as error:
                self.on_error(error, "emit")
                for rejected in (current, anchors):
                    tree = anchor_tree(rejected) if rejected else None
                    if tree is not None:
                        self.shared.ledger.fail_tree(tree, self.reason_of(error))

        self.call_in_loop(in_loop)

    def checked_anchors(self, anchors: Any) -> Any:
        """Copy an emit's anchors, which the component may change.

        ``None``, the default, is replaced by the tuple in process, unless ``auto_anchor`` is off.
        ``InvalidRequest`` unless they are tuples that it received.
        """
        if anchors is None:
            anchors = (self.in_process() if self._anchors_itself else None) or ()
        if isinstance(anchors, Tuple | TupleId):
            return anchors
        own_anchors = tuple(anchors)
        for tup in own_anchors:
            check_received(tup, self.component)
        return own_anchors

    def _main(self) -> None:
        """Open, run and close the component; the body of the thread."""
        self._calls[self] = (time.monotonic(), "initialize", None)
        try:
            self._open_in_thread()
        except BaseException as error:
            self._calls.clear()
            self._opened.put(error)
            self.shared.wake()
            return
        self.system_wait.end("initialize")
        self._opened.put(None)
        self.shared.wake()
        self._calls.clear()
        try:
            self._work()
        except BaseException as error:
            self.crashed = True
            self.report(error, "the component's thread")
        finally:
            self._calls[self] = (time.monotonic(), "close", None)
            self.close_instance()
            self._calls.clear()
            self._ended.set()
            self.shared.wake()

    def _open_in_thread(self) -> None:
        component: Spout | Bolt = make_component(self.part, Spout if self.kind == "spout" else Bolt)
        collector: Collector = _ThreadCollector(self)
        component._collector = collector
        self.context.restrict(lambda: self.shared.owns() and not self._detached)
        component.context = self.context
        component.conf = self.conf
        if isinstance(component, Bolt):
            self._name_values = namer_of(component, self.context)
        opening = open_state(component, self, inline=True)
        if opening is not None:
            opening.attach()
        component.initialize(self.conf, self.context)
        self.instance = component

    @abstractmethod
    def _work(self) -> None:
        """Run the component until the inbox has ``STOP``."""

    def in_process(self) -> Tuple | None:
        """Return the default anchor of an emit.

        It is the tuple that the calling code processes.
        """
        return self._current


class _ThreadCollector(BaseCollector):
    """Collector of a component with its own thread."""

    _runner: ThreadMixin

    def __init__(self, runner: ThreadMixin) -> None:
        super().__init__(runner)
        self.emit = runner.emit_from_thread

    def ack(self, tup: Tuple) -> None:
        runner = self._runner
        check_received(tup, runner.component)
        runner.call_in_loop(lambda: runner.ack(tup))

    def ack_all(self, tups: Any) -> None:
        """Ack as ``Collector.ack_all``.

        One call of the loop acks the thousands of tuples of a micro-batch.
        """
        runner = self._runner
        batch = tuple(tups)
        for tup in batch:
            check_received(tup, runner.component)

        def in_loop() -> None:
            ack = runner.shared.ledger.ack
            for tup in batch:
                ack(tup)
            runner.stats.acked += len(batch)

        runner.call_in_loop(in_loop)

    def fail(self, tup: Tuple, reason: Any = None) -> None:
        runner = self._runner
        check_received(tup, runner.component)
        failure = runner.reason_of(reason)
        runner.call_in_loop(lambda: runner.fail(tup, failure))

    def give_up(self, *letter: Any) -> bool:
        """Give a tuple up as ``Spout.give_up``."""
        runner: Any = self._runner
        return runner.call_in_loop_and_wait(lambda: runner.letters.give_up(*letter))

    def event(self, event: DagsterEvent, anchors: Any) -> None:
        runner = self._runner
        own_anchors = runner.checked_anchors(anchors)

        def in_loop() -> None:
            tree = anchor_tree(own_anchors) if own_anchors else None
            runner.shared.events.add(runner, event, tree)

        runner.call_or_reject(in_loop, own_anchors)
