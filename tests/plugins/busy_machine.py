"""A busy machine fails no test: one factor scales the limits of the whole run.

The process that begins the run exports ``STORM_TEST_PATIENCE``; workers of pytest-xdist and all
that tests start inherit it. :func:`storm_dagster.testing.waiting.patience` applies it to the limits
of rigs and tests, this module to those of pytest-timeout.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from storm_dagster.testing.waiting import PATIENCE, patience, patience_factor

MAX_FACTOR = 8.0
"""Above it a test that hangs would hold up the run for longer than a slow one needs."""
ROOM = 1.5
"""Share of a process on a busy machine is uneven: the factor exceeds the mean by this much."""
SAMPLES = 40
PAUSE = 0.05
"""Seconds between two samples of the processes that want a processor."""


def cores() -> int:
    """Number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float:
    """Number of processes that want a processor now, without this one: the mean of two seconds.

    Not the load average of the last minute, which still counts the work of a step before this run,
    and not yet what was started a moment ago. It is used where /proc is missing.
    """
    path = Path("/proc/loadavg")
    if not path.exists():
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    runnable = 0
    for _ in range(SAMPLES):
        # "0.52 0.58 0.59 3/467 12345": the fourth is runnable/all, and this process is one of them.
        runnable += int(path.read_text().split()[3].partition("/")[0]) - 1
        time.sleep(PAUSE)
    return runnable / SAMPLES


def factor_of(load: float, cores: int) -> float:
    """Factor for a load: 1 on a machine that is idle, with at most one decimal place."""
    return min(MAX_FACTOR, max(1.0, round(ROOM * load / cores, 1)))


def pytest_configure(config: pytest.Config) -> None:
    """Export the factor, unless the user or the process that began the run did."""
    if os.environ.get(PATIENCE):
        patience_factor()
        return
    os.environ[PATIENCE] = f"{factor_of(load(), cores()):g}"
    config.add_cleanup(forget)


def forget() -> None:
    """Take the factor out of the environment, for a later run in this process."""
    os.environ.pop(PATIENCE, None)


def pytest_report_header() -> str:
    """Name the factor, so that a run can be repeated with it."""
    return f"{PATIENCE}={patience_factor():g}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Multiply the limit of each test: of its mark, or that of the configuration.

    A limit of the command line (``--timeout``) stays as it was typed.
    """
    default: float | None = None
    if config.getoption("timeout", None) is None:
        default = float(config.getini("timeout") or 0) or None
    for item in items:
        mark = item.get_closest_marker("timeout")
        if mark is None:
            if default is not None:
                item.add_marker(pytest.mark.timeout(patience(default)))
            continue
        others = dict(mark.kwargs)
        limit = mark.args[0] if mark.args else others.pop("timeout")
        scaled = pytest.mark.timeout(patience(limit), *mark.args[1:], **others)
        item.add_marker(scaled, append=False)
