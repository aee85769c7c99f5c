"""Calls of the command line in a new process."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storm_dagster.model.errors import StormDagsterError, error_from_document

CLUSTER_MARK = "STORM_DAGSTER_CLUSTER"
"""Environment variable by which ``stop`` recognizes the processes of a ``dev``.

Its value is random for every ``dev``, and all descendants inherit it.
"""


@dataclass
class CommandResult:
    """Exit code and output of a ``storm-dagster`` call."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON document on standard output (exactly one)."""
        return json.loads(self.out)

    def check(self) -> "CommandResult":
        """Return itself if the exit code is 0.

        Else raise the typed error that the command printed as JSON, or without one a
        :class:`StormDagsterError` with the end of its output.
        """
        if self.code == 0:
            return self
        try:
            error: StormDagsterError = error_from_document(json.loads(self.out))
        except ValueError:
            error = StormDagsterError(
                f"exit code {self.code}: {self.err.strip()[-2000:] or self.out[-2000:]}"
            )
        raise error


def run_cli(
    *args: str,
    home: Path | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 330.0,
) -> "CommandResult":
    """Run ``storm-dagster ARGS`` with this interpreter, and wait for its end.

    ``home`` becomes STORM_DAGSTER_HOME, ``env`` is added to this process's environment. An exit
    code other than 0 is not an error. Raises ``subprocess.TimeoutExpired`` after ``timeout``
    seconds; the process is then killed.
    """
    environment = {**os.environ, **(env or {})}
    if home is not None:
        environment["STORM_DAGSTER_HOME"] = str(home)
    process = subprocess.run(
        [sys.executable, "-m", "storm_dagster", *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=timeout,
        check=False,
    )
    return CommandResult(process.returncode, process.stdout, process.stderr)
