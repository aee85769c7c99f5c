"""Synchronization of this nimbus's blobs by pulling; ``replication`` pushes.

Blobs that are absent here are fetched. A blob that is absent elsewhere is only removed here if a
leader of the same cluster lacks it for a while: an empty ZooKeeper root, or the root of another
cluster, never costs a blob.
"""

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from storm_dagster.blobstore import BlobMeta
from storm_dagster.core.leader_priority import needed_blobs
from storm_dagster.model import paths
from storm_dagster.model.errors import (
    Conflict,
    Corrupt,
    Fenced,
    KeyNotFound,
    StormDagsterError,
    Unavailable,
    error_text,
)
from storm_dagster.model.names import check_blob_key, id_of_blob_key
from storm_dagster.nimbus.blobs.registry import Registered, is_registered_kind
from storm_dagster.nimbus.blobs.replication import NimbusPeer
from storm_dagster.nimbus.blobs.uploads import new_inbox_file
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.security.settings import SILENT_SECS, Security
from storm_dagster.zk.watches import Wake

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 16
"""Bytes of one read of a blob that is received."""
_FOLLOW_SECS = 20.0
"""Interval of comparing all blobs with the leader's; the leader pushes new blobs at once."""


class BlobSync:
    """Pulling of blobs by one nimbus.

    :meth:`run_once` is called from one thread, :meth:`missing` from any.
    """

    def __init__(self, nimbus: Nimbus) -> None:
        self._cluster = nimbus.cluster
        self._registry = nimbus.registry
        self._status = nimbus.status
        self._blobs = nimbus.blobs
        self._base = nimbus.blobs.base
        self._peers = nimbus.peers
        self._inbox = nimbus.inbox
        self._keep_secs = float(nimbus.conf["nimbus.inbox.jar.expiration.secs"])
        """Seconds for which a blob that the leader no longer has is kept."""
        self._follow_secs = min(_FOLLOW_SECS, self._keep_secs)
        self._followed: tuple[str | None, float] | None = None
        """Leader and monotonic time of the last comparison with the leader's blobs."""
        self._unneeded: dict[str, float] = {}
        """Key of a blob that the leader no longer has -> time at which that was first seen."""
        options = Security.of(nimbus.conf).client_options()
        self._http = httpx.Client(timeout=httpx.Timeout(SILENT_SECS, connect=2.0), **options)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def missing(
        self, wake: Wake | None = None
    ) -> tuple[dict[str, Registered], dict[str, Registered]]:
        """Return the needed blobs that this nimbus lacks, and all needed ones.

        Needed are the blobs of active topologies. A blob that is here in an old version is lacking.
        This only reads. ``wake`` is called when a blob is registered or removed.
        """
        if self._blobs.shared:
            return {}, {}
        if wake is not None:
            self._cluster.watches.add_wake(paths.BLOBSTORE, wake)
        registered = self._registry.keys(watch=wake is not None)
        needed = self._registry.survey(
            sorted(needed_blobs(self._registry.topologies(), registered))
        )
        lacking = {key: entry for key, entry in needed.items() if not self._is_held(entry)}
        return lacking, needed

    def _is_held(self, entry: Registered) -> bool:
        """True if this nimbus has the blob, and its content is the registered one.

        Without a record any content is the right one.
        """
        try:
            meta = self._base.meta(entry.key)
        except (KeyNotFound, Corrupt):
            return False
        # Damaged content has been moved to quarantine.
        if not self._base.has_content(meta.sha256):
            return False
        return entry.record is None or entry.record.sha256 == meta.sha256

    def run_once(self, wake: Wake | None = None) -> int:
        """Register the blobs that are here and fetch the missing ones.

        Returns the number of needed blobs that are still missing. Raises :class:`Unavailable`
        without ZooKeeper and :class:`Conflict` for another cluster's root, both before any change.
        """
        self._cluster.check_cluster_id()
        lacking, needed = self.missing(wake)
        self._register(entry for key, entry in needed.items() if key not in lacking)
        still_lacking = set(lacking)
        self._status.set_lacking(still_lacking)
        for key, entry in lacking.items():
            if self._fetch_needed(entry):
                still_lacking.discard(key)
                self._status.set_lacking(still_lacking)
        self._take_registered(set(needed))
        if self._take_follow_turn():
            self._follow_leader(set(needed))
        return len(still_lacking)

    def _take_follow_turn(self) -> bool:
        """True, and noted, if the leader is new or was compared long enough ago."""
        leader = self._status.snapshot.leader
        now = time.monotonic()
        if self._followed is not None:
            followed_leader, followed_at = self._followed
            if leader == followed_leader and now - followed_at < self._follow_secs:
                return False
        self._followed = leader, now
        return True

    def _take_registered(self, needed: set[str]) -> None:
        """Register or fetch the blobs of topologies whose submission is not finished.

        The submission waits for these copies. After a lost session their registrations are gone,
        and are made once more here.
        """
        if self._blobs.shared:
            return
        keys = set(self._registry.keys()) - needed
        for entry in self._registry.survey(sorted(keys)).values():
            if entry.record is None:
                continue
            if self._is_held(entry):
                self._register([entry])
            elif entry.newest_holders():
                self._fetch_needed(entry)

    def _register(self, entries: Iterable[Registered]) -> None:
        """Register that this nimbus holds those blobs; a lost race is left to the next round.

        A follower does not register a blob without a record.
        """
        for entry in entries:
            try:
                meta = self._base.meta(entry.key)
                if entry.record is not None:
                    self._registry.register_held(meta, entry)
                elif (epoch := self._status.epoch) is not None:
                    # The blob has no registration: the leader's copy is the one that counts.
                    self._registry.register_written(meta, epoch=epoch)
            except (Conflict, Fenced, KeyNotFound) as error:
                _log.info("%s is not registered now: %s", entry.key, error)

    def _fetch_needed(self, entry: Registered) -> bool:
        """Store the blob from content that is here, or from a peer.

        Returns ``False`` if it cannot be stored from either. The registration is read once more,
        because ``entry`` may be of the time before a write. No write of the blob comes in between:
        the key is locked while a content is stored, but not while one is received, because writes
        would wait for a slow peer.
        """
        with self._blobs.changes.hold(entry.key):
            current = self._read_again(entry.key)
            if current is None:
                return False
            if self._is_held(current):
                self._register([current])
                return True
            try:
                stored = self._store_own_content(current)
            except Unavailable as error:
                # The disk is full for this blob; smaller ones may still fit.
                _log.warning("%s", error.message)
                return False
            if stored is not None:
                self._hold(stored)
                return True
        return self._fetch_from_peers(current)

    def _read_again(self, key: str) -> Registered | None:
        """Read the registration from ZooKeeper; log a damaged one and return ``None``."""
        try:
            return self._registry.read([key])[key]
        except Corrupt as error:
            _log.error("%s", error.message)
            return None

    def _store_own_content(self, entry: Registered) -> BlobMeta | None:
        """Store a blob whose content is here under another key; ``None`` if it is not."""
        if entry.record is None:
            return None
        return self._base.put_existing(entry.key, entry.record.sha256)

    def _fetch_from_peers(self, entry: Registered) -> bool:
        """Fetch the blob from the first peer that has it; return ``False`` if no peer has.

        Without a record the content of any peer is stored, and it is not registered.
        """
        sha256 = entry.record.sha256 if entry.record else None
        for peer in self._peers_by_holding(entry):
            if peer.address == self._status.me:
                continue
            try:
                with self._receive(peer.http, entry.key, sha256) as received:
                    is_stored = self._store_received(entry, received)
            except (StormDagsterError, httpx.HTTPError, OSError) as error:
                _log.info(
                    "%s cannot be fetched from nimbus %s: %s",
                    entry.key,
                    peer.address,
                    error_text(error),
                )
                continue
            if is_stored:
                _log.info("fetched %s from nimbus %s", entry.key, peer.address)
            return is_stored
        return False

    def _store_received(self, requested: Registered, received: "_ReceivedBlob") -> bool:
        """Store and register a received blob, unless the key has changed while it was received.

        Returns ``False`` if the key has another content now, or none.
        """
        key = requested.key
        with self._blobs.changes.hold(key):
            current = self._read_again(key)
            if current is None:
                return False
            if self._is_held(current):
                self._register([current])
                return True
            if current.record != requested.record:
                return False
            meta = self._base.adopt(key, received.path, received.sha256)
            if current.record is not None:
                self._hold(meta)
            return True

    def _peers_by_holding(self, entry: Registered) -> list[NimbusPeer]:
        """Return all peers, registered holders of the newest content first.

        A peer that is not registered as a holder may have the blob as well; its hash is checked in
        any case.
        """
        holders = set(entry.newest_holders())
        return sorted(self._peers(), key=lambda peer: (peer.address not in holders, peer.address))

    def _hold(self, meta: BlobMeta) -> None:
        """Register a stored blob; drop it if it has been removed everywhere since.

        Called while its key is locked.
        """
        try:
            registered = self._registry.register_held(meta)
        except Conflict:
            registered = False
        if not registered and self._registry.read([meta.key])[meta.key].record is None:
            with suppress(KeyNotFound):
                self._base.delete(meta.key)

    def _follow_leader(self, needed: set[str]) -> None:
        """Make a follower's other blobs those of the leader.

        These are staged and uploaded blobs and reports. The follower fetches the leader's, and
        drops its old ones. No effect at the leader, with a shared store, or while the leader or
        its blobs are unknown. ``needed`` are the keys of blobs of active topologies.
        """
        status = self._status.snapshot
        if self._blobs.shared or status.leader in (None, self._status.me):
            return
        if not status.leader_http:
            return
        leader_blobs = self._list_leader_blobs(status.leader_http)
        if leader_blobs is None:
            return
        registered = set(self._registry.keys())
        own_blobs = {meta.key: meta for meta in self._base.list()}
        for key, blob in leader_blobs.items():
            # A registered blob is fetched because of its registration. One that was registered
            # once has been deleted, even if a new leader still has it.
            if key in needed or is_registered_kind(key):
                continue
            own_blob = own_blobs.get(key)
            if own_blob is None or own_blob.sha256 != blob.get("sha256"):
                self._fetch_from_leader(status.leader_http, key, str(blob.get("sha256")))
        unneeded = set(own_blobs) - set(leader_blobs) - needed - registered
        if own_blobs and not set(own_blobs) & set(leader_blobs):
            # A leader that has none of this nimbus's blobs may have begun with an empty disk, which
            # is not a reason to delete blobs of users. Blobs of topologies and submissions are
            # deleted all the same, because ZooKeeper names the needed ones.
            unneeded = {
                key for key in unneeded if id_of_blob_key(key) or not is_registered_kind(key)
            }
        self._drop_unneeded(unneeded, status.leader_http)

    def _list_leader_blobs(self, leader_http: str) -> dict[str, Any] | None:
        """Return the leader's blobs by key; ``None`` if they are unknown.

        They are unknown if the leader does not answer, or is of another cluster.
        """
        try:
            response = self._http.get(f"{leader_http}/v1/blobs")
            document = response.json() if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError) as error:
            _log.debug("the leader's blobs cannot be listed: %s", error_text(error))
            return None
        if not isinstance(document, Mapping):
            return None
        if document.get("cluster_id") != self._cluster.cluster_id():
            return None
        return {str(blob["key"]): blob for blob in document.get("blobs", ())}

    def _fetch_from_leader(self, leader_http: str, key: str, sha256: str) -> None:
        """Store a blob of the leader.

        A failure is logged, and the next comparison retries.
        """
        try:
            check_blob_key(key)
            former = self._own_hash(key)
            with self._blobs.changes.hold(key):
                if self._own_hash(key) == former and self._base.put_existing(key, sha256):
                    return
            with self._receive(leader_http, key, sha256) as received:
                self._store_if_unchanged(key, former, received)
        except (StormDagsterError, httpx.HTTPError, OSError) as error:
            _log.info("%s cannot be fetched from the leader: %s", key, error_text(error))

    def _store_if_unchanged(self, key: str, former: str | None, received: "_ReceivedBlob") -> None:
        """Store a received blob if the key still has the content with the hash ``former``.

        Otherwise the leader has sent a newer one, or this nimbus has written it as the leader.
        """
        with self._blobs.changes.hold(key):
            if self._own_hash(key) == former:
                self._base.adopt(key, received.path, received.sha256)

    def _own_hash(self, key: str) -> str | None:
        """Hash of the content that the key has here; ``None`` without a readable blob."""
        try:
            return self._base.meta(key).sha256
        except (KeyNotFound, Corrupt):
            return None

    def _drop_unneeded(self, keys: set[str], leader_http: str) -> None:
        """Drop the blobs that have been unneeded for longer than the inbox keeps files.

        ``keys`` are all that are unneeded now; the time of others is forgotten.
        """
        now = time.monotonic()
        self._unneeded = {key: self._unneeded.get(key, now) for key in keys}
        for key, since in self._unneeded.items():
            if now - since <= self._keep_secs:
                continue
            # Locked, so that a copy that the leader sends now is stored after the removal.
            with self._blobs.changes.hold(key):
                if self._is_absent_at_leader(key, leader_http):
                    _log.info("dropping blob %s, which the leader no longer has", key)
                    with suppress(KeyNotFound):
                        self._base.delete(key)

    def _is_absent_at_leader(self, key: str, leader_http: str) -> bool:
        """True if the same nimbus still leads, has no such blob, and the key is not registered.

        False without an answer.
        """
        status = self._status.snapshot
        if status.leader == self._status.me or status.leader_http != leader_http:
            return False
        if is_registered_kind(key) and self._registry.is_registered(key):
            return False
        try:
            return self._http.head(_blob_url(leader_http, key)).status_code == 404
        except httpx.HTTPError as error:
            _log.debug("blob %s of the leader is unknown: %s", key, error_text(error))
            return False

    @contextmanager
    def _receive(self, http: str, key: str, sha256: str | None) -> Iterator["_ReceivedBlob"]:
        """Receive a blob of another nimbus; without ``sha256`` any content.

        Its file is in the inbox, and is removed at the end. :class:`KeyNotFound` if the other
        nimbus does not have the blob, :class:`Unavailable` for another answer, :class:`Corrupt` if
        its content does not have the announced hash, or if that is not ``sha256``.
        """
        path = new_inbox_file(self._inbox)
        try:
            with self._http.stream("GET", _blob_url(http, key)) as response:
                announced = _announced_hash(response, http, key, sha256)
                meta = _write_content(path, key, response.iter_raw(_CHUNK_BYTES))
            meta.check_announced(announced)
            yield _ReceivedBlob(path, meta.sha256)
        finally:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _ReceivedBlob:
    """Content that was received from another nimbus, with its hash."""

    path: Path
    sha256: str


def _blob_url(http: str, key: str) -> str:
    return f"{http.rstrip('/')}/v1/blobs/{quote(key, safe='')}"


def _announced_hash(response: httpx.Response, http: str, key: str, sha256: str | None) -> str:
    """Hash that a nimbus announces for the blob; the errors are those of ``_receive``."""
    if response.status_code == 404:
        raise KeyNotFound(f"no blob {key!r} at {http}")
    if response.status_code != 200:
        raise Unavailable(f"{http} answered {response.status_code} for blob {key!r}")
    announced = response.headers.get("X-Content-SHA256")
    if announced is None or (sha256 and announced != sha256):
        raise Corrupt(
            f"blob {key!r} of {http} has SHA-256 {announced}, {sha256 or 'none'} is the newest: it "
            "is damaged or outdated there"
        )
    return str(announced)


def _write_content(path: Path, key: str, chunks: Iterable[bytes]) -> BlobMeta:
    """Write the chunks to a new file; return its size and hash."""
    digest = hashlib.sha256()
    size = 0
    with path.open("xb") as sink:
        for chunk in chunks:
            sink.write(chunk)
            digest.update(chunk)
            size += len(chunk)
    return BlobMeta(key, size, digest.hexdigest())
