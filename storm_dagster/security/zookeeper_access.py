"""Users of a cluster in ZooKeeper, and the ACL of each of its nodes.

The cluster's user owns every node. A worker is two users, whose passwords follow from the
cluster's: one for the nodes that all workers read, and one for the nodes of its topology. Their
permissions are listed here. ACLs are not inherited: each node gets one when it is created, and
``storm-dagster zookeeper secure`` gives them to existing nodes.
"""

import base64
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from storm_dagster.model import paths
from storm_dagster.security.settings import zookeeper_payload

# Bits of ZooKeeper's permissions.
READ = 1
WRITE = 2
CREATE = 4
DELETE = 8
ALL = 31
"""These and the permission to change the ACL."""
PAYLOAD = "storm.zookeeper.auth.payload"
"""Conf key of the lines ``user:password`` of a process."""
SUPER_ACL = "storm.zookeeper.superACL"
"""Conf key of a worker, set by its supervisor: ``digest:user:hash`` of the cluster's user, which
owns the nodes that the worker creates.
"""

_WORKERS: dict[str, int] = {
    paths.CLUSTER_ID: READ,
    paths.EPOCH: READ,
    paths.topology("*"): READ,
    paths.log_levels("*"): READ,
    paths.state_home("*"): READ | WRITE,
    paths.assignment("*"): READ,
    f"{paths.assignment('*')}/*": READ,
    paths.tasks("*"): READ,
    paths.taskbeats("*"): READ | WRITE,
    paths.metrics("*"): READ | WRITE,
    paths.workers("*"): READ | CREATE | DELETE,
    f"{paths.workers('*')}/*": READ | WRITE,
    paths.task_errors("*"): READ | CREATE,
    paths.task_errors("*", "*"): READ | CREATE | DELETE,
    f"{paths.task_errors('*', '*')}/*": READ | WRITE,
}
"""Path -> permissions of workers; the first ``*`` is the topology, any other one is any name."""
_PATTERNS = tuple(
    (tuple(path[1:].split("/")), permissions) for path, permissions in _WORKERS.items()
)
"""The same, with the elements of each path."""


def worker_permissions(path: str) -> tuple[str, int]:
    """(topology id, permissions) of the workers that may use the node.

    ``path`` is below the root. The id is ``""`` for all workers. ``("", 0)``: only the cluster may
    use the node.
    """
    parts = [part for part in path.split("/") if part]
    for pattern, permissions in _PATTERNS:
        if _matches(pattern, parts):
            topology_id = parts[1] if len(parts) > 1 else ""
            return topology_id, permissions
    return "", 0


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    if len(pattern) != len(parts):
        return False
    pairs = zip(pattern, parts, strict=True)
    return all(expected in ("*", part) for expected, part in pairs)


def worker_may_have_made(path: str) -> bool:
    """True if the node may be a worker's, which chose its ACL.

    This is so below a node in which workers may create children.
    """
    parts = [part for part in path.split("/") if part]
    for depth in range(1, len(parts)):
        _, permissions = worker_permissions("/" + "/".join(parts[:depth]))
        if permissions & CREATE:
            return True
    return False


def digest_of(line: str) -> str:
    """ZooKeeper's name in ACLs for a line ``user:password``."""
    digest = hashlib.sha1(line.encode(), usedforsecurity=False).digest()
    return f"{line.partition(':')[0]}:{base64.b64encode(digest).decode()}"


def _worker_user(topology_id: str) -> str:
    return f"topology-{topology_id}" if topology_id else "workers"


def _worker_line(line: str, topology_id: str) -> str:
    """Line of a worker's user that follows from a line of the cluster.

    ``""`` is the user of all workers.
    """
    user = _worker_user(topology_id)
    purpose = f"storm-dagster zookeeper {user}"
    password = hmac.new(line.encode(), purpose.encode(), hashlib.sha256).hexdigest()
    return f"{user}:{password}"


@dataclass(frozen=True)
class ZooKeeperUsers:
    """Users of a process in ZooKeeper. Its ``repr`` holds no password."""

    payload: str = field(repr=False)
    """Lines ``user:password``. The first user of a daemon owns the nodes that it creates."""
    super_acl: str = ""
    """In a worker: :data:`SUPER_ACL`."""

    @staticmethod
    def of(conf: Any) -> "ZooKeeperUsers | None":
        """Users of a conf; ``None`` without a user."""
        payload = zookeeper_payload(conf)
        if payload is None:
            return None
        return ZooKeeperUsers(payload, conf.get(SUPER_ACL) or "")

    @property
    def lines(self) -> list[str]:
        """Lines of the payload."""
        return self.payload.split("\n")

    def worker_conf(self, topology_id: str) -> dict[str, str]:
        """Conf keys that make a process a worker of the topology.

        Each line of the cluster gives two lines.
        """
        worker_lines: list[str] = []
        for line in self.lines:
            worker_lines.append(_worker_line(line, topology_id))
            worker_lines.append(_worker_line(line, ""))
        owner = digest_of(self.lines[0])
        return {PAYLOAD: "\n".join(worker_lines), SUPER_ACL: f"digest:{owner}"}

    def acl(self, path: str) -> dict[str, int]:
        """Digest -> permissions, for a node below the root.

        The owner is first. The workers of each line have access, so that running ones keep it while
        the secret is changed.
        """
        topology_id, permissions = worker_permissions(path)
        owner = self.super_acl.partition(":")[2] or digest_of(self.lines[0])
        acl = {owner: ALL}
        if not permissions:
            return acl
        if self.super_acl:
            # In a worker, whose lines are those of its two users.
            lines = self.lines
        else:
            lines = [_worker_line(line, topology_id) for line in self.lines]
        user = _worker_user(topology_id)
        for line in lines:
            if line.startswith(f"{user}:"):
                acl[digest_of(line)] = permissions
        return acl
