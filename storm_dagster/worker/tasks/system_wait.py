"""Wait of a task for a system that its component named as unavailable."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

from storm_dagster.api.outages import OutageReports, SystemUnavailable
from storm_dagster.api.target_retries import MAX_PAUSE_MS, MIN_PAUSE_MS
from storm_dagster.host.waiting import Backoff
from storm_dagster.worker.dataplane.task_reports import ReportingTask, TaskReporter

Call = Literal["tuple", "tick", "window", "initialize"]
"""The call of the component that is repeated until the system answers."""


class WaitingTask(ReportingTask, Protocol):
    """The part of a task that its wait needs; ``Runner`` of ``worker/tasks/runner.py``."""

    context: Any


class SystemWait:
    """Pauses of one task while a system does not answer, and their reports.

    A call of the component that raises :class:`SystemUnavailable` is no failure: it is repeated
    after pauses from 0.5 to 10 s. The task takes no tuples while it waits. Used by the thread that
    runs the task; any thread may read it.
    """

    def __init__(self, task: WaitingTask) -> None:
        self._now_ms: Callable[[], int] = task.context.now_ms
        self._pauses_ms = Backoff(MIN_PAUSE_MS, MAX_PAUSE_MS)
        self._reports = OutageReports(TaskReporter(task), self._now_ms)
        self._until_ms = 0
        """Time of the next call; 0 while the task does not wait."""
        self._call: Call | None = None
        """The call that is repeated; ``None`` while the task does not wait."""

    @property
    def is_waiting(self) -> bool:
        """True from the first call that raised until one returns."""
        return self._until_ms > 0

    def is_pausing(self) -> bool:
        """True while no tuple must be passed to the component.

        A window is repeated by its own timer, and tuples may enter windows before.
        """
        is_paused = self._until_ms > 0 and self._call != "window"
        return is_paused and self._now_ms() < self._until_ms

    def pause_secs(self) -> float | None:
        """Seconds until the next call; ``None`` while the task does not wait."""
        if not self._until_ms:
            return None
        return max(0.0, (self._until_ms - self._now_ms()) / 1000)

    def is_of(self, call: Call) -> bool:
        """True if the task waits to repeat this call."""
        return self._call == call

    def begin(self, error: SystemUnavailable, call: Call = "tuple") -> None:
        """Begin a pause, and report the outage if it is new.

        Without a longer pause if another call in flight has begun one.
        """
        self._call = call
        now = self._now_ms()
        if now >= self._until_ms:
            pause_ms = self._pauses_ms.next_pause()
            if error.after is not None:
                pause_ms = error.after * 1000
            self._until_ms = now + max(1, round(pause_ms))
        self._reports.tell(error.system, error.system, error.reason, error.as_report)

    def end(self, call: Call = "tuple") -> None:
        """Note that the call returned: if it is that which was repeated, the system answers."""
        if self._call != call:
            return
        self._call = None
        self._until_ms = 0
        self._pauses_ms.reset()
        self._reports.end()
