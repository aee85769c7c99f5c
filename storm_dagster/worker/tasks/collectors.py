"""Collectors: the worker's side of a running component."""

from concurrent.futures import Future
from typing import Any

from storm_dagster.api.tuples import Tuple, TupleId
from storm_dagster.host.futures import fulfill
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.worker.dataplane.tree import anchor_tree
from storm_dagster.worker.tasks.plain_values import metric_value, short_repr
from storm_dagster.worker.tasks.runner import Runner


def check_received(tup: Any, component: str) -> None:
    """Check that ``tup`` is a received tuple; ``InvalidRequest`` otherwise."""
    if not isinstance(tup, Tuple | TupleId):
        raise InvalidRequest(
            f"component {component!r} acks, fails or anchors to {type(tup).__name__} "
            f"{short_repr(tup)}: pass a tuple that it received"
        )


class BaseCollector:
    """Common part of the collectors of all components.

    See ``Collector``, and ``Runner`` for the methods that it calls.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def joint(self, tups: Any) -> Tuple:
        """Return one anchor for all of these tuples.

        It is valid until one of them is acked or failed.
        """
        return Tuple(0, "", "", 0, (), anchor_tree(tups))

    def send_to_peer(self, task: int, values: Any) -> None:
        self._runner.call_in_loop(lambda: self._runner.send_to_peer(task, values))

    def error(self, error: BaseException, tup: Any = None) -> None:
        self._runner.report(error, "raise_exception")

    def metric(self, name: str, value: Any) -> None:
        pair = metric_value(name, value)
        self._runner.call_in_loop(lambda: self._runner.metric(*pair))

    def awaits(self, source: str, text: str) -> None:
        self._runner.call_in_loop(lambda: self._runner.awaited.show(source, text))

    def count_batch(self, rows: int, nanos: int) -> None:
        self._runner.call_in_loop(lambda: self._runner.stats.count_batch(rows, nanos))

    def offer_event(self, event: DagsterEvent) -> Future[bool]:
        """Send an event without a tuple, if the worker has room for it.

        The result is false if it has none. It is never set if the task closes before.
        """
        is_taken: Future[bool] = Future()
        runner = self._runner
        events = runner.shared.events
        runner.call_in_loop(lambda: fulfill(is_taken, lambda: events.offer(runner, event)))
        return is_taken


class BoltCollector(BaseCollector):
    """Collector of a component on the loop."""

    give_up: Any = None
    """``Spout.give_up``; ``None`` for a bolt."""

    def __init__(self, runner: Runner, emit: Any, ack: Any, fail: Any, event: Any = None) -> None:
        super().__init__(runner)
        self.emit: Any = emit
        self.ack: Any = ack
        self.fail: Any = fail
        self.event: Any = event

    def ack_all(self, tups: Any) -> None:
        for tup in tups:
            self.ack(tup)
