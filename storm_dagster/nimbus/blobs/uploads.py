"""Upload sessions: three parts under one opaque handle.

See ``docs/decisions.md#upload-handles``.

A handle is a random word of nimbus; no path or key of a caller is ever used. Parts become blobs
``upload.<handle>.<part>`` as they arrive, so that a handle survives the leader that issued it.
Transfers in progress lie in the inbox, ``HOME/nimbus/<id>/inbox``, whose cleaner is JStorm's.
"""

import logging
import re
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from storm_dagster.blobstore import BlobMeta
from storm_dagster.core.authorization import LIMITED_USER
from storm_dagster.model.errors import (
    Conflict,
    InvalidRequest,
    KeyNotFound,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.nimbus.blobs.replicated_store import NimbusBlobStore
from storm_dagster.nimbus.time_cache_map import TimeCacheMap

_log = logging.getLogger(__name__)

Part = Literal["archive", "conf", "topology"]
PARTS: tuple[Part, ...] = ("archive", "conf", "topology")
"""Parts that make an upload complete; it may have other blobs, such as that of its user."""
_HANDLE = re.compile(r"[0-9a-f]{32}")
_MAX_OPEN = 1000
"""Limit of open sessions of all users."""
MAX_PER_USER = 100
"""Limit of sessions of one user who is not an administrator.

It keeps one user from taking the sessions of all others.
"""
_MAX_CANCELLED = 10_000
"""Limit of remembered cancelled sessions; parts that arrive for others stay for the cleaner."""


def check_share(owners: Iterable[str | None], title: str) -> None:
    """Raise :class:`Unavailable` if the user of the request has too many sessions.

    ``owners`` are the users of the open sessions, ``title`` names the kind of session in the error.
    Administrators have no limit.
    """
    user = LIMITED_USER.get()
    if user is None:
        return
    sessions = sum(owner == user for owner in owners)
    if sessions >= MAX_PER_USER:
        raise Unavailable(
            f"user {user!r} has {MAX_PER_USER} {title}s open already: finish or cancel some, or "
            "wait"
        )


class Uploads:
    """The upload sessions of this nimbus.

    A session that is idle for ``expiry_secs`` before it is finished expires with all its parts, at
    the latest half of that time later. A finished one stays until the cleaner removes it. Only its
    user and administrators see a session; for other users it does not exist.
    """

    def __init__(self, blobs: NimbusBlobStore, *, expiry_secs: float, now: float) -> None:
        self._blobs = blobs
        self._open: TimeCacheMap[str, str] = TimeCacheMap(
            expiry_secs, now=now, on_expire=lambda handle, _: self._expire(handle), limit=_MAX_OPEN
        )
        """Handle -> its user, empty for an administrator."""
        self._cancelled: TimeCacheMap[str, str] = TimeCacheMap(
            max(600.0, expiry_secs), now=now, limit=_MAX_CANCELLED
        )
        """Cancelled handles, as key and value: parts of theirs that still arrive are dropped."""

    def __len__(self) -> int:
        return len(self._open)

    def advance(self, now: float) -> None:
        """Expire sessions that have been idle for too long; called by the upkeep thread."""
        self._open.advance(now)
        self._cancelled.advance(now)

    def begin(self) -> str:
        """Begin a session and return its handle.

        :class:`Unavailable` if too many sessions are open.
        """
        handle = secrets.token_hex(16)
        user = LIMITED_USER.get()
        check_share(self._open.build_map().values(), "upload")
        if not self._open.put(handle, user or ""):
            raise Unavailable(
                f"{_MAX_OPEN} uploads are open already: finish or cancel some, or wait until they "
                "expire"
            )
        try:
            self.bind(handle)
        except BaseException:
            self._open.remove(handle)
            raise
        return handle

    def bind(self, handle: str) -> None:
        """Store the user of the upload; no effect for administrators, or if one is stored.

        Later leaders read it, and so does the submission, which the rights of this user limit, also
        if another user launches it.
        """
        key = f"upload.{handle}.submitter"
        if (user := LIMITED_USER.get()) is not None and not self._blobs.exists(key):
            self._blobs.put(key, user.encode())

    def check(self, handle: str) -> None:
        """Raise :class:`KeyNotFound` unless the user of the request may use the session."""
        user = LIMITED_USER.get()
        if not _HANDLE.fullmatch(handle):
            raise _gone(handle)
        if user is None or self._open.get(handle) == user:
            return
        with suppress(KeyNotFound):
            if self._blobs.base.read(f"upload.{handle}.submitter") == user.encode():
                return
        raise _gone(handle)

    def touch(self, handle: str) -> None:
        """Refresh the session; :class:`KeyNotFound` if it does not exist (any longer).

        A session of an earlier leader is recognized by the parts that it has already. A finished
        session, or one of an earlier leader that has all its parts, accepts no further content:
        :class:`Conflict`.
        """
        self.check(handle)
        if self._open.touch(handle) is not None:
            return
        present = self._blobs.keys(f"upload.{handle}.")
        if not present:
            raise _gone(handle)
        if {key.rpartition(".")[2] for key in present} >= set(PARTS):
            raise Conflict(f"upload {handle} is finished: begin a new one to send something else")

    def refresh(self, handle: str) -> None:
        """Refresh an open session; :class:`KeyNotFound` if it was cancelled.

        This is called for each chunk that arrives, so it only reads memory.
        """
        if handle in self._cancelled:
            raise _gone(handle)
        self._open.touch(handle)

    def stored(self, handle: str) -> None:
        """Note a stored part.

        If the session was cancelled while the part arrived, the part is dropped, and
        :class:`KeyNotFound` raised.
        """
        if handle in self._cancelled:
            self._drop(handle)
        self.refresh(handle)

    def key(self, handle: str, part: str) -> str:
        """Return the blob key of a part; :class:`InvalidRequest` for an unknown part."""
        self.check(handle)
        if part not in PARTS:
            raise InvalidRequest(f"an upload has the parts {', '.join(PARTS)}, not {part!r:.40}")
        return f"upload.{handle}.{part}"

    def finish(self, handle: str) -> dict[Part, BlobMeta]:
        """End the session; repeatable.

        :class:`InvalidRequest` names the parts that are missing.
        """
        parts = self.require(handle)
        self._open.remove(handle)
        return parts

    def require(self, handle: object) -> dict[Part, BlobMeta]:
        """Return all parts of a handle that a submission refers to.

        :class:`InvalidRequest` names parts that are missing, while the session is open. Parts reach
        other nimbuses one by one: if this nimbus has only some parts of an earlier leader's upload,
        that is a :class:`KeyNotFound`, because another nimbus may hold all.
        """
        if not isinstance(handle, str):
            raise InvalidRequest("'handle' must be the text that POST /v1/uploads returned")
        self.check(handle)
        stored: dict[str, BlobMeta] = {}
        for meta in self._blobs.base.list(f"upload.{handle}."):
            stored[meta.key.rpartition(".")[2]] = meta
        parts: dict[Part, BlobMeta] = {part: stored[part] for part in PARTS if part in stored}
        if not parts and handle not in self._open:
            raise _gone(handle)
        lacking = [part for part in PARTS if part not in parts]
        if lacking and handle not in self._open:
            raise KeyNotFound(
                f"this nimbus has no {', '.join(lacking)} of upload {handle}: another nimbus may "
                "hold the whole upload; begin a new one if it does not return"
            )
        if lacking:
            raise InvalidRequest(
                f"upload {handle} lacks {', '.join(lacking)}: send all parts, then finish it"
            )
        self.bind(handle)
        return parts

    def cancel(self, handle: str) -> None:
        """Drop the session and its parts.

        For an administrator an unknown handle is ignored. :class:`KeyNotFound` for a malformed one,
        and for one that the user must not use.
        """
        self.check(handle)
        self._cancelled.put(handle, handle)
        self._open.remove(handle)
        self._drop(handle)

    def _expire(self, handle: str) -> None:
        _log.info("upload %s was idle for too long and is dropped", handle)
        self.cancel(handle)

    def _drop(self, handle: str) -> None:
        """Delete the blobs of a session; those that cannot be deleted now stay for the cleaner."""
        # The blob with the user goes last: until then the parts still belong to that user.
        keys = self._blobs.keys(f"upload.{handle}.")
        for key in sorted(keys, key=lambda key: key.endswith(".submitter")):
            try:
                self._blobs.delete(key)
            except KeyNotFound:
                continue
            except StormDagsterError as error:
                _log.info("%s stays for the cleaner: %s", key, error)


def _gone(handle: str) -> KeyNotFound:
    return KeyNotFound(
        f"no upload {handle!r:.40}: it was cancelled or has expired; begin a new one"
    )


def new_inbox_file(inbox: Path) -> Path:
    """Return a new file name that is independent of any caller."""
    return inbox / f"part-{secrets.token_hex(16)}"


def clean_inbox(inbox: Path, *, expiration_secs: float, now: float) -> list[str]:
    """Remove expired entries of the inbox and return their names.

    An entry expires ``expiration_secs`` after its modification time; ``now`` is in epoch seconds.
    Links are removed, never followed.
    """
    removed: list[str] = []
    for path in sorted(inbox.iterdir()):
        try:
            if path.lstat().st_mtime + expiration_secs > now:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(path.name)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("%s cannot be removed: %s", path, error)
    return removed
