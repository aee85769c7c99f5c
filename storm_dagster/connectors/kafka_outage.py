"""Outages of Kafka's brokers: their begin and end as errors, and few log lines in between."""

import logging
import time
from typing import Any

from storm_dagster.connectors.sources import SourceRecovered

_QUIET_SECS = 15.0
"""Time without an error of the connection after which an outage has ended.

Librdkafka connects to a broker that is away once in 12.5 s at least.
"""
_LINE_SECS = 60.0
"""Time in which one line of the client library is logged."""
_CONNECTION_FACILITIES = frozenset({"FAIL", "ERROR"})
"""Facilities of log lines that repeat an error of the connection.

The source reports these errors itself.
"""


class Outage:
    """Outage of the brokers of one source. Time is an argument."""

    def __init__(self, brokers: str) -> None:
        self._brokers = brokers
        self._began: float | None = None
        """Time of the first error; ``None`` without an outage."""
        self._last_error = 0.0

    @property
    def is_under_way(self) -> bool:
        """True from the first error until the outage has ended."""
        return self._began is not None

    def on_error(self, now: float) -> None:
        """Note that a broker is unreachable."""
        if self._began is None:
            self._began = now
        self._last_error = now

    def on_response(self, now: float) -> SourceRecovered | None:
        """Note a response of a broker; the end of an outage that it shows, else ``None``."""
        began = self._began
        if began is None or now - self._last_error < _QUIET_SECS:
            return None
        self._began = None
        secs = self._last_error - began
        return SourceRecovered(f"Kafka answers again: {self._brokers} were away for {secs:.0f} s")


class LibraryLog:
    """Log of the client library, with at most one line a minute.

    Lines that repeat an error of the connection are logged as DEBUG only.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next_line = 0.0
        """Time from which on the next line is logged."""
        self._dropped = 0
        """Number of lines since the last one."""

    def log(self, level: int, text: str, *args: Any) -> None:
        """Log a line of the library, as :meth:`logging.Logger.log`.

        Its first argument is the facility.
        """
        if args and args[0] in _CONNECTION_FACILITIES:
            self._log.debug(text, *args)
            return
        now = time.monotonic()
        if now < self._next_line:
            self._dropped += 1
            return
        if self._dropped:
            text = f"{text} (and {self._dropped} other lines before)"
        self._log.log(level, text, *args)
        self._next_line = now + _LINE_SECS
        self._dropped = 0
