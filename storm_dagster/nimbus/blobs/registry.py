"""Registrations of blobs in ZooKeeper: which nimbus holds which blob.

``/blobstore/<key>/<host:port-seq>`` (ephemeral) names a holder and the sequence number of its
content; ``/blobstoremaxkeysequencenumber/<key>`` names the highest number ever and the content hash
that belongs to it. The number tells *who* has the newest content, the highest; the hash *what* it
is, so that each nimbus decides alone whether it holds it (``docs/decisions.md#blob-ownership``).
Blobs of topologies and of users are registered; staged and uploaded ones come and go with their
submission.
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


class BlobRecord(Record):
    """Content of ``/blobstoremaxkeysequencenumber/<key>``."""

    sequence: int
    sha256: str


@dataclass(frozen=True)
class Registered:
    """One registered blob."""

    key: str
    record: BlobRecord | None
    version: int | None
    """Data version of the record's node."""
    holders: Mapping[str, tuple[str, int]]
    """Name of the node of each holder -> its address and the number of its content."""

    def newest_holders(self) -> list[str]:
        """Addresses of those that show the highest number, sorted; holders of 0 have nothing worth
        fetching.
        """
        top = max((number for _, number in self.holders.values()), default=0)
        return sorted(address for address, number in self.holders.values() if number == top > 0)

    def next_sequence(self) -> int:
        """The number of a new content: above all others that the key has had, whoever died in
        between.
        """
        highest = self.record.sequence if self.record is not None else 0
        return 1 + max([highest, *(number for _, number in self.holders.values())])


def is_registered_kind(key: str) -> bool:
    """Whether blobs under that key are registered: those of a topology, except its placement
    document, and of users.

    The report is for people; leaving it out keeps a submission within its budget of ZooKeeper
    writes. A user's blob that is registered is never taken for a deleted one, whoever leads when
    its only holder returns.
    """
    return not key.startswith(("staging.", "staging-of.", "upload.")) and not key.endswith(
        "-placement.json"
    )


class BlobRegistry:
    """Registrations of one nimbus (``me`` is its ``host:port``)."""

    def __init__(
        self, cluster: StormClusterState, me: str, cached: ClusterState | None = None
    ) -> None:
        """``cached`` answers :meth:`keys` and :meth:`survey`, which are asked for all the time."""
        self._cluster = cluster
        self._state = cluster.state
        self._cached = cached or cluster.state
        self.me = me
        # key -> (sequence, session): what this process registered, to spare a read per key and
        # round.
        self._mine: dict[str, tuple[int, int]] = {}

    def keys(self, watch: bool = False) -> list[str]:
        """All registered keys."""
        found = (self._state if watch else self._cached).find_children(paths.BLOBSTORE, watch) or []
        if len(self._mine) > 2 * len(found) + 100:
            # Others removed them. What is lost to a race is registered again.
            mine = self._mine
            self._mine = {key: had for key in found if (had := mine.get(key))}
        return found

    def topologies(self) -> list[str]:
        """Ids of all topologies."""
        return self._cached.find_children(paths.TOPOLOGY) or []

    def survey(self, keys: Iterable[str]) -> dict[str, Registered]:
        """As :meth:`read`, of the cache: what did not change costs no request. A damaged record
        hides its blob alone.
        """
        return self.read(keys, self._cached)

    def read(self, keys: Iterable[str], state: ClusterState | None = None) -> dict[str, Registered]:
        """The registrations of those keys, read without waiting for one after the other."""
        wanted, state = list(keys), state or self._state
        records = state.get_many([paths.blob_max_sequence(key) for key in wanted])
        children = state.find_children_many([paths.blob(key) for key in wanted])
        found: dict[str, Registered] = {}
        for key, record, holders in zip(wanted, records, children, strict=True):
            try:
                decoded = (
                    None
                    if record is None
                    else decode_record(BlobRecord, record[0], paths.blob_max_sequence(key))
                )
            except Corrupt as error:
                if state is self._state:
                    raise
                _log.error("%s", error.message)
                continue
            version = None if record is None else record[1].version
            found[key] = Registered(key, decoded, version, _valid_holders(key, holders or []))
        return found

    def register_written(self, meta: BlobMeta, *, epoch: int) -> int:
        """Register content that this nimbus, leading in ``epoch``, has just stored; its sequence
        number.

        A content that is the recorded one already gets no new number. ``Fenced`` when the epoch is
        over.
        """
        for _ in range(_ATTEMPTS):
            now = self.read([meta.key])[meta.key]
            try:
                if now.record is not None and now.record.sha256 == meta.sha256:
                    self.register_held(meta, now)
                    return now.record.sequence
                sequence = now.next_sequence()
                raw = encode_record(
                    BlobRecord(sequence=sequence, sha256=meta.sha256).keep_unknown(now.record)
                )
                transaction = self._state.transaction().check(paths.EPOCH, epoch)
                if not self._state.exists(paths.blob(meta.key)):
                    transaction.create(paths.blob(meta.key))
                if now.version is None:
                    transaction.create(paths.blob_max_sequence(meta.key), raw)
                else:
                    transaction.set(paths.blob_max_sequence(meta.key), raw, now.version)
                for node, (address, _) in now.holders.items():
                    if address == self.me:
                        transaction.delete(paths.blob(meta.key, node))
                transaction.create(
                    paths.blob(meta.key, f"{self.me}-{sequence}"), ephemeral=True
                ).commit()
                self._mine[meta.key] = (sequence, self._cluster.session.session_id)
                return sequence
            except Conflict as error:
                _log.debug("registering %s is tried again: %s", meta.key, error)
        raise Conflict(f"blob {meta.key!r} is registered by others all the time: store it again")

    def check_epoch(self, epoch: int) -> None:
        """:class:`Fenced` when ``epoch`` is over, also while this nimbus has not noticed."""
        self._state.sync_path(paths.EPOCH)
        if self._state.get_version(paths.EPOCH) != epoch:
            raise Fenced(
                f"leadership epoch {epoch} is over: what was stored is not confirmed, send it to the new leader"
            )

    def register_held(self, meta: BlobMeta, now: Registered | None = None) -> bool:
        """Register that this nimbus holds the recorded content; ``False`` when its content is
        another one.

        :class:`Conflict` when the registrations of the key change meanwhile.
        """
        now = now or self.read([meta.key])[meta.key]
        if now.record is None or now.record.sha256 != meta.sha256:
            self.unregister(meta.key, now)
            return False
        sequence = now.record.sequence
        holder = f"{self.me}-{sequence}"
        session = self._cluster.session.session_id
        if holder in now.holders and self._mine.get(meta.key) == (sequence, session):
            return True
        path = paths.blob(meta.key, holder)
        # A key that was removed meanwhile gets no folder again.
        transaction = self._state.transaction().check(
            paths.blob_max_sequence(meta.key), now.version or 0
        )
        if holder in now.holders:
            transaction.delete(path)  # Of an older session.
        transaction.create(path, ephemeral=True).commit()
        for other, (address, _) in now.holders.items():
            if other != holder and address == self.me:
                self._state.delete_node(paths.blob(meta.key, other))
        self._mine[meta.key] = (sequence, session)
        return True

    def unregister(self, key: str, now: Registered) -> None:
        """Withdraw this nimbus's registration of the key."""
        self._mine.pop(key, None)
        for node, (address, _) in now.holders.items():
            if address == self.me:
                self._state.delete_node(paths.blob(key, node))

    def forget(self, key: str, *, epoch: int) -> None:
        """Remove the key and its number, in one transaction; nothing happens when it is not
        registered.
        """
        for _ in range(_ATTEMPTS):
            self._mine.pop(key, None)
            holders = self._state.find_children(paths.blob(key))
            known = self._state.get_version(paths.blob_max_sequence(key))
            if holders is None and known is None:
                return
            transaction = self._state.transaction().check(paths.EPOCH, epoch)
            for holder in holders or ():
                transaction.delete(paths.blob(key, holder))
            if holders is not None:
                transaction.delete(paths.blob(key))
            if known is not None:
                transaction.delete(paths.blob_max_sequence(key))
            try:
                transaction.commit()
                return
            except Conflict as error:
                _log.debug("forgetting %s is tried again: %s", key, error)
        raise Conflict(f"blob {key!r} is registered by others all the time: delete it again")


def split_holder(holder: str) -> tuple[str, int]:
    """``"nimbus-1:7800-4"`` -> ``("nimbus-1:7800", 4)``: split at the last dash (hosts may contain
    dashes).
    """
    address, dash, number = holder.rpartition("-")
    if not dash or not address or not number.isdecimal():
        raise Corrupt(
            f"{holder!r} is not a blob holder of the form <host>:<port>-<number>: remove that node"
        )
    return address, int(number)


def _valid_holders(key: str, nodes: Iterable[str]) -> dict[str, tuple[str, int]]:
    found: dict[str, tuple[str, int]] = {}
    for node in nodes:
        try:
            found[node] = split_holder(node)
        except Corrupt as error:
            _log.warning("ignored below %s: %s", paths.blob(key), error)
    return found
