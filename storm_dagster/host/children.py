"""Child processes that end with the block that runs them."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

_RAISING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a handler may turn into an exception."""


@contextmanager
def running_child(
    command: Sequence[str],
    output: IO[bytes],
    *,
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program inside of a block, in a session of its own, with an empty input.

    Its output goes into ``output``. After the block the program and all processes of its group
    have been killed, also if a signal's handler raises an exception: no moment is too early for
    that. ``folder`` is its working directory, by default that of this process. Raises
    :class:`OSError` if it cannot be started.
    """
    with ExitStack() as ending:
        # An exception within the start would leave a process without a record.
        with signals_held():
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=dict(environment),
                start_new_session=True,
            )
            ending.callback(_kill_group, child)
        yield child


@contextmanager
def signals_held() -> Iterator[None]:
    """Let handlers of SIGINT, SIGTERM and SIGHUP run after the block instead of inside of it.

    A signal without a handler does at once what it does by default. Python runs handlers on the
    main thread only, so that on other threads nothing has to be held.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _RAISING_SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in received:
        signal.raise_signal(number)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill a child with the processes of its group, and wait for the child."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
