"""Extension of kazoo's connection: lease arithmetic, the negotiated timeout, short connects.

kazoo exposes neither the session timeout that the server granted nor when an answered request had
been sent. Both are needed to know until when a session certainly lives
(``docs/decisions.md#one-owner``), and both pass through these few methods. Nothing else in the
package touches kazoo's private parts.
"""

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

CONNECT_SECONDS = 1.0
"""Longest wait for the TCP connection to one server before the next one is tried."""

_HANDSHAKE_SECONDS = 5.0
_SESSION_GONE = {-112, -118}  # SessionExpired, SessionMoved: answers that prove no lease


@dataclass(frozen=True)
class SessionLease:
    """Lease of the session by its newest response. Replaced as a whole, so reading it needs no
    lock.
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
    """kazoo's, with short connects, and a TLS context of ours: kazoo's trusts the system's
    authorities as well.
    """

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        super().__init__()
        self._tls = tls

    def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        # kazoo would wait a whole session timeout for each host that swallows packets.
        kwargs["timeout"] = min(kwargs.get("timeout") or CONNECT_SECONDS, CONNECT_SECONDS)
        link = super().create_connection(*args, **kwargs)
        if self._tls is None:
            return link
        # It closes the link when it fails.
        link.settimeout(_HANDSHAKE_SECONDS)
        return self._tls.wrap_socket(link, server_hostname=kwargs["hostname"].strip("[]"))

    def select(self, rlist: Any, wlist: Any, xlist: Any, timeout: float | None = None) -> Any:
        # What TLS has decrypted already is not seen by the kernel.
        buffered = [each for each in rlist if isinstance(each, ssl.SSLSocket) and each.pending()]
        ready = super().select(rlist, wlist, xlist, 0 if buffered else timeout)
        return ([*buffered, *(each for each in ready[0] if each not in buffered)], *ready[1:])


class LeaseConnection(ConnectionHandler):
    """kazoo's connection with the send time of each request that is not answered yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lease = SessionLease()
        self._sent_boot: dict[int, float] = {}
        self._ping_sent_boot = 0.0
        self.tls_errors: deque[ssl.SSLError] = deque(maxlen=100)
        """The newest failures of TLS since the last session began; a client tries again for
        ever.
        """

    @contextmanager
    def _socket_error_handling(self) -> Iterator[None]:
        with super()._socket_error_handling():
            try:
                yield
            except ssl.SSLError as error:
                self.tls_errors.append(error)
                raise

    def forget_lease(self) -> None:
        """Drop the lease: the session is over."""
        self.lease = SessionLease()

    def _answered(self, sent_boot: float) -> None:
        old = self.lease
        if old.session_id and sent_boot > old.answered_boot:
            self.lease = replace(old, answered_boot=sent_boot)

    def _invoke(self, timeout: float, request: Any, xid: int | None = None) -> Any:
        sent = boot_clock()
        result: Any = super()._invoke(timeout, request, xid)
        if isinstance(request, Connect):
            answer = result[0]
            self._sent_boot.clear()
            self._ping_sent_boot = 0.0
            if answer.time_out > 0:
                self.tls_errors.clear()
                self.lease: SessionLease = SessionLease(
                    answer.session_id, sent, answer.time_out, sent
                )
        return result

    def _submit(self, request: Any, timeout: float, xid: int | None = None) -> None:
        # Taken before the bytes leave: a lease may end too early, never too late.
        if xid == PING_XID:
            self._ping_sent_boot = boot_clock()
        elif xid and xid != AUTH_XID:
            self._sent_boot[xid] = boot_clock()
        super()._submit(request, timeout, xid)

    def _read_header(self, timeout: float) -> Any:
        header, buffer, offset = super()._read_header(timeout)
        if header.xid == PING_XID:
            self._answered(self._ping_sent_boot)
        else:
            sent = self._sent_boot.pop(header.xid, None)
            if sent is not None and header.err not in _SESSION_GONE:
                self._answered(sent)
        return header, buffer, offset


def make_client(
    hosts: str, session_timeout_ms: int, auth: str | None = None, tls: ssl.SSLContext | None = None
) -> tuple[KazooClient, LeaseConnection]:
    """A kazoo client that is not started yet, and its connection.

    It goes on reconnecting in the background at most a second apart for as long as it is open;
    requests never wait for that, see :class:`~storm_dagster.zk.session.ZkSession`. With ``auth``
    (lines "user:password") the client proves itself by digest, also after each reconnection.
    """
    retry = KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_jitter=0.4, max_delay=1.0)
    client = KazooClient(
        hosts=hosts,
        timeout=session_timeout_ms / 1000.0,
        handler=_Handler(tls),
        connection_retry=retry,
        randomize_hosts=True,
        auth_data=[("digest", one) for one in auth.split("\n")] if auth else None,
    )
    retry = retry.copy()
    retry.interrupt = client._stopped.is_set
    connection = LeaseConnection(client, retry, logger=client.logger)
    client._connection = connection
    return client, connection


class MultiRead(NamedTuple):
    """The request, as kazoo's own ones are made; servers know it since release 3.6."""

    paths: tuple[str, ...]
    children: bool = False
    """Lists of children instead of data."""
    type: int = 22

    def serialize(self) -> bytearray:
        """The bytes of the request."""
        raw, kind = bytearray(), GetChildren if self.children else GetData
        for path in self.paths:
            raw += MultiHeader(kind.type, False, -1).serialize() + kind(path, None).serialize()
        return raw + MultiHeader(-1, True, -1).serialize()

    @staticmethod
    def deserialize(raw: bytes, offset: int) -> list[Any]:
        """(data, stat) or the children of each path, ``None`` for a missing node; raises what else
        the server refuses.
        """
        found: list[Any] = []
        header, offset = MultiHeader.deserialize(raw, offset)
        while not header.done:
            if header.type == GetData.type:
                found.append(GetData.deserialize(raw, offset))
                offset += int_struct.size + len(found[-1][0] or b"") + stat_struct.size
            elif header.type == GetChildren.type:
                found.append(GetChildren.deserialize(raw, offset))
                offset += int_struct.size + sum(
                    int_struct.size + len(name.encode()) for name in found[-1]
                )
            elif EXCEPTIONS[header.err] is NoNodeError:
                found.append(None)
                offset += int_struct.size
            else:
                raise EXCEPTIONS[header.err]()
            header, offset = MultiHeader.deserialize(raw, offset)
        return found


def multi_read_async(client: Any, paths: Sequence[str], children: bool = False) -> Any:
    """kazoo's asynchronous result of that request."""
    result = client.handler.async_result()
    client._call(MultiRead(tuple(paths), children), result)
    return result
