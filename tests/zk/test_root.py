"""Absence is not an order: what is done, and mostly not done, with a missing or foreign root."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from kazoo.client import KazooClient
from kazoo.security import ACL, Id, Permissions

from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt, InvalidRequest, Unavailable
from storm_dagster.testing.waiting import patience
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.root import (
    check_cluster_id,
    create_cluster_root,
    create_root_node,
    find_cluster_id,
    is_open_to_all,
)
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.storm_cluster_state import StormClusterState, zookeeper_hosts

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(60)]

Connect = Callable[..., ZkSession]


def test_opening_an_absent_root_creates_nothing(
    zk_conf: dict[str, object], zk_connect: Connect
) -> None:
    with pytest.raises(Unavailable, match="no cluster"):
        StormClusterState.open(zk_conf)
    with pytest.raises(Unavailable):
        StormClusterState.open(zk_conf, cluster_id="c1")
    assert not ZooKeeperClusterState(zk_connect()).exists("/")


def test_an_empty_root_is_refused_as_well(zk_state: ZooKeeperClusterState) -> None:
    with pytest.raises(Unavailable):
        StormClusterState.open(zk_state)
    assert zk_state.get_children("/") == []


def test_create_root_makes_all_first_level_nodes(zk_conf: dict[str, object]) -> None:
    with StormClusterState.open(zk_conf, create_root=True) as cluster:
        assert cluster.state.get_children("/") == sorted(
            path[1:] for path in (*paths.FIRST_LEVEL, paths.CLUSTER_ID)
        )
        made = cluster.cluster_id()
    with StormClusterState.open(zk_conf, create_root=True) as again:
        assert again.cluster_id() == made
    with StormClusterState.open(load_cluster_conf(overrides=zk_conf)) as plain:
        assert plain.cluster_id() == made
        plain.check_cluster_id()


def test_a_foreign_cluster_is_refused_and_left_alone(zk_conf: dict[str, object]) -> None:
    StormClusterState.open(zk_conf, create_root=True, cluster_id="ours").disconnect()
    for create in (False, True):
        with pytest.raises(Conflict, match="theirs"):
            StormClusterState.open(zk_conf, create_root=create, cluster_id="theirs")
    with StormClusterState.open(zk_conf, cluster_id="ours") as cluster:
        assert cluster.cluster_id() == "ours"


def test_creation_is_idempotent_and_restores_missing_folders(zk_connect: Connect) -> None:
    session = zk_connect()
    create_cluster_root(ZooKeeperClusterState(session), "c1")
    state = ZooKeeperClusterState(session)
    state.delete_node(paths.TOKENS)
    create_cluster_root(ZooKeeperClusterState(session), "c1")
    assert state.exists(paths.TOKENS)
    with pytest.raises(Conflict):
        create_cluster_root(ZooKeeperClusterState(session), "c2")
    assert find_cluster_id(ZooKeeperClusterState(session)) == "c1"
    with pytest.raises(InvalidRequest):
        create_cluster_root(ZooKeeperClusterState(session), "not/an id")


def test_a_root_of_several_elements(zk_connect: Connect, zk_root: str) -> None:
    session = zk_connect(root=f"{zk_root}/deep/er")
    create_root_node(session)
    create_root_node(session)
    create_cluster_root(ZooKeeperClusterState(session), "c1")
    assert check_cluster_id(ZooKeeperClusterState(session), "c1") == "c1"
    assert ZooKeeperClusterState(zk_connect()).get_children("/") == ["deep"]


def test_racing_creators_agree_on_one_id(zk_conf: dict[str, object]) -> None:
    ids: list[str] = []

    def create() -> None:
        with StormClusterState.open(zk_conf, create_root=True) as cluster:
            ids.append(cluster.cluster_id())

    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            create()
        except Conflict as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == []
    assert len(ids) == 4
    assert len(set(ids)) == 1


def test_a_damaged_id_is_corrupt_and_not_replaced(zk_state: ZooKeeperClusterState) -> None:
    zk_state.set_data(paths.CLUSTER_ID, b"\xff\x00")
    with pytest.raises(Corrupt):
        StormClusterState.open(zk_state)
    with pytest.raises(Corrupt):
        StormClusterState.open(zk_state, create_root=True)


def test_a_view_of_a_root_that_vanished_or_changed_hands(zk_cluster: StormClusterState) -> None:
    mine = zk_cluster.cluster_id()
    zk_cluster.state.set_data(paths.CLUSTER_ID, b"another")
    with pytest.raises(Conflict):
        zk_cluster.load_view()
    with pytest.raises(Conflict):
        zk_cluster.check_cluster_id()
    zk_cluster.state.delete_node(paths.CLUSTER_ID)
    with pytest.raises(Unavailable):
        zk_cluster.load_view()
    zk_cluster.state.set_data(paths.CLUSTER_ID, mine.encode())
    assert zk_cluster.load_view().cluster_id == mine


def test_disconnect_closes_only_what_open_made(
    zk_state: ZooKeeperClusterState, zk_conf: dict[str, object]
) -> None:
    cluster = StormClusterState.open(zk_state, create_root=True)
    cluster.disconnect()
    assert zk_state.get_children("/topology") == []
    own = StormClusterState.open(zk_conf)
    own.disconnect()
    with pytest.raises(Unavailable):
        own.state.get_children("/topology")


def test_hosts_of_a_conf() -> None:
    conf = {
        "storm.zookeeper.servers": ["a", "b:2182", "::1", "[::1]:2183"],
        "storm.zookeeper.port": 2181,
    }
    assert zookeeper_hosts(conf) == "a:2181,b:2182,[::1]:2181,[::1]:2183"
    with pytest.raises(InvalidRequest):
        zookeeper_hosts({"storm.zookeeper.servers": [], "storm.zookeeper.port": 2181})


@pytest.mark.parametrize(
    ("permissions", "expected"),
    [
        (Permissions.ALL, True),
        (Permissions.READ | Permissions.WRITE, True),
        (Permissions.READ | Permissions.CREATE, True),
        (Permissions.READ | Permissions.DELETE, True),
        (Permissions.ADMIN, True),
        (Permissions.READ, False),
    ],
)
def test_a_root_that_clients_without_a_user_may_change_is_open(
    permissions: int, expected: bool, zookeeper_server: str, zk_root: str
) -> None:
    assert not is_open_to_all(zookeeper_server, zk_root, None), "there is no such node"
    owner = ACL(Permissions.ALL, Id("auth", ""))
    world = ACL(permissions, Id("world", "anyone"))
    client = KazooClient(zookeeper_server, auth_data=[("digest", "storm:password")])
    client.start(patience(15))
    try:
        client.create(zk_root, b"", acl=[owner, world])
        assert is_open_to_all(zookeeper_server, zk_root, None) == expected
        client.delete(zk_root)
    finally:
        client.stop()
        client.close()
