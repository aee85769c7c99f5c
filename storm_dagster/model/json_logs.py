"""Logs as lines of JSON (``storm.log.format: json``), for log collectors."""

import json
import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

# Attributes of every record: any other one is an ``extra`` of the call.
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formatter of one line of JSON for each record.

    A line has ``time`` (UTC), ``level``, ``logger``, ``thread``, ``message``, and ``exception``
    after an error. It also has the constant fields of the process (``fixed``: role, topology, slot)
    and the ``extra`` of a call (topology, task, run). A value of a type that JSON lacks becomes its
    text.
    """

    def __init__(self, fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self._fixed = dict(fixed)
        self.add: Callable[[logging.LogRecord], Mapping[str, Any]] | None = None
        """Function that returns more fields of a record, by the thread that wrote it."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line without its end."""
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname,
            "logger": record.name,
            "thread": record.threadName,
            "message": record.getMessage(),
            **self._fixed,
            **(self.add(record) if self.add is not None else {}),
            **{key: value for key, value in record.__dict__.items() if key not in _STANDARD},
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)
