"""Health scripts of a host: executables in ``storm.health.check.dir``.

A script fails if it exits with a code other than 0, prints a line that starts with ``ERROR``, or
runs longer than ``storm.health.check.timeout.ms``. Then the host is unhealthy: its workers are
ended and no slot is offered until all scripts pass.
"""

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

_INTERVAL_SECS = 30.0
"""Pause between two runs of all scripts."""
_MAX_OUTPUT_BYTES = 64 * 1024
"""Part of a script's output in which an ``ERROR`` is looked for."""


def check_once(folder: Path, timeout_secs: float) -> str | None:
    """Run the executable files of ``folder`` in order until one fails.

    Returns the problem of that one, or ``None``. Raises ``OSError`` if the folder cannot be listed.
    """
    for script in sorted(folder.iterdir()):
        if not script.is_file() or not os.access(script, os.X_OK):
            continue
        problem = _run(script, timeout_secs)
        if problem is not None:
            return f"health script {script.name}: {problem}"
    return None


def _run(script: Path, timeout_secs: float) -> str | None:
    """Run a script, and return its problem, or ``None``."""
    try:
        process = subprocess.Popen(
            [str(script)],
            cwd=script.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return f"cannot be started ({error.strerror or error})"
    try:
        output, _ = process.communicate(timeout=timeout_secs)
    except subprocess.TimeoutExpired:
        # Not reaped yet, so the group id is not reused.
        os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # A process may hang in the kernel.
            process.communicate(timeout=1)
        return f"did not end within {timeout_secs:g} s"
    for line in output[:_MAX_OUTPUT_BYTES].decode("utf-8", "replace").splitlines():
        if line.startswith("ERROR"):
            return line[:500]
    if process.returncode != 0:
        return f"ended with code {process.returncode}"
    return None


@dataclass(eq=False)
class HealthCheck:
    """Thread that runs the scripts every 30 s.

    :attr:`problem` is their result.
    """

    folder: Path | None
    """``None``: the host counts as healthy."""
    timeout_secs: float
    """Limit of one script."""
    wake: Callable[[], None]
    """Called after each change of :attr:`problem`."""

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self.problem: str | None = None
        """Reason why this host is unhealthy.

        ``None`` if it is healthy, and until the first check has finished.
        """
        self._thread = threading.Thread(target=self._loop, name="health", daemon=True)

    def start(self) -> None:
        """Begin checking."""
        if self.folder is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop, without waiting for a running script."""
        self._stopped.set()

    def _loop(self) -> None:
        """Run the scripts until :meth:`close`, and keep :attr:`problem` up to date."""
        while self.folder is not None and not self._stopped.is_set():
            try:
                problem = check_once(self.folder, self.timeout_secs)
            except OSError as error:
                # An unreadable folder does not mean an unhealthy host.
                _log.error("health scripts in %s cannot be run: %s", self.folder, error)
                problem = None
            if problem != self.problem:
                if problem:
                    _log.error("this host is unhealthy, its workers are ended: %s", problem)
                else:
                    _log.info("this host is healthy again")
                self.problem = problem
                self.wake()
            self._stopped.wait(_INTERVAL_SECS)
