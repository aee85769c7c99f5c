"""End every process of a cluster: workers first, then the daemons.

Each gets TERM, and KILL after ten seconds, so that none survives.
"""

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
from storm_dagster.host.processes import ProcessEntry, RunFile, processes, run_dir, signal_exactly
from storm_dagster.host.waiting import poll
from storm_dagster.model.errors import Conflict
from storm_dagster.supervisor.worker_cgroups import end_leftovers

GRACE_SECS = 10.0
"""Time from TERM to KILL."""
_FROZEN_ROLES = ("supervisor", "dagster-daemon")
"""Roles that would start new workers or Dagster runs while the old ones are being ended."""
_LAST_ROLES = ("zookeeper", "spark", "spark-master", "spark-worker")
"""Roles that other processes still use while they end."""
_BRIEF_ROLES = ("dagster-code",)
"""Roles with a short grace. The code server waits up to a minute for a sensor tick that blocks on
ZooKeeper; a tick can be ended at any time.
"""
_BRIEF_SECS = 2.0
"""Their grace."""


def family(home: Path, records: Iterable[RunFile]) -> list[ProcessEntry]:
    """The live processes of the cluster in ``home``, apart from this one.

    A process belongs to it in one of three cases. A record names it (pid, start and boot). It is in
    the session of a process that a record names, and was started with this HOME. Or it has the mark
    of a recorded ``dev``.
    """
    records = list(records)
    marks = {record.id for record in records if record.role == "dev" and record.id}
    own_records = [
        record
        for record in records
        if record.boot_id in ("", boot_id()) and record.pid != os.getpid()
    ]
    named = {(record.pid, record.start_ticks) for record in own_records}
    sessions = {record.pid: record.start_ticks for record in own_records}
    table = list(processes())
    starts = {process.pid: process.start_ticks for process in table}
    members: list[ProcessEntry] = []
    for process in table:
        if process.pid == os.getpid():
            continue
        if (process.pid, process.start_ticks) in named:
            members.append(process)
            continue
        # A session outlives its leader, and its number is not reused during that time: the leader
        # is gone, or the one that the record names.
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
        has_this_home = environment.get("STORM_DAGSTER_HOME") == str(home)
        if (in_session and has_this_home) or environment.get(CLUSTER_MARK) in marks:
            members.append(process)
    return members


def _wait_gone(records: list[RunFile], seconds: float, hurry: Callable[[], bool]) -> list[RunFile]:
    """Records of the processes that still live after at most ``seconds``.

    It ends sooner when none lives, and when ``hurry()`` is true.
    """
    alive: list[RunFile] = []

    def have_ended() -> bool:
        alive[:] = [record for record in records if record.alive()]
        return not alive or hurry()

    poll(have_ended, timeout=seconds, pause=0.05)
    return alive


def _end(records: list[RunFile], grace: float, hurry: Callable[[], bool]) -> None:
    """End processes by TERM, and by KILL after ``grace`` seconds; return after their end.

    A process that KILL does not end within five seconds is not waited for.
    """
    for record in records:
        if record.signal(signal.SIGTERM):
            # A stopped process handles the signal only when it continues.
            record.signal(signal.SIGCONT)
    began = time.monotonic()
    alive = _wait_gone(records, min(grace, _BRIEF_SECS), hurry)
    for record in alive:
        if record.role in _BRIEF_ROLES:
            record.signal(signal.SIGKILL)
    for record in _wait_gone(alive, grace - (time.monotonic() - began), hurry):
        record.signal(signal.SIGKILL)
    _wait_gone(records, 5.0, lambda: False)


def kill_family(
    home: Path, records: list[RunFile], reap: Callable[[], None] = lambda: None
) -> list[ProcessEntry]:
    """Kill the :func:`family`, repeatedly, since it may start processes until it is dead.

    Returns its processes that still live after three seconds. ``reap`` is called after each round:
    a dead child counts as alive until its parent has collected it.
    """
    survivors: list[ProcessEntry] = []
    for _ in range(60):
        survivors = family(home, records)
        if not survivors:
            break
        for process in survivors:
            signal_exactly(process.pid, process.start_ticks, signal.SIGKILL)
        reap()
        time.sleep(0.05)
    return survivors


def _end_leftovers(home: Path) -> None:
    """End processes that the workers of this HOME have left: no supervisor lives to do it."""
    for folder in (home / "workers").glob("*"):
        end_leftovers(folder)


def end_cluster(
    home: Path,
    *,
    grace: float = GRACE_SECS,
    hurry: Callable[[], bool] = lambda: False,
    reap: Callable[[], None] = lambda: None,
) -> list[ProcessEntry]:
    """End all processes of the run files of ``home``, and their descendants.

    Returns the survivors. ``hurry`` cuts the grace short (a second Ctrl-C). ``reap`` is called
    between the steps: a parent collects its dead children there. Run files of ended processes are
    removed. The calling process is never ended.
    """
    for record in RunFile.read_all(home):
        if record.role in _FROZEN_ROLES and record.pid != os.getpid():
            record.signal(signal.SIGSTOP)
    # A second read: a worker may have started before its supervisor was stopped.
    records = RunFile.read_all(home)
    workers: list[RunFile] = []
    services: list[RunFile] = []
    daemons: list[RunFile] = []
    for record in records:
        if record.pid == os.getpid():
            continue
        if record.role == "worker":
            workers.append(record)
        elif record.role in _LAST_ROLES:
            services.append(record)
        else:
            daemons.append(record)
    for wave in (workers, daemons, services):
        if any(record.alive() for record in wave):
            _end(wave, grace, hurry)
            reap()
    _end_leftovers(home)
    # Now only descendants live: Dagster's code servers and runs, shell components, Spark's Python.
    survivors = kill_family(home, records, reap)
    if not survivors:
        # A code server that a signal ends does not remove this folder.
        shutil.rmtree(fork_folder(code_socket(home)), ignore_errors=True)
    for path in run_dir(home).glob("*.json"):
        record = RunFile.read(path)
        if record is None or (record.pid != os.getpid() and not record.alive()):
            path.unlink(missing_ok=True)
    return survivors


def refuse_live_home(home: Path) -> None:
    """Raise :class:`Conflict` if processes of a cluster in ``home`` live."""
    records = RunFile.read_all(home)
    for record in records:
        if record.role == "dev" and record.alive() and record.pid != os.getpid():
            raise Conflict(
                f"a cluster already runs in {home} (dev has pid {record.pid}):"
                f" `storm-dagster stop --home {home}`, or give another --home"
            )
    survivors = family(home, records)
    if survivors:
        pids = ", ".join(str(process.pid) for process in survivors[:8])
        raise Conflict(
            f"{len(survivors)} processes of an earlier cluster in {home} still run (pids {pids}):"
            f" `storm-dagster stop --home {home}` ends them"
        )
