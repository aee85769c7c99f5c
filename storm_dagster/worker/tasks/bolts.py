"""Runner of bolts on the worker's loop."""

import logging
import time
from collections import Counter
from operator import attrgetter
from typing import Any

from storm_dagster.api.bolts import Bolt
from storm_dagster.api.tuples import Tuple, TupleId
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.errors import InvalidRequest
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
from storm_dagster.worker.tasks.runner import (
    PULSE_DUE,
    TICK_DUE,
    TURN_SECS,
    Runner,
    make_component,
    metric_value,
    shown,
)

SLICE = 64
"""Tuples between two checks of the lease and the clock."""
PASS_NANOS = 10_000_000
"""Longest time of one bolt task in a pass."""
SLOW_NANOS = 100_000
"""Mean time per tuple above which slices are shorter."""

_log = logging.getLogger("storm_dagster.component")
_source = attrgetter("component", "stream")


def emitted_on(routes: tuple[Any, ...]) -> int:
    """Tuples emitted so far on all of these routes."""
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


def check_received(tup: Any, component: str) -> None:
    """``InvalidRequest`` unless ``tup`` is a received tuple."""
    if not isinstance(tup, Tuple | TupleId):
        raise InvalidRequest(
            f"component {component!r} acks, fails or anchors to {type(tup).__name__} {shown(tup)}: pass a tuple that "
            "it received"
        )


class BoltRunner(Runner):
    """Runner of a bolt whose ``process`` returns quickly."""

    _opening: StateOpening | None = None
    _gain = 1 << 15
    """Tuples emitted by one call, rounded up. It rises at once and falls by halves; unknown, it is
    taken as large.
    """

    def open(self) -> bool:
        """Create and connect the bolt. ``False`` while its state is read."""
        opening, self._opening = self._opening, None
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

    def busy_elsewhere(self) -> bool:
        """Whether the state is being read."""
        return self._opening is not None

    def close(self, *, retire: bool = False) -> None:
        """As :meth:`Runner.close`, also while the state is being read."""
        if self._opening is not None:
            self._opening.abandon()
        super().close(retire=retire)

    def _bind(self, bolt: Any) -> Any:
        """Connect the bolt, and return ``execute(batch) -> number of tuples that it took``: fewer
        if the task crashed.

        This code runs for every tuple, so it is closures: a variable of the enclosing function is
        the cheapest place for state. The second half of ``emit`` is the same as that of spouts: a
        shared function would add a call to every tuple, measured as 5 % of an emit, and a shared
        ``emit`` cannot be, since the arguments differ in order.
        """
        routes, ledger, stats = self.routes, self.shared.ledger, self.stats
        component, task_id = self.component, self.task_id
        done, catches, atomic, keep = ledger.done, self.shared.catches, ATOMIC, self.keep
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
            width, only, rich = route.width, route.only, False
            # A copy: the component may change its list while the tuple is queued in this worker.
            # Unpacking tells a wrong number; a loop over one or two values, and the set for the
            # commonest types, would double the cost.
            try:
                if width == 1:
                    (one,) = tup
                    values = [one]
                    if type(one) is not str and type(one) not in atomic:
                        rich = True
                elif width == 2:
                    one, two = tup
                    values = [one, two]
                    if (type(one) is not str and type(one) not in atomic) or (
                        type(two) is not int and type(two) not in atomic
                    ):
                        rich = True
                else:
                    values = [*tup]
                    one = values[0] if values else None
                    if len(values) != width:
                        check_values(tup, route)
                    for value in values:
                        if type(value) not in atomic:
                            rich = True
                            break
            except ValueError:
                check_values(tup, route)
                one, values, rich = None, [], True
            if rich:
                values, only = own_values(tup, route.fields, stream, component, task_id), None
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
            known = route.target_cache
            if known is None:
                link = only(values)
            else:
                try:
                    link = known[one]
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

        def broken(tup: Tuple, error: BaseException) -> None:
            self.on_error(error, f"process of a tuple of {tup.component}")
            if bolt.auto_fail or self.crashed:
                self.fail(tup, self.reason_of(error))
            else:
                keep(tup)

        def event(event: DagsterEvent, anchors: Any) -> None:
            tree = current if anchors is None else anchor_tree(anchors) if anchors else None
            self.shared.events.add(self, event, tree)

        def execute(batch: list[Tuple]) -> int:
            nonlocal current
            process = bolt.process
            bad, taken = 0, len(batch)
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
                    bad += 1
                    broken(tup, error)
                    if self.crashed:
                        taken = batch.index(tup) + 1
                        break
                    continue
                if auto_ack and tree is not None and tup._tree is not None:
                    tup._tree = None
                    if tree is last:
                        acked += 1
                        continue
                    if last is not None:
                        left = last.count = last.count - acked
                        if not left:
                            done(last)
                    last, acked = tree, 1
                elif tup._tree is not None:
                    keep(tup)
            if last is not None:
                left = last.count = last.count - acked
                if not left:
                    done(last)
            current = None
            if auto_ack:
                stats.acked += taken - bad
            return taken

        sends = self.wrap_emit(emit, 1)
        bolt._collector = BoltCollector(self, sends, ack, fail, event)
        bolt.context, bolt.conf = self.context, self.conf
        # Without the attribute chain of Bolt.emit, unless the class overrides it.
        if type(bolt).emit is Bolt.emit:
            bolt.emit = sends
        return execute

    def run(self, now: float) -> bool:
        """Process the queue, as long as the lease is valid."""
        queue = self.queue
        if not queue:
            if self.ticks:
                self._tick()
                return True
            return self.state is not None and self.state.on_idle()
        if self.ticks:
            self._tick()
            if self.crashed:
                return True
        held = self.held
        if held and not self.may_begin():
            return False
        batch = queue.copy()
        queue.clear()
        owns, execute, stats, name_values = (
            self.shared.owns,
            self._execute,
            self.stats,
            self._name_values,
        )
        clock = time.perf_counter_ns
        begin = clock()
        until = begin + PASS_NANOS if self.shared.sliced else 1 << 62
        total = len(batch)
        before = stats.executed_by.copy() if stats.until_sample <= total else {}
        size = SLICE
        if stats.execute_ns > SLOW_NANOS * stats.timed:
            size = max(1, PASS_NANOS * stats.timed // stats.execute_ns)
        routes = tuple(self.routes.values()) if self.shared.sliced else ()
        first = sent = emitted_on(routes)
        stop = first + self.quota
        if held:
            # The smallest turn: see `may_begin`.
            size, total = 1, min(total, SLICE)
            queue += batch[total:]
            del batch[total:]
        start = 0
        while start < total:
            # The rest waits for the next pass, after frames and timers.
            if not owns() or (
                start and (clock() > until or sent >= stop or (held and sent - first > start))
            ):
                queue[:0] = batch[start:]
                total = start
                break
            # No slice emits far more than what is left of the quota.
            calls = min(size, (stop - sent) // self._gain or 1) if routes else size
            part = batch[start : start + calls] if start or total > calls else batch
            if name_values is not None:
                name_values(part)
            taken = execute(part)
            count_inputs(self, part[:taken] if self.crashed else part)
            if self.crashed:
                # What it has not begun waits for the restarted task.
                queue[:0] = batch[start + taken :]
                return True
            calls = len(part)
            start += calls
            if routes:
                now_emitted = emitted_on(routes)
                gain = (now_emitted - sent) // calls + 1
                self._gain = gain if gain > self._gain else (gain + self._gain) // 2
                sent = now_emitted
        if held and sent - first > total:
            self.next_turn = time.monotonic() + TURN_SECS
        if not total:
            return False
        if stats.take_sample(total):
            stats.time_inputs(clock() - begin, stats.executed_since(before))
        if self.state is not None and not queue:
            self.state.on_idle()
        return True

    def idle_secs(self, now: float) -> float | None:
        return self.state.idle_secs() if self.state is not None else None

    def _tick(self) -> None:
        due, self.ticks = self.ticks, 0
        if due & PULSE_DUE and self.state is not None:
            try:
                self.state.pulse()
            except self.shared.catches as error:
                self.on_error(error, "windows and state")
        if due & TICK_DUE and not self.crashed:
            try:
                self.instance.process_tick(self.tick_tuple())
            except self.shared.catches as error:
                self.on_error(error, "process_tick")


class FusedBoltRunner(BoltRunner):
    """Runner of a bolt whose function runs in a query: statistics are those of the query, not of
    what it is sent.
    """

    def run(self, now: float) -> bool:
        """As :meth:`BoltRunner.run`."""
        stats, by = self.stats, self.stats.executed_by.copy()
        before = stats.executed, stats.acked
        worked = super().run(now)
        (stats.executed, stats.acked), stats.executed_by = before, by
        counts = getattr(self.instance, "counts", [])
        while counts:
            stats.count_fused(**counts.pop(0))
        return worked


class BaseCollector:
    """What the collectors of all components have in common: see ``Collector``, and ``Runner`` for
    what they pass on.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def joint(self, tups: Any) -> Tuple:
        """One anchor for all of these tuples, valid until one of them is acked or failed."""
        return Tuple(0, "", "", 0, (), anchor_tree(tups))

    def send_to_peer(self, task: int, values: Any) -> None:
        self._runner.call_in_loop(lambda: self._runner.send_to_peer(task, values))

    def error(self, error: BaseException, tup: Any = None) -> None:
        self._runner.report(error, "raise_exception")

    def metric(self, name: str, value: Any) -> None:
        pair = metric_value(name, value)
        self._runner.call_in_loop(lambda: self._runner.metric(*pair))

    def count_batch(self, rows: int, nanos: int) -> None:
        self._runner.call_in_loop(lambda: self._runner.stats.count_batch(rows, nanos))


class BoltCollector(BaseCollector):
    """Collector of a component on the loop."""

    give_up: Any = None

    def __init__(self, runner: Runner, emit: Any, ack: Any, fail: Any, event: Any = None) -> None:
        super().__init__(runner)
        self.emit: Any = emit
        self.ack: Any = ack
        self.fail: Any = fail
        self.event: Any = event

    def ack_all(self, tups: Any) -> None:
        for tup in tups:
            self.ack(tup)
