"""Spark session of a worker process, and errors of Spark.

All Spark components in the process share it. It is never the session that plans placements. The
conf names the cluster: ``topology.spark.remote``, else the cluster's ``spark.remote`` (Spark
Connect), else ``spark.master`` (classic). The topology's archive is added to the session as an
artifact, so that the user's functions can be imported there. pyspark is imported when a Spark
component opens.
"""

import importlib
import itertools
import logging
import operator
import os
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storm_dagster.host.requirements import needs
from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import Conflict, InvalidTopology, StormDagsterError, Unavailable
from storm_dagster.security.spark_remote import (
    add_python_archive,
    query_session_id,
    remote_with_session,
    with_spark_token,
)
from storm_dagster.spark.link import (
    SESSION_GONE,
    close_at_exit,
    limit_retries,
    probe,
    release_session,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)
_START = "start it, or set topology.spark.remote / spark.master to one that runs"
# Error messages of a lost server or an expired session.
_SESSION_LOSS = re.compile(
    "|".join(SESSION_GONE) + "|INVALID_HANDLE|UNAVAILABLE|Connection refused|Socket closed|"
    "failed to connect to|RETRIES_EXCEEDED|No active Spark session|SparkContext was shut down|"
    "stopped SparkContext"
)
_SLOW_START = "Python worker failed to connect back"
# Error messages for a checkpoint whose query had other state or other sources.
_CHANGED = re.compile(
    "STATEFUL_OPERATOR_NOT_MATCH|SCHEMA_NOT_COMPATIBLE|schema for existing state|"
    "sources in the checkpoint"
)
# Error messages for a checkpoint with two runs.
_TAKEN = re.compile("CONCURRENT_STREAM_LOG_UPDATE|CONCURRENT_QUERY|with same id is already active")
_lock = threading.RLock()
_sessions: dict[tuple[str, str, str], Any] = {}


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
        # Spark's messages may contain a number that changes each time.
        if len(self._reported) < 20:
            self._reported.add(key)
        self._component.raise_exception(error)

    def clear(self) -> None:
        """Note a success: later errors are reported."""
        self._reported.clear()


def is_session_loss(error: BaseException, session: Any) -> bool:
    """True if the error comes from a lost session or server.

    The error of a user's function may have the same text, so the ``session`` decides, if there is
    one.
    """
    texts = [f"{type(cause).__name__}: {cause}" for cause in _causes(error)]
    similar = any(_SESSION_LOSS.search(text) for text in texts)
    return similar and (session is None or not answers(session))


def answers(session: Any) -> bool:
    """True if Spark runs a job of the session."""
    try:
        for (kind, url, _), own_session in [*_sessions.items()]:
            if own_session is session and kind == "remote":
                # Fails at once; a call to a dead server takes two seconds.
                probe(url)
        return session.range(1).count() == 1
    except Exception:
        return False


def _causes(error: BaseException) -> list[BaseException]:
    """The error, and the errors that it was raised from, or while they were handled."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes


def retry_if_slow(call: Callable[[], Any]) -> Any:
    """Return the result of a call, with two retries if Spark's Python is too slow.

    Spark starts a Python process for the call, and gives up if it does not connect in time.
    """
    for _ in range(2):
        try:
            return call()
        except Exception as error:
            if _SLOW_START not in str(error):
                raise
            _log.info("Spark waited in vain for its Python process: it starts another one")
    return call()


def missing_connector(error: BaseException, version: str) -> str | None:
    """The remedy, if the error is that Spark lacks a data source; else ``None``."""
    match = re.search(r"Failed to find (?:the )?data source: ([^\s.]+(?:\.[^\s.]+)*)", str(error))
    if match is None:
        return None
    name = match[1]
    package = "GROUP:ARTIFACT:VERSION"
    if name == "kafka":
        package = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{version}"
    return (
        f"Spark has no data source {name!r}: add its connector where Spark starts, "
        f"spark.jars.packages: {package} (in storm.yaml for the embedded server, in "
        "topology.spark.conf with spark.master, spark-submit --packages for a server of your own), "
        "or register a Python data source in the source function"
    )


def is_taken(error: BaseException) -> bool:
    """True if Spark reports that another run of the query uses its checkpoint."""
    return _TAKEN.search(str(error)) is not None


def query_error(
    error: Exception, title: str, checkpoint: str, version: str, session: Any = None
) -> StormDagsterError:
    """The error of a streaming query in one sentence with the remedy.

    ``title`` names component, task and function. The error is :class:`InvalidTopology` if the query
    fails whenever it runs, :class:`Conflict` if another run has its checkpoint, else
    :class:`Unavailable`.
    """
    if isinstance(error, StormDagsterError):
        return error
    text = str(error)
    cause = innermost(error)
    missing = missing_connector(error, version)
    if missing is not None:
        return InvalidTopology(f"{title}: {missing}")
    if _SLOW_START in text:
        return Unavailable(
            f"{title}: no Python process of Spark's started within 10 s, so its host is too busy "
            f"({cause})"
        )
    batch_failed = "STREAM_FAILED" in text
    if not batch_failed and is_session_loss(error, session):
        return Unavailable(
            f"{title}: Spark is out of reach ({cause}): start it; the query goes on from the "
            "checkpoint"
        )
    if _CHANGED.search(text):
        return InvalidTopology(
            f"{title} cannot continue from checkpoint {checkpoint} ({cause}): undo the change of "
            "its sources, grouping or state, or name a new checkpoint, with which everything is "
            "read again"
        )
    if is_taken(error):
        return Conflict(
            f"{title}: another run of the query uses checkpoint {checkpoint}: give each a "
            "checkpoint of its own"
        )
    if not batch_failed or type(error).__name__ in ("AnalysisException", "ParseException"):
        return InvalidTopology(
            f"{title}: Spark refuses the query or its sink ({cause}): correct it; it is tried again"
        )
    return Unavailable(
        f"{title}: a batch failed ({cause}): it is repeated from the checkpoint until it succeeds"
    )


def innermost(error: BaseException) -> str:
    """Type of the error, and the line of its text that explains it.

    In a Python traceback this is the line below the last frame, else the first line.
    """
    kind = type(error).__name__
    details = getattr(error, "details", None)
    if callable(details) and details():
        # An error of gRPC: the first line of its text is "<_InactiveRpcError of RPC that terminated
        # with:".
        return f"{kind}: {details():.500}"
    lines = str(error).partition("\n\nJVM stacktrace:")[0].splitlines()
    last_frame: int | None = None
    for number, line in enumerate(lines):
        if line.lstrip().startswith('File "'):
            last_frame = number
    if last_frame is not None:
        for line in lines[last_frame:]:
            if line.strip() and not line[0].isspace():
                return f"{kind}: {line.strip():.500}"
    for line in lines:
        if line.strip():
            return f"{kind}: {line.strip():.500}"
    return kind


def spark_target(conf: Mapping[str, Any]) -> tuple[str, str]:
    """The Spark of this conf: ``("remote", url)`` or ``("master", url)``.

    Raises :class:`InvalidTopology` if the conf names no Spark.
    """
    for key in ("topology.spark.remote", "spark.remote", "spark.master"):
        if conf.get(key):
            return key.rpartition(".")[2], str(conf[key])
    raise InvalidTopology(
        "a Spark component runs in this topology, but its conf names no Spark: "
        "set topology.spark.remote (sc://host:port), spark.remote or spark.master"
    )


def worker_session(
    conf: Mapping[str, Any],
    archive: Path | None = None,
    code: str = "",
    cluster_servers: Sequence[str] = (),
) -> "SparkSession":
    """The session of this process for that conf, created at first use.

    Raises :class:`Unavailable` if Spark is not reachable, or does not take the archive.

    ``archive`` is the topology's archive; a session gets it once. With ``code``, the id of the
    topology's code, all workers share a Connect session that outlives them. Each worker then finds
    the queries that another one started. ``cluster_servers`` are the URLs that the cluster's conf
    names: no other server gets the cluster's token.
    """
    target = spark_target(conf)
    with _lock:
        session = _sessions.get((*target, code))
        if session is None:
            session = _connect(target, conf, code, cluster_servers)
            if archive is not None and archive.is_file():
                _provide_archive(session, target, archive)
            _sessions[(*target, code)] = session
        return session


def drop_worker_session(conf: Mapping[str, Any], lost: Any = None, code: str = "") -> None:
    """Drop the lost session of that conf and code: the next use creates a new one.

    With ``lost``, only if it is still the current one: another component may have replaced it. The
    new session gets a new id, because the id of a stopped Connect session is refused permanently.
    """
    target = spark_target(conf)
    with _lock:
        if lost is not None and _sessions.get((*target, code)) is not lost:
            return
        session = _sessions.pop((*target, code), None)
    if session is not None:
        _abandon(session, target)


def outage(conf: Mapping[str, Any], error: BaseException) -> Unavailable:
    """The error of a component whose session was lost.

    It names the address of Spark, the reason and the remedy.
    """
    _, url = spark_target(conf)
    return Unavailable(mask_text(f"Spark at {url} is out of reach ({innermost(error)}): {_START}"))


def _abandon(session: Any, target: tuple[str, str]) -> None:
    """Close this process's side of a session whose server may be dead."""
    kind, _ = target
    try:
        if kind == "remote":
            # Stopping a Connect session would retry for long without its server, which drops an
            # idle session anyway.
            session.client.close()
        else:
            session.stop()
    except Exception as error:
        _log.info("the lost Spark session did not stop cleanly: %s", error)


def release_sessions() -> None:
    """Release the sessions that end with this process.

    For processes that end without exit hooks, as workers do.
    """
    for (kind, url, code), session in [*_sessions.items()]:
        if kind == "remote" and not code and ";session_id=" not in url:
            release_session(session, url)


def archive_of(context: Any) -> Path | None:
    """The topology's packed archive on this host, beside the unpacked one.

    ``None`` in a harness.
    """
    unpacked = getattr(context, "archive", None)
    return Path(unpacked).parent / "stormjar.jar" if unpacked else None


def cluster_servers_of(context: Any) -> Sequence[str]:
    """The Spark Connect servers that the cluster's conf names: none in a harness."""
    return getattr(context, "_cluster_spark", ())


def resolve_function(reference: str) -> Any:
    """Find ``"module:function"``; :class:`InvalidTopology` if it is missing."""
    module_name, colon, name = reference.partition(":")
    if not colon or not module_name or not name:
        raise InvalidTopology(f"{reference!r} is not of the form 'module:function'")
    try:
        target: Any = operator.attrgetter(name)(importlib.import_module(module_name))
    except (ImportError, AttributeError) as error:
        raise InvalidTopology(f"cannot find {reference!r}: {error}") from None
    if not callable(target):
        raise InvalidTopology(f"{reference!r} is a {type(target).__name__}, not a function")
    return target


def check_function(reference: Any, owner: str) -> None:
    """Raise :class:`InvalidTopology` if ``reference`` names no function.

    A module that cannot be imported here is not checked.
    """
    try:
        resolve_function(str(reference))
    except InvalidTopology as error:
        # A module may need packages that only the workers have.
        if not isinstance(error.__context__, ImportError):
            raise InvalidTopology(f"{owner}: {error.message}") from None


def _connect(
    target: tuple[str, str],
    conf: Mapping[str, Any],
    code: str = "",
    cluster_servers: Sequence[str] = (),
) -> Any:
    with needs("a Spark component"):
        from pyspark.sql import SparkSession

    kind, url = target
    named = ";session_id=" in url
    # The owner of a query reads its last reports every second; the default number is a hundred.
    extra = {"spark.sql.streaming.numRecentProgressUpdates": "20"}
    for key, value in dict(conf.get("topology.spark.conf") or {}).items():
        extra[str(key)] = str(value)
    # Inherited from a parent process, this would override the conf.
    os.environ.pop("SPARK_REMOTE", None)
    try:
        if kind == "remote":
            probe(url)
            url_with_token = with_spark_token(url, cluster_servers)
            ends_with_process = not code and not named
            for number in itertools.count():
                session_id = query_session_id(code, number) if code else str(uuid.uuid4())
                try:
                    return _attach(url_with_token, session_id, extra, ends_with_process)
                except Exception as error:
                    if not code or named or "SESSION_CLOSED" not in str(error):
                        raise
        # Inherited, too, this would make pyspark connect to a Connect server.
        os.environ.pop("SPARK_CONNECT_MODE_ENABLED", None)
        name = str(conf.get("topology.name") or "topology")
        builder = SparkSession.builder.master(url).appName(name)
        return builder.config(map={"spark.ui.enabled": "false", **extra}).getOrCreate()
    except Exception as error:
        cause = innermost(error)
        remedy = _START
        if named and "SESSION_CLOSED" in cause:
            remedy = (
                "a closed session's id is refused permanently, so name another session_id in the "
                "URL, or none"
            )
        text = f"Spark at {url} does not answer ({cause}): {remedy}"
        raise Unavailable(mask_text(text)) from error


def _attach(url: str, session_id: str, extra: Mapping[str, str], own: bool) -> Any:
    """The Connect session of that id, created if there is none.

    ``url`` has the token, if the server gets one. With ``own`` the session ends with this process.
    """
    from pyspark.sql import SparkSession

    session: Any = SparkSession.builder.remote(remote_with_session(url, session_id)).create()
    # Before the first call, so that the builder gets no conf: it would send that first.
    limit_retries(session)
    try:
        session.conf._set_all(configs=dict(extra), silent=True)
        session.range(1).count()
    except Exception:
        # A bolt that waits for Spark retries every few seconds: open clients would accumulate.
        session.client.close()
        raise
    close_at_exit(session, url if own else "")
    return session


def _provide_archive(session: Any, target: tuple[str, str], archive: Path) -> None:
    """Add the archive.

    If that fails, the session is closed, and :class:`Unavailable` is raised.
    """
    kind, url = target
    try:
        _add_archive(session, kind, archive)
    except Exception as error:
        _abandon(session, target)
        text = (
            f"Spark at {url} does not take the archive of the topology ({innermost(error)}): look "
            "at its log, and at the free disk of its host"
        )
        raise Unavailable(mask_text(text)) from error


def _add_archive(session: Any, kind: str, archive: Path) -> None:
    """Add the archive as an artifact.

    It is a copy named ``.zip``, since Spark identifies Python archives by suffix.
    """
    from pyspark import SparkFiles

    if kind != "remote":
        # A local Spark compares the file with its own copy at each job, so it must stay in the
        # folder that is removed with the driver.
        copy = Path(SparkFiles.getRootDirectory()).parent / "topology.zip"
        shutil.copyfile(archive, copy)
        session.sparkContext.addPyFile(str(copy))
        return
    with tempfile.TemporaryDirectory(prefix="storm-artifact-") as folder:
        copy = Path(folder) / "topology.zip"
        shutil.copyfile(archive, copy)
        add_python_archive(session, copy)
