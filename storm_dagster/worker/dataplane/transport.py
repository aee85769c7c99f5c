"""Transport of frames between workers over ZeroMQ.

One ROUTER socket receives, and one DEALER socket per peer sends.

Socket queues are short, so that a slow receiver blocks its senders through TCP: unsent frames go to
the peer's backlog, and a backlog pauses the spouts of this worker.
"""

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any, cast

import msgspec
import zmq

from storm_dagster.model.errors import Unavailable
from storm_dagster.model.slot import Slot
from storm_dagster.model.values import encode_value
from storm_dagster.model.wire import (
    MAX_FRAME_BYTES,
    MAX_FRAME_CONTAINERS,
    Frame,
    can_travel,
    encode_frame,
)
from storm_dagster.operations.live.worker_requests import secure_client, secure_server
from storm_dagster.security.peers import can_identify_peers
from storm_dagster.security.server_identity import TrustedServers
from storm_dagster.worker.dataplane.link_users import Link, LinkChecks, refuse_other_users
from storm_dagster.worker.dataplane.routes import split_bundle

_log = logging.getLogger(__name__)

_SEND_FRAMES = 64
_RECEIVE_FRAMES = 64
"""Frames in the queue of a socket."""
_SOCKET_BYTES = 256 * 1024
"""Kernel buffers on either side. The default grows to several megabytes: a receiver would accept
tens of thousands of tuples before back pressure starts.
"""
_BUSY_FRAMES = 4
"""Frames in a backlog that start back pressure."""
_BUSY_BYTES = 1024 * 1024
"""Bytes in a backlog that start back pressure."""
_DROP_FRAMES = 2048
"""Frames kept for a peer that cannot be reached; older ones are dropped (their tuples are
replayed).
"""
_DROP_BYTES = 32 * 1024 * 1024
"""Bytes kept for such a peer; one frame may be larger."""
_RECEIVE_BYTES = 8 * 1024 * 1024
"""Bytes after which a pass stops receiving: they are decoded and queued before more are taken.
"""

_RECONNECT_MILLIS = 100
"""Longest pause between two tries to connect. A worker that was killed is back in half a second."""
_PING_MILLIS = 1000
"""Interval of pings on an idle link. ZeroMQ's own thread sends them, so a busy loop does not
matter.
"""
_SILENT_MILLIS = 10_000
"""Silence after which a peer is connected once more, beyond the time that its loop may be blocked.

A firewall or NAT may have forgotten the link, which the kernel notices after a quarter of an hour.
It is not shorter: ZeroMQ reads no pings while its queue is full, and the frames that wait in a link
are lost with it.
"""
_LINGER_MILLIS = 500
"""Time for the last frames of a graceful stop."""

_KEEP_ALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""The kernel drops connections whose other side no longer responds."""
_ROUTER = {
    zmq.LINGER: 0,
    zmq.RCVHWM: _RECEIVE_FRAMES,
    zmq.RCVBUF: _SOCKET_BYTES,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
    # Any name makes ZeroMQ refuse the protocol before 3.0, which no worker speaks: it loses 14 kB
    # with each such peer.
    zmq.ZAP_DOMAIN: b"worker",
}
_DEALER = {
    zmq.LINGER: 0,
    zmq.SNDHWM: _SEND_FRAMES,
    zmq.SNDBUF: _SOCKET_BYTES,
    zmq.IMMEDIATE: 1,
    zmq.RECONNECT_IVL: 20,
    zmq.RECONNECT_IVL_MAX: _RECONNECT_MILLIS,
}

KINDS = ("inits", "acks", "fails", "losses")
"""Messages of tasks to ackers."""
VERDICTS = ("acked", "failed", "lost")
"""Messages of ackers to spouts, about their trees."""
_BY_TASK = KINDS + VERDICTS
Broken = Callable[[Any, Any, Exception], None]
"""(link, bundle, error) of a tuple that cannot be encoded."""


@dataclass(eq=False)
class Peer:
    """Another worker: output of this pass for it, and its backlog."""

    slot: Slot
    link: Link
    alive: bool = False
    """True if its node exists in ZooKeeper."""
    token: str = ""
    """Start token of its worker, if there is one."""
    bit: int = 0
    """See ``WorkerBits``."""
    dirty: list[Any] = field(default_factory=list)
    """Links with buffered bundles."""
    by_task: dict[str, dict[int, list[int]]] = field(
        default_factory=lambda: {name: {} for name in _BY_TASK}
    )
    """One of ``KINDS`` and ``VERDICTS`` -> task -> numbers."""
    touched: list[tuple[int, str, list[int]]] = field(default_factory=list)
    """(acker, start token of a worker, roots of trees that have parts there)."""
    reasons: list[tuple[int, int, str, str]] = field(default_factory=list)
    """Reasons of the roots in ``fails`` and ``failed`` of :attr:`by_task`."""
    pressure: bool | None = None
    """This and the next four: as in ``Frame``, for the next frame; ``None``: nothing to say."""
    full: list[str] | None = None
    away: list[str] | None = None
    report: Any = None
    loads: list[tuple[int, float]] | None = None
    backlog: deque[bytes] = field(default_factory=deque)
    """Encoded frames that are not sent, oldest first."""
    backlog_bytes: int = 0
    dropped: int = 0
    """Frames that were dropped from the backlog."""

    def has_news(self) -> bool:
        """True if there is content for the next frame: all else comes with a part of it."""
        return bool(
            self.dirty
            or self.touched
            or self.pressure is not None
            or self.report is not None
            or self.loads is not None
            or any(self.by_task.values())
        )

    def frames(self, token: str, max_bundles: int, broken: Broken) -> Iterator[bytes]:
        """Encode and clear the output for the peer.

        Frames have at most ``max_bundles`` bundles. The first one has all acks and inits: a
        receiver that stops after some of the frames has the inits of the tuples that it processed.
        """
        # Measured by benchmarks/dataplane.py.
        dirty = self.dirty
        self.dirty = []
        bundles_of_links = [(link, link.take()) for link in dirty]
        by_task: dict[str, Any] = {
            name: list(numbers.items()) for name, numbers in self.by_task.items() if numbers
        }
        frame = first = Frame(
            token,
            pressure=self.pressure,
            report=self.report,
            loads=self.loads,
            full=self.full,
            to=self.token,
            touched=self.touched,
            reasons=self.reasons,
            away=self.away,
            **by_task,
        )
        self.by_task.update((name, {}) for name in by_task)
        self.touched = []
        self.reasons = []
        self.pressure = self.report = self.loads = self.full = self.away = None
        groups: list[Any] = []
        senders: list[Any] = []
        room = max_bundles
        for link, items in bundles_of_links:
            # Not <=: bundles that fill the frame exactly must end it, below.
            if len(items) < room:
                groups.append((link.task, link.source, link.stream, items))
                senders.append(link)
                room -= len(items)
                continue
            pieces = iter(items)
            while piece := list(islice(pieces, room)):
                groups.append((link.task, link.source, link.stream, piece))
                senders.append(link)
                room -= len(piece)
                if room <= 0:
                    frame.groups = groups
                    yield from _encoded(frame, senders, broken)
                    frame = Frame(token, to=self.token)
                    groups = []
                    senders = []
                    room = max_bundles
        frame.groups = groups
        if groups or frame is first:
            yield from _encoded(frame, senders, broken)


_TUPLES_OF_BUNDLE = itemgetter(2)


def _count_sent(link: Any, bundles: Iterable[tuple[Any, int, list[Any]]], group: bytes) -> None:
    """Count the tuples and bytes of one link.

    Other parts of a frame belong to no stream.
    """
    # Measured by benchmarks/dataplane.py.
    link.count("remote_tuples", link.stream, sum(map(len, map(_TUPLES_OF_BUNDLE, bundles))))
    link.count("remote_bytes", link.stream, len(group))


def _encoded(frame: Frame, senders: list[Any], broken: Broken) -> Iterator[bytes]:
    """Encode a frame with groups of the links ``senders``, in order.

    Yields several frames if it cannot travel as one.
    """
    groups = frame.groups
    try:
        # Groups are encoded separately, so that their bytes are known; the frame holds the bytes.
        # Measured by benchmarks/dataplane.py.
        encoded_groups = [encode_frame(group) for group in groups]
        frame.groups = cast("Any", [msgspec.Raw(group) for group in encoded_groups])
        raw = encode_frame(frame)
        if can_travel(raw):
            for link, group, encoded in zip(senders, groups, encoded_groups, strict=True):
                _count_sent(link, group[3], encoded)
            yield raw
            return
    except Exception:
        # Of any type: the user's own code may run (a time zone, for one).
        pass
    yield from _encode_separately(frame, groups, senders, broken)


def _encode_separately(
    frame: Frame, groups: list[Any], senders: list[Any], broken: Broken
) -> Iterator[bytes]:
    """Encode a frame without groups, and then one bundle at a time.

    This is rare. It finds the tuples that MessagePack cannot hold, and divides bundles that are too
    large.
    """
    frame.groups = []
    try:
        yield encode_frame(frame)
    except Exception:
        # Its acks must arrive; the next report is due in seconds.
        _log.exception("a report cannot be encoded, and is dropped")
        frame.report = None
        yield encode_frame(frame)
    for link, (task, source, stream, items) in zip(senders, groups, strict=True):
        waiting = list(reversed(items))
        while waiting:
            item = waiting.pop()
            root, edge, tuples = item
            raws: list[Any] = tuples
            try:
                raws = [_to_raw(values) for values in tuples]
                encoded = encode_frame((task, source, stream, [(root, edge, raws)]))
                single_group: Any = [msgspec.Raw(encoded)]
                raw = encode_frame(Frame(frame.token, single_group, to=frame.to))
                if can_travel(raw):
                    _count_sent(link, (item,), encoded)
                    yield raw
                    continue
                error: Exception = ValueError(
                    f"a tuple of {len(raw)} bytes is over the limit of {MAX_FRAME_BYTES} bytes or "
                    f"{MAX_FRAME_CONTAINERS} lists, maps and other containers: send a reference to "
                    "it (a path, a key), or several smaller tuples"
                )
            except Exception as cause:
                error = cause
            if len(tuples) > 1:
                halves = split_bundle((root, edge, raws), (len(tuples) + 1) // 2)
                waiting.extend(reversed(halves))
            else:
                broken(link, item, error)


def _to_raw(values: Any) -> msgspec.Raw:
    return values if type(values) is msgspec.Raw else msgspec.Raw(encode_value(values))


class Transport:
    """Sockets of a worker. Used only by the loop, except :meth:`wake`.

    With a ``link_key`` (the cluster has a secret), connections without it are refused; without one,
    connections of other users, and nothing is sent to a worker that is not ``trusted``.
    ``blocked_secs``: longest time for which a peer does not receive.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        batch: int,
        link_key: str = "",
        blocked_secs: float = 30.0,
        trusted: TrustedServers | None = None,
    ) -> None:
        self.token = token
        self._link_key = link_key
        # ZeroMQ accepts little more.
        self._silent_millis: int = min(_SILENT_MILLIS + round(blocked_secs * 1000), 6_000_000)
        self.batch = batch
        """Largest number of bundles in a frame."""
        self.peers: dict[Slot, Peer] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._socket(zmq.ROUTER, _ROUTER)
        secure_server(self._router, link_key)
        if not link_key and can_identify_peers():
            # Before `bind`, so that no connection is missed. Not where the kernel names no users.
            events = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED)
            threading.Thread(target=refuse_other_users, args=(events,), daemon=True).start()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._checks: LinkChecks | None = None
        """Checks of the workers to which links lead; ``None`` with a key."""
        if not link_key:
            self._checks = LinkChecks(self._context, trusted or TrustedServers(), self.wake)
        try:
            self._router.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise Unavailable(
                f"{host}:{port} cannot be bound ({error.strerror}): another worker or "
                "program holds the port"
            ) from None
        self.port: int = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        """The bound port (any free one if 0 was requested)."""
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wakeup, zmq.POLLIN)

    def _socket(
        self, kind: int, options: Mapping[zmq.SocketOption, int | bytes]
    ) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option, value in {**options, **_KEEP_ALIVE}.items():
            socket.setsockopt(option, value)
        return socket

    # -- peers -------------------------------------------------------------------------------------

    def set_peers(self, addresses: dict[Slot, str], alive: Iterable[Slot]) -> list[bytes]:
        """Connect to these slots, and drop all other peers.

        A peer with a new address gets a new connection. Returns the unsent frames of the dropped
        connections. ``alive``: slots whose worker has a node in ZooKeeper.
        """
        living = set(alive)
        unsent: list[bytes] = []
        for slot, peer in list(self.peers.items()):
            if addresses.get(slot) != peer.link.address:
                peer.link.close()
                unsent += peer.backlog
                del self.peers[slot]
        for slot, address in addresses.items():
            peer = self.peers.get(slot)
            if peer is None:
                peer = self.peers[slot] = Peer(slot, self._connect(address))
            peer.alive = slot in living
        return unsent

    def _connect(self, address: str) -> Link:
        """Make a link to the worker at ``host:port``."""
        # Only this side sends pings: ZeroMQ's timer would end the process of a router whose input
        # is stopped and whose peer has left.
        heartbeat = {
            zmq.HEARTBEAT_TIMEOUT: self._silent_millis,
            zmq.HEARTBEAT_TTL: self._silent_millis,
            zmq.HEARTBEAT_IVL: _PING_MILLIS,
        }
        socket = self._socket(zmq.DEALER, {**_DEALER, **heartbeat})
        link = Link(socket, address, may_send=self._checks is None)
        if self._checks is None:
            secure_client(socket, self._link_key)
        else:
            # No reconnection by itself: another process may listen by then, and would get the
            # next frame.
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
            self._checks.watch(link)
        socket.connect(f"tcp://{address}")
        return link

    def _connect_again(self, checks: LinkChecks) -> None:
        """Make new links in place of those that were lost."""
        while checks.lost:
            lost = checks.lost.popleft()
            for peer in self.peers.values():
                if peer.link is lost:
                    lost.close()
                    peer.link = self._connect(lost.address)

    def flush(self, broken: Broken) -> None:
        """Send this pass's output.

        The backlog keeps the unsent frames in order.
        """
        # Measured by benchmarks/dataplane.py.
        checks = self._checks
        if checks is not None and checks.lost:
            self._connect_again(checks)
        for peer in self.peers.values():
            if peer.has_news():
                for raw in peer.frames(self.token, self.batch, broken):
                    peer.backlog.append(raw)
                    peer.backlog_bytes += len(raw)
            backlog = peer.backlog
            if not peer.alive:
                # Kept for the next worker: a process that is ending may still be connected.
                while len(backlog) > _DROP_FRAMES or (
                    peer.backlog_bytes > _DROP_BYTES and len(backlog) > 1
                ):
                    peer.backlog_bytes -= len(backlog.popleft())
                    peer.dropped += 1
                continue
            if not peer.link.may_send:
                continue
            try:
                while backlog:
                    peer.link.socket.send(backlog[0], zmq.NOBLOCK)
                    peer.backlog_bytes -= len(backlog.popleft())
            except zmq.Again:
                pass

    def busy(self) -> list[Slot]:
        """Live peers that receive more slowly than this worker sends."""
        return [
            slot
            for slot, peer in self.peers.items()
            if peer.backlog
            and peer.alive
            and (len(peer.backlog) > _BUSY_FRAMES or peer.backlog_bytes > _BUSY_BYTES)
        ]

    def waiting(self) -> bool:
        """True if a frame for a live worker waits to be sent."""
        return any(peer.alive and peer.backlog for peer in self.peers.values())

    def dropped(self) -> int:
        """Frames dropped because their peer could not be reached."""
        return sum(peer.dropped for peer in self.peers.values())

    # -- receiving ---------------------------------------------------------------------------------

    def receive(self, max_messages: int) -> list[list[bytes]]:
        """Receive messages: at most ``max_messages``.

        Fewer if they are large. Each message is [sender, ..., payload].
        """
        # Measured by benchmarks/dataplane.py.
        messages: list[list[bytes]] = []
        size = 0
        receive = self._router.recv_multipart
        while len(messages) < max_messages and size < _RECEIVE_BYTES:
            try:
                messages.append(receive(zmq.NOBLOCK))
                size += len(messages[-1][-1])
            except zmq.Again:
                break
        return messages

    def reply(self, envelope: list[bytes], payload: bytes) -> None:
        """Respond to a request.

        A client that has left or is slow misses the response.
        """
        try:
            self._router.send_multipart([*envelope, payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.debug("a reply could not be sent: %s", error)

    def wait(self, secs: float | None) -> None:
        """Sleep until a message arrives, or ``secs`` have passed.

        :meth:`wake` ends the sleep, too.
        """
        millis = None if secs is None else max(1, int(secs * 1000 + 0.5))
        if any(ready == self._wakeup for ready, _ in self._poller.poll(millis)):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)

    def wake(self) -> None:
        """End :meth:`wait`; any thread."""
        # A full counter wakes it anyway; a closed one has no sleeper.
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wakeup, 1)

    def close(self, linger: bool = False) -> None:
        """Close all sockets and drop the backlogs.

        With ``linger``, frames that were sent before may still leave.
        """
        for peer in self.peers.values():
            peer.link.close(_LINGER_MILLIS if linger else 0)
        self.peers.clear()
        if self._checks is not None:
            self._checks.close()
        self._router.close()
        self._context.term()
        descriptor = self._wakeup
        self._wakeup = -1
        if descriptor >= 0:
            os.close(descriptor)
