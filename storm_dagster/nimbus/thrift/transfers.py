"""Uploads and downloads in chunks, which expire when they are idle.

A session is a random word; no path or key of a caller is ever a file's name. The chunks of an
upload lie in the inbox until it is finished, and become a blob then; a cancelled, failed or expired
upload leaves no file.
"""

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from storm_dagster.blobstore import BlobMeta
from storm_dagster.core.authorization import LIMITED_USER
from storm_dagster.model.errors import InvalidRequest, KeyNotFound, Unavailable
from storm_dagster.nimbus.blobs.replicated_store import WriteTerms
from storm_dagster.nimbus.blobs.uploads import check_share, new_inbox_file
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.time_cache_map import TimeCacheMap, V

_log = logging.getLogger(__name__)
_MAX_UPLOADS = 1000
"""Limit of open uploads of one kind."""
_MAX_DOWNLOADS = 200
"""Limit of open downloads: each one holds a file open."""


class Upload:
    """File of the inbox that grows by chunks; one caller at a time."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.key = key
        """Key of the blob that it becomes."""
        self.user = LIMITED_USER.get()
        """The only user, apart from administrators, who may continue this upload."""
        self.size: int = 0
        """Number of bytes that have arrived."""
        self.lock = threading.Lock()
        """Held by the caller that appends, finishes or cancels."""
        self.ended = False
        """True when the file is removed or has become a blob."""
        self.digest = hashlib.sha256()
        """Hash of the chunks that have arrived."""
        path.touch(exist_ok=False)

    def append(self, chunk: bytes) -> None:
        """Write a chunk.

        The file is opened for each one, so that idle uploads hold no descriptors.
        """
        with self.path.open("ab") as sink:
            sink.write(chunk)
        self.digest.update(chunk)
        self.size += len(chunk)

    def discard(self) -> None:
        """End the upload and remove its file, if it is still there; repeatable."""
        self.ended: bool = True
        # A read-only disk refuses even the removal of a file that does not exist.
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


class UploadSessions:
    """Uploads of one kind, which ``title`` names in messages."""

    def __init__(self, nimbus: Nimbus, title: str) -> None:
        self._nimbus = nimbus
        self._title = title
        self._max_bytes = int(nimbus.conf["nimbus.upload.max.bytes"])
        """Largest upload."""
        self._open: TimeCacheMap[str, Upload] = _sessions(nimbus, self._expire, _MAX_UPLOADS)
        """Session -> its upload."""

    def begin(self, key: str | None = None) -> str:
        """Begin a session for the blob ``key``; return its name.

        Without ``key`` the upload becomes the archive ``upload.<session>.archive``.
        :class:`Unavailable` at a follower, and if too many uploads are open.
        """
        self._nimbus.status.require()
        users = [upload.user for upload in self._open.build_map().values()]
        check_share(users, self._title)
        session = secrets.token_hex(16)
        if key is None:
            key = f"upload.{session}.archive"
        try:
            upload = Upload(new_inbox_file(self._nimbus.inbox), key)
        except OSError as error:
            raise _not_stored(error) from error
        if not self._open.put(session, upload):
            upload.discard()
            raise Unavailable(
                f"{_MAX_UPLOADS} {self._title}s are open already: finish or cancel some, or wait"
            )
        return session

    def append(self, session: str | None, chunk: bytes | None) -> None:
        """Add a chunk, and restart the session's idle time.

        :class:`KeyNotFound` if the session does not exist or has ended.
        """
        self._nimbus.status.require()
        with self._take(session) as upload:
            if chunk is None:
                raise InvalidRequest(f"no chunk for {self._title} {session}: send bytes")
            if upload.size + len(chunk) > self._max_bytes:
                self._end(session, upload)
                raise InvalidRequest(
                    f"the {self._title} is larger than {self._max_bytes} bytes and was dropped: "
                    "send less, or raise nimbus.upload.max.bytes"
                )
            try:
                upload.append(chunk)
            except OSError as error:
                self._end(session, upload)
                raise _not_stored(error) from error

    def finish(self, session: str | None) -> BlobMeta:
        """Store the upload as a blob, on as many nimbuses as the cluster's conf requires.

        The session ends, also after an error.
        """
        self._nimbus.status.require()
        with self._take(session) as upload:
            try:
                self._nimbus.uploads.bind(str(session))
                meta, _ = self._nimbus.blobs.put_file(
                    upload.key, upload.path, upload.digest.hexdigest(), WriteTerms()
                )
            finally:
                self._end(session, upload)
        return meta

    def cancel(self, session: str | None) -> None:
        """End the session and remove its file; :class:`KeyNotFound` if it does not exist."""
        with self._take(session) as upload:
            self._end(session, upload)

    def _end(self, session: str | None, upload: Upload) -> None:
        self._open.remove(str(session))
        upload.discard()

    @contextmanager
    def _take(self, session: str | None) -> Iterator[Upload]:
        """Take the upload of a session for one caller, and restart its idle time.

        :class:`KeyNotFound` if it does not exist, has ended, or belongs to another user. A second
        caller waits.
        """
        upload = self._open.touch(session) if isinstance(session, str) else None
        if upload is None:
            raise self._not_found(session)
        with upload.lock:
            is_allowed = LIMITED_USER.get() in (None, upload.user)
            if upload.ended or not is_allowed:
                raise self._not_found(session)
            yield upload

    def _not_found(self, session: str | None) -> KeyNotFound:
        return KeyNotFound(
            f"no {self._title} {session!r:.60}: it was finished or cancelled, has expired, or "
            "began at another nimbus; begin a new one"
        )

    def _expire(self, session: str, upload: Upload) -> None:
        _log.info("%s %s was idle for too long and is dropped", self._title, session)
        with upload.lock:
            upload.discard()


@dataclass(frozen=True)
class _Download:
    stream: BinaryIO
    lock: threading.Lock = field(default_factory=threading.Lock)


class Downloads:
    """Downloads of one nimbus.

    Each one reads the version of its blob that it began with.
    """

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._chunk_bytes = int(nimbus.conf["storm.blobstore.inputstream.buffer.size.bytes"])
        self._open: TimeCacheMap[str, _Download] = _sessions(
            nimbus, lambda _, download: self._close(download), _MAX_DOWNLOADS
        )

    def begin(self, key: str) -> tuple[str, BlobMeta]:
        """Begin a session; return its name and the description of the blob.

        :class:`KeyNotFound` for a blob that this nimbus does not hold.
        """
        meta, stream = self._nimbus.blobs.base.open_with_meta(key)
        session = secrets.token_hex(16)
        if not self._open.put(session, _Download(stream)):
            stream.close()
            raise Unavailable(
                f"{_MAX_DOWNLOADS} downloads are open already: "
                "finish some, or wait until they expire"
            )
        return session, meta

    def read(self, session: str | None) -> bytes:
        """Return the next chunk; at the end an empty one, which ends the session.

        :class:`KeyNotFound` for a session that does not exist, has ended or expired.
        """
        download = self._open.touch(session) if isinstance(session, str) else None
        if download is None:
            raise KeyNotFound(
                f"no download {session!r:.60}: it has ended or expired; begin a new one"
            )
        with download.lock:
            if download.stream.closed:
                raise KeyNotFound(f"download {session} has expired: begin a new one")
            chunk = download.stream.read(self._chunk_bytes)
        if not chunk:
            self._open.remove(str(session))
            self._close(download)
        return chunk

    def close(self) -> None:
        """Close every file."""
        for session, download in self._open.build_map().items():
            self._open.remove(session)
            self._close(download)

    @staticmethod
    def _close(download: _Download) -> None:
        with download.lock:
            download.stream.close()


def _sessions(
    nimbus: Nimbus, on_expire: Callable[[str, V], None], limit: int
) -> TimeCacheMap[str, V]:
    """Map of sessions, which nimbus's upkeep expires when they are idle."""
    expiry_secs = float(nimbus.conf["nimbus.file.copy.expiration.secs"])
    sessions = TimeCacheMap(expiry_secs, now=time.monotonic(), on_expire=on_expire, limit=limit)
    nimbus.expiring.append(sessions)
    return sessions


def _not_stored(error: OSError) -> Unavailable:
    return Unavailable(
        f"the chunk cannot be stored ({error.strerror}): free space on nimbus's disk"
    )
