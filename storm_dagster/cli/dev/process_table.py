"""What ``/proc`` says: which processes belong to the cluster of one HOME."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from storm_dagster.model.run_file import RunFile, boot_id

__all__ = ["CLUSTER_MARK", "Process", "family", "processes"]

CLUSTER_MARK = "STORM_DAGSTER_CLUSTER"
"""Environment variable, random for every ``dev``, that all its descendants inherit."""


@dataclass(frozen=True)
class Process:
    """One live process."""

    pid: int
    start_ticks: int
    session: int


def processes() -> Iterator[Process]:
    """All live processes; zombies are left out."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as stream:
                raw = stream.read()
        except OSError:
            continue
        fields = raw[raw.rfind(b")") + 2 :].split()
        if len(fields) >= 20 and fields[0] not in (b"Z", b"X"):
            yield Process(int(entry.name), int(fields[19]), int(fields[3]))


def _environment(pid: int) -> frozenset[bytes]:
    """The environment that the process started with; empty when it may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return frozenset(stream.read().split(b"\0"))
    except OSError:
        return frozenset()


def family(home: Path, records: Iterable[RunFile], marks: Iterable[str] = ()) -> list[Process]:
    """The live processes of the cluster in ``home``, this one left out.

    A process belongs to it when a record names it (pid, start and boot), when it lives in the session of
    one that a record names and was started with this HOME, or when it carries one of the ``marks``.
    """
    boot = boot_id()
    known = [record for record in records if record.boot_id in ("", boot)]
    named = {(record.pid, record.start_ticks) for record in known}
    sessions = {record.pid: record.start_ticks for record in known}
    wanted_home = f"STORM_DAGSTER_HOME={home}".encode()
    wanted_marks = {f"{CLUSTER_MARK}={mark}".encode() for mark in marks if mark}
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
        if not in_session and not wanted_marks:
            continue
        environment = _environment(process.pid)
        if (in_session and wanted_home in environment) or wanted_marks & environment:
            found.append(process)
    return found
