"""Users at the other ends of the links between workers that have no key.

With a key (the cluster has a secret) both ends prove that they know it. Without one, the kernel
says which user holds the other end of a connection: a worker ends connections of other users to its
port, and sends nothing on a connection to a worker of another user.
"""

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import zmq

from storm_dagster.operations.live.link_connections import check_connection, read_event
from storm_dagster.security.own_connections import duplicate
from storm_dagster.security.peers import is_own_peer
from storm_dagster.security.server_identity import TrustedServers, UntrustedServer

_log = logging.getLogger(__name__)

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_MONITOR_STOPPED
)
_RETRY_SECS = 0.1
"""Pause before a lost link is connected again. A worker that was killed is back in half a second.
"""


@dataclass(eq=False)
class Link:
    """Socket that sends to one peer."""

    socket: zmq.Socket[bytes]
    address: str
    """``host:port`` of the peer."""
    may_send: bool
    """False until the server of its connection is known to be the peer; true with a key."""
    is_over: bool = False
    """True after an event by which it is lost."""

    def close(self, linger_millis: int = 0) -> None:
        """Close the socket."""
        # Before the close: otherwise ZeroMQ's thread waits permanently for a reader of the event.
        self.socket.disable_monitor()
        self.socket.close(linger_millis)


class LinkChecks:
    """Thread that checks the server of each new connection of the links without a key.

    A socket of such a link connects once in its life (``RECONNECT_IVL`` of -1): one that was
    checked is not replaced by one that was not. The loop makes another socket for a link in
    :attr:`lost`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        trusted: TrustedServers,
        wake: Callable[[], None],
    ) -> None:
        """``wake`` wakes the loop: a link may send, or is lost."""
        self.lost: deque[Link] = deque()
        """Links whose connection ended, was refused or was not made."""
        self._context = context
        self._trusted = trusted
        self._wake = wake
        self._numbers = itertools.count()
        self._new: SimpleQueue[tuple[Link, zmq.Socket[bytes]] | None] = SimpleQueue()
        """Links to watch, with their monitors; ``None``: the end."""
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watched: dict[zmq.Socket[bytes], Link] = {}
        self._due: deque[tuple[float, Link]] = deque()
        """(monotonic time, link) of the lost links whose pause is not over, by time."""
        self._refused: set[str] = set()
        """Addresses whose refusal was logged."""
        self._thread = threading.Thread(target=self._run, name="link-checks", daemon=True)
        self._thread.start()

    def watch(self, link: Link) -> None:
        """Check the link's connection, which is not made yet; the loop calls it."""
        # PyZMQ's own name of a monitor is used again too early.
        place = f"inproc://link-{next(self._numbers)}"
        link.socket.monitor(place, _EVENTS)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(place)
        self._new.put((link, monitor))
        os.eventfd_write(self._news, 1)

    def close(self) -> None:
        """End the thread; after the close of all links, and before the end of the context."""
        self._new.put(None)
        os.eventfd_write(self._news, 1)
        self._thread.join()
        os.close(self._news)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._news, zmq.POLLIN)
        is_open = True
        while is_open:
            for ready, _ in poller.poll(self._next_millis()):
                if ready == self._news:
                    is_open = self._take_new(poller)
                elif not self._on_event(ready):
                    poller.unregister(ready)
                    del self._watched[ready]
                    ready.close()
            self._report_lost()
        for monitor in self._watched:
            monitor.close()

    def _take_new(self, poller: zmq.Poller) -> bool:
        """Begin to watch the new links; false if the thread is to end."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._news)
        with contextlib.suppress(Empty):
            while True:
                entry = self._new.get_nowait()
                if entry is None:
                    return False
                link, monitor = entry
                self._watched[monitor] = link
                poller.register(monitor, zmq.POLLIN)
        return True

    def _on_event(self, monitor: zmq.Socket[bytes]) -> bool:
        """Act for an event of a link; false if its socket is closed."""
        link = self._watched[monitor]
        event = read_event(monitor)
        if event.number == zmq.EVENT_MONITOR_STOPPED:
            return False
        if event.number == zmq.EVENT_CONNECTED and self._is_trusted(link, event.descriptor):
            link.may_send = True
            self._wake()
        elif not link.is_over:
            # It connects no second time; the loop closes it.
            link.is_over = True
            link.may_send = False
            self._due.append((time.monotonic() + _RETRY_SECS, link))
        return True

    def _is_trusted(self, link: Link, descriptor: int) -> bool:
        try:
            check_connection(descriptor, link.address, self._trusted)
        except OSError:
            return False
        except UntrustedServer as error:
            level = logging.DEBUG if link.address in self._refused else logging.WARNING
            _log.log(level, "%s", error.message)
            self._refused.add(link.address)
            return False
        self._refused.discard(link.address)
        return True

    def _next_millis(self) -> int | None:
        """Time to wait until the next pause ends; ``None`` without one."""
        if not self._due:
            return None
        return max(1, round((self._due[0][0] - time.monotonic()) * 1000))

    def _report_lost(self) -> None:
        """Hand the links whose pause is over to the loop."""
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            self.lost.append(self._due.popleft()[1])
            self._wake()


def refuse_other_users(events: zmq.Socket[bytes]) -> None:
    """End connections of other users of this machine; the body of a thread.

    It runs until the context of the socket ends. Such a connection may send before it is ended, but
    knows no token.
    """
    log = _log.warning
    with events, contextlib.suppress(zmq.ContextTerminated):
        while True:
            event = read_event(events)
            with contextlib.suppress(OSError, IndexError), duplicate(event.descriptor) as link:
                own = link.getsockname()
                peer = link.getpeername()
                own_port = event.endpoint.rpartition(":")[2]
                if str(own[1]) == own_port and not is_own_peer(own, peer):
                    link.shutdown(socket.SHUT_RDWR)
                    log(
                        "connections of other users of this machine are ended: "
                        "set storm.secret.file"
                    )
                    log = _log.debug
