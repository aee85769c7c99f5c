"""Waiting for a condition, and pauses between retries that grow to a bound."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Backoff:
    """Pauses between retries: each is ``factor`` times the pause before it.

    The first pause is ``first``, and none is longer than ``longest``, both in the unit of the
    caller. The object reads no clock and never sleeps, so that a loop with other work can use it as
    well. It belongs to one thread.
    """

    def __init__(self, first: float, longest: float, *, factor: float = 2.0) -> None:
        """Set the range of the pauses.

        Raises :class:`ValueError` if they do not grow from ``first`` to ``longest``.
        """
        if not 0 < first <= longest:
            raise ValueError(
                f"pauses from {first:g} to {longest:g}: the first must be above 0, and not above "
                "the longest"
            )
        if factor < 1:
            raise ValueError(f"pauses that grow by {factor:g}: the factor must be 1 or more")
        self._first = first
        self._longest = longest
        self._factor = factor
        self._upcoming = first
        """Next pause."""

    def next_pause(self) -> float:
        """The pause before the next retry; the one after it is longer."""
        pause = self._upcoming
        self._upcoming = min(pause * self._factor, self._longest)
        return pause

    def reset(self) -> None:
        """Restart with the first pause, as after a success."""
        self._upcoming = self._first


def poll(
    condition: Callable[[], T],
    *,
    timeout: float,
    pause: float | Backoff = 0.1,
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], None] | None = None,
) -> T:
    """Call ``condition`` until it returns a truthy value or the time is over.

    The time is ``timeout`` seconds. Returns the last value, which is falsy only if the time is
    over. The condition is called at least once, and once more when the time is over, so that a
    process that got no processor does not give up too early. Between two calls it sleeps ``pause``
    seconds, or those of a :class:`Backoff`, and never beyond the deadline. An exception of
    ``condition`` ends the wait.

    ``clock`` (seconds that only grow) and ``sleep`` are ``time.monotonic`` and ``time.sleep`` if
    they are not given.
    """
    # Looked up at each call, not once as defaults: a simulation replaces the module `time` here.
    now = clock or time.monotonic
    wait = sleep or time.sleep
    deadline = now() + timeout
    while True:
        remaining = deadline - now()
        value = condition()
        if value or remaining <= 0:
            return value
        next_pause = pause.next_pause() if isinstance(pause, Backoff) else pause
        # The condition may have taken longer than what remained.
        wait(max(0.0, min(next_pause, deadline - now())))
