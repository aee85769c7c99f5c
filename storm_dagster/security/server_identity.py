"""Servers that a client may send to, by their user and the network to them.

A server knows its callers by signatures, certificates or their user. A client that speaks in clear
knows the server by the user of the process that holds the other end of the connection, which the
kernel names on the same machine only. It is asked after the connection is made and before a byte is
sent. Where TLS or another mutual proof holds, the kernel is not asked.
"""

import ipaddress
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from storm_dagster.model.errors import NOTHING_SENT, InvalidRequest, UntrustedServer
from storm_dagster.model.names import url_host
from storm_dagster.security.peers import (
    can_identify_peers,
    is_of_this_machine,
    plain_address,
    server_user,
    unknown_users,
)

__all__ = [
    "DAEMON_USER",
    "NEEDS_PROOF",
    "PEER_USERS",
    "PLAINTEXT_PEERS",
    "PlaintextPeer",
    "ServerProcess",
    "TrustedServers",
    "UntrustedServer",
    "server_user",
]

PEER_USERS = "storm.security.peer.users"
"""Key of the users, beside this process's own and root, whose servers are trusted."""
PLAINTEXT_PEERS = "storm.security.plaintext.peers"
"""Key of the servers off this machine that are called without TLS in spite of a secret."""
DAEMON_USER = "storm.security.daemon.user"
"""Key, in the conf of a worker, of the user id of the supervisor that started it."""
NEEDS_PROOF = "storm.security.needs.proof"
"""Key, in the conf of a worker, that says whether the cluster has a secret."""


@dataclass(frozen=True)
class PlaintextPeer:
    """One entry of ``storm.security.plaintext.peers``: host, host:port, or a network (CIDR)."""

    text: str
    host: str = ""
    """Name or address in lower case; empty for a network."""
    port: int | None = None
    """``None``: every port."""
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None = None

    @staticmethod
    def parse(text: str) -> "PlaintextPeer":
        """Read an entry. Raises :class:`InvalidRequest` for one that is none of the three."""
        problem = (
            f"{PLAINTEXT_PEERS}: {text!r:.80} is not a host, host:port or network (10.0.0.0/8)"
        )
        entry = text.strip().lower()
        if "/" in entry:
            try:
                return PlaintextPeer(text, network=ipaddress.ip_network(entry))
            except ValueError as error:
                raise InvalidRequest(f"{problem}: {error}") from None
        address = _address_of(entry.strip("[]"))
        if address is not None:
            return PlaintextPeer(text, host=str(address))
        host, colon, port = entry.rpartition(":")
        if not colon:
            host, port = entry, ""
        host = host.strip("[]")
        has_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
        is_host = bool(host) and " " not in host and (":" not in host or _address_of(host))
        if not is_host or (colon and not has_port):
            raise InvalidRequest(f"{problem}: correct it")
        address = _address_of(host)
        return PlaintextPeer(text, host=str(address or host), port=int(port) if colon else None)

    def covers(self, address: str, port: int, name: str = "") -> bool:
        """True if it names the server at ``address``, which was called by ``name``.

        Without a name, the host of the entry is resolved.
        """
        ip_address = _address_of(address)
        if self.network is not None:
            return ip_address is not None and ip_address in self.network
        if self.port is not None and self.port != port:
            return False
        if self.host in (name.strip("[]").lower(), str(ip_address)):
            return True
        return not name and address in _addresses_of(self.host)


def _address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Plain address of the text; ``None`` if it is not an IP address."""
    try:
        return plain_address(text)
    except ValueError:
        return None


def _addresses_of(host: str) -> set[str]:
    """Addresses of a host; empty if its name is not known."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(info[4][0]) for info in infos}


def user_id(user: str) -> int | None:
    """Id of a user that the conf names by name or number.

    ``None`` if this host has no user of that name: nothing here belongs to it.
    """
    if user.isascii() and user.isdigit():
        return int(user)
    try:
        # Not at the top: some systems lack the module, and run clients.
        import pwd

        return pwd.getpwnam(user).pw_uid
    except (ImportError, KeyError):
        return None


def _account_name(uid: int) -> str | None:
    """Name of a user; ``None`` if this host has none for the id."""
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return None


def user_name(uid: int) -> str:
    """Name of a user for messages, with the id."""
    name = _account_name(uid)
    return f"uid {uid}" if name is None else f"{name} (uid {uid})"


@dataclass(frozen=True)
class ServerProcess:
    """Server of a connection, as far as this process knows it."""

    host: str
    """Its address."""
    port: int
    is_here: bool = True
    """True if it runs on this machine."""
    owner: int | None = None
    """User id of its process; ``None`` if the kernel does not name it."""
    users_are_known: bool = True
    """True if the kernel names users at all."""

    @staticmethod
    def of(own: tuple[Any, ...], peer: tuple[Any, ...]) -> "ServerProcess":
        """The server of a connection with these two ends, by the kernel."""
        host, port, *_ = peer
        if not is_of_this_machine(own, peer):
            return ServerProcess(str(host), int(port), is_here=False)
        owner = server_user(own, peer)
        users_are_known = owner is not None or can_identify_peers()
        return ServerProcess(str(host), int(port), owner=owner, users_are_known=users_are_known)


@dataclass(frozen=True)
class TrustedServers:
    """Servers that a process sends to in clear. Without any conf: its own user's, and root's."""

    users: frozenset[int] = field(default_factory=lambda: frozenset({os.geteuid(), 0}))
    """Ids of the users whose servers on this machine are trusted."""
    plaintext_peers: tuple[PlaintextPeer, ...] = ()
    """Servers of other machines that are called without TLS although there is a secret."""
    needs_proof: bool = False
    """True if the cluster has a secret, so that its networks are not trusted."""

    @staticmethod
    def of(conf: Any, *, users: Iterable[int] = ()) -> "TrustedServers":
        """Read ``storm.security.*``; ``users`` are further ids, such as that of a topology.

        Raises :class:`InvalidRequest` for an entry of ``storm.security.plaintext.peers`` that
        cannot be read.
        """
        trusted = {os.geteuid(), 0, *users}
        daemon_user = conf.get(DAEMON_USER)
        if daemon_user is not None:
            trusted.add(int(daemon_user))
        named = (user_id(str(user)) for user in conf.get(PEER_USERS) or ())
        trusted.update(uid for uid in named if uid is not None)
        peers = tuple(PlaintextPeer.parse(str(text)) for text in conf.get(PLAINTEXT_PEERS) or ())
        has_secret = bool(conf.get("storm.secret") or conf.get("storm.secret.file"))
        return TrustedServers(
            frozenset(trusted), peers, needs_proof=has_secret or bool(conf.get(NEEDS_PROOF))
        )

    def check(
        self,
        own: tuple[Any, ...],
        peer: tuple[Any, ...],
        *,
        server: str,
        name: str = "",
        signed: bool = False,
    ) -> None:
        """Raise :class:`UntrustedServer` unless the server of a plaintext connection is trusted.

        ``own`` and ``peer`` are the ends of a connection that this process has just opened, as of
        ``getsockname`` and ``getpeername``. ``server`` is the server in errors, ``name`` the host
        that was called. ``signed``: with a secret, what is sent proves who sends it and reveals
        nothing, so that it may go to a server of this machine whose user the kernel does not name.
        """
        self.check_process(ServerProcess.of(own, peer), server=server, name=name, signed=signed)

    def check_process(
        self, process: "ServerProcess", *, server: str, name: str = "", signed: bool = False
    ) -> None:
        """As :meth:`check`, with the known facts of the server."""
        if not process.is_here:
            self._check_network(process, server, name)
        elif process.owner is not None:
            self._check_owner(process.owner, server)
        elif process.users_are_known:
            raise UntrustedServer(
                f"{server} {NOTHING_SENT}, because no process of this machine holds the other end "
                "of the connection: try again; if something forwards the port to another machine, "
                "use TLS (storm.tls.*), or call that machine"
            )
        elif not (signed and self.needs_proof):
            remedy = _SECRET if signed else "use TLS (storm.tls.*)"
            raise UntrustedServer(
                f"{server} {NOTHING_SENT}, because this system does not say which user listens "
                f"there: {remedy}"
            )

    def check_socket(
        self, link: socket.socket, *, server: str, name: str = "", signed: bool = False
    ) -> None:
        """As :meth:`check`, of the two ends of a connected socket."""
        try:
            own = link.getsockname()
            peer = link.getpeername()
        except OSError as error:
            raise UntrustedServer(
                f"{server} {NOTHING_SENT}, because the connection broke at once "
                f"({error.strerror}): try again"
            ) from None
        self.check(own, peer, server=server, name=name, signed=signed)

    def _check_owner(self, owner: int, server: str) -> None:
        """Check the user of the process at the other end."""
        if owner in unknown_users():
            raise UntrustedServer(
                f"{server} {NOTHING_SENT}, because a user outside this user namespace listens "
                "there: run both in one namespace, or use TLS (storm.tls.*)"
            )
        if owner in self.users:
            return
        trusted = ", ".join(user_name(uid) for uid in sorted(self.users))
        raise UntrustedServer(
            f"{server} {NOTHING_SENT}, because it belongs to user {user_name(owner)}, not to "
            f"{trusted}: end that process; or, if it is of this cluster, add the line "
            f"`{PEER_USERS}: [{_name_or_id(owner)}]` to storm.yaml"
        )

    def _check_network(self, process: "ServerProcess", server: str, name: str) -> None:
        """Check that a server on another machine may be called without TLS."""
        host = process.host
        port = process.port
        if not self.needs_proof:
            return
        if any(entry.covers(host, port, name) for entry in self.plaintext_peers):
            return
        url_name = url_host(name or host)
        raise UntrustedServer(
            f"{server} {NOTHING_SENT}, because it is on another machine, is called without TLS, "
            "and this cluster has a secret: use TLS (storm.tls.*), or, in a network that you "
            f"trust, add the line `{PLAINTEXT_PEERS}: ['{url_name}:{port}']` to storm.yaml"
        )


_SECRET = "set storm.secret.file, or use TLS (storm.tls.*)"


def _name_or_id(uid: int) -> str:
    """Name of a user as the conf has it."""
    return _account_name(uid) or f"'{uid}'"
