"""Runs whose process ended together with the code server that started it.

A code server reports a run whose process dies. If the code server dies at the same time, Dagster
shows such a run as running permanently. So the next code server at the same socket reports it.
"""

import json
import logging
import os

import dagster as dg

from storm_dagster.code_server.run_process import RunProcessRecord

log: logging.Logger = logging.getLogger(__name__)

_LAUNCHED_BY = ".dagster/grpc_info"
"""Run tag of Dagster's default run launcher: the address of the code server."""
_UNFINISHED = [
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
"""Statuses of a run that has a process."""


def report_lost_runs(instance: dg.DagsterInstance, socket: str, location: str) -> list[str]:
    """Mark the lost runs of this location as failed, and return their ids.

    A run is lost if a code server at ``socket`` has forked it and its process is dead. A run that
    was being canceled is marked as canceled. Only processes of this machine or container are
    checked. A run that was not forked has no record of its process, and is left to Dagster's run
    monitoring.
    """
    lost: list[str] = []
    for candidate in instance.get_runs(filters=dg.RunsFilter(statuses=_UNFINISHED)):
        if not _is_of(candidate, socket, location):
            continue
        record = RunProcessRecord.of_run(candidate)
        if record is None or not record.is_gone():
            continue
        # The run may have finished since the list was read; from now on its process cannot.
        run = instance.get_run_by_id(candidate.run_id)
        if run is None or run.status not in _UNFINISHED:
            continue
        # A resumed run has the record of its new process.
        if RunProcessRecord.of_run(run) != record:
            continue
        message = f"The run's process (pid {record.pid}) was gone when its code server restarted."
        if run.status == dg.DagsterRunStatus.CANCELING:
            instance.report_run_canceled(run, message)
        else:
            instance.report_run_failed(run, message)
        log.warning("run %s: %s", run.run_id, message)
        lost.append(run.run_id)
    return lost


def _is_of(run: dg.DagsterRun, socket: str, location: str) -> bool:
    """True if a code server of ``location`` at ``socket`` has started the run."""
    origin = run.remote_job_origin
    if origin is None:
        return False
    launched_by = json.loads(run.tags.get(_LAUNCHED_BY, "{}"))
    run_socket = launched_by.get("socket")
    run_location = origin.repository_origin.code_location_origin.location_name
    if not run_socket or run_location != location:
        return False
    # The workspace may spell the path differently from the command line.
    return os.path.realpath(run_socket) == os.path.realpath(socket)
