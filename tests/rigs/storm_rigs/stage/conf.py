"""Conf keys that lead to a cluster of its own on a running ZooKeeper server."""

from __future__ import annotations

import uuid
from typing import Any

from storm_dagster.testing.waiting import patience

LASTING_SESSION_MS = 30_000
"""Session of a test's own state: what it writes for supervisors and workers is gone with the
session, which a busy machine must not end.
"""


def fresh_root() -> str:
    """A root path that no other cluster uses; it does not exist yet."""
    return f"/t-{uuid.uuid4().hex[:12]}"


def zookeeper_conf(address: str, root: str | None = None) -> dict[str, Any]:
    """The keys of the server at ``host:port``, with ``root`` or a fresh one."""
    host, _, port = address.rpartition(":")
    return {
        "storm.zookeeper.servers": [host],
        "storm.zookeeper.port": int(port),
        "storm.zookeeper.root": root or fresh_root(),
        "storm.zookeeper.session.timeout": patience(4000),
    }
