"""Boot clock of leases and timeouts: seconds since boot, which cannot be set, and the id of that
boot.

What stores times of this clock stores :func:`boot_id` beside them, and forgets them when it is
another.
"""

import functools
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def _clock() -> Callable[[], float]:
    """The first clock that goes on while the machine sleeps: Linux's own, else the monotonic one,
    which does so on macOS (where ``time.monotonic`` does not).
    """
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):
        if hasattr(time, name):
            return functools.partial(time.clock_gettime, getattr(time, name))
    return time.monotonic


boot_clock: Callable[[], float] = _clock()
"""Seconds since boot, times of sleep included: neither a set clock nor a sleeping machine stretches
a lease.
"""


@functools.cache
def boot_id() -> str:
    """Id of this boot: the kernel's own on Linux and macOS, elsewhere the time at which the machine
    came up.
    """
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    import subprocess

    try:
        command = ["sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        import psutil

        return f"booted {psutil.boot_time():.0f}"
