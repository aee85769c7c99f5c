"""The blob store of a simulated machine: in memory, as durable as its machine, with a disk that
fails as told.
"""

from __future__ import annotations

import errno
import hashlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.blobstore.store import BlobMeta, check_sha256, chunked, no_such_blob
from storm_dagster.model.errors import Corrupt, InvalidRequest, Unavailable
from storm_dagster.model.names import check_blob_key
from storm_simulation.kernel import Host
from storm_simulation.threads import time


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def broken_disk() -> OSError:
    return OSError(errno.EIO, "Input/output error")


def _unavailable(problem: str, error: OSError) -> Unavailable:
    return Unavailable(
        f"{problem} ({error.strerror}): free space on the blob store's disk, or check that disk"
    )


class MemoryBlobStore(LocalBlobStore):
    """:class:`LocalBlobStore` on ``host.files``; raises what that raises on a disk in the same
    state.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.directory = Path(f"/{host.name}/blobs")
        stored = host.files.setdefault("blobs", {"keys": {}, "contents": {}})
        self._metas: dict[str, tuple[BlobMeta, float]] = stored["keys"]
        self._contents: dict[str, bytes] = stored["contents"]

    def _reading(self, problem: str) -> None:
        if self._host.disk == "broken":
            raise _unavailable(problem, broken_disk())

    def _writing(self, problem: str) -> None:
        if self._host.disk == "broken":
            raise _unavailable(problem, broken_disk())
        if self._host.disk == "full":
            raise _unavailable(problem, full_disk())

    def put(
        self, key: str, chunks: Iterable[bytes] | bytes, *, expected_sha256: str | None = None
    ) -> BlobMeta:
        check_blob_key(key)
        raw = b"".join(chunked(chunks))
        self._writing(f"blob {key!r} cannot be stored")
        actual = hashlib.sha256(raw).hexdigest()
        if expected_sha256 is not None and actual != expected_sha256:
            raise InvalidRequest(
                f"blob {key!r}: {expected_sha256} was announced, {actual} arrived: send it again"
            )
        return self._store(BlobMeta(key, len(raw), actual), raw)

    def _store(self, meta: BlobMeta, raw: bytes) -> BlobMeta:
        self._contents[meta.sha256] = raw
        former = self._metas.get(meta.key)
        self._metas[meta.key] = (meta, time.time())
        if former is not None and former[0].sha256 != meta.sha256:
            self._drop(former[0].sha256)
        return meta

    def _drop(self, sha256: str) -> None:
        if all(meta.sha256 != sha256 for meta, _ in self._metas.values()):
            self._contents.pop(sha256, None)

    def adopt(self, key: str, path: Path, sha256: str) -> BlobMeta:
        check_blob_key(key)
        self._writing(f"blob {key!r} cannot be stored")
        raw = path.read_bytes()
        path.unlink(missing_ok=True)
        return self._store(BlobMeta(key, len(raw), check_sha256(sha256)), raw)

    def put_existing(self, key: str, sha256: str) -> BlobMeta | None:
        check_blob_key(key)
        self._reading(f"blob {key!r} cannot be stored")
        raw = self._contents.get(check_sha256(sha256))
        if raw is None:
            return None
        self._writing(f"blob {key!r} cannot be stored")
        return self._store(BlobMeta(key, len(raw), sha256), raw)

    def delete(self, key: str) -> None:
        self._reading(f"blob {key!r} cannot be deleted")
        found = self._metas.pop(key, None)
        if found is None:
            raise no_such_blob(key, str(self.directory))
        self._drop(found[0].sha256)
        for observe in self._host.observers:
            observe(self._host, key)

    def meta(self, key: str) -> BlobMeta:
        self._reading(f"blob {key!r} cannot be read")
        found = self._metas.get(key)
        if found is None:
            raise no_such_blob(key, str(self.directory))
        return found[0]

    def exists(self, key: str) -> bool:
        return key in self._metas

    def has_content(self, sha256: str) -> bool:
        return sha256 in self._contents

    def open(self, key: str) -> BinaryIO:
        return self.open_with_meta(key)[1]

    def open_with_meta(self, key: str) -> tuple[BlobMeta, BinaryIO]:
        meta = self.meta(key)
        return meta, io.BytesIO(self._contents[meta.sha256])

    def read(self, key: str) -> bytes:
        meta, stream = self.open_with_meta(key)
        raw = stream.read()
        if hashlib.sha256(raw).hexdigest() != meta.sha256:
            raise Corrupt(f"blob {key!r} no longer has its hash")
        return raw

    def keys(self, prefix: str = "") -> list[str]:
        self._reading(f"the blobs in {self.directory} cannot be listed")
        return sorted(key for key in self._metas if key.startswith(prefix))

    def list(self, prefix: str = "") -> Any:
        return [self._metas[key][0] for key in self.keys(prefix)]

    def clean_abandoned(self, older_than_secs: float = 3600.0) -> int:
        self._writing(f"abandoned files in {self.directory} cannot be removed")
        return 0
