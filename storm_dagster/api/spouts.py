"""Spouts: sources of tuples."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from storm_dagster.api.component import Component
from storm_dagster.model.values import copy_value


class Spout(Component):
    """A source of tuples.

    The worker polls ``next_tuple``, on its one loop unless ``blocking`` is set; a call without an
    emit makes it pause.

    On the loop the worker binds ``emit`` at run time: an **instance attribute**, a closure over the
    task's routes, replaces the method unless the class overrides ``emit``. The reason is measured
    speed (``benchmarks/dataplane.py``): an emit then follows no chain of attributes and methods.
    The method here is the signature, and it runs in tasks with their own thread.
    """

    _kind = "spout"

    def next_tuple(self) -> None:
        """Emit any number of tuples."""

    def ack(self, tup_id: Any) -> None:
        """Handle the completion of the tuple emitted with ``tup_id``.

        It and all tuples anchored to it have been processed.
        """

    def fail(self, tup_id: Any) -> None:
        """Handle the failure or the message timeout of the tuple emitted with ``tup_id``."""

    def given_up(self, tup_id: Any) -> None:
        """Handle a tuple that failed ``topology.dead.letter.tries`` times.

        It is a dead letter now and is not repeated. By default this calls ``ack``.
        """
        self.ack(tup_id)

    def _lost(self, tup_id: Any) -> None:
        """As ``fail``, if the tuple is not the cause.

        A worker with parts of it ended, or this task.
        """
        self.fail(tup_id)

    def _on_clock(self) -> None:
        """Do periodic work; called about every 0.1 s, also while emits are forbidden."""

    def give_up(
        self,
        tup_id: Any,
        tup: Sequence[Any],
        stream: str | None = None,
        direct_task: int | None = None,
        reason: Any = None,
        position: Any = None,
    ) -> bool:
        """Keep a tuple that will not be re-emitted as a dead letter.

        No method of the spout is called. Returns ``False`` if the tuple could not be kept, which is
        reported. ``reason`` is an exception or text, by default the reason of the last failure.
        ``position`` is its place in the source.
        """
        return self._bound().give_up(tup_id, tup, stream, direct_task, reason, position)

    def activate(self) -> None:
        """Handle the activation of the topology."""

    def deactivate(self) -> None:
        """Handle the deactivation of the topology.

        ``next_tuple`` is not called until ``activate``.
        """

    def emit(
        self,
        tup: Sequence[Any],
        tup_id: Any = None,
        stream: str | None = None,
        direct_task: int | None = None,
        need_task_ids: bool = False,
    ) -> list[int] | None:
        """Emit values, and return the receiving task ids if ``need_task_ids``.

        With ``tup_id`` the tuple is tracked: ``ack`` or ``fail`` is called with it. ``direct_task``
        is the receiver on a direct stream. On the worker's loop an instance attribute replaces this
        method (see the class).
        """
        return self._bound().emit(tup, stream, None, direct_task, need_task_ids, tup_id)


class ReliableSpout(Spout):
    """A spout that re-emits a failed tuple, at most ``max_fails`` times."""

    max_fails = 3

    @property
    def failed_tuples(self) -> Counter[Any]:
        """Tuple id -> number of failures since it was last acked or given up."""
        return self.__dict__.setdefault("_failed", Counter())

    @property
    def unacked_tuples(self) -> dict[Any, tuple[Any, ...]]:
        """Tuple id -> its emit, until it is acked or given up."""
        return self.__dict__.setdefault("_unacked", {})

    def emit(
        self,
        tup: Sequence[Any],
        tup_id: Any = None,
        stream: str | None = None,
        direct_task: int | None = None,
        need_task_ids: bool = False,
    ) -> list[int] | None:
        """As :meth:`Spout.emit`; the tuple is kept until it is acked."""
        if tup_id is None:
            raise ValueError("a ReliableSpout needs a tup_id for every tuple: pass tup_id=...")
        self.unacked_tuples[tup_id] = (tup, stream, direct_task, need_task_ids)
        task_ids = super().emit(tup, tup_id, stream, direct_task, need_task_ids)
        # A copy, since the spout may reuse its lists.
        values = [copy_value(value) for value in tup]
        self.unacked_tuples[tup_id] = (values, stream, direct_task, need_task_ids)
        return task_ids

    def ack(self, tup_id: Any) -> None:
        """Drop the tuple."""
        self.failed_tuples.pop(tup_id, None)
        self.unacked_tuples.pop(tup_id, None)

    def _lost(self, tup_id: Any) -> None:
        """As :meth:`fail`, without counting a failure.

        A tuple must not become a dead letter because workers are replaced one after the other.
        """
        if tup_id in self.unacked_tuples:
            self.failed_tuples[tup_id] -= 1
        self.fail(tup_id)

    def fail(self, tup_id: Any) -> None:
        """Re-emit the tuple; after ``max_fails`` failures it becomes a dead letter."""
        saved = self.unacked_tuples.get(tup_id)
        if saved is None:
            self.logger.warning("tuple %r failed, but is unknown or finished", tup_id)
            return
        tup, stream, direct_task, need_task_ids = saved
        self.failed_tuples[tup_id] += 1
        if self.failed_tuples[tup_id] > self.max_fails:
            self.failed_tuples.pop(tup_id, None)
            self.unacked_tuples.pop(tup_id, None)
            self.give_up(tup_id, tup, stream, direct_task)
            return
        self.emit(
            tup, tup_id=tup_id, stream=stream, direct_task=direct_task, need_task_ids=need_task_ids
        )
