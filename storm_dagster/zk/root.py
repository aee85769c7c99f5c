"""Root node of the cluster: creation, and checks of its identity and ACL.

Absence is not an order (``docs/decisions.md#absence-is-not-an-order``): a missing root or cluster
id means a wrong path, a wrong ensemble or wiped state, and never that the cluster has no work. Only
an explicit command creates it.
"""

import re
import ssl
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from kazoo.exceptions import KazooException, NoAuthError, NodeExistsError, NoNodeError
from kazoo.security import ACL, READ_ACL_UNSAFE, Permissions

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt, InvalidRequest, Unavailable
from storm_dagster.model.records import StateHome, encode_record
from storm_dagster.security.server_identity import TrustedServers
from storm_dagster.security.zookeeper_access import ZooKeeperUsers, worker_may_have_made
from storm_dagster.zk.cluster_state import ClusterState, ZooKeeperClusterState
from storm_dagster.zk.connection import make_client
from storm_dagster.zk.session import ZkSession

_CLUSTER_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")
"""Grammar of a cluster id."""
_NODES_PER_STEP = 1000
"""Nodes that get their ACLs between two reports of progress."""
_READ_PERMISSION: int = Permissions.READ
"""The only permission that changes no node."""


def create_root_node(session: ZkSession) -> None:
    """Create the missing nodes of the session's root path.

    They have no content.
    """
    node = ""
    for part in session.root.split("/"):
        if not part:
            continue
        node = f"{node}/{part}"
        with suppress(NodeExistsError):
            session.call(
                lambda client, node=node: client.create_async(node, b"", session.acl("/")),
                f"the creation of {node}",
            )


def _all_may_change(acl: Iterable[ACL]) -> bool:
    return any(entry.id.scheme == "world" and entry.perms & ~_READ_PERMISSION for entry in acl)


def refuse_open_root(session: ZkSession) -> None:
    """Refuse a root that is open to others or closed to workers.

    Raises ``Conflict``. The nodes right below the root are checked, too. A root that does not exist
    is not an error: it will be created closed.
    """
    cluster_id_node = session.full(paths.CLUSTER_ID)
    first_level = [session.full(path) for path in paths.FIRST_LEVEL]
    nodes = [session.root or "/", *first_level, cluster_id_node]
    results = session.pipeline(
        [lambda client, node=node: client.get_acls_async(node) for node in nodes], "a read of ACLs"
    )
    for node, result in zip(nodes, results, strict=True):
        # The server creates the top node, which is open to all; a root there shares it.
        if isinstance(result, NoNodeError) or (node == "/" and not session.root):
            continue
        if isinstance(result, Exception):
            raise result
        acl, _ = result
        if _all_may_change(acl):
            raise Conflict(
                f"{node} in ZooKeeper at {session.hosts} may be changed by every client "
                "(world:anyone) although this cluster has a secret: stop it and close its nodes "
                "with `storm-dagster daemon zookeeper secure`, or use a new storm.zookeeper.root"
            )
        if node == cluster_id_node and session.users and not _workers_may_read(session.users, acl):
            raise Conflict(
                f"{session.root or '/'} in ZooKeeper at {session.hosts} is closed to this "
                "cluster's workers, which have their own users: run "
                "`storm-dagster daemon zookeeper secure` once (an earlier release or another "
                "secret left it so)"
            )


def _workers_may_read(users: ZooKeeperUsers, acl: Iterable[ACL]) -> bool:
    """True if the ACL of the cluster id names a worker user."""
    _, *worker_digests = users.acl(paths.CLUSTER_ID)
    return any(entry.id.id in worker_digests for entry in acl)


def is_open_to_all(
    hosts: str,
    root: str,
    tls: ssl.SSLContext | None,
    trusted: TrustedServers | None = None,
) -> bool:
    """True if a client without credentials may change the root node.

    False without the node, and for a node that such a client may write, but neither read nor
    administer: ZooKeeper does not show it the ACL. Raises ``Unavailable`` if no server responds
    within 5 s.
    """
    client, _ = make_client(hosts, 5000, tls=tls, trusted=trusted)
    try:
        client.start(5)
        result = client.get_acls(root or "/")
        if not result:
            return False
        acl, _ = result
        return _all_may_change(acl)
    except (NoAuthError, NoNodeError):
        return False
    except (KazooException, client.handler.timeout_exception) as error:
        raise Unavailable(f"ZooKeeper at {hosts} did not answer: {type(error).__name__}") from None
    finally:
        client.stop()
        client.close()


def secure_root(session: ZkSession, progress: Callable[[int], None] = lambda visited: None) -> int:
    """Give the root and all nodes below it the ACL of new nodes.

    Returns the number of changed nodes. The call may be interrupted and repeated: a node's children
    are closed before the node. ``progress`` is called with the number of visited nodes. Nodes that
    a worker has closed to the cluster are not changed.
    """
    state = ZooKeeperClusterState(session)
    for topology_id in state.find_children(paths.TOPOLOGY) or ():
        # Workers of an earlier release created the node themselves.
        if not state.exists(paths.state_home(topology_id)):
            state.create_node(paths.state_home(topology_id), encode_record(StateHome(marker="")))
    root = session.root or "/"
    cluster_id = session.full(paths.CLUSTER_ID)
    levels = _levels_below(session, root)
    changed = 0
    visited = 0
    # The cluster id is last: daemons take its ACL as proof that all nodes are closed.
    for nodes in (*reversed(levels), [cluster_id], [root]):
        for start in range(0, len(nodes), _NODES_PER_STEP):
            part = nodes[start : start + _NODES_PER_STEP]
            changed += _close_nodes(session, part)
            visited += len(part)
            progress(visited)
    return changed


def _levels_below(session: ZkSession, root: str) -> list[list[str]]:
    """Nodes below ``root``, those of each depth together, without the cluster id."""
    levels: list[list[str]] = []
    level = [root]
    while level:
        children = _children_of(session, level)
        level = [node for node in children if node != session.full(paths.CLUSTER_ID)]
        levels.append(level)
    return levels


def _children_of(session: ZkSession, nodes: Sequence[str]) -> list[str]:
    """Full paths of all children of the nodes."""
    results = session.pipeline(
        [lambda client, node=node: client.get_children_async(node) for node in nodes],
        "a read of children",
    )
    children: list[str] = []
    for node, result in zip(nodes, results, strict=True):
        if _is_skipped(session, node, result):
            continue
        parent = node.rstrip("/")
        children.extend(f"{parent}/{name}" for name in sorted(result))
    if "/zookeeper" in children:
        children.remove("/zookeeper")  # A node of the server.
    return children


def _close_nodes(session: ZkSession, nodes: Sequence[str]) -> int:
    """Give the nodes the ACL of new nodes; the number of those that had another one."""
    results = session.pipeline(
        [lambda client, node=node: client.get_acls_async(node) for node in nodes], "a read of ACLs"
    )
    open_nodes: list[str] = []
    for node, result in zip(nodes, results, strict=True):
        if _is_skipped(session, node, result):
            continue
        former_acl, _ = result
        if former_acl != session.acl(session.strip(node)):
            open_nodes.append(node)
    results = session.pipeline(
        [
            lambda client, node=node: client.set_acls_async(node, session.acl(session.strip(node)))
            for node in open_nodes
        ],
        "a change of ACLs",
    )
    changed = 0
    for node, result in zip(open_nodes, results, strict=True):
        if not _is_skipped(session, node, result):
            changed += 1
    return changed


def _is_skipped(session: ZkSession, node: str, result: Any) -> bool:
    """True if the request for the node failed, and the node needs no ACL of the cluster.

    It was deleted during the visit, or a worker has closed it. Any other error is raised.
    """
    if not isinstance(result, Exception):
        return False
    is_workers = isinstance(result, InvalidRequest) and worker_may_have_made(session.strip(node))
    if isinstance(result, NoNodeError) or is_workers:
        return True
    raise result


def close_top(session: ZkSession) -> None:
    """Keep all but the session's first user from changing nodes beside the root.

    For a ZooKeeper of this cluster alone. The server creates some nodes, which are open to all
    users until then.
    """
    # Not "auth": that would include the name in this client's certificate.
    own_acl = session.acl("/")
    assert own_acl is not None, "a session without users cannot close a node"
    acl = [*own_acl, *READ_ACL_UNSAFE]
    for node in ("/zookeeper/quota", "/zookeeper", "/"):
        former_acl, _ = session.call(
            lambda client, node=node: client.get_acls_async(node), f"the ACL of {node}"
        )
        if former_acl == acl:
            continue
        try:
            session.call(
                lambda client, node=node: client.set_acls_async(node, acl), f"the ACL of {node}"
            )
        except InvalidRequest:
            # A node that is closed may belong to a secret that has been changed since.
            if _all_may_change(former_acl):
                raise


def _location(state: ClusterState) -> str:
    """Root and servers of a state, for errors."""
    session = getattr(state, "session", None)
    if isinstance(session, ZkSession):
        return f"{session.root or '/'} in ZooKeeper at {session.hosts}"
    return "the cluster state"


def find_cluster_id(state: ClusterState) -> str | None:
    """The cluster id below the root.

    ``None`` without the root or without an id in it.
    """
    raw = state.get_data(paths.CLUSTER_ID)
    if raw is None:
        return None
    cluster_id = raw.decode("utf-8", "replace")
    if not _CLUSTER_ID.fullmatch(cluster_id):
        raise Corrupt(
            f"{paths.CLUSTER_ID} below {_location(state)} holds no cluster id "
            f"({cluster_id!r:.80}): it was damaged or written by another program; inspect the node "
            "before removing it"
        )
    return cluster_id


def check_cluster_id(state: ClusterState, expected: str | None = None) -> str:
    """The cluster id of the root, which must be ``expected`` if that is given.

    Raises ``Unavailable`` if the root is absent or has no id, ``Conflict`` if it has another id. No
    node is created or changed.
    """
    cluster_id = find_cluster_id(state)
    location = _location(state)
    if cluster_id is None:
        raise Unavailable(
            f"{location} holds no cluster: nothing was created or removed; check "
            "storm.zookeeper.root and .servers, or restore ZooKeeper's state, or create a cluster "
            "with dev, zookeeper or a new nimbus"
        )
    if expected is not None and cluster_id != expected:
        raise Conflict(
            f"{location} belongs to cluster {cluster_id}, this process to {expected}: nothing was "
            "changed; check storm.zookeeper.root and .servers, or give this process an empty local "
            "state"
        )
    return cluster_id


def create_cluster_root(state: ClusterState, cluster_id: str) -> None:
    """Create the root, its first-level nodes and ``/cluster_id``.

    It is not an error if the root of the same cluster exists. The first-level nodes and the id are
    created in one transaction, so that a root either has an id and all of them, or is not a cluster
    yet. Raises ``Conflict`` if the root belongs to another cluster.
    """
    if not _CLUSTER_ID.fullmatch(cluster_id):
        raise InvalidRequest(
            f"cluster id {cluster_id!r:.80} may hold 1 to 100 letters, digits and any of ._-: "
            "choose another"
        )
    session = getattr(state, "session", None)
    if isinstance(session, ZkSession):
        create_root_node(session)
    for _ in range(10):
        if find_cluster_id(state) is not None:
            check_cluster_id(state, cluster_id)
            # A root of an earlier release may lack some of them.
            for path in paths.FIRST_LEVEL:
                state.mkdirs(path)
            return
        transaction = state.transaction()
        for path in paths.FIRST_LEVEL:
            if not state.exists(path):
                transaction.create(path)
        transaction.create(paths.CLUSTER_ID, cluster_id.encode())
        with suppress(Conflict):
            transaction.commit()
            return
    raise Conflict(f"others create {_location(state)} at the same time: retry")
