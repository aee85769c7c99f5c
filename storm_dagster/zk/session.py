"""ZooKeeper session: connection, requests with a deadline, and lease.

The lease is the time until which the session certainly lives.
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
    error_text,
)
from storm_dagster.security.server_identity import TrustedServers
from storm_dagster.security.zookeeper_access import ZooKeeperUsers
from storm_dagster.zk.connect_errors import no_server, not_trusted
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
"""Errors after which the outcome of a request is unknown; a read is retried."""
_EXPECTED_ERRORS = (
    exceptions.NoNodeError,
    exceptions.NodeExistsError,
    exceptions.BadVersionError,
    exceptions.NotEmptyError,
)
"""Responses that the modules of this package handle."""
_PIPELINE_REQUESTS = 128
"""Requests of one slice of a pipeline.

kazoo wakes its thread with one byte in a socket pair for each request; a few hundred unread bytes
block the caller.
"""
_NODES_PER_READ = 64
"""Nodes that one request reads. A server easily holds a response with the largest nodes."""


def normalize_root(root: str) -> str:
    """``/a/b`` form of a root path, ``""`` for ``/``.

    Raises ``InvalidRequest`` if the path is not absolute.
    """
    if not root.startswith("/"):
        raise InvalidRequest(f"storm.zookeeper.root {root!r} must start with '/'")
    parts = [part for part in root.split("/") if part]
    if "." in parts or ".." in parts:
        raise InvalidRequest(f"storm.zookeeper.root {root!r} must not contain '.' or '..'")
    return "".join("/" + part for part in parts)


class ZkSession:
    """A session with a ZooKeeper ensemble, below one root path.

    It belongs to the process that created it: every use in a forked child raises
    ``InvalidRequest``. All methods may be called from any thread. Requests are refused with
    ``Unavailable`` while the connection is down instead of being queued, and every wait has a
    deadline; only the reconnection itself continues in the background until :meth:`close`.
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
        trusted: TrustedServers | None = None,
    ) -> None:
        """Connect to an ensemble.

        ``hosts`` is ``"h:p,h:p"``; paths are below ``root``. No node is created. With ``auth``
        (lines of "user:password", digest) the nodes that the session creates belong to the first
        user, and to its topology's workers as far as they need them (``security/zookeeper_access``;
        ``super_acl`` as there). Reads are retried ``retry_times`` times, ``retry_interval_ms``
        apart; the two also bound the wait for a reconnection in each request. Without ``tls`` only
        ``trusted`` servers are called (:func:`make_client`). Raises ``Unavailable`` if no server
        answers within ``connection_timeout_ms`` (its subclass :class:`UntrustedServer` if one is
        not trusted), and ``Misconfigured`` if ``tls`` does not trust them.
        """
        if not re.fullmatch(r"[^\s/,]+(,[^\s/,]+)*", hosts):
            raise InvalidRequest(
                f"ZooKeeper hosts {hosts!r} are not of the form 'host:port,host:port'"
            )
        self.root: str = normalize_root(root)
        if auth is not None and not all(_is_credential(line) for line in auth.split("\n")):
            raise InvalidRequest("storm.zookeeper.auth.payload is not of the form user:password")
        self.hosts = hosts
        self.users = None if auth is None else ZooKeeperUsers(auth, super_acl)
        client, connection = make_client(hosts, session_timeout_ms, auth, tls, trusted)
        self._client = client
        self._connection = connection
        self._session_timeout_ms = session_timeout_ms
        self._retries = max(0, retry_times)
        self._interval = max(1, retry_interval_ms) / 1000.0
        """Seconds between two attempts at a read."""
        self._pid = os.getpid()
        """Process that may use the session."""
        self._up = threading.Event()
        """Set while the connection is up."""
        self.closed: bool = False
        """True after a call of :meth:`close`."""
        self._closing = threading.Lock()
        """Lets one call of :meth:`close` begin the end."""
        self._listeners: list[Callable[[str], None]] = []
        self.on_answer: Callable[[], None] = lambda: None
        """Called in the thread of a request when it was answered, also with an error."""
        client.add_listener(self._on_state)
        client.start_async()
        self._await_server(connection_timeout_ms, over_tls=tls is not None)

    def _await_server(self, timeout_ms: int, *, over_tls: bool) -> None:
        """Wait for the first connection; without one, close the session and raise an error."""
        deadline = time.monotonic() + timeout_ms / 1000.0
        while not self._up.wait(min(0.1, max(0.0, deadline - time.monotonic()))):
            failures = list(self._connection.tls_errors)
            untrusted = [
                error for error in failures if isinstance(error, ssl.SSLCertVerificationError)
            ]
            # With as many failures as servers, a trusted server would have been tried.
            server_count = self.hosts.count(",") + 1
            if len(failures) >= server_count and len(untrusted) == len(failures):
                self.close()
                raise not_trusted(self.hosts, untrusted[-1])
            if time.monotonic() >= deadline:
                self.close()
                if self._connection.untrusted:
                    raise self._connection.untrusted[-1]
                raise no_server(self.hosts, timeout_ms, over_tls, failures)

    # -- state -------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """True while the session is connected."""
        return not self.closed and self._client.connected

    @property
    def session_id(self) -> int:
        """Id of the session, which is the ``ephemeralOwner`` of its nodes.

        It does not change while the connection is suspended, and is 0 once the session is lost.
        """
        return self._connection.lease.session_id

    def lease(self) -> SessionLease:
        """Session id, newest response and timeout, read at one moment."""
        return self._connection.lease

    def lease_end(self, session_id: int | None = None) -> float:
        """Boot clock until which the session certainly lives.

        It is 0.0 if the session is over. With ``session_id``, the result is 0.0 also once another
        session took the place of that one. An owner of ephemeral nodes must pass the id with which
        it wrote them.
        """
        lease = self._connection.lease
        if not lease.session_id or (session_id is not None and lease.session_id != session_id):
            return 0.0
        return lease.answered_boot + lease.negotiated_ms / 1000.0 - LEASE_MARGIN_SECS

    def add_listener(self, wake: Callable[[str], None]) -> None:
        """Call ``wake`` with the new state on each change, in order.

        The changes are those of the connection. The states are ``"CONNECTED"``, ``"SUSPENDED"`` and
        ``"LOST"``. ``wake`` runs in the connection's thread: it may set flags and events, and must
        neither block nor use the session.
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
            expected = state == "CONNECTED" or self.closed
            level = logging.INFO if expected else logging.WARNING
            _log.log(level, "ZooKeeper connection to %s is %s", self.hosts, state)
        for wake in list(self._listeners):
            try:
                wake(state)
            except Exception:
                _log.exception("a listener of the ZooKeeper connection failed at %s", state)

    def dispatch(self, call: Callable[[], None]) -> None:
        """Run ``call`` in the thread of the watch callbacks.

        It runs after the pending ones.
        """
        self._client.handler.dispatch_callback(Callback("watch", call, ()))

    # -- requests ----------------------------------------------------------------------------------

    def full(self, path: str) -> str:
        """Path on the server.

        It is ``path`` below the root, double slashes removed.
        """
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
        """ACL of a node below the root.

        Without users it is ``None``, which opens the node to all clients.
        """
        if self.users is None:
            return None
        return [
            ACL(permissions, Id("digest", digest))
            for digest, permissions in self.users.acl(path).items()
        ]

    def _guard(self) -> None:
        """Refuse a use in a forked child, and after :meth:`close`."""
        if os.getpid() != self._pid:
            raise InvalidRequest(
                f"a ZooKeeper session of process {self._pid} was used in process {os.getpid()}, "
                "which was forked from it: open a session there"
            )
        if self.closed:
            raise Unavailable("the ZooKeeper session is closed: open a new one")

    def _translate(self, error: BaseException, action: str) -> StormDagsterError | None:
        """Typed error for an error of kazoo; ``None`` for one that passes through to the caller."""
        if isinstance(error, _LOST):
            return Unavailable(
                f"the connection to ZooKeeper at {self.hosts} was lost during {action}, whose "
                f"outcome is unknown ({type(error).__name__}): read again"
            )
        if isinstance(error, KazooTimeoutError):
            return Unavailable(
                f"ZooKeeper at {self.hosts} did not answer {action} in time: read again"
            )
        if isinstance(error, exceptions.NoAuthError | exceptions.AuthFailedError):
            return Misconfigured(
                f"ZooKeeper refuses {action}, for lack of permission: check the credentials and "
                "the ACL of the node (storm-dagster daemon zookeeper secure sets all of them)"
            )
        if isinstance(error, exceptions.KazooException) and not isinstance(error, _EXPECTED_ERRORS):
            return Conflict(
                f"ZooKeeper refuses {action} ({type(error).__name__}): check the path and its "
                "parents"
            )
        return None

    @property
    def _reply_seconds(self) -> float:
        # kazoo drops a silent connection after two thirds of the session timeout, which fails the
        # pending requests; this is the limit beyond which even that must have happened.
        return max(self._session_timeout_ms, self._connection.lease.negotiated_ms) / 1000.0 + 1.0

    def call(self, begin: Callable[[KazooClient], Any], action: str, *, read: bool = False) -> Any:
        """Result of one request.

        ``begin`` starts it (a kazoo ``*_async`` method). ``action`` describes the request in
        errors. Responses such as ``NoNodeError`` pass through for the caller in this package. A
        lost connection is ``Unavailable``; a ``read`` is retried before that, a write never,
        because it may have landed.
        """
        return self._attempt(
            lambda: begin(self._client).get(timeout=self._reply_seconds), action, read=read
        )

    def _attempt(self, request: Callable[[], T], action: str, *, read: bool) -> T:
        """Call ``request`` once the connection is up, and return its result.

        A ``read`` is retried after a lost connection. Errors are raised as typed ones, except those
        that :meth:`_translate` lets through.
        """
        max_retries = self._retries if read else 0
        for retries_left in range(max_retries, -1, -1):
            self._guard()
            if not self._up.is_set() and not self._up.wait(max(1, self._retries) * self._interval):
                self._guard()
                raise Unavailable(
                    f"the connection to ZooKeeper at {self.hosts} is down: it is being restored, "
                    "try again"
                )
            try:
                result = request()
            except Exception as error:
                translated = self._translate(error, action)
                if translated is None:
                    self.on_answer()
                    raise
                if not isinstance(error, _LOST) or not retries_left:
                    raise translated from None
            else:
                self.on_answer()
                return result
            time.sleep(self._interval)
        raise AssertionError("unreachable")

    def pipeline(self, begins: Sequence[Callable[[KazooClient], Any]], action: str) -> list[Any]:
        """Results of many reads, in their order.

        They are sent without waiting for each other. An error such as ``NoNodeError`` is in the
        list as that exception, a refusal as ``Misconfigured``. After a lost connection the slice is
        retried, as in :meth:`call`.
        """
        results: list[Any] = []
        for start in range(0, len(begins), _PIPELINE_REQUESTS):
            part = begins[start : start + _PIPELINE_REQUESTS]
            results.extend(
                self._attempt(lambda part=part: self._results(part, action), action, read=True)
            )
        return results

    def _results(self, begins: Sequence[Callable[[KazooClient], Any]], action: str) -> list[Any]:
        """Result or error of each request; all are sent before the first response is awaited."""
        results: list[Any] = []
        for pending in [begin(self._client) for begin in begins]:
            try:
                results.append(pending.get(timeout=self._reply_seconds))
            except Exception as error:
                translated = self._translate(error, action)
                if isinstance(translated, Unavailable):
                    raise  # The original error, by which _attempt decides on a retry.
                results.append(translated or error)
        return results

    def read_nodes(self, fulls: Sequence[str], action: str, children: bool = False) -> list[Any]:
        """(data, stat) or children of each node in order, in few requests.

        ``None`` for a missing node. Any other error of one node is raised.
        """
        results: list[Any] = []
        for start in range(0, len(fulls), _NODES_PER_READ):
            part = fulls[start : start + _NODES_PER_READ]
            results += self.call(
                lambda client, part=part: multi_read_async(client, part, children),
                action,
                read=True,
            )
        return results

    # -- end ---------------------------------------------------------------------------------------

    def close(self, deadline: float = 5.0) -> bool:
        """End the session, so that its ephemeral nodes vanish at once.

        A second call has no effect, nor one in a forked child. Returns within about ``deadline``
        seconds in any case: ``False`` if the server was not reached, so that the session ends there
        by its timeout.
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
            _log.warning("closing the ZooKeeper session: %s", error_text(error))
        finally:
            stopped.set()

    def drop_link(self) -> None:
        """Cut the TCP connection without a message to the server.

        A network fault does the same. The session reconnects.
        """
        link = self._connection._socket
        if link is None:
            return
        try:
            link.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            _log.debug("the link was down already: %s", error)


def _is_credential(line: str) -> bool:
    user, colon, password = line.partition(":")
    return bool(user and colon and password)


class QuorumLease:
    """Lease of a session with an ensemble, proved by its leader.

    A thread renews it until the session is closed.

    Responses of a follower alone are not a proof. It answers pings and reads without its leader,
    also for ``syncLimit`` ticks after it has lost the leader, which ends silent sessions during
    that time. Measured: a session's ephemeral node vanished 3.4 s after its server had been cut
    off, and that server still answered its owner. Two kinds of responses are a proof:

    * the response to a connect: the leader created or confirmed the session after the connect was
      sent;
    * the responses to a chain of three ``sync`` in one connection, each sent after the response to
      the one before, the second at least half a tick after the first: the leader pings its
      followers every half tick, the reply of a follower names the sessions that it heard of, and
      requests and pings keep their order. So the leader heard of the session after the first of the
      three had been sent. (Half a tick is at most a quarter of any session timeout that it grants.)
    """

    def __init__(self, session: ZkSession) -> None:
        self._session = session
        self._proven: tuple[int, float] = (0, 0.0)
        """Session id, and the newest boot clock after which the leader has heard of it."""

    def start(self) -> "QuorumLease":
        """Start the thread that renews the lease."""
        threading.Thread(target=self._run, name="zookeeper-lease", daemon=True).start()
        return self

    def lease_end(self, session_id: int | None = None) -> float:
        """As :meth:`ZkSession.lease_end`, by responses of the leader only."""
        lease = self._session.lease()
        if not lease.session_id or (session_id is not None and lease.session_id != session_id):
            return 0.0
        proven_session, proven_boot = self._proven
        newest_boot = lease.connected_boot
        if proven_session == lease.session_id:
            newest_boot = max(newest_boot, proven_boot)
        return newest_boot + lease.negotiated_ms / 1000.0 - LEASE_MARGIN_SECS

    def _run(self) -> None:
        while not self._session.closed:
            try:
                self._chain()
            except StormDagsterError as error:
                _log.debug("the session cannot be proven alive now: %s", error)
                time.sleep(0.1)

    def _chain(self) -> None:
        """Send chains of syncs while the connection is the same.

        The last sync of a chain is the first one of the next.
        """
        lease = self._session.lease()
        connection = (lease.session_id, lease.connected_boot)
        first_boot = self._sync()
        while True:
            time.sleep(lease.negotiated_ms / 4000.0)
            self._sync()
            last_boot = self._sync()
            current = self._session.lease()
            if (current.session_id, current.connected_boot) != connection:
                return
            self._proven = (lease.session_id, first_boot)
            first_boot = last_boot

    def _sync(self) -> float:
        """Make a round trip to the leader.

        Returns the boot clock before it.
        """
        sent_boot = boot_clock()
        self._session.call(lambda client: client.sync_async("/"), "a sync")
        return sent_boot


def lease_of(session: ZkSession) -> "ZkSession | QuorumLease":
    """Lease of a worker's session.

    With one server it is the session itself, else a started :class:`QuorumLease`.
    """
    if "," in session.hosts:
        return QuorumLease(session).start()
    return session
