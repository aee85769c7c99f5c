"""A blob store in a folder: atomic, flushed to disk, content-addressed.

Layout below the base folder::

    objects/<sha256>        contents; immutable once there
    keys/<quoted key>       one small JSON document that names the key's size and content hash
    tmp/<random>            contents in the course of a write
    quarantine/<sha256>     contents whose bytes no longer match their name
    .lock                   taken while keys change

The document below ``keys`` is the commit point: it is replaced by rename after the content is on
disk. Two keys with the same content share one object, so that an archive that was staged and
deployed twice takes its space once. No part of a caller's key reaches the file system unquoted.
"""

import errno
import hashlib
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote

from storm_dagster.blobstore.store import BlobMeta, check_sha256, chunked, no_such_blob
from storm_dagster.host.files import lock_file, sync_path
from storm_dagster.model.errors import Corrupt, KeyNotFound, Unavailable
from storm_dagster.model.names import check_blob_key

_CHUNK_BYTES = 1 << 20
"""Bytes of one read of a file that is copied."""
_HASHED_NAME = "%h"
"""Starts the file name of a key that is too long when quoted; ``quote`` never produces it."""


class LocalBlobStore:
    """Blob store in a folder of this machine.

    It is a :class:`~storm_dagster.blobstore.store.BlobStore`, safe for many threads and, through a
    file lock, for several processes on one folder.
    """

    def __init__(self, directory: Path) -> None:
        self.directory: Path = Path(directory)
        self._objects = self.directory / "objects"
        self._keys = self.directory / "keys"
        self._tmp = self.directory / "tmp"
        self._quarantine = self.directory / "quarantine"
        try:
            for folder in (self._objects, self._keys, self._tmp):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(
                f"blob store {self.directory} cannot be used ({error.strerror}): make the folder "
                "writable or set blobstore.dir"
            ) from error
        self._lock = threading.Lock()
        """Held by the thread that changes keys; the file lock keeps other processes out."""
        self._uses: Counter[str] | None = None
        """Content -> number of keys that name it; ``None`` if it must be counted first."""
        self._last_turn = -1
        """Time of our last turn of the lock (:meth:`_exclusive`), if :attr:`_uses` was right at its
        end; else -1.
        """

    def __repr__(self) -> str:
        return f"LocalBlobStore({str(self.directory)!r})"

    # writing

    def put(
        self, key: str, chunks: Iterable[bytes] | bytes, *, expected_sha256: str | None = None
    ) -> BlobMeta:
        """Create or replace ``key``.

        Raises :class:`Unavailable` if the disk is full or gone. A failure leaves no temporary file,
        unless the disk is broken.
        """
        check_blob_key(key)
        problem = f"blob {key!r} cannot be stored"
        temporary = self._temporary_path()
        digest = hashlib.sha256()
        size = 0
        with _on_disk(problem):
            # Not a with statement: errors of ``chunks`` are not errors of the disk.
            stream = open(temporary, "xb")  # noqa: SIM115
        try:
            for chunk in chunked(chunks):
                with _on_disk(problem):
                    stream.write(chunk)
                digest.update(chunk)
                size += len(chunk)
            meta = BlobMeta(key, size, digest.hexdigest())
            meta.check_announced(expected_sha256)
            with _on_disk(problem):
                stream.flush()
                os.fsync(stream.fileno())
                return self._commit(temporary, meta)
        finally:
            # The error of a full disk has been raised; closing writes the buffer once more.
            with suppress(OSError):
                stream.close()
            # On a broken disk the file stays, for clean_abandoned.
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def adopt(self, key: str, path: Path, sha256: str) -> BlobMeta:
        """Make the file ``path`` the content of ``key``.

        ``sha256`` is its hash, which the caller has computed. The file is moved; across file
        systems it is copied, verified and removed.
        """
        check_blob_key(key)
        check_sha256(sha256)
        with _on_disk(f"blob {key!r} cannot be stored"):
            try:
                with open(path, "rb") as stream:
                    os.fsync(stream.fileno())
                    size = os.fstat(stream.fileno()).st_size
                return self._commit(path, BlobMeta(key, size, sha256))
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
        with open(path, "rb") as stream:
            chunks = iter(lambda: stream.read(_CHUNK_BYTES), b"")
            meta = self.put(key, chunks, expected_sha256=sha256)
        path.unlink(missing_ok=True)
        return meta

    def put_existing(self, key: str, sha256: str) -> BlobMeta | None:
        check_blob_key(key)
        source = self._objects / check_sha256(sha256)
        with _on_disk(f"blob {key!r} cannot be stored"), self._exclusive():
            try:
                meta = BlobMeta(key, source.stat().st_size, sha256)
            except FileNotFoundError:
                return None
            self._write_key(meta)
        return meta

    def delete(self, key: str) -> None:
        """Remove the blob, and its content if no other key names it."""
        path = self._key_path(key)
        with _on_disk(f"blob {key!r} cannot be deleted"), self._exclusive():
            meta = self._read_key(path)
            if meta is None:
                raise no_such_blob(key, str(self.directory))
            path.unlink()
            sync_path(self._keys)
            self._count(meta.sha256, -1)
            self._drop_unused([meta.sha256])

    # reading

    def meta(self, key: str) -> BlobMeta:
        with _on_disk(f"blob {key!r} cannot be read"):
            meta = self._read_key(self._key_path(key))
        if meta is None:
            raise no_such_blob(key, str(self.directory))
        return meta

    def exists(self, key: str) -> bool:
        return self._key_path(key).is_file()

    def has_content(self, sha256: str) -> bool:
        """True if the store has that content, under any key."""
        return (self._objects / check_sha256(sha256)).is_file()

    def open(self, key: str) -> BinaryIO:
        """The content as a seekable stream.

        A later replacement or deletion does not disturb the reader.
        """
        _, stream = self.open_with_meta(key)
        return stream

    def open_with_meta(self, key: str) -> tuple[BlobMeta, BinaryIO]:
        """Description and stream of the same version.

        The caller closes the stream.
        """
        meta = self.meta(key)
        for _ in range(5):
            try:
                with _on_disk(f"blob {key!r} cannot be read", FileNotFoundError):
                    return meta, open(self._objects / meta.sha256, "rb")
            except FileNotFoundError:
                # The blob was replaced between the two reads.
                meta = self.meta(key)
        raise Corrupt(
            f"blob {key!r} names content {meta.sha256} that is not in {self.directory}: "
            "delete the blob, or let this nimbus fetch it from another one"
        )

    def read(self, key: str) -> bytes:
        """The whole content, verified.

        Damaged content is moved to ``quarantine`` and raises :class:`Corrupt`.
        """
        meta, stream = self.open_with_meta(key)
        with _on_disk(f"blob {key!r} cannot be read"), stream:
            raw = stream.read()
        if hashlib.sha256(raw).hexdigest() != meta.sha256:
            with _on_disk(f"damaged blob {key!r} cannot be moved to quarantine"):
                self._quarantine.mkdir(exist_ok=True)
                with self._exclusive(), suppress(FileNotFoundError):
                    os.replace(self._objects / meta.sha256, self._quarantine / meta.sha256)
            raise Corrupt(
                f"blob {key!r} in {self.directory} no longer has its hash {meta.sha256}: it was "
                "moved to quarantine; another nimbus may still hold it, otherwise store it again"
            )
        return raw

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that start with ``prefix``, sorted.

        A damaged document of a long key, whose file name does not hold the key, raises
        :class:`Corrupt`.
        """
        keys: list[str] = []
        with _on_disk(f"the blobs in {self.directory} cannot be listed"):
            for name in os.listdir(self._keys):
                if name.startswith(_HASHED_NAME):
                    meta = self._read_key(self._keys / name)
                    key = meta.key if meta else None
                elif name.startswith("."):
                    continue
                else:
                    key = unquote(name)
                if key is not None and key.startswith(prefix):
                    keys.append(key)
        return sorted(keys)

    def list(self, prefix: str = "") -> list[BlobMeta]:
        """Descriptions of all blobs of the ``prefix``, by key."""
        blobs: list[BlobMeta] = []
        for key in self.keys(prefix):
            # A blob that was deleted after the listing is left out.
            with suppress(KeyNotFound):
                blobs.append(self.meta(key))
        return blobs

    # upkeep

    def clean_abandoned(self, older_than_secs: float = 3600.0) -> int:
        """Remove old temporary files and old contents without a key.

        Returns their number. The age protects the uploads in progress of other threads and
        processes.
        """
        with _on_disk(f"abandoned files in {self.directory} cannot be removed"):
            return self._clean_older_than(time.time() - older_than_secs)

    def _clean_older_than(self, horizon: float) -> int:
        """As :meth:`clean_abandoned`, for files last written at ``horizon`` or before."""
        removed = 0
        for path in self._tmp.iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime <= horizon:
                    path.unlink()
                    removed += 1
        with self._exclusive():
            old: list[str] = []
            for path in self._objects.iterdir():
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime <= horizon:
                        old.append(path.name)
            removed += self._drop_unused(old)
        return removed

    def _temporary_path(self) -> Path:
        """New path for a content in the course of a write."""
        return self._tmp / secrets.token_hex(16)

    def _commit(self, temporary: Path, meta: BlobMeta) -> BlobMeta:
        """Move flushed content into place and point the key at it; takes the lock.

        After an error the key may name the former or the new content.
        """
        with self._exclusive():
            os.replace(temporary, self._objects / meta.sha256)
            try:
                sync_path(self._objects)
                self._write_key(meta)
            except OSError:
                self._uses = None  # The key may name the content despite the error.
                self._drop_unused([meta.sha256])
                raise
        return meta

    def _write_key(self, meta: BlobMeta) -> None:
        """Point the key at the content, and remove the former content if no other key names it.

        Called under the lock.
        """
        path = self._key_path(meta.key)
        former = self._read_key(path)
        temporary = self._temporary_path()
        try:
            with open(temporary, "xb") as stream:
                stream.write(meta.key_file())
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_path(self._keys)
        self._count(meta.sha256, 1)
        if former is not None:
            self._count(former.sha256, -1)
            if former.sha256 != meta.sha256:
                self._drop_unused([former.sha256])

    def _read_key(self, path: Path) -> BlobMeta | None:
        """Description in the document of a key.

        ``None`` without the document; :class:`Corrupt` if it is damaged.
        """
        try:
            meta = BlobMeta.of_key_file(path.read_bytes())
        except FileNotFoundError:
            return None
        if meta is None:
            raise Corrupt(
                f"{path} does not describe a blob: it was damaged; remove the file and store the "
                "blob again"
            )
        return meta

    def _key_path(self, key: str) -> Path:
        name = quote(check_blob_key(key), safe="")
        # File systems permit 255 bytes for a name; the step below adds two.
        if len(name) > 250:
            name = _HASHED_NAME + hashlib.sha256(key.encode()).hexdigest()
        if name.startswith("."):
            # A leading dot is legal in a key, but listings skip hidden files.
            name = "%2E" + name[1:]
        return self._keys / name

    def _drop_unused(self, hashes: Iterable[str]) -> int:
        """Remove those contents that no key names, and return their number.

        Called under the lock.
        """
        candidates = set(hashes)
        if not candidates:
            return 0
        if self._uses is None:
            try:
                metas = [self._read_key(self._keys / name) for name in os.listdir(self._keys)]
            except Corrupt:
                return 0  # The damaged document may name any content: none is removed.
            self._uses = Counter(meta.sha256 for meta in metas if meta is not None)
        removed = 0
        for sha256 in candidates - self._uses.keys():
            with suppress(FileNotFoundError):
                (self._objects / sha256).unlink()
                removed += 1
        return removed

    def _count(self, sha256: str, change: int) -> None:
        """Change the number of keys that name the content, if the uses are counted."""
        if self._uses is not None:
            self._uses[sha256] += change
            if not self._uses[sha256]:
                del self._uses[sha256]

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock of the folder.

        Each holder raises the lock file's modification time by 1 ns (its turn). If the time is
        still that of our last turn, no other process was here and :attr:`_uses` is right. After an
        error, or if the file system rounds the time, :attr:`_uses` is counted again.
        """
        with self._lock, open(self.directory / ".lock", "ab") as stream:
            lock_file(stream, wait=True)
            former_turn = os.fstat(stream.fileno()).st_mtime_ns
            if former_turn != self._last_turn:
                self._uses = None
            turn = former_turn + 1
            os.utime(stream.fileno(), ns=(turn, turn))
            self._last_turn = os.fstat(stream.fileno()).st_mtime_ns
            try:
                yield
            except BaseException:
                self._last_turn = -1
                raise
            if self._last_turn != turn:
                self._last_turn = -1


@contextmanager
def _on_disk(problem: str, *unchanged: type[OSError]) -> Iterator[None]:
    """Raise :class:`Unavailable` for an error of a full or missing disk.

    Its text begins with the ``problem``. Errors of the types ``unchanged`` are raised as they are.
    """
    try:
        yield
    except unchanged:
        raise
    except OSError as error:
        raise Unavailable(
            f"{problem} ({error.strerror}): free space on the blob store's disk, or check that disk"
        ) from error
