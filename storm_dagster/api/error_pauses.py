"""Pauses of a component's callbacks that raise at each call."""

from storm_dagster.host.waiting import Backoff

MIN_PAUSE_SECS = 1.0
"""First pause; each later one is twice as long."""
MAX_PAUSE_SECS = 60.0
"""Longest pause."""


class ErrorPauses:
    """Pauses between errors in a row of one callback.

    A callback that the worker calls of its own accord, such as ``next_tuple``, would raise as often
    as the loop turns. While every call raises, the pauses before the next one grow from 1 s to
    60 s. The first call with a result ends that. The object reads no clock, and belongs to one
    thread.
    """

    def __init__(self, tolerated: int = 1) -> None:
        """``tolerated``: number of errors in a row that cause no pause."""
        self._tolerated = tolerated
        self._pauses = Backoff(MIN_PAUSE_SECS, MAX_PAUSE_SECS)
        self.errors: int = 0
        """Errors in a row. Callers with many calls read it before :meth:`on_success`."""
        self.until: float = 0.0
        """Clock before which the callback is not called."""
        self._quiet_at = 0.0
        """Clock from which on a call without a result ends the row of errors."""

    def on_error(self, now: float) -> None:
        """Count an error at the clock ``now``, and set :attr:`until`."""
        self.errors += 1
        pause = MIN_PAUSE_SECS
        if self.errors > self._tolerated:
            pause = self._pauses.next_pause()
            self.until = now + pause
        self._quiet_at = max(now, self.until) + pause

    def on_empty(self, now: float) -> None:
        """Note a call that returned at the clock ``now`` without a result.

        It ends the row of errors if the callback was quiet for as long as the last pause: one that
        raises at every second call, and has no result in between, must not be called at once.
        """
        if self.errors and now >= self._quiet_at:
            self.on_success()

    def on_success(self) -> None:
        """End the row of errors."""
        if self.errors:
            self.errors = 0
            self._pauses.reset()
            self.until = 0.0
            self._quiet_at = 0.0
