"""A blob store behind any fsspec URL (S3, GCS, HDFS, a shared folder, memory).

Same layout as the local store, without locks: contents are immutable under their hash, and a key is
one small document that is replaced last. All nimbuses see the same blobs, so nothing is replicated
between them and none ever lacks one. Object stores have no folders and no rename: nothing here
relies on either. A content that no key names any more goes when it is old
(:meth:`FsspecBlobStore.clean_abandoned`), never at once: another nimbus may be about to name it. So
it is condemned first, and removed when it has been that, unnamed, for as long again; who wants to
name a condemned content writes it again.
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
from typing import Any, BinaryIO, cast
from urllib.parse import quote, unquote

import fsspec
from fsspec.implementations.local import LocalFileSystem

from storm_dagster.blobstore.store import BlobMeta, check_sha256, chunked, no_such_blob
from storm_dagster.model.errors import Corrupt, InvalidRequest, StormDagsterError, Unavailable
from storm_dagster.model.names import check_blob_key

_CHUNK = 1 << 20
_SPOOL = 8 << 20
_READS = 4
_PAUSE_SECS = 0.05


class FsspecBlobStore:
    """A :class:`~storm_dagster.blobstore.store.BlobStore` at an fsspec URL such as
    ``s3://bucket/storm``.

    ``options`` go to the file system unchanged. Errors of the remote store surface as
    :class:`Unavailable`.
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
        with tempfile.SpooledTemporaryFile(max_size=_SPOOL) as spool:
            for chunk in chunked(chunks):
                digest.update(chunk)
                size += len(chunk)
                spool.write(chunk)
            meta = BlobMeta(key, size, digest.hexdigest())
            meta.check_announced(expected_sha256)
            spool.seek(0)
            with self._remote(f"storing {key!r}"):
                target = self._path("objects", meta.sha256)
                if not self._usable(meta.sha256):
                    temporary = self._path("tmp", secrets.token_hex(16))
                    with self._fs.open(temporary, "wb") as stream:
                        while chunk := spool.read(_CHUNK):
                            stream.write(chunk)
                    self._move(temporary, target)
                    self._remove(self._path("condemned", meta.sha256))
                self._write_key(path, meta)
        return meta

    def adopt(self, key: str, path: Path, sha256: str) -> BlobMeta:
        """Store the file ``path``, whose hash is ``sha256``, under ``key``, and remove the file."""
        with path.open("rb") as stream:
            meta = self.put(key, iter(lambda: stream.read(_CHUNK), b""), expected_sha256=sha256)
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
            if (meta := BlobMeta.of_key_file(raw)) is not None:
                return meta
            # Some file systems show a file while it is being replaced: read again.
            if attempt + 1 < _READS:
                time.sleep(_PAUSE_SECS)
        raise Corrupt(f"{path} does not describe a blob: remove it and store the blob again")

    def exists(self, key: str) -> bool:
        with self._remote(f"looking for {key!r}"):
            return self._there(self._key_path(key))

    def has_content(self, sha256: str) -> bool:
        """Whether some blob there has that content."""
        with self._remote("looking for a content"):
            return self._there(self._path("objects", check_sha256(sha256)))

    def open(self, key: str) -> BinaryIO:
        return self.open_with_meta(key)[1]

    def open_with_meta(self, key: str) -> tuple[BlobMeta, BinaryIO]:
        """Description and stream of one and the same version; the caller closes the stream."""
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
        """Remove the blob; its content goes when it is old and no other key has it."""
        path = self._key_path(key)
        with self._remote(f"deleting {key!r}"):
            if not self._there(path):
                raise no_such_blob(key, self.url)
            self._fs.rm_file(path)

    def keys(self, prefix: str = "") -> list[str]:
        with self._remote("listing"):
            names = self._names("keys")
        return sorted(key for key in map(unquote, names) if key.startswith(prefix))

    def list(self, prefix: str = "") -> list[BlobMeta]:
        """Descriptions of all blobs whose key starts with ``prefix``, by key."""
        return [self.meta(key) for key in self.keys(prefix)]

    def clean_abandoned(self, older_than_secs: float = 3600.0) -> int:
        """Remove temporary files, and contents without a key, that are older than that; returns
        their number.
        """
        horizon = time.time() - older_than_secs
        with self._remote("cleaning"):
            doomed = [
                path
                for name in self._names("tmp")
                if self._written(path := self._path("tmp", name)) <= horizon
            ]
            aged = {
                name
                for name in self._names("objects")
                if self._written(self._path("objects", name)) <= horizon
            }
            condemned = set(self._names("condemned"))
        if aged or condemned:
            # The keys are read after the contents: what is named meanwhile is kept.
            used = {self.meta(key).sha256 for key in self.keys()}
            with self._remote("cleaning"):
                for name in condemned & used:
                    self._remove(self._path("condemned", name))
                for name in sorted(aged - used):
                    mark, path = self._path("condemned", name), self._path("objects", name)
                    if name not in condemned:
                        self._fs.pipe_file(mark, b"")
                    # Written again meanwhile: somebody is about to name it.
                    if self._written(mark) <= horizon and self._written(path) <= horizon:
                        doomed.append(path)
                        self._remove(path)
                        self._remove(mark)
        with self._remote("cleaning"):
            for path in doomed:
                self._remove(path)
        return len(doomed)

    def _usable(self, sha256: str) -> bool:
        """Whether the content is there to be named."""
        return self._there(self._path("objects", sha256)) and not self._there(
            self._path("condemned", sha256)
        )

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def _names(self, part: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(f"{self._root}/{part}", detail=False)
        except FileNotFoundError:
            # An object store has no folder without a file.
            return []
        return [
            name
            for each in found
            if (name := str(each).rstrip("/").rpartition("/")[2]) and name != part
        ]

    def _there(self, path: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(path))

    def _written(self, path: str) -> float:
        try:
            return float(self._fs.modified(path).timestamp())
        except FileNotFoundError:
            return time.time()

    def _move(self, temporary: str, target: str) -> None:
        try:
            self._fs.mv(temporary, target)
        except OSError:
            # Where a rename does not replace, another writer of the same content was faster.
            if not self._there(target):
                raise
            self._fs.rm_file(temporary)

    def _write_key(self, path: str, meta: BlobMeta) -> None:
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
            f"blob {meta.key!r} names content {meta.sha256} that is not at {self.url}: store the blob again"
        )

    def _key_path(self, key: str) -> str:
        return self._path("keys", quote(check_blob_key(key), safe=""))

    def _path(self, part: str, name: str) -> str:
        return f"{self._root}/{part}/{name}"

    @contextmanager
    def _remote(self, doing: str) -> Iterator[None]:
        try:
            yield
        except StormDagsterError:
            raise
        except Exception as error:
            # Each file system raises errors of its own client.
            raise Unavailable(
                f"{doing} in the blob store {self.url} failed ({error}): check that it can be reached"
            ) from error
