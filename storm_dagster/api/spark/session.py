"""Spark session of a worker process, and errors of Spark.

All Spark components of the process share the session. It is never the session that plans
placements. The conf names the cluster:
``topology.spark.remote``, else the cluster's ``spark.remote`` (Spark Connect), else
``spark.master`` (classic). The topology's archive is added to the session as an artifact, so that
the user's functions can be imported there. pyspark is imported when a Spark component opens.
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
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from storm_dagster.api.error_origins import is_of_system
from storm_dagster.api.spark.causes import innermost, reads_like_outage
from storm_dagster.host.requirements import needs
from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import (
    Conflict,
    InvalidTopology,
    StormDagsterError,
    Unavailable,
    error_text,
)
from storm_dagster.model.fusion import SPARK_CLASS_KEY
from storm_dagster.security.server_identity import TrustedServers
from storm_dagster.security.spark_remote import (
    ClusterSpark,
    add_python_archive,
    query_session_id,
    remote_with_session,
    with_spark_token,
)
from storm_dagster.spark.link import (
    close_at_exit,
    limit_retries,
    open_channel,
    probe,
    release_session,
    untrusted_server,
)
from storm_dagster.spark.session_keys import KeysResult, read_back, set_keys, string_keys

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)
# Remedy of a Spark that does not answer.
_START = "start it, or set topology.spark.remote / spark.master to one that runs"
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
_lock = threading.RLock()
"""Guards ``_sessions``: several tasks may open the session at once."""
_sessions: dict[tuple[str, str, str], Any] = {}
"""(kind of target, URL, code) -> session."""
_key_results: weakref.WeakKeyDictionary[Any, KeysResult] = weakref.WeakKeyDictionary()
"""Session -> its keys of ``topology.spark.conf`` that have no effect; without an entry all have."""
_OWN_KEYS = {
    # The owner of a query fetches its last reports every second; the default is a hundred.
    "spark.sql.streaming.numRecentProgressUpdates": "20"
}
"""Keys of every session; ``topology.spark.conf`` overrides them."""


def class_conf(component: type) -> dict[str, Any]:
    """Conf that marks a user's class of Spark components; empty for the classes of this library.

    Nimbus has no code of users: it finds the Spark components of a topology by their names and this
    mark.
    """
    if component.__module__.startswith("storm_dagster.api."):
        return {}
    return {SPARK_CLASS_KEY: True}


class SparkAway(Unavailable):
    """Spark gives a worker no session."""


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


def is_session_loss(error: BaseException, session: Any) -> bool:
    """True if the error means that session or server is gone.

    With a ``session``, a job of it must fail, too: an error of the user's code may have a similar
    text.
    """
    if not reads_like_outage(error):
        return False
    return session is None or not answers(session)


def answers(session: Any) -> bool:
    """True if Spark runs a job of the session."""
    try:
        for (kind, url, _), own_session in list(_sessions.items()):
            if own_session is session and kind == "remote":
                # The probe fails at once: a call to a server that is gone takes two seconds.
                probe(url)
        return session.range(1).count() == 1
    except Exception:
        return False


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
    cluster: ClusterSpark | None = None,
) -> "SparkSession":
    """The session of this process for that conf, created at first use.

    Raises :class:`Unavailable` if Spark is not reachable, or does not accept the archive.

    ``archive`` is the topology's archive; a session gets it once. With ``code``, the id of the
    topology's code, all workers share a Connect session that outlives them, so that a worker finds
    the queries that another worker started. ``cluster`` has the URLs that the cluster's conf names,
    and whom it trusts: no other server gets the cluster's token, or anything.
    """
    target = spark_target(conf)
    with _lock:
        session = _sessions.get((*target, code))
        if session is None:
            session = _connect(target, conf, code, cluster or ClusterSpark())
            if archive is not None and archive.is_file():
                _provide_archive(session, target, archive)
            _sessions[(*target, code)] = session
        return session


def drop_worker_session(conf: Mapping[str, Any], lost: Any = None, code: str = "") -> None:
    """Drop the lost session of that conf and code: the next use creates a new one.

    With ``lost``, only if it is still the current session: another component may have replaced it.
    The new session gets a new id, because Spark permanently refuses the id of a stopped Connect
    session.
    """
    target = spark_target(conf)
    with _lock:
        if lost is not None and _sessions.get((*target, code)) is not lost:
            return
        session = _sessions.pop((*target, code), None)
    if session is not None:
        _abandon(session, target)


def report_keys(component: Any, subject: str, session: Any) -> None:
    """Report the keys of ``topology.spark.conf`` that have no effect in a new session.

    It is one error of the component, which continues without them: topologies of an earlier
    release, which ignored such keys, go on. ``subject`` names component and task.
    """
    result = _key_results.get(session)
    if result is not None and result.sentences:
        sentences = "; ".join(result.sentences)
        component.raise_exception(InvalidTopology(f"{subject}: topology.spark.conf: {sentences}"))


def _keep_result(session: Any, result: KeysResult) -> None:
    """Remember the keys of a session that have no effect."""
    _key_results[session] = result
    for sentence in result.sentences:
        _log.warning("topology.spark.conf: %s", sentence)


def outage(conf: Mapping[str, Any], error: BaseException) -> Unavailable:
    """The error of a component whose session was lost.

    It names Spark's address, the cause, and the remedy.
    """
    url = spark_target(conf)[1]
    return Unavailable(mask_text(f"Spark at {url} is out of reach ({innermost(error)}): {_START}"))


def _abandon(session: Any, target: tuple[str, str]) -> None:
    """Close this process's side of a session whose server may be gone."""
    try:
        if target[0] == "remote":
            # Not stop(), which would retry for long if the server is gone. A server that runs drops
            # the idle session.
            session.client.close()
        else:
            session.stop()
    except Exception as error:
        _log.info("the lost Spark session did not stop cleanly: %s", error_text(error))


def release_sessions() -> None:
    """Release the sessions that end with this process.

    A process that ends without exit hooks calls it, as workers do.
    """
    for (kind, url, code), session in list(_sessions.items()):
        if kind == "remote" and not code and not _has_session_id(url):
            release_session(session, url)


def _has_session_id(url: str) -> bool:
    return ";session_id=" in url


def archive_of(context: Any) -> Path | None:
    """The topology's packed archive on this host, beside the unpacked one.

    ``None`` in a harness.
    """
    unpacked = getattr(context, "archive", None)
    return Path(unpacked).parent / "stormjar.jar" if unpacked else None


def cluster_spark_of(context: Any) -> ClusterSpark:
    """What the cluster's conf says of Spark Connect: it names no server in a harness."""
    return getattr(context, "_cluster_spark", ClusterSpark())


def resolve_function(reference: str) -> Any:
    """The function that ``"module:function"`` names.

    Raises :class:`InvalidTopology` if it does not exist.
    """
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
    """Raise :class:`InvalidTopology` if ``reference`` does not name a function.

    A module that cannot be imported on this host is not checked.
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
    code: str,
    cluster: ClusterSpark,
) -> Any:
    """Create the session of a target: (kind, URL). The other arguments: :func:`worker_session`.

    Raises :class:`Unavailable` if Spark is not reachable. Removes variables of the environment that
    would choose another Spark.
    """
    with needs("a Spark component"):
        from pyspark.sql import SparkSession

    kind, url = target
    spark_conf = {**_OWN_KEYS, **string_keys(conf.get("topology.spark.conf"))}
    # Inherited from a parent process, this would override the conf.
    os.environ.pop("SPARK_REMOTE", None)
    try:
        if kind == "remote":
            probe(url, trusted=cluster.trusted)
            channel = _Channel(with_spark_token(url, cluster.servers), cluster.trusted)
            return _connect_remote(channel, spark_conf, code)
        # Inherited too, this would make pyspark connect to a Connect server.
        os.environ.pop("SPARK_CONNECT_MODE_ENABLED", None)
        app_name = str(conf.get("topology.name") or "topology")
        builder = SparkSession.builder.master(url).appName(app_name)
        session = builder.config(map={"spark.ui.enabled": "false", **spark_conf}).getOrCreate()
        _keep_result(session, read_back(session, spark_conf))
        return session
    except Exception as error:
        refusal = untrusted_server(error)
        if refusal is not None:
            raise refusal from None
        cause = innermost(error)
        remedy = _START
        if kind == "master" and "IllegalArgument" in cause:
            remedy = "correct the values of topology.spark.conf"
        if _has_session_id(url) and "SESSION_CLOSED" in cause:
            remedy = (
                "the id of a closed session is refused permanently, "
                "so name another session_id in the URL, or none"
            )
        message = f"Spark at {url} does not answer ({cause}): {remedy}"
        raise SparkAway(mask_text(message)) from error


class _Channel(NamedTuple):
    """A Connect server of a worker."""

    url: str
    """Its URL, with the token if the server gets one."""
    trusted: TrustedServers
    """Servers that may be sent to."""


def _connect_remote(channel: _Channel, spark_conf: Mapping[str, str], code: str) -> Any:
    """The Connect session of the code, or without it one of this process.

    A session id in its URL has precedence over both. Only a session of this process ends with it.
    """
    has_id = _has_session_id(channel.url)
    if not code:
        return _attach(channel, str(uuid.uuid4()), spark_conf, own=not has_id)
    # Spark refuses the id of a closed session permanently: the next number makes another id, the
    # same in all workers.
    for number in itertools.count():
        try:
            return _attach(channel, query_session_id(code, number), spark_conf, own=False)
        except Exception as error:
            if has_id or "SESSION_CLOSED" not in str(error):
                raise


def _attach(channel: _Channel, session_id: str, spark_conf: Mapping[str, str], own: bool) -> Any:
    """The Connect session of that id, created if it does not exist.

    An id in the channel's URL has precedence. With ``own`` the session ends with this process.
    """
    from pyspark.sql.connect.session import SparkSession

    url = channel.url
    # Without it pyspark.sql.functions look for a classic context.
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    remote = remote_with_session(url, session_id)
    builder = SparkSession.builder.channelBuilder(open_channel(remote, channel.trusted))
    session: Any = builder.create()
    # Before the first call, so that the builder gets no conf: it would send that first.
    limit_retries(session)
    try:
        _keep_result(session, set_keys(session, spark_conf))
        session.range(1).count()
    except Exception:
        # A bolt that waits for Spark retries every few seconds: open clients would add up.
        session.client.close()
        raise
    close_at_exit(session, url if own else "")
    return session


def _provide_archive(session: Any, target: tuple[str, str], archive: Path) -> None:
    """Add the archive to the session.

    If that fails, the session is abandoned and :class:`Unavailable` is raised.
    """
    try:
        _add_archive(session, target, archive)
    except Exception as error:
        _abandon(session, target)
        message = (
            f"Spark at {target[1]} does not take the archive of the topology "
            f"({innermost(error)}): look at its log, and at the free disk of its host"
        )
        raise SparkAway(mask_text(message)) from error


def _add_archive(session: Any, target: tuple[str, str], archive: Path) -> None:
    """Add the archive as an artifact.

    It is a copy named ``.zip``, since Spark identifies Python archives by suffix.
    """
    from pyspark import SparkFiles

    if target[0] == "remote":
        with tempfile.TemporaryDirectory(prefix="storm-artifact-") as folder:
            copy = Path(folder) / "topology.zip"
            shutil.copyfile(archive, copy)
            add_python_archive(session, copy)
    else:
        # A local Spark compares the file with its own copy at each job: it stays in the folder that
        # ends with the driver.
        copy = Path(SparkFiles.getRootDirectory()).parent / "topology.zip"
        shutil.copyfile(archive, copy)
        session.sparkContext.addPyFile(str(copy))
