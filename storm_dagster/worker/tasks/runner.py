"""Base class of tasks in a worker, and what all tasks share."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from storm_dagster.api.context import TopologyContext
from storm_dagster.api.tuples import SYSTEM_TASK, TICK_STREAM, Tuple
from storm_dagster.host.waiting import Backoff
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.names import SYSTEM
from storm_dagster.model.topology import ComponentSpec
from storm_dagster.worker.dataplane.events import EventDelivery
from storm_dagster.worker.dataplane.routes import Route, resolve
from storm_dagster.worker.dataplane.sending import (
    check_types,
    check_values,
    route_of,
    send_remote,
    sent_and_received,
)
from storm_dagster.worker.dataplane.tree import LOST, Ledger, Reason
from storm_dagster.worker.state.host import MAX_RETRY_SECS
from storm_dagster.worker.state.storage import StateStorage
from storm_dagster.worker.tasks.stats import TaskStats

if TYPE_CHECKING:
    from storm_dagster.worker.state.driver import StateDriver
    from storm_dagster.worker.state.windows import ResultTracker

_log = logging.getLogger("storm_dagster.component")

TICK_DUE, PULSE_DUE = 1, 2
_PEERS = "__peers"
"""Stream of the messages between tasks of one component."""
_EXACT_SECS = 1e-6
"""Rounding error of summed times: a deadline counts as reached this much earlier."""
_PULSE_SECS = 0.1
"""Pause between two looks at what is due by time: windows, checkpoints."""
MOST_QUOTA = 20_000
"""Largest quota of a task, whatever its readers take."""
TURN_SECS = 0.05
"""Pause of a held task in a cycle after a call that emitted more than it took."""
_METRIC_BYTES = 16 << 10
_LEAST_KEPT = 32
_MOST_REASON = 500


@dataclass(eq=False, kw_only=True)
class Shared:
    """State shared by the tasks of a worker. Used only by the loop, unless noted."""

    conf: Mapping[str, Any]
    owns: Callable[[], bool]
    """Whether the worker's lease is valid now; cheap, any thread."""
    wake: Callable[[], None]
    """Wake the loop; any thread."""
    report: Callable[[int, str, BaseException, str], None]
    """(task, component, error, context text): log and record an error; any thread."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds; tests may use another clock. Any thread."""
    epoch: float | None = None
    """Of the clock's zero, seconds since 1970; ``None``: by the system's time."""

    def __post_init__(self) -> None:
        self._epoch = time.time() - self.clock() if self.epoch is None else self.epoch
        self.ledger = Ledger()
        self.events = EventDelivery(self)
        """The tasks' reports to Dagster."""
        self.spouts_run = False
        """Whether spouts may emit: active, all workers ready. Read by any thread."""
        self.active = False
        self.acker_tasks: tuple[int, ...] = ()
        self.next_home: Callable[[], int] | None = None
        """Index in ``acker_tasks`` of one in this worker, which spouts here prefer; each in
        turn.
        """
        self.closing = False
        self.lost_trees = 0
        """Trees of the spouts here that failed because a task or worker with parts of them is
        gone.
        """
        self.sliced = True
        """Whether a pass limits the time of each task. The test harness sets ``False``, so that the
        order of tuples does not depend on the machine's speed.
        """
        self.scratch: Path | None = None
        """Folder for files of running programs; ``None``: the current one, which a worker has for
        itself.
        """
        self.catches: tuple[type[BaseException], ...] = (BaseException,)
        """What a user's method may raise without ending the process. A worker survives everything
        (nothing is sent into it); the test harness passes a keyboard interrupt and a test's own
        outcome on.
        """
        self.at: Runner | None = None
        """The task that occupies the loop; read by the watchdog."""
        self.warned: set[str] = set()
        """Shell components whose changed values were logged."""
        self.storage = StateStorage(self.report)
        self.redirect: Callable[[Tuple, int], Any] = lambda tup, task: self.ledger.fail(tup)
        """(tuple, task): the tuple of a task to another one of its component."""

    def now_ms(self) -> int:
        """Milliseconds since 1970 that never go back while the process lives."""
        return round((self._epoch + self.clock()) * 1000)


def metric_value(name: Any, value: Any) -> tuple[str, Any]:
    """Name and value of a metric as every report can hold them; scalars of numpy and the like
    become numbers.

    ``InvalidRequest`` for others. The value is a copy: the component may change its own.
    """
    try:
        if type(value) not in (int, float, bool, str) and hasattr(value, "__float__"):
            value = int(value) if hasattr(value, "__index__") else float(value)
        raw = msgspec.msgpack.encode((str(name)[:200], value))
        if len(raw) > _METRIC_BYTES:
            raise ValueError(f"it takes {len(raw)} bytes, at most {_METRIC_BYTES} are kept")
        msgspec.json.encode(pair := msgspec.msgpack.decode(raw))
        return pair[0], pair[1]
    except Exception as error:
        raise InvalidRequest(
            f"metric {shown(name)} cannot be published ({type(value).__name__}; {error}): report a number"
        ) from None


def shown(value: Any, most: int = 60) -> str:
    """The beginning of a value's ``repr``, for a message; a value whose ``repr`` raises is named by
    its type.
    """
    try:
        return repr(value)[:most]
    except Exception:
        return f"<{type(value).__name__}>"


def make_component(part: ComponentSpec, kind: type[Any]) -> Any:
    """An instance of the component's class; errors of its import or constructor pass through."""
    if part.object.python is None:
        raise AssertionError("a shell component has no class")
    component = resolve(part.object.python)(**part.object.args)
    if not isinstance(component, kind):
        raise TypeError(f"{part.object.python} is not a {kind.__name__}")
    return component


class Runner:
    """One task: its component, its queue of received tuples, its routes and its statistics."""

    kind: Literal["spout", "bolt", "system"] = "bolt"
    is_async = False
    takes_peer_messages = False
    """Whether tasks of the component send each other messages (:meth:`send_to_peer`)."""

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
        """Whether its routes are built; it does not run before."""
        self.peers: dict[int, Any] = {}
        """Other task of the component -> the link to it."""
        self.held = False
        """Whether back pressure stops this task (:class:`Pressure`). Read by any thread."""
        self.held_secs = 0.0
        """How long it did so far."""
        self.awaits_target = False
        """True while a bolt downstream waits for an external system that is away.

        Message timeouts do not run meanwhile.
        """
        self.in_cycle = False
        """Whether what holds it reads, directly or not, from this component."""
        self.next_turn = 0.0
        self.quota = MOST_QUOTA
        """Tuples that it may emit in one turn; the call that reaches the number ends it. A thread's
        calls of the loop wait for it at the same number.
        """
        self.tuple_bytes = 0.0
        """Mean size of the tuples that came from other workers, if they are large."""
        self.ticks = 0
        """Due events: ``TICK_DUE`` and ``PULSE_DUE``."""
        self.tick_secs: float | None = self.conf.get("topology.tick.tuple.freq.secs") or None
        self.next_tick = 0.0
        self.next_pulse = 0.0
        self.instance: Any = None
        """The component."""
        self.state: StateDriver | None = None
        """Of a stateful or windowed bolt."""
        self.results: ResultTracker | None = None
        """Of a windowed bolt."""
        self.kept: list[Tuple] = []
        """Tuples that the component holds, and some that it has acked or failed since."""
        self._most_kept = _LEAST_KEPT
        self._kept_at = (0.0, 0)
        """Time of an earlier check of :attr:`kept`, and how many of the first tuples were there
        then.
        """
        self.crashed = False
        """Whether the engine is to restart the task. Any thread."""
        self._retry_at = 0.0
        self._pauses = Backoff(1.0, MAX_RETRY_SECS)

    # -- life --------------------------------------------------------------------------------------

    def wire(self, routes: dict[str, Route]) -> None:
        """Replace the routes; their counts continue."""
        for stream, route in routes.items():
            if stream in self.routes:
                route.adopt(self.routes[stream])
        # Never empty meanwhile: a thread of the component may emit. The streams are always the
        # same.
        self.routes.update(routes)

    def start(self, now: float) -> bool:
        """Create and initialize the component, if that is due. Whether the task runs now."""
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
        self.next_tick = now + (self.tick_secs or 0.0)
        return True

    def start_failed(self, error: BaseException, now: float) -> None:
        """Report that the component could not be opened; the next try is after a pause, longer each
        time.
        """
        self.report(error, "initialize")
        if self.state is not None:
            self.state.log.close()
            self.state = None
        self._retry_at = now + self._pauses.next_pause()

    def open(self) -> bool | None:
        """Create and initialize the component. ``False``: not finished, call it again."""

    def run(self, now: float) -> bool:
        """Process queued work. Whether there was any."""
        return False

    def idle_secs(self, now: float) -> float | None:
        """Seconds until this task needs the loop; ``None``: until something arrives."""
        return None

    def may_begin(self) -> bool:
        """Whether back pressure lets the task begin a call. Any thread.

        In a cycle all tasks may wait for each other: there a call that emits no more than it takes
        is always allowed.
        """
        return not self.held or (self.in_cycle and time.monotonic() >= self.next_turn)

    def waiting(self) -> int:
        """Number of tuples queued for this task, in any queue."""
        return len(self.queue)

    def target_is_away(self) -> bool:
        """True while the component waits for an external system.

        It takes no tuples until its sink, or Spark, answers.
        """
        return False

    def backlog_secs(self) -> float:
        """Estimated seconds to process the queue."""
        stats = self.stats
        return self.waiting() * stats.execute_ns / stats.timed / 1e9 if stats.timed else 0.0

    def busy_elsewhere(self) -> bool:
        """Whether a thread or process of the task has work, so that the loop may wait for it."""
        return False

    def begin_close(self, *, retire: bool) -> None:
        """Ask the task's thread, if it has one, to end; then call :meth:`close`."""

    def has_ended(self) -> bool:
        """Whether :meth:`close` has nothing to wait for. Runs the last calls of the task's
        thread.
        """
        return True

    def stuck_calls(self, since: float) -> list[tuple[float, str, str]]:
        """Calls of the component in a thread of its own that began before ``since``: (start,
        method, where it is). Any thread.
        """
        return []

    def close(self, *, retire: bool = False) -> None:
        """Close the task gracefully. ``retire``: the topology continues, and the task moves, or
        reopens with another context.
        """
        if self.instance is not None and self.status == "running":
            self.close_instance()
        self.context.close()

    def close_instance(self) -> None:
        """Checkpoint and close the component, and fail the tuples that it has not acked. In the
        thread that runs it.
        """
        state, bolt = self.state, self.instance
        # It may have crashed at one of those that it handles together, or long after `process`.
        blamed = self.crashed and (
            getattr(bolt, "_gathers", False) or not getattr(bolt, "auto_ack", True)
        )
        if state is not None:
            self.attempt("checkpoint", state.abandon if self.crashed else state.close)
        self.attempt("close", bolt.close)
        reason = self.reason_of("the task crashed before it acked the tuple") if blamed else LOST
        kept, self.kept = self.kept, []
        self.call_in_loop(lambda: [self.fail(tup, reason) for tup in kept if tup._tree is not None])
        self.state = None

    def restart(self) -> None:
        """Close the component, and create it again in a second; its tuples fail. Only the loop."""
        self.close(retire=True)
        self.status = "starting"
        self._retry_at = self.shared.clock() + 1.0
        self.crashed = False

    def attempt(self, what: str, action: Callable[[], Any]) -> None:
        """Run ``action``, and report its error."""
        try:
            action()
        except self.shared.catches as error:
            self.report(error, what)

    def on_error(self, error: BaseException, where: str) -> None:
        """Report what a method of the component raised. What is no ``Exception`` (``SystemExit``, a
        cancellation that nobody asked for) says that it cannot go on: the task restarts. Any
        thread.
        """
        self.report(error, where)
        if not isinstance(error, Exception):
            self.crashed = True
            self.shared.wake()

    def has_pending_acks(self) -> bool:
        """Whether acks wait for a checkpoint."""
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

    def keep(self, tup: Tuple) -> None:
        """Note a tuple that ``process`` may return without an ack. In the thread that runs the
        task.
        """
        kept = self.kept
        kept.append(tup)
        if len(kept) < self._most_kept:
            return
        # A bolt may never ack: what was there at a check longer ago than the message timeout is
        # dropped.
        (since, count), now = self._kept_at, time.monotonic()
        late = now - since > float(self.conf.get("topology.message.timeout.secs") or 30)
        old = [] if late else [one for one in kept[:count] if one._tree is not None]
        kept[:] = old + [one for one in kept[count:] if one._tree is not None]
        self._kept_at = (now, len(kept)) if late else (since, len(old))
        self._most_kept = len(kept) * 3 // 2 + _LEAST_KEPT

    def checked_route(self, values: Any, stream: str) -> Route:
        """The route for an emit; ``InvalidRequest`` unless the values fit the stream. Logs with
        ``topology.debug``.
        """
        route = route_of(self.routes, stream, self.component)
        check_values(values, route)
        check_types(values, self.part.outputs[stream], stream, self.component)
        if self.debug:
            _log.info("%s-%d emits %r %s", self.component, self.task_id, values, stream)
        return route

    def wrap_emit(self, emit: Callable[..., Any], stream_at: int) -> Callable[..., Any]:
        """Wrap ``emit`` with the log of ``topology.debug``, the types of typed streams and a test
        encoding, if the conf or the component asks for any of them. ``stream_at``: index of the
        stream among the positional arguments.
        """
        check = self.conf.get("topology.testing.always.try.serialize")
        typed = {name: stream for name, stream in self.part.outputs.items() if stream.types}
        if not (self.debug or check or typed):
            return emit

        def emit_checked(tup: Any, *rest: Any, **named: Any) -> Any:
            given = rest[stream_at - 1] if len(rest) >= stream_at else named.get("stream")
            stream = str(given or "default")
            if stream in typed:
                check_types(tup, typed[stream], stream, self.component)
            if check:
                tup = sent_and_received(
                    tup, route_of(self.routes, stream, self.component), self.task_id
                )
            sent = emit(tup, *rest, **named)
            if self.debug:
                what = {**dict(enumerate(rest)), **named} or ""
                _log.info("%s-%d emits %r %s", self.component, self.task_id, tup, what)
            return sent

        return emit_checked

    def report(self, error: BaseException, where: str) -> None:
        """Count and log an error, and record it among the topology's errors."""
        self.stats.errors += 1
        try:
            self.shared.report(self.task_id, self.component, error, where)
        except Exception as second:
            # An error that cannot even be shown must not do more harm than one that can.
            text = f"{type(error).__name__}, which cannot be shown: {type(second).__name__}"
            self.shared.report(self.task_id, self.component, RuntimeError(text), where)

    def reason_of(self, cause: Any) -> Reason:
        """Why a tuple failed here: an exception, or what the component says. Any thread."""
        try:
            text = (
                f"{type(cause).__name__}: {cause}"
                if isinstance(cause, BaseException)
                else str(cause)
            )
        except Exception:
            text = f"{type(cause).__name__}, which cannot be shown"
        if cause is None:
            text = "failed by the component, without a reason"
        if len(text) > _MOST_REASON:
            # A program sends its whole traceback: the error is at the end.
            text = f"{text[:200]} ... {text[205 - _MOST_REASON :]}"
        return self.task_id, self.component, text.encode("utf-8", "backslashreplace").decode()

    def metric(self, name: str, value: Any) -> None:
        """Keep the newest value of a user metric, as :func:`metric_value` made it; at most 100
        names.
        """
        metrics = self.stats.metrics
        if name in metrics or len(metrics) < 100:
            metrics[name] = value

    def send_to_peer(self, task: int, values: Sequence[Any]) -> None:
        """Send a message to another task of the component. It may be lost, as an untracked tuple
        may.
        """
        link = self.peers.get(task)
        if link is None:
            return
        if link.append is None:
            send_remote(link, None, [*values])
        else:
            link.append(Tuple(0, self.component, _PEERS, self.task_id, [*values], None))

    def tick_tuple(self) -> Tuple:
        """A tick tuple for the component."""
        return Tuple(0, SYSTEM, TICK_STREAM, SYSTEM_TASK, [self.tick_secs])

    def on_clock(self, now: float) -> None:
        """Set :attr:`ticks` to what is due; missed ticks are skipped."""
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
