"""Link to a Spark Connect server: reachability, retries, end of sessions.

Placements and Spark components open sessions of different kinds. They share the functions that keep
a process from hanging while their server is unreachable: pyspark alone retries for ten minutes,
also at its exit. This module imports pyspark only for an open session, so that components can
import it anywhere.
"""

import atexit
import re
import socket
import warnings
import weakref
from concurrent.futures import wait
from contextlib import suppress
from typing import Any

from storm_dagster.host.futures import in_thread
from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import Unavailable, error_text
from storm_dagster.security.server_identity import TrustedServers, UntrustedServer
from storm_dagster.security.spark_remote import check_spark_server, host_and_port, speaks_tls

SESSION_GONE = (
    "SESSION_CLOSED",
    "SESSION_NOT_FOUND",
    "SESSION_CHANGED",
    "incorrect server side session identifier",
)
"""Strings in the errors of a server that has dropped the session.

Over Connect they are in exceptions of several classes, grpc's among them.
"""
_REFUSAL = re.compile(r"(Spark at sc://\S+ is sent nothing, because [^\"\n]*)")
"""Error of a checked channel, as gRPC and pyspark repeat it."""
RELEASE_SECS = 0.7
"""Time that the server has to release a session of an exiting process.

It is short, because a worker is killed soon after.
"""


def open_channel(remote: str, trusted: TrustedServers | None = None) -> Any:
    """Builder of a channel that sends nothing to a server that is not ``trusted``.

    Every session of this package has one. The URL has the token, if the server gets one. Without
    ``trusted``, servers of this process's user and of root are.
    """
    from storm_dagster.spark.channel import CheckedChannelBuilder

    return CheckedChannelBuilder(remote, trusted or TrustedServers())


def untrusted_server(error: BaseException) -> UntrustedServer | None:
    """The refusal of a channel that an error of Spark's client says; ``None`` if it says none."""
    refusal = _REFUSAL.search(str(error))
    return None if refusal is None else UntrustedServer(refusal[1])


def probe(remote: str, timeout_secs: float = 5.0, trusted: TrustedServers | None = None) -> None:
    """Check that a server listens at the URL, and may be sent to.

    ``OSError`` if none does, :class:`Unavailable` for a URL without a server, and
    :class:`UntrustedServer` for one of another user, which is sent nothing. gRPC alone would retry
    for ten minutes.
    """
    # The brackets of an IPv6 address belong to the URL only.
    host, port = host_and_port(remote)
    with socket.create_connection((host.strip("[]"), port), timeout=timeout_secs) as link:
        if not speaks_tls(remote):
            check_spark_server(link, host.strip("[]"), port, trusted or TrustedServers())


def check_reachable(
    remote: str, timeout_secs: float = 5.0, trusted: TrustedServers | None = None
) -> None:
    """Check as :func:`probe`, with :class:`Unavailable` if no server listens."""
    try:
        probe(remote, timeout_secs, trusted)
    except OSError as error:
        raise Unavailable(
            f"Spark at {mask_text(remote)} is out of reach ({error_text(error)}): "
            "start it (storm-dagster dev, storm-dagster daemon spark), or correct spark.remote"
        ) from None


def limit_retries(session: Any) -> None:
    """Limit the retries of a session's calls to seconds.

    Otherwise pyspark retries calls to a dead server for ten minutes, also in threads that an ending
    process waits for.
    """
    from pyspark.sql.connect.client.retries import DefaultPolicy

    # The caller reports the error once. pyspark would add a warning for each call of an outage.
    warnings.filterwarnings("ignore", message=r"\[RETRIES_EXCEEDED\]")
    session.client.set_retry_policies([DefaultPolicy(max_retries=4, max_backoff=1000)])


def is_session_gone(error: BaseException) -> bool:
    """True if the server has dropped the session, so that only another id helps."""
    text = str(error)
    return any(sign in text for sign in SESSION_GONE)


def forget_session(session: Any, *, release: bool = False) -> None:
    """Close this process's side of a session.

    With ``release`` also the server's side. Errors are ignored, and so is a session without a
    client.
    """
    client = getattr(session, "client", None)
    if client is not None:
        # Errors are expected: the session is dropped because it does not work.
        with suppress(Exception):
            if release:
                client.release_session()
            client.close()


def release_session(session: Any, remote: str, timeout_secs: float = RELEASE_SECS) -> None:
    """Release a session with its plans and artifacts on the server.

    The server must respond at ``remote``. This process's side is closed in any case. It takes at
    most ``timeout_secs``; after it the server drops the idle session at its expiry.
    """

    def release() -> None:
        probe(remote, timeout_secs)
        session.client.release_session()

    wait([in_thread("spark-release", release)], timeout_secs)
    forget_session(session)


def close_at_exit(session: Any, release: str = "", release_secs: float = RELEASE_SECS) -> None:
    """Close this process's side of the session when the process ends.

    ``release``: also the server's side, if that URL responds within ``release_secs``. pyspark's own
    exit hook sends a request to the server first, and retries for ten minutes if that is
    unreachable. It ignores closed sessions, and hooks run in reverse order of registration.
    """
    reference = weakref.ref(session)

    def close() -> None:
        live_session = reference()
        if live_session is None:
            return
        if release:
            release_session(live_session, release, release_secs)
        else:
            forget_session(live_session)

    atexit.register(close)
