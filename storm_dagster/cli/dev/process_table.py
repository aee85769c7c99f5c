"""Processes of the cluster of one HOME."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

from storm_dagster.model.clock import boot_id
from storm_dagster.model.processes import Process, processes
from storm_dagster.model.run_file import RunFile

CLUSTER_MARK = "STORM_DAGSTER_CLUSTER"
"""Environment variable, random for every ``dev``, that all its descendants inherit."""


def family(home: Path, records: Iterable[RunFile], marks: Iterable[str] = ()) -> list[Process]:
    """The live processes of the cluster in ``home``, this one left out.

    A process belongs to it when a record names it (pid, start and boot), when it lives in the session of
    one that a record names and was started with this HOME, or when it carries one of the ``marks``.
    """
    known = [record for record in records if record.boot_id in ("", boot_id())]
    named = {(record.pid, record.start_ticks) for record in known}
    sessions = {record.pid: record.start_ticks for record in known}
    wanted_marks = {mark for mark in marks if mark}
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
        in_session = process.session in sessions and starts.get(process.session) in (None, sessions[process.session])
        if not in_session and not wanted_marks:
            continue
        try:
            environment = psutil.Process(process.pid).environ()
        except psutil.Error:
            continue
        ours = in_session and environment.get("STORM_DAGSTER_HOME") == str(home)
        if ours or environment.get(CLUSTER_MARK) in wanted_marks:
            found.append(process)
    return found
