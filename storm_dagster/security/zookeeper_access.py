"""Users of a cluster in ZooKeeper, and the ACL of each of its nodes.

The cluster's user owns every node. Workers are two users, whose passwords follow from the
cluster's: one for what all of them read, and one for their topology alone. What they need is listed
here. ACLs are not inherited: each node gets its own when it is created, and ``storm-dagster
zookeeper secure`` gives them to those that exist.
"""

import base64
import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Any

from storm_dagster.model import paths
from storm_dagster.security.settings import zookeeper_payload

READ, WRITE, CREATE, DELETE = 1, 2, 4, 8
ALL = 31
"""These and the permission to change the ACL."""
PAYLOAD = "storm.zookeeper.auth.payload"
SUPER_ACL = "storm.zookeeper.superACL"
"""Conf key of a worker, set by its supervisor: ``digest:user:hash`` of the cluster's user, who owns
what it creates.
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
_PATTERNS = tuple(
    (tuple(path[1:].split("/")), permissions) for path, permissions in _WORKERS.items()
)


def worker_permissions(path: str) -> tuple[str, int]:
    """(topology id, permissions) of those workers that may do anything with the node; the id is
    ``""`` for all workers.

    ``path`` is below the root. Nobody but the cluster gets ``("", 0)``.
    """
    parts = [part for part in path.split("/") if part]
    for pattern, permissions in _PATTERNS:
        if len(pattern) == len(parts) and all(
            want in ("*", part) for want, part in zip(pattern, parts, strict=True)
        ):
            return parts[1] if len(parts) > 1 else "", permissions
    return "", 0


def worker_may_have_made(path: str) -> bool:
    """Whether the node may be a worker's, which chose its ACL."""
    parts = [part for part in path.split("/") if part]
    above = ("/" + "/".join(parts[:depth]) for depth in range(1, len(parts)))
    return any(worker_permissions(each)[1] & CREATE for each in above)


def digest_of(line: str) -> str:
    """ZooKeeper's name in ACLs for a line ``user:password``."""
    digest = hashlib.sha1(line.encode(), usedforsecurity=False).digest()
    return f"{line.partition(':')[0]}:{base64.b64encode(digest).decode()}"


def _worker_user(topology_id: str) -> str:
    return f"topology-{topology_id}" if topology_id else "workers"


def _worker_line(line: str, topology_id: str) -> str:
    user = _worker_user(topology_id)
    return f"{user}:{hmac.new(line.encode(), f'storm-dagster zookeeper {user}'.encode(), hashlib.sha256).hexdigest()}"


@dataclass(frozen=True)
class ZooKeeperUsers:
    """Users that a process proves to be in ZooKeeper. Its ``repr`` holds no password."""

    payload: str = field(repr=False)
    """Lines ``user:password``. A daemon's first one owns what it creates."""
    super_acl: str = ""
    """In a worker: :data:`SUPER_ACL`."""

    @staticmethod
    def of(conf: Any) -> "ZooKeeperUsers | None":
        """By a conf; ``None`` without a user."""
        payload = zookeeper_payload(conf)
        return None if payload is None else ZooKeeperUsers(payload, conf.get(SUPER_ACL) or "")

    @property
    def lines(self) -> list[str]:
        """The lines of the payload."""
        return self.payload.split("\n")

    def worker_conf(self, topology_id: str) -> dict[str, str]:
        """Conf keys that make a process a worker of the topology. Each line of the cluster gives
        two.
        """
        lines = [_worker_line(line, each) for line in self.lines for each in (topology_id, "")]
        return {PAYLOAD: "\n".join(lines), SUPER_ACL: f"digest:{digest_of(self.lines[0])}"}

    def acl(self, path: str) -> dict[str, int]:
        """Digest -> permissions, for the node below the root; the owner is first.

        It lets in the workers of each line: those that run keep theirs while the secret is changed.
        """
        topology_id, permissions = worker_permissions(path)
        owner = self.super_acl.partition(":")[2] or digest_of(self.lines[0])
        known = (
            self.lines
            if self.super_acl
            else [_worker_line(each, topology_id) for each in self.lines]
        )
        mine = [
            each
            for each in known
            if permissions and each.startswith(f"{_worker_user(topology_id)}:")
        ]
        return {owner: ALL, **{digest_of(each): permissions for each in mine}}
