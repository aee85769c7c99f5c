"""Connections to ZooKeeper that are not made, and their errors."""

import socket
import ssl
from collections.abc import Sequence

from storm_dagster.model.errors import Misconfigured, Unavailable
from storm_dagster.security.server_identity import TrustedServers, UntrustedServer

_WRONG_TIME = (9, 10)
"""Codes of OpenSSL: a certificate is not valid yet, or has expired."""


def check_server(link: socket.socket, trusted: TrustedServers, host: str, port: int) -> None:
    """Check the server of a new connection without TLS, which was called by ``host``.

    Raises :class:`UntrustedServer` unless it is one of ``trusted``. Nothing may be sent before.
    """
    try:
        trusted.check_socket(link, server=f"ZooKeeper at {host}:{port}", name=host)
    except UntrustedServer as error:
        # TLS to ZooKeeper has keys of its own.
        message = error.message.replace("storm.tls.*", "storm.zookeeper.ssl.*")
        raise UntrustedServer(message) from None


def not_trusted(hosts: str, error: ssl.SSLCertVerificationError) -> Misconfigured:
    """Error for an ensemble whose certificates are not valid for this client."""
    if error.verify_code in _WRONG_TIME:
        remedy = (
            "correct the clock of this machine, or renew the server's certificate (`storm-dagster "
            "dev` and `storm-dagster daemon zookeeper --tls` do at each start)"
        )
    else:
        remedy = (
            "name its authority in storm.zookeeper.ssl.truststore.path, and in "
            "storm.zookeeper.servers the hosts that its certificates name; if another process has "
            "taken the port of this cluster's server, end it"
        )
    return Misconfigured(f"ZooKeeper at {hosts} is not trusted ({error.verify_message}): {remedy}")


def no_server(
    hosts: str, timeout_ms: int, over_tls: bool, failures: Sequence[ssl.SSLError]
) -> Unavailable:
    """Error for an ensemble of which no server has answered."""
    if not over_tls:
        return Unavailable(
            f"ZooKeeper at {hosts} does not answer within {timeout_ms} ms: "
            "start it (storm-dagster daemon zookeeper, or dev), or correct storm.zookeeper.servers "
            "and .port (over TLS it needs storm.zookeeper.ssl.enable)"
        )
    reason = f" ({failures[-1].reason or failures[-1]})" if failures else ""
    return Unavailable(
        f"ZooKeeper at {hosts} does not answer over TLS within {timeout_ms} ms{reason}: name its "
        "secureClientPort in storm.zookeeper.servers, or remove storm.zookeeper.ssl.enable; where "
        "it asks for certificates, name one that it trusts in storm.zookeeper.ssl.keystore.path"
    )
