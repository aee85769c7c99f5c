"""Delivery of what windows emit: tuples whose trees their own task tracks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from storm_dagster.core.acking import PendingMap
from storm_dagster.model.dagster_events import decode_event
from storm_dagster.worker.dataplane.sending import route_of, send_to_targets
from storm_dagster.worker.dataplane.tree import Tree

if TYPE_CHECKING:
    from storm_dagster.worker.tasks.runner import Runner


class ResultTracker:
    """Roots of the results of a windowed task, as a spout has them. :meth:`take` belongs to the thread that runs the
    bolt, all else to the loop."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.task_id = runner.task_id
        self.pending: PendingMap[int] = PendingMap(float(runner.conf.get("topology.message.timeout.secs") or 30))
        """Root -> number of the result."""
        self.acked: deque[int] = deque()
        """Roots of complete trees."""
        self.failed: deque[int] = deque()
        self.lost = self.failed
        """A result is sent again, whatever became of it."""

    def send(self, number: int, emitted: Iterable[Any]) -> None:
        """Send the tuples and events of a result: ``[stream, values, direct task]``, an event has no stream.

        A tuple that cannot be sent is reported, and the result is sent again after the message timeout."""
        runner = self._runner
        shared, component = runner.shared, runner.component
        root = int.from_bytes(os.urandom(8), "little") or 1
        tree = Tree(1, root, 0, self) if shared.acker_tasks else None
        self.pending.add(root, number, shared.clock())
        try:
            for stream, values, direct_task in emitted:
                if stream is None:
                    shared.events.add(runner, decode_event(values), tree)
                    continue
                route = route_of(runner.routes, stream, component)
                route.emitted += 1
                send_to_targets(route, values, tree, shared.ledger, component, self.task_id, direct_task)
        except Exception as error:
            runner.report(error, "results of a window")
            return
        if tree is None:
            self.acked.append(root)
            return
        tree.count -= 1
        if not tree.count:
            shared.ledger.done(tree)

    def on_clock(self, now: float) -> None:
        """Fail the trees that have timed out."""
        late = now - self.pending.timeout
        # A copy: the bolt's thread removes entries.
        for root, (_, added) in list(self.pending.entries.items()):
            if added > late:
                break
            self.failed.append(root)

    def take(self) -> list[tuple[int, bool]]:
        """(number, whether its tree is complete) of the results that were acked or failed since the last call."""
        found: list[tuple[int, bool]] = []
        for roots, acked in ((self.acked, True), (self.failed, False)):
            while roots:
                entry = self.pending.pop(roots.popleft())
                if entry is not None:
                    found.append((entry[0], acked))
        return found
