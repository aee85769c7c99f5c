"""Signals that end a daemon."""

import os
import signal
import threading


def stop_event() -> threading.Event:
    """Event that SIGTERM and SIGINT set.

    A second signal ends the process at once.
    """
    stop = threading.Event()
    handle_signals(stop)
    return stop


def handle_signals(*events: threading.Event) -> None:
    """Let each SIGTERM or SIGINT set the next of these events that is not set.

    Once all are set, a signal ends the process at once.
    """

    def handle(number: int, frame: object) -> None:
        for event in events:
            if not event.is_set():
                event.set()
                return
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
