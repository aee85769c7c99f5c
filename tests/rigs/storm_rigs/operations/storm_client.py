"""Storm's own operations on the cluster of a test, for state that no daemon of the test writes."""

from __future__ import annotations

from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_dagster.zk.storm_operations import StormOperations


def as_storm(cluster: StormClusterState) -> StormOperations:
    """Storm's operations in the session of ``cluster``; they end with it."""
    return StormOperations(cluster.state, cluster.cluster_id(), owns_state=False)
