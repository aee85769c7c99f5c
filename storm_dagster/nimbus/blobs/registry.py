"""Registrations of blobs in ZooKeeper: which nimbus holds which blob.

``/blobstore/<key>/<host:port-seq>`` (ephemeral) names a holder and the sequence number of its
content; ``/blobstoremaxkeysequencenumber/<key>`` names the highest number ever and the content hash
that belongs to it. The holders with the highest number have the newest content. The hash identifies
that content, so that each nimbus decides on its own whether it holds it
(``docs/decisions.md#blob-ownership``). Blobs of topologies and of users are registered; staged and
uploaded ones come and go with their submission.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storm_dagster.blobstore import BlobMeta
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt, Fenced
from storm_dagster.model.records import Record, decode_record, encode_record
from storm_dagster.zk.state_protocol import ClusterState
from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)
_ATTEMPTS = 10
"""Attempts of a transaction that other nimbuses' changes of the same key make fail."""


class BlobRecord(Record):
    """Content of ``/blobstoremaxkeysequencenumber/<key>``."""

    sequence: int
    """Highest number that a content of the key has had."""
    sha256: str
    """Hash of the content with that number."""


@dataclass(frozen=True)
class Registered:
    """One registered blob."""

    key: str
    record: BlobRecord | None
    """``None`` if the key is not registered, or has only nodes of holders."""
    version: int | None
    """Data version of the record's node; ``None`` without a record."""
    holders: Mapping[str, tuple[str, int]]
    """Name of the node of each holder -> its address and the number of its content."""

    def newest_holders(self) -> list[str]:
        """Return the sorted addresses of the holders with the highest number.

        Holders with the number 0 have no content worth fetching and are left out.
        """
        highest = max((number for _, number in self.holders.values()), default=0)
        if highest <= 0:
            return []
        return sorted(address for address, number in self.holders.values() if number == highest)

    def next_sequence(self) -> int:
        """Return the number for a new content of the key.

        It is above every number that the key has had, also if holders have died since.
        """
        highest = 0 if self.record is None else self.record.sequence
        for _, number in self.holders.values():
            highest = max(highest, number)
        return highest + 1


def is_registered_kind(key: str) -> bool:
    """True if blobs under that key are registered.

    The blobs of a topology are, except its placement document, and so are blobs of users. The
    placement document is for people; leaving it out keeps a submission within its budget of
    ZooKeeper writes. A user's blob that is registered is never taken for a deleted one, whichever
    nimbus leads when its only holder returns.
    """
    return not key.startswith(("staging.", "staging-of.", "upload.")) and not key.endswith(
        "-placement.json"
    )


class BlobRegistry:
    """Registrations of one nimbus (``me`` is its ``host:port``)."""

    def __init__(
        self, cluster: StormClusterState, me: str, cached: ClusterState | None = None
    ) -> None:
        """Create the registrations of the nimbus ``me``.

        ``cached`` serves :meth:`keys` and :meth:`survey`, which are called all the time.
        """
        self._cluster = cluster
        self._state = cluster.state
        self._cached = cached or cluster.state
        self.me = me
        self._own: dict[str, tuple[int, int]] = {}
        """Key -> (sequence, session id) of the registration that this process made.

        A node of another session, with the same name, must be made once more: it ends with that
        session.
        """

    def keys(self, watch: bool = False) -> list[str]:
        """All registered keys.

        With ``watch`` they are read from ZooKeeper, and their list is watched; else from the cache.
        """
        state = self._state if watch else self._cached
        keys = state.find_children(paths.BLOBSTORE, watch) or []
        # Keys that other nimbuses removed must not accumulate; this is rare enough to cost nothing.
        if len(self._own) > 2 * len(keys) + 100:
            self._drop_own_except(keys)
        return keys

    def _drop_own_except(self, keys: list[str]) -> None:
        """Forget own registrations of keys that other nimbuses have removed.

        A registration that is added by another thread in the same moment may be forgotten as well;
        the next round then makes it once more.
        """
        remaining: dict[str, tuple[int, int]] = {}
        for key in keys:
            registration = self._own.get(key)
            if registration is not None:
                remaining[key] = registration
        self._own = remaining

    def topologies(self) -> list[str]:
        """Ids of all topologies."""
        return self._cached.find_children(paths.TOPOLOGY) or []

    def survey(self, keys: Iterable[str]) -> dict[str, Registered]:
        """Read the registrations from the cache; otherwise as :meth:`read`.

        Nodes that did not change cost no request. A damaged record hides only its own blob.
        """
        return self.read(keys, self._cached)

    def read(self, keys: Iterable[str], state: ClusterState | None = None) -> dict[str, Registered]:
        """Read the registrations of those keys, all in parallel.

        A key that is not registered has an entry without record and holders. Without ``state`` they
        are read from ZooKeeper, and a damaged record raises :class:`Corrupt`; with another state
        it is logged, and its key left out.
        """
        keys = list(keys)
        state = state or self._state
        nodes = state.get_many([paths.blob_max_sequence(key) for key in keys])
        children = state.find_children_many([paths.blob(key) for key in keys])
        registrations: dict[str, Registered] = {}
        for key, node, holders in zip(keys, nodes, children, strict=True):
            record = None
            version = None
            if node is not None:
                raw, stat = node
                version = stat.version
                try:
                    record = decode_record(BlobRecord, raw, paths.blob_max_sequence(key))
                except Corrupt as error:
                    if state is self._state:
                        raise
                    _log.error("%s", error.message)
                    continue
            registrations[key] = Registered(
                key, record, version, _valid_holders(key, holders or [])
            )
        return registrations

    def is_registered(self, key: str) -> bool:
        """True if the newest state of ZooKeeper has a record of the key."""
        self._state.sync_path(paths.EPOCH)
        return self._state.exists(paths.blob_max_sequence(key))

    def register_written(self, meta: BlobMeta, *, epoch: int) -> int:
        """Register content that this nimbus, leading in ``epoch``, has just stored.

        Returns its sequence number. Content that is already the recorded one gets no new number.
        ``Fenced`` if the epoch is over.
        """
        for _ in range(_ATTEMPTS):
            registered = self.read([meta.key])[meta.key]
            try:
                if registered.record is not None and registered.record.sha256 == meta.sha256:
                    self.register_held(meta, registered)
                    return registered.record.sequence
                sequence = registered.next_sequence()
                record = BlobRecord(sequence=sequence, sha256=meta.sha256)
                raw = encode_record(record.keep_unknown(registered.record))
                transaction = self._state.transaction().check(paths.EPOCH, epoch)
                if not self._state.exists(paths.blob(meta.key)):
                    transaction.create(paths.blob(meta.key))
                if registered.version is None:
                    transaction.create(paths.blob_max_sequence(meta.key), raw)
                else:
                    transaction.set(paths.blob_max_sequence(meta.key), raw, registered.version)
                # This nimbus no longer has the content that it was registered with.
                for node, (address, _) in registered.holders.items():
                    if address == self.me:
                        transaction.delete(paths.blob(meta.key, node))
                holder = paths.blob(meta.key, f"{self.me}-{sequence}")
                transaction.create(holder, ephemeral=True).commit()
                self._own[meta.key] = (sequence, self._cluster.session.session_id)
                return sequence
            except Conflict as error:
                _log.debug("registering %s is retried: %s", meta.key, error)
        raise Conflict(
            f"blob {meta.key!r} is registered by other nimbuses all the time: store it once more"
        )

    def check_epoch(self, epoch: int) -> None:
        """Raise :class:`Fenced` if ``epoch`` is over.

        That holds also while this nimbus has not noticed it yet.
        """
        self._state.sync_path(paths.EPOCH)
        if self._state.get_version(paths.EPOCH) != epoch:
            raise Fenced(
                f"leadership epoch {epoch} is over: the stored blob is not confirmed, send it to "
                "the new leader"
            )

    def register_held(self, meta: BlobMeta, registered: Registered | None = None) -> bool:
        """Register that this nimbus holds the recorded content.

        Without ``registered`` the registrations are read. Returns ``False`` if its content is
        another one, or the key is not registered: its registration is then withdrawn.
        :class:`Conflict` if the registrations of the key change at the same time.
        """
        registered = registered or self.read([meta.key])[meta.key]
        if registered.record is None or registered.record.sha256 != meta.sha256:
            self.unregister(meta.key, registered)
            return False
        sequence = registered.record.sequence
        holder = f"{self.me}-{sequence}"
        session = self._cluster.session.session_id
        if holder in registered.holders and self._own.get(meta.key) == (sequence, session):
            return True
        path = paths.blob(meta.key, holder)
        # The check keeps a key that was just removed from getting a new folder.
        transaction = self._state.transaction().check(
            paths.blob_max_sequence(meta.key), registered.version or 0
        )
        if holder in registered.holders:
            transaction.delete(path)  # Of an older session.
        transaction.create(path, ephemeral=True).commit()
        for node, (address, _) in registered.holders.items():
            if node != holder and address == self.me:
                self._state.delete_node(paths.blob(meta.key, node))
        self._own[meta.key] = (sequence, session)
        return True

    def unregister(self, key: str, registered: Registered) -> None:
        """Withdraw this nimbus's registration of the key."""
        self._own.pop(key, None)
        for node, (address, _) in registered.holders.items():
            if address == self.me:
                self._state.delete_node(paths.blob(key, node))

    def forget(self, key: str, *, epoch: int) -> None:
        """Remove the key and its number, in one transaction.

        A key that is not registered is left alone. :class:`Fenced` if ``epoch`` is over.
        """
        for _ in range(_ATTEMPTS):
            self._own.pop(key, None)
            holders = self._state.find_children(paths.blob(key))
            version = self._state.get_version(paths.blob_max_sequence(key))
            if holders is None and version is None:
                return
            transaction = self._state.transaction().check(paths.EPOCH, epoch)
            for holder in holders or ():
                transaction.delete(paths.blob(key, holder))
            if holders is not None:
                transaction.delete(paths.blob(key))
            if version is not None:
                transaction.delete(paths.blob_max_sequence(key))
            try:
                transaction.commit()
                return
            except Conflict as error:
                _log.debug("forgetting %s is retried: %s", key, error)
        raise Conflict(
            f"blob {key!r} is registered by other nimbuses all the time: delete it once more"
        )


def split_holder(holder: str) -> tuple[str, int]:
    """Split the node name of a holder into its address and number.

    ``"nimbus-1:7800-4"`` becomes ``("nimbus-1:7800", 4)``: the last dash separates them, because
    hosts may contain dashes.
    """
    address, dash, number = holder.rpartition("-")
    if not dash or not address or not number.isdecimal():
        raise Corrupt(
            f"{holder!r} is not a blob holder of the form <host>:<port>-<number>: remove that node"
        )
    return address, int(number)


def _valid_holders(key: str, nodes: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Node name -> (address, number) of each holder; other nodes are logged and left out."""
    holders: dict[str, tuple[str, int]] = {}
    for node in nodes:
        try:
            holders[node] = split_holder(node)
        except Corrupt as error:
            _log.warning("ignored below %s: %s", paths.blob(key), error)
    return holders
