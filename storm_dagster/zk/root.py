"""Root node of the cluster: creation, and refusal of one that is absent or another cluster's.

Absence is not an order (``docs/decisions.md#absence-is-not-an-order``): a missing root or cluster
id means a wrong path, a wrong ensemble or wiped state, and never that there is nothing to run. Only
an explicit command creates it.
"""

import re
import ssl
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate

from kazoo.exceptions import KazooException, NoAuthError, NodeExistsError, NoNodeError
from kazoo.security import CREATOR_ALL_ACL, READ_ACL_UNSAFE

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt, InvalidRequest, Unavailable
from storm_dagster.model.records import StateHome, encode_record
from storm_dagster.security.zookeeper_access import worker_may_have_made
from storm_dagster.zk.cluster_state import ClusterState, ZooKeeperClusterState
from storm_dagster.zk.connection import make_client
from storm_dagster.zk.session import ZkSession

_CLUSTER_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")


def create_root_node(session: ZkSession) -> None:
    """Create the bare root path of the session where it is missing, and nothing in it."""
    for node in accumulate(f"/{part}" for part in session.root.split("/") if part):
        with suppress(NodeExistsError):
            session.call(
                lambda c, node=node: c.create_async(node, b"", session.acl("/")),
                f"the creation of {node}",
            )


def refuse_open_root(session: ZkSession) -> None:
    """Raise ``Conflict`` when others than this session's user may change the root or a node right
    below it, or its workers cannot enter it.

    A root that does not exist is no error: it will be created closed.
    """
    below = [
        session.root or "/",
        *(session.full(path) for path in (*paths.FIRST_LEVEL, paths.CLUSTER_ID)),
    ]
    answers = session.pipeline(
        [lambda c, node=node: c.get_acls_async(node) for node in below], "a read of ACLs"
    )
    for node, answer in zip(below, answers, strict=True):
        if isinstance(answer, NoNodeError) or (node == "/" and not session.root):
            continue
        if isinstance(answer, Exception):
            raise answer
        # Permission 1 is to read; everything else changes something.
        if any(each.id.scheme == "world" and each.perms & ~1 for each in answer[0]):
            raise Conflict(
                f"{node} in ZooKeeper at {session.hosts} may be changed by everybody (world:anyone) although "
                "this cluster has a secret: stop it and close its nodes with `storm-dagster daemon zookeeper secure`, or use a new "
                "storm.zookeeper.root"
            )
        allowed = {each.id.id for each in answer[0]}
        if (
            node == below[-1]
            and session.users
            and not allowed.intersection([*session.users.acl(paths.CLUSTER_ID)][1:])
        ):
            raise Conflict(
                f"{session.root or '/'} in ZooKeeper at {session.hosts} is closed to this cluster's workers, which have users "
                "of their own: run `storm-dagster daemon zookeeper secure` once (an earlier release left it so, or another secret)"
            )


def is_open_to_all(hosts: str, root: str, tls: ssl.SSLContext | None) -> bool:
    """Whether a client without credentials may change the root node there, if there is one."""
    client, _ = make_client(hosts, 5000, tls=tls)
    try:
        client.start(5)
        return any(
            each.id.scheme == "world" and each.perms & ~1
            for each in (client.get_acls(root or "/") or [()])[0]
        )
    except (NoAuthError, NoNodeError):
        return False
    except (KazooException, client.handler.timeout_exception) as error:
        raise Unavailable(f"ZooKeeper at {hosts} did not answer: {type(error).__name__}") from None
    finally:
        client.stop()
        client.close()


def secure_root(session: ZkSession, progress: Callable[[int], None] = lambda done: None) -> int:
    """Give the root and all nodes below it the ACL that the session's users give to new ones; how
    many were changed.

    May be interrupted and repeated: a node's children are closed before the node. ``progress`` is
    called with the number of nodes looked at. What a worker has closed to the cluster is left as it
    is.
    """
    changed, seen = 0, 0

    def visit(node: str) -> None:
        nonlocal changed, seen
        try:
            children = session.call(
                lambda client: client.get_children_async(node), f"the children of {node}"
            )
            # Last the one by which daemons tell that all others were done.
            for child in sorted(children, key=lambda name: name == paths.CLUSTER_ID[1:]):
                if (node, child) == ("/", "zookeeper"):
                    continue  # The server's own.
                visit(f"{node.rstrip('/')}/{child}")
            found, _ = session.call(
                lambda client: client.get_acls_async(node), f"the ACL of {node}"
            )
            acl = session.acl(session.strip(node))
            if found != acl:
                session.call(lambda client: client.set_acls_async(node, acl), f"the ACL of {node}")
                changed += 1
        except NoNodeError:
            return  # It went meanwhile.
        except InvalidRequest:
            if not worker_may_have_made(session.strip(node)):
                raise
        seen += 1
        progress(seen)

    state = ZooKeeperClusterState(session)
    for topology_id in state.find_children(paths.TOPOLOGY) or ():
        # Workers of an earlier release made it themselves.
        if not state.exists(paths.state_home(topology_id)):
            state.create_node(paths.state_home(topology_id), encode_record(StateHome(marker="")))
    visit(session.root or "/")
    return changed


def close_top(session: ZkSession) -> None:
    """Keep all but the session's users from changing nodes beside the root; for a ZooKeeper of this
    cluster alone.

    The server makes nodes of its own, which are open to everyone until then.
    """
    acl = [*CREATOR_ALL_ACL, *READ_ACL_UNSAFE]
    for node in ("/zookeeper/quota", "/zookeeper", "/"):
        found, _ = session.call(
            lambda client, node=node: client.get_acls_async(node), f"the ACL of {node}"
        )
        # One that is closed may belong to a secret that was changed since.
        if any(each.id.scheme == "world" and each.perms & ~1 for each in found):
            session.call(
                lambda client, node=node: client.set_acls_async(node, acl), f"the ACL of {node}"
            )


def _place(state: ClusterState) -> str:
    session = getattr(state, "session", None)
    if isinstance(session, ZkSession):
        return f"{session.root or '/'} in ZooKeeper at {session.hosts}"
    return "the cluster state"


def find_cluster_id(state: ClusterState) -> str | None:
    """The cluster id below the root; ``None`` without the root or without an id in it."""
    raw = state.get_data(paths.CLUSTER_ID)
    if raw is None:
        return None
    found = raw.decode("utf-8", "replace")
    if not _CLUSTER_ID.fullmatch(found):
        raise Corrupt(
            f"{paths.CLUSTER_ID} below {_place(state)} holds no cluster id ({found!r:.80}): "
            "it was damaged or written by something else; inspect the node before removing it"
        )
    return found


def check_cluster_id(state: ClusterState, expected: str | None = None) -> str:
    """The cluster id of the root, which must be ``expected`` when that is given.

    Raises ``Unavailable`` when the root is absent or has no id, ``Conflict`` when the id is another
    one. Nothing is created or changed.
    """
    found = find_cluster_id(state)
    where = _place(state)
    if found is None:
        raise Unavailable(
            f"{where} holds no cluster: nothing was created or removed; check storm.zookeeper.root and "
            ".servers, or restore ZooKeeper's state, or create a cluster with dev, zookeeper or a new nimbus"
        )
    if expected is not None and found != expected:
        raise Conflict(
            f"{where} belongs to cluster {found}, this process to {expected}: nothing was changed; "
            "check storm.zookeeper.root and .servers, or give this process an empty local state"
        )
    return found


def create_cluster_root(state: ClusterState, cluster_id: str) -> None:
    """Create the root, its first-level nodes and ``/cluster_id``; creating the same cluster again
    is no error.

    The first-level nodes and the id are made in one transaction, so that a root either has an id
    and all of them, or is not a cluster yet. Raises ``Conflict`` when the root belongs to another
    cluster.
    """
    if not _CLUSTER_ID.fullmatch(cluster_id):
        raise InvalidRequest(
            f"cluster id {cluster_id!r:.80} may hold 1 to 100 letters, digits and any of ._-: choose another"
        )
    session = getattr(state, "session", None)
    if isinstance(session, ZkSession):
        create_root_node(session)
    for _ in range(10):
        if find_cluster_id(state) is not None:
            check_cluster_id(state, cluster_id)
            # An older version of the layout may lack some.
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
    raise Conflict(f"others create {_place(state)} at the same time: try again")
