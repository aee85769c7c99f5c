"""Code of live topologies, which the leader neither removes nor replaces for any caller."""

from contextlib import suppress

from storm_dagster.model.errors import Conflict, Corrupt
from storm_dagster.model.names import code_dir_of_blob_key, code_keys, id_of_blob_key
from storm_dagster.zk.storm_cluster_state import StormClusterState


def check_removable(cluster: StormClusterState, key: str) -> None:
    """Raise :class:`Conflict` if workers of a live topology may be started from the blob."""
    topology_id = _topology_in_use(cluster, key)
    if topology_id is not None:
        raise Conflict(
            f"blob {key!r} is the code of topology {topology_id}, which is alive: kill the "
            "topology, or update it"
        )


def check_code_unchanged(
    cluster: StormClusterState, key: str, sha256: str | None, stored: str | None
) -> None:
    """Raise :class:`Conflict` if a write would change code of a live topology.

    ``sha256`` is the hash of the new content, ``stored`` that of the current one; ``None`` if it is
    not known. Content that the topology runs may be written again: it repairs a damaged blob.
    """
    topology_id = _topology_in_use(cluster, key)
    if topology_id is None:
        return
    running: str | None = None
    with suppress(Corrupt):
        assignment = cluster.assignment_info(topology_id)
        if assignment is not None:
            running = assignment.code.get(key)
    if running is None:
        with suppress(Corrupt):
            record = cluster.read_upgrade(topology_id).record
            if record is not None:
                running = record.code.get(key)
    # Records of an earlier release name no hash: then the stored content is the code.
    expected = running or stored
    if expected is not None and sha256 != expected:
        raise Conflict(
            f"blob {key!r} is the code of topology {topology_id}, which is alive: update the "
            "topology, it gets other code by a new version"
        )


def _topology_in_use(cluster: StormClusterState, key: str) -> str | None:
    """Id of the live topology that uses the blob as its code; ``None`` if none does.

    Unreadable records count as in use: it cannot be seen then what workers are started from.
    """
    topology_id = id_of_blob_key(key)
    code_dir = code_dir_of_blob_key(key)
    if topology_id is None or code_dir is None or key not in code_keys(code_dir):
        return None
    try:
        base = cluster.storm_base(topology_id)
        if base is None or base.status == "KILLED":
            return None
        assignment = cluster.assignment_info(topology_id)
        upgrade = cluster.read_upgrade(topology_id).record
    except Corrupt:
        return topology_id
    used = {assignment.code_dir} if assignment is not None else {topology_id}
    if upgrade is not None:
        used.add(upgrade.code_dir)
    return topology_id if code_dir in used else None
