"""Store of ``/gray_upgrade/<id>``: the record of an upgrade, and the lists of its workers.

The data version of ``/gray_upgrade/<id>`` itself is the upgrade's optimistic lock. Whoever changes
the record raises it; a supervisor that moves one of its own workers checks it, so that supervisors
do not stand in each other's way but none of them acts on an upgrade that has ended or is being
rolled back. It outlives the record: versions of a later upgrade are never taken for those of an
earlier one.
"""

from collections.abc import Iterable

from storm_dagster.core.upgrade.machine import Move, Pick
from storm_dagster.model import paths
from storm_dagster.model.records import GrayUpgrade, GrayWorker, decode_record, encode_record
from storm_dagster.model.view import UpgradeState
from storm_dagster.zk.state_protocol import ClusterState, read_children
from storm_dagster.zk.transaction import Transaction, conflict

UPGRADING = "upgrading_workers"
UPGRADED = "upgraded_workers"


def read_upgrade(state: ClusterState, topology_id: str, watch: bool = False) -> UpgradeState:
    """The upgrade as it is; with ``watch`` the next change of the record is notified."""
    found = state.get_data_with_version(paths.gray_upgrade(topology_id), watch)
    if found is None:
        return UpgradeState()
    path = paths.gray_upgrade(topology_id, "conf")
    raw = state.get_data(path)
    if not raw:
        return UpgradeState(at=found[1].version)
    record = decode_record(GrayUpgrade, raw, path)
    upgrading = _workers(state, topology_id, UPGRADING)
    return UpgradeState(found[1].version, record, upgrading, _workers(state, topology_id, UPGRADED))


def upgrades_under_way(state: ClusterState) -> list[str]:
    """Ids of the topologies that have an upgrade record, sorted; two round trips, however many
    there are.
    """
    ids = state.find_children(paths.GRAY_UPGRADE) or []
    parts = state.find_children_many([paths.gray_upgrade(each) for each in ids])
    return [each for each, found in zip(ids, parts, strict=True) if found and "conf" in found]


def _workers(state: ClusterState, topology_id: str, part: str) -> dict[str, GrayWorker]:
    parent = paths.gray_upgrade(topology_id, part)
    return {
        name: decode_record(GrayWorker, raw, f"{parent}/{name}") if raw else GrayWorker()
        for name, (raw, _) in read_children(state, parent).items()
    }


def listed_nodes(state: ClusterState, topology_id: str) -> Iterable[str]:
    """Paths of all workers in both lists."""
    for part in (UPGRADING, UPGRADED):
        parent = paths.gray_upgrade(topology_id, part)
        for name in state.find_children(parent) or ():
            yield f"{parent}/{name}"


def create_lists_ops(transaction: Transaction, state: ClusterState, topology_id: str) -> None:
    """Append creations of the lists that the topology's earlier upgrades have not left."""
    for part in (UPGRADING, UPGRADED):
        parent = paths.gray_upgrade(topology_id, part)
        if not state.exists(parent):
            transaction.create(parent)


def put_record_ops(
    transaction: Transaction, topology_id: str, state: UpgradeState, record: GrayUpgrade | None
) -> Transaction:
    """Append operations that replace the record read in ``state``; ``None`` removes it."""
    path = paths.gray_upgrade(topology_id, "conf")
    transaction.set(paths.gray_upgrade(topology_id), b"", state.at)
    if record is None:
        return transaction.delete(path)
    # The lock above decides who writes: any version.
    return transaction.put(path, encode_record(record), None if state.record is None else -1)


def write_pick(
    state: ClusterState,
    topology_id: str,
    read: UpgradeState,
    batch: Pick,
    *,
    epoch: int,
    assignment_version: int,
) -> None:
    """Write the next batch, and the record afterwards.

    ``Fenced`` when the epoch is over, ``Conflict`` when the assignment or the upgrade moved on.
    """
    transaction = state.transaction().check(paths.EPOCH, epoch)
    transaction.check(paths.assignment(topology_id), assignment_version)
    put_record_ops(transaction, topology_id, read, batch.record)
    parent = paths.gray_upgrade(topology_id, UPGRADING)
    for worker in batch.workers:
        transaction.create(f"{parent}/{worker}", encode_record(GrayWorker()))
    transaction.commit()


def write_move(state: ClusterState, topology_id: str, read: UpgradeState, move: Move) -> None:
    """A supervisor's write about one of its own workers; ``Conflict`` when the upgrade moved on."""
    head = paths.gray_upgrade(topology_id)
    if move.worker not in {**read.upgrading, **read.upgraded}:
        raise conflict(
            f"{move.worker} is in no list of the upgrade of {topology_id}: read again", head
        )
    part = UPGRADING if move.worker in read.upgrading else UPGRADED
    here = f"{paths.gray_upgrade(topology_id, part)}/{move.worker}"
    transaction = state.transaction().check(head, read.at)
    if move.kind == "failed":
        transaction.set(here, encode_record(move.record), -1)
    else:
        transaction.delete(here)
    if move.kind == "upgraded":
        transaction.create(
            f"{paths.gray_upgrade(topology_id, UPGRADED)}/{move.worker}", encode_record(move.record)
        )
    transaction.commit()
