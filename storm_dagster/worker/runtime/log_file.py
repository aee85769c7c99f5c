"""Log of a worker: a file, or standard error if the disk refuses the file."""

import contextlib
import logging
import sys
from pathlib import Path


class WorkerLogFile(logging.FileHandler):
    """Handler that appends to a worker's file.

    Lines that the disk refuses go to standard error, without tracebacks.
    """

    def __init__(self, path: Path) -> None:
        # Appended to, and rotated by the supervisor, because standard error goes to the same file.
        super().__init__(path, encoding="utf-8")
        self._error: OSError | None = None
        """Refusal of the newest line; ``None`` if it was written."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record."""
        former_error = self._error
        self._error = None
        super().emit(record)
        if self._error is None:
            return
        text = f"{self.format(record)}\n"
        if former_error is None:
            text = f"{_refusal(self.baseFilename, self._error)}\n{text}"
        # Below a supervisor standard error is the same file: then the line is lost.
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def handleError(self, record: logging.LogRecord) -> None:
        """Keep the refusal of a disk; any other error is shown as usual."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._error = error
        else:
            super().handleError(record)


def open_worker_log(path: Path) -> tuple[logging.Handler, str]:
    """Handler of the worker's log, and the reason why it is standard error; empty for the file."""
    try:
        return WorkerLogFile(path), ""
    except OSError as error:
        return logging.StreamHandler(), _refusal(path, error)


def _refusal(path: Path | str, error: OSError) -> str:
    reason = error.strerror or error
    return f"the log {path} cannot be written ({reason}): its lines go to standard error"
