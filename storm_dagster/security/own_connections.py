"""TCP connections that this process has open, of all its libraries."""

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator

_OPEN = (1, 8)
"""States of TCP in which this end can send: ESTABLISHED and CLOSE_WAIT."""
_DESCRIPTORS = "/dev/fd"
"""Folder with the numbers of the open files of this process."""


_one_at_a_time = threading.Lock()
"""Held while duplicates exist: a second listing would duplicate those of the first."""


@contextlib.contextmanager
def connections_to(port: int) -> Iterator[list[socket.socket]]:
    """The connections of this process to servers at that port, at any address.

    They are duplicates, which are closed after the block: a ``shutdown`` ends the connection, a
    ``close`` does not. Other blocks of this process wait for its end. Empty where the system does
    not list the open files of a process.
    """
    with _one_at_a_time, contextlib.ExitStack() as open_links:
        links: list[socket.socket] = []
        for descriptor in _open_descriptors():
            if any(link.fileno() == descriptor for link in links):
                # The number was that of the listing itself, and is now a duplicate's.
                continue
            with contextlib.suppress(OSError):
                link = duplicate(descriptor)
                if _peer_port(link) == port:
                    links.append(open_links.enter_context(link))
                else:
                    link.close()
        yield links


def _open_descriptors() -> list[int]:
    """Numbers of the open files of this process; some may be closed by now."""
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS) if name.isdigit()]
    except OSError:
        return []


def duplicate(descriptor: int) -> socket.socket:
    """Duplicate the socket of a connection that a library holds.

    The connection may have ended since. Its descriptor is another socket's then, or that of no
    socket, for which ``OSError`` is raised.
    """
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(f"file {descriptor} is not a socket")
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _peer_port(link: socket.socket) -> int | None:
    """Port at the other end of a TCP connection that can send; ``None`` without one."""
    if link.family not in (socket.AF_INET, socket.AF_INET6) or link.type != socket.SOCK_STREAM:
        return None
    try:
        # An ended connection stays for a while; its other end no longer has an owner.
        has_tcp_info = hasattr(socket, "TCP_INFO")
        if has_tcp_info and link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in _OPEN:
            return None
        return int(link.getpeername()[1])
    except OSError:
        # It listens, or is not connected yet: nothing can be sent by it.
        return None
