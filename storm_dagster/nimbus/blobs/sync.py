"""Synchronization of this nimbus's blobs by pulling; ``replication`` pushes.

What is absent here is fetched. What is absent elsewhere is only removed here when a leader of this
very cluster says so for a while: an empty root, or that of another cluster, never costs a blob.
"""

import logging
import time
from collections.abc import Iterable, Mapping
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
)
from storm_dagster.model.names import check_blob_key, id_of_blob_key
from storm_dagster.nimbus.blobs.registry import Registered, is_registered_kind
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.security.settings import SILENT_SECS, Security
from storm_dagster.zk.watches import Wake

_log = logging.getLogger(__name__)
_FOLLOW_SECS = 20.0
"""Interval of comparing all blobs with the leader's, who pushes what is new."""


class BlobSync:
    """Pulling of blobs by one nimbus. :meth:`run_once` is called from one thread; the counts from
    any.
    """

    def __init__(self, nimbus: Nimbus) -> None:
        self._cluster, self._registry, self._status = nimbus.cluster, nimbus.registry, nimbus.status
        self._blobs, self._base = nimbus.blobs, nimbus.blobs.base
        self._peers = nimbus.peers
        self._keep_secs = float(nimbus.conf["nimbus.inbox.jar.expiration.secs"])
        self._follow_secs = min(_FOLLOW_SECS, self._keep_secs)
        self._followed: tuple[str | None, float] | None = None
        # Blob that the leader does not have any more -> when that was first seen.
        self._unneeded: dict[str, float] = {}
        options = Security.of(nimbus.conf).client_options()
        self._http = httpx.Client(timeout=httpx.Timeout(SILENT_SECS, connect=2.0), **options)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def missing(
        self, wake: Wake | None = None
    ) -> tuple[dict[str, Registered], dict[str, Registered]]:
        """The blobs that active topologies need and this nimbus lacks (or has in an old version),
        and all needed.

        Reads only. ``wake`` is called when a blob is registered or removed.
        """
        if self._blobs.shared:
            return {}, {}
        if wake is not None:
            self._cluster.watches.add_wake(paths.BLOBSTORE, wake)
        registered = self._registry.keys(watch=wake is not None)
        needed = self._registry.survey(
            sorted(needed_blobs(self._registry.topologies(), registered))
        )
        return {key: entry for key, entry in needed.items() if not self._is_held(entry)}, needed

    def _is_held(self, entry: Registered) -> bool:
        try:
            meta = self._base.meta(entry.key)
        except (KeyNotFound, Corrupt):
            return False
        # What is damaged lies in quarantine.
        return self._base.has_content(meta.sha256) and (
            entry.record is None or entry.record.sha256 == meta.sha256
        )

    def run_once(self, wake: Wake | None = None) -> int:
        """Register what is here, fetch what is missing; how many needed blobs are still missing.

        Raises :class:`Unavailable` without ZooKeeper and :class:`Conflict` for another cluster's
        root; then nothing was changed.
        """
        self._cluster.check_cluster_id()
        lacking, needed = self.missing(wake)
        self._register(entry for key, entry in needed.items() if key not in lacking)
        left = set(lacking)
        self._status.set_lacking(left)
        for key, entry in lacking.items():
            if self._fetch_needed(entry):
                left.discard(key)
                self._status.set_lacking(left)
        self._take_registered(set(needed))
        leader, now = self._status.known.leader, time.monotonic()
        if (
            self._followed is None
            or leader != self._followed[0]
            or now - self._followed[1] >= self._follow_secs
        ):
            self._followed = leader, now
            self._follow_leader(set(needed))
        return len(left)

    def _take_registered(self, needed: set[str]) -> None:
        """Blobs of topologies that are being submitted still: shown (also after a lost session),
        and fetched.

        Their submission waits for these copies; a session that ended took the announcements with
        it.
        """
        if self._blobs.shared:
            return
        for entry in self._registry.survey(sorted(set(self._registry.keys()) - needed)).values():
            if entry.record is None:
                continue
            if self._is_held(entry):
                self._register([entry])
            elif entry.newest_holders():
                self._fetch_needed(entry)

    def _register(self, entries: Iterable[Registered]) -> None:
        for entry in entries:
            try:
                meta = self._base.meta(entry.key)
                if entry.record is not None:
                    self._registry.register_held(meta, entry)
                elif (epoch := self._status.epoch) is not None:
                    # Registered by nobody: the leader's copy is the one that counts.
                    self._registry.register_written(meta, epoch=epoch)
            except (Conflict, Fenced, KeyNotFound) as error:
                _log.info("%s is not registered now: %s", entry.key, error)

    def _fetch_needed(self, entry: Registered) -> bool:
        wanted = entry.record.sha256 if entry.record else None
        try:
            held = None if wanted is None else self._base.put_existing(entry.key, wanted)
        except Unavailable as error:  # A full disk: there may be room for the others.
            _log.warning("%s", error.message)
            return False
        if held is not None:
            self._hold(held)
            return True
        holders = set(entry.newest_holders())
        # Without a live holder in ZooKeeper one may still have it; its hash is checked anyway.
        for peer in sorted(
            self._peers(), key=lambda peer: (peer.address not in holders, peer.address)
        ):
            if peer.address == self._status.me:
                continue
            try:
                meta = self._fetch(peer.http, entry.key, wanted)
                if wanted is not None:
                    self._hold(meta)
                _log.info("fetched %s from nimbus %s", entry.key, peer.address)
                return True
            except (StormDagsterError, httpx.HTTPError, OSError) as error:
                _log.info("%s cannot be fetched from nimbus %s: %s", entry.key, peer.address, error)
        return False

    def _hold(self, meta: BlobMeta) -> None:
        """Register what was stored; what was removed everywhere meanwhile goes again."""
        try:
            held = self._registry.register_held(meta)
        except Conflict:
            held = False
        if not held and self._registry.read([meta.key])[meta.key].record is None:
            self._blobs.drop_replica(meta.key)

    def _follow_leader(self, needed: set[str]) -> None:
        """A follower takes over the leader's other blobs (staged, uploaded, reports), and drops its
        old ones.
        """
        known = self._status.known
        if self._blobs.shared or known.leader in (None, self._status.me) or not known.leader_http:
            return
        try:
            answer = self._http.get(f"{known.leader_http}/v1/blobs")
            document = answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError) as error:
            _log.debug("the leader's blobs cannot be listed: %s", error)
            return
        if (
            not isinstance(document, Mapping)
            or document.get("cluster_id") != self._cluster.cluster_id()
        ):
            return
        registered = set(self._registry.keys())
        theirs: dict[str, Any] = {str(blob["key"]): blob for blob in document.get("blobs", ())}
        mine = {meta.key: meta for meta in self._base.list()}
        for key, blob in theirs.items():
            held = mine.get(key)
            # What is registered comes by that; what was registered once is gone, even if a new
            # leader still has it.
            if (
                key in needed
                or is_registered_kind(key)
                or (held and held.sha256 == blob.get("sha256"))
            ):
                continue
            try:
                sha256 = str(blob.get("sha256"))
                if self._base.put_existing(check_blob_key(key), sha256) is None:
                    self._fetch(known.leader_http, key, sha256)
            except (StormDagsterError, httpx.HTTPError, OSError) as error:
                _log.info("%s cannot be fetched from the leader: %s", key, error)
        gone = set(mine) - set(theirs) - needed - registered
        if mine and not set(mine) & set(theirs):
            # A leader that has nothing of ours may have begun with an empty disk: that orders
            # nothing about blobs of users. Those of topologies and submissions go all the same, for
            # ZooKeeper names what is needed of them.
            gone = {key for key in gone if id_of_blob_key(key) or not is_registered_kind(key)}
        now = time.monotonic()
        self._unneeded = {key: self._unneeded.get(key, now) for key in gone}
        for key, since in self._unneeded.items():
            if now - since > self._keep_secs:
                _log.info("dropping blob %s, which the leader does not have any more", key)
                self._blobs.drop_replica(key)

    def _fetch(self, http: str, key: str, sha256: str | None) -> BlobMeta:
        """Store a blob of another nimbus, when it has the hash that is announced, and ``sha256`` if
        that is given.
        """
        with self._http.stream(
            "GET", f"{http.rstrip('/')}/v1/blobs/{quote(key, safe='')}"
        ) as response:
            if response.status_code == 404:
                raise KeyNotFound(f"no blob {key!r} at {http}")
            if response.status_code != 200:
                raise Unavailable(f"{http} answered {response.status_code} for blob {key!r}")
            announced = response.headers.get("X-Content-SHA256")
            if announced is None or announced != (sha256 or announced):
                raise Corrupt(
                    f"blob {key!r} of {http} has SHA-256 {announced}, {sha256 or 'none'} is the newest: "
                    "it is damaged or outdated there"
                )
            return self._base.put(key, response.iter_raw(1 << 16), expected_sha256=announced)
