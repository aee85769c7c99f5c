"""Copies of blobs on other nimbuses, confirmed before a write is acknowledged
(``docs/decisions.md#push-replication``).

A copy is first offered by its hash alone: a follower that has the content already, under whatever
key, stores it without a transfer.
"""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, BinaryIO
from urllib.parse import quote

import httpx

from storm_dagster.blobstore import BlobMeta
from storm_dagster.blobstore.messages import blob_response_error, chunks_of
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.security.settings import Security

_log = logging.getLogger(__name__)
_RETRY_SECS = 0.5
_OFFER_SECS = 3.0
"""Limit of an offer by hash, which carries no content: a peer that is slower hangs."""
_AT_ONCE = 4
_MOST_WAITING = 64
"""Pushes that wait for one peer; what is beyond them it fetches itself when it synchronizes."""
LONGEST_WAIT_SECS = 20.0
"""A write that waits for copies is answered before the client, who waits 30 s for an answer, gives
up without a reason.
"""


@dataclass(frozen=True)
class NimbusPeer:
    """Another nimbus."""

    address: str
    """``host:port`` of its Thrift service: its name."""
    http: str
    """Base URL."""


@dataclass(eq=False, repr=False)
class Replicator:
    """Pushes blobs to the followers. ``peers`` is called again for each push and each retry.

    ``absent`` gives the addresses of nimbuses that should be there and are not, for the error.
    """

    _peers: Callable[[], list[NimbusPeer]]
    _open: Callable[[str], AbstractContextManager[BinaryIO]]
    _: KW_ONLY
    wait_secs: float
    absent: Callable[[], list[str]] = list
    read_timeout_secs: float = 30.0
    security: Security = field(default_factory=Security)

    def __post_init__(self) -> None:
        # What is signed for one peer is sent to no other.
        self._http = httpx.Client(
            timeout=httpx.Timeout(self.read_timeout_secs, connect=2.0),
            follow_redirects=False,
            **self.security.client_options(),
        )
        self._lock = threading.Lock()
        # A pool for each peer: one that hangs holds up nobody else.
        self._pools = defaultdict[str, ThreadPoolExecutor](
            lambda: ThreadPoolExecutor(_AT_ONCE, "blob-push")
        )
        self._waiting: Counter[str] = Counter()

    def close(self) -> None:
        """Drop what is waiting and close the connections."""
        with self._lock:
            pools = [*self._pools.values()]
            self._pools.clear()
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _submit(
        self, peer: NimbusPeer, work: Callable[..., None], *arguments: Any
    ) -> Future[None] | None:
        """Start ``work(peer, ...)`` in the peer's own threads; ``None`` when too much waits for
        it.
        """
        with self._lock:
            if self._waiting[peer.address] >= _MOST_WAITING:
                return None
            pool = self._pools[peer.address]
            self._waiting[peer.address] += 1
        future = pool.submit(work, peer, *arguments)
        future.add_done_callback(lambda _: self._done(peer.address))
        return future

    def _done(self, address: str) -> None:
        with self._lock:
            self._waiting[address] -= 1

    def push(self, meta: BlobMeta, *, epoch: int, minimum: int, allow_degraded: bool) -> int:
        """Copy the blob to all followers; how many nimbuses (this one included) hold it.

        Returns as soon as ``minimum`` hold it, while the other pushes go on. With
        ``allow_degraded`` it waits only for nimbuses that are alive; without, :class:`Unavailable`
        when too few hold it within the wait.
        """
        deadline = time.monotonic() + min(self.wait_secs, LONGEST_WAIT_SECS)
        holders: set[str] = set()
        refused: dict[str, str] = {}
        while True:
            running: dict[Future[None], NimbusPeer] = {}
            for peer in [peer for peer in self._peers() if peer.address not in holders]:
                if (future := self._submit(peer, self._push_one, meta, epoch)) is not None:
                    running[future] = peer
            while running and 1 + len(holders) < minimum:
                done, _ = wait(
                    running,
                    timeout=max(deadline - time.monotonic(), 0),
                    return_when=FIRST_COMPLETED,
                )
                for future in done:
                    peer = running.pop(future)
                    error = future.exception()
                    if error is None:
                        holders.add(peer.address)
                        refused.pop(peer.address, None)
                        continue
                    refused[peer.address] = (
                        f"{peer.address} did not take it ({error or type(error).__name__})"
                    )
                    if not isinstance(error, StormDagsterError | httpx.HTTPError | OSError):
                        raise error
                if not done:
                    break
            if 1 + len(holders) >= minimum:
                return 1 + len(holders)
            if allow_degraded:
                _log.warning("%s is on %d of %d nimbuses", meta.key, 1 + len(holders), minimum)
                return 1 + len(holders)
            if time.monotonic() + _RETRY_SECS >= deadline:
                refused |= {
                    peer.address: f"{peer.address} does not answer" for peer in running.values()
                }
                missing = [
                    *refused.values(),
                    *(f"{url} of nimbus.seeds is not there" for url in self.absent()),
                ]
                raise Unavailable(
                    f"blob {meta.key!r} is on {1 + len(holders)} nimbuses, {minimum} were asked for"
                    f"{' (' + '; '.join(missing) + ')' if missing else ''}: start another "
                    "nimbus, lower topology.min.replication.count, or submit with --allow-degraded"
                )
            time.sleep(_RETRY_SECS)

    def push_deletion(self, key: str, *, epoch: int) -> None:
        """Ask all followers to drop the blob; one that is away drops it when it synchronizes."""
        for peer in self._peers():
            self._submit(peer, self._delete_one, key, epoch)

    def _push_one(self, peer: NimbusPeer, meta: BlobMeta, epoch: int) -> None:
        url = _replica_url(peer, meta.key)
        headers = {"X-Content-SHA256": meta.sha256, "X-Storm-Epoch": str(epoch)}
        try:
            by_hash = {**headers, "X-Content-By-Hash": "true"}
            offered = self._http.put(url, headers=by_hash, content=b"", timeout=_OFFER_SECS)
            if offered.status_code == 404:
                with self._open(meta.key) as stream:
                    offered = self._http.put(
                        url,
                        headers={**headers, "Content-Length": str(meta.size)},
                        content=chunks_of(stream),
                    )
            if not offered.is_success:
                raise blob_response_error(offered)
        except (StormDagsterError, httpx.HTTPError, OSError) as error:
            _log.warning("%s was not copied to nimbus %s: %s", meta.key, peer.address, error)
            raise

    def _delete_one(self, peer: NimbusPeer, key: str, epoch: int) -> None:
        try:
            self._http.delete(
                _replica_url(peer, key), headers={"X-Storm-Epoch": str(epoch)}, timeout=_OFFER_SECS
            )
        except httpx.HTTPError as error:
            _log.info("the deletion of %s did not reach nimbus %s: %s", key, peer.address, error)


def _replica_url(peer: NimbusPeer, key: str) -> str:
    return f"{peer.http.rstrip('/')}/v1/replicas/{quote(key, safe='')}"
