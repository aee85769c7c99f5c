"""What ``status`` says of the processes of a local cluster beyond their being there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from storm_dagster.model.run_file import RunFile

__all__ = ["ProcessState", "advice", "state_of"]

ProcessState = Literal["runs", "frozen", "dead"]


def state_of(record: RunFile) -> ProcessState:
    """``frozen`` is a process that was stopped by a signal (SIGSTOP, Ctrl-Z, a debugger) and does nothing."""
    if not record.alive():
        return "dead"
    try:
        stat = Path(f"/proc/{record.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "runs"  # It ended in this moment, or there is no /proc here.
    return "frozen" if stat.rpartition(")")[2].split()[0] in ("T", "t") else "runs"


def advice(states: Iterable[tuple[RunFile, ProcessState]], home: Path) -> list[str]:
    """What a person should know or do about them; nothing when all is well."""
    seen = list(states)
    said = [
        f"{record.role} {record.id} (pid {record.pid}) is frozen: `kill -CONT {record.pid}` lets it go on"
        for record, state in seen
        if state == "frozen" and record.role != "dev"
    ]
    for record, state in seen:
        if record.role != "dev":
            continue
        if state == "frozen":
            said.append(
                f"dev (pid {record.pid}) is frozen, so nothing that dies is started again: "
                f"`kill -CONT {record.pid}` lets it go on"
            )
        elif state == "dead" and any(other != "dead" for _, other in seen):
            said.append(
                f"dev (pid {record.pid}) has ended without ending its cluster, so nothing that dies is started again: "
                f"`storm-dagster stop --home {home}`, then `storm-dagster dev --home {home}`; its topologies go on"
            )
    return said
