"""Runner of bolts on the worker's loop."""

import logging
import time
from collections import Counter
from operator import attrgetter
from threading import Thread
from typing import Any

from storm_dagster.api.bolts import Bolt
from storm_dagster.api.outages import SystemUnavailable
from storm_dagster.api.tuples import Tuple
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.values import ATOMIC, own_values
from storm_dagster.worker.dataplane.named_values import namer_of
from storm_dagster.worker.dataplane.sending import (
    check_values,
    route_of,
    send_remote,
    send_to_targets,
)
from storm_dagster.worker.dataplane.tree import anchor_tree
from storm_dagster.worker.state.opening import StateOpening, acks_itself, open_state
from storm_dagster.worker.tasks.collectors import BoltCollector, check_received
from storm_dagster.worker.tasks.runner import (
    PULSE_DUE,
    TICK_DUE,
    TURN_SECS,
    Runner,
    make_component,
)

SLICE = 64
"""Tuples between two checks of the lease and the clock."""
PASS_NANOS = 10_000_000
"""Time after which a bolt task begins no further slice in a pass."""
SLOW_NANOS = 100_000
"""Mean time per tuple above which slices are shorter: one takes about ``PASS_NANOS``."""

_log = logging.getLogger("storm_dagster.component")
_source = attrgetter("component", "stream")


def emitted_on(routes: tuple[Any, ...]) -> int:
    """Return the number of tuples emitted on all of these routes."""
    # Called per slice, measured by benchmarks/dataplane.py.
    total = 0
    for route in routes:
        total += route.emitted
    return total


def count_inputs(runner: Runner, batch: list[Tuple]) -> None:
    """Count a batch as executed, by the stream it came on."""
    number = len(batch)
    runner.stats.executed += number
    if runner.debug:
        for tup in batch:
            _log.info("%s-%d received %r", runner.component, runner.task_id, tup)
    if len(runner.part.inputs) == 1:
        runner.stats.count_input(f"{batch[0].component}:{batch[0].stream}", number)
        return
    for (component, stream), times in Counter(map(_source, batch)).items():
        runner.stats.count_input(f"{component}:{stream}", times)


class BoltRunner(Runner):
    """Runner of a bolt whose ``process`` returns quickly."""

    _opening: StateOpening | None = None
    """State that is being read, until :meth:`open` attaches it."""
    _gain = 1 << 15
    """Tuples emitted by one call, rounded up.

    It rises at once and falls by halves; before the first call, a large number is assumed.
    """

    def open(self) -> bool:
        """Create and connect the bolt. ``False`` while its state is read in a thread.

        The next call continues with that bolt, or raises the error of the reading.
        """
        opening = self._opening
        self._opening = None
        if opening is None:
            bolt = make_component(self.part, Bolt)
            opening = open_state(bolt, self)
        else:
            bolt = opening.bolt
        if opening is not None and not opening.log.done():
            self._opening = opening
            return False
        self._name_values = namer_of(bolt, self.context)
        self._execute = self._bind(bolt)
        if opening is not None:
            opening.attach()
        bolt.initialize(self.conf, self.context)
        self.instance = bolt
        return True

    def calls_on_loop(self) -> int:
        """Return the number of executed tuples."""
        return self.stats.executed

    def busy_elsewhere(self) -> bool:
        """True while the state is read."""
        return self._opening is not None

    def writers(self) -> list[Thread]:
        """Return the threads that may write state, among them the one that reads it first."""
        if self._opening is not None:
            return [self._opening.thread]
        return super().writers()

    def close(self, *, retire: bool = False) -> None:
        """Close as :meth:`Runner.close`, also while the state is read."""
        if self._opening is not None:
            self._opening.abandon()
        super().close(retire=retire)

    def _bind(self, bolt: Any) -> Any:
        """Connect the bolt, and return the ``execute`` of its hot path."""
        emit, send_event, execute = self._make_hot_path(bolt)
        wrapped_emit = self.wrap_emit(emit, 1)
        ack, fail = self._make_ack_and_fail()
        bolt._collector = BoltCollector(self, wrapped_emit, ack, fail, send_event)
        bolt.context = self.context
        bolt.conf = self.conf
        # Without the attribute chain of Bolt.emit, unless the class overrides it.
        if type(bolt).emit is Bolt.emit:
            bolt.emit = wrapped_emit
        return execute

    def _make_ack_and_fail(self) -> tuple[Any, Any]:
        """Create ``ack`` and ``fail`` of the collector."""
        # Called per tuple, measured by benchmarks/dataplane.py. The class test is the fast path;
        # check_received also lets a TupleId pass. No tree: the tuple is not tracked, only counted.
        ledger = self.shared.ledger
        stats = self.stats
        component = self.component

        def ack(tup: Tuple) -> None:
            if tup.__class__ is not Tuple:
                check_received(tup, component)
            if tup._tree is not None:
                ledger.ack(tup)
            stats.acked += 1

        def fail(tup: Tuple, reason: Any = None) -> None:
            if tup.__class__ is not Tuple:
                check_received(tup, component)
            if tup._tree is not None:
                ledger.fail(tup, self.reason_of(reason))
            stats.failed += 1

        return ack, fail

    def _on_process_error(self, bolt: Any, tup: Tuple, error: BaseException) -> None:
        """Report an error of ``process``.

        The tuple fails, unless the bolt does that itself (without ``auto_fail``) and the task has
        not crashed.
        """
        self.on_error(error, f"process of a tuple of {tup.component}")
        if bolt.auto_fail or self.crashed:
            self.fail(tup, self.reason_of(error))
        else:
            self.note_unacked(tup)

    def _make_hot_path(self, bolt: Any) -> tuple[Any, Any, Any]:
        """Create ``emit``, ``send_event`` and ``execute``.

        ``execute(batch)`` returns the number of tuples that it executed: fewer than the batch if
        the task crashed, or waits for a system.

        This code runs for every tuple, so it is closures: a variable of the enclosing function is
        the cheapest place for state. All of them are in one function, since they share
        ``current``. The second half of ``emit`` is the same as that of spouts: a shared function
        would add a call to every tuple, measured as 5 % of an emit, and ``emit`` itself cannot be
        shared, since the arguments differ in order. Measured by ``benchmarks/dataplane.py``.
        """
        routes = self.routes
        ledger = self.shared.ledger
        stats = self.stats
        component = self.component
        task_id = self.task_id
        ack_tree = ledger.ack_tree
        catches = self.shared.catches
        atomic = ATOMIC
        note_unacked = self.note_unacked
        auto_ack = bolt.auto_ack and not acks_itself(bolt)
        auto_anchor = bolt.auto_anchor and not getattr(bolt, "_gathers", False)
        current: Any = None

        def emit(
            tup: Any,
            stream: str | None = None,
            anchors: Any = None,
            direct_task: int | None = None,
            need_task_ids: bool = False,
            tup_id: Any = None,
        ) -> list[int] | None:
            if stream is None:
                stream = "default"
            try:
                route = routes[stream]
            except KeyError:
                route = route_of(routes, stream, component)
            if type(tup) is not list and type(tup) is not tuple:
                check_values(tup, route)
            width = route.width
            only = route.only
            # True if a value is of another type than ATOMIC: it is copied for each target.
            rich = False
            # A copy: the component may change its list while the tuple is queued in this worker.
            # Unpacking detects a wrong number; a loop over one or two values, and the set for the
            # commonest types, would double the cost.
            try:
                if width == 1:
                    (first,) = tup
                    values = [first]
                    if type(first) is not str and type(first) not in atomic:
                        rich = True
                elif width == 2:
                    first, second = tup
                    values = [first, second]
                    if (type(first) is not str and type(first) not in atomic) or (
                        type(second) is not int and type(second) not in atomic
                    ):
                        rich = True
                else:
                    values = [*tup]
                    first = values[0] if values else None
                    if len(values) != width:
                        check_values(tup, route)
                    for value in values:
                        if type(value) not in atomic:
                            rich = True
                            break
            except ValueError:
                check_values(tup, route)
                first = None
                values = []
                rich = True
            if rich:
                values = own_values(tup, route.fields, stream, component, task_id)
                only = None
            if anchors is None:
                tree = current
            else:
                tree = anchor_tree(anchors) if anchors else None
            route.emitted += 1
            if only is None or direct_task:
                links = send_to_targets(
                    route, values, tree, ledger, component, task_id, direct_task, rich
                )
                return [link.task for link in links] if need_task_ids else None
            target_cache = route.target_cache
            if target_cache is None:
                link = only(values)
            else:
                try:
                    link = target_cache[first]
                except KeyError:
                    link = only(values)
            append = link.append
            if append is None:
                if link.last is tree:
                    link.bundle.append(values)
                else:
                    send_remote(link, tree, values)
            else:
                if tree is not None:
                    if tree.parents is None:
                        tree.count += 1
                    else:
                        ledger.add(tree)
                append(Tuple(0, component, stream, task_id, values, tree))
            return [link.task] if need_task_ids else None

        def send_event(event: DagsterEvent, anchors: Any) -> None:
            if anchors is None:
                tree = current
            else:
                tree = anchor_tree(anchors) if anchors else None
            self.shared.events.add(self, event, tree)

        def execute(batch: list[Tuple]) -> int:
            nonlocal current
            process = bolt.process
            errors = 0
            executed = len(batch)
            # Acked tuples of one tree in a row, as they arrive in bundles: its count is written
            # once for all of them.
            last: Any = None
            acked = 0
            for tup in batch:
                tree = tup._tree
                current = tree if auto_anchor else None
                try:
                    process(tup)
                except catches as error:
                    if isinstance(error, SystemUnavailable):
                        # The tuple is not executed: it waits in the queue, with those after it.
                        self.system_wait.begin(error, "tuple")
                        executed = batch.index(tup)
                        break
                    errors += 1
                    self._on_process_error(bolt, tup, error)
                    if self.crashed:
                        executed = batch.index(tup) + 1
                        break
                    continue
                if auto_ack and tree is not None and tup._tree is not None:
                    tup._tree = None
                    if tree is last:
                        acked += 1
                        continue
                    if last is not None:
                        count = last.count = last.count - acked
                        if not count:
                            ack_tree(last)
                    last = tree
                    acked = 1
                elif tup._tree is not None:
                    note_unacked(tup)
            if last is not None:
                count = last.count = last.count - acked
                if not count:
                    ack_tree(last)
            current = None
            if auto_ack:
                stats.acked += executed - errors
            return executed

        return emit, send_event, execute

    def run(self, now: float) -> bool:
        """Process the queue while the lease is valid, and return True if there was work.

        The pass ends early after :data:`PASS_NANOS`, or when the quota is used up: the other tuples
        stay in the queue.
        """
        # Runs in each pass, measured by benchmarks/dataplane.py.
        queue = self.queue
        if self.events_full or self.system_wait.is_pausing():
            return self._run_without_tuples()
        if not queue:
            if self.ticks:
                self._tick()
                return True
            return self.state is not None and self.state.on_idle()
        if self.ticks:
            self._tick()
            if self.crashed or self.system_wait.is_pausing():
                return True
        held = self.held
        if held and not self.may_begin():
            return False
        batch = queue.copy()
        queue.clear()
        owns = self.shared.owns
        execute = self._execute
        stats = self.stats
        name_values = self._name_values
        clock = time.perf_counter_ns
        begin = clock()
        until = begin + PASS_NANOS if self.shared.sliced else 1 << 62
        total = len(batch)
        executed_before = stats.executed_by.copy() if stats.until_sample <= total else {}
        size = SLICE
        if stats.execute_ns > SLOW_NANOS * stats.timed:
            size = max(1, PASS_NANOS * stats.timed // stats.execute_ns)
        routes = tuple(self.routes.values()) if self.shared.sliced else ()
        first_emitted = emitted = emitted_on(routes)
        # Number of emitted tuples at which the turn ends.
        stop = first_emitted + self.quota
        if held:
            # The smallest turn: see `may_begin`.
            size = 1
            total = min(total, SLICE)
            queue += batch[total:]
            del batch[total:]
        start = 0
        while start < total:
            # The other tuples wait for the next pass, after frames and timers.
            if not owns() or (
                start
                and (
                    clock() > until
                    or emitted >= stop
                    or self.events_full
                    or (held and emitted - first_emitted > start)
                )
            ):
                queue[:0] = batch[start:]
                total = start
                break
            # No slice emits far more than the unused part of the quota.
            calls = min(size, (stop - emitted) // self._gain or 1) if routes else size
            chunk = batch[start : start + calls] if start or total > calls else batch
            if name_values is not None:
                name_values(chunk)
            executed = execute(chunk)
            calls = len(chunk)
            if executed:
                count_inputs(self, chunk if executed == calls else chunk[:executed])
            if self.crashed or executed < calls:
                # The other tuples wait for the restarted task, or for the system.
                queue[:0] = batch[start + executed :]
                return True
            if self.system_wait.is_waiting:
                self.system_wait.end("tuple")
            start += calls
            if routes:
                # Rises at once, and falls slowly: see `_gain`.
                now_emitted = emitted_on(routes)
                gain = (now_emitted - emitted) // calls + 1
                self._gain = gain if gain > self._gain else (gain + self._gain) // 2
                emitted = now_emitted
        if held and emitted - first_emitted > total:
            # It emitted more than it took.
            self.next_turn = time.monotonic() + TURN_SECS
        if not total:
            return False
        if stats.take_sample(total):
            stats.time_inputs(clock() - begin, stats.executed_since(executed_before))
        if self.state is not None and not queue:
            self.state.on_idle()
        return True

    def idle_secs(self, now: float) -> float | None:
        state_secs = self.state.idle_secs() if self.state is not None else None
        wait_secs = self.system_wait.pause_secs()
        if wait_secs is None or state_secs is None:
            return state_secs if wait_secs is None else wait_secs
        return min(state_secs, wait_secs)

    def _run_without_tuples(self) -> bool:
        """Run only the timers of windows and state, while the task waits for another system.

        Tuples and ticks wait. Returns True if there was work.
        """
        if self.state is None:
            return False
        due = self.ticks & PULSE_DUE
        if due:
            waiting = self.ticks & ~PULSE_DUE
            self.ticks = due
            self._tick()
            self.ticks |= waiting
        return self.state.on_idle() or bool(due)

    def _tick(self) -> None:
        """Run the due events of :attr:`ticks`.

        An error is reported, and may crash the task.
        """
        due = self.ticks
        self.ticks = 0
        if due & PULSE_DUE:
            self.run_pulse()
        if due & TICK_DUE and not self.crashed:
            self.run_tick()
            if self.system_wait.is_of("tick"):
                # Repeated before the next tuple.
                self.ticks |= TICK_DUE


class FusedBoltRunner(BoltRunner):
    """Runner of a bolt whose function runs in a query.

    Its statistics are those of the query, not of the tuples that are sent to it.
    """

    def run(self, now: float) -> bool:
        """Run as :meth:`BoltRunner.run`, with the counts of the query."""
        # The tuples from the spout carry rows or counts of the query: they are not counted.
        stats = self.stats
        executed_by = stats.executed_by.copy()
        executed = stats.executed
        acked = stats.acked
        worked = super().run(now)
        stats.executed = executed
        stats.acked = acked
        stats.executed_by = executed_by
        counts = getattr(self.instance, "counts", [])
        while counts:
            stats.count_fused(**counts.pop(0))
        return worked
