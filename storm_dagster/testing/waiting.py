"""Wait for conditions with a deadline, instead of a sleep."""

import math
import os
from collections.abc import Callable
from typing import Literal, TypeVar, overload

from storm_dagster.host.waiting import poll
from storm_dagster.model.errors import Misconfigured

T = TypeVar("T")

PATIENCE = "STORM_TEST_PATIENCE"
"""Environment variable with the factor of all limits of tests: a number of at least 1."""


def patience_factor() -> float:
    """Return the factor of ``STORM_TEST_PATIENCE``, or 1 if it is not set.

    Raises :class:`Misconfigured` if it is not a finite number of at least 1.
    """
    text = os.environ.get(PATIENCE)
    if not text:
        return 1.0
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    # False for NaN as well.
    if not 1 <= factor < math.inf:
        raise Misconfigured(
            f"{PATIENCE}={text!r:.80} is not a factor: set a number of at least 1, such as 3, "
            "or unset it"
        )
    return factor


@overload
def patience(limit: int) -> int: ...
@overload
def patience(limit: float) -> float: ...
def patience(limit: float) -> float:
    """Multiply a limit by ``STORM_TEST_PATIENCE``.

    For limits that end a wait or a process, in any unit: a slow machine must not exceed them. An
    int stays one, rounded up, since conf keys are of that type.
    """
    scaled = limit * patience_factor()
    return math.ceil(scaled) if isinstance(limit, int) else scaled


def eventually(
    predicate: Callable[[], T | Literal[False] | None],
    timeout: float = 30.0,
    what: str = "the condition",
    *,
    interval: float = 0.05,
    ignore: tuple[type[BaseException], ...] = (),
) -> T:
    """Wait for a truthy value of ``predicate``, and return it.

    Raises ``AssertionError`` after ``timeout`` seconds, multiplied by ``STORM_TEST_PATIENCE``
    (:func:`patience`). ``what`` names the condition in its text, which contains the last value or
    exception. Exceptions in ``ignore`` count as "not yet". The predicate is always called once more
    after the deadline, so that a slow machine fails no test whose condition holds.
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

    limit = patience(timeout)
    value = poll(attempt, timeout=limit, pause=interval)
    if not value:
        raise AssertionError(
            f"{what} did not come true within {limit:g} s; last seen: {last!r:.500}"
        )
    return value
