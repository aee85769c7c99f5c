"""ZooKeeper session: connection, requests with a deadline, the lease until which it certainly
lives.
"""

import logging
import os
import re
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kazoo import exceptions
from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import Callback
from kazoo.security import ACL, Id

from storm_dagster.host.clock import boot_clock
from storm_dagster.model.errors import (
    Conflict,
    InvalidRequest,
    Misconfigured,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.security.zookeeper_access import ZooKeeperUsers
from storm_dagster.zk.connection import SessionLease, make_client, multi_read_async

_log = logging.getLogger(__name__)

T = TypeVar("T")

LEASE_MARGIN_SECS = 0.5
"""Margin by which a client regards its session as over earlier than the server."""

_LOST = (
    exceptions.ConnectionLoss,
    exceptions.ConnectionClosedError,
    exceptions.OperationTimeoutError,
    exceptions.SessionExpiredError,
    exceptions.SessionMovedError,
)
# What a request may be answered with; the modules of this package deal with these.
_ANSWERS = (
    exceptions.NoNodeError,
    exceptions.NodeExistsError,
    exceptions.BadVersionError,
    exceptions.NotEmptyError,
)
# kazoo wakes its thread with one byte in a socket pair for each request; a few hundred unread ones
# block the caller, so that long pipelines go out in slices.
_PIPELINE = 128
# Nodes that one request reads: all of the largest size still make a response that a server holds
# easily.
_AT_ONCE = 64


def normalize_root(root: str) -> str:
    """``/a/b`` form of a root path, ``""`` for ``/``; ``InvalidRequest`` when it is not
    absolute.
    """
    if not root.startswith("/"):
        raise InvalidRequest(f"storm.zookeeper.root {root!r} must start with '/'")
    parts = [part for part in root.split("/") if part]
    if any(part in (".", "..") for part in parts):
        raise InvalidRequest(f"storm.zookeeper.root {root!r} may not hold '.' or '..'")
    return "".join("/" + part for part in parts)


class ZkSession:
    """A session with a ZooKeeper ensemble, below one root path.

    Made in the process that uses it; every use in a forked child raises ``InvalidRequest``. All
    methods may be called from any thread. Requests are refused with ``Unavailable`` while the
    connection is down instead of being queued, and every wait has a deadline; only the reconnection
    itself goes on in the background until :meth:`close`.
    """

    def __init__(
        self,
        hosts: str,
        *,
        root: str,
        session_timeout_ms: int,
        connection_timeout_ms: int = 15000,
        retry_times: int = 5,
        retry_interval_ms: int = 100,
        auth: str | None = None,
        super_acl: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connect a session with the ensemble ``hosts`` (``"h:p,h:p"``), its paths below ``root``.

        Nothing is created. With ``auth`` (lines of "user:password", digest) the nodes it creates
        are the first user's, and its topology's workers' as far as they need them
        (``security/zookeeper_access``; ``super_acl`` as there). Reads are tried again
        ``retry_times`` times, ``retry_interval_ms`` apart; the two also bound the wait for a
        reconnection in each request. Raises ``Unavailable`` when no server answers within
        ``connection_timeout_ms``, and ``Misconfigured`` when ``tls`` does not trust them.
        """
        if not re.fullmatch(r"[^\s/,]+(,[^\s/,]+)*", hosts):
            raise InvalidRequest(
                f"ZooKeeper hosts {hosts!r} are not of the form 'host:port,host:port'"
            )
        self.root: str = normalize_root(root)
        if auth is not None and not all(all(one.partition(":")) for one in auth.split("\n")):
            raise InvalidRequest("storm.zookeeper.auth.payload is not of the form user:password")
        self.hosts = hosts
        self.users = None if auth is None else ZooKeeperUsers(auth, super_acl)
        client, connection = make_client(hosts, session_timeout_ms, auth, tls)
        self._client = client
        self._connection = connection
        self._session_timeout_ms = session_timeout_ms
        self._retries = max(0, retry_times)
        self._interval = max(1, retry_interval_ms) / 1000.0
        self._pid = os.getpid()
        self._up = threading.Event()
        self.closed: bool = False
        """Whether :meth:`close` was called."""
        self._closing = threading.Lock()
        self._listeners: list[Callable[[str], None]] = []
        client.add_listener(self._on_state)
        client.start_async()
        deadline = time.monotonic() + connection_timeout_ms / 1000.0
        while not self._up.wait(min(0.1, max(0.0, deadline - time.monotonic()))):
            failures = list(connection.tls_errors)
            distrusted = [
                error for error in failures if isinstance(error, ssl.SSLCertVerificationError)
            ]
            # As often as there are servers, so that one that is trusted was tried, too.
            untrusted = len(distrusted) == len(failures) > hosts.count(",")
            if not untrusted and time.monotonic() < deadline:
                continue
            self.close()
            if untrusted:
                raise Misconfigured(
                    f"ZooKeeper at {hosts} is not trusted ({distrusted[-1].verify_message}): name its authority in "
                    "storm.zookeeper.ssl.truststore.path, and in storm.zookeeper.servers the hosts that its certificates name"
                )
            if tls is not None:
                why = f" ({failures[-1].reason or failures[-1]})" if failures else ""
                raise Unavailable(
                    f"ZooKeeper at {hosts} does not answer over TLS within {connection_timeout_ms} ms{why}: name its "
                    "secureClientPort in storm.zookeeper.servers, or remove storm.zookeeper.ssl.enable; where it asks for "
                    "certificates, name one that it trusts in storm.zookeeper.ssl.keystore.path"
                )
            raise Unavailable(
                f"ZooKeeper at {hosts} does not answer within {connection_timeout_ms} ms: "
                "start it (storm-dagster daemon zookeeper, or dev), or correct storm.zookeeper.servers and .port "
                "(over TLS it needs storm.zookeeper.ssl.enable)"
            )

    # -- state -------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the session is connected at this moment."""
        return not self.closed and self._client.connected

    @property
    def session_id(self) -> int:
        """Id of the session as ``ephemeralOwner`` shows it; kept while suspended, 0 once it is
        lost.
        """
        return self._connection.lease.session_id

    def lease(self) -> SessionLease:
        """Session id, newest answer and timeout, read at one moment."""
        return self._connection.lease

    def lease_end(self, session_id: int | None = None) -> float:
        """Boot clock until which the session certainly lives: 0.0 when it is over.

        With ``session_id``, the answer concerns that session, and is 0.0 once another took its
        place: what an owner of ephemeral nodes must ask with the id that it wrote them under.
        """
        lease = self._connection.lease
        if not lease.session_id or (session_id is not None and lease.session_id != session_id):
            return 0.0
        return lease.answered_boot + lease.negotiated_ms / 1000.0 - LEASE_MARGIN_SECS

    def add_listener(self, wake: Callable[[str], None]) -> None:
        """Call ``wake`` with ``"CONNECTED"``, ``"SUSPENDED"`` or ``"LOST"`` on each change, in
        order.

        It runs in the connection's thread: it may set flags and events, and must neither block nor
        use the session.
        """
        self._listeners.append(wake)

    def remove_listener(self, wake: Callable[[str], None]) -> None:
        """Remove a listener; an unknown one is ignored."""
        if wake in self._listeners:
            self._listeners.remove(wake)

    def _on_state(self, state: str) -> None:
        if state == "CONNECTED":
            self._up.set()
        else:
            self._up.clear()
            if state == "LOST":
                self._connection.forget_lease()
        if not self.closed or state == "LOST":
            _log.log(
                logging.INFO if state == "CONNECTED" or self.closed else logging.WARNING,
                "ZooKeeper connection to %s is %s",
                self.hosts,
                state,
            )
        for wake in list(self._listeners):
            try:
                wake(state)
            except Exception:
                _log.exception("a listener of the ZooKeeper connection failed at %s", state)

    def dispatch(self, call: Callable[[], None]) -> None:
        """Run ``call`` in the thread that watch callbacks run in, after those that are waiting
        there.
        """
        self._client.handler.dispatch_callback(Callback("watch", call, ()))

    # -- asking ------------------------------------------------------------------------------------

    def full(self, path: str) -> str:
        """The path that the server knows: ``path`` below the root, double slashes removed."""
        if not path.startswith("/"):
            raise InvalidRequest(f"path {path!r} must start with '/'")
        parts = [part for part in path.split("/") if part]
        if "." in parts or ".." in parts or "\0" in path:
            raise InvalidRequest(f"path {path!r} may hold neither '.' nor '..' nor NUL")
        return (self.root + "".join("/" + part for part in parts)) or "/"

    def strip(self, full_path: str) -> str:
        """The inverse of :meth:`full`."""
        return full_path[len(self.root) :] or "/"

    def acl(self, path: str) -> list[ACL] | None:
        """The ACL of a node below the root; ``None``, which opens it to everybody, without
        users.
        """
        if self.users is None:
            return None
        return [
            ACL(permissions, Id("digest", digest))
            for digest, permissions in self.users.acl(path).items()
        ]

    def _guard(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidRequest(
                f"a ZooKeeper session of process {self._pid} was used in process {os.getpid()}, "
                "which was forked from it: open a session there"
            )
        if self.closed:
            raise Unavailable("the ZooKeeper session is closed: open a new one")

    def _translated(self, error: BaseException, what: str) -> StormDagsterError | None:
        if isinstance(error, _LOST):
            return Unavailable(
                f"the connection to ZooKeeper at {self.hosts} was lost during {what}, whose outcome is "
                f"unknown ({type(error).__name__}): read again"
            )
        if isinstance(error, KazooTimeoutError):
            return Unavailable(
                f"ZooKeeper at {self.hosts} did not answer {what} in time: read again"
            )
        if isinstance(error, exceptions.NoAuthError | exceptions.AuthFailedError):
            return Misconfigured(
                f"ZooKeeper refuses {what}: this client may not, check the credentials and the ACL of the node "
                "(storm-dagster daemon zookeeper secure sets all of them)"
            )
        if isinstance(error, exceptions.KazooException) and not isinstance(error, _ANSWERS):
            return Conflict(
                f"ZooKeeper refuses {what} ({type(error).__name__}): check the path and its parents"
            )
        return None

    @property
    def _reply_seconds(self) -> float:
        # kazoo drops a silent connection after two thirds of the session timeout, which fails what
        # is pending; this is the limit beyond which even that must have happened.
        return max(self._session_timeout_ms, self._connection.lease.negotiated_ms) / 1000.0 + 1.0

    def call(self, begin: Callable[[KazooClient], Any], what: str, *, read: bool = False) -> Any:
        """The result of one request that ``begin`` starts (a kazoo ``*_async`` method).

        Answers such as ``NoNodeError`` pass through for the caller in this package. A lost
        connection is ``Unavailable``; a ``read`` is tried again first, a write never, for it may
        have landed.
        """
        return self._attempt(
            lambda: begin(self._client).get(timeout=self._reply_seconds), what, read=read
        )

    def _attempt(self, ask: Callable[[], T], what: str, *, read: bool) -> T:
        for retries_left in range(self._retries if read else 0, -1, -1):
            self._guard()
            if not self._up.is_set() and not self._up.wait(max(1, self._retries) * self._interval):
                self._guard()
                raise Unavailable(
                    f"the connection to ZooKeeper at {self.hosts} is down: it is being restored, try again"
                )
            try:
                return ask()
            except Exception as error:
                translated = self._translated(error, what)
                if translated is None:
                    raise
                if not isinstance(error, _LOST) or not retries_left:
                    raise translated from None
            time.sleep(self._interval)
        raise AssertionError("unreachable")

    def pipeline(self, begins: Sequence[Callable[[KazooClient], Any]], what: str) -> list[Any]:
        """Results of many reads in the order given, sent without waiting for each other.

        An error such as ``NoNodeError`` is in the list as that exception, a refusal as
        ``Misconfigured``. A lost connection starts the slice again, as in :meth:`call`.
        """
        results: list[Any] = []
        for start in range(0, len(begins), _PIPELINE):
            part = begins[start : start + _PIPELINE]
            results.extend(
                self._attempt(lambda part=part: self._answers(part, what), what, read=True)
            )
        return results

    def _answers(self, begins: Sequence[Callable[[KazooClient], Any]], what: str) -> list[Any]:
        answers: list[Any] = []
        for pending in [begin(self._client) for begin in begins]:
            try:
                answers.append(pending.get(timeout=self._reply_seconds))
            except Exception as error:
                translated = self._translated(error, what)
                if isinstance(translated, Unavailable):
                    raise
                answers.append(translated or error)
        return answers

    def read_nodes(self, fulls: Sequence[str], what: str, children: bool = False) -> list[Any]:
        """(data, stat) or children of each node in the order given, ``None`` for a missing one; one
        request for many.
        """
        results: list[Any] = []
        for start in range(0, len(fulls), _AT_ONCE):
            part = fulls[start : start + _AT_ONCE]
            results += self.call(
                lambda client, part=part: multi_read_async(client, part, children), what, read=True
            )
        return results

    # -- ending ------------------------------------------------------------------------------------

    def close(self, deadline: float = 5.0) -> bool:
        """End the session, so that its ephemeral nodes vanish at once. Closing twice does nothing.

        Returns within about ``deadline`` seconds in any case: ``False`` when the server was not
        reached, so that the session ends there by its timeout.
        """
        with self._closing:
            if self.closed:
                return True
            self.closed = True
        if os.getpid() != self._pid:
            # The sockets are shared with the parent, whose session must not end.
            return True
        stopped = threading.Event()
        threading.Thread(
            target=self._stop, args=(stopped,), name="zookeeper-close", daemon=True
        ).start()
        if stopped.wait(deadline):
            return True
        _log.error(
            "ZooKeeper at %s did not end the session within %g s: dropping the link",
            self.hosts,
            deadline,
        )
        self.drop_link()
        stopped.wait(1.0)
        return False

    def _stop(self, stopped: threading.Event) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._client.stop()
                self._client.close()
        except Exception as error:
            _log.warning("closing the ZooKeeper session: %s", error)
        finally:
            stopped.set()

    def drop_link(self) -> None:
        """Cut the TCP connection without telling the server, as a network fault would; it
        reconnects.
        """
        if (link := self._connection._socket) is not None:
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                _log.debug("the link was down already: %s", error)


class QuorumLease:
    """Lease of a session with an ensemble, proved by its leader; a thread keeps it up until the
    session is closed.

    Responses of a follower alone prove nothing. It answers pings and reads without asking its
    leader, and goes on doing so for ``syncLimit`` ticks after it has lost it; the leader meanwhile
    ends the sessions that are silent. Measured: a session's ephemeral node vanished 3.4 s after its
    server had been cut off, and that server still answered its owner. Two kinds of answers do prove
    something:

    * that to a connect: the leader made the session, or was asked for it, after the connect was
      sent;
    * that to a chain of three ``sync`` in one connection, each sent after the answer to the one
      before, the second at least half a tick after the first: the leader pings its followers every
      half tick, what a follower replies names the sessions that it heard of, and requests and
      pings keep their order. So the leader heard of the session after the first of the three had
      been sent. (Half a tick is at most a quarter of any session timeout that it grants.)
    """

    def __init__(self, session: ZkSession) -> None:
        self._session = session
        # Session id, and the boot clock at which the leader had not heard of it for the last time.
        self._proven: tuple[int, float] = (0, 0.0)

    def start(self) -> "QuorumLease":
        """Start the thread that renews the lease."""
        threading.Thread(target=self._run, name="zookeeper-lease", daemon=True).start()
        return self

    def lease_end(self, session_id: int | None = None) -> float:
        """As :meth:`ZkSession.lease_end`, by responses of the leader only."""
        lease = self._session.lease()
        if not lease.session_id or (session_id is not None and lease.session_id != session_id):
            return 0.0
        owner, proven = self._proven
        newest = max(lease.connected_boot, proven if owner == lease.session_id else 0.0)
        return newest + lease.negotiated_ms / 1000.0 - LEASE_MARGIN_SECS

    def _run(self) -> None:
        while not self._session.closed:
            try:
                self._chain()
            except StormDagsterError as error:
                _log.debug("the session cannot be proven alive now: %s", error)
                time.sleep(0.1)

    def _chain(self) -> None:
        """Chains of syncs, the last of one being the first of the next, while the session is
        connected.
        """
        at = self._session.lease()
        first = self._sync()
        while True:
            time.sleep(at.negotiated_ms / 4000.0)
            self._sync()
            last = self._sync()
            now = self._session.lease()
            if (now.session_id, now.connected_boot) != (at.session_id, at.connected_boot):
                return
            self._proven = (at.session_id, first)
            first = last

    def _sync(self) -> float:
        """One round trip to the leader; the boot clock before it was sent."""
        sent = boot_clock()
        self._session.call(lambda client: client.sync_async("/"), "a sync")
        return sent


def lease_of(session: ZkSession) -> "ZkSession | QuorumLease":
    """Lease of a worker's session: the session itself with one server, else a started
    :class:`QuorumLease`.
    """
    return QuorumLease(session).start() if "," in session.hosts else session
