"""Transactions on a real server: all or nothing, fenced by the epoch, bounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import (
    Conflict,
    Fenced,
    InvalidRequest,
    InvalidTopology,
    Unavailable,
)
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_dagster.zk.transaction import MAX_TRANSACTION_BYTES

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(60)]


def test_results_stand_in_order(zk_state: ZooKeeperClusterState) -> None:
    zk_state.set_data("/a", b"1")
    results = (
        zk_state.transaction()
        .check("/a", 0)
        .set("/a", b"2", 0)
        .create("/b", b"x")
        .create("/b/c")
        .delete("/b/c")
        .create("/e", b"y", ephemeral=True)
        .commit()
    )
    assert results == [None, 1, "/b", "/b/c", None, "/e"]
    assert zk_state.owned("/e")
    assert not zk_state.owned("/b")
    assert zk_state.get_children("/b") == []


def test_nothing_lands_when_one_operation_fails(zk_state: ZooKeeperClusterState) -> None:
    zk_state.set_data("/a", b"1")
    cases = [
        (lambda t: t.check("/a", 7), "/a"),
        (lambda t: t.set("/a", b"9", 5), "/a"),
        (lambda t: t.create("/a"), "/a"),
        (lambda t: t.delete("/absent"), "/absent"),
        (lambda t: t.create("/no/parent"), "/no/parent"),
        (lambda t: t.check("/absent", 0), "/absent"),
    ]
    for add, path in cases:
        transaction = zk_state.transaction().create("/made").set("/a", b"2", 0)
        add(transaction)
        transaction.create("/later")
        with pytest.raises(Conflict) as refused:
            transaction.commit()
        assert refused.value.path == path
        assert zk_state.get_children("/") == ["a"]
        assert zk_state.get_data("/a") == b"1"


def test_version_zero_is_a_version(zk_state: ZooKeeperClusterState) -> None:
    zk_state.create_node("/fresh", b"")
    zk_state.transaction().set("/fresh", b"first", 0).commit()
    with pytest.raises(Conflict):
        zk_state.transaction().set("/fresh", b"second", 0).commit()
    assert zk_state.get_data("/fresh") == b"first"


def test_only_a_check_of_the_epoch_fences(zk_cluster: StormClusterState) -> None:
    state = zk_cluster.state
    with pytest.raises(Fenced):
        zk_cluster.fenced(3).create("/topology/x-1-1").commit()
    with pytest.raises(Conflict) as lost:
        state.transaction().set(paths.EPOCH, b"", 3).commit()
    assert not isinstance(lost.value, Fenced)
    assert zk_cluster.active_storms() == []
    zk_cluster.fenced(0).create("/topology/x-1-1").commit()
    assert zk_cluster.active_storms() == ["x-1-1"]


def test_an_earlier_conflict_does_not_hide_behind_the_epoch(zk_cluster: StormClusterState) -> None:
    # The first operation that fails is the one that is told.
    with pytest.raises(Conflict) as first:
        zk_cluster.state.transaction().delete("/absent").check(paths.EPOCH, 9).commit()
    assert first.value.path == "/absent"


def test_an_empty_transaction_and_a_second_commit(zk_state: ZooKeeperClusterState) -> None:
    transaction = zk_state.transaction()
    assert transaction.commit() == []
    with pytest.raises(InvalidRequest):
        transaction.commit()


def test_bounds_hold_before_anything_is_sent(zk_state: ZooKeeperClusterState) -> None:
    part = b"x" * (MAX_TRANSACTION_BYTES // 4)
    transaction = zk_state.transaction()
    for number in range(4):
        transaction.create(f"/p{number}", part)
    assert transaction.size > MAX_TRANSACTION_BYTES
    with pytest.raises(InvalidTopology):
        transaction.commit()
    assert zk_state.get_children("/") == []
    assert zk_state.session.connected


def test_the_largest_transaction_is_accepted_by_the_server(zk_state: ZooKeeperClusterState) -> None:
    transaction = zk_state.transaction()
    number = 0
    while transaction.size + 700 < MAX_TRANSACTION_BYTES:
        transaction.create(f"/p{number}", b"x" * 400)
        number += 1
    assert len(transaction.commit()) == number
    assert zk_state.session.connected


@pytest.mark.parametrize("version", [-2, None, "1"])
def test_versions_are_versions(zk_state: ZooKeeperClusterState, version: object) -> None:
    with pytest.raises(InvalidRequest):
        zk_state.transaction().check("/a", version)  # type: ignore[arg-type]


def test_a_transaction_of_a_closed_session_is_unavailable(
    zk_connect: Callable[..., ZkSession],
) -> None:
    state = ZooKeeperClusterState(zk_connect())
    transaction = state.transaction().create("/x")
    state.close()
    with pytest.raises(Unavailable):
        transaction.commit()
