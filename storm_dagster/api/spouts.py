"""Spouts: sources of tuples."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from storm_dagster.api.component import Component
from storm_dagster.model.values import copy_value


class Spout(Component):
    """A source of tuples.

    The worker polls ``next_tuple``, on its one loop unless ``blocking`` is set. After a call that
    emits no tuple it pauses.

    On the loop the worker binds ``emit`` at run time: an **instance attribute**, a closure over the
    task's routes, replaces the method unless the class overrides ``emit``. The reason is measured
    speed: an emit then follows no chain of attributes and methods. The method here is the
    signature, and what runs in tasks with their own thread.
    """

    _kind = "spout"

    def next_tuple(self) -> None:
        """Emit any number of tuples."""

    def ack(self, tup_id: Any) -> None:
        """Called when the tuple emitted with ``tup_id`` has been processed.

        All tuples anchored to it have been processed, too.
        """

    def fail(self, tup_id: Any) -> None:
        """Called when the tuple emitted with ``tup_id`` failed.

        It also fails if it did not complete within the message timeout.
        """

    def given_up(self, tup_id: Any) -> None:
        """Called when the tuple emitted with ``tup_id`` has become a dead letter.

        It failed ``topology.dead.letter.tries`` times and is complete, as after ``ack``, which this
        method calls by default.
        """
        self.ack(tup_id)

    def _lost(self, tup_id: Any) -> None:
        """As ``fail``, for a reason outside of the tuple.

        A worker with parts of the tuple ended, or this task.
        """
        self.fail(tup_id)

    def _on_clock(self) -> None:
        """Called about every 0.1 s, also while the spout must not emit."""

    def give_up(
        self,
        tup_id: Any,
        tup: Sequence[Any],
        stream: str | None = None,
        direct_task: int | None = None,
        reason: Any = None,
        position: Any = None,
    ) -> bool:
        """Keep a tuple as a dead letter instead of a replay, without a callback.

        Returns ``False``, and reports an error, if it could not be kept. ``reason`` is an exception
        or text, by default the reason of its last failure. ``position`` is its place in the source.
        """
        return self._bound().give_up(tup_id, tup, stream, direct_task, reason, position)

    def activate(self) -> None:
        """Called when the topology becomes active."""

    def deactivate(self) -> None:
        """Called when the topology becomes inactive.

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
    """A spout that replays a failed tuple, at most ``max_fails`` times."""

    max_fails = 3

    @property
    def failed_tuples(self) -> Counter[Any]:
        """Tuple id -> number of its failures since it was last acked or given up."""
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
        # Before the emit: if a grouping raises, the worker fails the tuple, and `fail` replays it
        # from here.
        self.unacked_tuples[tup_id] = (tup, stream, direct_task, need_task_ids)
        task_ids = super().emit(tup, tup_id, stream, direct_task, need_task_ids)
        # A copy, because the spout may reuse its own lists. After the emit, whose error names the
        # field of a value that is not allowed. The worker calls neither `ack` nor `fail` during an
        # emit, so this does not restore a tuple that is complete.
        self.unacked_tuples[tup_id] = (
            [copy_value(value) for value in tup],
            stream,
            direct_task,
            need_task_ids,
        )
        return task_ids

    def ack(self, tup_id: Any) -> None:
        """Drop the tuple."""
        self.failed_tuples.pop(tup_id, None)
        self.unacked_tuples.pop(tup_id, None)

    def _lost(self, tup_id: Any) -> None:
        """As :meth:`fail`, but the failure does not count.

        So a tuple does not become a dead letter when many workers are replaced one after the other.
        """
        if tup_id in self.unacked_tuples:
            # ``fail`` adds it again.
            self.failed_tuples[tup_id] -= 1
        self.fail(tup_id)

    def fail(self, tup_id: Any) -> None:
        """Replay the tuple; after ``max_fails`` failures it becomes a dead letter.

        A tuple that is unknown or finished has no effect but a warning in the log.
        """
        saved_emit = self.unacked_tuples.get(tup_id)
        if saved_emit is None:
            self.logger.warning("tuple %r failed, but is unknown or finished", tup_id)
            return
        tup, stream, direct_task, need_task_ids = saved_emit
        self.failed_tuples[tup_id] += 1
        if self.failed_tuples[tup_id] > self.max_fails:
            self.failed_tuples.pop(tup_id, None)
            self.unacked_tuples.pop(tup_id, None)
            self.give_up(tup_id, tup, stream, direct_task)
            return
        self.emit(
            tup, tup_id=tup_id, stream=stream, direct_task=direct_task, need_task_ids=need_task_ids
        )
