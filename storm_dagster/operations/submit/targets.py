"""Checks of the topology that a submission makes or replaces."""

import hashlib

from storm_dagster.model.errors import Conflict, NotAlive
from storm_dagster.model.records import StormBase, encode_record
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import check_name_free
from storm_dagster.operations.submit.staging import StagingRecord


def check_target(view: ClusterView, record: StagingRecord) -> None:
    """Check that the submission may still be published.

    :class:`AlreadyAlive` if another topology has the name. For a replacement, :class:`NotAlive` if
    the former topology is gone, :class:`Conflict` if it has another status or other code by now.
    """
    remedy = "another submission of the name came first; kill it, or use another name"
    check_name_free(view, record.name, (record.topology_id, record.replaces), remedy)
    if record.replaces is None:
        return
    replaced = view.topologies.get(record.replaces)
    if replaced is None or replaced.base.status == "KILLED":
        raise NotAlive(
            f"topology {record.replaces} was killed while its replacement was prepared: "
            f"submit {record.name!r} again"
        )
    # A status change that another caller has made since is not undone.
    check_replaceable(replaced)
    if record.former not in ("", replaced.code_dir):
        raise Conflict(
            f"topology {record.name!r} got other code while this was prepared: try again"
        )


def base_digest(base: StormBase) -> str:
    """Digest of a topology's record, without the traces of a drain.

    A drain for a replacement pauses the spouts, and ends with the former status.
    """
    undrained = base.model_copy(
        update={"status": base.wanted_status, "previous_status": None, "delay_secs": None}
    )
    return hashlib.sha256(encode_record(undrained)).hexdigest()[:16]


def check_replaceable(topology: TopologyView, doing: str = "replaced") -> None:
    """Raise :class:`Conflict` unless the topology is ACTIVE or INACTIVE.

    In another status a change of it is under way, and it cannot be replaced. :class:`NotAlive` if
    it is killed.
    """
    if topology.base.status == "KILLED":
        raise NotAlive(
            f"topology {topology.base.name!r} is KILLED and cannot be {doing}: "
            "wait until it is gone, and submit it again"
        )
    if topology.base.status not in ("ACTIVE", "INACTIVE"):
        raise Conflict(
            f"topology {topology.base.name!r} is {topology.base.status} and cannot be {doing}: "
            "wait until it has finished"
        )
