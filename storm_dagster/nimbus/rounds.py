"""Work that a thread of nimbus repeats."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from storm_dagster.model.errors import StormDagsterError

_log = logging.getLogger(__name__)


def repeat(work: Callable[[], object], pause_secs: float, ended: threading.Event, later: str) -> None:
    """Do the work after each pause until ``ended``. An error is logged with what is ``later`` for it."""
    while not ended.wait(pause_secs):
        try:
            work()
        except StormDagsterError as error:
            _log.warning("%s: %s", later, error.message)
        except Exception:
            _log.exception("%s", later)
