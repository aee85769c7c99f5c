"""Connections of ZeroMQ to workers without a key: the server's user is asked before a byte is sent.

Such a socket connects once in its life (``RECONNECT_IVL`` of -1), and its monitor names the
connection. ZeroMQ alone would connect once more, and send at once, to another listener of that
address.
"""

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from storm_dagster.security.own_connections import duplicate
from storm_dagster.security.server_identity import TrustedServers

if TYPE_CHECKING:
    import zmq


class MonitorEvent(NamedTuple):
    """Event of a monitor of ZeroMQ."""

    number: int
    """Kind of the event, as ``zmq.EVENT_CONNECTED``."""
    descriptor: int
    """Descriptor of the connection; -1, or another value, for an event without one."""
    endpoint: str
    """Endpoint of the monitored socket, as ``tcp://127.0.0.1:6700``."""


def read_event(monitor: "zmq.Socket[Any]") -> MonitorEvent:
    """Read the next event of a monitor."""
    # 16 bits of the event and 32 of its value. The parser of PyZMQ loads all of asyncio.
    event, endpoint = monitor.recv_multipart()
    number = int.from_bytes(event[:2], sys.byteorder)
    value = int.from_bytes(event[2:], sys.byteorder, signed=True)
    return MonitorEvent(number, value, endpoint.decode("utf-8", "replace"))


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
