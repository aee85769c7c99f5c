"""The nodes of live workers on a real server: bound to the assignment's version and to the
session.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from storm_dagster.host.clock import boot_clock
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt
from storm_dagster.model.records import Assignment, WorkerNode, WorkerSlot
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_dagster.zk.worker_nodes import parse_worker_name
from storm_rigs.operations.storm_client import as_storm

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(60)]

SLOT = ("host-1-sup", 6900)


def node(token: str = "w", **fields: object) -> WorkerNode:
    values = {
        "pid": 1,
        "token": token,
        "version": 0,
        "tasks": "1-3",
        "started_ms": 1,
        "status": "running",
    }
    return WorkerNode.model_validate({**values, **fields})


def assignment(mark: int) -> Assignment:
    return Assignment(
        topology_id="t",
        code_dir="t",
        node_host={SLOT[0]: "h"},
        workers=(WorkerSlot(node=SLOT[0], host="h", port=SLOT[1], tasks="1-3"),),
        task_start_secs={"1-3": mark},
        timestamp_ms=mark,
    )


@pytest.fixture
def other(zk_cluster: StormClusterState, zk_conf: dict[str, object]) -> Iterator[StormClusterState]:
    cluster = StormClusterState.open(zk_conf)
    yield cluster
    cluster.disconnect()


def write(cluster: StormClusterState, record: WorkerNode, version: int) -> None:
    cluster.write_worker_node("t", *SLOT, record, assignment_version=version)


def test_a_name_is_split_at_its_last_dash_or_corrupt() -> None:
    assert parse_worker_name("a-b-6900") == ("a-b", 6900)
    for name in ("6900", "-6900", "a-", "a-x", "a"):
        with pytest.raises(Corrupt):
            parse_worker_name(name)


def test_it_needs_the_assignments_version(zk_cluster: StormClusterState) -> None:
    with pytest.raises(Conflict) as absent:
        write(zk_cluster, node(), 0)
    assert absent.value.path == paths.assignment("t")
    assert zk_cluster.state.get_children(paths.WORKERS) == [], "an unknown topology gets no folder"
    as_storm(zk_cluster).set_assignment("t", assignment(1))
    write(zk_cluster, node(), 0)
    as_storm(zk_cluster).set_assignment("t", assignment(2))
    with pytest.raises(Conflict) as moved:
        write(zk_cluster, node("late"), 0)
    assert moved.value.path == paths.assignment("t")
    assert zk_cluster.live_workers("t") == {SLOT: node()}
    write(zk_cluster, node(version=1), 1)
    assert zk_cluster.live_workers("t")[SLOT].version == 1


def test_an_unchanged_node_is_not_written(zk_cluster: StormClusterState) -> None:
    as_storm(zk_cluster).set_assignment("t", assignment(1))
    path = paths.worker("t", *SLOT)
    write(zk_cluster, node(), 0)
    write(zk_cluster, node(), 0)
    assert zk_cluster.state.get_version(path) == 0
    write(zk_cluster, node(status="paused"), 0)
    assert zk_cluster.state.get_version(path) == 1


def test_the_successor_replaces_the_node_of_a_killed_worker(
    zk_cluster: StormClusterState, other: StormClusterState
) -> None:
    as_storm(zk_cluster).set_assignment("t", assignment(1))
    write(zk_cluster, node("old"), 0)
    write(other, node("new"), 0)
    path = paths.worker("t", *SLOT)
    assert other.state.owned(path)
    assert not zk_cluster.remove_worker_node("t", *SLOT), "what is not ours is not removed"
    zk_cluster.disconnect()
    assert other.live_workers("t") == {SLOT: node("new")}
    assert other.remove_worker_node("t", *SLOT)
    assert not other.remove_worker_node("t", *SLOT)
    assert other.live_workers("t") == {}


def test_an_expired_worker_is_absent_and_may_return(
    zk_cluster: StormClusterState, other: StormClusterState, zk_expire: Callable[[ZkSession], None]
) -> None:
    as_storm(zk_cluster).set_assignment("t", assignment(1))
    write(zk_cluster, node(), 0)
    held = zk_cluster.session.session_id
    zk_expire(zk_cluster.session)
    eventually(lambda: other.live_workers("t") == {}, what="the node's end")
    eventually(lambda: zk_cluster.session.session_id not in (0, held), what="a new session")
    assert boot_clock() >= zk_cluster.session.lease_end(held)
    write(zk_cluster, node(), 0)
    assert other.live_workers("t") == {SLOT: node()}


def test_a_waiting_successor_is_woken(
    zk_cluster: StormClusterState, other: StormClusterState
) -> None:
    as_storm(zk_cluster).set_assignment("t", assignment(1))

    def changes(make: Callable[[], object], expected: dict[tuple[str, int], WorkerNode]) -> None:
        event = threading.Event()
        zk_cluster.live_workers("t", wake=event.set)
        make()
        assert event.wait(30)
        eventually(lambda: zk_cluster.live_workers("t") == expected, what="the change")

    changes(lambda: write(other, node(), 0), {SLOT: node()})
    changes(lambda: write(other, node(status="paused"), 0), {SLOT: node(status="paused")})
    changes(other.disconnect, {})


def test_a_damaged_record_is_no_absent_worker(zk_cluster: StormClusterState) -> None:
    zk_cluster.state.set_ephemeral_node(paths.worker("t", *SLOT), b"{")
    with pytest.raises(Corrupt):
        zk_cluster.live_workers("t")


def test_racing_processes_of_one_slot(
    zk_cluster: StormClusterState, other: StormClusterState
) -> None:
    as_storm(zk_cluster).set_assignment("t", assignment(1))
    lost: list[Conflict] = []

    def claim(cluster: StormClusterState, token: str) -> None:
        for turn in range(10):
            try:
                write(cluster, node(token, started_ms=turn), 0)
            except Conflict as error:
                lost.append(error)

    threads = [
        threading.Thread(target=claim, args=pair) for pair in ((zk_cluster, "a"), (other, "b"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    live = zk_cluster.live_workers("t")
    assert list(live) == [SLOT]
    path = paths.worker("t", *SLOT)
    assert zk_cluster.state.owned(path) == (live[SLOT].token == "a")
    assert other.state.owned(path) == (live[SLOT].token == "b")
