"""Clients of Spark Connect servers: token, session ids and Python archives.

Only clients with the token of an embedded server run code there. It is in ``HOME/spark.token``,
which only the owner can read: for servers on loopback another one at each start of ``dev``, or
derived from ``storm.secret`` for the cluster's servers on any host. Clients send it only to the
servers that the cluster's conf names, in the header of Spark's pre-shared key, which is passed in
the URL; ``;token=`` of pyspark would require TLS. Before they send it,
:mod:`storm_dagster.spark.channel` asks who holds the server.
"""

import hmac
import secrets
import socket
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storm_dagster.host.endpoints import home_dir
from storm_dagster.host.files import read_private_file, write_atomically
from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.model.names import url_host
from storm_dagster.security.home_key import identity_of_start
from storm_dagster.security.server_identity import TrustedServers, UntrustedServer
from storm_dagster.security.settings import Security

SPARK_TOKEN = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
"""Environment variable that passes the token to Spark's server (never the command line)."""

_FILE = "spark.token"
"""File of HOME: the token, and below it its scope."""
_EVERYWHERE = "everywhere"
"""Scope of a derived token; a random one has none, and is for loopback."""
_DEFAULT_PORT = 15002
"""Port of Spark Connect."""
_MAX_PORT = 65535
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def derived_spark_token(conf: Any) -> str | None:
    """Token of all Spark servers of a cluster.

    ``None`` without ``storm.secret``.
    """
    security = Security.of(conf)
    if security.secret is None:
        return None
    return security.derived("spark connect").hex()


def spark_token(conf: Any, home: Path) -> str:
    """Token of the server in ``home``.

    It is derived from ``storm.secret``; without that it is the one of the last start of ``dev``
    (:func:`renew_spark_token`), or the first call makes a random one.
    """
    path = home / _FILE
    token = derived_spark_token(conf)
    if token is not None:
        write_atomically(path, f"{token}\n{_EVERYWHERE}\n", mode=0o600)
        return token
    if path.exists():
        return read_private_file(path, "the Spark token").partition("\n")[0]
    token = secrets.token_hex(32)
    write_atomically(path, f"{token}\n", mode=0o600)
    return token


def renew_spark_token(conf: Any, home: Path) -> None:
    """Give the server of ``home`` the token of this start, before the server or a client reads it.

    The token of an earlier start opens no server. A token that is derived from ``storm.secret``
    changes with the secret alone, because servers on other hosts have it, too.
    """
    if derived_spark_token(conf) is None:
        token = identity_of_start(home, "spark connect")
        write_atomically(home / _FILE, f"{token}\n", mode=0o600)


def standalone_secret(conf: Any, home: Path) -> str:
    """Secret of a Spark standalone cluster.

    Master, workers and applications prove it to each other. It is derived from ``storm.secret``,
    for any host; without that from the token of ``home``, for one machine.
    """
    security = Security.of(conf)
    if security.secret is not None:
        return security.derived("spark standalone").hex()
    return hmac.new(spark_token(conf, home).encode(), b"spark standalone", "sha256").hexdigest()


def cluster_spark_servers(conf: Any) -> tuple[str, ...]:
    """URLs of the Spark Connect servers that the cluster's conf names.

    They serve placements and Spark components. ``conf`` must be the cluster's conf, without that of
    any topology: these servers get the cluster's token.
    """
    urls = (conf.get("spark.remote"), conf.get("topology.spark.remote"))
    return tuple(str(url) for url in urls if url)


@dataclass(frozen=True)
class ClusterSpark:
    """Servers of Spark Connect in the cluster's conf, for the workers of topologies."""

    servers: tuple[str, ...] = ()
    """URLs of the servers that get the cluster's token."""
    trusted: TrustedServers = field(default_factory=TrustedServers)
    """Servers that may be sent to, in whatever conf they are named."""

    @staticmethod
    def of(conf: Any) -> "ClusterSpark":
        """Of the cluster's conf, without that of any topology."""
        return ClusterSpark(cluster_spark_servers(conf), TrustedServers.of(conf))


def host_and_port(remote: str) -> tuple[str, int]:
    """Host, with its original spelling, and port of a Spark Connect URL.

    An IPv6 address keeps its brackets. The default port is Spark's. Raises :class:`Unavailable` for
    any other URL.
    """
    authority = remote.removeprefix("sc://").partition("/")[0]
    host, colon, port = authority.rpartition(":")
    if not colon or authority.endswith("]"):
        host = authority
        port = str(_DEFAULT_PORT)
    is_port = port.isascii() and port.isdigit() and int(port) <= _MAX_PORT
    if not remote.startswith("sc://") or not host or not is_port or set(host) & set(";@ "):
        raise Unavailable(
            f"spark.remote {mask_text(remote)!r} is not a Spark Connect URL: write sc://host:port"
        )
    return host, int(port)


def check_spark_server(link: socket.socket, host: str, port: int, trusted: TrustedServers) -> None:
    """Check the server of a connection to ``host:port`` without TLS.

    Raises :class:`UntrustedServer` with the remedy for Spark Connect.
    """
    server = mask_text(f"Spark at sc://{url_host(host)}:{port}")
    try:
        trusted.check_socket(link, server=server, name=host)
    except UntrustedServer as error:
        tls = "a proxy with TLS, and ;use_ssl=true in the URL"
        raise UntrustedServer(error.message.replace("storm.tls.*", tls)) from None


def speaks_tls(url: str) -> bool:
    """True if a client of the Spark Connect URL uses TLS, by the rule of pyspark.

    ``;use_ssl=true`` says so, and ``;token=`` unless the host is ``localhost``.
    """
    authority, _, parameter_text = url.removeprefix("sc://").partition("/")
    parameters = [parameter.partition("=") for parameter in parameter_text.split(";")]
    if any(key == "use_ssl" and value.lower() == "true" for key, _, value in parameters):
        return True
    has_token = any(key == "token" for key, _, _ in parameters)
    return has_token and authority.rpartition(":")[0].lower() != "localhost"


def _address(url: str) -> tuple[str, int] | None:
    """Host in lower case and port of a Spark Connect URL.

    ``None`` for another URL.
    """
    try:
        host, port = host_and_port(url)
    except Unavailable:
        return None
    return host.lower(), port


def with_spark_token(
    url: str, servers: Iterable[str], home: Path | None = None, derived: str | None = None
) -> str:
    """Add the cluster's token to a Spark Connect URL of one of ``servers``.

    ``servers`` are the URLs that the cluster's conf names (:func:`cluster_spark_servers`): host and
    port must be equal. Any other URL is returned unchanged: a topology's conf may name any server,
    which gets no token, wherever it is. A URL that has a token is returned unchanged, too.
    ``derived`` is the token of the caller's conf; without it, the token of ``home`` is used. A
    random token is for loopback only. The result is a secret for opening a session, and must not be
    logged or stored.
    """
    if not url.startswith("sc://") or any(mark in url for mark in (";token=", ";authorization=")):
        return url
    address = _address(url)
    if address is None or address not in {_address(server) for server in servers}:
        return url
    host, _ = address
    if derived is not None:
        token = derived
        scope = _EVERYWHERE
    else:
        path = (home or home_dir()) / _FILE
        try:
            content = read_private_file(path, "the Spark token")
        except InvalidRequest:
            return url
        token, _, scope = content.partition("\n")
    if host not in _LOOPBACK and scope != _EVERYWHERE:
        return url
    authority, _, parameters = url.removeprefix("sc://").partition("/")
    return f"sc://{authority}/{parameters};authorization=Bearer%20{token}"


def add_python_archive(session: Any, archive: Path) -> None:
    """Send the archive to the session's server.

    Spark's Python workers import from it. pyspark also puts it first on the ``sys.path`` of this
    process, which ``multiprocessing`` passes to its processes. It is removed from there: this
    process has these modules, the archive of this package contains only the modules of Spark's
    workers, and a temporary file is soon deleted.
    """
    former_path = list(sys.path)
    try:
        session.addArtifacts(str(archive), pyfile=True)
    finally:
        if str(archive) not in former_path:
            sys.path[:] = [entry for entry in sys.path if entry != str(archive)]


def query_session_id(code: str, number: int) -> str:
    """Id of the session that the queries of a topology's code share.

    ``code`` is the topology's id, with the number of its version. A server refuses the id of a
    closed session permanently: the next session has the next ``number``.
    """
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"storm_dagster/{code}/{number}"))


def remote_with_session(remote: str, session_id: str) -> str:
    """Spark Connect URL that attaches to the session.

    A URL that names a session is returned unchanged.
    """
    if ";session_id=" in remote:
        return remote
    base, _, parameter_text = remote.partition("/;")
    parameters = [parameter for parameter in parameter_text.split(";") if parameter]
    parameters.append(f"session_id={session_id}")
    if not any(parameter.startswith("user_id=") for parameter in parameters):
        parameters.append("user_id=storm")
    return f"{base.rstrip('/')}/;{';'.join(parameters)}"
