"""Counts of the requests that sessions of this process send to ZooKeeper, and of what its server
holds.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kazoo.client import KazooClient

from storm_dagster.zk.session import ZkSession

READS = ("Exists", "GetData", "MultiRead", "GetChildren", "GetChildren2", "GetACL", "Sync")


class RequestCounts:
    """Requests by session and kind since the last :meth:`reset`; pings are none."""

    def __init__(self) -> None:
        self._found: Counter[tuple[int, str]] = Counter()

    def add(self, client: KazooClient, kind: str) -> None:
        self._found[id(client), kind] += 1

    def reset(self) -> None:
        """Begin again at 0."""
        self._found.clear()

    def reads(self, sessions: Iterable[ZkSession] | None = None) -> int:
        """Reads of these sessions, by default of all. One that reads many nodes counts once."""
        clients = None if sessions is None else {id(session._client) for session in sessions}
        found = dict(self._found).items()
        return sum(
            n
            for (client, kind), n in found
            if kind in READS and (clients is None or client in clients)
        )


@contextmanager
def count_requests() -> Iterator[RequestCounts]:
    """Counts while the block runs; every request still goes to the server."""
    counts, original = RequestCounts(), KazooClient._call

    def counted(self: KazooClient, request: Any, async_object: Any) -> Any:
        counts.add(self, type(request).__name__)
        return original(self, request, async_object)

    KazooClient._call = counted
    try:
        yield counts
    finally:
        KazooClient._call = original


def server_metrics(address: str) -> dict[str, int]:
    """What the server itself counts (``mntr``): ``zk_watch_count``, ``zk_znode_count`` ..."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as link:
        link.sendall(b"mntr")
        text = b"".join(iter(lambda: link.recv(65536), b"")).decode()
    rows = (line.split("\t") for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
