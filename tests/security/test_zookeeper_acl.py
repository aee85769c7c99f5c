"""ZooKeeper's nodes belong to the cluster alone when it has a user there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, InvalidRequest
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.storm_cluster_state import StormClusterState

pytestmark = pytest.mark.zookeeper
USER = "storm:planted-zookeeper-password"


def secured(zk_conf: dict[str, Any], user: str = USER) -> dict[str, Any]:
    return {**zk_conf, "storm.zookeeper.auth.payload": user}


def test_an_outsider_neither_reads_nor_writes(zk_conf: dict[str, Any], zk_connect: Callable[..., ZkSession]) -> None:
    with StormClusterState.open(secured(zk_conf), create_root=True) as mine:
        mine.state.create_node("/tasks/wc-1-1", b"table")
        mine.state.set_ephemeral_node("/workers/wc-1-1/s1-6900", b"worker")
        mine.state.transaction().create("/topology/wc-1-1", b"base").commit()
        for outsider in (zk_connect(), zk_connect(auth="storm:another-password")):
            state = ZooKeeperClusterState(outsider)
            for path in (paths.CLUSTER_ID, "/tasks/wc-1-1", "/topology/wc-1-1", "/workers/wc-1-1/s1-6900"):
                with pytest.raises(InvalidRequest, match="credentials"):
                    state.get_data(path)
                with pytest.raises(InvalidRequest, match="credentials"):
                    state.set_data(path, b"forged")
            with pytest.raises((InvalidRequest, Conflict)):
                state.transaction().create(paths.NIMBUS_MASTER, b"me:1", ephemeral=True).commit()
            with pytest.raises(InvalidRequest, match="credentials"):
                state.delete_node("/tasks")
        assert mine.state.get_data("/tasks/wc-1-1") == b"table"


def test_the_user_is_shown_again_in_a_new_connection(zk_conf: dict[str, Any]) -> None:
    with StormClusterState.open(secured(zk_conf), create_root=True) as mine:
        mine.session.drop_link()
        assert mine.cluster_id() and mine.state.get_data(paths.CLUSTER_ID)
    with StormClusterState.open(secured(zk_conf)) as again:
        assert again.cluster_id()


def test_an_open_root_is_refused_once_a_user_is_configured(zk_conf: dict[str, Any]) -> None:
    with StormClusterState.open(zk_conf, create_root=True):
        pass
    with pytest.raises(Conflict, match=r"world:anyone.*setAcl"):
        StormClusterState.open(secured(zk_conf))
    with StormClusterState.open(zk_conf) as unchanged:
        assert unchanged.cluster_id()


def test_a_payload_of_another_form_is_refused(zk_conf: dict[str, Any]) -> None:
    for wrong in ("storm", "storm:", ":p"):
        with pytest.raises(InvalidRequest, match="user:password") as refused:
            StormClusterState.open(secured(zk_conf, wrong))
        assert wrong not in refused.value.message.replace("user:password", "") or wrong == "storm"
