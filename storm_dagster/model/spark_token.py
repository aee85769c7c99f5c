"""Token of the embedded Spark Connect server: only clients that know it run code there.

It lies in ``HOME/spark.token``, where only the owner reads it: made at random, for servers on loopback, or derived
from ``storm.secret``, for the cluster's servers on any host. Clients send it in the header of Spark's
pre-shared key, by way of the URL; pyspark's own ``;token=`` would insist on TLS.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from storm_dagster.model.daemon_folder import write_atomically
from storm_dagster.model.endpoints import home_dir
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.security import Security, read_private_file

SPARK_TOKEN = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
"""The environment variable that passes Spark's server its token (never the command line)."""

_FILE = "spark.token"
_EVERYWHERE = "everywhere"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def derived_spark_token(conf: Any) -> str | None:
    """The token of all Spark servers of a cluster with ``storm.secret``; ``None`` without one."""
    security = Security.of(conf)
    return None if security.secret is None else security.derived("spark connect").hex()


def spark_token(conf: Any, home: Path) -> str:
    """The token of the server in ``home``, made at the first call; with ``storm.secret``, derived from it."""
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


def with_spark_token(url: str, home: Path | None = None, derived: str | None = None) -> str:
    """A Spark Connect URL with this cluster's token; unchanged without one, or when it proves itself already.

    ``derived`` is the one of the caller's conf, else that of ``home`` counts. A random token is for loopback only. For opening a session: the result is a secret, never logged or stored.
    """
    if not url.startswith("sc://") or any(mark in url for mark in (";token=", ";authorization=")):
        return url
    authority, slash, parameters = url.removeprefix("sc://").partition("/")
    host = authority.rpartition(":")[0] or authority
    token, scope = derived, _EVERYWHERE
    if token is None:
        try:
            token, _, scope = read_private_file((home or home_dir()) / _FILE, "the Spark token").partition("\n")
        except InvalidRequest:
            return url
    if host not in _LOOPBACK and scope != _EVERYWHERE:
        return url
    return f"sc://{authority}/{parameters if slash else ''};authorization=Bearer%20{token}"
