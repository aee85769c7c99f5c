"""Errors of a source: outages with their begin and end, and others once a minute."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from storm_dagster.api.outages import OutageReports
from storm_dagster.connectors.sources import SourceRecovered

if TYPE_CHECKING:
    from storm_dagster.api.spouts import Spout

_ERROR_SECS = 60.0
"""Time in which the same error of the source is reported once."""
_AWAITED_CALLS = frozenset(("_refresh", "read", "_ack_finished", "_commit"))
"""Calls without which the spout cannot continue. They are repeated until they return."""
_RETURNED = "returned"
"""Stands for the call of an outage that ``read`` returns instead of raising it."""


class SourceErrors:
    """Reports of one spout on the errors of its source.

    A source that cannot be read, or cannot store finished positions, is away until the same call
    returns. Used by the thread that runs the spout.
    """

    def __init__(self, spout: "Spout", system: str) -> None:
        """``system``: name of the source's system for readers."""
        self._spout = spout
        self._system = system
        self._outages = OutageReports(spout, spout.context.now_ms)
        self._failing: set[str] = set()
        """Calls that raised when they were made last."""
        self._reported: dict[str, float] = {}
        """Kind of an error -> time when it was reported last."""

    def call(self, call: Callable[..., Any], *args: Any) -> Any:
        """The result of a call of the source; its error is reported, and the result is ``None``."""
        name = getattr(call, "__name__", "")
        try:
            result = call(*args)
        except Exception as error:
            if name in _AWAITED_CALLS:
                self._begin(name, error)
            else:
                self.report(error)
            return None
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

    def report(self, error: Exception) -> None:
        """Report an error, the same error at most once a minute."""
        now = time.monotonic()
        key = _kind(error)
        if now - self._reported.get(key, -_ERROR_SECS) < _ERROR_SECS:
            return
        recent = {kind: at for kind, at in self._reported.items() if now - at < _ERROR_SECS}
        self._reported = {**recent, key: now}
        self._spout.raise_exception(error)

    def _begin(self, call: str, error: Exception) -> None:
        """Show the wait for the system; each kind of error is reported once in an outage."""
        self._failing.add(call)
        cause = f"{type(error).__name__}: {error}"
        self._outages.tell(self._system, _kind(error), cause, lambda since: error)

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
