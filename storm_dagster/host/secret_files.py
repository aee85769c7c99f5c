"""Permissions of the files that hold secrets: a secret, a key, a password, a token.

Such a file is read if no other user of the machine may read it (mode 600, or less). One form more
is accepted, because a Secret of Kubernetes is mounted so for a process that is not root: root owns
the file, and one group may read it. Only root chooses that group. It must be one of this process,
and no other user's login group: a group in which every new account of a machine begins, such as
``users``, keeps no secret.
"""

import os
import stat
from pathlib import Path

from storm_dagster.model.errors import InvalidRequest


def refuse_shared_file(path: Path, status: os.stat_result, description: str) -> None:
    """Raise :class:`InvalidRequest` for a secret file that other users may read or write.

    ``status`` is that of the file itself, not of a link to it. The error begins with the
    ``description``.
    """
    mode = stat.S_IMODE(status.st_mode)
    group_bits = mode & stat.S_IRWXG
    if not group_bits and not mode & stat.S_IRWXO:
        return
    is_read_by_one_group = group_bits == stat.S_IRGRP and not mode & stat.S_IRWXO
    if is_read_by_one_group and status.st_uid == 0:
        problem = _group_problem(status.st_gid)
        if not problem:
            return
        raise InvalidRequest(
            f"{description} {path} can be read by other users, because its group {status.st_gid} "
            f"{problem}: chmod 600 {path}, or give it a group of the daemons' user alone (in "
            "Kubernetes: fsGroup)"
        )
    raise InvalidRequest(
        f"{description} {path} can be read or written by other users (mode {mode:o}): chmod 600 "
        f"{path}, or let root own it with mode 440 and a group of the daemons' user alone (in "
        "Kubernetes: defaultMode 0400 and fsGroup)"
    )


def _group_problem(gid: int) -> str:
    """Reason why a group must not read a secret of this process; empty if it may."""
    if gid not in (os.getegid(), *os.getgroups()):
        return "is not one of this process"
    users = _login_users(gid)
    if gid == 0 and "root" not in users:
        users.append("root")
    if users:
        return f"is the login group of {', '.join(users[:5])}"
    return ""


def _login_users(gid: int) -> list[str]:
    """Names of the users whose login group this is, other than this process's own group.

    The own group of the process's user has the user's name, as ``useradd`` makes it. A login group
    with another name is one that users share, even if the machine lists none of the others.
    """
    # Not on every system, where the module is imported nevertheless.
    import grp
    import pwd

    try:
        group_name = grp.getgrgid(gid).gr_name
    except KeyError:
        group_name = ""  # A group of a container that its /etc/group does not list.
    own_uid = os.geteuid()
    users: list[str] = []
    for user in pwd.getpwall():
        is_own_group = user.pw_uid == own_uid and user.pw_name == group_name
        if user.pw_gid == gid and not is_own_group:
            users.append(user.pw_name)
    return users
