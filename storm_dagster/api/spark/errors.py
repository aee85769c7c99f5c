"""Errors of Spark components: sentences with a remedy, each reported once, and their retries."""

import logging
import re
from collections.abc import Callable
from typing import Any

from storm_dagster.api.error_origins import is_of_system
from storm_dagster.api.spark.causes import innermost
from storm_dagster.api.spark.session import is_session_loss
from storm_dagster.model.errors import (
    Conflict,
    InvalidTopology,
    StormDagsterError,
    Unavailable,
)

_log = logging.getLogger(__name__)
_SLOW_START = "Python worker failed to connect back"
"""Error message of Spark when its Python process does not start within 10 s."""
_CHANGED = re.compile(
    "STATEFUL_OPERATOR_NOT_MATCH|SCHEMA_NOT_COMPATIBLE|schema for existing state|"
    "sources in the checkpoint"
)
"""Error messages of a checkpoint whose query had other state or other sources."""
_TAKEN = re.compile("CONCURRENT_STREAM_LOG_UPDATE|CONCURRENT_QUERY|with same id is already active")
"""Error messages of a checkpoint with two runs."""
_MAX_REPORTED = 20
"""Number of errors that one component remembers as reported; others are reported each time."""
_START_TRIES = 3
"""Number of times that a query is started while Spark's Python process starts too slowly."""


class ErrorsOnce:
    """Report of repeated errors, once until the next success."""

    def __init__(self, component: Any) -> None:
        self._component = component
        self._reported: set[str] = set()

    def report(self, error: BaseException) -> None:
        """Report the error, unless it was reported since the last success.

        Two errors with the same innermost cause are one.
        """
        key = innermost(error)
        if key in self._reported:
            return
        # Spark's messages may contain a number that changes each time: the set is bounded.
        if len(self._reported) < _MAX_REPORTED:
            self._reported.add(key)
        self._component.raise_exception(error)

    def clear(self) -> None:
        """Register a success, after which each error is reported once more."""
        self._reported.clear()


def retry_slow_start(call: Callable[[], Any]) -> Any:
    """Call, at most three times while a Python process of Spark starts too slowly."""
    tries = 1
    while True:
        try:
            return call()
        except Exception as error:
            if tries == _START_TRIES or _SLOW_START not in str(error):
                raise
            _log.info("the Python process of Spark did not start in time: it starts another one")
        tries += 1


def missing_connector(error: BaseException, version: str) -> str | None:
    """The remedy, if the error is that Spark lacks a data source; else ``None``."""
    match = re.search(r"Failed to find (?:the )?data source: ([^\s.]+(?:\.[^\s.]+)*)", str(error))
    if match is None:
        return None
    name = match[1]
    if name == "kafka":
        package = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{version}"
    else:
        package = "GROUP:ARTIFACT:VERSION"
    return (
        f"Spark has no data source {name!r}: add its connector where Spark starts, "
        f"spark.jars.packages: {package} (in storm.yaml for the embedded server, in "
        "topology.spark.conf with spark.master, spark-submit --packages for a server of your own), "
        "or register a Python data source in the source function"
    )


def is_taken(error: BaseException) -> bool:
    """True if the error is that another run of the query uses its checkpoint."""
    return _TAKEN.search(str(error)) is not None


def query_error(
    error: Exception, subject: str, checkpoint: str, version: str, session: Any = None
) -> StormDagsterError:
    """The error of a streaming query in one sentence with the remedy.

    ``subject`` names component, task and function, ``version`` is that of Spark. Returns
    :class:`InvalidTopology` if the query fails whenever it runs, :class:`Conflict` if another run
    has its checkpoint, else :class:`Unavailable`, with ``error`` as its cause: a report shows file
    and line of it. An error of this package is returned unchanged.
    """
    if isinstance(error, StormDagsterError):
        return error
    readable = _query_error(error, subject, checkpoint, version, session)
    readable.__cause__ = error
    return readable


def _query_error(
    error: Exception, subject: str, checkpoint: str, version: str, session: Any
) -> StormDagsterError:
    text = str(error)
    cause = innermost(error)
    missing = missing_connector(error, version)
    if missing is not None:
        return InvalidTopology(f"{subject}: {missing}")
    if _SLOW_START in text:
        return Unavailable(
            f"{subject}: no Python process of Spark's started within 10 s, "
            f"so its host is too busy ({cause})"
        )
    if "STREAM_FAILED" not in text and is_session_loss(error, session):
        return Unavailable(
            f"{subject}: Spark is out of reach ({cause}): "
            "start it; the query continues from the checkpoint"
        )
    if _CHANGED.search(text):
        return InvalidTopology(
            f"{subject} cannot continue from checkpoint {checkpoint} ({cause}): "
            "undo the change of its sources, grouping or state, or name a new checkpoint, "
            "with which all data is read once more"
        )
    if is_taken(error):
        return Conflict(
            f"{subject}: another run of the query uses checkpoint {checkpoint}: "
            "give each its own checkpoint"
        )
    if "STREAM_FAILED" not in text and not is_of_system(error):
        # The function raised it, before Spark got a query.
        return InvalidTopology(f"{subject} raises {cause}: correct it; it is retried")
    is_refused = type(error).__name__ in ("AnalysisException", "ParseException")
    if is_refused or "STREAM_FAILED" not in text:
        return InvalidTopology(
            f"{subject}: Spark refuses the query or its sink ({cause}): correct it; it is retried"
        )
    return Unavailable(
        f"{subject}: a batch failed ({cause}): it is repeated from the checkpoint until it succeeds"
    )
