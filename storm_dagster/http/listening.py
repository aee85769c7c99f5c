"""Listening sockets, and the error for a port in use."""

from __future__ import annotations

import errno
import socket

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
