"""Files and blobs in chunks: uploads and downloads that expire when they are left idle.

A session is a random word; no path or key of a caller is ever a file's name. What an upload has
received lies in the inbox until it is finished, and becomes a blob then; cancelled, failed and
expired ones leave nothing.
"""

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
_MOST_OPEN = 1000
_MOST_DOWNLOADS = 200
"""Each holds a file open."""


class Upload:
    """A file of the inbox that grows by chunks; one caller at a time."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.key = key
        """The blob that it will be."""
        self.user = LIMITED_USER.get()
        """Who alone goes on with it, beside administrators."""
        self.size: int = 0
        self.lock = threading.Lock()
        self.ended = False
        self.digest = hashlib.sha256()
        """Of what has arrived."""
        path.touch(exist_ok=False)

    def append(self, chunk: bytes) -> None:
        """Write a chunk; opened each time, so that a thousand idle uploads hold no thousand
        descriptors.
        """
        with self.path.open("ab") as sink:
            sink.write(chunk)
        self.digest.update(chunk)
        self.size += len(chunk)

    def discard(self) -> None:
        """Remove what is left of the file; repeatable."""
        self.ended: bool = True
        self.path.unlink(missing_ok=True)


class UploadSessions:
    """The uploads of one kind. ``what`` names a session in messages."""

    def __init__(self, nimbus: Nimbus, what: str) -> None:
        self._nimbus = nimbus
        self._what = what
        self._most_bytes = int(nimbus.conf["nimbus.upload.max.bytes"])
        self._open: TimeCacheMap[str, Upload] = _sessions(nimbus, self._expire, _MOST_OPEN)

    def begin(self, key: str | None = None) -> str:
        """A new session for the blob ``key`` (``None``: the archive that is uploaded under the
        session's own name).

        :class:`Unavailable` at a follower, and when too many are open.
        """
        self._nimbus.status.require()
        check_share((upload.user for upload in self._open.build_map().values()), self._what)
        session = secrets.token_hex(16)
        try:
            upload = Upload(new_inbox_file(self._nimbus.inbox), key or f"upload.{session}.archive")
        except OSError as error:
            raise _disk(error) from error
        if not self._open.put(session, upload):
            upload.discard()
            raise Unavailable(
                f"{_MOST_OPEN} {self._what}s are open already: finish or cancel some, or wait"
            )
        return session

    def append(self, session: str | None, chunk: bytes | None) -> None:
        """Add a chunk, and begin the session's idle time again; :class:`KeyNotFound` when there is
        none (any more).
        """
        self._nimbus.status.require()
        with self._take(session) as upload:
            if chunk is None:
                raise InvalidRequest(f"no chunk for {self._what} {session}: send bytes")
            if upload.size + len(chunk) > self._most_bytes:
                self._end(session, upload)
                raise InvalidRequest(
                    f"the {self._what} is larger than {self._most_bytes} bytes and was dropped: send less, or raise "
                    "nimbus.upload.max.bytes"
                )
            try:
                upload.append(chunk)
            except OSError as error:
                self._end(session, upload)
                raise _disk(error) from error

    def finish(self, session: str | None) -> BlobMeta:
        """Make it a blob, on as many nimbuses as the cluster asks for; the session ends, also by an
        error.
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
        """End the session and leave nothing of it; :class:`KeyNotFound` for one that does not
        exist.
        """
        with self._take(session) as upload:
            self._end(session, upload)

    def _end(self, session: str | None, upload: Upload) -> None:
        self._open.remove(str(session))
        upload.discard()

    @contextmanager
    def _take(self, session: str | None) -> Iterator[Upload]:
        """The upload of a session, whose idle time begins again, for one caller at a time."""
        upload = self._open.touch(session) if isinstance(session, str) else None
        with nullcontext() if upload is None else upload.lock:
            if upload is None or upload.ended or LIMITED_USER.get() not in (None, upload.user):
                raise KeyNotFound(
                    f"no {self._what} {session!r:.60}: it was finished or cancelled, has expired, or began at another "
                    "nimbus; begin a new one"
                )
            yield upload

    def _expire(self, session: str, upload: Upload) -> None:
        _log.info("%s %s was idle for too long and is dropped", self._what, session)
        with upload.lock:
            upload.discard()


@dataclass(frozen=True)
class _Download:
    stream: BinaryIO
    lock: threading.Lock = field(default_factory=threading.Lock)


class Downloads:
    """The downloads of one nimbus; each holds the version of its blob that it began with."""

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._chunk = int(nimbus.conf["storm.blobstore.inputstream.buffer.size.bytes"])
        self._open: TimeCacheMap[str, _Download] = _sessions(
            nimbus, lambda _, d: self._close(d), _MOST_DOWNLOADS
        )

    def begin(self, key: str) -> tuple[str, BlobMeta]:
        """A new session, and what it downloads; :class:`KeyNotFound` for a blob that is not
        here.
        """
        meta, stream = self._nimbus.blobs.base.open_with_meta(key)
        session = secrets.token_hex(16)
        if not self._open.put(session, _Download(stream)):
            stream.close()
            raise Unavailable(
                f"{_MOST_DOWNLOADS} downloads are open already: finish some, or wait until they expire"
            )
        return session, meta

    def read(self, session: str | None) -> bytes:
        """The next chunk; at the end an empty one, once, with which the session ends."""
        download = self._open.touch(session) if isinstance(session, str) else None
        if download is None:
            raise KeyNotFound(
                f"no download {session!r:.60}: it has ended or expired; begin a new one"
            )
        with download.lock:
            if download.stream.closed:
                raise KeyNotFound(f"download {session} has expired: begin a new one")
            chunk = download.stream.read(self._chunk)
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
    nimbus: Nimbus, on_expire: Callable[[str, V], None], most: int
) -> TimeCacheMap[str, V]:
    expiry_secs = float(nimbus.conf["nimbus.file.copy.expiration.secs"])
    sessions = TimeCacheMap(expiry_secs, now=time.monotonic(), on_expire=on_expire, limit=most)
    nimbus.expiring.append(sessions)
    return sessions


def _disk(error: OSError) -> Unavailable:
    return Unavailable(
        f"the chunk cannot be stored ({error.strerror}): free space on nimbus's disk"
    )
