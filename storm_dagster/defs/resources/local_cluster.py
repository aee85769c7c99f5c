"""A local cluster beside this Dagster: whether one runs, and starting it, detached, through the command line.

Only the job `start_local_cluster`, and resources with ``spawn: true`` (development), start daemons from here. A
sensor or a submission without that flag never does.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storm_dagster.client import command
from storm_dagster.model.endpoints import ClusterFile
from storm_dagster.model.errors import Conflict, Unavailable
from storm_dagster.model.run_file import RunFile

CLUSTER_MARK = "STORM_DAGSTER_CLUSTER"
"""By this variable `stop` knows the processes of its cluster."""
_LONGEST_SECS = 300


def local_cluster_runs(home: Path) -> bool:
    """Whether a local cluster lives in that state folder."""
    return any(record.role == "dev" and record.alive() for record in RunFile.read_all(home))


def run_cli(arguments: Sequence[str]) -> dict[str, Any]:
    """Run a verb of the command line in a process of its own; its JSON document, or its typed error."""
    try:
        # This run may belong to another cluster, which must not take the new one for its own when it ends.
        done = command.run_cli(*arguments, "--json", env={CLUSTER_MARK: ""}, timeout=_LONGEST_SECS)
    except subprocess.TimeoutExpired:
        raise Unavailable(
            f"`storm-dagster {' '.join(arguments)}` did not end within {_LONGEST_SECS} s: look at HOME/logs"
        ) from None
    return done.check().document


def start_cluster(home: Path, *, supervisors: int, slots: int, nimbuses: int) -> None:
    """Start a local cluster in ``home``; returns when it is ready. It outlives this process."""
    run_cli(
        [
            *("dev", "--detach", "--ports", "auto", "--home", str(home)),
            *("--supervisors", str(supervisors), "--slots", str(slots), "--nimbuses", str(nimbuses)),
        ]
    )


def ensure_local_cluster(home: Path) -> None:
    """Start the smallest useful cluster in ``home`` when none runs there, and wait until it is ready.

    Two runs that find none at once start one: the second is refused by `dev` and uses the first's. Raises
    :class:`Unavailable` when none is ready within five minutes.
    """
    if local_cluster_runs(home) and ClusterFile.read(home) is not None:
        return
    try:
        start_cluster(home, supervisors=2, slots=4, nimbuses=1)
    except (Conflict, Unavailable):
        if not local_cluster_runs(home):
            raise
        deadline = time.monotonic() + _LONGEST_SECS
        while ClusterFile.read(home) is None:
            if time.monotonic() > deadline:
                raise Unavailable(f"the cluster that starts in {home} is not ready: look at {home}/logs") from None
            time.sleep(0.5)
