"""Reports of the errors of tasks."""

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storm_dagster.model.conf import mask_text

_log = logging.getLogger(__name__)
_MAX_ERROR_CHARS = 150
"""Characters of the text of an error in one line."""

_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
"""Beginning of the names of this package's files: an author looks for the place of an error in
other files.
"""


def describe_error(error: BaseException) -> str:
    """Type, text, file and line of an error, in one line.

    The place is the last one outside of this package, if there is one.
    """
    try:
        text = " ".join(str(error).split())[:_MAX_ERROR_CHARS]
    except Exception:
        text = "it cannot be shown"
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    frame = (own_frames or list(frames))[-1:]
    place = "".join(f" ({Path(part.filename).name}, line {part.lineno})" for part in frame)
    kind = type(error).__name__
    return f"{kind}: {text}{place}" if text else f"{kind}{place}"


@dataclass(eq=False)
class ErrorReporter:
    """Log of all task errors, which writes only some to ZooKeeper.

    Thread-safe. At most ``topology.max.error.report.per.interval`` of a task in
    ``topology.error.throttle.interval.secs``. An error over the limit has no text and only adds to
    the count of its group.
    """

    conf: Mapping[str, Any]
    record: Callable[[int, str, str, int, str], None]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        # Seconds, and number of errors with a text in them.
        self._interval = float(self.conf.get("topology.error.throttle.interval.secs") or 10)
        self._max_reports = int(self.conf.get("topology.max.error.report.per.interval") or 5)
        self._lock = threading.Lock()
        self._windows: dict[int, tuple[float, int]] = {}
        """Task -> (start of the window, errors in it)."""

    def __call__(self, task: int, component: str, error: BaseException, activity: str) -> None:
        """Log the error, and record it.

        Unless the task has reached its limit.
        """
        now = self.clock()
        task_fields = {"task": task, "component": component}
        with self._lock:
            start, number = self._windows.get(task, (now, 0))
            if now - start > self._interval:
                start = now
                number = 0
            number += 1
            self._windows[task] = (start, number)
        text = ""
        if number <= self._max_reports:
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            # A file name in a message may have bytes that are not UTF-8; log and ZooKeeper must be.
            text = mask_text(f"{activity}: {trace.encode('utf-8', 'backslashreplace').decode()}")
            # Without the end of the traceback, which would be an empty line.
            _log.error("task %d (%s): %s", task, component, text.rstrip(), extra=task_fields)
        elif number == self._max_reports + 1:
            # The log of a bolt that fails for every tuple must stay readable.
            _log.error(
                "task %d (%s): more than %d errors in %g s, more are only counted",
                task,
                component,
                self._max_reports,
                self._interval,
                extra=task_fields,
            )
        self.record(task, component, text, int(time.time()), error_group(error, activity))


def error_group(error: BaseException, activity: str) -> str:
    """Return type and place of an error: the same for every replay of a tuple.

    Without a traceback, the message is the place.
    """
    trace = error.__traceback__
    if trace is None:
        place = str(error)
    else:
        while trace.tb_next is not None:
            trace = trace.tb_next
        code = trace.tb_frame.f_code
        place = f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}"
    group = mask_text(f"{activity}: {type(error).__name__} {place}")[:300]
    return group.encode("utf-8", "backslashreplace").decode()
