"""Addresses that a service may bind.

They are loopback, unless the conf allows other ones and clients must authenticate.
"""

import socket
from typing import Any, Literal

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.security.peers import is_loopback
from storm_dagster.security.settings import Security, zookeeper_payload

Guardian = Literal["secret or tls", "secret", "zookeeper auth"]
"""Authentication that a kind of service can require."""


def address_beyond_loopback(host: str) -> str | None:
    """First address of ``host`` that other hosts can reach.

    ``None`` if all are loopback. Raises :class:`InvalidRequest` if the name cannot be resolved.
    """
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        # A name with an empty or a too long label is refused before it is looked up.
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(
            f"storm.local.hostname {host!r} cannot be resolved ({reason}): set it to a name or "
            "address of this host"
        ) from None
    addresses = {str(info[4][0]) for info in infos}
    outside = [address for address in addresses if not is_loopback(address)]
    return min(outside, default=None)


def check_exposure(conf: Any, service: str, needs: Guardian, host: str | None = None) -> str:
    """Return the host that ``service`` binds, if it may.

    It is ``storm.local.hostname`` unless ``host`` is given. Beyond loopback, a service needs
    ``storm.bind.external: true`` and a way to authenticate clients; else :class:`InvalidRequest`
    names the missing settings.
    """
    host = str(host or conf["storm.local.hostname"])
    outside = address_beyond_loopback(host)
    if outside is None:
        return host
    security = Security.of(conf)
    if needs == "secret or tls":
        authenticates = security.configured
        remedy = "storm.secret.file (or storm.tls.cert, .key and .ca)"
    elif needs == "secret":
        authenticates = security.secret is not None
        remedy = "storm.secret.file"
    else:
        authenticates = zookeeper_payload(conf) is not None
        remedy = "storm.zookeeper.auth.scheme and .payload"
    missing: list[str] = []
    if not conf["storm.bind.external"]:
        missing.append("storm.bind.external=true")
    if not authenticates:
        missing.append(remedy)
    if missing:
        raise InvalidRequest(
            f"{service} would listen on {host!r} ({outside}), which others can reach, and would "
            f"not authenticate callers: set {' and '.join(missing)}, or use a loopback address as "
            "storm.local.hostname"
        )
    return host
