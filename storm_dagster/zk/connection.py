"""Extension of kazoo's connection: lease times, timeout, connects.

kazoo exposes neither the session timeout that the server granted nor the send time of an answered
request. Both are needed to know until when a session certainly lives
(``docs/decisions.md#one-owner``), and both pass through these few methods. No other module of the
package uses kazoo's private parts.
"""

import logging
import ssl
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kazoo.client import KazooClient
from kazoo.exceptions import EXCEPTIONS, NoNodeError
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import AUTH_XID, PING_XID, ConnectionHandler
from kazoo.protocol.serialization import (
    Connect,
    GetChildren,
    GetData,
    MultiHeader,
    int_struct,
    stat_struct,
)
from kazoo.retry import KazooRetry

from storm_dagster.host.clock import boot_clock
from storm_dagster.security.peers import can_identify_peers
from storm_dagster.security.server_identity import TrustedServers, UntrustedServer
from storm_dagster.zk.connect_errors import check_server

_log = logging.getLogger(__name__)

CONNECT_SECONDS = 1.0
"""Longest wait for the TCP connection to one server before the next one is tried."""

_HANDSHAKE_SECONDS = 5.0
"""Longest TLS handshake."""
_SESSION_GONE = {-112, -118}
"""Codes of SessionExpired and SessionMoved: responses that prove no lease."""


@dataclass(frozen=True)
class SessionLease:
    """Lease of the session by its newest response.

    It is replaced as a whole, so that reading it needs no lock.
    """

    session_id: int = 0
    """0 without a session."""
    answered_boot: float = 0.0
    """Boot clock at which the newest answered request had been sent; 0.0 without a session."""
    negotiated_ms: int = 0
    """Session timeout that the server granted."""
    connected_boot: float = 0.0
    """Boot clock at which the connect of this connection had been sent."""


class _Handler(SequentialThreadingHandler):
    """kazoo's handler with short connects to servers that are known.

    A server is known by the TLS context of the cluster (kazoo's trusts the system's authorities as
    well), or, without TLS, by its user: :class:`TrustedServers`.
    """

    def __init__(self, tls: ssl.SSLContext | None, trusted: TrustedServers | None) -> None:
        """``trusted``: the servers that are called without TLS; ``None``: all of them."""
        super().__init__()
        self._tls = tls
        self._trusted = trusted

    def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        """Connect to a server.

        Nothing is sent to one that is not known: raises :class:`UntrustedServer` or
        ``ssl.SSLError``.
        """
        # kazoo would wait a whole session timeout for each host that swallows packets.
        kwargs["timeout"] = min(kwargs.get("timeout") or CONNECT_SECONDS, CONNECT_SECONDS)
        link = super().create_connection(*args, **kwargs)
        host = str(kwargs["hostname"])
        if self._tls is not None:
            link.settimeout(_HANDSHAKE_SECONDS)
            # A failing wrap_socket closes the link.
            return self._tls.wrap_socket(link, server_hostname=host.strip("[]"))
        if self._trusted is not None:
            _, port, *_ = kwargs["address"]
            try:
                check_server(link, self._trusted, host, port)
            except BaseException:
                link.close()
                raise
        return link

    def select(self, rlist: Any, wlist: Any, xlist: Any, timeout: float | None = None) -> Any:
        # The kernel does not see the bytes that TLS has decrypted already.
        buffered = [link for link in rlist if isinstance(link, ssl.SSLSocket) and link.pending()]
        readable, writable, failed = super().select(rlist, wlist, xlist, 0 if buffered else timeout)
        unbuffered = [link for link in readable if link not in buffered]
        return [*buffered, *unbuffered], writable, failed


class LeaseConnection(ConnectionHandler):
    """kazoo's connection with the send time of each pending request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lease = SessionLease()
        self._sent_boot: dict[int, float] = {}
        """Id of a pending request -> boot clock before it was sent."""
        self._ping_sent_boot = 0.0
        """Boot clock before the newest ping was sent; all pings have the same id."""
        self.tls_errors: deque[ssl.SSLError] = deque(maxlen=100)
        """Newest failures of TLS since the last session began; a client retries without end."""
        self.untrusted: deque[UntrustedServer] = deque(maxlen=100)
        """Newest refusals of servers since the last session began."""

    @contextmanager
    def _socket_error_handling(self) -> Iterator[None]:
        with super()._socket_error_handling():
            try:
                yield
            except ssl.SSLError as error:
                if not self.tls_errors and isinstance(error, ssl.SSLCertVerificationError):
                    _log.warning("a ZooKeeper server is not trusted: %s", error.verify_message)
                self.tls_errors.append(error)
                raise
            except UntrustedServer as error:
                if not self.untrusted:
                    _log.warning("%s", error.message)
                self.untrusted.append(error)
                # kazoo tries the next server after an error of this kind only.
                raise ConnectionRefusedError(error.message) from error

    def forget_lease(self) -> None:
        """Drop the lease: the session is over."""
        self.lease = SessionLease()

    def _on_response(self, sent_boot: float) -> None:
        """Extend the lease by the response to a request that was sent at ``sent_boot``."""
        lease = self.lease
        if lease.session_id and sent_boot > lease.answered_boot:
            self.lease = replace(lease, answered_boot=sent_boot)

    def _invoke(self, timeout: float, request: Any, xid: int | None = None) -> Any:
        """As kazoo's, which sends the connect here: its response begins a lease."""
        sent_boot = boot_clock()
        result: Any = super()._invoke(timeout, request, xid)
        if isinstance(request, Connect):
            response, _ = result
            self._sent_boot.clear()
            self._ping_sent_boot = 0.0
            if response.time_out > 0:
                self.tls_errors.clear()
                self.untrusted.clear()
                self.lease: SessionLease = SessionLease(
                    session_id=response.session_id,
                    answered_boot=sent_boot,
                    negotiated_ms=response.time_out,
                    connected_boot=sent_boot,
                )
        return result

    def _submit(self, request: Any, timeout: float, xid: int | None = None) -> None:
        """As kazoo's, which sends requests and pings here."""
        # Taken before the bytes leave: a lease may end too early, never too late.
        if xid == PING_XID:
            self._ping_sent_boot = boot_clock()
        elif xid and xid != AUTH_XID:
            self._sent_boot[xid] = boot_clock()
        super()._submit(request, timeout, xid)

    def _read_header(self, timeout: float) -> Any:
        """As kazoo's, which reads the header of a response here: the response extends the lease."""
        header, buffer, offset = super()._read_header(timeout)
        if header.xid == PING_XID:
            self._on_response(self._ping_sent_boot)
        else:
            sent_boot = self._sent_boot.pop(header.xid, None)
            if sent_boot is not None and header.err not in _SESSION_GONE:
                self._on_response(sent_boot)
        return header, buffer, offset


def make_client(
    hosts: str,
    session_timeout_ms: int,
    auth: str | None = None,
    tls: ssl.SSLContext | None = None,
    trusted: TrustedServers | None = None,
) -> tuple[KazooClient, LeaseConnection]:
    """Make a kazoo client, which the caller starts, and its connection.

    Until it is closed, it reconnects in the background at most a second apart; requests never wait
    for that, see :class:`~storm_dagster.zk.session.ZkSession`. With ``auth`` (lines
    "user:password") the client authenticates by digest, also after each reconnection. Without
    ``tls`` it connects to ``trusted`` servers only, by default those of this user and root.
    """
    if trusted is None:
        trusted = TrustedServers()
    # Where the kernel names no users, a client without a credential has nothing to lose.
    checked = trusted if auth or can_identify_peers() else None
    retry = KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_jitter=0.4, max_delay=1.0)
    credentials = [("digest", line) for line in auth.split("\n")] if auth else None
    client = KazooClient(
        hosts=hosts,
        timeout=session_timeout_ms / 1000.0,
        handler=_Handler(tls, checked),
        connection_retry=retry,
        randomize_hosts=True,
        auth_data=credentials,
    )
    # As kazoo makes the connection that this one replaces.
    retry = retry.copy()
    retry.interrupt = client._stopped.is_set
    connection = LeaseConnection(client, retry, logger=client.logger)
    client._connection = connection
    return client, connection


class MultiRead(NamedTuple):
    """Read of many nodes, in the form of kazoo's requests.

    Servers support it from release 3.6 on.
    """

    paths: tuple[str, ...]
    children: bool = False
    """Lists of children instead of data."""
    type: int = 22
    """Code of ``multiRead`` in ZooKeeper's protocol."""

    def serialize(self) -> bytearray:
        """Bytes of the request."""
        raw = bytearray()
        request = GetChildren if self.children else GetData
        for path in self.paths:
            raw += MultiHeader(request.type, False, -1).serialize()
            raw += request(path, None).serialize()
        raw += MultiHeader(-1, True, -1).serialize()
        return raw

    @staticmethod
    def deserialize(raw: bytes, offset: int) -> list[Any]:
        """(data, stat) or the children of each path.

        ``None`` for a missing node. Raises every other error of the server.
        """
        results: list[Any] = []
        header, offset = MultiHeader.deserialize(raw, offset)
        while not header.done:
            if header.type == GetData.type:
                data, stat = GetData.deserialize(raw, offset)
                results.append((data, stat))
                offset += int_struct.size + len(data or b"") + stat_struct.size
            elif header.type == GetChildren.type:
                names = GetChildren.deserialize(raw, offset)
                results.append(names)
                offset += int_struct.size
                offset += sum(int_struct.size + len(name.encode()) for name in names)
            elif EXCEPTIONS[header.err] is NoNodeError:
                results.append(None)
                offset += int_struct.size
            else:
                raise EXCEPTIONS[header.err]()
            header, offset = MultiHeader.deserialize(raw, offset)
        return results


def multi_read_async(client: Any, paths: Sequence[str], children: bool = False) -> Any:
    """Send a :class:`MultiRead`, and return kazoo's asynchronous result."""
    result = client.handler.async_result()
    client._call(MultiRead(tuple(paths), children), result)
    return result
