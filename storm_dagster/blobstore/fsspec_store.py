"""A blob store behind any fsspec URL (S3, GCS, HDFS, a shared folder, memory).

The layout is that of the local store, without locks: contents are immutable under their hash, and a
key is one small document that is replaced last. All nimbuses see the same blobs, so that no blob is
replicated between them and none ever lacks one. Object stores have neither folders nor a rename:
the store relies on neither.

A content that no key names is removed when it is old (:meth:`FsspecBlobStore.clean_abandoned`),
never at once: another nimbus may be about to name it. So the content is condemned first, and
removed after the same time once more, if no key has named it since. A writer that needs a condemned
content stores it once more.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, cast
from urllib.parse import quote, unquote

import fsspec
from fsspec.implementations.local import LocalFileSystem

from storm_dagster.blobstore.store import BlobMeta, check_sha256, chunked, no_such_blob
from storm_dagster.model.errors import (
    Corrupt,
    InvalidRequest,
    KeyNotFound,
    StormDagsterError,
    Unavailable,
    error_text,
)
from storm_dagster.model.names import check_blob_key

_CHUNK_BYTES = 1 << 20
"""Bytes of one write."""
_SPOOL_BYTES = 8 << 20
"""Largest content that is held in memory until its hash is known; a larger one is in a file."""
_READS = 4
"""Reads of a key's document that is incomplete."""
_PAUSE_SECS = 0.05
"""Pause between them."""


class FsspecBlobStore:
    """Blob store at an fsspec URL such as ``s3://bucket/storm``.

    It is a :class:`~storm_dagster.blobstore.store.BlobStore`. ``options`` are passed to the file
    system unchanged. Errors of the remote store surface as :class:`Unavailable`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        try:
            fs, root = fsspec.core.url_to_fs(url, **options)
        except (ValueError, ImportError) as error:
            raise InvalidRequest(
                f"blobstore.dir {url!r} cannot be opened ({error}): check the URL"
            ) from error
        self._fs: Any = fs
        self._root = str(root).rstrip("/")
        with self._remote("preparing"):
            for part in ("objects", "keys", "tmp", "condemned"):
                self._fs.makedirs(f"{self._root}/{part}", exist_ok=True)

    def __repr__(self) -> str:
        return f"FsspecBlobStore({self.url!r})"

    def put(
        self, key: str, chunks: Iterable[bytes] | bytes, *, expected_sha256: str | None = None
    ) -> BlobMeta:
        """Create or replace ``key``; the key's document is written last."""
        path = self._key_path(key)
        digest = hashlib.sha256()
        size = 0
        # Spooled first, since the path of a content is its hash.
        with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as spool:
            for chunk in chunked(chunks):
                digest.update(chunk)
                size += len(chunk)
                spool.write(chunk)
            meta = BlobMeta(key, size, digest.hexdigest())
            meta.check_announced(expected_sha256)
            spool.seek(0)
            with self._remote(f"storing {key!r}"):
                if not self._usable(meta.sha256):
                    self._write_content(spool, meta.sha256)
                self._write_key(path, meta)
        return meta

    def _write_content(self, content: IO[bytes], sha256: str) -> None:
        """Write a content under its hash; a reader never sees a part of it."""
        temporary = self._path("tmp", secrets.token_hex(16))
        with self._fs.open(temporary, "wb") as stream:
            while chunk := content.read(_CHUNK_BYTES):
                stream.write(chunk)
        self._move(temporary, self._path("objects", sha256))
        self._remove(self._path("condemned", sha256))

    def adopt(self, key: str, path: Path, sha256: str) -> BlobMeta:
        """Store a file under ``key``, and remove the file.

        ``sha256`` is the hash of its content.
        """
        with path.open("rb") as stream:
            chunks = iter(lambda: stream.read(_CHUNK_BYTES), b"")
            meta = self.put(key, chunks, expected_sha256=sha256)
        path.unlink(missing_ok=True)
        return meta

    def put_existing(self, key: str, sha256: str) -> BlobMeta | None:
        path = self._key_path(key)
        target = self._path("objects", check_sha256(sha256))
        with self._remote(f"storing {key!r}"):
            if not self._usable(sha256):
                return None
            meta = BlobMeta(key, int(self._fs.size(target)), sha256)
            self._write_key(path, meta)
        return meta

    def meta(self, key: str) -> BlobMeta:
        path = self._key_path(key)
        for attempt in range(_READS):
            with self._remote(f"looking for {key!r}"):
                try:
                    raw = self._fs.cat_file(path)
                except FileNotFoundError:
                    raise no_such_blob(key, self.url) from None
            meta = BlobMeta.of_key_file(raw)
            if meta is not None:
                return meta
            # Some file systems show a file while it is being replaced: it is reread.
            if attempt + 1 < _READS:
                time.sleep(_PAUSE_SECS)
        raise Corrupt(f"{path} does not describe a blob: remove it and store the blob again")

    def exists(self, key: str) -> bool:
        with self._remote(f"looking for {key!r}"):
            return self._exists(self._key_path(key))

    def has_content(self, sha256: str) -> bool:
        """True if the store has that content, under any key."""
        with self._remote("looking for a content"):
            return self._exists(self._path("objects", check_sha256(sha256)))

    def open(self, key: str) -> BinaryIO:
        _, stream = self.open_with_meta(key)
        return stream

    def open_with_meta(self, key: str) -> tuple[BlobMeta, BinaryIO]:
        """Description and stream of the same version.

        The caller closes the stream.
        """
        meta = self.meta(key)
        with self._remote(f"reading {key!r}"):
            try:
                stream = self._fs.open(self._path("objects", meta.sha256), "rb")
            except FileNotFoundError:
                raise self._content_lost(meta) from None
        return meta, cast(BinaryIO, stream)

    def read(self, key: str) -> bytes:
        meta = self.meta(key)
        with self._remote(f"reading {key!r}"):
            try:
                raw = bytes(self._fs.cat_file(self._path("objects", meta.sha256)))
            except FileNotFoundError:
                raise self._content_lost(meta) from None
        if hashlib.sha256(raw).hexdigest() != meta.sha256:
            with self._remote(f"reading {key!r}"):
                # Condemned, so that the next writer of the content replaces the damaged bytes.
                self._fs.pipe_file(self._path("condemned", meta.sha256), b"")
            raise Corrupt(
                f"blob {key!r} at {self.url} no longer has its hash {meta.sha256}: store it again"
            )
        return raw

    def delete(self, key: str) -> None:
        """Remove the blob.

        Its content is removed later, if no other key names it.
        """
        path = self._key_path(key)
        with self._remote(f"deleting {key!r}"):
            if not self._exists(path):
                raise no_such_blob(key, self.url)
            self._fs.rm_file(path)

    def keys(self, prefix: str = "") -> list[str]:
        with self._remote("listing"):
            names = self._names("keys")
        return sorted(key for key in map(unquote, names) if key.startswith(prefix))

    def list(self, prefix: str = "") -> list[BlobMeta]:
        """Descriptions of all blobs of the ``prefix``, by key."""
        blobs: list[BlobMeta] = []
        for key in self.keys(prefix):
            # A blob that was deleted after the listing is left out.
            with suppress(KeyNotFound):
                blobs.append(self.meta(key))
        return blobs

    def clean_abandoned(self, older_than_secs: float = 3600.0) -> int:
        """Remove old temporary files and old contents without a key.

        Returns their number.
        """
        horizon = time.time() - older_than_secs
        with self._remote("cleaning"):
            temporary = self._older_than(horizon, "tmp")
            contents = set(self._older_than(horizon, "objects"))
            condemned = set(self._names("condemned"))
        removed = 0
        if contents or condemned:
            # The keys are read after the contents, so that a content named in between is kept.
            used = {meta.sha256 for meta in self.list()}
            with self._remote("cleaning"):
                for sha256 in condemned & used:
                    self._remove(self._path("condemned", sha256))
                for sha256 in sorted(contents - used):
                    if sha256 not in condemned:
                        self._fs.pipe_file(self._path("condemned", sha256), b"")
                    removed += self._remove_condemned(sha256, horizon)
        with self._remote("cleaning"):
            for name in temporary:
                self._remove(self._path("tmp", name))
                removed += 1
        return removed

    def _older_than(self, horizon: float, part: str) -> list[str]:
        """Names in a part of the store that were last written at ``horizon`` or before."""
        names = self._names(part)
        return [name for name in names if self._written_at(self._path(part, name)) <= horizon]

    def _remove_condemned(self, sha256: str, horizon: float) -> bool:
        """Remove a content that is old and has been condemned for as long.

        Returns true if it was removed.
        """
        path = self._path("objects", sha256)
        mark = self._path("condemned", sha256)
        # A content that was written after the listing is about to be named.
        if self._written_at(mark) > horizon or self._written_at(path) > horizon:
            return False
        self._remove(path)
        self._remove(mark)
        return True

    def _usable(self, sha256: str) -> bool:
        """True if a key may name the content.

        The content must be stored and not condemned.
        """
        if not self._exists(self._path("objects", sha256)):
            return False
        return not self._exists(self._path("condemned", sha256))

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def _names(self, part: str) -> list[str]:
        """Names of the files in a part of the store."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(f"{self._root}/{part}", detail=False)
        except FileNotFoundError:
            # An object store has no folder without a file.
            return []
        names = [str(path).rstrip("/").rpartition("/")[2] for path in paths]
        # Some file systems list the folder itself, too.
        return [name for name in names if name not in ("", part)]

    def _exists(self, path: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(path))

    def _written_at(self, path: str) -> float:
        """Time of the last write.

        It is the current time for a file that has been removed.
        """
        try:
            return float(self._fs.modified(path).timestamp())
        except FileNotFoundError:
            return time.time()

    def _move(self, temporary: str, target: str) -> None:
        """Move a complete content into place, unless another writer has stored it."""
        try:
            self._fs.mv(temporary, target)
        except OSError:
            # Where a rename does not replace, another writer of the same content was faster.
            if not self._exists(target):
                raise
            self._fs.rm_file(temporary)

    def _write_key(self, path: str, meta: BlobMeta) -> None:
        """Write the document of a key, which makes the content visible under it."""
        raw = meta.key_file()
        if isinstance(self._fs, LocalFileSystem):
            # A file system shows a file while it is being written; object stores do not.
            temporary = self._path("tmp", secrets.token_hex(16))
            self._fs.pipe_file(temporary, raw)
            os.replace(temporary, path)
        else:
            self._fs.pipe_file(path, raw)

    def _content_lost(self, meta: BlobMeta) -> Corrupt:
        return Corrupt(
            f"blob {meta.key!r} names content {meta.sha256} that is not at {self.url}: store the "
            "blob again"
        )

    def _key_path(self, key: str) -> str:
        return self._path("keys", quote(check_blob_key(key), safe=""))

    def _path(self, part: str, name: str) -> str:
        return f"{self._root}/{part}/{name}"

    @contextmanager
    def _remote(self, action: str) -> Iterator[None]:
        """Raise :class:`Unavailable` for an error of the file system."""
        try:
            yield
        except StormDagsterError:
            raise
        except Exception as error:
            # Each file system raises the errors of its client.
            raise Unavailable(
                f"{action} in the blob store {self.url} failed ({error_text(error)}): check that "
                "it can be reached"
            ) from error
