"""Reports of a task on the system that it waits for."""

from typing import Any, Protocol


class ReportingTask(Protocol):
    """The part of a task that reports; ``Runner`` of ``worker/tasks/runner.py``."""

    def report(self, error: BaseException, activity: str) -> None:
        """Log and record an error.

        ``activity`` names the step of the task that failed.
        """
        ...

    def publish(self, name: str, value: Any) -> None:
        """Keep the newest value of a metric; any thread that runs the task."""
        ...


class TaskReporter:
    """A task as the reporter of ``OutageReports``, also while it has no component."""

    def __init__(self, task: ReportingTask) -> None:
        self._task = task

    def report_metric(self, name: str, value: Any) -> None:
        """Keep the newest value of a metric."""
        self._task.publish(name, value)

    def raise_exception(self, exception: BaseException) -> None:
        """Report an error of the task."""
        self._task.report(exception, "an outage")
