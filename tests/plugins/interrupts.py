"""Processes that a test starts end on SIGTERM, even if a script runs the tests in the background
(``pytest &``).

The shell then has them ignore SIGINT. Whenever Dagster has executed a job in this process, it gives
SIGTERM the disposition of SIGINT, children inherit an "ignore" (but no handler), and a JVM keeps
it.
"""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Handle SIGINT as in the foreground."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
