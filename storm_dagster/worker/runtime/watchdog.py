"""Noticing a component that holds up the worker's loop."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.worker.tasks.runner import Runner, Shared

__all__ = ["BlockedLoop", "Watchdog"]


class BlockedLoop(StormDagsterError):
    """A component has not returned for long, and nothing else in its worker runs meanwhile."""


class Watchdog:
    """Asked again and again by a thread other than the loop's; reports each blockage once."""

    def __init__(self, shared: Shared, passes: Callable[[], int], secs: float) -> None:
        self._shared = shared
        self._passes = passes
        self._secs = secs
        self._seen: tuple[int, Runner | None] = (-1, None)
        self._since = 0.0
        self._told = False
        self._loop = threading.get_ident()

    def look(self) -> None:
        """Report the task that the loop is in, when it has been there for too long."""
        now = time.monotonic()
        seen = (self._passes(), self._shared.at)
        if seen != self._seen:
            self._seen, self._since, self._told = seen, now, False
            return
        runner = seen[1]
        if self._told or runner is None or now - self._since < self._secs:
            return
        self._told = True
        frame = sys._current_frames().get(self._loop)
        where = "".join(traceback.format_stack(frame, limit=6)) if frame is not None else ""
        error = BlockedLoop(
            f"component {runner.component!r} has not returned for {now - self._since:.0f} s, and all other tasks of "
            f"its worker wait for it: set blocking = True on its class (it then has a thread of its own), or make "
            f"process async. It is at:\n{where}"
        )
        self._shared.report(runner.task_id, runner.component, error, "blocked")
