"""One deploy of a declared topology at a time, also when the session of one is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from storm_dagster.defs.declared.deploy import deploy_lock
from storm_dagster.model import paths
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.storm_cluster_state import StormClusterState

pytestmark = pytest.mark.zookeeper


def test_a_deploy_that_lost_its_session_leaves_the_next_ones_node(
    zk_cluster: StormClusterState,
    zk_conf: dict[str, object],
    zk_expire: Callable[[ZkSession], None],
) -> None:
    other = StormClusterState.open(zk_conf)
    path = paths.deploy("wc")
    try:
        with deploy_lock(other, "wc", "1", "run-1", print) as first:
            assert first
            zk_expire(other.session)
            eventually(lambda: not zk_cluster.state.exists(path), 10)
            assert zk_cluster.state.claim_ephemeral_node(path, b"{}")
            eventually(lambda: other.session.connected, 10)
        assert zk_cluster.state.owned(path)
    finally:
        other.disconnect()
