"""Users of both ends of TCP connections on this machine, by the kernel."""

import errno
import functools
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# Constants of the kernel's sock_diag interface: NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY,
# NLM_F_REQUEST and NLMSG_ERROR.
_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST = 1
_ERROR = 2

# States of a TCP socket, as the kernel numbers them.
_ESTABLISHED = 1
_SYN_RECEIVED = 3
_LISTENING = 10

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Tables of the kernel with all TCP sockets, one on each line below a heading."""
_USER_MAP = Path("/proc/self/uid_map")
_OVERFLOW_USER = Path("/proc/sys/kernel/overflowuid")

_ANY_PORT = 0


@dataclass(frozen=True)
class _Socket:
    """A TCP socket of this machine, as the kernel describes it."""

    user: int
    """Meaningless without a process."""
    has_process: bool
    """False while no process has accepted the connection, and after it was closed."""
    state: int

    @property
    def waits_to_be_accepted(self) -> bool:
        """True for a connection in the backlog of a listening socket.

        A closed socket has no process either, but another state.
        """
        return not self.has_process and self.state in (_ESTABLISHED, _SYN_RECEIVED)


# -- addresses ---------------------------------------------------------------------------------


def plain_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """IP address of a text, without its zone; an IPv4 address that IPv6 maps is an IPv4 one.

    Raises ``ValueError`` if the text is not an IP address.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(text: str) -> bool:
    """True if no other host can reach the IP address, as :func:`plain_address` reads it."""
    return plain_address(text).is_loopback


# -- queries to the kernel ---------------------------------------------------------------------


def _unmapped(address: tuple[Any, ...]) -> tuple[str, int]:
    """Plain host, and port, of an address of a socket."""
    name, port, *_ = address
    return str(plain_address(str(name))), int(port)


def _request(local: tuple[str, int], remote: tuple[str, int]) -> bytes | None:
    """Response of the kernel about the socket with these two ends.

    Where no connection has them, it is about the socket that listens at ``local``; ``None`` if
    there is none. Raises ``OSError`` if the kernel refuses the request.
    """
    family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    # ``inet_diag_req_v2``: a socket in any state, on any interface, with any cookie.
    query = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    query += struct.pack("!HH", local[1], remote[1])
    for host in (local[0], remote[0]):
        query += socket.inet_pton(family, host).ljust(16, b"\0")
    query += struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    header = struct.pack("=IHHII", 16 + len(query), _BY_FAMILY, _REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(1)
        kernel.sendto(header + query, (0, 0))
        response = kernel.recv(4096)
    (message_type,) = struct.unpack_from("=H", response, 4)
    if message_type != _ERROR:
        return response
    (code,) = struct.unpack_from("=i", response, 16)
    if code == -errno.ENOENT:
        return None
    raise OSError(-code, "no answer about sockets")


def _socket_by_kernel(local: tuple[str, int], remote: tuple[str, int]) -> _Socket | None:
    """Socket with these two ends, by one request; ``remote`` with port 0: one that listens.

    Raises ``OSError`` if the kernel refuses it.
    """
    response = _request(local, remote)
    if response is None:
        return None
    # ``inet_diag_msg`` begins at byte 16: its state is at 17, its ports at 20, user and inode at
    # 80.
    state = response[17]
    ports = struct.unpack_from("!HH", response, 20)
    user, inode = struct.unpack_from("=II", response, 80)
    # For a closed connection the kernel returns the listening socket, which has no remote port.
    if ports != (local[1], remote[1]):
        return None
    if remote[1] == _ANY_PORT and state != _LISTENING:
        return None
    return _Socket(user, inode != 0, state)


def _table_addresses(host: str, port: int) -> set[str]:
    """Forms of an address in a table.

    A socket for IPv6 has another form of an IPv4 address.
    """
    unmapped = ipaddress.ip_address(host)
    hosts = [unmapped]
    if unmapped.version == 4:
        hosts.append(ipaddress.ip_address(f"::ffff:{unmapped}"))
    return {f"{_table_host(form.packed)}:{port:04X}" for form in hosts}


def _table_host(packed: bytes) -> str:
    """Address as a table prints it: words of 4 bytes in the order of this machine."""
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words)


def _table_rows() -> Iterator[tuple[str, str, _Socket]]:
    """Local end, remote end and facts of each TCP socket of the machine."""
    for table in _TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, remote, state, _, _, _, user, _, inode, *_ = line.split()
            yield local, remote, _Socket(int(user), inode != "0", int(state, 16))


def _socket_by_tables(local: tuple[str, int], remote: tuple[str, int]) -> _Socket | None:
    """As :func:`_socket_by_kernel`, by the tables of all sockets."""
    local_ends = _table_addresses(*local)
    if remote[1] != _ANY_PORT:
        remote_ends = _table_addresses(*remote)
        matches = [
            row
            for own_end, other_end, row in _table_rows()
            if own_end in local_ends and other_end in remote_ends
        ]
    else:
        for wildcard in ("0.0.0.0", "::"):
            local_ends |= _table_addresses(wildcard, local[1])
        matches = [
            row
            for own_end, _, row in _table_rows()
            if own_end in local_ends and row.state == _LISTENING
        ]
    users = {row.user for row in matches}
    # The sockets that share a port have one user. Others do not serve the same address, and which
    # of them does, the tables do not say.
    return matches[0] if len(users) == 1 else None


def _find_socket(local: tuple[str, int], remote: tuple[str, int]) -> _Socket | None:
    """Socket with these two ends; ``None`` if the machine has none, or does not say."""
    try:
        return _socket_by_kernel(local, remote)
    except (AttributeError, OSError, struct.error):
        # The tables are slower: they list every socket of the machine.
        return _socket_by_tables(local, remote)


# -- answers -----------------------------------------------------------------------------------


def peer_user(own: tuple[Any, ...], peer: tuple[Any, ...]) -> int | None:
    """User id of the process that holds the other end of a connection.

    ``own`` and ``peer`` are the addresses of the two ends, as of ``getsockname``. ``None`` if no
    process of this machine holds it, or the process has closed it.
    """
    connection = _find_socket(_unmapped(peer), _unmapped(own))
    # Without a process, the user is meaningless.
    return connection.user if connection is not None and connection.has_process else None


def server_user(own: tuple[Any, ...], peer: tuple[Any, ...]) -> int | None:
    """User id of the process that holds the server's end of a connection.

    This process has opened the connection: ``own`` is its end, ``peer`` that of the server. While
    no process has accepted it, the user is that of the listening socket. ``None`` if the server has
    closed it, runs on another machine, or the kernel does not say.
    """
    server = _unmapped(peer)
    client = _unmapped(own)
    connection = _find_socket(server, client)
    if connection is None or connection.has_process:
        return connection.user if connection is not None else None
    if not connection.waits_to_be_accepted:
        # The server has closed it, perhaps after an answer of its own: the process that listens
        # now is another one.
        return None
    listener = _find_socket(server, ("::" if ":" in server[0] else "0.0.0.0", _ANY_PORT))
    # Once more: if it still waits, then in the backlog of the socket that listened in between. It
    # may have been accepted, and the port taken by another process.
    connection = _find_socket(server, client)
    if connection is not None and connection.has_process:
        return connection.user
    if connection is None or not connection.waits_to_be_accepted or listener is None:
        return None
    return listener.user


def is_of_this_machine(own: tuple[Any, ...], peer: tuple[Any, ...]) -> bool:
    """True if both ends of a connection are on this machine."""
    own_host, _ = _unmapped(own)
    peer_host, _ = _unmapped(peer)
    if own_host == peer_host or is_loopback(peer_host):
        return True
    return _find_socket(_unmapped(peer), _unmapped(own)) is not None


@functools.cache
def unknown_users() -> frozenset[int]:
    """User ids that the kernel also gives for users it cannot name.

    In a user namespace, all users outside have one id, which is then the id of no single user.
    """
    try:
        inside, outside, number = (int(part) for part in _USER_MAP.read_text().split())
        overflow = int(_OVERFLOW_USER.read_text())
    except (OSError, ValueError):
        # No such system, or a map of several lines, which is that of a namespace.
        return frozenset({65534}) if _USER_MAP.exists() else frozenset()
    has_all_users = inside == outside == 0 and number == 0xFFFFFFFF
    return frozenset() if has_all_users else frozenset({overflow})


def is_own_peer(own: Any, peer: Any) -> bool:
    """True if a connection comes from this user, or from root.

    Root has all rights anyway.
    """
    return bool(own) and bool(peer) and peer_user(own, peer) in {os.geteuid(), 0} - unknown_users()


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


class _Security(Protocol):
    """The part of a process's security that is read here."""

    @property
    def configured(self) -> bool:
        """True if clients must authenticate."""
        ...


def owners_only(security: _Security) -> bool:
    """True if a port accepts only connections of this user and root.

    This is so if no secret is configured and the kernel names the users of connections.
    """
    return not security.configured and can_identify_peers()
