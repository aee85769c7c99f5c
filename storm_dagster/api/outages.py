"""Reports of a component on a system that is away."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Protocol

from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import Unavailable

MIN_PAUSE_MS = 500
MAX_PAUSE_MS = 10_000
"""Range of the growing pauses while a system is away.

They are those between two retries of a sink or of Spark, and between two calls that raise
:class:`SystemUnavailable`.
"""
REPORT_MS = 60_000
"""Milliseconds between two reports of one kind."""
COMPONENT = "component"
"""Source of the texts of a component, as of its sink or its source."""
_MAX_TEXT = 300
"""Characters of the text on one system."""
_MAX_TEXTS = 4
"""Systems that the metric names; it counts further ones."""
_MAX_KINDS = 1000
"""Kinds of reports whose times are kept; then those are forgotten whose minute is over."""


class SystemUnavailable(Exception):
    """A system that the component needs does not answer: the call is to be repeated.

    Raise it instead of the error of a client that cannot reach its system, before anything is
    emitted for the call. It uses up no try of a tuple:

    * from ``process``, ``process_batch`` or ``process_tick`` of a bolt: the task keeps its tuples,
      takes no others, and repeats the call. Spouts are held back, and no message timeout runs.
    * from ``process_window``: the window is processed once more, and ``window_tries`` do not count.
    * from ``next_tuple`` of a spout, also from ``values`` and ``decode`` of a source's spout: it is
      called after the pause.
    * from ``initialize``: the task opens after the pause, and its tuples wait.

    The pauses grow from 0.5 to 10 s. Until a call returns, the metric ``what it waits for`` of the
    task names the system; the errors show begin and end of the outage, each once. From any other
    method it is an error like others. ``system`` is the name for readers, such as "the orders API"
    (without passwords), ``reason`` the newest cause. ``after``: seconds until the next call.
    """

    def __init__(self, system: str, reason: object = "", *, after: float | None = None) -> None:
        self.system: str = system
        # One line of the worker's log.
        self.reason: str = " ".join(str(reason).split()) or "it does not answer"
        self.after: float | None = after
        super().__init__(f"{system} does not answer: {self.reason}")

    def as_report(self, since: str) -> Exception:
        """The error that reports the begin of the outage, which is ``since`` as text."""
        return Unavailable(
            f"waits for {self.system} since {since}, which is tried again: {self.reason}"
        )


class Reporter(Protocol):
    """The component, or its task, which reports for it."""

    def _show_awaited(self, source: str, text: str) -> None:
        """Show the systems that the task waits for, by source; empty: it waits no longer."""
        ...

    def raise_exception(self, exception: BaseException) -> None:
        """Report an error of the task."""
        ...


@dataclass
class _Outage:
    """Outage of one system."""

    since_ms: int
    text: str = ""
    """Text of the metric on it."""
    reported_kinds: set[str] = field(default_factory=set)
    """Kinds of errors that are reported since its begin."""
    report_at: int = 0
    """Time from which on another kind may be reported."""


class OutageReports:
    """Reports of one component about the systems that it waits for.

    While a system is away, the metric ``what it waits for`` names it, with the time since when and
    the newest cause. The errors of the task show the begin and the end of an outage, each once. A
    system that goes and comes is reported at most once a minute. Used by the thread that runs the
    component.
    """

    def __init__(
        self, reporter: Reporter, now_ms: Callable[[], int], source: str = COMPONENT
    ) -> None:
        """``now_ms``: the clock of the reports, in milliseconds since 1970.

        ``source``: who waits. A task shows the texts of all of its sources.
        """
        self._reporter = reporter
        self._now_ms = now_ms
        self._source = source
        self._report_at: dict[str, int] = {}
        """Kind of report -> time from which on it may be reported once more."""
        self._outages: dict[str, _Outage] = {}
        """System that is away -> its outage."""
        self._since_ms = 0
        """Begin of the wait, in milliseconds since 1970; 0 without one."""

    def begin(self) -> None:
        """Note that a system does not answer, if that is new."""
        self._since_ms = self._since_ms or self._now_ms()

    def report_waiting(
        self, system: str, kind: str, cause: str, make_error: Callable[[str], Exception]
    ) -> None:
        """Show that the component waits for a system, and report each kind of error once.

        At most one kind is reported in a minute. ``make_error`` makes the error from the begin of
        the outage as text.
        """
        self.begin()
        outage = self._outages.get(system)
        if outage is None:
            # A wait that was not reported before is that for this system.
            outage = _Outage(self._now_ms() if self._outages else self._since_ms)
            self._outages[system] = outage
        since = _utc(outage.since_ms)
        text = mask_text(f"waits for {system} since {since}: {cause}")
        outage.text = f"{text:.{_MAX_TEXT}}"
        self._show()
        now = self._now_ms()
        if kind not in outage.reported_kinds and now >= outage.report_at and self.may_report(kind):
            outage.reported_kinds.add(kind)
            outage.report_at = now + REPORT_MS
            self._reporter.raise_exception(make_error(since))

    def end(self, system: str | None = None) -> None:
        """Note that a system answers, or without ``system`` that all do.

        It is reported if the begin of the outage was.
        """
        if not self._since_ms:
            return
        for name in list(self._outages):
            if system in (None, name):
                self._end(name)
        if not self._outages:
            self._since_ms = 0

    def _end(self, system: str) -> None:
        outage = self._outages.pop(system)
        self._show()
        if not outage.reported_kinds:
            return
        secs = (self._now_ms() - outage.since_ms) // 1000
        since = _utc(outage.since_ms)
        self._reporter.raise_exception(
            Unavailable(
                f"{system} answers again: it was away for {secs} s, since {since}; "
                "what waited for it continues"
            )
        )

    def drop(self) -> None:
        """Forget the outages without a report: the component has ended, and the next one asks."""
        self._since_ms = 0
        if self._outages:
            self._outages.clear()
            self._show()

    def may_report(self, kind: str) -> bool:
        """True once a minute for each kind of report: a true result counts as its report."""
        now = self._now_ms()
        if now < self._report_at.get(kind, 0):
            return False
        if len(self._report_at) >= _MAX_KINDS:
            self._report_at = {name: at for name, at in self._report_at.items() if at > now}
        self._report_at[kind] = now + REPORT_MS
        return True

    def _show(self) -> None:
        texts = [outage.text for outage in self._outages.values()]
        others = len(texts) - _MAX_TEXTS
        if others > 0:
            texts = [*texts[:_MAX_TEXTS], f"and for {others} other systems"]
        self._reporter._show_awaited(self._source, "; ".join(texts))


def _utc(time_ms: int) -> str:
    """A time in milliseconds since 1970 as text."""
    return f"{datetime.fromtimestamp(time_ms // 1000, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
