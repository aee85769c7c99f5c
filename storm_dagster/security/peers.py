"""The user at the other end of a TCP connection on this machine, read from the kernel's socket
tables.
"""

import functools
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Any

from storm_dagster.security.settings import Security

_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ERROR = 4, 20, 1, 2
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def _keys(address: tuple[Any, ...]) -> set[str]:
    """How a table may write ``(host, port)``; a socket for IPv6 writes an IPv4 address in its own
    way.
    """
    host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    plain = getattr(host, "ipv4_mapped", None) or host
    forms = [plain, ipaddress.ip_address(f"::ffff:{plain}")] if plain.version == 4 else [plain]
    return {
        "".join(f"{word:08X}" for word in struct.unpack(f"={len(form.packed) // 4}I", form.packed))
        + f":{address[1]:04X}"
        for form in forms
    }


def _asked_user(own: tuple[Any, ...], peer: tuple[Any, ...]) -> int | None:
    """As :func:`peer_user`, by one question to the kernel; ``OSError`` where it answers none."""
    family = socket.AF_INET6 if ":" in str(own[0]) else socket.AF_INET
    question = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    question += struct.pack("!HH", peer[1], own[1])
    for host in (peer[0], own[0]):
        question += socket.inet_pton(family, str(host).partition("%")[0]).ljust(16, b"\0")
    question += struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(1)
        kernel.sendto(
            struct.pack("=IHHII", 16 + len(question), _BY_FAMILY, _REQUEST, 0, 0) + question, (0, 0)
        )
        answer = kernel.recv(4096)
    if struct.unpack_from("=H", answer, 4)[0] == _ERROR:
        code = struct.unpack_from("=i", answer, 16)[0]
        if code == -2:
            return None
        raise OSError(-code, "no answer about sockets")
    user, inode = struct.unpack_from("=II", answer, 80)
    # Where the connection has gone, the kernel names whoever listens at its port: that one has no
    # port at its other end.
    connected = struct.unpack_from("!HH", answer, 20) == (peer[1], own[1])
    return user if connected and inode else None


def peer_user(own: tuple[Any, ...], peer: tuple[Any, ...]) -> int | None:
    """User id of the process that holds the other end; ``None`` when there is none on this machine,
    or it has closed it.
    """
    try:
        return _asked_user(own, peer)
    except (AttributeError, OSError, struct.error):
        pass  # The tables take a look at every socket of the machine.
    local, remote = _keys(peer), _keys(own)
    for table in _TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            # Inode 0: no process holds it any more, and the user in the table is nobody's.
            if fields[1] in local and fields[2] in remote and fields[9] != "0":
                return int(fields[7])
    return None


def is_own_peer(own: Any, peer: Any) -> bool:
    """Whether a connection comes from this user, or from root, who may do everything anyway."""
    return bool(own) and bool(peer) and peer_user(own, peer) in (os.geteuid(), 0)


@functools.cache
def can_tell_users() -> bool:
    """Whether the kernel names the user of a connection; not so on macOS and in some sandboxes."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        return is_own_peer(server.getsockname(), client.getsockname())


def owners_only(security: Security) -> bool:
    """Whether a port serves only this user and root: when nobody is asked for a proof, and users
    can be told.
    """
    return not security.configured and can_tell_users()
