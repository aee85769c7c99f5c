"""Protocol of a blob store, and the description of one blob."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, Protocol, runtime_checkable

from storm_dagster.model.errors import InvalidRequest, KeyNotFound
from storm_dagster.model.names import check_blob_key

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class BlobMeta:
    """One stored blob. The content hash is its version."""

    key: str
    size: int
    """Bytes."""
    sha256: str
    """Hex, lower case."""

    def to_document(self) -> dict[str, object]:
        """The JSON form of every surface."""
        return {"key": self.key, "size": self.size, "sha256": self.sha256}

    def key_file(self) -> bytes:
        """Content of the file that makes the content visible under the key."""
        return json.dumps({"v": 1, **self.to_document()}).encode()

    @staticmethod
    def of_key_file(raw: bytes) -> BlobMeta | None:
        """Decode the result of :meth:`key_file`.

        ``None`` for any other content.
        """
        try:
            document = json.loads(raw)
            return BlobMeta(
                check_blob_key(document["key"]),
                int(document["size"]),
                check_sha256(document["sha256"]),
            )
        except (ValueError, KeyError, TypeError, InvalidRequest):
            return None

    def check_announced(self, sha256: str | None) -> None:
        """Refuse a content whose sender announced another hash.

        Raises :class:`InvalidRequest`.
        """
        if sha256 is not None and sha256 != self.sha256:
            raise InvalidRequest(
                f"blob {self.key!r}: {self.size} bytes with SHA-256 {self.sha256} arrived, "
                f"{sha256} was announced: the transfer was damaged, send it again"
            )


@runtime_checkable
class BlobStore(Protocol):
    """A key-value store of bytes.

    All methods raise :class:`InvalidRequest` for a key outside the grammar of
    :func:`storm_dagster.model.names.check_blob_key`.
    """

    def put(
        self, key: str, chunks: Iterable[bytes] | bytes, *, expected_sha256: str | None = None
    ) -> BlobMeta:
        """Create or replace ``key`` atomically.

        Readers see the old content until all of the new one is stored. Raises
        :class:`InvalidRequest`, and changes no blob, if the content's hash is not
        ``expected_sha256``.
        """
        ...

    def put_existing(self, key: str, sha256: str) -> BlobMeta | None:
        """Store a content that the store has, without its bytes.

        It gets the key ``key``, too. ``None`` if the store does not have it.
        """
        ...

    def open(self, key: str) -> AbstractContextManager[BinaryIO]:
        """The content as a readable stream.

        Raises :class:`KeyNotFound` without the blob.
        """
        ...

    def read(self, key: str) -> bytes:
        """The whole content, its hash checked.

        Raises :class:`KeyNotFound` without the blob, and :class:`Corrupt` for another hash.
        """
        ...

    def meta(self, key: str) -> BlobMeta:
        """Size and hash; :class:`KeyNotFound` without the blob."""
        ...

    def delete(self, key: str) -> None:
        """Remove the blob; :class:`KeyNotFound` without it.

        Open streams stay readable.
        """

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that start with ``prefix``, sorted."""
        ...

    def exists(self, key: str) -> bool:
        """True if the blob exists."""
        ...


@runtime_checkable
class ReplicatedStore(BlobStore, Protocol):
    """A store whose writes are acknowledged once enough nimbuses hold them."""

    def accepting_fewer(self, minimum: int | None = None) -> BlobStore:
        """The same store with writes that accept fewer copies.

        A write is acknowledged also if no living nimbus can take a further copy. ``minimum``:
        number of copies from which on a write no longer waits; ``None``: the number that the
        cluster wants.
        """
        ...


@runtime_checkable
class EpochStore(BlobStore, Protocol):
    """A store whose writes carry the epoch of the leader that they act for."""

    def follow_epoch(self, epoch: int) -> None:
        """Act for that epoch from now on."""
        ...


def put_by_hash(store: BlobStore, key: str, raw: bytes) -> BlobMeta:
    """Store ``raw`` under ``key``, by its hash if possible.

    The bytes are sent only if the store has them under no key.
    """
    sha256 = hashlib.sha256(raw).hexdigest()
    return store.put_existing(key, sha256) or store.put(key, raw)


def no_such_blob(key: str, store: str) -> KeyNotFound:
    """Error for a missing blob, with the same text for every ``store``."""
    return KeyNotFound(
        f"no blob {key!r} in {store}: it was deleted or never stored; `storm-dagster blob list` "
        "shows the keys"
    )


def check_sha256(value: object) -> str:
    """Return a SHA-256 in lower-case hex, and refuse any other value.

    Raises :class:`InvalidRequest`.
    """
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise InvalidRequest(
            f"{value!r:.80} is not a SHA-256 of 64 lower-case hex digits: send the archive's hash"
        )
    return value


def chunked(chunks: Iterable[bytes] | bytes) -> Iterator[bytes]:
    """Iterator over ``chunks``, which may be a single bytes object."""
    if isinstance(chunks, bytes | bytearray | memoryview):
        yield bytes(chunks)
    else:
        yield from chunks
