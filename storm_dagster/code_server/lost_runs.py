"""Runs whose process ended together with the code server that had started it.

A code server reports a run whose process dies. When it dies itself, nobody would: Dagster shows
such a run as running for ever. Its successor at the same socket reports it.
"""

import json
import logging
import re

import dagster as dg
import psutil

log: logging.Logger = logging.getLogger(__name__)

_LAUNCHED_BY = ".dagster/grpc_info"
"""Run tag of Dagster's default run launcher: the address of the code server."""
_STARTED = re.compile(r"Started process for run \(pid: (\d+)\)")
_SLACK_SECS = 1.0
"""A process reports itself after it has started; the kernel rounds the time of its start."""
_UNFINISHED = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]


def report_lost_runs(instance: dg.DagsterInstance, socket: str, location: str) -> list[str]:
    """Mark each run of this location as failed (canceled, when it was being canceled) that a code
    server at ``socket`` has started and whose process is gone; returns their ids.

    Only a process on this machine, and in this container, can be looked for: so can those of a
    unix socket.
    """
    lost: list[str] = []
    for run in instance.get_runs(filters=dg.RunsFilter(statuses=_UNFINISHED)):
        if not _is_of(run, socket, location):
            continue
        pid = _pid_of_lost_process(instance, run.run_id)
        if pid is None:
            continue
        message = f"The run's process (pid {pid}) was gone when its code server started again."
        if run.status == dg.DagsterRunStatus.CANCELING:
            instance.report_run_canceled(run, message)
        else:
            instance.report_run_failed(run, message)
        log.warning("run %s: %s", run.run_id, message)
        lost.append(run.run_id)
    return lost


def _is_of(run: dg.DagsterRun, socket: str, location: str) -> bool:
    origin = run.remote_job_origin
    if origin is None:
        return False
    launched_by = json.loads(run.tags.get(_LAUNCHED_BY, "{}"))
    named = origin.repository_origin.code_location_origin.location_name
    return launched_by.get("socket") == socket and named == location


def _pid_of_lost_process(instance: dg.DagsterInstance, run_id: str) -> int | None:
    """Pid of the run's process if that is gone; ``None`` if it lives, or never said that it
    started.
    """
    lost: int | None = None
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        message = entry.dagster_event.message if entry.dagster_event is not None else None
        started = _STARTED.match(message or "")
        if started is None:
            continue
        pid = int(started[1])
        if _lives(pid, entry.timestamp):
            return None
        lost = pid
    return lost


def _lives(pid: int, seen: float) -> bool:
    """Whether the process that had this pid at that time (epoch seconds) lives still."""
    try:
        process = psutil.Process(pid)
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return not is_zombie and process.create_time() <= seen + _SLACK_SECS
    except psutil.NoSuchProcess:
        return False
