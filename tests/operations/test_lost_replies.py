"""ZooKeeper's answer to a commit is lost, whether the commit landed or not: nothing is ever doubled."""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import Unavailable
from storm_dagster.operations.live import lifecycle
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_dagster.zk.transaction import Transaction
from storm_rigs.acting import submit
from storm_rigs.world import World

pytestmark = pytest.mark.zookeeper


class LosingState:
    """Real ZooKeeper behind it; the nth commit loses its answer, before or after it lands."""

    def __init__(self, state: Any, number: int, landed: bool) -> None:
        self._state = state
        self.left = number
        self.landed = landed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def transaction(self) -> Any:
        transaction = self._state.transaction()
        commit = transaction.commit

        def losing() -> Any:
            self.left -= 1
            if self.left == 0:
                if self.landed:
                    commit()
                raise Unavailable("the connection was lost")
            return commit()

        transaction.commit = losing  # type: ignore[method-assign]
        return transaction


class LosingCluster:
    """The cluster state over a :class:`LosingState`."""

    def __init__(self, cluster: Any, number: int, landed: bool) -> None:
        self._cluster = cluster
        self.state = LosingState(cluster.state, number, landed)

    fenced = StormClusterState.fenced  # over the state above

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)


@pytest.mark.parametrize("landed", [True, False])
def test_a_lost_reply_is_read_again_and_never_doubles_anything(world: World, landed: bool) -> None:
    assert isinstance(world.cluster.state.transaction(), Transaction)
    for number in (1, 2, 3):
        cluster = LosingCluster(world.cluster, number, landed)
        name = f"wc{number}"
        submit(world.context(cluster=cluster), name=name, token=f"t{number}", handle=world.upload(f"h{number}"))
        assert cluster.state.left <= 0
        (topology,) = world.cluster.load_view().topologies.values()
        assert topology.base.status == "ACTIVE"
        assert len(world.cluster.state.get_children(paths.TOKENS)) == number
        lifecycle.kill(world.context(), name, 0)
