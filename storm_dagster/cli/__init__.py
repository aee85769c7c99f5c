"""The command line, ``storm-dagster VERB``."""

import os
import signal

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with the code of its outcome."""
    if os.getpid() == 1:
        # The kernel drops a SIGTERM for which the first process of a container has no handler: one
        # that comes during the imports would be lost, and the container would be killed later.
        signal.signal(signal.SIGTERM, _end_at_once)
    from storm_dagster.host.imports import quick_imports

    with quick_imports():
        from storm_dagster.cli.app import run

    run()


def _end_at_once(number: int, frame: object) -> None:
    """End this process as a signal without a handler does; a daemon replaces this handler."""
    os.write(2, b"storm-dagster: a signal ended this process during its start\n")
    os._exit(128 + number)
