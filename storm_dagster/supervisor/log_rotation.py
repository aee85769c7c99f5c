"""Rotation of the logs of a supervisor's live workers."""

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from storm_dagster.supervisor.housekeeping import LOG_BACKUPS, rotate
from storm_dagster.supervisor.processes import LiveWorker

_log = logging.getLogger(__name__)

_INTERVAL_SECS = 1.0
"""Interval of the checks of the logs' sizes."""


def rotate_logs(
    workers: Callable[[], Iterable[LiveWorker]], max_bytes: int, stopping: threading.Event
) -> None:
    """Rotate the logs that are larger than ``max_bytes``, once a second until ``stopping`` is set.

    A component that prints without end writes hundreds of megabytes in ten seconds. An error is
    logged once for each log, until it is rotated.
    """
    failing: set[Path] = set()
    while not stopping.wait(_INTERVAL_SECS):
        for live in workers():
            try:
                rotate(live.log_path, max_bytes, LOG_BACKUPS)
                failing.discard(live.log_path)
            except OSError as error:
                if live.log_path not in failing:
                    _log.error("log %s cannot be rotated (%s)", live.log_path, error)
                    failing.add(live.log_path)
