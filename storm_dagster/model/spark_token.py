"""The token of the embedded Spark Connect server: other users of the machine cannot run code on it.

pyspark sends a token without TLS only to a server that is addressed as ``localhost``; the token is therefore
used for such URLs alone, and lies in ``HOME/spark.token`` where only the owner reads it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from storm_dagster.model.endpoints import home_dir
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.security import Security, read_private_file

__all__ = ["SPARK_TOKEN", "spark_token", "with_spark_token"]

SPARK_TOKEN = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
"""The environment variable by which Spark's server is told its token (never the command line)."""

_FILE = "spark.token"


def spark_token(conf: Any, home: Path) -> str:
    """The token of the server in ``home``, made at the first call; with ``storm.secret``, derived from it."""
    security = Security.of(conf)
    path = home / _FILE
    if security.secret is not None:
        token = security.derived("spark connect").hex()
    elif path.exists():
        return read_private_file(path, "the Spark token")
    else:
        token = secrets.token_hex(32)
    temporary = path.with_name(f".{_FILE}.{os.getpid()}.tmp")
    temporary.touch(mode=0o600)
    temporary.write_text(token + "\n", encoding="ascii")
    os.replace(temporary, path)
    return token


def with_spark_token(url: str, home: Path | None = None) -> str:
    """A Spark Connect URL with this cluster's token, when it names ``localhost`` and there is one.

    For opening a session only: the result is a secret, never logged or stored.
    """
    if (
        not url.startswith(("sc://localhost:", "sc://localhost/"))
        or ";token=" in url
        or SPARK_TOKEN in os.environ
    ):
        return url
    try:
        token = read_private_file((home or home_dir()) / _FILE, "the Spark token")
    except InvalidRequest:
        return url
    authority, slash, parameters = url.removeprefix("sc://").partition("/")
    return f"sc://{authority}/{parameters if slash else ''};token={token}"
