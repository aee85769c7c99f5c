"""User at the other end of a TCP connection on this machine, by the kernel."""

import functools
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Any

from storm_dagster.security.settings import Security

# Constants of the kernel's sock_diag interface.
_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST = 1
_ERROR = 2

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def _table_addresses(address: tuple[Any, ...]) -> set[str]:
    """Forms of ``(host, port)`` in a table.

    A socket for IPv6 has another form of an IPv4 address.
    """
    host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    plain = getattr(host, "ipv4_mapped", None) or host
    hosts = [plain]
    if plain.version == 4:
        hosts.append(ipaddress.ip_address(f"::ffff:{plain}"))
    return {f"{_table_host(form.packed)}:{address[1]:04X}" for form in hosts}


def _table_host(packed: bytes) -> str:
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words)


def _user_by_kernel(own: tuple[Any, ...], peer: tuple[Any, ...]) -> int | None:
    """As :func:`peer_user`, by one request to the kernel.

    Raises ``OSError`` if the kernel refuses it.
    """
    family = socket.AF_INET6 if ":" in str(own[0]) else socket.AF_INET
    query = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    query += struct.pack("!HH", peer[1], own[1])
    for host in (peer[0], own[0]):
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
        if code == -2:
            return None
        raise OSError(-code, "no answer about sockets")
    user, inode = struct.unpack_from("=II", response, 80)
    # For a closed connection the kernel returns the listening socket, which has no peer port.
    is_connected = struct.unpack_from("!HH", response, 20) == (peer[1], own[1])
    if not is_connected or inode == 0:
        return None
    return user


def peer_user(own: tuple[Any, ...], peer: tuple[Any, ...]) -> int | None:
    """User id of the process that holds the other end of a connection.

    ``None`` if no process of this machine holds it, or the process has closed it.
    """
    try:
        return _user_by_kernel(own, peer)
    except (AttributeError, OSError, struct.error):
        # The tables are slower: they list every socket of the machine.
        return _user_by_tables(own, peer)


def _user_by_tables(own: tuple[Any, ...], peer: tuple[Any, ...]) -> int | None:
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
