"""Spark sessions of placements: opening, and waiting with a deadline."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from storm_dagster.host.endpoints import ClusterFile, home_dir
from storm_dagster.host.futures import in_thread
from storm_dagster.host.waiting import poll
from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.security.spark_remote import with_spark_token
from storm_dagster.spark.link import (
    check_reachable,
    close_at_exit,
    forget_session,
    limit_retries,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

_START_SECS = 120.0
_STATUS = re.compile(r"status = StatusCode\.(\w+)")
_DETAILS = re.compile(r'details = "([^"\n]+)')
_OTHER_RELEASE = re.compile(
    r"(Can't get attribute '\w+' on <module '|No module named ')(storm_dagster\.[\w.]+)"
)


def await_start(remote: str, home: Path | None = None) -> None:
    """Return when the server at the URL is not being started by the ``dev`` of ``home`` (any
    more).
    """

    def is_not_starting() -> bool:
        cluster = ClusterFile.read(home_dir(home))
        if cluster is None or cluster.spark is None:
            return True
        return not cluster.spark.starting or cluster.spark.remote != remote

    poll(is_not_starting, timeout=_START_SECS, pause=0.2)


def ask_version(remote: str, home: Path | None, token: str | None, timeout_secs: float) -> str:
    """Spark's version, from a session that is released; :class:`Unavailable` with the reason.

    ``remote`` is the server of the cluster's conf, which gets the cluster's token.
    """

    def ask() -> str:
        session = open_connect(with_spark_token(remote, [remote], home, token))
        try:
            return session.version
        finally:
            forget_session(session, release=True)

    check_reachable(remote, 2.0)
    return within(timeout_secs, f"Spark at {remote}", ask)


def open_connect(remote: str) -> SparkSession:
    """Open a session at the URL without making it the process's default, so that no other code uses
    it.

    The URL has the token, if the server asks for one
    (:func:`~storm_dagster.security.spark_remote.with_spark_token`).
    """
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    # Without it pyspark.sql.functions look for a classic context: pyspark's own builder sets it
    # too.
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    session = ConnectSession(connection=remote)
    limit_retries(session)
    # Stopping it in one process must not end it for the others.
    session.release_session_on_close = False
    close_at_exit(session)
    return session  # pyright: ignore[reportReturnType]


def open_classic(master: str) -> SparkSession:
    """The process's classic session on a master URL; starts a driver in this process when there is
    none.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.pop("SPARK_CONNECT_MODE_ENABLED", None)
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


def within(seconds: float, what: str, function: Callable[[], T]) -> T:
    """The function's result, or the typed error for what it raises; :class:`Unavailable` after that
    many seconds.

    The function goes on in a thread of its own, which nothing waits for any more.
    """
    outcome = in_thread("storm-spark-call", function)
    if not wait([outcome], seconds).done:
        raise Unavailable(
            f"{mask_text(what)} did not answer within {seconds:g} s: see the server's log, try again"
        )
    try:
        return outcome.result()
    except Exception as error:
        raise as_unavailable(error, what) from error


def as_unavailable(error: Exception, what: str) -> StormDagsterError:
    """The typed error for an error of Spark."""
    if isinstance(error, StormDagsterError):
        return error
    # An error of gRPC prints its whole state, also where pyspark wraps it; two of its lines have
    # the cause.
    status, details = _STATUS.search(str(error)), _DETAILS.search(str(error))
    lines: list[Any] = str(error).strip().splitlines() or [type(error).__name__]
    cause = ": ".join(found[1] for found in (status, details) if found) or lines[0]
    remedy = "see the Spark server's log, try again"
    missing = _OTHER_RELEASE.search(str(error))
    if missing is not None:
        cause = f"its Python workers have another release of {missing[2]}"
        remedy = "restart Spark (storm-dagster daemon spark, storm-dagster dev) with this release"
    if status is not None and status[1] in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        remedy = (
            "its token follows from the cluster's storm.secret (set storm.secret.file to the same here), without one it "
            "is HOME/spark.token (name that HOME in STORM_DAGSTER_HOME)"
        )
    return Unavailable(mask_text(f"{what} failed ({cause:.300}): {remedy}"))
