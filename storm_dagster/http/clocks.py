"""Comparison of this machine's clock with the one of an HTTP service."""

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from storm_dagster.host.clock import clock_ahead_of


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
    return round(clock_ahead_of(served_at, asked_at, time.time(), unit_secs=1.0), 1)
