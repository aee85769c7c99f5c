"""Addresses that a service may bind.

They are loopback, unless the conf allows other ones and clients must authenticate.
"""

import ipaddress
import os
import socket
import stat
from pathlib import Path
from typing import Any, Literal

from storm_dagster.host.files import is_read_only, make_folder
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.security.settings import Security, zookeeper_payload

Guardian = Literal["secret or tls", "secret", "zookeeper auth"]
"""Authentication that a kind of service can require."""


def address_beyond_loopback(host: str) -> str | None:
    """First address of ``host`` that other hosts can reach.

    ``None`` if all are loopback. Raises :class:`InvalidRequest` if the name cannot be resolved.
    """
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidRequest(
            f"storm.local.hostname {host!r} cannot be resolved ({error.strerror}): set it to a "
            "name or address of this host"
        ) from None
    addresses = {str(info[4][0]) for info in infos}
    outside = [address for address in addresses if not _is_loopback(address)]
    return min(outside, default=None)


def _is_loopback(address: str) -> bool:
    without_zone = address.partition("%")[0]
    return ipaddress.ip_address(without_zone).is_loopback


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


def make_private(home: Path, *, read_only: bool = False) -> Path:
    """Create the state folder, or close it to other users (mode 0700).

    Only a folder of this user is closed. A shared folder (sticky, such as /tmp), a user's login
    folder, and a folder whose supervisor lets workers of other users in
    (``supervisor.run.worker.as.user``; its content is closed) are not changed. With ``read_only``
    it may be on a disk that is mounted read-only, on which it stays as it is.
    """
    is_fixed = read_only and home.is_dir() and is_read_only(home)
    if not is_fixed:
        make_folder(home, "--home", mode=0o700)
    status = home.stat()
    if status.st_uid not in (os.getuid(), 0):
        # Its owner could replace every file in it: code, tokens, confs.
        raise InvalidRequest(
            f"the state folder {home} belongs to user {status.st_uid}, not to this one "
            f"({os.getuid()}): name another --home"
        )
    is_own = status.st_uid == os.getuid()
    is_open = bool(status.st_mode & 0o077)
    # The folder that is its own parent is /.
    is_shared = bool(status.st_mode & stat.S_ISVTX) or home == Path.home() or home.parent == home
    has_worker_users = status.st_mode & 0o077 == 0o011 and (home / "users").is_dir()
    if is_own and is_open and not is_shared and not has_worker_users and not is_fixed:
        home.chmod(0o700)
    return home
