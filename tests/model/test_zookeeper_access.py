"""What the workers of a topology may do to each node, and the ACL that follows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kazoo.security import make_digest_acl_credential

from storm_dagster.model import paths
from storm_dagster.security.zookeeper_access import (
    ALL,
    CREATE,
    DELETE,
    PAYLOAD,
    READ,
    SUPER_ACL,
    WRITE,
    ZooKeeperUsers,
    digest_of,
    worker_may_have_made,
    worker_permissions,
)

FIRST = [value for name, value in vars(paths).items() if name.isupper() and isinstance(value, str)]
IDS = st.builds(
    "{}-{}-{}".format,
    st.text("abZ0_.-", min_size=1, max_size=8),
    st.integers(1, 99),
    st.integers(1, 2**33),
)
NAMES = st.sampled_from(
    ["log_levels", "state", "rebalance", "conf", "upgrading_workers", "e0000000001", "s1-6900", "c"]
)
PATHS = st.builds(
    lambda first, rest: "/".join([first, *rest]),
    st.sampled_from(FIRST),
    st.lists(st.one_of(IDS, NAMES), max_size=4),
)
CHANGED_BY_WORKERS = (paths.WORKERS, paths.TASKBEATS, paths.TASKERRORS, paths.METRICS)


@given(PATHS)
def test_only_what_is_below_a_topology_is_its_workers(path: str) -> None:
    topology_id, permissions = worker_permissions(path)
    parts = path[1:].split("/")
    assert not permissions & ~(READ | WRITE | CREATE | DELETE), "nobody else changes an ACL"
    if path in (paths.CLUSTER_ID, paths.EPOCH):
        assert (topology_id, permissions) == ("", READ)
    elif permissions:
        assert topology_id == parts[1], "another's node"
    if permissions & ~READ:
        assert f"/{parts[0]}" in CHANGED_BY_WORKERS or path == paths.state_home(topology_id)
    if f"/{parts[0]}" in (
        paths.GRAY_UPGRADE,
        paths.SUPERVISORS,
        paths.BLOBSTORE,
        paths.TOKENS,
        paths.NIMBUS_MASTER,
    ):
        assert permissions == 0, "it names the code that supervisors run, or who they are"


@given(PATHS, IDS)
def test_the_ids_of_topologies_do_not_matter(path: str, other: str) -> None:
    parts = path[1:].split("/")
    moved = "/" + "/".join([parts[0], other, *parts[2:]])
    if len(parts) > 1:
        assert worker_permissions(moved)[1] == worker_permissions(path)[1]
        assert worker_permissions(path.replace("/", "//") + "/") == worker_permissions(path)


@given(PATHS, IDS)
def test_daemons_and_workers_give_a_node_the_same_acl(path: str, other: str) -> None:
    daemon, before, own = (
        ZooKeeperUsers("storm:new\nstorm:old"),
        ZooKeeperUsers("storm:old"),
        digest_of("storm:new"),
    )
    acl, (topology_id, permissions) = daemon.acl(path), worker_permissions(path)
    assert next(iter(acl.items())) == (own, ALL) and len(acl) == (3 if permissions else 1)
    assert {may for digest, may in acl.items() if digest != own} <= {permissions}
    conf = daemon.worker_conf(topology_id or other)
    worker = ZooKeeperUsers(conf[PAYLOAD], conf[SUPER_ACL])
    assert worker.acl(path) == acl
    shown = {digest_of(line) for line in worker.lines}
    assert own not in shown and shown.issuperset(set(acl) - {own})
    # While the secret is changed, workers of before are let into new nodes, and new ones into what
    # was made before.
    old = {
        digest_of(line) for line in before.worker_conf(topology_id or other)[PAYLOAD].split("\n")
    }
    assert bool(old & set(acl)) == bool(permissions)
    assert shown.issuperset(set(before.acl(path)) - {digest_of("storm:old")})
    stranger = daemon.worker_conf(other + "x")
    if topology_id:
        assert not {digest_of(line) for line in stranger[PAYLOAD].split("\n")} & set(acl)


@given(IDS, IDS)
def test_what_a_worker_knows_betrays_nothing_else(mine: str, other: str) -> None:
    users = ZooKeeperUsers("storm:a-password")
    known = str(users.worker_conf(mine))
    assert "a-password" not in known and "a-password" not in repr(users)
    if mine != other:
        theirs = users.worker_conf(other)[PAYLOAD].split("\n")
        assert theirs[0] not in known and theirs[1] in known, "the last is that of all workers"


def test_a_digest_is_zookeepers() -> None:
    assert digest_of("storm:a:b") == make_digest_acl_credential("storm", "a:b")


@pytest.mark.parametrize(
    ("path", "made"),
    [
        (paths.worker("a-1-1", "s1", 6900), True),
        (paths.task_errors("a-1-1", "c"), True),
        (f"{paths.task_errors('a-1-1', 'c')}/e1/deeper", True),
        (paths.workers("a-1-1"), False),
        (paths.WORKERS, False),
        (paths.state_home("a-1-1"), False),
        (paths.assignment("a-1-1"), False),
        (f"{paths.gray_upgrade('a-1-1', 'upgrading_workers')}/h:1", False),
        ("/", False),
    ],
)
def test_which_nodes_workers_may_have_made(path: str, made: bool) -> None:
    assert worker_may_have_made(path) == made
