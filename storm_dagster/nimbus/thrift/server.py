"""The port: framed messages from many connections, with bounded memory and threads.

Neither Thrift library has a server that survives untrusted clients: each trusts the length in front
of a frame, gives every connection a thread, or waits for ever. One event loop reads and writes
here, calls run in a pool of threads, and whoever is slow or holds too much is the one that is
dropped.
"""

import asyncio
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
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

Read as the length of a frame they are 16 MiB, more than ``nimbus.thrift.max_buffer_size`` allows by
default.
"""
_NO_SASL = (
    "SASL, by which Storm's clients may act for another user (doAsUser), is not served; set "
    "storm.thrift.transport of the client to SimpleTransportPlugin, and let each user show a "
    "certificate of its own"
)

_READ_BYTES = 64 * 1024
_MOST_HANDSHAKES = 64
# asyncio keeps up to twice this of what a client sent too early, uncounted.
_EARLY_BYTES = 16 * 1024
_SWEEP_SECS = 1.0

State = Literal["idle", "receiving", "working", "sending"]


@dataclass(frozen=True)
class ThriftPeer:
    """The other end of a connection."""

    host: str = ""
    user: str | None = None
    """Common name of its certificate."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of clients. Times in seconds, sizes in bytes."""

    frame_bytes: int = 16_384_000
    """Largest frame; a longer one closes its connection before any of it is read."""
    threads: int = 64
    connections: int = 512
    """Most connections; one more drops that which has been idle longest."""
    held_bytes: int | None = None
    """Most bytes of frames and answers of all connections (default: 64 MiB, or 4 frames); beyond
    it, the slowest one is dropped.
    """
    idle_secs: float = 600.0
    """Storm's clients keep a connection for as long as they run."""
    frame_secs: float = 60.0
    """From a frame's first byte to its last."""
    answer_secs: float = 60.0
    """From an answer's first byte to its last."""


class _Connection:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        # asyncio does so only for sockets that were made with their protocol named.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = ThriftPeer(
            host=str((writer.get_extra_info("peername") or ("",))[0]),
            user=next(iter(certificate_state(writer).values()), None),
        )
        self.state: State = "idle"
        self.since = time.monotonic()
        self.held = 0

    def become(self, state: State) -> None:
        self.state = state
        self.since = time.monotonic()

    def drop(self) -> None:
        self.writer.transport.abort()


@dataclass(eq=False, repr=False)
class ThriftServer:
    """Serves ``answer(frame, peer) -> frame | None`` on an open socket, in a thread of its own.

    ``answer`` is called by up to ``limits.threads`` threads at a time, never twice at once for one
    connection; a :class:`MalformedFrame` from it closes the connection. ``own_user_only``: only
    peers that are this user or root.
    """

    _answer: Callable[[bytes, ThriftPeer], bytes | None]
    _listener: socket.socket
    _limits: ServerLimits
    tls: ssl.SSLContext | None = None
    own_user_only: bool = False

    def __post_init__(self) -> None:
        limits = self._limits
        self.connections: set[_Connection] = set()
        self.held_bytes: int = 0
        """Bytes of frames and answers that are held for all clients now."""
        self._most_held = (
            max(64 << 20, 4 * limits.frame_bytes)
            if limits.held_bytes is None
            else limits.held_bytes
        )
        self._threads = ThreadPoolExecutor(limits.threads, thread_name_prefix="nimbus-thrift-call")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._started = threading.Event()
        self.thread = threading.Thread(target=self._serve, name="nimbus-thrift", daemon=True)

    def start(self, timeout: float = 10.0) -> None:
        """Begin to serve; :class:`Unavailable` when that does not happen in time."""
        self.thread.start()
        if not self._started.wait(timeout) or not self.thread.is_alive():
            self.stop()
            raise Unavailable("the Thrift service did not start: see nimbus's log")

    def stop(self) -> None:
        """End within a few seconds; calls that run are not waited for."""
        loop, ended = self._loop, self._ended
        if loop is not None and ended is not None and self.thread.is_alive():
            with suppress(RuntimeError):  # It ended by itself in this moment.
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
        works = [asyncio.create_task(work()) for work in (self._accept, self._sweep)]
        self._started.set()
        await self._ended.wait()
        for work in works:
            work.cancel()
        for connection in list(self.connections):
            connection.drop()

    async def _accept(self) -> None:
        """Take connections; of too many handshakes the oldest ends. A server of asyncio would have
        no limit for them.
        """
        loop, opening = asyncio.get_running_loop(), dict[asyncio.Task[None], None]()
        while True:
            try:
                # Each has its turn before the next is taken: only handshakes that wait for their
                # peer become many.
                await asyncio.sleep(0)
                link, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # Perhaps this process has too many files open.
                _log.warning("no Thrift client is taken now: %s", error)
                await asyncio.sleep(0.2)
                continue
            if len(opening) >= _MOST_HANDSHAKES:
                oldest = next(iter(opening))
                del opening[oldest]
                oldest.cancel()
            task = loop.create_task(self._open(link))
            opening[task] = None
            task.add_done_callback(lambda done: opening.pop(done, None))

    async def _open(self, link: socket.socket) -> None:
        reader = asyncio.StreamReader(limit=_EARLY_BYTES)
        handshake = {} if self.tls is None else {"ssl": self.tls, "ssl_handshake_timeout": 10.0}
        with suppress(OSError, asyncio.TimeoutError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: asyncio.StreamReaderProtocol(reader, self._talk), link, **handshake
            )

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.own_user_only and not is_own_peer(
            *map(writer.get_extra_info, ("sockname", "peername"))
        ):
            _log.warning(
                "a connection of another user of this machine is refused: set storm.secret.file and TLS"
            )
            writer.transport.abort()
            return
        if len(self.connections) >= self._limits.connections and not self._drop_one():
            writer.transport.abort()
            return
        connection = _Connection(writer)
        self.connections.add(connection)
        try:
            while (frame := await self._receive(connection, reader)) is not None:
                await self._reply(connection, frame)
        except MalformedFrame as error:
            _log.info("a Thrift client is disconnected: %s", error)
        except (OSError, EOFError, asyncio.IncompleteReadError, asyncio.CancelledError):
            # It left, or the service ends; nothing else cancels a conversation.
            pass
        except Exception:
            _log.exception("a Thrift connection failed")
        finally:
            self._hold(connection, -connection.held)
            self.connections.discard(connection)
            connection.drop()

    async def _receive(self, connection: _Connection, reader: asyncio.StreamReader) -> bytes | None:
        """The next frame; ``None`` at the orderly end of the connection."""
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
                f"a frame of {size} bytes (first bytes {head!r}), at most {self._limits.frame_bytes} are taken "
                "(nimbus.thrift.max_buffer_size)"
            )
        frame = bytearray()
        while len(frame) < size:
            chunk = await reader.read(min(_READ_BYTES, size - len(frame)))
            if (
                not chunk or connection not in self.connections
            ):  # What a dropped one sent before pushes nobody out.
                return None
            frame += chunk
            self._hold(connection, len(chunk))
        return bytes(frame) if connection in self.connections else None

    async def _reply(self, connection: _Connection, frame: bytes) -> None:
        connection.become("working")
        assert self._loop is not None
        answer = await self._loop.run_in_executor(
            self._threads, self._answer, frame, connection.peer
        )
        self._hold(connection, -connection.held)
        if answer is None:
            return
        connection.become("sending")
        self._hold(connection, len(answer))
        # In one segment: a length sent alone makes the client's kernel wait 40 ms before it
        # acknowledges it.
        connection.writer.write(len(answer).to_bytes(4, "big") + answer)
        await connection.writer.drain()
        # What drain leaves in the transport's buffer is at most its high-water mark.
        self._hold(connection, -connection.held)

    # -- the limits --------------------------------------------------------------------------------

    def _hold(self, connection: _Connection, count: int) -> None:
        connection.held += count
        self.held_bytes += count
        while self.held_bytes > self._most_held:
            share = (
                self._most_held // self._limits.connections
            )  # Whoever holds less pushes nobody out.
            holders = [
                c
                for c in self.connections
                if c.held > share and c.state in ("receiving", "sending")
            ]
            slowest = min(holders, key=lambda c: c.since, default=None)
            if slowest is None:
                return
            _log.warning(
                "a Thrift client is dropped: %d bytes are held for all clients", self.held_bytes
            )
            self.held_bytes -= slowest.held
            slowest.held = 0
            self.connections.discard(slowest)
            slowest.drop()

    def _drop_one(self) -> bool:
        """Make room for a new connection; ``False`` when everybody is busy."""
        now = time.monotonic()
        idle = [c for c in self.connections if c.state == "idle"]
        slow = [c for c in self.connections if c.state == "receiving" and now - c.since > 5]
        found = min(idle or slow, key=lambda c: c.since, default=None)
        if found is None:
            _log.warning(
                "a Thrift client is refused: %d are connected and busy", len(self.connections)
            )
            return False
        self.connections.discard(found)
        found.drop()
        return True

    async def _sweep(self) -> None:
        """Drop those whose time is up."""
        allowed = {
            "idle": self._limits.idle_secs,
            "receiving": self._limits.frame_secs,
            "sending": self._limits.answer_secs,
        }
        while True:
            await asyncio.sleep(min(_SWEEP_SECS, *allowed.values()))
            now = time.monotonic()
            for connection in list(self.connections):
                limit = allowed.get(connection.state)
                if limit is not None and now - connection.since > limit:
                    _log.info(
                        "a Thrift client is dropped: %s for %.0f s",
                        connection.state,
                        now - connection.since,
                    )
                    connection.drop()
