"""Spark sessions of placements: opening, and waiting with a deadline."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from storm_dagster.host.endpoints import ClusterFile, SparkEndpoint, home_dir
from storm_dagster.host.futures import in_thread
from storm_dagster.host.waiting import poll
from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.security.server_identity import TrustedServers
from storm_dagster.security.spark_remote import with_spark_token
from storm_dagster.spark.link import (
    check_reachable,
    close_at_exit,
    forget_session,
    limit_retries,
    open_channel,
    untrusted_server,
)
from storm_dagster.spark.session_keys import KeysResult, misspelled_keys, try_keys

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

_CONNECT_MODE = "SPARK_CONNECT_MODE_ENABLED"
"""Environment variable with which pyspark's functions use Connect."""
_START_SECS = 120.0
"""Time for a starting server to be ready; then a call fails if it is not."""
_NOTICE_SECS = 1.0
"""Time in which ``dev`` notices that its server is lost, and says that it starts again."""
_STATUS = re.compile(r"status = StatusCode\.(\w+)")
_DETAILS = re.compile(r'details = "([^"\n]+)')
_OTHER_RELEASE = re.compile(
    r"(Can't get attribute '\w+' on <module '|No module named ')(storm_dagster\.[\w.]+)"
)


def await_start(remote: str, home: Path | None = None) -> None:
    """Wait while the ``dev`` of ``home`` is starting the server at the URL.

    After two minutes it returns, too. A server that no ``dev`` starts is not waited for.
    """
    poll(lambda: not _is_starting(remote, home), timeout=_START_SECS, pause=0.2)


def is_starting_again(remote: str, home: Path | None = None) -> bool:
    """True if the ``dev`` of ``home`` is starting the server at the URL, which was just lost.

    ``dev`` has a second to notice the loss. False at once for a server that no ``dev`` starts.
    """
    if _dev_server(remote, home) is None:
        return False
    return bool(poll(lambda: _is_starting(remote, home), timeout=_NOTICE_SECS, pause=0.1))


def _is_starting(remote: str, home: Path | None) -> bool:
    server = _dev_server(remote, home)
    return server is not None and server.starting


def _dev_server(remote: str, home: Path | None) -> SparkEndpoint | None:
    """The server at the URL in the file of the ``dev`` of ``home``; ``None`` for another server."""
    cluster = ClusterFile.read(home_dir(home))
    if cluster is None or cluster.spark is None or cluster.spark.remote != remote:
        return None
    return cluster.spark


def ask_version(
    remote: str,
    home: Path | None,
    token: str | None,
    timeout_secs: float,
    trusted: TrustedServers | None = None,
) -> str:
    """Spark's version, from a session that is released.

    :class:`Unavailable` with the reason. ``remote`` is the server of the cluster's conf, which gets
    the cluster's token if it is ``trusted``.
    """

    def ask() -> str:
        session = open_connect(with_spark_token(remote, [remote], home, token), trusted)
        try:
            return session.version
        finally:
            forget_session(session, release=True)

    check_reachable(remote, 2.0, trusted)
    return within(timeout_secs, f"Spark at {remote}", ask)


def ask_keys(
    remote: str,
    keys: Mapping[str, str],
    timeout_secs: float,
    trusted: TrustedServers | None = None,
) -> KeysResult:
    """Result of a session with the server at the URL for the ``keys``.

    Keys that are misspelled are looked for only if none is refused.

    :class:`Unavailable` if it does not answer within the time, or is not ``trusted``. ``remote``
    has the token, if the server gets one. The environment of this process is as before.
    """
    mode = os.environ.get(_CONNECT_MODE)
    # Before the clock starts: the import takes a second.
    import pyspark.sql.connect.session  # noqa: F401

    def ask() -> KeysResult:
        session = open_connect(remote, trusted)
        try:
            refused, unknown = try_keys(session, keys)
            if refused:
                # The list of the known keys takes seconds, and may end the time.
                return KeysResult(tuple(refused))
            return KeysResult((), tuple(misspelled_keys(session, unknown)))
        finally:
            forget_session(session, release=True)

    try:
        check_reachable(remote, timeout_secs, trusted)
        return within(timeout_secs, f"Spark at {mask_text(remote)}", ask)
    finally:
        # A classic session that this process opens later must not become one of Connect.
        if mode is None:
            os.environ.pop(_CONNECT_MODE, None)


def open_connect(remote: str, trusted: TrustedServers | None = None) -> SparkSession:
    """Open a session at the URL that does not become the process's default.

    So no other code uses it. The URL has the token, if the server requires one
    (:func:`~storm_dagster.security.spark_remote.with_spark_token`). Calls of the session fail while
    the server is not ``trusted``, which is sent nothing.
    """
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    # Without it pyspark.sql.functions look for a classic context. pyspark's own builder sets it as
    # well.
    os.environ[_CONNECT_MODE] = "1"
    session = ConnectSession(connection=open_channel(remote, trusted))
    limit_retries(session)
    # The stop in one process must not end the session of the others.
    session.release_session_on_close = False
    close_at_exit(session)
    return session  # pyright: ignore[reportReturnType]


def open_default(keys: Mapping[str, Any], trusted: TrustedServers | None = None) -> SparkSession:
    """The process's session at ``spark.remote`` of ``keys``, opened if it has none.

    The other keys become its conf. As :func:`open_connect` it sends nothing to a server that is not
    ``trusted``.
    """
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    os.environ[_CONNECT_MODE] = "1"
    builder = ConnectSession.builder.channelBuilder(open_channel(keys["spark.remote"], trusted))
    session = builder.getOrCreate()
    # Before the first call, which sends the conf: pyspark would retry it for ten minutes.
    limit_retries(session)
    conf = {key: value for key, value in keys.items() if key != "spark.remote"}
    if conf:
        # With the same channel: another thread may have stopped the session before.
        session = builder.config(map=conf).getOrCreate()
    return session  # pyright: ignore[reportReturnType]


def open_classic(master: str) -> SparkSession:
    """The process's classic session on a master URL.

    Starts a driver in this process if it has none.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.pop(_CONNECT_MODE, None)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName("storm-dagster")  # pyright: ignore[reportAttributeAccessIssue]
    settings: dict[str, Any] = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if master.startswith("local"):
        settings |= {"spark.sql.shuffle.partitions": "4", "spark.driver.bindAddress": "127.0.0.1"}
        settings |= {"spark.driver.host": "127.0.0.1", "spark.log.level": "ERROR"}
    return builder.config(map=settings).getOrCreate()


def within(seconds: float, subject: str, function: Callable[[], T]) -> T:
    """Call the function with a deadline, and return its result.

    Raises the typed error for its exception, and :class:`Unavailable` after ``seconds``. The
    function then continues in its thread, whose end is not waited for. ``subject`` is the subject
    of the error.
    """
    outcome = in_thread("storm-spark-call", function)
    if not wait([outcome], seconds).done:
        raise Unavailable(
            f"{mask_text(subject)} did not answer within {seconds:g} s: "
            "see the server's log, try again"
        )
    try:
        return outcome.result()
    except Exception as error:
        raise as_unavailable(error, subject) from error


def as_unavailable(error: Exception, subject: str) -> StormDagsterError:
    """The typed error for an error of Spark."""
    if isinstance(error, StormDagsterError):
        return error
    refusal = untrusted_server(error)
    if refusal is not None:
        return refusal
    text = str(error)
    status = _STATUS.search(text)
    cause = _cause_of(error)
    remedy = "see the Spark server's log, try again"
    other_release = _OTHER_RELEASE.search(text)
    if other_release is not None:
        cause = f"its Python workers have another release of {other_release[2]}"
        remedy = "restart Spark (storm-dagster daemon spark, storm-dagster dev) with this release"
    if status is not None and status[1] in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        remedy = (
            "its token follows from the cluster's storm.secret "
            "(set storm.secret.file to the same here), without one it is HOME/spark.token "
            "(name that HOME in STORM_DAGSTER_HOME)"
        )
    return Unavailable(mask_text(f"{subject} failed ({cause:.300}): {remedy}"))


def _cause_of(error: Exception) -> str:
    """The cause of an error of Spark in a few words.

    An error of gRPC prints its complete state, also where pyspark wraps it. Two of its lines have
    the cause.
    """
    text = str(error)
    causes: list[str] = []
    for pattern in (_STATUS, _DETAILS):
        match = pattern.search(text)
        if match is not None:
            causes.append(match[1])
    if causes:
        return ": ".join(causes)
    lines = text.strip().splitlines()
    return lines[0] if lines else type(error).__name__
