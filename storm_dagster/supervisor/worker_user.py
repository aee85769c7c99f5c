"""Users of this host under which workers run, and their folders.

They are used with ``supervisor.run.worker.as.user``. HOME and two folders in it can be entered by
name, but not listed (mode 0711); all else in HOME stays closed::

    workers/<worker id>/       the supervisor's, with the spec that it believes
    workers/<worker id>/own/   the worker's (0700): its copy of the spec, heartbeat, and code as
                               links to the supervisor's files, which it can read and not write
    users/<uid>/               the user's (0700): home folder, temporary files and state of all its
                               workers here
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storm_dagster.model.errors import InvalidRequest, InvalidTopology

OWN = "own"
"""Folder of the worker's user in the folder of a worker."""
USERS = "users"
"""Folder of HOME with the folders of the users."""
_MIN_SUBMITTER_UID = 1000
"""A submitter must not be a system user, since a conf chooses the name."""


@dataclass(frozen=True)
class WorkerUser:
    """A user of this host, with no group but its own."""

    name: str
    uid: int
    gid: int

    def home(self, home: Path) -> Path:
        """Folder of the user below HOME, created if it is missing."""
        folder = home / USERS / str(self.uid)
        folder.mkdir(mode=0o700, exist_ok=True)
        os.chown(folder, self.uid, self.gid)
        return folder

    def environment(self, base: Mapping[str, str], home: Path) -> dict[str, str]:
        """``base`` for a process of this user."""
        return {
            **base,
            "HOME": str(home),
            "USER": self.name,
            "LOGNAME": self.name,
            "TMPDIR": str(home),
        }

    def give(self, folder: Path) -> None:
        """Make the user the owner of a folder and its content.

        The folder itself is last. Linked files stay the supervisor's and become readable.
        """
        for root, folders, files in os.walk(folder):
            for name in folders:
                os.chown(os.path.join(root, name), self.uid, self.gid, follow_symlinks=False)
            for name in files:
                path = Path(root, name)
                status = path.lstat()
                if status.st_nlink > 1:
                    is_executable = status.st_mode & 0o100
                    path.chmod(status.st_mode | (0o555 if is_executable else 0o444))
                else:
                    os.chown(path, self.uid, self.gid, follow_symlinks=False)
        os.chown(folder, self.uid, self.gid)


def link_code(code: Path, target: Path) -> None:
    """Make ``target`` a folder of the same files, without the archive."""
    shutil.copytree(
        code, target, copy_function=os.link, ignore=shutil.ignore_patterns("stormjar.jar")
    )


def open_home(home: Path) -> None:
    """Let workers enter their folders, and close everything else in HOME.

    Raises :class:`InvalidRequest` if this process is not root, or HOME is in a closed folder.
    """
    if os.geteuid() != 0:
        raise InvalidRequest(
            "supervisor.run.worker.as.user needs a supervisor that is root: start it as root, or "
            "remove the key"
        )
    for parent in home.parents:
        if not parent.stat().st_mode & 0o001:
            raise InvalidRequest(
                f"supervisor.run.worker.as.user: workers cannot enter {home}, since {parent} is "
                "closed to other users: name another --home, such as /var/lib/storm_dagster"
            )
    for folder in (home / "workers", home / USERS):
        folder.mkdir(exist_ok=True)
    for path in home.iterdir():
        if path.name not in ("workers", USERS) and not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o077)
    # HOME is opened last, when everything else in it is closed.
    for folder in (home / "workers", home / USERS, home):
        folder.chmod(0o711)


def worker_user(conf: Mapping[str, Any], topology_conf: Mapping[str, Any]) -> WorkerUser | None:
    """The user of the topology's workers.

    It is the submitter, if the host has that user, else ``supervisor.worker.user``. ``None``
    without ``supervisor.run.worker.as.user``. Raises :class:`InvalidTopology` if the host has
    neither, or the user is root.
    """
    if not conf["supervisor.run.worker.as.user"]:
        return None
    submitter = topology_conf.get("topology.submitter.user")
    user = _user_by_name(submitter) if submitter else None
    if user is not None and user.uid < _MIN_SUBMITTER_UID:
        raise InvalidTopology(
            f"topology.submitter.user {submitter!r:.80} is a system user of this host (uid "
            f"{user.uid}): submit as a user with a uid of {_MIN_SUBMITTER_UID} or more"
        )
    configured = conf["supervisor.worker.user"]
    if user is None and configured:
        if configured.isdecimal():
            user = _user_by_number(configured)
        else:
            user = _user_by_name(configured)
    if user is None or user.uid == 0:
        raise InvalidTopology(
            "no user of this host may run this topology (topology.submitter.user: "
            f"{submitter or 'not set'}, supervisor.worker.user: {configured or 'not set'}): add "
            "the user, or set supervisor.worker.user to one that is not root"
        )
    return user


def _user_by_name(name: str) -> WorkerUser | None:
    """The user of that name; ``None`` if this host has none."""
    # Not at the top: the command line says on every system that a supervisor needs Linux.
    import pwd

    try:
        entry = pwd.getpwnam(name)
    except (KeyError, ValueError, OverflowError):
        return None
    return WorkerUser(entry.pw_name, entry.pw_uid, entry.pw_gid)


def _user_by_number(number: str) -> WorkerUser:
    """The user with that uid; it need not have a name on this host."""
    import pwd

    uid = int(number)
    try:
        entry = pwd.getpwuid(uid)
    except (KeyError, ValueError, OverflowError):
        return WorkerUser(number, uid, uid)
    return WorkerUser(entry.pw_name, entry.pw_uid, entry.pw_gid)
