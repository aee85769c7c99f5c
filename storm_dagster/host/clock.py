"""Boot clock of leases and timeouts, and the id of the boot.

The clock is seconds since boot, which cannot be set. A record with times of this clock also has
:func:`boot_id`, and the times are invalid after another boot.
"""

import functools
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def _clock() -> Callable[[], float]:
    """The first clock that advances while the machine sleeps.

    It is Linux's boot clock, else ``CLOCK_MONOTONIC``, which advances on macOS (where
    ``time.monotonic`` does not).
    """
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):
        if hasattr(time, name):
            return functools.partial(time.clock_gettime, getattr(time, name))
    return time.monotonic


boot_clock: Callable[[], float] = _clock()
"""Seconds since boot, with times of sleep, so that neither a set clock nor a sleeping machine
extends a lease.
"""


@functools.cache
def boot_id() -> str:
    """Id of this boot.

    On Linux and macOS it is the kernel's id, elsewhere the time of the boot.
    """
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    import subprocess

    try:
        command = ["sysctl", "-n", "kern.bootsessionuuid"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return result.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        import psutil

        return f"booted {psutil.boot_time():.0f}"


def clock_ahead_of(
    served_at: float, asked_at: float, answered_at: float, *, unit_secs: float = 0.0
) -> float:
    """Seconds by which this machine's clock is ahead of the one of a response.

    Negative: behind it. 0 if the clocks may agree: ``served_at`` by the other clock, rounded down
    to ``unit_secs``, is within the request's time by this clock.
    """
    if asked_at > served_at + unit_secs:
        return asked_at - served_at - unit_secs
    return min(0.0, answered_at - served_at)
