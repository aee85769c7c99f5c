"""Addresses that a service may bind: loopback, unless the conf allows others and clients must
authenticate.
"""

import ipaddress
import os
import socket
import stat
from pathlib import Path
from typing import Any, Literal

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.security.settings import Security, zookeeper_payload

Guardian = Literal["secret or tls", "secret", "zookeeper auth"]
"""Authentication that each kind of service can require."""


def address_beyond_loopback(host: str) -> str | None:
    """The first address of ``host`` that others can reach; ``None`` when all are loopback.

    :class:`InvalidRequest` when the name cannot be resolved.
    """
    try:
        found = {
            str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        }
    except OSError as error:
        raise InvalidRequest(
            f"storm.local.hostname {host!r} cannot be resolved ({error.strerror}): set it to a name or address of this host"
        ) from None
    return min(
        (each for each in found if not ipaddress.ip_address(each.partition("%")[0]).is_loopback),
        default=None,
    )


def check_exposure(conf: Any, service: str, needs: Guardian, host: str | None = None) -> str:
    """The host that ``service`` binds (``storm.local.hostname`` unless given), if it may.

    Beyond loopback that takes ``storm.bind.external: true`` and a way to authenticate clients;
    otherwise :class:`InvalidRequest` names what is missing.
    """
    host = str(host or conf["storm.local.hostname"])
    outside = address_beyond_loopback(host)
    if outside is None:
        return host
    security = Security.of(conf)
    proven, remedy = {
        "secret or tls": (
            security.configured,
            "storm.secret.file (or storm.tls.cert, .key and .ca)",
        ),
        "secret": (security.secret is not None, "storm.secret.file"),
        "zookeeper auth": (
            zookeeper_payload(conf) is not None,
            "storm.zookeeper.auth.scheme and .payload",
        ),
    }[needs]
    allowed = {"storm.bind.external=true": conf["storm.bind.external"], remedy: proven}
    if lacking := [setting for setting, given in allowed.items() if not given]:
        raise InvalidRequest(
            f"{service} would listen on {host!r} ({outside}), which others can reach, and would authenticate nobody: "
            f"set {' and '.join(lacking)}, or use a loopback address as storm.local.hostname"
        )
    return host


def make_private(home: Path) -> Path:
    """Make the state folder, or close it to other users (mode 0700) when it is this user's own
    already.

    A folder that is meant to be shared (sticky, such as /tmp) or a user's login folder is left as
    it is, and so is one whose supervisor lets workers of other users in
    (``supervisor.run.worker.as.user``): its content is closed.
    """
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = home.stat()
    shared = status.st_mode & stat.S_ISVTX or home == Path.home() or home.parent == home
    if status.st_uid not in (os.getuid(), 0):
        # Its owner could replace every file in it: code, tokens, confs.
        raise InvalidRequest(
            f"the state folder {home} belongs to user {status.st_uid}, not to this one ({os.getuid()}): name another --home"
        )
    entered = status.st_mode & 0o077 == 0o011 and (home / "users").is_dir()
    if status.st_uid == os.getuid() and status.st_mode & 0o077 and not shared and not entered:
        home.chmod(0o700)
    return home
