"""Wait of a task for systems that its component named as unavailable."""

from collections.abc import Callable, Hashable
from typing import Any, Literal, Protocol

from storm_dagster.api.outages import (
    MAX_PAUSE_MS,
    MIN_PAUSE_MS,
    OutageReports,
    SystemUnavailable,
)
from storm_dagster.host.waiting import Backoff
from storm_dagster.model.names import AWAITED_METRIC
from storm_dagster.worker.dataplane.task_reports import ReportingTask, TaskReporter

Call = Literal["tuple", "tick", "window", "initialize"]
"""The call of the component that is repeated until the system answers."""
_WAIT = "task"
"""Source of the texts on systems that a call of the component named."""


class AwaitedTexts:
    """Texts on the systems that one task waits for, which its metric shows together.

    A task may wait for several: its sink writes to one, a call of its component named another one,
    and its events wait for the cluster. Each source of texts replaces and removes its own. Used by
    the loop.
    """

    def __init__(self, metric: Callable[[str, Any], None]) -> None:
        """``metric`` publishes the newest value of a metric."""
        self._metric = metric
        self._texts: dict[str, str] = {}
        """Source -> its text."""

    def show(self, source: str, text: str) -> None:
        """Replace the text of a source; an empty one removes it."""
        if text:
            self._texts[source] = text
        elif self._texts.pop(source, None) is None:
            # A task that never waited has no metric.
            return
        self._metric(AWAITED_METRIC, "; ".join(self._texts.values()))


class WaitingTask(ReportingTask, Protocol):
    """The part of a task that its wait needs; ``Runner`` of ``worker/tasks/runner.py``."""

    context: Any


class SystemWait:
    """Pauses of one task while a system does not answer, and their reports.

    A call of the component that raises :class:`SystemUnavailable` is not a failure: it is repeated
    after pauses from 0.5 to 10 s. The task takes no tuples while it waits, which is until each
    call that raised has returned. Used by the thread that runs the task; any thread may read it.
    """

    def __init__(self, task: WaitingTask) -> None:
        self._now_ms: Callable[[], int] = task.context.now_ms
        self._pauses_ms = Backoff(MIN_PAUSE_MS, MAX_PAUSE_MS)
        self._reports = OutageReports(TaskReporter(task), self._now_ms, _WAIT)
        self._until_ms = 0
        """Time of the next call; 0 while the task does not wait."""
        self._waits: dict[tuple[Call, Hashable], set[str]] = {}
        """Call that is repeated, and its key -> systems that it has named."""
        self._holds_tuples = False
        """True if a call is repeated that is not that of a window.

        A window is repeated by its own timer, and tuples may enter windows before.
        """

    @property
    def is_waiting(self) -> bool:
        """True from the first call that raised until all have returned."""
        return self._until_ms > 0

    def is_pausing(self) -> bool:
        """True while no tuple must be passed to the component."""
        # Called in each pass, measured by benchmarks/dataplane.py.
        return self._until_ms > 0 and self._holds_tuples and self._now_ms() < self._until_ms

    def pause_secs(self) -> float | None:
        """Seconds until the next call; ``None`` while the task does not wait."""
        if not self._until_ms:
            return None
        return max(0.0, (self._until_ms - self._now_ms()) / 1000)

    def is_of(self, call: Call) -> bool:
        """True if the task waits to repeat this call."""
        return (call, None) in self._waits

    def begin(self, error: SystemUnavailable, call: Call = "tuple", key: Hashable = None) -> None:
        """Begin a pause, and report the outage if it is new.

        ``key`` identifies the call if several are in flight; without a longer pause if another one
        of them has begun one.
        """
        self._waits.setdefault((call, key), set()).add(error.system)
        self._holds_tuples = self._holds_tuples or call != "window"
        now = self._now_ms()
        if now >= self._until_ms:
            pause_ms = self._pauses_ms.next_pause()
            if error.after is not None:
                pause_ms = error.after * 1000
            self._until_ms = now + max(1, round(pause_ms))
        self._reports.report_waiting(error.system, error.system, error.reason, error.as_report)

    def end(self, call: Call = "tuple", key: Hashable = None) -> None:
        """Note that the call returned: the systems answer for which no other call waits."""
        if not self._waits:
            # Called for each tuple of an async bolt.
            return
        systems = self._waits.pop((call, key), None)
        if systems is None:
            return
        self._holds_tuples = any(other != "window" for other, _ in self._waits)
        if not self._waits:
            self._until_ms = 0
            self._pauses_ms.reset()
        for system in systems.difference(*self._waits.values()):
            self._reports.end(system)

    def drop(self) -> None:
        """Forget all calls: the component that made them has ended."""
        self._waits.clear()
        self._holds_tuples = False
        self._until_ms = 0
        self._pauses_ms.reset()
        self._reports.drop()
