"""Logging: the standard library's loggers, rendered by structlog."""

import functools
import logging
import logging.handlers
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.json_logs import JsonFormatter

_log = logging.getLogger(__name__)

QUIET_STDERR = "STORM_DAGSTER_LOG_FILES_ONLY"
"""Environment variable that ``dev`` sets for its daemons, which then log to files alone."""
# Libraries whose records below a warning are left out of every log.
_NOISY = ("httpx", "httpcore", "kazoo", "asyncio", "urllib3", "py4j", "uvicorn.access")


@functools.cache
def _formatter(*, colors: bool) -> logging.Formatter:
    """The formatter of logs for people."""
    import structlog

    stamp = structlog.processors.TimeStamper(fmt="%Y-%m-%dT%H:%M:%S.%fZ", utc=True)
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(),
            stamp,
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            # The default, where rich is installed, takes up to a second for a traceback and shows
            # local variables, secrets among them.
            structlog.dev.ConsoleRenderer(
                colors=colors,
                pad_event_to=0,
                pad_level=False,
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ],
    )


def _set_levels(level: int) -> None:
    logging.getLogger().setLevel(level)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def configure_logging(*, verbose: bool = False) -> None:
    """Configure the log of a client verb, on standard error.

    It has warnings, and with ``verbose`` all records. structlog is imported at the first log
    record: most calls have none.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LazyFormatter())
    logging.getLogger().handlers[:] = [handler]
    _set_levels(logging.DEBUG if verbose else logging.WARNING)


class _LogFile(logging.handlers.RotatingFileHandler):
    """Log file of a daemon; lines that a full disk refuses are lost, which is reported once."""

    _is_reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Say on standard error that the disk refuses records; any other error as usual."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
            return
        if not self._is_reported:
            self._is_reported = True
            sys.stderr.write(
                f"{self.baseFilename} cannot be written ({sys.exc_info()[1]}): records are lost "
                "until the disk accepts them\n"
            )


class _LazyFormatter(logging.Formatter):
    """Formatter that imports structlog at the first record."""

    def format(self, record: logging.LogRecord) -> str:
        return _formatter(colors=sys.stderr.isatty()).format(record)


def configure_daemon_logging(
    home: Path,
    role: str,
    id: str,
    conf: ClusterConf | Mapping[str, Any],
    *,
    stderr_level: int = logging.NOTSET,
) -> None:
    """Configure the log of a daemon, to a file and standard error.

    The file is ``HOME/logs/<role>-<id>.log``. It is rotated at 10 MiB, with 3 backups. ``conf`` has
    ``storm.log.level`` and ``storm.log.format``. Standard error gets the records from
    ``stderr_level`` on, and none in a daemon of ``dev``, unless the disk refuses the file: then it
    is the only log, and a warning names it.
    """
    as_json: logging.Formatter | None = None
    if conf["storm.log.format"] == "json":
        as_json = JsonFormatter({"role": role, "id": id})
    path = home / "logs" / f"{role}-{id.replace('/', '_')}.log"
    handlers: list[logging.Handler] = []
    problem: OSError | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _LogFile(path, maxBytes=10 * 2**20, backupCount=3, encoding="utf-8")
        file.setFormatter(as_json or _formatter(colors=False))
        handlers.append(file)
    except OSError as error:
        problem = error
    # A daemon of ``dev`` whose file cannot be opened has no other log.
    if not os.environ.get(QUIET_STDERR) or problem is not None:
        stream = logging.StreamHandler(sys.stderr)
        stream.setFormatter(as_json or _formatter(colors=sys.stderr.isatty()))
        stream.setLevel(stderr_level)
        handlers.append(stream)
    logging.getLogger().handlers[:] = handlers
    _set_levels(getattr(logging, conf["storm.log.level"]))
    logging.captureWarnings(True)
    if problem is not None:
        _log.warning("%s cannot be written (%s): the log is on standard error", path, problem)
