"""Listening sockets, the error for a port in use, and a watch over the address that a daemon announces."""

from __future__ import annotations

import errno
import socket
import threading

from storm_dagster.model.errors import Unavailable


def listen(host: str, port: int, key: str) -> socket.socket:
    """A listening socket; :class:`Unavailable` names a port that is taken, and its conf key."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
            found = {str(info[4][0]) for info in socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)}
        except OSError:
            return  # A resolver that is away says nothing about this host.
        if self._bound not in found:
            raise Unavailable(
                f"{self._host} (storm.local.hostname) is now {', '.join(sorted(found))}, and this daemon listens on "
                f"{self._bound}, where nobody looks for it: start it again"
            )

    def run(self, ended: threading.Event, stop: threading.Event) -> None:
        """Check every few seconds until ``ended``; sets ``stop``, with :attr:`failure`, when the name has moved."""
        while not ended.wait(_CHECK_SECS):
            try:
                self.check()
            except Unavailable as error:
                self.failure = error
                stop.set()
                return
