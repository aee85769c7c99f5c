"""Copies of blobs on other nimbuses, confirmed before a write is acknowledged.

See ``docs/decisions.md#push-replication``. A copy is first offered by its hash alone: a follower
that has the content already, under any key, stores it without a transfer.
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
from storm_dagster.model.errors import StormDagsterError, Unavailable, error_text
from storm_dagster.security.settings import Security

_log = logging.getLogger(__name__)
_RETRY_SECS = 0.5
"""Pause before the pushes to peers that did not take a blob are repeated."""
_OFFER_SECS = 3.0
"""Limit of an offer by hash, which carries no content: a peer that is slower hangs."""
_AT_ONCE = 4
"""Threads for each peer, which push to it at the same time."""
_MAX_WAITING = 64
"""Limit of pushes that wait for one peer; it fetches further blobs when it synchronizes."""
MAX_WAIT_SECS = 20.0
"""Limit of the wait for copies.

A client gives up after 30 s without an answer; a shorter limit answers it with the reason.
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
    """Pushes of blobs to the followers.

    ``peers`` is called for each push and each retry. ``open`` opens the content of a key for
    reading. ``absent`` returns the addresses of expected nimbuses that are not registered, for the
    error.
    """

    _peers: Callable[[], list[NimbusPeer]]
    _open: Callable[[str], AbstractContextManager[BinaryIO]]
    _: KW_ONLY
    wait_secs: float
    """Longest wait for copies, at most :data:`MAX_WAIT_SECS`."""
    absent: Callable[[], list[str]] = list
    read_timeout_secs: float = 30.0
    """Longest silence of a peer that takes a content."""
    security: Security = field(default_factory=Security)

    def __post_init__(self) -> None:
        # A redirected request would take credentials that are meant for one peer to another.
        self._http = httpx.Client(
            timeout=httpx.Timeout(self.read_timeout_secs, connect=2.0),
            follow_redirects=False,
            **self.security.client_options(),
        )
        self._lock = threading.Lock()
        # A pool for each peer: one that hangs does not delay the others.
        self._pools = defaultdict[str, ThreadPoolExecutor](
            lambda: ThreadPoolExecutor(_AT_ONCE, "blob-push")
        )
        self._waiting: Counter[str] = Counter()
        """Address of a peer -> number of its pushes that wait or run."""

    def close(self) -> None:
        """Drop the waiting pushes and close the connections."""
        with self._lock:
            pools = [*self._pools.values()]
            self._pools.clear()
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _submit(
        self, peer: NimbusPeer, work: Callable[..., None], *arguments: Any
    ) -> Future[None] | None:
        """Start ``work(peer, ...)`` in the peer's own threads.

        Returns ``None`` if too many pushes wait for that peer.
        """
        with self._lock:
            if self._waiting[peer.address] >= _MAX_WAITING:
                return None
            pool = self._pools[peer.address]
            self._waiting[peer.address] += 1
        future = pool.submit(work, peer, *arguments)
        future.add_done_callback(lambda _: self._count_ended(peer.address))
        return future

    def _count_ended(self, address: str) -> None:
        with self._lock:
            self._waiting[address] -= 1

    def push(self, meta: BlobMeta, *, epoch: int, minimum: int, allow_degraded: bool) -> int:
        """Copy the blob to all followers.

        Returns the number of nimbuses, this one included, that hold it, as soon as there are
        ``minimum``; the other pushes continue. With ``allow_degraded`` it waits only for nimbuses
        that are alive, and returns after one attempt at each. Without, it raises
        :class:`Unavailable` if too few hold the blob within the wait.
        """
        deadline = time.monotonic() + min(self.wait_secs, MAX_WAIT_SECS)
        holders: set[str] = set()
        refusals: dict[str, str] = {}  # Address of a peer -> why it does not hold the blob.
        while True:
            running = self._start_pushes(meta, epoch, holders)
            while running and 1 + len(holders) < minimum:
                remaining_secs = max(deadline - time.monotonic(), 0)
                ended, _ = wait(running, timeout=remaining_secs, return_when=FIRST_COMPLETED)
                for future in ended:
                    peer = running.pop(future)
                    error = future.exception()
                    if error is None:
                        holders.add(peer.address)
                        refusals.pop(peer.address, None)
                        continue
                    refusals[peer.address] = f"{peer.address} did not take it ({error_text(error)})"
                    # An error that no peer causes: a defect here.
                    if not isinstance(error, StormDagsterError | httpx.HTTPError | OSError):
                        raise error
                if not ended:
                    break
            copies = 1 + len(holders)
            if copies >= minimum:
                return copies
            if allow_degraded:
                _log.warning("%s is on %d of %d nimbuses", meta.key, copies, minimum)
                return copies
            if time.monotonic() + _RETRY_SECS >= deadline:
                for peer in running.values():
                    refusals[peer.address] = f"{peer.address} does not answer"
                raise self._too_few_copies(meta, copies, minimum, [*refusals.values()])
            time.sleep(_RETRY_SECS)

    def _start_pushes(
        self, meta: BlobMeta, epoch: int, holders: set[str]
    ) -> dict[Future[None], NimbusPeer]:
        """Start a push to every peer that is not one of the holders."""
        running: dict[Future[None], NimbusPeer] = {}
        for peer in self._peers():
            if peer.address in holders:
                continue
            future = self._submit(peer, self._push_one, meta, epoch)
            if future is not None:
                running[future] = peer
        return running

    def _too_few_copies(
        self, meta: BlobMeta, copies: int, minimum: int, refusals: list[str]
    ) -> Unavailable:
        """Return the error of a blob on too few nimbuses, with each peer's reason."""
        reasons = [*refusals, *(f"{url} of nimbus.seeds is not there" for url in self.absent())]
        reason = f" ({'; '.join(reasons)})" if reasons else ""
        return Unavailable(
            f"blob {meta.key!r} is on {copies} nimbuses, {minimum} were asked for{reason}: start "
            "another nimbus, lower topology.min.replication.count, or submit with --allow-degraded"
        )

    def push_deletion(self, key: str, *, epoch: int) -> None:
        """Request that all followers drop the blob.

        An unreachable one drops it when it synchronizes.
        """
        for peer in self._peers():
            self._submit(peer, self._delete_one, key, epoch)

    def _push_one(self, peer: NimbusPeer, meta: BlobMeta, epoch: int) -> None:
        """Offer the blob by its hash, and send its content if the peer lacks it.

        An error is logged and raised.
        """
        url = _replica_url(peer, meta.key)
        headers = {"X-Content-SHA256": meta.sha256, "X-Storm-Epoch": str(epoch)}
        try:
            offer_headers = {**headers, "X-Content-By-Hash": "true"}
            response = self._http.put(url, headers=offer_headers, content=b"", timeout=_OFFER_SECS)
            if response.status_code == 404:  # The peer lacks the content.
                headers["Content-Length"] = str(meta.size)
                with self._open(meta.key) as stream:
                    response = self._http.put(url, headers=headers, content=chunks_of(stream))
            if not response.is_success:
                raise blob_response_error(response)
        except (StormDagsterError, httpx.HTTPError, OSError) as error:
            _log.warning(
                "%s was not copied to nimbus %s: %s", meta.key, peer.address, error_text(error)
            )
            raise

    def _delete_one(self, peer: NimbusPeer, key: str, epoch: int) -> None:
        try:
            self._http.delete(
                _replica_url(peer, key), headers={"X-Storm-Epoch": str(epoch)}, timeout=_OFFER_SECS
            )
        except httpx.HTTPError as error:
            _log.info(
                "the deletion of %s did not reach nimbus %s: %s",
                key,
                peer.address,
                error_text(error),
            )


def _replica_url(peer: NimbusPeer, key: str) -> str:
    return f"{peer.http.rstrip('/')}/v1/replicas/{quote(key, safe='')}"
