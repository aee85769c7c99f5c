"""Reporting errors of tasks: all are logged, few are written to ZooKeeper."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["ErrorReporter"]

_log = logging.getLogger(__name__)


class ErrorReporter:
    """At most ``topology.max.error.report.per.interval`` errors of a task reach the cluster state in each
    ``topology.error.throttle.interval.secs``. Thread-safe."""

    def __init__(
        self,
        conf: Mapping[str, Any],
        record: Callable[[int, str, str, int], None],
        clock: Callable[[], float],
    ) -> None:
        self._interval = float(conf.get("topology.error.throttle.interval.secs") or 10)
        self._most = int(conf.get("topology.max.error.report.per.interval") or 5)
        self._record = record
        self._clock = clock
        self._lock = threading.Lock()
        self._windows: dict[int, tuple[float, int]] = {}
        """Task -> (start of the window, errors in it)."""

    def __call__(self, task: int, component: str, error: BaseException, where: str) -> None:
        """Log the error, and record it unless the task has had too many."""
        now = self._clock()
        with self._lock:
            start, number = self._windows.get(task, (now, 0))
            if now - start > self._interval:
                start, number = now, 0
            number += 1
            self._windows[task] = (start, number)
        if number > self._most:
            # Even the log of a bolt that fails for every tuple must stay readable.
            if number == self._most + 1:
                _log.error(
                    "task %d (%s): more than %d errors in %g s, further ones are only counted",
                    task,
                    component,
                    self._most,
                    self._interval,
                )
            return
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        _log.error("task %d (%s): %s: %s", task, component, where, text)
        self._record(task, component, f"{where}: {text}", int(time.time()))
