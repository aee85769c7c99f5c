"""Thrift server: framed messages, with bounded memory and threads.

Neither Thrift library has a server that survives untrusted clients: each trusts the length in front
of a frame, gives every connection a thread, or waits without a limit. Here one event loop reads and
writes, calls run in a pool of threads, and a connection that is slow or holds too much is dropped.
"""

import asyncio
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from storm_dagster.http.authentication import certificate_state
from storm_dagster.model.errors import Unavailable
from storm_dagster.nimbus.thrift.frames import MalformedFrame
from storm_dagster.security.peers import is_own_peer

_log = logging.getLogger(__name__)
_audit = logging.getLogger("storm_dagster.audit")

_SASL_START = b"\x01\0\0\0"
"""First bytes of a client that authenticates by SASL: its status, and the length of a short name.

As the length of a frame they would mean 16 MiB, more than ``nimbus.thrift.max_buffer_size`` allows
by default.
"""
_NO_SASL = (
    "SASL, by which Storm's clients may act for another user (doAsUser), is not served; set "
    "storm.thrift.transport of the client to SimpleTransportPlugin, and let each user show a "
    "certificate of its own"
)

_READ_BYTES = 64 * 1024
"""Largest part of a frame that is read and counted at once."""
_MAX_HANDSHAKES = 64
"""Limit of connections that are accepted and whose handshake has not ended."""
_SLOW_FRAME_SECS = 5.0
"""Time after which an unfinished frame may be dropped to make room for a new connection."""
_EARLY_BYTES = 16 * 1024
"""Limit of a connection's reader: asyncio keeps up to twice this of the data that a client sent too
early, uncounted.
"""
_SWEEP_SECS = 1.0
"""Interval at which connections that have been in a state for too long are dropped."""

State = Literal["idle", "receiving", "working", "sending"]


@dataclass(frozen=True)
class ThriftPeer:
    """The other end of a connection."""

    host: str = ""
    user: str | None = None
    """Common name of its certificate."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of clients: times in seconds, sizes in bytes."""

    frame_bytes: int = 16_384_000
    """Largest frame; a longer one closes its connection before its content is read."""
    threads: int = 64
    """Maximum number of calls that are served at the same time."""
    connections: int = 512
    """Maximum number of connections; one more drops the one that has been idle longest."""
    held_bytes: int | None = None
    """Maximum number of bytes of frames and answers of all connections.

    Beyond it, the slowest connection is dropped. ``None``: 64 MiB, or 4 frames if that is more.
    """
    idle_secs: float = 600.0
    """Storm's clients keep a connection until they end."""
    frame_secs: float = 60.0
    """Time from a frame's first byte to its last."""
    answer_secs: float = 60.0
    """Time from an answer's first byte to its last."""


class _Connection:
    """One client's connection: its state, and the bytes that are held for it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        # asyncio sets this only for sockets that were made with their protocol named.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = _peer_of(writer)
        self.state: State = "idle"
        self.since = time.monotonic()
        """Monotonic time at which the state began."""
        self.held_bytes = 0
        """Number of bytes of its frame or answer that are held now."""

    def become(self, state: State) -> None:
        self.state = state
        self.since = time.monotonic()

    def drop(self) -> None:
        self.writer.transport.abort()


def _peer_of(writer: asyncio.StreamWriter) -> ThriftPeer:
    address = writer.get_extra_info("peername") or ("",)
    users = list(certificate_state(writer).values())
    return ThriftPeer(host=str(address[0]), user=users[0] if users else None)


@dataclass(eq=False, repr=False)
class ThriftServer:
    """Server that calls ``answer(frame, peer) -> frame | None``, in its own thread.

    ``answer`` is called by up to ``limits.threads`` threads at a time, never twice at once for one
    connection; a :class:`MalformedFrame` from it closes the connection. With ``own_user_only`` only
    processes of this user and of root may connect.
    """

    _answer: Callable[[bytes, ThriftPeer], bytes | None]
    _listener: socket.socket
    _limits: ServerLimits
    tls: ssl.SSLContext | None = None
    own_user_only: bool = False

    def __post_init__(self) -> None:
        limits = self._limits
        self.connections: set[_Connection] = set()
        """Connections that count for the limits; one that is dropped no longer does."""
        self.held_bytes: int = 0
        """Number of bytes of frames and answers that are held for all clients now."""
        if limits.held_bytes is None:
            self._max_held_bytes = max(64 << 20, 4 * limits.frame_bytes)
        else:
            self._max_held_bytes = limits.held_bytes
        self._threads = ThreadPoolExecutor(limits.threads, thread_name_prefix="nimbus-thrift-call")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        """Set to end the loop."""
        self._started = threading.Event()
        """Set when the loop runs, or has failed."""
        self.thread = threading.Thread(target=self._serve, name="nimbus-thrift", daemon=True)

    def start(self, timeout: float = 10.0) -> None:
        """Begin to serve; :class:`Unavailable` if the server does not start in time."""
        self.thread.start()
        if not self._started.wait(timeout) or not self.thread.is_alive():
            self.stop()
            raise Unavailable("the Thrift service did not start: see nimbus's log")

    def stop(self) -> None:
        """Stop within a few seconds, without waiting for calls that run."""
        loop = self._loop
        ended = self._ended
        if loop is not None and ended is not None and self.thread.is_alive():
            with suppress(RuntimeError):  # The loop has just ended.
                loop.call_soon_threadsafe(ended.set)
            self.thread.join(timeout=5)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._listener.close()

    # -- the loop ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException:
            _log.exception("the Thrift service ended")
        finally:
            self._started.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._listener.setblocking(False)
        accepting = asyncio.create_task(self._accept())
        sweeping = asyncio.create_task(self._sweep())
        self._started.set()
        await self._ended.wait()
        accepting.cancel()
        sweeping.cancel()
        for connection in list(self.connections):
            connection.drop()

    async def _accept(self) -> None:
        """Accept connections; of too many handshakes the oldest is cancelled.

        asyncio's own server has no limit for handshakes.
        """
        loop = asyncio.get_running_loop()
        opening: dict[asyncio.Task[None], None] = {}  # In the order in which they began.
        while True:
            try:
                # Each connection has its turn before the next is accepted: only handshakes that
                # wait for their peer accumulate.
                await asyncio.sleep(0)
                link, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # For example, this process has too many files open.
                _log.warning("no Thrift client is taken now: %s", error)
                await asyncio.sleep(0.2)
                continue
            if len(opening) >= _MAX_HANDSHAKES:
                oldest = next(iter(opening))
                del opening[oldest]
                oldest.cancel()
            task = loop.create_task(self._open(link))
            opening[task] = None
            task.add_done_callback(lambda ended_task: opening.pop(ended_task, None))

    async def _open(self, link: socket.socket) -> None:
        """Make the handshake of an accepted connection; :meth:`_talk` continues it.

        A connection whose handshake fails is closed.
        """
        reader = asyncio.StreamReader(limit=_EARLY_BYTES)
        handshake = {} if self.tls is None else {"ssl": self.tls, "ssl_handshake_timeout": 10.0}
        with suppress(OSError, asyncio.TimeoutError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: asyncio.StreamReaderProtocol(reader, self._talk), link, **handshake
            )

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it ends; it is refused if there is no place for it."""
        if self.own_user_only:
            own_address = writer.get_extra_info("sockname")
            peer_address = writer.get_extra_info("peername")
            if not is_own_peer(own_address, peer_address):
                _log.warning(
                    "a connection of another user of this machine is refused: "
                    "set storm.secret.file and TLS"
                )
                writer.transport.abort()
                return
        if len(self.connections) >= self._limits.connections and not self._drop_one():
            writer.transport.abort()
            return
        connection = _Connection(writer)
        self.connections.add(connection)
        try:
            while True:
                frame = await self._receive(connection, reader)
                if frame is None:
                    break
                await self._reply(connection, frame)
        except MalformedFrame as error:
            _log.info("a Thrift client is disconnected: %s", error)
        except (OSError, EOFError, asyncio.IncompleteReadError, asyncio.CancelledError):
            # The client left, or the service ends; a conversation is not cancelled otherwise.
            pass
        except Exception:
            _log.exception("a Thrift connection failed")
        finally:
            self._hold(connection, -connection.held_bytes)
            self.connections.discard(connection)
            connection.drop()

    async def _receive(self, connection: _Connection, reader: asyncio.StreamReader) -> bytes | None:
        """Return the next frame; ``None`` at the end of the connection, or if it was dropped."""
        connection.become("idle")
        head = await reader.read(4)
        if not head:
            return None
        connection.become("receiving")
        if len(head) < 4:
            head += await reader.readexactly(4 - len(head))
        if head == _SASL_START:
            peer = connection.peer
            _audit.warning("refused a SASL handshake of %s: %s", peer.user or peer.host, _NO_SASL)
            raise MalformedFrame(f"it begins a SASL handshake: {_NO_SASL}")
        size = int.from_bytes(head, "big", signed=True)
        if not 0 < size <= self._limits.frame_bytes:
            raise MalformedFrame(
                f"a frame of {size} bytes (first bytes {head!r}), at most "
                f"{self._limits.frame_bytes} are taken (nimbus.thrift.max_buffer_size)"
            )
        frame = bytearray()
        while len(frame) < size:
            chunk = await reader.read(min(_READ_BYTES, size - len(frame)))
            if not chunk:
                return None
            if connection not in self.connections:
                # Data of a dropped connection must not cause the drop of another one.
                return None
            frame += chunk
            self._hold(connection, len(chunk))
        if connection not in self.connections:
            return None
        return bytes(frame)

    async def _reply(self, connection: _Connection, frame: bytes) -> None:
        """Serve a call in a thread, and send its answer; ``None`` sends nothing."""
        connection.become("working")
        assert self._loop is not None
        answer = await self._loop.run_in_executor(
            self._threads, self._answer, frame, connection.peer
        )
        self._hold(connection, -connection.held_bytes)
        if answer is None:
            return
        connection.become("sending")
        self._hold(connection, len(answer))
        # Length and answer are one segment: after a length alone, the client's kernel waits 40 ms
        # before it acknowledges.
        connection.writer.write(len(answer).to_bytes(4, "big") + answer)
        await connection.writer.drain()
        # drain leaves at most the high-water mark in the transport's buffer.
        self._hold(connection, -connection.held_bytes)

    # -- the limits --------------------------------------------------------------------------------

    def _hold(self, connection: _Connection, count: int) -> None:
        """Count bytes that are held for a connection, or are no longer (a negative ``count``).

        Above the limit of all connections the slowest one is dropped, but none that holds at most
        its share.
        """
        connection.held_bytes += count
        self.held_bytes += count
        share = self._max_held_bytes // self._limits.connections
        while self.held_bytes > self._max_held_bytes:
            slowest = _oldest(
                other
                for other in self.connections
                if other.held_bytes > share and other.state in ("receiving", "sending")
            )
            if slowest is None:
                return
            _log.warning(
                "a Thrift client is dropped: %d bytes are held for all clients", self.held_bytes
            )
            self.held_bytes -= slowest.held_bytes
            slowest.held_bytes = 0
            self.connections.discard(slowest)
            slowest.drop()

    def _drop_one(self) -> bool:
        """Make room for a new connection; return False if all connections are busy.

        The one that has been idle longest is dropped; without an idle one, the one whose frame has
        been unfinished longest.
        """
        slow_since = time.monotonic() - _SLOW_FRAME_SECS
        oldest = _oldest(
            connection for connection in self.connections if connection.state == "idle"
        )
        if oldest is None:
            oldest = _oldest(
                connection
                for connection in self.connections
                if connection.state == "receiving" and connection.since < slow_since
            )
        if oldest is None:
            _log.warning(
                "a Thrift client is refused: %d are connected and busy", len(self.connections)
            )
            return False
        self.connections.discard(oldest)
        oldest.drop()
        return True

    async def _sweep(self) -> None:
        """Drop connections that have been in their state for too long."""
        limits: dict[State, float] = {
            "idle": self._limits.idle_secs,
            "receiving": self._limits.frame_secs,
            "sending": self._limits.answer_secs,
        }
        while True:
            await asyncio.sleep(min(_SWEEP_SECS, *limits.values()))
            now = time.monotonic()
            for connection in list(self.connections):
                limit = limits.get(connection.state)
                duration = now - connection.since
                if limit is not None and duration > limit:
                    _log.info(
                        "a Thrift client is dropped: %s for %.0f s", connection.state, duration
                    )
                    connection.drop()


def _oldest(connections: Iterable[_Connection]) -> _Connection | None:
    """The connection that has been in its state longest; ``None`` of none."""
    return min(connections, key=lambda connection: connection.since, default=None)
