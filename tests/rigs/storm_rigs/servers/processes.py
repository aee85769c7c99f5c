"""Processes of a cluster, found without its own records."""

from __future__ import annotations

import os
from pathlib import Path

from storm_dagster.host.processes import processes


def processes_of(home: Path) -> list[str]:
    """Command lines of all live processes that were started with this HOME, this one left out."""
    wanted = f"STORM_DAGSTER_HOME={home}".encode()
    found: list[str] = []
    for process in processes():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if wanted in environment and process.pid != os.getpid():
                raw = Path(f"/proc/{process.pid}/cmdline").read_bytes()
                found.append(raw.replace(b"\0", b" ").decode("utf-8", "replace"))
        except OSError:
            continue
    return found
