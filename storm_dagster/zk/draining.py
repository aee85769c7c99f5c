"""Supervisors that drain, by their records."""

from contextlib import suppress

from storm_dagster.model import paths
from storm_dagster.model.errors import Corrupt
from storm_dagster.model.records import SupervisorInfo, decode_record
from storm_dagster.zk.state_protocol import ClusterState


def read_draining(state: ClusterState) -> dict[str, bool]:
    """Supervisor id -> true if it drains, of every registered supervisor.

    It takes two round trips for any number of supervisors. A damaged record is left out.
    """
    ids = sorted(state.find_children(paths.SUPERVISORS) or [])
    record_paths = [paths.supervisor(supervisor_id) for supervisor_id in ids]
    draining: dict[str, bool] = {}
    for supervisor_id, path, node in zip(
        ids, record_paths, state.get_many(record_paths), strict=True
    ):
        if node is None:
            continue
        raw, _ = node
        with suppress(Corrupt):
            draining[supervisor_id] = decode_record(SupervisorInfo, raw, path).draining
    return draining
