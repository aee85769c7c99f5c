"""A real cluster state whose ZooKeeper loses the answer to one commit, and is away for a moment
afterwards.
"""

from __future__ import annotations

from typing import Any

from storm_dagster.model.errors import Unavailable
from storm_dagster.zk.storm_cluster_state import StormClusterState


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
    """The cluster state over a :class:`LosingState`; after the lost answer ``away`` views cannot be
    read either.
    """

    def __init__(self, cluster: Any, number: int, landed: bool, away: int = 0) -> None:
        self._cluster = cluster
        self.state = LosingState(cluster.state, number, landed)
        self.away = away

    fenced = StormClusterState.fenced  # over the state above

    def load_view(self) -> Any:
        if self.state.left <= 0 and self.away:
            self.away -= 1
            raise Unavailable("the connection is down")
        return self._cluster.load_view()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)
