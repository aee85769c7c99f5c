"""Spark Connect servers as clients reach them: their token, ids of sessions, and the Python
archives that these get.

Only clients that know the token of an embedded server run code there. It lies in
``HOME/spark.token``, where only the owner reads it: made at random, for servers on loopback, or
derived from ``storm.secret``, for the cluster's servers on any host. Clients send it to the servers
that the cluster's conf names, and to no others, in the header of Spark's pre-shared key, by way of
the URL; pyspark's own ``;token=`` would insist on TLS.
"""

import hmac
import secrets
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from storm_dagster.host.endpoints import home_dir
from storm_dagster.host.files import read_private_file, write_atomically
from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.security.settings import Security

SPARK_TOKEN = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
"""The environment variable that passes Spark's server its token (never the command line)."""

_FILE = "spark.token"
_EVERYWHERE = "everywhere"
_DEFAULT_PORT = 15002
_MAX_PORT = 65535
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def derived_spark_token(conf: Any) -> str | None:
    """The token of all Spark servers of a cluster with ``storm.secret``; ``None`` without one."""
    security = Security.of(conf)
    return None if security.secret is None else security.derived("spark connect").hex()


def spark_token(conf: Any, home: Path) -> str:
    """The token of the server in ``home``, made at the first call; with ``storm.secret``, derived
    from it.
    """
    path, derived = home / _FILE, derived_spark_token(conf)
    if derived is not None:
        token = derived
    elif path.exists():
        return read_private_file(path, "the Spark token").partition("\n")[0]
    else:
        token = secrets.token_hex(32)
    everywhere = "" if derived is None else f"{_EVERYWHERE}\n"
    write_atomically(path, f"{token}\n{everywhere}", mode=0o600)
    return token


def standalone_secret(conf: Any, home: Path) -> str:
    """The secret that master, workers and applications of a Spark standalone cluster prove to each
    other.

    Derived from ``storm.secret``, for any host; without one from the token of ``home``, for one
    machine.
    """
    security = Security.of(conf)
    if security.secret is not None:
        return security.derived("spark standalone").hex()
    return hmac.new(spark_token(conf, home).encode(), b"spark standalone", "sha256").hexdigest()


def cluster_spark_servers(conf: Any) -> tuple[str, ...]:
    """URLs of the Spark Connect servers that the cluster's conf names.

    They serve placements and Spark components. ``conf`` must be the cluster's own, without the conf
    of any topology: these servers get the cluster's token.
    """
    urls = (conf.get("spark.remote"), conf.get("topology.spark.remote"))
    return tuple(str(url) for url in urls if url)


def host_and_port(remote: str) -> tuple[str, int]:
    """Host, as it is written, and port of a Spark Connect URL; :class:`Unavailable` when it is
    none.

    An IPv6 address keeps its brackets. Without a port it is Spark's default one.
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


def _address(url: str) -> tuple[str, int] | None:
    """Host in lower case and port of a Spark Connect URL; ``None`` when it is none."""
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
    which gets no token, wherever it is. So is a URL with a token of its own. ``derived`` is the
    token of the caller's conf, else that of ``home`` counts. A random token is for loopback only.
    For opening a session: the result is a secret, never logged or stored.
    """
    if not url.startswith("sc://") or any(mark in url for mark in (";token=", ";authorization=")):
        return url
    address = _address(url)
    if address is None or address not in {_address(server) for server in servers}:
        return url
    authority, slash, parameters = url.removeprefix("sc://").partition("/")
    host = address[0]
    token, scope = derived, _EVERYWHERE
    if token is None:
        try:
            token, _, scope = read_private_file(
                (home or home_dir()) / _FILE, "the Spark token"
            ).partition("\n")
        except InvalidRequest:
            return url
    if host not in _LOOPBACK and scope != _EVERYWHERE:
        return url
    return f"sc://{authority}/{parameters if slash else ''};authorization=Bearer%20{token}"


def add_python_archive(session: Any, archive: Path) -> None:
    """Send the archive to the session's server, whose Python workers import from it.

    pyspark also puts it first on this process's own ``sys.path``, which processes of
    ``multiprocessing`` take over. It is taken off again: this process has these modules, the
    archive of this package holds only what Spark's workers need, and a temporary file is gone a
    moment later.
    """
    before = list(sys.path)
    try:
        session.addArtifacts(str(archive), pyfile=True)
    finally:
        if str(archive) not in before:
            sys.path[:] = [entry for entry in sys.path if entry != str(archive)]


def query_session_id(code: str, number: int) -> str:
    """Id of the session that the queries of a topology's code share; the one after it when the
    server has closed this.

    ``code`` is the topology's id, with the number of its version. A server refuses the id of a
    closed session for ever.
    """
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"storm_dagster/{code}/{number}"))


def remote_with_session(remote: str, session_id: str) -> str:
    """The Spark Connect URL that attaches to the session; a URL that names one itself is left as it
    is.
    """
    if ";session_id=" in remote:
        return remote
    base, slash, parameters = remote.partition("/;")
    named = [part for part in parameters.split(";") if part] if slash else []
    named.append(f"session_id={session_id}")
    if not any(part.startswith("user_id=") for part in named):
        named.append("user_id=storm")
    return f"{base.rstrip('/')}/;{';'.join(named)}"
