"""Blob store of one nimbus.

It combines the nimbus's own disk, the registrations in ZooKeeper, and the copies on other nimbuses.
"""

import copy
import hashlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from storm_dagster.blobstore import BlobMeta, LocalBlobStore
from storm_dagster.blobstore.fsspec_store import FsspecBlobStore
from storm_dagster.blobstore.store import no_such_blob
from storm_dagster.model.errors import Fenced, InvalidRequest, KeyNotFound, Unavailable
from storm_dagster.nimbus.blobs.live_code import check_code_unchanged, check_removable
from storm_dagster.nimbus.blobs.registry import BlobRegistry, is_registered_kind
from storm_dagster.nimbus.blobs.replication import Replicator
from storm_dagster.nimbus.keyed_locks import KeyedLocks
from storm_dagster.nimbus.leader_status import LeaderStatus
from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)

BaseStore = LocalBlobStore | FsspecBlobStore
"""Store of contents: one of this nimbus alone, or one that all nimbuses share."""


@dataclass(frozen=True)
class WriteTerms:
    """Terms of a write: its epoch, and the copies before it is acknowledged."""

    epoch: int | None = None
    """Epoch that the writer acts for; ``None`` for the current one."""
    minimum: int | None = None
    """Number of nimbuses that must hold the blob before the write is acknowledged.

    ``None`` for the cluster's ``topology.min.replication.count``.
    """
    allow_degraded: bool = False
    """True if fewer copies are enough while fewer nimbuses are alive."""


@contextmanager
def _let_client_retry(terms: WriteTerms) -> Iterator[None]:
    """Let the client of a write retry it if this nimbus is deposed during the write.

    A write of a run, which acts for an epoch, ends with :class:`Fenced`. A client, such as one that
    uploads, acts for no epoch: for it the write is :class:`Unavailable`, which clients retry at the
    next leader. A repeated write of the same content has no further effect.
    """
    try:
        yield
    except Fenced as error:
        if terms.epoch is not None:
            raise
        raise Unavailable(error.message) from error


class NimbusBlobStore:
    """Blob store whose writes need leadership.

    A :class:`~storm_dagster.blobstore.store.BlobStore`. A write is stored here, registered
    (topology blobs), copied to the minimum of nimbuses, and then acknowledged. It is repeatable: a
    second write of the same content under the same key has no effect. A shared store (fsspec) has
    neither registrations nor copies: every nimbus sees the same blobs.
    """

    def __init__(
        self,
        base: BaseStore,
        status: LeaderStatus,
        registry: BlobRegistry,
        replicator: Replicator,
        minimum: int,
        cluster: StormClusterState,
    ) -> None:
        self.base = base
        # Reads go to this nimbus's own store.
        self.open = base.open
        self.read = base.read
        self.meta = base.meta
        self.keys = base.keys
        self.exists = base.exists
        self.list = base.list
        self.shared: bool = not isinstance(base, LocalBlobStore)
        """True if every nimbus sees the same blobs."""
        self._status = status
        self._registry = registry
        self._replicator = replicator
        self._cluster = cluster
        """Records of the topologies, whose code is not removed or replaced while they live."""
        self._minimum = minimum
        """Number of nimbuses that must hold a blob where the terms of a write name none."""
        self._terms = WriteTerms()
        """Terms of the writes that get none as an argument."""
        self.changes = KeyedLocks()
        """Lock of each key, from a change of the local copy until its registration.

        Between the two, :class:`~storm_dagster.nimbus.blobs.sync.BlobSync` would take the new
        content for an old one, and restore the registered content.
        """

    def accepting_fewer(self, minimum: int | None = None) -> "NimbusBlobStore":
        """Return this store with terms that accept fewer copies; this object is not changed.

        As :class:`~storm_dagster.blobstore.store.ReplicatedStore` defines it.
        """
        store = copy.copy(self)
        store._terms = WriteTerms(minimum=minimum, allow_degraded=True)
        return store

    # the protocol, for operations in the leader

    def put(
        self, key: str, chunks: Iterable[bytes] | bytes, *, expected_sha256: str | None = None
    ) -> BlobMeta:
        """Store, register and replicate a blob.

        :class:`NotLeading` at a follower. If a later step fails, the blob stays stored here: the
        write can be repeated.
        """
        epoch = self._status.require()
        sha256 = expected_sha256
        if sha256 is None and isinstance(chunks, bytes):
            sha256 = hashlib.sha256(chunks).hexdigest()
        self._check_code_unchanged(key, sha256)
        with self.changes.hold(key):
            meta = self.base.put(key, chunks, expected_sha256=expected_sha256)
            self._register(meta, epoch)
        self._copy(meta, epoch, self._terms)
        return meta

    def delete(self, key: str, terms: WriteTerms | None = None) -> None:
        """Remove the blob everywhere.

        Its registration goes first, so that no follower fetches it after it has deleted it.
        :class:`KeyNotFound` if it is not here; its registration is removed nevertheless. Followers
        that cannot be reached now delete it when they synchronize. :class:`Conflict` for code of a
        live topology.
        """
        epoch = self._status.require(None if terms is None else terms.epoch)
        check_removable(self._cluster, key)
        with self.changes.hold(key):
            exists = self.base.exists(key)
            if not self.shared and is_registered_kind(key):
                self._registry.forget(key, epoch=epoch)
            if not exists:
                raise no_such_blob(key, f"nimbus {self._status.me}")
            self.base.delete(key)
        if not self.shared:
            self._replicator.push_deletion(key, epoch=epoch)

    # the HTTP service

    def put_file(
        self, key: str, path: Path, sha256: str, terms: WriteTerms
    ) -> tuple[BlobMeta, int]:
        """Take over a received file, which is moved or copied away.

        Returns the blob and the number of nimbuses that hold it. :class:`Conflict` for other code
        of a live topology.
        """
        epoch = self._status.require(terms.epoch)
        self._check_code_unchanged(key, sha256)
        with _let_client_retry(terms):
            with self.changes.hold(key):
                meta = self.base.adopt(key, path, sha256)
                self._register(meta, epoch)
            return meta, self._copy(meta, epoch, terms)

    def put_content(self, key: str, sha256: str, terms: WriteTerms) -> tuple[BlobMeta, int] | None:
        """Store content that is here already under ``key``; ``None`` if it is not here.

        Returns the blob and the number of nimbuses that hold it. :class:`Conflict` for other code
        of a live topology.
        """
        with _let_client_retry(terms):
            return self._put_content(key, sha256, terms)

    def put_existing(self, key: str, sha256: str) -> BlobMeta | None:
        """Store content that is here already; as :meth:`put_content`, for operations."""
        stored = self._put_content(key, sha256, self._terms)
        if stored is None:
            return None
        meta, _ = stored
        return meta

    def _put_content(self, key: str, sha256: str, terms: WriteTerms) -> tuple[BlobMeta, int] | None:
        epoch = self._status.require(terms.epoch)
        self._check_code_unchanged(key, sha256)
        with self.changes.hold(key):
            meta = self.base.put_existing(key, sha256)
            if meta is None:
                return None
            self._register(meta, epoch)
        return meta, self._copy(meta, epoch, terms)

    def accept_replica(self, key: str, sha256: str, path: Path | None) -> BlobMeta:
        """Store a copy that the leader sent; its epoch has been checked.

        Without ``path`` the content must be here already, and is found by its hash.
        """
        if self.shared:
            raise InvalidRequest("this nimbus has a shared blob store: it takes no copies")
        with self.changes.hold(key):
            if path is None:
                meta = self.base.put_existing(key, sha256)
            else:
                meta = self.base.adopt(key, path, sha256)
            if meta is None:
                raise KeyNotFound(f"content {sha256} is not here yet: send it")
            if is_registered_kind(key):
                self._registry.register_held(meta)
        return meta

    def drop_replica(self, key: str) -> None:
        """Remove a copy at the leader's request; a missing one is ignored.

        A registered blob stays: the leader has stored it again since the request, which removes
        the registration first. Its registration is left alone.
        """
        with self.changes.hold(key):
            if not self.shared and is_registered_kind(key) and self._registry.is_registered(key):
                return
            with suppress(KeyNotFound):
                self.base.delete(key)

    def _check_code_unchanged(self, key: str, sha256: str | None) -> None:
        """Raise :class:`Conflict` if content of that hash must not get the key."""
        stored: str | None = None
        with suppress(KeyNotFound):
            stored = self.base.meta(key).sha256
        check_code_unchanged(self._cluster, key, sha256, stored)

    def _register(self, meta: BlobMeta, epoch: int) -> None:
        """Register a stored blob, if blobs of its kind are registered."""
        if not self.shared and is_registered_kind(meta.key):
            self._registry.register_written(meta, epoch=epoch)

    def _copy(self, meta: BlobMeta, epoch: int, terms: WriteTerms) -> int:
        """Copy a stored blob to the followers; return the number of nimbuses that hold it."""
        minimum = self._minimum if terms.minimum is None else terms.minimum
        if self.shared:
            # One copy serves all nimbuses: every number that was asked for is reached.
            return max(1, minimum)
        copies = self._replicator.push(
            meta, epoch=epoch, minimum=max(1, minimum), allow_degraded=terms.allow_degraded
        )
        if not is_registered_kind(meta.key):
            # No transaction of a registration has proved that this nimbus still leads.
            self._registry.check_epoch(epoch)
        return copies
