"""What a component says while it waits for a system that is away."""

from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.names import AWAITED_METRIC

if TYPE_CHECKING:
    from storm_dagster.api.component import Component

REPORT_MS = 60_000
"""Milliseconds between two reports of one kind."""
_MAX_METRIC = 300
"""Characters of the metric's text."""


class OutageReports:
    """Reports of one component about a system that it waits for.

    While the system is away, the metric ``what it waits for`` names it, with the time since when
    and the newest cause. The errors of the task show the begin and the end of an outage, each once.
    A system that goes and comes is reported at most once a minute. Used by the thread that runs the
    component.
    """

    def __init__(self, component: "Component") -> None:
        self._component = component
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
        self.since_ms = self.since_ms or self._component.context.now_ms()

    def tell(self, what: str, kind: str, cause: str, error: Callable[[str], Exception]) -> None:
        """Show that the component waits for ``what``, and report that once for each kind of error.

        ``error`` makes the error from the begin of the outage as text.
        """
        self.begin()
        self._what = what
        since = _utc(self.since_ms)
        text = mask_text(f"waits for {what} since {since}: {cause}")
        self._component.report_metric(AWAITED_METRIC, f"{text:.{_MAX_METRIC}}")
        if kind not in self._told and self.may_report(kind):
            self._told.add(kind)
            self._component.raise_exception(error(since))

    def end(self) -> None:
        """Note that the system answers.

        It is reported if the begin of the outage was.
        """
        if not self.since_ms:
            return
        what = self._what
        secs = (self._component.context.now_ms() - self.since_ms) // 1000
        since = _utc(self.since_ms)
        was_told = bool(self._told)
        self.since_ms = 0
        self._what = ""
        self._told.clear()
        if not what:
            return
        self._component.report_metric(AWAITED_METRIC, "")
        if was_told:
            self._component.raise_exception(
                Unavailable(
                    f"{what} answers again: it was away for {secs} s, since {since}; "
                    "what waited for it goes on"
                )
            )

    def may_report(self, kind: str) -> bool:
        """True once a minute for each kind of report: a true result counts as its report."""
        now = self._component.context.now_ms()
        if now < self._report_at.get(kind, 0):
            return False
        self._report_at[kind] = now + REPORT_MS
        return True


def _utc(time_ms: int) -> str:
    """A time in milliseconds since 1970 as text."""
    return f"{datetime.fromtimestamp(time_ms // 1000, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
