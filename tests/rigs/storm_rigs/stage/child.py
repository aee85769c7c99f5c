"""Child processes of a test: their start with a log, the wait for their service, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import psutil

from storm_dagster.testing.waiting import eventually
from storm_dagster.testing.waiting import patience as multiplied

_LOG_TAIL = 3000


def start_child(
    argv: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    cwd: Path | None = None,
    own_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process without input whose output is appended to ``log``.

    ``env`` is added to this process's environment, ``without`` are variables that are not passed
    on. With ``own_session`` it gets no signal that a
    terminal sends to the tests.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    with log.open("ab") as output:
        return subprocess.Popen(
            list(argv),
            cwd=cwd,
            env={**inherited, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=own_session,
        )


def await_child(
    process: subprocess.Popen[bytes],
    log: Path,
    serves: Callable[[], object],
    timeout: float,
    what: str,
    ignore: tuple[type[Exception], ...] = (),
) -> None:
    """Wait until it serves; fail with the end of its log when it ends before."""

    def ready() -> object:
        if process.poll() is not None:
            tail = log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]
            raise ChildEnded(f"{what} ended with code {process.returncode}: {tail}")
        return serves()

    eventually(ready, timeout, what, interval=0.2, ignore=ignore)


class ChildEnded(Exception):
    """A process ended before it served."""


def stop_child(
    process: subprocess.Popen[bytes],
    patience: float = 30.0,
    first: signal.Signals = signal.SIGTERM,
) -> None:
    """End a process and all that it has started: ``first`` to the process, KILL to what still runs
    after ``patience`` seconds. Stopping twice does nothing.
    """
    if process.poll() is not None:
        return
    parent = psutil.Process(process.pid)
    family = [parent, *parent.children(recursive=True)]
    process.send_signal(first)
    for member in psutil.wait_procs(family, multiplied(patience))[1]:
        member.kill()
    process.wait(multiplied(10))
