"""The blob store of one nimbus: its own disk, the registration in ZooKeeper, and the copies
elsewhere.
"""

import copy
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from storm_dagster.blobstore import BlobMeta, LocalBlobStore
from storm_dagster.blobstore.fsspec_store import FsspecBlobStore
from storm_dagster.blobstore.store import no_such_blob
from storm_dagster.model.errors import InvalidRequest, KeyNotFound
from storm_dagster.nimbus.blobs.registry import BlobRegistry, is_registered_kind
from storm_dagster.nimbus.blobs.replication import Replicator
from storm_dagster.nimbus.leader_status import LeaderStatus

_log = logging.getLogger(__name__)

BaseStore = LocalBlobStore | FsspecBlobStore


@dataclass(frozen=True)
class WriteTerms:
    """Terms of a write: for whom, and how many copies before it is acknowledged."""

    epoch: int | None = None
    """The epoch that the writer acts for; ``None``: whichever is current."""
    minimum: int | None = None
    """Nimbuses that must hold the blob; ``None``: ``topology.min.replication.count`` of the
    cluster.
    """
    allow_degraded: bool = False


class NimbusBlobStore:
    """A :class:`~storm_dagster.blobstore.store.BlobStore` whose writes need leadership.

    A write is stored here, registered (topology blobs), copied to the minimum of nimbuses, and then
    acknowledged. It is repeatable: the same content under the same key changes nothing the second
    time. A shared store (fsspec) has neither registrations nor copies: every nimbus sees the same
    blobs.
    """

    def __init__(
        self,
        base: BaseStore,
        status: LeaderStatus,
        registry: BlobRegistry,
        replicator: Replicator,
        minimum: int,
    ) -> None:
        self.base = base
        # Reads are those of this nimbus's own store.
        self.open, self.read, self.meta = base.open, base.read, base.meta
        self.keys, self.exists, self.list = base.keys, base.exists, base.list
        self.shared: bool = not isinstance(base, LocalBlobStore)
        self._status = status
        self._registry = registry
        self._replicator = replicator
        self._minimum = minimum
        self._terms = WriteTerms()

    def accepting_fewer(self, minimum: int | None = None) -> "NimbusBlobStore":
        """The same store on such terms
        (:class:`~storm_dagster.blobstore.store.ReplicatedStore`).
        """
        other = copy.copy(self)
        other._terms = WriteTerms(minimum=minimum, allow_degraded=True)
        return other

    # the protocol, for operations in the leader

    def put(
        self, key: str, chunks: Iterable[bytes] | bytes, *, expected_sha256: str | None = None
    ) -> BlobMeta:
        """Store, register, replicate. ``Unavailable`` when this nimbus does not lead."""
        epoch = self._status.require()
        meta = self.base.put(key, chunks, expected_sha256=expected_sha256)
        self._spread(meta, epoch, self._terms)
        return meta

    def delete(self, key: str, terms: WriteTerms | None = None) -> None:
        """Remove the blob everywhere: registration first, so that no follower fetches it again."""
        epoch = self._status.require(None if terms is None else terms.epoch)
        known = self.base.exists(key)
        if not self.shared and is_registered_kind(key):
            self._registry.forget(key, epoch=epoch)
        if not known:
            raise no_such_blob(key, f"nimbus {self._status.me}")
        self.base.delete(key)
        if not self.shared:
            self._replicator.push_deletion(key, epoch=epoch)

    # the HTTP service

    def put_file(
        self, key: str, path: Path, sha256: str, terms: WriteTerms
    ) -> tuple[BlobMeta, int]:
        """Take over a received file (it is moved or copied away); the blob and how many nimbuses
        hold it.
        """
        epoch = self._status.require(terms.epoch)
        meta = self.base.adopt(key, path, sha256)
        return meta, self._spread(meta, epoch, terms)

    def put_content(self, key: str, sha256: str, terms: WriteTerms) -> tuple[BlobMeta, int] | None:
        """Store under ``key`` a content that is here already; ``None`` when it is not."""
        epoch = self._status.require(terms.epoch)
        meta = self.base.put_existing(key, sha256)
        return None if meta is None else (meta, self._spread(meta, epoch, terms))

    def put_existing(self, key: str, sha256: str) -> BlobMeta | None:
        """:meth:`put_content` for operations."""
        stored = self.put_content(key, sha256, self._terms)
        return None if stored is None else stored[0]

    def accept_replica(self, key: str, sha256: str, path: Path | None) -> BlobMeta:
        """Store a copy that the leader sent (its epoch has been checked); without ``path`` by hash
        alone.
        """
        if self.shared:
            raise InvalidRequest("this nimbus has a shared blob store: it takes no copies")
        meta = (
            self.base.put_existing(key, sha256)
            if path is None
            else self.base.adopt(key, path, sha256)
        )
        if meta is None:
            raise KeyNotFound(f"content {sha256} is not here yet: send it")
        if is_registered_kind(key):
            self._registry.register_held(meta)
        return meta

    def drop_replica(self, key: str) -> None:
        """Remove a copy at the leader's request; a missing one is no error."""
        with suppress(KeyNotFound):
            self.base.delete(key)

    def _spread(self, meta: BlobMeta, epoch: int, terms: WriteTerms) -> int:
        minimum = self._minimum if terms.minimum is None else terms.minimum
        if self.shared:
            return max(1, minimum)
        if is_registered_kind(meta.key):
            self._registry.register_written(meta, epoch=epoch)
        copies = self._replicator.push(
            meta, epoch=epoch, minimum=max(1, minimum), allow_degraded=terms.allow_degraded
        )
        if not is_registered_kind(meta.key):
            self._registry.check_epoch(epoch)
        return copies
