"""End every process of a cluster: workers first, then TERM, ten seconds, KILL. None survives."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from storm_dagster.cli.dev.sockets import code_socket
from storm_dagster.client.command import CLUSTER_MARK
from storm_dagster.host.clock import boot_id
from storm_dagster.host.forks import fork_folder
from storm_dagster.host.processes import Process, RunFile, processes, run_dir, signal_exactly
from storm_dagster.host.waiting import poll

GRACE_SECS = 10.0
# These would start new workers, or Dagster runs, while the old ones are being ended.
_FROZEN_ROLES = ("supervisor", "dagster-daemon")
# Others still write to these while they end.
_LAST_ROLES = ("zookeeper", "spark", "spark-master", "spark-worker")
# It waits up to a minute for a sensor tick that blocks on ZooKeeper; a tick has nothing to lose.
_BRIEF_ROLES = ("dagster-code",)
_BRIEF_SECS = 2.0


def family(home: Path, records: Iterable[RunFile]) -> list[Process]:
    """The live processes of the cluster in ``home``, this one left out.

    A process belongs to it when a record names it (pid, start and boot), when it lives in the
    session of one that a record names and was started with this HOME, or when it carries the mark
    of a recorded ``dev``.
    """
    records = list(records)
    marks = {record.id for record in records if record.role == "dev" and record.id}
    known = [
        record
        for record in records
        if record.boot_id in ("", boot_id()) and record.pid != os.getpid()
    ]
    named = {(record.pid, record.start_ticks) for record in known}
    sessions = {record.pid: record.start_ticks for record in known}
    table = list(processes())
    starts = {process.pid: process.start_ticks for process in table}
    found: list[Process] = []
    for process in table:
        if process.pid == os.getpid():
            continue
        if (process.pid, process.start_ticks) in named:
            found.append(process)
            continue
        # A session outlives its leader, and its number is not given away while it does.
        in_session = process.session in sessions and starts.get(process.session) in (
            None,
            sessions[process.session],
        )
        if not in_session and not marks:
            continue
        try:
            environment = psutil.Process(process.pid).environ()
        except psutil.Error:
            continue
        ours = in_session and environment.get("STORM_DAGSTER_HOME") == str(home)
        if ours or environment.get(CLUSTER_MARK) in marks:
            found.append(process)
    return found


def _wait_gone(records: list[RunFile], seconds: float, hurry: Callable[[], bool]) -> list[RunFile]:
    """Those that still live after at most ``seconds``."""
    alive: list[RunFile] = []

    def have_ended() -> bool:
        alive[:] = [record for record in records if record.alive()]
        return not alive or hurry()

    poll(have_ended, timeout=seconds, pause=0.05)
    return alive


def _end(records: list[RunFile], grace: float, hurry: Callable[[], bool]) -> None:
    for record in records:
        if record.signal(signal.SIGTERM):
            record.signal(signal.SIGCONT)
    began = time.monotonic()
    left = _wait_gone(records, min(grace, _BRIEF_SECS), hurry)
    for record in left:
        if record.role in _BRIEF_ROLES:
            record.signal(signal.SIGKILL)
    for record in _wait_gone(left, grace - (time.monotonic() - began), hurry):
        record.signal(signal.SIGKILL)
    _wait_gone(records, 5.0, lambda: False)


def kill_family(
    home: Path, records: list[RunFile], reap: Callable[[], None] = lambda: None
) -> list[Process]:
    """Kill the :func:`family`; returns what is left of it after three seconds."""
    left: list[Process] = []
    for _ in range(60):
        left = family(home, records)
        if not left:
            break
        for process in left:
            signal_exactly(process.pid, process.start_ticks, signal.SIGKILL)
        reap()
        time.sleep(0.05)
    return left


def end_cluster(
    home: Path,
    *,
    grace: float = GRACE_SECS,
    hurry: Callable[[], bool] = lambda: False,
    reap: Callable[[], None] = lambda: None,
) -> list[Process]:
    """End all processes that the run files of ``home`` name, and their descendants; returns
    survivors.

    ``hurry`` cuts the grace short (a second Ctrl-C). ``reap`` is called between the steps: a parent
    collects its dead children there. Run files of ended processes are removed. The calling process
    is never ended.
    """
    for record in RunFile.read_all(home):
        if record.role in _FROZEN_ROLES and record.pid != os.getpid():
            record.signal(signal.SIGSTOP)
    # Read again: a worker may have come up before its supervisor was stopped.
    records = RunFile.read_all(home)
    waves = (
        (lambda role: role == "worker", grace),
        (lambda role: role not in ("worker", *_LAST_ROLES), grace),
        # The first ones of a machine write down their class data for the next ones.
        (lambda role: role in _LAST_ROLES, 3 * grace),
    )
    for belongs, patience in waves:
        wave = [record for record in records if belongs(record.role) and record.pid != os.getpid()]
        if any(record.alive() for record in wave):
            _end(wave, patience, hurry)
            reap()
    # What is left are descendants: Dagster's code servers and runs, shell components, Spark's
    # Python.
    left = kill_family(home, records, reap)
    if not left:
        # A code server that a signal ends does not remove it.
        shutil.rmtree(fork_folder(code_socket(home)), ignore_errors=True)
    for path in run_dir(home).glob("*.json"):
        record = RunFile.read(path)
        if record is None or (record.pid != os.getpid() and not record.alive()):
            path.unlink(missing_ok=True)
    return left
