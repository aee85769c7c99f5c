"""Reports of a task on the systems that it waits for."""

from typing import Protocol


class ReportingTask(Protocol):
    """The part of a task that reports; ``Runner`` of ``worker/tasks/runner.py``."""

    def report(self, error: BaseException, activity: str) -> None:
        """Log and record an error.

        ``activity`` names the step of the task that failed.
        """
        ...

    def show_awaited(self, source: str, text: str) -> None:
        """Show the systems that the task waits for, by source; any thread that runs the task."""
        ...


class TaskReporter:
    """A task as the reporter of ``OutageReports``, also while it has no component."""

    def __init__(self, task: ReportingTask) -> None:
        self._task = task

    def _show_awaited(self, source: str, text: str) -> None:
        self._task.show_awaited(source, text)

    def raise_exception(self, exception: BaseException) -> None:
        """Report an error of the task."""
        self._task.report(exception, "an outage")
