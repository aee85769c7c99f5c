"""Errors of Spark: which mean a lost session, and what each one says to the author of the topology."""

from __future__ import annotations

import re
from typing import Any

from storm_dagster.model.errors import Conflict, InvalidTopology, StormDagsterError, Unavailable

# Error messages of a lost server or an expired session. Over Connect they are strings in exceptions of several
# classes, grpc's among them.
_SESSION_LOSS = re.compile(
    "SESSION_CLOSED|SESSION_NOT_FOUND|SESSION_CHANGED|INVALID_HANDLE|UNAVAILABLE|Connection refused|Socket closed|"
    "failed to connect|SparkContext was shut down|stopped SparkContext"
)
# What Spark says of a checkpoint whose query had other state or other sources, and of one with two runs.
_CHANGED = re.compile(
    "STATEFUL_OPERATOR_NOT_MATCH|SCHEMA_NOT_COMPATIBLE|schema for existing state|sources in the checkpoint"
)
_TAKEN = re.compile("CONCURRENT_STREAM_LOG_UPDATE|CONCURRENT_QUERY|with same id is already active")


class ErrorsOnce:
    """Report of repeated errors, once until the next success."""

    def __init__(self, component: Any) -> None:
        self._component = component
        self._reported: set[str] = set()

    def report(self, error: BaseException) -> None:
        """Report the error, unless one with the same first line was reported since the last success."""
        key = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if key in self._reported:
            return
        # Spark's messages may contain a number that changes each time.
        if len(self._reported) < 20:
            self._reported.add(key)
        self._component.raise_exception(error)

    def clear(self) -> None:
        """Note a success: later errors are reported again."""
        self._reported.clear()


def is_session_loss(error: BaseException) -> bool:
    """Whether the error means that the session or its server is gone, so that a new session is needed."""
    return _SESSION_LOSS.search(f"{type(error).__name__}: {error}") is not None


def missing_connector(error: BaseException, version: str) -> str | None:
    """The remedy, if the error is that Spark lacks a data source; else ``None``."""
    found = re.search(r"Failed to find (?:the )?data source: ([^\s.]+(?:\.[^\s.]+)*)", str(error))
    if found is None:
        return None
    name = found[1]
    package = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{version}" if name == "kafka" else "GROUP:ARTIFACT:VERSION"
    return (
        f"Spark has no data source {name!r}: add its connector where Spark starts, spark.jars.packages: {package} "
        "(in storm.yaml for the embedded server, in topology.spark.conf with spark.master, spark-submit --packages for a "
        "server of your own), or register a Python data source in the source function"
    )


def is_taken(error: BaseException) -> bool:
    """Whether Spark says that another run of the query uses its checkpoint."""
    return _TAKEN.search(str(error)) is not None


def query_error(error: BaseException, what: str, checkpoint: str, version: str) -> StormDagsterError:
    """The error of a streaming query in one sentence with the remedy. ``what`` names component, task and function.

    :class:`InvalidTopology` if the query is wrong whenever it runs, :class:`Conflict` if another run has its checkpoint,
    else :class:`Unavailable`.
    """
    if isinstance(error, StormDagsterError):
        return error
    text, cause = str(error), _innermost(error)
    missing = missing_connector(error, version)
    if missing is not None:
        return InvalidTopology(f"{what}: {missing}")
    if is_session_loss(error) and "STREAM_FAILED" not in text:
        return Unavailable(f"{what}: Spark is out of reach ({cause}): start it; the query goes on from the checkpoint")
    if _CHANGED.search(text):
        return InvalidTopology(
            f"{what} cannot continue from checkpoint {checkpoint} ({cause}): undo the change of its sources, grouping or "
            "state, or name a new checkpoint, with which everything is read again"
        )
    if is_taken(error):
        return Conflict(
            f"{what}: another run of the query uses checkpoint {checkpoint}: give each a checkpoint of its own"
        )
    if type(error).__name__ in ("AnalysisException", "ParseException") or "STREAM_FAILED" not in text:
        return InvalidTopology(f"{what}: Spark refuses the query or its sink ({cause}): correct it; it is tried again")
    return Unavailable(f"{what}: a batch failed ({cause}): it is repeated from the checkpoint until it succeeds")


def _innermost(error: BaseException) -> str:
    """The line that says what happened: of a Python traceback the one below its last frame, else the first."""
    lines = str(error).partition("\n\nJVM stacktrace:")[0].splitlines() or [""]
    frames = [number for number, line in enumerate(lines) if line.lstrip().startswith('File "')]
    below = [line for line in lines[frames[-1] :] if line.strip() and not line[0].isspace()] if frames else lines
    return f"{type(error).__name__}: {(below or lines)[0]:.500}"
