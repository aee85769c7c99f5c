"""Forks of the warm process: one executes a run, another reports a run whose process was killed."""

import contextlib
import importlib.metadata
import logging
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from storm_dagster.host.processes import RunFile
from storm_dagster.launcher.preload import Settings, exchange
from storm_dagster.launcher.run_launcher import STOCK_TAG
from storm_dagster.launcher.wire import RUN_ROLE, ForkState, LineConnection, next_fork

log: logging.Logger = logging.getLogger(__name__)

_REQUEST_SECS = 10.0
"""A launcher that is silent for so long has died."""
_HANDOVER_SECS = 10.0
"""Time for a launcher whose fork died before the start to launch the run the stock way, and tag
it.
"""


@dataclass(frozen=True)
class LoadedCode:
    """Code locations that the warm process has loaded."""

    home: Path
    modules: Sequence[str]
    settings: Settings
    read: Collection[str]

    def refusal(self, request: dict[str, Any]) -> str | None:
        """Why that run cannot start here, or ``None``."""
        if request.get("module") not in self.modules:
            return f"its definitions ({request.get('module') or 'a file'}) are not among those loaded ({', '.join(self.modules)})"
        if request.get("image"):
            return "it asks for a container image"
        if os.path.realpath(str(request.get("python"))) != os.path.realpath(sys.executable):
            return f"its interpreter is {request.get('python')}"
        folder = request.get("working_directory")
        if folder and os.path.realpath(str(folder)) != os.path.realpath(os.getcwd()):
            return f"its working directory is {folder}"
        ours = os.environ.get("DAGSTER_HOME")
        if not ours or os.path.realpath(str(request.get("dagster_home"))) != os.path.realpath(ours):
            return f"its Dagster is that of {request.get('dagster_home')}"
        arguments = request.get("arguments")
        if (
            not isinstance(arguments, list)
            or arguments[:2] != ["api", "execute_run"]
            or len(arguments) != 3
        ):
            return "it is not a run"
        return None


def reset_process() -> None:
    """Reset a fork to an ordinary process: its own session, default signals, no logging of the
    forker.
    """
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Dagster ends a run gracefully on it (and on SIGTERM).
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The run's log belongs to its captured output, not to the forker's file.
    exchange((0o077, [], logging.WARNING, False))


def serve_one(connection: LineConnection, loaded: LoadedCode) -> int:
    """Serve one connection of the launcher: execute its run on ``go``. Returns the exit code."""
    reset_process()
    record: RunFile | None = None
    request: dict[str, Any] | None = None
    try:
        request = connection.receive(_REQUEST_SECS)
        if request is None:
            return 0
        if (reason := loaded.refusal(request)) is not None:
            connection.send({"refused": reason})
            return 0
        record = RunFile.write(loaded.home, RUN_ROLE, str(request["run_id"]))
        state: ForkState = "waiting"
        connection.send({"ready": os.getpid()})
        state = next_fork(state, connection.await_message("go", _REQUEST_SECS))
    except (OSError, ValueError, KeyError) as error:
        log.info("the connection to a launcher was lost: %s", error or type(error).__name__)
        if record is None or request is None:
            return 0
        state = next_fork("waiting", "end")
    if state == "leaving":
        connection.refuse_more()
        state = next_fork(state, connection.await_message("go", 0.0))
    if state != "runs":
        record.remove(loaded.home)
        return 0
    with contextlib.suppress(OSError):
        # A launcher that waits no longer counts the run as launched.
        connection.send({"started": os.getpid()})
    connection.close()
    exchange(loaded.settings)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        # Python's own generator does so at a fork; without it, all runs would draw the same
        # numbers.
        numpy.seed()
    return _execute(request["arguments"], record, loaded.home)


def _execute(arguments: list[str], record: RunFile, home: Path) -> int:
    """Run ``dagster api execute_run``. On failure the record stays, and the forker reports the
    run.
    """
    sys.argv = ["dagster", *arguments]
    command = next(
        iter(importlib.metadata.entry_points(group="console_scripts", name="dagster"))
    ).load()
    code: int | str | None = 0
    try:
        command()
    except SystemExit as end:
        code = end.code
    if code in (0, None):
        record.remove(home)
        return 0
    return code if isinstance(code, int) else 1


def report_death(record: RunFile, home: Path, how: str) -> int:
    """Mark the run of a process that died as failed (canceled, when it was being canceled).

    Nothing is done for a run that has finished, is unknown here, or was launched the stock way
    after its fork had died. Returns the exit code.
    """
    reset_process()
    deadline = time.monotonic() + _HANDOVER_SECS
    with dg.DagsterInstance.get() as instance:
        while True:
            run = instance.get_run_by_id(record.id)
            if run is None or run.is_finished or STOCK_TAG in run.tags:
                break
            if run.status != dg.DagsterRunStatus.STARTING or time.monotonic() >= deadline:
                canceled = run.status == dg.DagsterRunStatus.CANCELING
                report = instance.report_run_canceled if canceled else instance.report_run_failed
                report(run, f"The run's process (pid {record.pid}) {how}.")
                break
            time.sleep(0.1)
    record.remove(home)
    return 0
