"""What a component says while it waits for a system that is away."""

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, Protocol

from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.names import AWAITED_METRIC

REPORT_MS = 60_000
"""Milliseconds between two reports of one kind."""
_MAX_METRIC = 300
"""Characters of the metric's text."""


class SystemUnavailable(Exception):
    """A system that the component needs does not answer: the call is to be repeated.

    Raise it instead of the error of a client that cannot reach its system, before anything is
    emitted for the call. It uses up no try of a tuple:

    * from ``process``, ``process_batch`` or ``process_tick`` of a bolt: the task keeps its tuples,
      takes no others, and repeats the call. Spouts are held back, and no message timeout runs.
    * from ``process_window``: the window is processed once more, and ``window_tries`` do not count.
    * from ``next_tuple`` of a spout: it is called after the pause.
    * from ``initialize``: the task opens after the pause, and its tuples wait.

    The pauses grow from 0.5 to 10 s. Until a call returns, the metric ``what it waits for`` of the
    task names the system; the errors show begin and end of the outage, each once. From any other
    method it is an error like others. ``system`` is the name for readers, such as "the orders API"
    (without passwords), ``reason`` the newest cause. ``after``: seconds until the next call.
    """

    def __init__(self, system: str, reason: object = "", *, after: float | None = None) -> None:
        self.system: str = system
        self.reason: str = str(reason) or "it does not answer"
        self.after: float | None = after
        super().__init__(f"{system} does not answer: {self.reason}")

    def as_report(self, since: str) -> Exception:
        """The error that reports the begin of the outage, which is ``since`` as text."""
        return Unavailable(
            f"waits for {self.system} since {since}, which is tried again: {self.reason}"
        )


class Reporter(Protocol):
    """The component, or its task, which reports for it."""

    def report_metric(self, name: str, value: Any) -> None:
        """Keep the newest value of a metric."""
        ...

    def raise_exception(self, exception: BaseException) -> None:
        """Report an error of the task."""
        ...


class OutageReports:
    """Reports of one component about a system that it waits for.

    While the system is away, the metric ``what it waits for`` names it, with the time since when
    and the newest cause. The errors of the task show the begin and the end of an outage, each once.
    A system that goes and comes is reported at most once a minute. Used by the thread that runs the
    component.
    """

    def __init__(self, reporter: Reporter, now_ms: Callable[[], int]) -> None:
        """``now_ms``: the clock of the reports, in milliseconds since 1970."""
        self._reporter = reporter
        self._now_ms = now_ms
        self._report_at: dict[str, int] = {}
        """Kind of report -> time from which on it may be reported once more."""
        self._told: set[str] = set()
        """Kinds that are reported since the begin of this outage."""
        self._what = ""
        """The system that is away; empty without an outage."""
        self.since_ms: int = 0
        """Begin of the outage, in milliseconds since 1970; 0 while the system answers."""

    def begin(self) -> None:
        """Note that the system does not answer, if that is new."""
        self.since_ms = self.since_ms or self._now_ms()

    def tell(self, what: str, kind: str, cause: str, error: Callable[[str], Exception]) -> None:
        """Show that the component waits for ``what``, and report that once for each kind of error.

        ``error`` makes the error from the begin of the outage as text.
        """
        self.begin()
        self._what = what
        since = _utc(self.since_ms)
        text = mask_text(f"waits for {what} since {since}: {cause}")
        self._reporter.report_metric(AWAITED_METRIC, f"{text:.{_MAX_METRIC}}")
        if kind not in self._told and self.may_report(kind):
            self._told.add(kind)
            self._reporter.raise_exception(error(since))

    def end(self) -> None:
        """Note that the system answers.

        It is reported if the begin of the outage was.
        """
        if not self.since_ms:
            return
        what = self._what
        secs = (self._now_ms() - self.since_ms) // 1000
        since = _utc(self.since_ms)
        was_told = bool(self._told)
        self.since_ms = 0
        self._what = ""
        self._told.clear()
        if not what:
            return
        self._reporter.report_metric(AWAITED_METRIC, "")
        if was_told:
            self._reporter.raise_exception(
                Unavailable(
                    f"{what} answers again: it was away for {secs} s, since {since}; "
                    "what waited for it goes on"
                )
            )

    def may_report(self, kind: str) -> bool:
        """True once a minute for each kind of report: a true result counts as its report."""
        now = self._now_ms()
        if now < self._report_at.get(kind, 0):
            return False
        self._report_at[kind] = now + REPORT_MS
        return True


def _utc(time_ms: int) -> str:
    """A time in milliseconds since 1970 as text."""
    return f"{datetime.fromtimestamp(time_ms // 1000, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
