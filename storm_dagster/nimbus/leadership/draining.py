"""Duty of the leader for supervisors that drain: it moves their tasks."""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from storm_dagster.host.clock import boot_clock
from storm_dagster.host.futures import in_thread
from storm_dagster.model.errors import NotAlive, StormDagsterError
from storm_dagster.nimbus.leadership.duties import LeaderRounds
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.draining import (
    begun_moves,
    move_off_draining,
    topologies_to_move,
)
from storm_dagster.zk.draining import read_draining

_log = logging.getLogger(__name__)

_MAX_MOVES = 8
"""Topologies that are moved at the same time, each in its own thread."""
_RETRY_SECS = 2.0
"""Pause before the next attempt to move a topology that could not be moved."""
_POLL_SECS = 2.0
"""Interval of reading the records of the supervisors while none drains."""


class LeaderDrains(LeaderRounds):
    """Move of the tasks on hosts that drain.

    The record of a supervisor asks for it, so that the next leader continues where a lost one
    stopped, and a restarted supervisor has no entry to undo. It runs in a separate thread,
    and so does each move: a move waits for the tuples under way.
    """

    def __init__(self, nimbus: Nimbus) -> None:
        # Not forgotten with the epoch: its threads still run.
        self._moves: dict[str, Future[str]] = {}
        """Name of a topology -> its move; the result is the reason why no task moved, or empty."""
        super().__init__(nimbus)

    def _forget(self) -> None:
        self._retry_at: dict[str, float] = {}
        """Name of a topology -> boot clock before which it is not moved once more."""
        self._reasons: dict[str, str] = {}
        """Name of a topology -> the logged reason why it could not be moved."""
        self._next_poll = 0.0
        """Boot clock of the next read of the records."""
        self._has_continued = False
        """True once the moves that a former leader began were looked for."""

    def _duties(self) -> Iterable[Callable[[OperationsContext], None]]:
        return (self._drain,)

    def _drain(self, ctx: OperationsContext) -> None:
        """Start the moves that are due, and log the results of those that have ended."""
        self._collect()
        if boot_clock() < self._next_poll:
            return
        if not self._has_continued:
            # Its host may have been lost together with the one that drains.
            for name in begun_moves(ctx, self._nimbus.shown_view()):
                self._start(ctx, name, "a former leader began to move them off a host that drains")
            self._has_continued = True
        if not any(read_draining(self._nimbus.cached).values()):
            self._next_poll = boot_clock() + _POLL_SECS
            return
        topologies = topologies_to_move(self._nimbus.shown_view())
        self._reasons = {key: text for key, text in self._reasons.items() if key in topologies}
        for name, hosts in topologies.items():
            is_due = boot_clock() >= self._retry_at.get(name, 0.0)
            if is_due and len(self._moves) < _MAX_MOVES:
                self._start(ctx, name, f"{', '.join(hosts)} drain")

    def _start(self, ctx: OperationsContext, name: str, why: str) -> None:
        """Move the topology in a new thread, unless it is moved already."""
        if name in self._moves:
            return

        def move() -> str:
            try:
                result = move_off_draining(ctx, name)
            except NotAlive:
                return ""
            except StormDagsterError as error:
                return error.message
            if result.outcome != "assigned":
                return "another process ended the rebalance that moves them"
            text = f"{result.moved} tasks of {name} moved: {why}"
            _log.info("%s", text, extra={"topology": result.topology_id})
            for asset in ("assignment", "published_assignment"):
                self._nimbus.unreported.add(ctx, name, text, ("storm", asset))
            return ""

        self._moves[name] = in_thread("nimbus-drain", move)

    def _collect(self) -> None:
        """Drop moves that have ended; a failed one is logged once for each reason."""
        ended = {name: future for name, future in self._moves.items() if future.done()}
        for name, future in ended.items():
            del self._moves[name]
            self._retry_at[name] = boot_clock() + _RETRY_SECS
            error = future.exception()
            reason = future.result() if error is None else f"{type(error).__name__}: {error}"
            if reason and self._reasons.get(name) != reason:
                _log.warning(
                    "%s is not moved off its draining hosts, and is retried: %s", name, reason
                )
            self._reasons[name] = reason
