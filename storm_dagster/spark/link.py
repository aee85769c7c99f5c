"""The link to a Spark Connect server: reachability, retries, and the end of sessions.

Placements and Spark components open sessions of different kinds, and share what keeps a process
from hanging when their server is gone: pyspark alone retries for ten minutes, also at its exit. It
imports pyspark only when a session is there, so that components can import it anywhere.
"""

import atexit
import socket
import weakref
from concurrent.futures import wait
from contextlib import suppress
from typing import Any

from storm_dagster.host.futures import in_thread
from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import Unavailable
from storm_dagster.security.spark_remote import host_and_port

SESSION_GONE = (
    "SESSION_CLOSED",
    "SESSION_NOT_FOUND",
    "SESSION_CHANGED",
    "incorrect server side session identifier",
)
"""Strings by which a server says that it has dropped the session. Over Connect they are in
exceptions of several classes, grpc's among them.
"""
RELEASE_SECS = 0.7
"""Time that an exiting process gives the server to release a session: a worker is killed soon
after.
"""


def probe(remote: str, timeout_secs: float = 5.0) -> None:
    """Return when a server listens at the URL; ``OSError`` when none does, :class:`Unavailable` for
    a URL that names none.

    gRPC alone would go on trying for ten minutes.
    """
    host, port = host_and_port(remote)
    socket.create_connection((host.strip("[]"), port), timeout=timeout_secs).close()


def check_reachable(remote: str, timeout_secs: float = 5.0) -> None:
    """As :func:`probe`, with :class:`Unavailable` when no server listens."""
    try:
        probe(remote, timeout_secs)
    except OSError as error:
        raise Unavailable(
            f"Spark at {mask_text(remote)} is out of reach ({error}): start it (storm-dagster dev, storm-dagster daemon spark), "
            "or correct spark.remote"
        ) from None


def limit_retries(session: Any) -> None:
    """Retry calls of a session for seconds only.

    Without this a server that died is tried again for ten minutes, also by threads that an ending
    process waits for.
    """
    from pyspark.sql.connect.client.retries import DefaultPolicy

    session.client.set_retry_policies([DefaultPolicy(max_retries=4, max_backoff=1000)])


def is_session_gone(error: BaseException) -> bool:
    """True if the server has dropped the session, so that only another id helps."""
    text = str(error)
    return any(sign in text for sign in SESSION_GONE)


def forget_session(session: Any, *, release: bool = False) -> None:
    """Close this process's side of a session; the server's side lives on unless it is released."""
    client = getattr(session, "client", None)
    if client is not None:
        # It is being thrown away because it does not work.
        with suppress(Exception):
            if release:
                client.release_session()
            client.close()


def release_session(session: Any, remote: str, timeout_secs: float = RELEASE_SECS) -> None:
    """Release a session with its plans and artifacts on the server, if that answers at ``remote``,
    and close this process's side.

    It takes at most ``timeout_secs``: otherwise the server drops the idle session by itself.
    """

    def release() -> None:
        probe(remote, timeout_secs)
        session.client.release_session()

    wait([in_thread("spark-release", release)], timeout_secs)
    forget_session(session)


def close_at_exit(session: Any, release: str = "", release_secs: float = RELEASE_SECS) -> None:
    """Close this process's side of the session when the process ends; ``release``: the server's
    too, if that URL answers within ``release_secs``.

    pyspark's own exit hook talks to the server first, and tries for ten minutes when that is gone;
    it leaves closed sessions alone, and hooks run in reverse order of registration.
    """
    kept = weakref.ref(session)

    def close() -> None:
        opened = kept()
        if opened is None:
            return
        if release:
            release_session(opened, release, release_secs)
        else:
            forget_session(opened)

    atexit.register(close)
