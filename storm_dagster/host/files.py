"""Files, locks and folders of daemons."""

import json
import logging
import os
import re
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from storm_dagster.host.secret_files import refuse_shared_file
from storm_dagster.model.errors import Conflict, Corrupt, InvalidRequest, Unavailable

_log = logging.getLogger(__name__)
PROBE_BYTES = 1 << 20
"""Room in a folder below which it counts as full."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Id of a daemon, which names a folder."""


def lock_file(stream: IO[Any], *, wait: bool) -> None:
    """Lock an open file until it is closed.

    Without ``wait``, raises ``BlockingIOError`` if another process holds the lock.
    """
    try:
        import fcntl
    except ImportError:
        raise InvalidRequest(
            f"{stream.name} cannot be locked on {sys.platform}: use Linux or macOS"
        ) from None
    operation = fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    fcntl.flock(stream, operation)


def make_folder(folder: Path, option: str, *, mode: int = 0o777) -> Path:
    """Create a folder that the user named with ``option``, and its parents.

    Raises :class:`InvalidRequest` if it cannot be made or written.
    """
    remedy = f"name a folder that you may write with {option}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be made ({error.strerror}): {remedy}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidRequest(f"{folder} cannot be written: {remedy}")
    return folder


def make_own_folder(folder: Path) -> Path:
    """Create a folder of this user in one that others may write, such as a shared HOME.

    Raises :class:`InvalidRequest` if it exists and another user made it, or may write into it: who
    did could replace each file in it, or have another file overwritten through a link.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid in (os.geteuid(), 0)
    if not is_own or status.st_mode & stat.S_IWOTH:
        raise InvalidRequest(
            f"{folder} belongs to user {status.st_uid}, or other users may write into it: remove "
            "it after a look at its content, or name a --home that no other user may write"
        )
    return folder


def make_home_private(home: Path, *, read_only: bool = False) -> Path:
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


def hold_folder(home: Path, role: str, id: str) -> IO[str]:
    """Hold ``HOME/<role>/<id>`` until the result is closed.

    The end of the process releases it, too. Raises :class:`Conflict` if another process holds it,
    and :class:`InvalidRequest` if the id cannot name a folder.
    """
    if not _ID.fullmatch(id) or id == "id":
        raise InvalidRequest(
            f"{role} id {id!r:.120} may hold 1 to 100 letters, digits and any of ._- : choose "
            "another"
        )
    folder = home / role / id
    try:
        stream = _open_lock(folder)
    except OSError as error:
        raise Unavailable(
            f"{folder} cannot be used ({error.strerror}), and this {role} has not run there "
            "before: free some space, make it writable, or name another --home"
        ) from error
    try:
        lock_file(stream, wait=False)
    except BlockingIOError:
        stream.close()
        raise Conflict(
            f"another {role} {id!r} runs in {home}: stop it first, or choose another id"
        ) from None
    return stream


def _open_lock(folder: Path) -> IO[str]:
    """Open the lock file of a daemon's folder; both are made if they do not exist.

    On a disk that is read-only the existing file is opened.
    """
    path = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return path.open("a+", encoding="utf-8")
    except OSError:
        return path.open(encoding="utf-8")


def is_read_only(folder: Path) -> bool:
    """True if the folder is on a file system that is mounted read-only."""
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def write_if_possible(action: Callable[[], object], missing: str) -> bool:
    """Write something that a daemon can do without; false if the disk refuses it.

    The refusal is one warning, which begins with ``missing``: what the daemon lacks then.
    """
    try:
        action()
    except OSError as error:
        _log.warning("%s: %s", missing, error)
        return False
    return True


def probe_writing(folder: Path) -> OSError | None:
    """Write a file of a MiB in the folder; the error of the disk, or ``None``."""
    probe = folder / "probe"
    try:
        probe.write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        return error
    finally:
        # A read-only disk refuses even the removal of a file that does not exist.
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


def write_atomically(path: Path, text: str, *, mode: int = 0o666, sync: bool = False) -> None:
    """Replace a file: readers see the old or the new one, never a part.

    ``mode`` are the permissions of the new file, less those of the umask. With ``sync`` its content
    is on the disk before it replaces the old one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            if sync:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError:
        # A full disk keeps the empty file otherwise.
        with suppress(OSError):
            temporary.unlink()
        raise


def read_private_file(path: Path, description: str) -> str:
    """Read the text of a file with a secret, without blanks at its ends.

    Raises :class:`InvalidRequest`, which begins with the ``description``, if other users may read
    or write it (:func:`~storm_dagster.host.secret_files.refuse_shared_file`).
    """
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            text = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"{description} {path} cannot be read ({error}): name a file of this user's own"
        ) from None
    refuse_shared_file(path, status, description)
    return text


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises :class:`Corrupt` with the remedy if the file is missing or holds any other content.
    """
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} cannot be read ({error}): {remedy}") from None
    if not isinstance(document, dict):
        raise Corrupt(f"{path} is not a JSON object: {remedy}")
    return document


def sync_path(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
