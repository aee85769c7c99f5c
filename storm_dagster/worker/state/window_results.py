"""Results of windows that were sent, until their trees are complete."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from storm_dagster.core.dataplane.acking import PendingMap
from storm_dagster.model.dagster_events import decode_event
from storm_dagster.worker.dataplane.sending import route_of, send_to_targets
from storm_dagster.worker.dataplane.tree import Tree, next_edge
from storm_dagster.worker.state.host import StateTask


class ResultTracker:
    """Roots of the results of a windowed task, like those of a spout.

    :meth:`take` belongs to the thread that runs the bolt, all other methods to the loop.
    """

    def __init__(self, runner: StateTask) -> None:
        self._runner = runner
        self.task_id = runner.task_id
        timeout = float(runner.conf.get("topology.message.timeout.secs") or 30)
        self.pending: PendingMap[Any] = PendingMap(timeout)
        """Root -> (number of the result, number of its tuples, tree)."""
        self.delayed = False
        """True while back pressure stops the task, or a spout before it (:class:`Pressure`)."""
        self.acked: deque[int] = deque()
        """Roots of complete trees."""
        self.failed: deque[int] = deque()
        self.lost = self.failed
        """The same list: a failed result is resent for any reason."""

    def send(self, number: int, emitted: Sequence[Any], size: int) -> None:
        """Send the tuples (``size``) and events of a result.

        Each is ``[stream, values, direct task]``; an event has no stream. A tuple that cannot be
        sent is reported, and the result is resent after the message timeout.
        """
        runner = self._runner
        shared = runner.shared
        component = runner.component
        root = next_edge() or 1
        tree = Tree(1, root, 0, self) if shared.acker_tasks else None
        self.pending.add(root, (number, size, tree), shared.clock())
        try:
            for stream, values, direct_task in emitted:
                if stream is None:
                    shared.events.add(runner, decode_event(values), tree)
                    continue
                route = route_of(runner.routes, stream, component)
                route.emitted += 1
                send_to_targets(
                    route, values, tree, shared.ledger, component, self.task_id, direct_task
                )
        except Exception as error:
            runner.report(error, "results of a window")
            return
        if tree is None:
            self.acked.append(root)
            return
        tree.count -= 1
        if not tree.count:
            shared.ledger.ack_tree(tree)

    def on_clock(self, now: float) -> None:
        """Fail the trees that have timed out."""
        if self._runner.awaits_target:
            self.pending.extend_deadlines(now)
        # A copy: the bolt's thread removes entries.
        self.failed += self.pending.overdue(now, list(self.pending.entries.items()))

    def take(self) -> list[tuple[int, int, bool, float]]:
        """Take the results that were acked or failed since the last call.

        Each is (number, size, True if its tree is complete, clock at which it was sent). A root
        with both verdicts counts once, by its ack.
        """
        results: list[tuple[int, int, bool, float]] = []
        for roots, acked in ((self.acked, True), (self.failed, False)):
            while roots:
                entry = self.pending.pop(roots.popleft())
                if entry is not None:
                    (number, size, _), sent_at = entry
                    results.append((number, size, acked, sent_at))
        return results
