"""Waiting on conditions with a deadline, instead of sleeping for a guessed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["eventually"]

T = TypeVar("T")


def eventually(
    predicate: Callable[[], T],
    timeout: float = 30.0,
    what: str = "the condition",
    *,
    interval: float = 0.05,
    ignore: tuple[type[BaseException], ...] = (),
) -> T:
    """The first truthy value of ``predicate``; ``AssertionError`` naming ``what`` after ``timeout`` seconds.

    Exceptions in ``ignore`` count as "not yet". The last value or exception stands in the message. The
    predicate is always tried once more after the deadline, so that a stalled machine fails no test whose
    condition holds.
    """
    deadline = time.monotonic() + timeout
    last: object = None
    while True:
        late = time.monotonic() >= deadline
        try:
            value = predicate()
        except ignore as error:
            last = error
        else:
            if value:
                return value
            last = value
        if late:
            raise AssertionError(f"{what} did not come true within {timeout:g} s; last seen: {last!r:.500}")
        time.sleep(interval)
