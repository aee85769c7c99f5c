"""Wait for conditions with a deadline, instead of a sleep."""

from collections.abc import Callable
from typing import Literal, TypeVar

from storm_dagster.host.waiting import poll

T = TypeVar("T")


def eventually(
    predicate: Callable[[], T | Literal[False] | None],
    timeout: float = 30.0,
    what: str = "the condition",
    *,
    interval: float = 0.05,
    ignore: tuple[type[BaseException], ...] = (),
) -> T:
    """Wait for a truthy value of ``predicate``, and return it.

    Raises ``AssertionError`` after ``timeout`` seconds. ``what`` names the condition in its text,
    which contains the last value or exception. Exceptions in ``ignore`` count as "not yet". The
    predicate is always called once more after the deadline, so that a slow machine fails no test
    whose condition holds.
    """
    last: object = None

    def attempt() -> T | Literal[False] | None:
        nonlocal last
        try:
            value = predicate()
        except ignore as error:
            last = error
            return None
        last = value
        return value

    value = poll(attempt, timeout=timeout, pause=interval)
    if not value:
        raise AssertionError(
            f"{what} did not come true within {timeout:g} s; last seen: {last!r:.500}"
        )
    return value
