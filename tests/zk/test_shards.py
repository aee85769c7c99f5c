"""Large assignments on a real server: cut, published in one step, read as a whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt, InvalidTopology
from storm_dagster.model.records import MAX_NODE_BYTES, Assignment, WorkerSlot, encode_record
from storm_dagster.model.view import Versioned
from storm_dagster.zk.shards import INLINE_BYTES, MAX_SHARDS, SHARD_BYTES, put_ops, read_sharded
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_dagster.zk.transaction import Transaction
from storm_rigs.operations.storm_client import as_storm

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(90)]


def assignment(workers: int, mark: int = 0) -> Assignment:
    """About 200 bytes for each worker."""
    return Assignment(
        topology_id="t",
        code_dir="t",
        node_host={"supervisor": "h"},
        workers=tuple(
            WorkerSlot(
                node="supervisor" + "x" * 100,
                host="host",
                port=port,
                tasks=str(port + 1),
                memory_bytes=mark,
            )
            for port in range(workers)
        ),
        task_start_secs={f"1-{workers}": 1},
        timestamp_ms=mark,
    )


@pytest.fixture
def other(zk_cluster: StormClusterState, zk_conf: dict[str, object]) -> Iterator[StormClusterState]:
    cluster = StormClusterState.open(zk_conf)
    yield cluster
    cluster.disconnect()


def put_assignment(
    cluster: StormClusterState, transaction: Transaction, record: Assignment, at: Versioned | None
) -> None:
    """Append what writes the assignment over the version ``at``."""
    put_ops(
        cluster.state, transaction, paths.assignment("t"), encode_record(record, limit=None), at
    )


def parts(cluster: StormClusterState) -> list[str]:
    return cluster.state.find_children(paths.assignment("t")) or []


def test_small_stays_inline_large_is_cut_and_back(zk_cluster: StormClusterState) -> None:
    small, large, larger = assignment(10), assignment(4000, 1), assignment(6000, 2)
    assert len(encode_record(small)) < INLINE_BYTES
    size = len(encode_record(large, limit=None))
    assert size > MAX_NODE_BYTES
    as_storm(zk_cluster).set_assignment("t", small)
    assert parts(zk_cluster) == []
    as_storm(zk_cluster).set_assignment("t", large)
    assert len(parts(zk_cluster)) == -(-size // SHARD_BYTES)
    assert zk_cluster.assignment_info("t") == large
    before = parts(zk_cluster)
    as_storm(zk_cluster).set_assignment("t", larger)
    assert not set(before) & set(parts(zk_cluster)), (
        "the former parts went with the same transaction"
    )
    found = zk_cluster.read_assignment("t")
    assert found is not None
    assert (found[0], found[1].version) == (larger, 2)
    as_storm(zk_cluster).set_assignment("t", small)
    assert parts(zk_cluster) == []
    assert zk_cluster.assignment_info("t") == small
    as_storm(zk_cluster).set_assignment("t", large)
    as_storm(zk_cluster).remove_storm("t")
    assert as_storm(zk_cluster).assignments() == []


def test_a_first_large_assignment_is_nothing_until_it_is_committed(
    zk_cluster: StormClusterState,
) -> None:
    large = assignment(4000)
    transaction = zk_cluster.fenced(0).set(paths.ASSIGNMENTS, b"", 0)
    put_assignment(zk_cluster, transaction, large, None)
    assert parts(zk_cluster) != []
    assert zk_cluster.read_assignment("t") is None
    assert zk_cluster.load_view().corrupt == {}
    transaction.commit()
    assert zk_cluster.assignment_info("t") == large


def test_abandoned_parts_go_with_the_next_write(zk_cluster: StormClusterState) -> None:
    for _ in range(2):
        put_assignment(zk_cluster, zk_cluster.state.transaction(), assignment(4000), None)
    abandoned = parts(zk_cluster)
    assert len(abandoned) >= 4
    transaction = zk_cluster.state.transaction().set(paths.ASSIGNMENTS, b"", 0)
    put_assignment(zk_cluster, transaction, assignment(10), None)
    transaction.commit()
    assert parts(zk_cluster) == []
    assert zk_cluster.assignment_info("t") == assignment(10)


def test_one_of_two_writers_of_an_assignments_version_wins(
    zk_cluster: StormClusterState, other: StormClusterState
) -> None:
    as_storm(zk_cluster).set_assignment("t", assignment(4000, 1))
    found = zk_cluster.read_assignment("t")
    assert found is not None
    transactions = []
    for number, cluster in enumerate((zk_cluster, other)):
        transaction = cluster.fenced(0).set(paths.ASSIGNMENTS, b"", 1)
        put_assignment(cluster, transaction, assignment(4000, 10 + number), found[1])
        transactions.append(transaction)
    transactions[1].commit()
    with pytest.raises(Conflict) as lost:
        transactions[0].commit()
    assert lost.value.path == paths.ASSIGNMENTS
    assert zk_cluster.assignment_info("t") == assignment(4000, 11)


def test_readers_see_the_old_or_the_new(
    zk_cluster: StormClusterState, other: StormClusterState
) -> None:
    wanted = [assignment(1500 + 1500 * number, number) for number in range(3)]
    as_storm(zk_cluster).set_assignment("t", wanted[0])
    stop = threading.Event()
    failures: list[object] = []
    reads = [0]

    def read() -> None:
        while not stop.is_set():
            try:
                found = other.assignment_info("t")
            except Conflict:
                continue
            except BaseException as error:
                failures.append(error)
                return
            if found not in wanted:
                failures.append(found)
                return
            reads[0] += 1

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    for turn in range(12):
        as_storm(zk_cluster).set_assignment("t", wanted[turn % 3])
    stop.set()
    thread.join(30)
    assert failures == []
    assert reads[0] > 0


def test_damaged_and_missing_parts(zk_cluster: StormClusterState) -> None:
    as_storm(zk_cluster).set_assignment("t", assignment(4000))
    path = f"{paths.assignment('t')}/{parts(zk_cluster)[0]}"
    raw = zk_cluster.state.get_data(path)
    assert raw is not None
    zk_cluster.state.set_data(path, b"y" + raw[1:])
    with pytest.raises(Corrupt, match="hash"):
        zk_cluster.read_assignment("t")
    zk_cluster.state.delete_node(path)
    with pytest.raises(Corrupt, match="missing"):
        zk_cluster.read_assignment("t")
    as_storm(zk_cluster).set_assignment("t", assignment(3))
    assert zk_cluster.assignment_info("t") == assignment(3)


@pytest.mark.parametrize("count", [0, 10_000_000])
def test_a_forged_head_is_corrupt(zk_cluster: StormClusterState, count: int) -> None:
    head = b'{"v":1,"generation":"g","count":%d,"size":5,"sha256":"0"}' % count
    zk_cluster.state.set_data(paths.assignment("t"), head)
    with pytest.raises(Corrupt):
        zk_cluster.read_assignment("t")


def test_what_cannot_fit_is_refused_before_any_write(zk_cluster: StormClusterState) -> None:
    with pytest.raises(InvalidTopology):
        put_ops(
            zk_cluster.state,
            zk_cluster.state.transaction(),
            "/assignments_bak/n",
            b"x" * (MAX_SHARDS * SHARD_BYTES + 1),
            None,
        )
    assert zk_cluster.state.get_children("/assignments_bak") == []
    transaction = zk_cluster.state.transaction()
    put_ops(zk_cluster.state, transaction, "/assignments_bak/n", b"x" * 3_000_000, None)
    transaction.commit()
    found = read_sharded(zk_cluster.state, "/assignments_bak/n")
    assert found is not None
    assert len(found[0]) == 3_000_000


def test_assignment_and_backup_fit_one_transaction(zk_cluster: StormClusterState) -> None:
    raw = b"x" * INLINE_BYTES
    transaction = zk_cluster.fenced(0).set(paths.ASSIGNMENTS, b"", 0)
    for path in ("/assignments_bak/n", "/tasks/t"):
        put_ops(zk_cluster.state, transaction, path, raw, None)
    transaction.create("/topology/t", b"x" * 200_000)
    transaction.commit()
