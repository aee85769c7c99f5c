"""States of the processes of a local cluster, and advice about them, for ``status``."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import psutil

from storm_dagster.model.run_file import RunFile

ProcessState = Literal["runs", "frozen", "dead"]


def state_of(record: RunFile) -> ProcessState:
    """``frozen`` is a process that was stopped by a signal (SIGSTOP, Ctrl-Z, a debugger) and does nothing."""
    if not record.alive():
        return "dead"
    try:
        stopped = psutil.Process(record.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return "dead"  # It ended in this moment.
    return "frozen" if stopped else "runs"


def uptime(record: RunFile) -> float:
    """Seconds since the process started; 0 when it ended in this moment."""
    try:
        return time.time() - psutil.Process(record.pid).create_time()
    except psutil.Error:
        return 0.0


_FIRST_TICK_SECS = 120.0
"""A sensor's first tick comes half a minute after Dagster's daemon, later on a busy machine."""


def healing_sensor(home: Path, armed: bool) -> tuple[Literal["ok", "warning"], str]:
    """State of the healing sensor; right after ``dev`` it is not expected to be armed yet."""
    if armed:
        return "ok", "healing sensor armed"
    if any(each.role == "dev" and each.alive() and uptime(each) < _FIRST_TICK_SECS for each in RunFile.read_all(home)):
        return "ok", "the healing sensor is starting; the leader heals by itself meanwhile"
    return "warning", "no healing sensor is armed: the leader heals by itself, more slowly"


def advice(states: Iterable[tuple[RunFile, ProcessState]], home: Path) -> list[str]:
    """Advice about processes that are frozen or dead; none when all are healthy."""
    seen, lines = list(states), list[str]()
    for record, state in seen:
        process = f"{record.role} {record.id}" if record.role != "dev" else "dev"
        go_on = f"`kill -CONT {record.pid}` lets it go on"
        unwatched = "so nothing that dies is started again"
        if state == "frozen":
            frozen = "is frozen" if record.role != "dev" else f"is frozen, {unwatched}"
            lines.append(f"{process} (pid {record.pid}) {frozen}: {go_on}")
        elif record.role == "dev" and state == "dead" and any(other != "dead" for _, other in seen):
            lines.append(
                f"dev (pid {record.pid}) has ended without ending its cluster, {unwatched}: "
                f"`storm-dagster stop --home {home}`, then `storm-dagster dev --home {home}`; its topologies go on"
            )
    return lines
