"""Containers as far as their processes are concerned: a PID namespace, which ends with its first
process.

process = start_child([*CONTAINER, "storm-dagster", ...], log)
os.kill(first_process(process.pid), signal.SIGTERM)     # what a container engine sends
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Command line in front of the one that is the first process of a new PID namespace."""


def missing_requirement() -> str | None:
    """Reason why no PID namespace can be made here; ``None`` when one can."""
    if not sys.platform.startswith("linux"):
        return "PID namespaces are Linux's"
    try:
        made = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "`unshare` is not installed (util-linux)"
    if made.returncode:
        return f"`unshare --pid` fails: {made.stderr.strip()}"
    return None


def first_process(pid: int) -> int:
    """Pid, as this process sees it, of the first process in the namespace that ``pid`` made.

    ``ValueError`` before it was started.
    """
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)
