"""Store of ``/gray_upgrade/<id>``: record of an upgrade, lists of its workers.

The data version of ``/gray_upgrade/<id>`` itself is the upgrade's optimistic lock. A change of the
record raises it; a supervisor that moves one of its workers checks it. So supervisors do not
disturb each other, and none of them acts on an upgrade that has ended or is being rolled back. The
node outlives the record: versions of a later upgrade are never taken for those of an earlier one.
"""

from collections.abc import Iterable

from storm_dagster.core.upgrade.machine import Move, Pick
from storm_dagster.model import paths
from storm_dagster.model.records import GrayUpgrade, GrayWorker, decode_record, encode_record
from storm_dagster.model.view import UpgradeState
from storm_dagster.zk.state_protocol import ClusterState, read_children
from storm_dagster.zk.transaction import Transaction, conflict

UPGRADING = "upgrading_workers"
"""List of the workers that have to run the new code, and do not count as upgraded yet."""
UPGRADED = "upgraded_workers"
"""List of the workers that run the new code."""


def read_upgrade(state: ClusterState, topology_id: str, watch: bool = False) -> UpgradeState:
    """Current state of an upgrade, empty without one; ``watch`` the next change of the record.

    Not at one moment: a write that follows checks :attr:`UpgradeState.at`, which is read first.
    """
    lock = state.get_data_with_version(paths.gray_upgrade(topology_id), watch)
    if lock is None:
        return UpgradeState()
    _, at = lock
    path = paths.gray_upgrade(topology_id, "conf")
    raw = state.get_data(path)
    if not raw:
        return UpgradeState(at=at.version)
    record = decode_record(GrayUpgrade, raw, path)
    upgrading = _workers(state, topology_id, UPGRADING)
    upgraded = _workers(state, topology_id, UPGRADED)
    return UpgradeState(at.version, record, upgrading, upgraded)


def upgrades_under_way(state: ClusterState) -> list[str]:
    """Ids of the topologies that have an upgrade record, sorted.

    It takes two round trips for any number of topologies.
    """
    ids = state.find_children(paths.GRAY_UPGRADE) or []
    children = state.find_children_many([paths.gray_upgrade(topology_id) for topology_id in ids])
    return [
        topology_id
        for topology_id, names in zip(ids, children, strict=True)
        if names and "conf" in names
    ]


def _workers(state: ClusterState, topology_id: str, part: str) -> dict[str, GrayWorker]:
    """Worker (``host:port``) -> its record in one of the two lists."""
    parent = paths.gray_upgrade(topology_id, part)
    workers: dict[str, GrayWorker] = {}
    for name, (raw, _) in read_children(state, parent).items():
        if raw:
            workers[name] = decode_record(GrayWorker, raw, f"{parent}/{name}")
        else:
            workers[name] = GrayWorker()
    return workers


def listed_nodes(state: ClusterState, topology_id: str) -> Iterable[str]:
    """Paths of all workers in both lists."""
    for part in (UPGRADING, UPGRADED):
        parent = paths.gray_upgrade(topology_id, part)
        for name in state.find_children(parent) or ():
            yield f"{parent}/{name}"


def create_lists_ops(transaction: Transaction, state: ClusterState, topology_id: str) -> None:
    """Append creations of the lists that do not exist.

    Earlier upgrades of the topology may have left them.
    """
    for part in (UPGRADING, UPGRADED):
        parent = paths.gray_upgrade(topology_id, part)
        if not state.exists(parent):
            transaction.create(parent)


def put_record_ops(
    transaction: Transaction, topology_id: str, state: UpgradeState, record: GrayUpgrade | None
) -> Transaction:
    """Append operations that replace the record of the upgrade that was read as ``state``.

    ``None`` removes it. They raise the optimistic lock, and conflict if it is not ``state.at``.
    """
    path = paths.gray_upgrade(topology_id, "conf")
    transaction.set(paths.gray_upgrade(topology_id), b"", state.at)
    if record is None:
        return transaction.delete(path)
    # Any version: the optimistic lock above guards the record.
    version = None if state.record is None else -1
    return transaction.put(path, encode_record(record), version)


def write_pick(
    state: ClusterState,
    topology_id: str,
    upgrade: UpgradeState,
    batch: Pick,
    *,
    epoch: int,
    assignment_version: int,
) -> None:
    """Write the next batch and the record that follows from it.

    ``upgrade`` is the state from which the batch was picked. ``Fenced`` if the epoch is over,
    ``Conflict`` if the assignment or the upgrade has changed.
    """
    transaction = state.transaction().check(paths.EPOCH, epoch)
    transaction.check(paths.assignment(topology_id), assignment_version)
    put_record_ops(transaction, topology_id, upgrade, batch.record)
    parent = paths.gray_upgrade(topology_id, UPGRADING)
    for worker in batch.workers:
        transaction.create(f"{parent}/{worker}", encode_record(GrayWorker()))
    transaction.commit()


def write_move(state: ClusterState, topology_id: str, upgrade: UpgradeState, move: Move) -> None:
    """Write a supervisor's move of one of its workers.

    ``upgrade`` is the state from which the move was decided. ``Conflict`` if it has changed.
    """
    head = paths.gray_upgrade(topology_id)
    if move.worker not in {**upgrade.upgrading, **upgrade.upgraded}:
        raise conflict(
            f"{move.worker} is in no list of the upgrade of {topology_id}: read again", head
        )
    part = UPGRADING if move.worker in upgrade.upgrading else UPGRADED
    path = f"{paths.gray_upgrade(topology_id, part)}/{move.worker}"
    transaction = state.transaction().check(head, upgrade.at)
    if move.kind == "failed":
        transaction.set(path, encode_record(move.record), -1)
    else:
        transaction.delete(path)
    if move.kind == "upgraded":
        upgraded_path = f"{paths.gray_upgrade(topology_id, UPGRADED)}/{move.worker}"
        transaction.create(upgraded_path, encode_record(move.record))
    transaction.commit()
