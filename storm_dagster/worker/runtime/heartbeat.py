"""The local heartbeat: a file for the supervisor, from a thread that does nothing else."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from storm_dagster.model.clock import boot_clock
from storm_dagster.model.daemon_folder import write_atomically

__all__ = ["HeartbeatThread"]

_log = logging.getLogger(__name__)


class HeartbeatThread:
    """Replaces the file every ``secs`` seconds, but only if the loop has advanced: a hung loop does not beat."""

    def __init__(
        self,
        path: Path,
        secs: float,
        passes: Callable[[], int],
        status: Callable[[], str],
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """``watch`` is called before each beat that is due."""
        self._watch = watch
        self._path = path
        self._secs = secs
        self._passes = passes
        self._status = status
        self._stop = threading.Event()
        self._count = 0
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first beat and start the thread."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the file stays."""
        self._stop.set()

    def _run(self) -> None:
        seen = -1
        while not self._stop.wait(self._secs):
            self._watch()
            passes = self._passes()
            if passes != seen:
                seen = passes
                self._beat()

    def _beat(self) -> None:
        self._count += 1
        document = {
            "pid": os.getpid(),
            "time_boot": boot_clock(),
            "count": self._count,
            "status": self._status(),
        }
        try:
            write_atomically(self._path, json.dumps(document))
        except OSError as error:
            _log.warning("the heartbeat file %s cannot be written: %s", self._path, error)
