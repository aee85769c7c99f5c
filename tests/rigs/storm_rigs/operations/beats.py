"""Heartbeat records of topologies as they are stored, for tests."""

from __future__ import annotations

from storm_dagster.model import paths
from storm_dagster.model.records import TaskBeats, decode_record
from storm_dagster.zk.storm_cluster_state import StormClusterState


def read_beats(cluster: StormClusterState, topology_id: str) -> TaskBeats | None:
    """``/taskbeats/<id>``; ``None`` without one."""
    raw = cluster.state.get_data(paths.taskbeats(topology_id))
    return decode_record(TaskBeats, raw) if raw else None
