"""Comparison of this machine's clock with the one of an HTTP service."""

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime


def clock_ahead_secs(headers: Mapping[str, str], asked_at: float) -> float | None:
    """Seconds by which this machine's clock is ahead of the one that wrote the header ``Date``.

    Negative: behind it. ``asked_at`` is the time of the request in epoch seconds; the response has
    just come. 0 if the clocks may agree: the header has whole seconds, and the request took some
    time. ``None`` without a valid header.
    """
    try:
        served_at = parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None
    if asked_at > served_at + 1.0:
        return round(asked_at - served_at - 1.0, 1)
    answered_at = time.time()
    if answered_at < served_at:
        return round(answered_at - served_at, 1)
    return 0.0
