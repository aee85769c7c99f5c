"""Copies of blobs on other nimbuses, confirmed before a write is acknowledged (``docs/decisions.md#push-replication``).

A copy is first offered by its hash alone: a follower that has the content already, under whatever key,
stores it without a transfer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import quote

import httpx

from storm_dagster.blobstore import BlobMeta
from storm_dagster.model.errors import StormDagsterError, Unavailable, error_from_document
from storm_dagster.model.security import Security

_log = logging.getLogger(__name__)
_CHUNK = 1 << 16
_RETRY_SECS = 0.5


@dataclass(frozen=True)
class NimbusPeer:
    """Another nimbus."""

    address: str
    """``host:port`` of its Thrift service: its name."""
    http: str
    """Base URL."""


class Replicator:
    """Pushes blobs to the followers. ``peers`` is called again for each push and each retry."""

    def __init__(
        self,
        peers: Callable[[], list[NimbusPeer]],
        open_blob: Callable[[str], AbstractContextManager[BinaryIO]],
        *,
        wait_secs: float,
        read_timeout_secs: float = 30.0,
        security: Security | None = None,
    ) -> None:
        self._peers = peers
        self._open = open_blob
        self._wait_secs = wait_secs
        self._http = httpx.Client(
            timeout=httpx.Timeout(read_timeout_secs, connect=2.0),
            follow_redirects=False,
            **(security or Security()).client_options(),
        )
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="blob-push")

    def close(self) -> None:
        """Drop what is waiting and close the connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def push(self, meta: BlobMeta, *, epoch: int, minimum: int, allow_degraded: bool) -> int:
        """Copy the blob to all followers; how many nimbuses (this one included) hold it.

        Returns as soon as ``minimum`` hold it, while the other pushes go on. When they do not within the
        wait, ``allow_degraded`` decides between returning fewer and :class:`Unavailable`.
        """
        deadline = time.monotonic() + self._wait_secs
        holders: set[str] = set()
        while True:
            peers = [peer for peer in self._peers() if peer.address not in holders]
            running: dict[Future[None], NimbusPeer] = {
                self._pool.submit(self._push_one, peer, meta, epoch): peer for peer in peers
            }
            while running and 1 + len(holders) < minimum:
                left = deadline - time.monotonic()
                done, _ = wait(running, timeout=max(left, 0), return_when=FIRST_COMPLETED)
                for future in done:
                    peer = running.pop(future)
                    error = future.exception()
                    if error is None:
                        holders.add(peer.address)
                    elif not isinstance(error, StormDagsterError | httpx.HTTPError | OSError):
                        raise error
                if not done:
                    break
            if 1 + len(holders) >= minimum:
                return 1 + len(holders)
            if time.monotonic() + _RETRY_SECS >= deadline:
                if allow_degraded:
                    _log.warning("%s is on %d of %d nimbuses", meta.key, 1 + len(holders), minimum)
                    return 1 + len(holders)
                raise Unavailable(
                    f"blob {meta.key!r} is on {1 + len(holders)} nimbuses, {minimum} were asked for: start another "
                    "nimbus, lower topology.min.replication.count, or submit with --allow-degraded"
                )
            time.sleep(_RETRY_SECS)

    def push_deletion(self, key: str, *, epoch: int) -> None:
        """Ask all followers to drop the blob; one that is away drops it when it synchronizes."""
        for peer in self._peers():
            self._pool.submit(self._delete_one, peer, key, epoch)

    def _push_one(self, peer: NimbusPeer, meta: BlobMeta, epoch: int) -> None:
        url = _replica_url(peer, meta.key)
        headers = {"X-Content-SHA256": meta.sha256, "X-Storm-Epoch": str(epoch)}
        try:
            offered = self._http.put(url, headers={**headers, "X-Content-By-Hash": "true"}, content=b"")
            if offered.status_code == 404:
                with self._open(meta.key) as stream:
                    offered = self._http.put(
                        url, headers={**headers, "Content-Length": str(meta.size)}, content=_chunks(stream)
                    )
            if not offered.is_success:
                raise _error_of(offered)
        except (StormDagsterError, httpx.HTTPError, OSError) as error:
            _log.warning("%s was not copied to nimbus %s: %s", meta.key, peer.address, error)
            raise

    def _delete_one(self, peer: NimbusPeer, key: str, epoch: int) -> None:
        try:
            self._http.delete(_replica_url(peer, key), headers={"X-Storm-Epoch": str(epoch)})
        except httpx.HTTPError as error:
            _log.info("the deletion of %s did not reach nimbus %s: %s", key, peer.address, error)


def _replica_url(peer: NimbusPeer, key: str) -> str:
    return f"{peer.http.rstrip('/')}/v1/replicas/{quote(key, safe='')}"


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK):
        yield chunk


def _error_of(response: httpx.Response) -> StormDagsterError:
    try:
        return error_from_document(response.json())
    except ValueError:
        return Unavailable(f"{response.url} answered {response.status_code}")
