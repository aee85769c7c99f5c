"""A real cluster state whose ZooKeeper server is behind the others, until it is synchronized."""

from __future__ import annotations

from typing import Any

from storm_dagster.zk.storm_cluster_state import StormClusterState


class LaggingState:
    """Real ZooKeeper behind it; ``sync_path`` ends the lag."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.lags = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def sync_path(self, path: str) -> None:
        self._state.sync_path(path)
        self.lags = False


class LaggingCluster:
    """The cluster state over a :class:`LaggingState`; while it lags, it has the former epoch."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.state = LaggingState(cluster.state)
        self._former = cluster.epoch()

    fenced = StormClusterState.fenced  # over the state above

    def epoch(self) -> Any:
        return self._former if self.state.lags else self._cluster.epoch()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)
