"""Connections of ZeroMQ to workers without a key: the server's user is asked before a byte is sent.

Such a socket connects once in its life (``RECONNECT_IVL`` of -1), and its monitor names the
connection. ZeroMQ alone would connect once more, and send at once, to another listener of that
address.
"""

import sys
from typing import TYPE_CHECKING, Any

from storm_dagster.security.own_connections import duplicate
from storm_dagster.security.server_identity import TrustedServers

if TYPE_CHECKING:
    import zmq


def read_event(monitor: "zmq.Socket[Any]") -> tuple[int, int]:
    """Next event of a monitor: its number, and its value, of most of them a descriptor."""
    # 16 bits of the event and 32 of its value. The parser of PyZMQ loads all of asyncio.
    event, _ = monitor.recv_multipart()
    number = int.from_bytes(event[:2], sys.byteorder)
    return number, int.from_bytes(event[2:], sys.byteorder, signed=True)


def check_connection(descriptor: int, address: str, trusted: TrustedServers) -> None:
    """Check the server of a connection to the worker at ``host:port``.

    Raises :class:`~storm_dagster.security.server_identity.UntrustedServer` if it is not trusted,
    and ``OSError`` if the connection has ended.
    """
    host, _, port = address.rpartition(":")
    with duplicate(descriptor) as link:
        if str(link.getpeername()[1]) != port:
            raise OSError("the descriptor is another connection's by now")
        trusted.check_socket(link, server=f"the worker at {address}", name=host)
