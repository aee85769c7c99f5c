"""Spark session of a worker process.

All Spark components of the process share the session. It is never the session that plans
placements. The conf names the cluster:
``topology.spark.remote``, else the cluster's ``spark.remote`` (Spark Connect), else
``spark.master`` (classic). The topology's archive is added to the session as an artifact, so that
the user's functions can be imported there. pyspark is imported when a Spark component opens.
"""

import itertools
import logging
import os
import shutil
import tempfile
import threading
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from storm_dagster.api.spark.causes import innermost, reads_like_outage
from storm_dagster.host.requirements import needs
from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import InvalidTopology, Unavailable, error_text
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
_START = "start it, or set topology.spark.remote / spark.master to one that runs"
"""Remedy of a Spark that does not answer."""
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


class SparkAway(Unavailable):
    """Spark gives a worker no session."""


def is_session_loss(error: BaseException, session: Any) -> bool:
    """True if the error means that session or server is gone.

    With a ``session``, a job of it must fail, too: an error of the user's code may have a similar
    text.
    """
    if not reads_like_outage(error):
        return False
    return session is None or not is_responding(session)


def is_responding(session: Any) -> bool:
    """True if Spark runs a job of the session."""
    try:
        for (kind, url, _), own_session in list(_sessions.items()):
            if own_session is session and kind == "remote":
                # The probe fails at once: a call to a server that is gone takes two seconds.
                probe(url)
        return session.range(1).count() == 1
    except Exception:
        return False


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
    release, which ignored such keys, still run. ``subject`` names component and task.
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


def outage_error(conf: Mapping[str, Any], error: BaseException) -> Unavailable:
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
    """Servers of Spark Connect in the cluster's conf; none in a harness."""
    return getattr(context, "_cluster_spark", ClusterSpark())


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
