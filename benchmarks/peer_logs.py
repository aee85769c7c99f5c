"""Logs that the spouts of the benchmark beside other engines write, in each engine alike, and what
is read from them.

A task writes ``spout-TASK-PID.log``: ``b TIME`` with its first tuple, ``a TIME`` when a tuple is
acked (at most every 5 ms), and every second ``s TIME EMITTED ACKED [P50 P99]``, with the latencies
of its newest 5,000 tuples in milliseconds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from dataplane import pss_mb

STAMP_SECS = 0.005
TELL_SECS = 1.0
KEPT = 5_000


class SpoutLog:
    """Writer of one task's log."""

    def __init__(self, path: Path) -> None:
        self._out = path.open("a", buffering=1)
        self._emitted = self._acked = 0
        self._stamped = self._told = 0.0
        self._took: list[float] = []

    def emitted(self, number: int = 1) -> None:
        """Count tuples that the task has emitted."""
        now = time.time()
        if not self._emitted:
            self._out.write(f"b {now:.4f}\n")
        self._emitted += number
        if now - self._told >= TELL_SECS:
            self._tell(now)

    def acked(self, secs: float) -> None:
        """Count a tuple that was acked after so many seconds."""
        now = time.time()
        self._acked += 1
        self._took.append(secs)
        if now - self._stamped >= STAMP_SECS:
            self._stamped = now
            self._out.write(f"a {now:.4f}\n")
        if now - self._told >= TELL_SECS:
            self._tell(now)

    def _tell(self, now: float) -> None:
        self._told = now
        self._took = self._took[-KEPT:]
        took = sorted(self._took)
        quantiles = (
            f" {took[len(took) // 2] * 1000:.3f} {took[len(took) * 99 // 100] * 1000:.3f}"
            if took
            else ""
        )
        self._out.write(f"s {now:.4f} {self._emitted} {self._acked}{quantiles}\n")


@dataclass
class TaskLog:
    """One task's log as it is now."""

    pid: int
    began: float | None = None
    acks: list[float] = field(default_factory=list)
    totals: list[list[float]] = field(default_factory=list)
    """(time, emitted, acked, p50, p99), the quantiles if there are any."""


def read(folder: Path) -> list[TaskLog]:
    """The logs of a folder."""
    found = []
    for path in sorted(folder.glob("spout-*.log")):
        log = TaskLog(int(path.stem.rpartition("-")[2]))
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            kind, *rest = line.split()
            numbers = [float(part) for part in rest]
            if kind == "b":
                log.began = numbers[0]
            elif kind == "a":
                log.acks.append(numbers[0])
            else:
                log.totals.append(numbers)
        found.append(log)
    return found


def wait_for(found: Callable[[], bool], secs: float, what: str) -> None:
    """Wait until ``found()``; ``TimeoutError`` after so many seconds."""
    until = time.monotonic() + secs
    while not found():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} not seen within {secs:g} s")
        time.sleep(0.05)


def wait_for_tasks(folder: Path, tasks: int, secs: float = 180.0) -> None:
    """Wait until so many tasks have reported twice."""
    wait_for(
        lambda: sum(len(log.totals) > 1 for log in read(folder)) >= tasks,
        secs,
        f"reports of {tasks} running spouts",
    )


def first_tuple(folder: Path) -> float:
    """Time of the first tuple of any task."""
    wait_for(lambda: any(log.began for log in read(folder)), 180, "the first tuple")
    return min(log.began for log in read(folder) if log.began)


def rate(folder: Path, secs: float, *, acked: bool) -> float:
    """Tuples a second of all tasks during the next seconds, by their own clocks."""
    before = {log.pid: log.totals[-1] for log in read(folder)}
    time.sleep(secs)
    total, column = 0.0, 2 if acked else 1
    for log in read(folder):
        first, last = before.get(log.pid), log.totals[-1]
        if first is not None and last[0] > first[0]:
            total += (last[column] - first[column]) / (last[0] - first[0])
    return total


def p99(folder: Path) -> float:
    """99th percentile of the complete latency of the newest tuples, of the worst task, in
    milliseconds.
    """
    return max(log.totals[-1][4] for log in read(folder))


def pids(folder: Path) -> list[int]:
    """Processes of the spouts that live."""
    return sorted({log.pid for log in read(folder) if psutil.pid_exists(log.pid)})


def cores(folder: Path, secs: float) -> float:
    """CPU that the workers use during the next seconds, in cores."""

    def used() -> float:
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids(folder))

    began, before = time.monotonic(), used()
    time.sleep(secs)
    return (used() - before) / (time.monotonic() - began)


def memory(folder: Path) -> float:
    """Memory of the workers (PSS), MiB."""
    return sum(pss_mb(pid) for pid in pids(folder))


def gap_after_kill(folder: Path, least_secs: float, most_secs: float = 180.0) -> float:
    """Longest time without an ack at the spouts of the others after ``kill -9`` of one worker.

    It ends when acks have come for three seconds, and ``least_secs`` have passed.
    """
    victim, *others = pids(folder)
    if not others:
        raise LookupError("one worker only: nobody is left to measure")
    killed = time.time()
    psutil.Process(victim).kill()

    def acks() -> list[float]:
        return sorted(
            t for log in read(folder) if log.pid in others for t in log.acks if t > killed - 1
        )

    def recovered() -> bool:
        now, seen = time.time(), acks()
        recent = [t for t in seen if t > now - 3]
        return now > killed + least_secs and len(recent) > 30 and recent[0] < now - 2.5

    wait_for(recovered, most_secs, "acks after the kill")
    return max(later - earlier for earlier, later in itertools.pairwise(acks()))
