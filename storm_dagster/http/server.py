"""HTTP servers in a thread, with bounds against slow and invalid clients."""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Collection
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from storm_dagster.host.waiting import poll
from storm_dagster.http.authentication import certificate_state
from storm_dagster.model.errors import Unavailable
from storm_dagster.security.peers import is_own_peer

_log = logging.getLogger(__name__)
_CHECK_SECS = 5.0
"""Interval between checks of the announced name."""
_MAX_CONNECTIONS = 512
"""Connections without TLS; one more drops the least deserving one."""
_MAX_SECURED = 192
"""Connections over TLS, where each has buffers of 256 KiB; handshakes count."""
_HEAD_SECS = 10.0
"""Longest time that a connection can take to send a request's head, or to receive the end of a
response.
"""
MAX_HEAD_BYTES = 64 * 1024
"""Largest head of a request: a larger one is refused, and its connection closed."""
_MAX_QUEUED = 16
"""Requests of one connection that wait for their turn."""


def listen(host: str, port: int, key: str) -> socket.socket:
    """A listening socket of that address; ``key`` is the conf key of the port.

    :class:`Unavailable` names a port that is in use, and its conf key.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it: the body of a response would wait 40 ms until the client confirms
        # the head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise Unavailable(
                f"port {port} of {host} ({key}) is taken by another process: stop that one, or "
                f"set {key} to a free port (0: any)"
            ) from None
        raise Unavailable(f"cannot listen on {host}:{port} ({key}): {error.strerror}") from None
    listener.set_inheritable(False)
    return listener


class AnnouncedName:
    """Check that ``host`` still resolves to the address of ``listener``."""

    def __init__(self, host: str, listener: socket.socket) -> None:
        self._host = host
        self._bound = str(listener.getsockname()[0])
        self.failure: Unavailable | None = None
        """The error of the check that failed."""

    def check(self) -> None:
        """Raise :class:`Unavailable` if the name has only other addresses."""
        try:
            infos = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
        except OSError:
            return  # An unavailable resolver is not a reason to stop the daemon.
        addresses = {str(info[4][0]) for info in infos}
        if self._bound not in addresses:
            raise Unavailable(
                f"{self._host} (storm.local.hostname) is now {', '.join(sorted(addresses))}, and "
                f"this daemon listens on {self._bound}, where no client looks for it: restart it"
            )

    def run(self, ended: threading.Event, stop: threading.Event) -> None:
        """Check every few seconds until ``ended``.

        Sets :attr:`failure` and then ``stop`` when the name resolves to other addresses.
        """
        while not ended.wait(_CHECK_SECS):
            try:
                self.check()
            except Unavailable as error:
                self.failure = error
                stop.set()
                return


_Base: Any = AutoHTTPProtocol


class _BoundedProtocol(_Base):
    """A connection that is dropped when a head does not arrive in time.

    Single bytes of a head do not extend the time. Bodies have their own limits, where they are
    read. A connection that became a WebSocket is not bounded here.
    """

    # HttpService sets both in a subclass for each service.
    own_user_only = False
    tls: ssl.SSLContext | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin a connection, and drop another one if there are too many."""
        super().connection_made(transport)
        if self.own_user_only and not is_own_peer(
            transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        ):
            _log.warning(
                "a connection of another user of this machine is refused: set storm.secret.file "
                "to let it in"
            )
            transport.abort()
        self._head_bytes = 0
        """Bytes of the head that is being received."""
        self._idle_since = time.monotonic()
        """Time of the end of the last response, or of the begin of the connection."""
        self._schedule_check()
        self._early: bytes | None = None
        """Bytes that arrived during the handshake; ``None`` when it is over."""
        if self.tls is not None:
            # Begun here and not by the server, which counts a connection only after its handshake.
            self._early = b""
            self._handshake = self.loop.create_task(self._secure(transport))
        max_connections = _MAX_CONNECTIONS if self.tls is None else _MAX_SECURED
        if len(self.connections) > max_connections:
            # Removed here: connection_lost runs in a later turn of the loop, and several
            # connections may begin in this turn.
            victim = _least_deserving(self.connections)
            self.connections.discard(victim)
            victim.transport.abort()

    async def _secure(self, transport: Any) -> None:
        """Make the TLS handshake, and begin the connection over its transport.

        A failed handshake drops the connection.
        """
        try:
            secured = await self.loop.start_tls(
                transport, self, self.tls, server_side=True, ssl_handshake_timeout=_HEAD_SECS
            )
            if secured is None:
                raise ConnectionAbortedError("dropped during the handshake")
        except (OSError, asyncio.TimeoutError):
            transport.abort()
            self.connections.discard(self)
            self._timer.cancel()
            return
        super().connection_made(secured)
        self.app_state = {**self.app_state, **certificate_state(secured)}
        # Bytes that arrived with the end of the handshake.
        early_data = self._early
        self._early = None
        if early_data:
            self.data_received(early_data)

    @property
    def _waiting(self) -> bool:
        """True if no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection."""
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes of a head or a body."""
        if self._early is not None:
            self._early += data
            return
        # A cycle is a request and its response: without one in progress these bytes are of a head.
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            self._head_bytes += len(data)
        super().data_received(data)
        # A complete head has begun a request by now, and its size is checked there.
        if self._waiting and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()
            return
        # The base begins a request when the one before it ends. It would queue all requests of a
        # peer that does not wait for responses.
        if len(getattr(self, "pipeline", ())) > _MAX_QUEUED:
            self.transport.abort()

    def on_response_complete(self) -> None:
        """End a response; the next head begins."""
        self._head_bytes = 0
        self._idle_since = time.monotonic()
        super().on_response_complete()

    def _schedule_check(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_HEAD_SECS / 2, self._check)

    def _check(self) -> None:
        """Drop the connection if it has waited for a head for too long; repeated until its end."""
        if self not in self.connections:
            return
        if self._waiting and time.monotonic() - self._idle_since > _HEAD_SECS:
            self.transport.abort()
            return
        self._schedule_check()


def _least_deserving(connections: Collection[Any]) -> Any:
    """The longest idle connection of the peer with the most connections.

    If that peer has no idle connection, its oldest one.
    """
    now = time.monotonic()
    bounded = [connection for connection in connections if isinstance(connection, _BoundedProtocol)]
    connections_by_peer = Counter(_peer_of(connection) for connection in bounded)
    ((largest_peer, count),) = connections_by_peer.most_common(1)
    candidates = bounded
    # If no peer has several, all connections are candidates.
    if count > 1:
        candidates = [connection for connection in bounded if _peer_of(connection) == largest_peer]

    def rank(connection: Any) -> tuple[bool, float]:
        # A connection gets a second to send the head of its next request.
        is_idle = connection._waiting and now - connection._idle_since > 1.0
        return not is_idle, connection._idle_since

    return min(candidates, key=rank)


def _peer_of(connection: Any) -> str:
    """Address of the client of a connection."""
    return (connection.client or ("",))[0]


def _until_disconnect(app: ASGIApp) -> ASGIApp:
    """End a request without an error when its peer disconnects.

    No client waits for the response. A traceback in the log would cost more than the request, and
    any peer could cause as many as it likes.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            await app(scope, receive, send)

    return serve


def _with_bounded_heads(app: ASGIApp) -> ASGIApp:
    """Refuse a request whose head is larger than :data:`MAX_HEAD_BYTES`.

    One that arrives at once is complete before its size is known.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and head_size(scope) > MAX_HEAD_BYTES:
            refusal = PlainTextResponse(
                f"the head of the request has more than {MAX_HEAD_BYTES} bytes: send shorter "
                "headers, or a body\n",
                status_code=431,
                headers={"Connection": "close"},
            )
            await refusal(scope, receive, send)
            return
        await app(scope, receive, send)

    return serve


def head_size(scope: Scope) -> int:
    """Size in bytes of the head of a request, with its line and without other white space."""
    query = scope["query_string"]
    target = (scope.get("raw_path") or scope["path"].encode()) + (b"?" + query if query else b"")
    line_size = len(scope["method"]) + len(target) + len("  HTTP/1.1\r\n")
    headers_size = sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
    return line_size + headers_size + len("\r\n")


class HttpService:
    """Server of an application on an open socket, in its own thread.

    It serves over TLS if it has ``tls``. With ``own_user_only`` connections of other users of this
    machine are dropped.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        name: str = "nimbus-http",
        tls: ssl.SSLContext | None = None,
        websockets: bool = False,
        own_user_only: bool = False,
    ) -> None:
        config = uvicorn.Config(
            _until_disconnect(_with_bounded_heads(app)),
            # uvloop may read the beginning of a handshake before ``start_tls`` is called.
            loop="asyncio",
            http=type(
                "_Connection", (_BoundedProtocol,), {"own_user_only": own_user_only, "tls": tls}
            ),
            ws="auto" if websockets else "none",
            ws_max_size=1 << 20,
            log_config=None,
            access_log=False,
            server_header=False,
            # Otherwise a client on loopback could claim any address.
            proxy_headers=False,
            lifespan="off",
            timeout_keep_alive=5,
            timeout_graceful_shutdown=3,
        )
        self._server = uvicorn.Server(config)
        self._listener = listener
        self._name = name
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def _serve(self) -> None:
        """Body of the thread: serve until :meth:`stop`."""
        try:
            self._server.run(sockets=[self._listener])
        except BaseException:
            _log.exception("the HTTP service ended")

    def start(self, timeout: float = 10.0) -> None:
        """Start to serve; :class:`Unavailable` if that takes too long."""
        self._thread.start()
        poll(
            lambda: self._server.started or not self._thread.is_alive(), timeout=timeout, pause=0.01
        )
        if not self._server.started:
            self.stop()
            raise Unavailable(f"the HTTP service {self._name} did not start: see the daemon's log")

    def stop(self) -> None:
        """Stop within a few seconds; requests in progress get three."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._listener.close()
