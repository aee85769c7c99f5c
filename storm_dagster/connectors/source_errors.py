"""Errors of a source: outages of its system, and mistakes in its code."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from storm_dagster.api.error_origins import is_of_system, one_line, without_traceback
from storm_dagster.api.error_pauses import ErrorPauses
from storm_dagster.api.outages import OutageReports
from storm_dagster.connectors.sources import SourceRecovered
from storm_dagster.model.errors import StormDagsterError, Unavailable

if TYPE_CHECKING:
    from storm_dagster.api.spouts import Spout

_ERROR_SECS = 60.0
"""Time in which the same error of the source is reported once."""
_AWAITED_CALLS = frozenset(("refresh", "read", "ack", "commit"))
"""Calls without which the spout cannot continue. They are repeated until they return."""
_ONE_BY_ONE = frozenset(("release",))
"""Calls that are not repeated, but made for one partition after the other."""
_RETURNED = "returned"
"""Stands for the call of an outage that ``read`` returns instead of raising it."""


class SourceErrors:
    """Reports of one spout on the errors of its source.

    A source that cannot be read, or cannot store finished positions, is away until the same call
    returns. An error of the source's own code is no outage: it is reported as it is, and the pauses
    before the next call grow from 1 s to 60 s. Used by the thread that runs the spout.
    """

    def __init__(self, spout: "Spout", system: str) -> None:
        """``system``: name of the source's system for readers."""
        self._spout = spout
        self._system = system
        self._outages = OutageReports(spout, spout.context.now_ms)
        self._failing: set[str] = set()
        """Calls that raised an error of the system when they were made last."""
        self._pauses: dict[str, ErrorPauses] = {}
        """Call whose code is at fault -> its pauses."""
        self._reported: dict[str, float] = {}
        """Kind of an error -> time when it was reported last."""

    def call(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """The result of a call of the source; its error is reported, and the result is ``None``.

        ``name`` identifies the call. It is not made during a pause after an error of its code.
        """
        pauses = self._pauses.get(name)
        if pauses is not None and self._now() < pauses.until:
            return None
        try:
            result = call(*args)
        except Exception as error:
            self._on_error(name, error)
            return None
        if pauses is not None:
            del self._pauses[name]
        if self._failing:
            self._end(name)
        return result

    def on_returned(self, error: Exception, *, is_outage: bool) -> None:
        """Handle an exception that the source returned among records.

        ``is_outage``: until it returns :class:`SourceRecovered`, its system is away.
        """
        if isinstance(error, SourceRecovered):
            self._end(_RETURNED)
        elif is_outage:
            self._begin(_RETURNED, error)
        else:
            self.report(error)

    def end_pauses(self) -> None:
        """Let each call be made once more at once, since the task closes."""
        self._pauses.clear()

    def report(self, error: Exception) -> None:
        """Report an error, the same error at most once a minute."""
        now = self._now()
        key = _kind(error)
        if now - self._reported.get(key, -_ERROR_SECS) < _ERROR_SECS:
            return
        recent = {kind: at for kind, at in self._reported.items() if now - at < _ERROR_SECS}
        self._reported = {**recent, key: now}
        self._spout.raise_exception(error)

    def _now(self) -> float:
        """The clock of the task, seconds."""
        return self._spout.context.now_ms() / 1000

    def _on_error(self, name: str, error: Exception) -> None:
        """Begin an outage, or report an error of the source's code."""
        if is_of_system(error):
            self._pauses.pop(name, None)
            if name in _AWAITED_CALLS:
                self._begin(name, error)
            else:
                self.report(error)
            return
        # The code ran: an outage of its system is over.
        self._end(name)
        self.report(error)
        if name not in _ONE_BY_ONE:
            self._pauses.setdefault(name, ErrorPauses()).on_error(self._now())

    def _begin(self, call: str, error: Exception) -> None:
        """Show the wait for the system; each kind of error is reported once in an outage."""
        self._failing.add(call)
        cause = one_line(error)

        def as_report(since: str) -> Exception:
            if isinstance(error, StormDagsterError):
                return without_traceback(error)
            return Unavailable(f"waits for {self._system} since {since}, which is retried: {cause}")

        self._outages.report_waiting(self._system, _kind(error), cause, as_report)

    def _end(self, call: str) -> None:
        """Note that the call returned; with the last one that failed the outage ends."""
        if call in self._failing:
            self._failing.discard(call)
            if not self._failing:
                self._outages.end()


def _kind(error: Exception) -> str:
    """Kind of an error: its type, and its text before the first colon.

    Later numbers change from one report to the next.
    """
    return f"{type(error).__name__}:{str(error).partition(':')[0]}"
