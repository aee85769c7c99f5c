"""Base class of tasks in a worker."""

import logging
import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

from storm_dagster.api.context import TopologyContext
from storm_dagster.api.error_pauses import ErrorPauses
from storm_dagster.api.outages import COMPONENT, SystemUnavailable
from storm_dagster.api.tuples import SYSTEM_TASK, TICK_STREAM, Tuple
from storm_dagster.host.waiting import Backoff
from storm_dagster.model.names import SYSTEM
from storm_dagster.model.topology import ComponentSpec
from storm_dagster.worker.dataplane.routes import Route, resolve
from storm_dagster.worker.dataplane.sending import (
    check_types,
    check_values,
    route_of,
    send_remote,
    sent_and_received,
)
from storm_dagster.worker.dataplane.tree import LOST, Reason
from storm_dagster.worker.state.host import MAX_RETRY_SECS
from storm_dagster.worker.tasks.errors import describe_error
from storm_dagster.worker.tasks.loop_time import LoopTime
from storm_dagster.worker.tasks.shared import Shared
from storm_dagster.worker.tasks.stats import TaskStats
from storm_dagster.worker.tasks.system_wait import AwaitedTexts, SystemWait

if TYPE_CHECKING:
    from storm_dagster.worker.state.driver import StateDriver
    from storm_dagster.worker.state.window_results import ResultTracker

_log = logging.getLogger("storm_dagster.component")

TICK_DUE = 1
PULSE_DUE = 2
"""Bits of :attr:`Runner.ticks`."""
_PEERS = "__peers"
"""Stream of the messages between tasks of one component."""
_EXACT_SECS = 1e-6
"""Rounding error of summed times: a deadline counts as reached this much earlier."""
_PULSE_SECS = 0.1
"""Pause between two checks of the work that is due by time: windows, checkpoints."""
MAX_QUOTA = 20_000
"""Largest quota of a task, for readers with room for more, too."""
TURN_SECS = 0.05
"""Pause of a held task in a cycle after a call that emitted more than it took."""
_MIN_UNACKED = 32
"""Tuples in :attr:`Runner.unacked` before it is cleaned for the first time."""
_MAX_REASON = 500
"""Characters of a reason."""


def make_component(part: ComponentSpec, kind: type[Any]) -> Any:
    """Create an instance of the component's class.

    Errors of its import or constructor pass through.
    """
    if part.object.python is None:
        raise AssertionError("a shell component has no class")
    component = resolve(part.object.python)(**part.object.args)
    if not isinstance(component, kind):
        raise TypeError(f"{part.object.python} is not a {kind.__name__}")
    return component


class Runner:
    """One task: its component, input queue, routes and statistics."""

    kind: Literal["spout", "bolt", "system"] = "bolt"
    is_async = False
    takes_peer_messages = False
    """True if tasks of the component send each other messages (:meth:`send_to_peer`)."""

    def __init__(self, shared: Shared, context: TopologyContext, part: ComponentSpec) -> None:
        self.shared = shared
        self.context = context
        self.part = part
        self.task_id = context.task_id
        self.component = context.component
        self.conf = context.conf
        self.debug = bool(self.conf.get("topology.debug"))
        self.queue: list[Tuple] = []
        """Received tuples. The list object never changes: links hold its ``append``."""
        self.routes: dict[str, Route] = {}
        rate = self.conf.get("topology.metric.sample.rate")
        self.stats = TaskStats(1.0 if rate is None else float(rate))
        self.stats.routes = self.routes
        self.status: Literal["starting", "running"] = "starting"
        self.wired = False
        """True if the task's routes are built; the task does not run before."""
        self.peers: dict[int, Any] = {}
        """Other task of the component -> the link to it."""
        self.held = False
        """True while back pressure stops this task (:class:`Pressure`). Read by any thread."""
        self.held_secs = 0.0
        """Total time for which back pressure has stopped this task, in seconds."""
        self.awaits_target = False
        """True while a bolt downstream waits for an external system that is away.

        Message timeouts do not run in this time.
        """
        self.events_full = False
        """True while its events for Dagster are not taken, and it takes no tuples. Any thread."""
        self.events_wait = False
        """True while some of its events wait for a cluster that does not take them. Any thread."""
        self.system_wait = SystemWait(self)
        """Wait for a system that the component named as unavailable."""
        self.awaited = AwaitedTexts(self.metric)
        self.in_cycle = False
        """True if its component reads, directly or not, from all components that hold it back."""
        self.next_turn = 0.0
        """Clock before which a held task in a cycle does not begin a call."""
        self.quota = MAX_QUOTA
        """Tuples that the task may emit in one turn (a call of :meth:`run`). The call of the
        component that reaches the number ends the turn.
        Calls of the loop by a thread wait at the same number.
        """
        self.tuple_bytes = 0.0
        """Mean size of the tuples that came from other workers, if they are large."""
        self.ticks = 0
        """Due events: ``TICK_DUE`` and ``PULSE_DUE``."""
        self.tick_secs: float | None = self.conf.get("topology.tick.tuple.freq.secs") or None
        self.next_tick = 0.0
        self.tick_errors = ErrorPauses()
        """Pauses of ``process_tick``. In the thread that runs the task."""
        self.next_pulse = 0.0
        self.instance: Any = None
        """The component."""
        self.state: StateDriver | None = None
        """State of a stateful or windowed bolt."""
        self.results: ResultTracker | None = None
        """Results of a windowed bolt."""
        self.unacked: list[Tuple] = []
        """Tuples that the component has not acked, and some that it has acked or failed since."""
        self._max_unacked = _MIN_UNACKED
        """Length of :attr:`unacked` at which it is cleaned."""
        self._unacked_check = (0.0, 0)
        """Time of an earlier check of :attr:`unacked`, and number of its first tuples that were
        there then.
        """
        self.crashed = False
        """True if the engine must restart the task. Any thread."""
        self.loop_time = LoopTime()
        self.start_failure = ""
        """Error of the last attempt to open the component; empty once it is open. Any thread."""
        self._retry_at = 0.0
        """Time before which the component is not opened."""
        self._pauses = Backoff(1.0, MAX_RETRY_SECS)

    # -- life --------------------------------------------------------------------------------------

    def wire(self, routes: dict[str, Route]) -> None:
        """Replace the routes; their counts continue."""
        for stream, route in routes.items():
            if stream in self.routes:
                route.adopt(self.routes[stream])
        # Updated in place, never empty: a thread of the component may emit now. The streams never
        # change.
        self.routes.update(routes)

    def start(self, now: float) -> bool:
        """Create and initialize the component, if that is due.

        Returns True if the task runs now.
        """
        if self.status == "running":
            return True
        if now < self._retry_at:
            return False
        try:
            if self.open() is False:
                return False
        except self.shared.catches as error:
            self.start_failed(error, now)
            return False
        self.status = "running"
        self.start_failure = ""
        self.next_tick = now + (self.tick_secs or 0.0)
        self.system_wait.end("initialize")
        return True

    def start_failed(self, error: BaseException, now: float) -> None:
        """Report that the component could not be opened.

        The next attempt is after a pause, which is longer each time.
        """
        pause: float | None = None
        if isinstance(error, SystemUnavailable):
            self.system_wait.begin(error, "initialize")
            pause = self.system_wait.pause_secs()
        else:
            self.report(error, "initialize")
            self.start_failure = f"{self.component}[{self.task_id}]: {describe_error(error)}"
        if self.state is not None:
            self.state.log.close()
            self.state = None
        self._retry_at = now + (self._pauses.next_pause() if pause is None else pause)

    def open(self) -> bool | None:
        """Create and initialize the component.

        ``False`` if that is not finished, and must be called once more.
        """

    def run(self, now: float) -> bool:
        """Process queued work, and return True if there was any."""
        return False

    def idle_secs(self, now: float) -> float | None:
        """Return the seconds until this task needs the loop.

        ``None``: until a message arrives.
        """
        return None

    def may_begin(self) -> bool:
        """True if back pressure permits that the task begins a call.

        Any thread. In a cycle all tasks may wait for each other: there a call that does not emit
        more than it takes is always permitted.
        """
        return not self.held or (self.in_cycle and time.monotonic() >= self.next_turn)

    def waiting(self) -> int:
        """Return the number of tuples queued for this task, in any queue."""
        return len(self.queue)

    def target_is_away(self) -> bool:
        """True while the component waits for an external system.

        It takes no tuples until its sink, or Spark, responds, the cluster takes its events, or a
        system answers that it named itself. A spout that waits holds no other component.
        """
        return self.events_full or (self.kind == "bolt" and self.system_wait.is_waiting)

    def backlog_secs(self) -> float:
        """Return the estimated seconds to process the queue."""
        stats = self.stats
        return self.waiting() * stats.execute_ns / stats.timed / 1e9 if stats.timed else 0.0

    def calls_on_loop(self) -> int | None:
        """Return the number of calls of the component on the loop. Any thread.

        ``None`` if the component does not run there.
        """
        return None

    def busy_elsewhere(self) -> bool:
        """True while work of the task is done outside the loop.

        It is done by the task's thread, its program, or the reader of its state. The test harness
        then waits instead of ending. Runners with such a part override this method.
        """
        return False

    def writers(self) -> list[Thread]:
        """Return the threads that may still write state after :meth:`close`.

        To be called before it, which forgets them. Of a running task it is the compaction of its
        state; the thread of its component has ended when it is closed.
        """
        if self.state is None:
            return []
        return self.state.log.writers()

    def begin_close(self, *, retire: bool) -> None:
        """Stop the task's thread, if it has one; then call :meth:`close`."""

    def has_ended(self) -> bool:
        """True if :meth:`close` does not have to wait.

        Runs the last calls of the task's thread.
        """
        return True

    def stuck_calls(self, since: float) -> list[tuple[float, str, str]]:
        """Return calls in the component's thread that began before ``since``.

        (start, method, stack). Any thread.
        """
        return []

    def close(self, *, retire: bool = False) -> None:
        """Close the task gracefully.

        ``retire``: the topology continues, and the task moves, or reopens with another context.
        """
        if self.instance is not None and self.status == "running":
            self.close_instance()
        self.context.close()

    def close_instance(self) -> None:
        """Checkpoint and close the component.

        The tuples that it has not acked fail. In the thread that runs it.
        """
        state = self.state
        bolt = self.instance
        # The crash may be caused by one of the tuples that the bolt handles together, or come long
        # after `process`.
        may_be_cause = getattr(bolt, "_gathers", False) or not getattr(bolt, "auto_ack", True)
        reason = LOST
        if self.crashed and may_be_cause:
            reason = self.reason_of("the task crashed before it acked the tuple")
        if state is not None:
            self.attempt("checkpoint", state.abandon if self.crashed else state.close)
        self.attempt("close", bolt.close)
        unacked = self.unacked
        self.unacked = []

        def fail_unacked() -> None:
            for tup in unacked:
                if tup._tree is not None:
                    self.fail(tup, reason)

        self.call_in_loop(fail_unacked)
        self.state = None

    def restart(self) -> None:
        """Close the component, and let :meth:`start` create a new one in a second.

        Its tuples fail. Used only by the loop.
        """
        self.close(retire=True)
        self.system_wait.drop()
        self.awaited.show(COMPONENT, "")
        self.status = "starting"
        self._retry_at = self.shared.clock() + 1.0
        self.crashed = False

    def attempt(self, activity: str, action: Callable[[], Any]) -> None:
        """Run ``action``, and report its error."""
        try:
            action()
        except self.shared.catches as error:
            self.report(error, activity)

    def on_error(self, error: BaseException, activity: str) -> None:
        """Report an error that a method of the component raised. Any thread.

        After an error that is not an ``Exception`` (``SystemExit``, an unrequested cancellation)
        the component cannot continue: the task restarts.
        """
        self.report(error, activity)
        if not isinstance(error, Exception):
            self.crashed = True
            self.shared.wake()

    def has_pending_acks(self) -> bool:
        """True if acks wait for a checkpoint."""
        return self.state is not None and self.state.has_pending_acks()

    def call_in_loop(self, action: Callable[[], Any]) -> None:
        """Run ``action`` in the loop; any thread that runs the task."""
        action()

    # -- services ----------------------------------------------------------------------------------

    def ack(self, tup: Tuple) -> None:
        """Ack a received tuple, and count it. Only the loop."""
        self.shared.ledger.ack(tup)
        self.stats.acked += 1

    def fail(self, tup: Tuple, reason: Reason | None = None) -> None:
        """Fail a received tuple, and count it. Only the loop."""
        self.shared.ledger.fail(tup, reason)
        self.stats.failed += 1

    def note_unacked(self, tup: Tuple) -> None:
        """Add a tuple to :attr:`unacked`: ``process`` may return without an ack.

        In the thread that runs the task.
        """
        # Called per tuple, measured by benchmarks/dataplane.py.
        unacked = self.unacked
        unacked.append(tup)
        if len(unacked) < self._max_unacked:
            return
        # A bolt may never ack: tuples of a check longer ago than the message timeout are dropped.
        checked_at, checked_count = self._unacked_check
        now = time.monotonic()
        timeout = float(self.conf.get("topology.message.timeout.secs") or 30)
        is_late = now - checked_at > timeout
        old: list[Tuple] = []
        if not is_late:
            old = [checked for checked in unacked[:checked_count] if checked._tree is not None]
        new = [later for later in unacked[checked_count:] if later._tree is not None]
        unacked[:] = old + new
        self._unacked_check = (now, len(unacked)) if is_late else (checked_at, len(old))
        self._max_unacked = len(unacked) * 3 // 2 + _MIN_UNACKED

    def checked_route(self, values: Any, stream: str) -> Route:
        """Return the route for an emit, and log it with ``topology.debug``.

        ``InvalidRequest`` unless the values fit the stream.
        """
        route = route_of(self.routes, stream, self.component)
        check_values(values, route)
        check_types(values, self.part.outputs[stream], stream, self.component)
        if self.debug:
            _log.info("%s-%d emits %r %s", self.component, self.task_id, values, stream)
        return route

    def wrap_emit(self, emit: Callable[..., Any], stream_at: int) -> Callable[..., Any]:
        """Wrap ``emit`` with the checks that the conf or the component needs.

        They are the log of ``topology.debug``, the types of typed streams and a test encoding.
        ``stream_at``: index of the stream among the positional arguments.
        """
        check = self.conf.get("topology.testing.always.try.serialize")
        typed = {name: stream for name, stream in self.part.outputs.items() if stream.types}
        if not (self.debug or check or typed):
            return emit

        def emit_checked(tup: Any, *args: Any, **kwargs: Any) -> Any:
            stream_arg = args[stream_at - 1] if len(args) >= stream_at else kwargs.get("stream")
            stream = str(stream_arg or "default")
            if stream in typed:
                check_types(tup, typed[stream], stream, self.component)
            if check:
                tup = sent_and_received(
                    tup, route_of(self.routes, stream, self.component), self.task_id
                )
            tasks = emit(tup, *args, **kwargs)
            if self.debug:
                arguments = {**dict(enumerate(args)), **kwargs} or ""
                _log.info("%s-%d emits %r %s", self.component, self.task_id, tup, arguments)
            return tasks

        return emit_checked

    def report(self, error: BaseException, activity: str) -> None:
        """Count and log an error, and record it for the topology.

        ``activity``: the step of the task that failed.
        """
        self.stats.errors += 1
        try:
            self.shared.report(self.task_id, self.component, error, activity)
        except Exception as second:
            # An error that cannot be shown must not do more harm than another one.
            text = f"{type(error).__name__}, which cannot be shown: {type(second).__name__}"
            self.shared.report(self.task_id, self.component, RuntimeError(text), activity)

    def reason_of(self, cause: Any) -> Reason:
        """Return the reason of a failure here. Any thread.

        ``cause``: an exception, or the text of the component.
        """
        try:
            if isinstance(cause, BaseException):
                text = f"{type(cause).__name__}: {cause}"
            else:
                text = str(cause)
        except Exception:
            text = f"{type(cause).__name__}, which cannot be shown"
        if cause is None:
            text = "failed by the component, without a reason"
        if len(text) > _MAX_REASON:
            # A program sends its complete traceback: the error is at the end.
            text = f"{text[:200]} ... {text[205 - _MAX_REASON :]}"
        return self.task_id, self.component, text.encode("utf-8", "backslashreplace").decode()

    def metric(self, name: str, value: Any) -> None:
        """Keep the newest value of a user metric.

        Name and value have the form of :func:`metric_value`. Further names than 100 are ignored.
        """
        metrics = self.stats.metrics
        if name in metrics or len(metrics) < 100:
            metrics[name] = value

    def show_awaited(self, source: str, text: str) -> None:
        """Show the systems that the task waits for, by ``source``. Any thread that runs it."""
        self.awaited.show(source, text)

    def send_to_peer(self, task: int, values: Sequence[Any]) -> None:
        """Send a message to another task of the component.

        It may be lost, like an untracked tuple. Without effect for a task that is not known.
        """
        link = self.peers.get(task)
        if link is None:
            return
        if link.append is None:
            send_remote(link, None, [*values])
        else:
            link.append(Tuple(0, self.component, _PEERS, self.task_id, [*values], None))

    def tick_tuple(self) -> Tuple:
        """Create a tick tuple for the component."""
        return Tuple(0, SYSTEM, TICK_STREAM, SYSTEM_TASK, [self.tick_secs])

    def run_pulse(self) -> None:
        """Run the timers of windows and state that are due. In the thread that runs the task."""
        if self.state is not None:
            try:
                self.state.pulse()
            except self.shared.catches as error:
                self.on_error(error, "windows and state")

    def run_tick(self) -> None:
        """Call ``process_tick``, unless its errors pause it. In the thread that runs the task.

        A tick within a pause is skipped.
        """
        if self.shared.clock() < self.tick_errors.until:
            return
        try:
            self.instance.process_tick(self.tick_tuple())
        except self.shared.catches as error:
            self.on_tick_error(error)
        else:
            self.tick_errors.on_success()
            self.system_wait.end("tick")

    def on_tick_error(self, error: BaseException) -> None:
        """Pause ``process_tick``, or wait for the system that it named."""
        if isinstance(error, SystemUnavailable):
            self.system_wait.begin(error, "tick")
            return
        self.on_error(error, "process_tick")
        self.tick_errors.on_error(self.shared.clock())
        self.system_wait.end("tick")

    def on_clock(self, now: float) -> None:
        """Set :attr:`ticks` to the due events; missed ticks are skipped."""
        if (
            self.tick_secs is not None
            and now >= self.next_tick - _EXACT_SECS
            and self.status == "running"
        ):
            self.ticks |= TICK_DUE
            self.next_tick = max(self.next_tick + self.tick_secs, now)
        if self.results is not None:
            self.results.on_clock(now)
        if (
            self.state is not None
            and self.status == "running"
            and now >= self.next_pulse - _EXACT_SECS
        ):
            self.ticks |= PULSE_DUE
            self.next_pulse = now + _PULSE_SECS
