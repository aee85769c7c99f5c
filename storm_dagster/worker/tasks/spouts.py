"""Runner of spouts on the worker's loop, and the base of all spout runners."""

from collections.abc import Callable
from functools import partial
from typing import Any

from storm_dagster.api.error_pauses import ErrorPauses
from storm_dagster.api.outages import SystemUnavailable
from storm_dagster.api.spouts import Spout
from storm_dagster.api.tuples import Tuple
from storm_dagster.core.dataplane.acking import PendingMap
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.fusion import FUSED
from storm_dagster.model.values import ATOMIC, own_values
from storm_dagster.worker.dataplane.sending import (
    check_values,
    route_of,
    send_remote,
    send_to_targets,
)
from storm_dagster.worker.dataplane.tree import Tree, next_edge
from storm_dagster.worker.tasks.bolts import emitted_on
from storm_dagster.worker.tasks.collectors import BoltCollector
from storm_dagster.worker.tasks.dead_letters import DeadLetters, Notify, Verdict
from storm_dagster.worker.tasks.runner import Runner, make_component

VERDICTS = {True: "ack", False: "fail", None: "given_up", "lost": "_lost"}
"""Verdict on a tuple id -> method of the spout."""
PASS_CALLS = 100
"""Largest number of calls of ``next_tuple`` in one pass of the loop."""
PASS_SECS = 0.002
"""Time after which a pass continues with the bolts."""
_QUICK_RETRIES = 500
"""Empty calls in a row after which the pause before the next call is longer."""
_ERROR_PAUSE_SECS = 0.1
"""Pause after a single error of ``next_tuple``."""
_TOLERATED_VERDICTS = 10
"""Errors of ``ack`` and ``fail`` in a row that do not hold the spout: some ids may be at fault."""
_LOST_PAUSE_SECS = 1.0
"""Pause between two rounds of trees lost with a worker. So a spout that gives up after a few fails
survives a move.
"""


class SpoutBase(Runner):
    """Base of spout runners.

    It has the pending trees, and notifies the spout of acks, fails and timeouts.
    """

    kind = "spout"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        timeout = float(self.conf.get("topology.message.timeout.secs") or 30)
        self.pending: PendingMap[Any] = PendingMap(timeout)
        """Root -> (tuple id of the spout, stream, tree)."""
        self.max_pending: int | None = self.conf.get("topology.max.spout.pending") or None
        self.acked: list[int] = []
        """Roots of complete trees; the next run notifies the spout."""
        self.failed: list[int] = []
        """Roots of trees that failed or timed out; likewise."""
        self.lost: list[int] = []
        """Roots of trees with parts in a lost worker; likewise, after a pause."""
        self._next_lost = 0.0
        """Time before which the spout is not notified of :attr:`lost`."""
        self.pause_until = 0.0
        """End of the pause after an empty call; the test harness skips it."""
        self.call_errors = ErrorPauses()
        """Pauses of ``next_tuple`` after its errors. In the thread that calls it."""
        self.verdict_errors = ErrorPauses(_TOLERATED_VERDICTS)
        """Pauses of ``next_tuple`` after errors of ``ack`` and ``fail``, which are not skipped."""
        self.clock_errors = ErrorPauses()
        """Pauses of the spout's clock method."""
        self.at_once: list[Any] = []
        """Tuple ids to ack without tracking (no ackers)."""
        self.send: Callable[..., Any] = make_component
        """Emit of :meth:`make_emit`, for the loop itself. Not used before that has set it."""
        self.letters = DeadLetters(self)

    def full(self) -> bool:
        """True if ``topology.max.spout.pending`` is reached."""
        return self.max_pending is not None and len(self.pending) >= self.max_pending

    def may_emit(self) -> bool:
        """True if the spout may emit. Any thread."""
        may_take = self.shared.spouts_run and not self.held and not self.events_full
        return may_take and not self.letters.holds

    def retry_at(self) -> float:
        """Clock before which errors in a row keep the spout from ``next_tuple``."""
        return max(self.call_errors.until, self.verdict_errors.until)

    def _note_call(self, has_emitted: bool) -> None:
        """Note a call of ``next_tuple`` that returned after an error."""
        if has_emitted:
            self.call_errors.on_success()
        else:
            self.call_errors.on_empty(self.shared.clock())

    def on_active(self, active: bool) -> None:
        """Notify the spout that the topology is active or inactive.

        Without effect if the spout does not run, or asks :attr:`Shared.active` itself.
        """

    def make_emit(self) -> Callable[..., list[int] | None]:
        """Create this task's ``emit``. Used only by the loop.

        See ``BoltRunner._make_hot_path`` for the reason why it repeats the bolts'. Measured by
        ``benchmarks/dataplane.py``.
        """
        routes = self.routes
        shared = self.shared
        ledger = shared.ledger
        atomic = ATOMIC
        component = self.component
        task_id = self.task_id
        entries = self.pending.entries
        at_once = self.at_once
        clock = shared.clock

        def emit(
            tup: Any,
            tup_id: Any = None,
            stream: str | None = None,
            direct_task: int | None = None,
            need_task_ids: bool = False,
        ) -> list[int] | None:
            if stream is None:
                stream = "default"
            try:
                route = routes[stream]
            except KeyError:
                route = route_of(routes, stream, component)
            if (type(tup) is not list and type(tup) is not tuple) or len(tup) != route.width:
                check_values(tup, route)
            values = [*tup]
            only = route.only
            # True if a value is of another type than ATOMIC: it is copied for each target.
            rich = False
            for value in values:
                if type(value) not in atomic:
                    values = own_values(tup, route.fields, stream, component, task_id)
                    rich = True
                    only = None
                    break
            tree: Tree | None = None
            if tup_id is not None:
                ackers = shared.acker_tasks
                if ackers:
                    root = next_edge()
                    next_home = shared.next_home
                    if next_home is not None:
                        # A root whose acker is in this worker saves two messages per tree.
                        count = len(ackers)
                        root = root - root % count + next_home()
                        if root >= 1 << 64:
                            root -= count
                    # One extra until all its tuples are sent.
                    tree = Tree(1, root or 1, 0, self)
                    entries[tree.root] = ((tup_id, stream, tree), clock())
            route.emitted += 1
            try:
                if only is None or direct_task:
                    links = send_to_targets(
                        route, values, tree, ledger, component, task_id, direct_task, rich
                    )
                    task_ids = [link.task for link in links] if need_task_ids else None
                else:
                    link = only(values)
                    if link.append is None:
                        send_remote(link, tree, values)
                    else:
                        if tree is not None:
                            tree.count += 1
                        link.append(Tuple(0, component, stream, task_id, values, tree))
                    task_ids = [link.task] if need_task_ids else None
            except BaseException as error:
                # A grouping raised. The spout is notified at once, not at the timeout.
                if tree is not None:
                    ledger.fail_root(tree.root, self, self.reason_of(error))
                raise
            if tree is not None:
                # Without the extra one, an emit to no target is complete.
                count = tree.count = tree.count - 1
                if not count:
                    ledger.ack_tree(tree)
            elif tup_id is not None:
                at_once.append(tup_id)
            return task_ids

        self.send = self.wrap_emit(emit, 2)
        return self.letters.wrap_emit(self.send)

    def deliver_verdicts(self, now: float, notify: Notify) -> bool:
        """Call ``notify(verdict, tuple id)`` for every complete or failed tree.

        Its pending entry is removed. Of a replayed dead letter the letter is changed, without a
        call. Returns True if there were any.
        """
        # Called per pass, with code per tuple; measured by benchmarks/dataplane.py.
        lost: list[int] = []
        if self.lost and now >= self._next_lost:
            lost = self.lost
            self.lost = []
            self._next_lost = now + _LOST_PAUSE_SECS
        if not (self.acked or self.failed or lost or self.at_once):
            return False
        stats = self.stats
        pop = self.pending.entries.pop
        letters = self.letters
        on_acked: Notify = notify
        if letters.watches():
            on_acked = partial(_notify_letters, letters, notify)
        acked = self.acked
        self.acked = []
        # ((tuple id, stream, tree, ...), clock of the emit) of each.
        completed = [entry for root in acked if (entry := pop(root, None)) is not None]
        # Streams of fused chains carry no tuples of the topology: statistics leave them out.
        counted = completed
        if any(name.startswith(FUSED) for name in self.routes):
            counted = [entry for entry in completed if not entry[0][1].startswith(FUSED)]
        stats.acked += len(counted)
        for entry, since in stats.take_samples(counted):
            stats.time_tree(int((now - since) * 1e9), entry[1])
        for entry, _ in completed:
            on_acked(True, entry[0])
        failed = self.failed
        self.failed = []
        for roots in (lost, failed):
            for root in roots:
                pending = pop(root, None)
                if pending is not None:
                    stats.failed += 1
                    self.shared.lost_trees += roots is lost
                    letters.on_failed(root, pending[0], roots is lost, notify)
        if self.at_once:
            ids = self.at_once.copy()
            self.at_once.clear()
            stats.acked += len(ids)
            for tup_id in ids:
                on_acked(True, tup_id)
        return True

    def take_pending(self) -> list[Any]:
        """Remove and return the ids of pending tuples.

        These will be neither acked nor failed.
        """
        ids = [entry[0][0] for entry in self.pending.entries.values()]
        self.pending.entries.clear()
        return self.letters.own_ids(ids)

    def on_clock(self, now: float) -> None:
        """Fail the trees that have timed out."""
        super().on_clock(now)
        if self.awaits_target:
            # A timeout would count as a try of a tuple that only waits.
            self.pending.extend_deadlines(now)
        self.failed += self.pending.overdue(now)


def _notify_letters(letters: DeadLetters, notify: Notify, verdict: Verdict, tup_id: Any) -> None:
    # A `Notify` for complete trees: `verdict` is always True.
    letters.on_acked(tup_id, notify)


def _ignore_emit(*args: Any, **kwargs: Any) -> list[int]:
    """Replacement for ``emit`` of a spout that closes."""
    return []


class SpoutRunner(SpoutBase):
    """Runner of a spout whose methods return quickly."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._empty = 0
        """Empty calls of next_tuple in a row."""
        self._calls = 0
        """All calls of next_tuple."""

    def open(self) -> None:
        """Create and connect the spout."""
        spout = make_component(self.part, Spout)
        emit = self.make_emit()

        def fail(tup: Any) -> None:
            raise InvalidRequest(
                f"component {self.component!r} is a spout, which neither acks nor fails tuples"
            )

        def emit_for_collector(
            tup: Any, stream: Any, anchors: Any, direct: Any, need: bool, tup_id: Any
        ) -> Any:
            return emit(tup, tup_id, stream, direct, need)

        collector = BoltCollector(self, emit_for_collector, fail, fail)
        spout._collector = collector
        collector.give_up = self.letters.give_up
        self.letters.open()
        spout.context = self.context
        spout.conf = self.conf
        if type(spout).emit is Spout.emit:
            spout.emit = emit  # type: ignore[method-assign]
        spout.initialize(self.conf, self.context)
        self.instance = spout

    def _notify(self, verdict: Verdict, tup_id: Any) -> None:
        try:
            if verdict is True:
                self.instance.ack(tup_id)
            else:
                getattr(self.instance, VERDICTS[verdict])(tup_id)
        except self.shared.catches as error:
            self.on_error(error, VERDICTS[verdict])
            self.verdict_errors.on_error(self.shared.clock())
        else:
            # Called per tuple.
            if self.verdict_errors.errors:
                self.verdict_errors.on_success()

    def on_clock(self, now: float) -> None:
        """Fail timed out trees, and call the spout's clock method."""
        super().on_clock(now)
        if self.shared.owns() and now >= self.clock_errors.until and self.status == "running":
            try:
                self.instance._on_clock()
            except self.shared.catches as error:
                self.on_error(error, "the spout's clock")
                self.clock_errors.on_error(now)
            else:
                self.clock_errors.on_success()

    def run(self, now: float) -> bool:
        """Notify the spout of acks and fails, and call ``next_tuple``.

        It is called until it emits nothing, or a limit is reached. Returns True if there was work.
        """
        # Measured by benchmarks/dataplane.py.
        worked = self.deliver_verdicts(now, self._notify)
        shared = self.shared
        if self.crashed:
            return True
        if not self.may_emit() or now < self.pause_until or not shared.owns():
            return worked
        if now < self.retry_at() or self.system_wait.is_pausing():
            return worked
        next_tuple = self.instance.next_tuple
        routes = tuple(self.routes.values())
        clock = shared.clock
        until = now + PASS_SECS if shared.sliced else float("inf")
        entries = self.pending.entries
        max_pending = self.max_pending or (1 << 60)
        emitted = emitted_on(routes)
        stop = emitted + self.quota
        for _ in range(PASS_CALLS):
            before = emitted
            if len(entries) >= max_pending or before >= stop:
                break
            self._calls += 1
            try:
                next_tuple()
            except shared.catches as error:
                if isinstance(error, SystemUnavailable):
                    self.system_wait.begin(error)
                    return True
                self.on_error(error, "next_tuple")
                self.call_errors.on_error(clock())
                self.pause_until = clock() + _ERROR_PAUSE_SECS
                return True
            if self.system_wait.is_waiting:
                self.system_wait.end()
            emitted = routes[0].emitted if len(routes) == 1 else emitted_on(routes)
            if self.call_errors.errors:
                self._note_call(emitted > before)
            if emitted == before:
                self._empty += 1
                # Called every millisecond at first, less often later.
                self.pause_until = clock() + (0.001 if self._empty < _QUICK_RETRIES else 0.005)
                break
            worked = True
            self._empty = 0
            if clock() > until:
                break
        if self.at_once:
            # Without ackers, this call's tuples are acked now.
            self.deliver_verdicts(now, self._notify)
        return worked

    def calls_on_loop(self) -> int:
        """Return the number of calls of ``next_tuple``."""
        return self._calls

    def idle_secs(self, now: float) -> float | None:
        if not self.may_emit() or self.full():
            return None
        wait_secs = self.system_wait.pause_secs() or 0.0
        return max(0.0, self.pause_until - now, self.retry_at() - now, wait_secs)

    def on_active(self, active: bool) -> None:
        self._call("activate" if active else "deactivate")

    def close(self, *, retire: bool = False) -> None:
        """Close as :meth:`Runner.close`.

        A retired spout is deactivated, and its pending tuples fail: it may return them to its
        source.
        """
        if retire and self.status == "running":
            self.deliver_verdicts(self.shared.clock(), self._notify)
            # Tuples that it emits in response would never be acked.
            self.instance._collector.emit = _ignore_emit
            self.instance.emit = _ignore_emit
            self.on_active(False)
            for tup_id in self.take_pending():
                self._notify("lost", tup_id)
        super().close(retire=retire)

    def _call(self, name: str) -> None:
        """Call a method of the spout, if it runs."""
        if self.status == "running":
            try:
                getattr(self.instance, name)()
            except self.shared.catches as error:
                self.on_error(error, name)
