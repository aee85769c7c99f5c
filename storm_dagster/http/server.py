"""Listening sockets, and a server of an application on one, in a thread, bounded against slow and
invalid clients.
"""

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
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from storm_dagster.host.waiting import poll
from storm_dagster.http.authentication import certificate_state
from storm_dagster.model.errors import Unavailable
from storm_dagster.security.peers import is_own_peer


def listen(host: str, port: int, key: str) -> socket.socket:
    """A listening socket; :class:`Unavailable` names a port that is taken, and its conf key."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Of its connections too: the body of an answer would wait 40 ms until the client confirms
        # the head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise Unavailable(
                f"port {port} of {host} ({key}) is taken by another process: stop that one, or set {key} to a free port (0: any)"
            ) from None
        raise Unavailable(f"cannot listen on {host}:{port} ({key}): {error.strerror}") from None
    listener.set_inheritable(False)
    return listener


_CHECK_SECS = 5.0


class AnnouncedName:
    """Compares what ``host`` resolves to with ``listener``, which stays where it was bound."""

    def __init__(self, host: str, listener: socket.socket) -> None:
        self._host = host
        self._bound = str(listener.getsockname()[0])
        self.failure: Unavailable | None = None

    def check(self) -> None:
        """:class:`Unavailable` when the name resolves, and to other addresses only."""
        try:
            found = {
                str(info[4][0])
                for info in socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
            }
        except OSError:
            return  # A resolver that is away says nothing about this host.
        if self._bound not in found:
            raise Unavailable(
                f"{self._host} (storm.local.hostname) is now {', '.join(sorted(found))}, and this daemon listens on "
                f"{self._bound}, where nobody looks for it: start it again"
            )

    def run(self, ended: threading.Event, stop: threading.Event) -> None:
        """Check every few seconds until ``ended``; sets ``stop``, with :attr:`failure`, when the
        name has moved.
        """
        while not ended.wait(_CHECK_SECS):
            try:
                self.check()
            except Unavailable as error:
                self.failure = error
                stop.set()
                return


_log = logging.getLogger(__name__)
_MOST_CONNECTIONS = 512
_MOST_SECURED = 192
"""Over TLS, where each has buffers of 256 KiB; handshakes count."""
_HEAD_SECS = 10.0
"""Longest time that a connection may take to bring a request's head, or to take the end of an
answer.
"""
_MOST_HEAD_BYTES = 64 * 1024
_MOST_QUEUED = 16

_Base: Any = AutoHTTPProtocol


class _BoundedProtocol(_Base):
    """A connection that is dropped when no request comes whole: neither silence nor drops of a head
    keep it.

    Bodies have limits of their own, where they are read. A connection that became a WebSocket is no
    longer ours.
    """

    own_user_only = False
    tls: ssl.SSLContext | None = None

    def connection_made(self, transport: Any) -> None:
        """A peer connected."""
        super().connection_made(transport)
        if self.own_user_only and not is_own_peer(
            transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        ):
            _log.warning(
                "a connection of another user of this machine is refused: set storm.secret.file to let it in"
            )
            transport.abort()
        self._head_bytes = 0
        self._idle_since = time.monotonic()
        self._schedule_check()
        self._early: bytes | None = None
        if self.tls is not None:
            # Begun here and not by the server, which would show a connection to no limit before its
            # handshake.
            self._early = b""
            self._handshake = self.loop.create_task(self._secure(transport))
        if len(self.connections) > (_MOST_CONNECTIONS if self.tls is None else _MOST_SECURED):
            # At once: it is told in a later turn of the loop, and several may come in this one.
            victim = _least_deserving(self.connections)
            self.connections.discard(victim)
            victim.transport.abort()

    async def _secure(self, transport: Any) -> None:
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
        # What came with the end of the handshake.
        early, self._early = self._early, None
        if early:
            self.data_received(early)

    @property
    def _waiting(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended."""
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head or a body."""
        if self._early is not None:
            self._early += data
            return
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            if self._head_bytes > _MOST_HEAD_BYTES:
                self.transport.abort()
                return
            self._head_bytes += len(data)
        super().data_received(data)
        # It begins a request whenever one ends, and would queue all that one peer sends without
        # waiting for answers.
        if len(getattr(self, "pipeline", ())) > _MOST_QUEUED:
            self.transport.abort()

    def on_response_complete(self) -> None:
        """An answer was given out; the next head begins."""
        self._head_bytes = 0
        self._idle_since = time.monotonic()
        super().on_response_complete()

    def _schedule_check(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_HEAD_SECS / 2, self._check)

    def _check(self) -> None:
        if self not in self.connections:
            return
        if self._waiting and time.monotonic() - self._idle_since > _HEAD_SECS:
            self.transport.abort()
            return
        self._schedule_check()


def _least_deserving(connections: Collection[Any]) -> Any:
    """Of the peer with the most connections the one that is idle for longest, else the oldest."""
    now = time.monotonic()
    connections = [
        connection for connection in connections if isinstance(connection, _BoundedProtocol)
    ]
    ((greedy, most),) = Counter(
        (connection.client or ("",))[0] for connection in connections
    ).most_common(1)
    theirs = [
        connection
        for connection in connections
        if most == 1 or (connection.client or ("",))[0] == greedy
    ]
    return min(
        theirs,
        key=lambda one: (not (one._waiting and now - one._idle_since > 1.0), one._idle_since),
    )


def _until_disconnect(app: ASGIApp) -> ASGIApp:
    """The application without the error of a peer that leaves in the middle of its request: nobody
    waits for an answer.

    Its traceback in the log would cost more than the request, and any peer could ask for as many as
    it likes.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            await app(scope, receive, send)

    return serve


class HttpService:
    """Serves an application on an open socket in a thread of its own, over TLS with ``tls``.

    With ``own_user_only`` connections of other users of this machine are dropped.
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
            _until_disconnect(app),
            # uvloop may read the beginning of a handshake before it is told that there is one.
            loop="asyncio",
            http=type(
                "_Connection", (_BoundedProtocol,), {"own_user_only": own_user_only, "tls": tls}
            ),
            ws="auto" if websockets else "none",
            ws_max_size=1 << 20,
            log_config=None,
            access_log=False,
            server_header=False,
            # Whoever is on loopback could otherwise name any address as its own.
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
        try:
            self._server.run(sockets=[self._listener])
        except BaseException:
            _log.exception("the HTTP service ended")

    def start(self, timeout: float = 10.0) -> None:
        """Begin to serve; :class:`Unavailable` when that does not happen in time."""
        self._thread.start()
        poll(
            lambda: self._server.started or not self._thread.is_alive(), timeout=timeout, pause=0.01
        )
        if not self._server.started:
            self.stop()
            raise Unavailable(f"the HTTP service {self._name} did not start: see the daemon's log")

    def stop(self) -> None:
        """End within a few seconds; requests in progress get three."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._listener.close()
