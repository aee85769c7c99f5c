"""User at the other end of a TCP connection on this machine, by the kernel."""

import errno
import functools
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Any

from storm_dagster.security.settings import Security

# Constants of the kernel's sock_diag interface: NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY,
# NLM_F_REQUEST and NLMSG_ERROR.
_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST = 1
_ERROR = 2

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Tables of the kernel with all TCP sockets, one on each line below a heading."""


def _table_addresses(address: tuple[Any, ...]) -> set[str]:
    """Forms of ``(host, port)`` in a table.

    A socket for IPv6 has another form of an IPv4 address.
    """
    name, port, *_ = address
    host = ipaddress.ip_address(str(name).partition("%")[0])
    unmapped = getattr(host, "ipv4_mapped", None) or host
    hosts = [unmapped]
    if unmapped.version == 4:
        hosts.append(ipaddress.ip_address(f"::ffff:{unmapped}"))
    return {f"{_table_host(form.packed)}:{port:04X}" for form in hosts}


def _table_host(packed: bytes) -> str:
    """Address as a table prints it: words of 4 bytes in the order of this machine."""
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words)


def _user_by_kernel(own: tuple[Any, ...], peer: tuple[Any, ...]) -> int | None:
    """As :func:`peer_user`, by one request to the kernel.

    Raises ``OSError`` if the kernel refuses it.
    """
    own_host, own_port, *_ = own
    peer_host, peer_port, *_ = peer
    family = socket.AF_INET6 if ":" in str(own_host) else socket.AF_INET
    # ``inet_diag_req_v2``: a socket in any state whose own end is the peer, on any interface, with
    # any cookie.
    query = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    query += struct.pack("!HH", peer_port, own_port)
    for host in (peer_host, own_host):
        query += socket.inet_pton(family, str(host).partition("%")[0]).ljust(16, b"\0")
    query += struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    header = struct.pack("=IHHII", 16 + len(query), _BY_FAMILY, _REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(1)
        kernel.sendto(header + query, (0, 0))
        response = kernel.recv(4096)
    (message_type,) = struct.unpack_from("=H", response, 4)
    if message_type == _ERROR:
        (code,) = struct.unpack_from("=i", response, 16)
        if code == -errno.ENOENT:
            return None
        raise OSError(-code, "no answer about sockets")
    # ``inet_diag_msg`` begins at byte 16: its ports are at 20, user and inode at 80.
    user, inode = struct.unpack_from("=II", response, 80)
    # For a closed connection the kernel returns the listening socket, which has no peer port.
    is_connected = struct.unpack_from("!HH", response, 20) == (peer_port, own_port)
    if not is_connected or inode == 0:
        return None
    return user


def peer_user(own: tuple[Any, ...], peer: tuple[Any, ...]) -> int | None:
    """User id of the process that holds the other end of a connection.

    ``own`` and ``peer`` are the addresses of the two ends, as of ``getsockname``. ``None`` if no
    process of this machine holds it, or the process has closed it.
    """
    try:
        return _user_by_kernel(own, peer)
    except (AttributeError, OSError, struct.error):
        # The tables are slower: they list every socket of the machine.
        return _user_by_tables(own, peer)


def _user_by_tables(own: tuple[Any, ...], peer: tuple[Any, ...]) -> int | None:
    """As :func:`peer_user`, by the tables of all sockets; their local end is the peer."""
    local_addresses = _table_addresses(peer)
    remote_addresses = _table_addresses(own)
    for table in _TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            local = fields[1]
            remote = fields[2]
            user = fields[7]
            inode = fields[9]
            # With inode 0, no process holds the socket, and the user in the table is meaningless.
            if local in local_addresses and remote in remote_addresses and inode != "0":
                return int(user)
    return None


def is_own_peer(own: Any, peer: Any) -> bool:
    """True if a connection comes from this user, or from root.

    Root has all rights anyway.
    """
    return bool(own) and bool(peer) and peer_user(own, peer) in (os.geteuid(), 0)


@functools.cache
def can_identify_peers() -> bool:
    """True if the kernel names the user of a connection.

    macOS and some sandboxes do not.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        return is_own_peer(server.getsockname(), client.getsockname())


def owners_only(security: Security) -> bool:
    """True if a port accepts only connections of this user and root.

    This is so if no secret is configured and the kernel names the users of connections.
    """
    return not security.configured and can_identify_peers()
