"""Blob store of runs and of the command line: a client of the leading nimbus."""

import copy
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, BinaryIO, cast
from urllib.parse import quote

import httpx

from storm_dagster.blobstore.messages import blob_response_error, chunks_of
from storm_dagster.blobstore.store import BlobMeta, chunked
from storm_dagster.client.leader import NamedLeader, call_leader
from storm_dagster.model.errors import (
    Corrupt,
    KeyNotFound,
)
from storm_dagster.model.names import check_blob_key
from storm_dagster.security.settings import SILENT_SECS, Security

_CHUNK = 1 << 16
"""Bytes of a response that are read at once."""
_SPOOL = 8 << 20
"""Size above which the content of a blob is kept on disk."""
_WRITE_SECS = 30.0  # Of these a nimbus waits up to 20 for copies.


@dataclass(eq=False)
class NimbusBlobClient(AbstractContextManager["NimbusBlobClient"]):
    """A :class:`~storm_dagster.blobstore.store.BlobStore` over HTTP to the leader.

    ``leader_url`` is called before every try, so that a change of leader is followed. Each call has
    a deadline of ``deadline_secs`` over all its tries; after it, :class:`Unavailable`. Only
    :class:`Unavailable` responses and failed connections are retried; every call is repeatable,
    because a content is identified by its hash.
    """

    leader_url: Callable[[], str] | str
    _: KW_ONLY
    epoch: Callable[[], int | None] | int | None = None
    """Epoch of the leader that started the run, or a function that returns it.

    It is sent with every write: a run whose leader was deposed gets ``Fenced``.
    """
    min_replication: int | None = None
    """Number of nimbuses that must hold a blob before a write is acknowledged."""
    allow_degraded: bool = False
    """True if fewer are enough while too few nimbuses are alive."""
    deadline_secs: float = 30.0
    security: InitVar[Security | None] = None

    def __post_init__(self, security: Security | None) -> None:
        # Loopback and cluster addresses never go through a proxy of the environment.
        timeout = httpx.Timeout(SILENT_SECS, connect=min(5.0, self.deadline_secs))
        self._http = httpx.Client(timeout=timeout, **(security or Security()).client_options())
        self._leader = NamedLeader(self.leader_url)

    def close(self) -> None:
        """Close the connections; the client cannot be used afterwards."""
        self._http.close()

    def accepting_fewer(self, minimum: int | None = None) -> "NimbusBlobClient":
        """Copy of the client whose writes need ``minimum`` copies, or fewer.

        Fewer are enough while fewer nimbuses are alive. Without ``minimum`` the writes need as many
        copies as those of this client.
        """
        client = copy.copy(self)
        client.allow_degraded = True
        client.min_replication = minimum or self.min_replication
        return client

    def follow_epoch(self, epoch: int) -> None:
        """Send that epoch with later writes, in place of a fixed one.

        A client that sends none, or looks it up for each write, stays as it is.
        """
        if isinstance(self.epoch, int):
            self.epoch = epoch

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(
        self, key: str, chunks: Iterable[bytes] | bytes, *, expected_sha256: str | None = None
    ) -> BlobMeta:
        """Store a blob at the leader; it is acknowledged after the minimum replication.

        The leader refuses a content whose hash is not ``expected_sha256``.
        """
        check_blob_key(key)
        with tempfile.SpooledTemporaryFile(max_size=_SPOOL) as spool:
            digest = hashlib.sha256()
            for chunk in chunked(chunks):
                digest.update(chunk)
                spool.write(chunk)
            content_headers = {
                "X-Content-SHA256": expected_sha256 or digest.hexdigest(),
                "Content-Length": str(spool.tell()),
            }
            options = self._write_options(content_headers)

            def send(base: str) -> httpx.Response:
                return self._http.put(_url(base, key), content=chunks_of(spool), **options)

            response = self._repeat(f"storing blob {key!r}", send)
        return _meta_of(response.json())

    def put_existing(self, key: str, sha256: str) -> BlobMeta | None:
        """Store under ``key`` a content that the leader has already, without a transfer.

        ``None`` if the leader does not have it.
        """
        check_blob_key(key)
        options = self._write_options()

        def send(base: str) -> httpx.Response:
            params = {"sha256": sha256}
            return self._http.put(_url(base, key), params=params, content=b"", **options)

        try:
            response = self._repeat(f"storing blob {key!r}", send, key=key)
        except KeyNotFound:
            return None
        return _meta_of(response.json())

    @contextmanager
    def open(self, key: str) -> Iterator[BinaryIO]:
        """Open the verified content as a seekable stream.

        Large content is kept on disk. Raises :class:`KeyNotFound` for no such blob, and
        :class:`Corrupt` if the content does not have its hash.
        """
        check_blob_key(key)
        with tempfile.SpooledTemporaryFile(max_size=_SPOOL) as spool:

            def fetch(base: str) -> httpx.Response:
                # An earlier try may have written a part of the content.
                spool.seek(0)
                spool.truncate()
                digest = hashlib.sha256()
                with self._http.stream("GET", _url(base, key)) as response:
                    if response.status_code != 200:
                        response.read()
                        return response
                    for chunk in response.iter_bytes(_CHUNK):
                        digest.update(chunk)
                        spool.write(chunk)
                    announced = response.headers.get("X-Content-SHA256")
                    if announced != digest.hexdigest():
                        raise Corrupt(
                            f"blob {key!r} from {base} has SHA-256 {digest.hexdigest()}, "
                            f"{announced} was announced: its stored content is damaged; "
                            "store it again"
                        )
                    return response

            self._repeat(f"reading blob {key!r}", fetch, key=key)
            spool.seek(0)
            yield cast(BinaryIO, spool)

    def read(self, key: str) -> bytes:
        with self.open(key) as stream:
            return stream.read()

    def meta(self, key: str) -> BlobMeta:
        check_blob_key(key)
        response = self._repeat(
            f"looking for blob {key!r}", lambda base: self._http.head(_url(base, key)), key=key
        )
        return BlobMeta(
            key, int(response.headers["Content-Length"]), response.headers["X-Content-SHA256"]
        )

    def exists(self, key: str) -> bool:
        try:
            self.meta(key)
        except KeyNotFound:
            return False
        return True

    def delete(self, key: str) -> None:
        check_blob_key(key)
        options = self._write_options()
        self._repeat(
            f"deleting blob {key!r}",
            lambda base: self._http.delete(_url(base, key), **options),
            key=key,
        )

    def keys(self, prefix: str = "") -> list[str]:
        return [meta.key for meta in self.list(prefix)]

    def list(self, prefix: str = "") -> list[BlobMeta]:
        """Descriptions of all blobs at the leader whose key starts with ``prefix``."""
        response = self._repeat(
            "listing blobs",
            lambda base: self._http.get(f"{base}/v1/blobs", params={"prefix": prefix}),
        )
        return [_meta_of(document) for document in response.json()["blobs"]]

    def _write_options(self, content_headers: Mapping[str, str] = {}) -> dict[str, Any]:
        """Options of a request that writes: its headers, and the timeout of its response."""
        headers = dict(content_headers)
        epoch = self.epoch() if callable(self.epoch) else self.epoch
        if epoch is not None:
            headers["X-Storm-Epoch"] = str(epoch)
        if self.min_replication is not None:
            headers["X-Storm-Min-Replication"] = str(self.min_replication)
        if self.allow_degraded:
            headers["X-Storm-Allow-Degraded"] = "true"
        timeout = httpx.Timeout(_WRITE_SECS, connect=self._http.timeout.connect)
        return {"headers": headers, "timeout": timeout}

    def _repeat(
        self, doing: str, request: Callable[[str], httpx.Response], *, key: str | None = None
    ) -> httpx.Response:
        """Send a request until it has a good response, or raise the typed error.

        ``key`` is the blob that must exist: a response to HEAD has no text that names it.
        """
        return call_leader(
            self._leader,
            request,
            doing=doing,
            deadline=time.monotonic() + self.deadline_secs,
            error_of=lambda response: blob_response_error(response, key),
        )


def _url(base: str, key: str) -> str:
    return f"{base}/v1/blobs/{quote(key, safe='')}"


def _meta_of(document: Mapping[str, Any]) -> BlobMeta:
    return BlobMeta(str(document["key"]), int(document["size"]), str(document["sha256"]))
