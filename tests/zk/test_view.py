"""Loading the whole cluster on a real server: complete, versioned, unharmed by damage and by racing
writers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from storm_dagster.model import paths
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StormBase,
    SupervisorInfo,
    TaskBeats,
    TaskTable,
    WorkerNode,
    WorkerSlot,
    encode_record,
)
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.operations.storm_client import as_storm
from storm_rigs.servers.embedded_zookeeper import ping

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(90)]


@pytest.fixture
def other(zk_cluster: StormClusterState, zk_conf: dict[str, object]) -> Iterator[StormClusterState]:
    cluster = StormClusterState.open(zk_conf)
    yield cluster
    cluster.disconnect()


def publish(cluster: StormClusterState, topology_id: str, port: int = 6900) -> None:
    """Everything that a running topology of one worker has."""
    cluster.state.set_data(
        paths.tasks(topology_id),
        encode_record(TaskTable(components={"a": ComponentTasks(type="bolt", tasks="1-3")})),
    )
    cluster.state.set_data(
        paths.taskbeats(topology_id),
        encode_record(TaskBeats(topology_id=topology_id, topology_master=3)),
    )
    version = as_storm(cluster).set_assignment(
        topology_id,
        Assignment(
            topology_id=topology_id,
            code_dir=topology_id,
            node_host={"sup-1": "h1"},
            workers=(WorkerSlot(node="sup-1", host="h1", port=port, tasks="1-3"),),
            task_start_secs={"1-3": 1},
            timestamp_ms=1,
        ),
    )
    as_storm(cluster).activate_storm(
        topology_id,
        StormBase(
            name=topology_id.split("-")[0],
            launch_time_secs=1,
            status="ACTIVE",
            workers=1,
            executors={"a": 3},
            token="t",
        ),
    )
    record = WorkerNode(
        pid=1, token="w", version=version, tasks="1-3", started_ms=1, status="running"
    )
    cluster.write_worker_node(topology_id, "sup-1", port, record, assignment_version=version)


def supervisor(count: int = 0) -> SupervisorInfo:
    return SupervisorInfo(
        host="h1", ports=(6900, 6901, 6902), started=1, count=count, version="0.1.0"
    )


def test_an_empty_cluster_has_an_empty_view(zk_cluster: StormClusterState) -> None:
    view = zk_cluster.load_view()
    assert (view.epoch, view.assignments_version) == (-1, 0)
    assert (view.supervisors, view.topologies, view.corrupt, view.held_slots) == (
        {},
        {},
        {},
        frozenset(),
    )


def test_everything_with_its_versions(zk_cluster: StormClusterState) -> None:
    zk_cluster.supervisor_heartbeat("sup-1", supervisor())
    publish(zk_cluster, "wc-1-1")
    view = zk_cluster.load_view()
    topology = view.topologies["wc-1-1"]
    assert view.supervisors == {"sup-1": supervisor()}
    assert view.assignments_version == 1
    assert topology.tasks is not None
    assert topology.assignment is not None
    assert topology.beats is not None
    assert topology.assignment_at is not None
    assert topology.beats_at is not None
    assert (
        topology.base_at.version,
        topology.assignment_at.version,
        topology.beats_at.version,
    ) == (0, 0, 0)
    assert topology.live_workers[("sup-1", 6900)].token == "w"
    assert view.topology_named("wc") is topology
    assert view.used_ports() == {"sup-1": {6900}}
    # A plan made from the view lands, once.
    zk_cluster.fenced(0).set(paths.ASSIGNMENTS, b"", view.assignments_version).commit()


def test_a_topology_without_its_parts(zk_cluster: StormClusterState) -> None:
    publish(zk_cluster, "wc-1-1")
    for path in (paths.tasks, paths.assignment, paths.taskbeats, paths.workers):
        zk_cluster.state.delete_node(path("wc-1-1"))
    topology = zk_cluster.load_view().topologies["wc-1-1"]
    assert (topology.tasks, topology.assignment, topology.beats, dict(topology.live_workers)) == (
        *(None, None, None),
        {},
    )


@pytest.mark.parametrize("part", [paths.topology, paths.tasks, paths.assignment])
def test_damage_of_one_topology_harms_no_other_and_frees_no_slot(
    zk_cluster: StormClusterState, part
) -> None:  # type: ignore[no-untyped-def]
    publish(zk_cluster, "bad-1-1", 6900)
    publish(zk_cluster, "good-2-1", 6901)
    zk_cluster.state.set_data(part("bad-1-1"), b"\x80\x04garbage")
    view = zk_cluster.load_view()
    assert list(view.topologies) == ["good-2-1"]
    assert list(view.corrupt) == [part("bad-1-1")]
    assert view.used_ports() == {"sup-1": {6900, 6901}}


def test_damaged_beats_harm_only_themselves(zk_cluster: StormClusterState) -> None:
    publish(zk_cluster, "wc-1-1")
    zk_cluster.state.set_data(paths.taskbeats("wc-1-1"), b"{")
    view = zk_cluster.load_view()
    assert view.topologies["wc-1-1"].beats is None
    assert list(view.corrupt) == [paths.taskbeats("wc-1-1")]


def test_a_damaged_worker_record_is_not_taken_for_a_dead_worker(
    zk_cluster: StormClusterState,
) -> None:
    publish(zk_cluster, "wc-1-1")
    zk_cluster.state.set_data(paths.worker("wc-1-1", "sup-1", 6900), b"{")
    view = zk_cluster.load_view()
    assert view.topologies == {}
    assert view.held_slots == {("sup-1", 6900)}


def test_damaged_supervisors_and_blacklist(zk_cluster: StormClusterState) -> None:
    zk_cluster.supervisor_heartbeat("sup-1", supervisor())
    zk_cluster.state.set_ephemeral_node(paths.supervisor("sup-2"), b"{")
    zk_cluster.state.set_data(paths.BLACKLIST, b"[]")
    view = zk_cluster.load_view()
    assert list(view.supervisors) == ["sup-1"]
    assert sorted(view.corrupt) == [paths.BLACKLIST, paths.supervisor("sup-2")]


def test_a_large_assignment_in_the_view(zk_cluster: StormClusterState) -> None:
    publish(zk_cluster, "wc-1-1")
    large = Assignment(
        topology_id="wc-1-1",
        code_dir="wc-1-1",
        node_host={"sup-1": "h1"},
        workers=tuple(
            WorkerSlot(node="sup-1" + "x" * 100, host="h1", port=port, tasks=str(port + 1))
            for port in range(4000)
        ),
        task_start_secs={"1-4000": 1},
        timestamp_ms=1,
    )
    as_storm(zk_cluster).set_assignment("wc-1-1", large)
    assert zk_cluster.load_view().topologies["wc-1-1"].assignment == large


def test_views_while_topologies_come_and_go(
    zk_cluster: StormClusterState, other: StormClusterState
) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def churn() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                publish(other, f"t-{number}-1", 6900 + number % 3)
                other.supervisor_heartbeat(f"s{number % 3}", supervisor(number))
                as_storm(other).remove_storm(f"t-{number}-1")
                other.state.delete_node(paths.supervisor(f"s{number % 3}"))
            except BaseException as error:
                failures.append(error)
                return

    thread = threading.Thread(target=churn, daemon=True)
    thread.start()
    last = -1
    for _ in range(150):
        view = zk_cluster.load_view()
        assert view.corrupt == {}
        assert view.assignments_version >= last
        last = view.assignments_version
    stop.set()
    thread.join(30)
    assert failures == []
    assert last > 0


def test_many_topologies_in_one_view(zk_cluster: StormClusterState) -> None:
    for number in range(120):
        publish(zk_cluster, f"t{number}-1-1", number)
    view = zk_cluster.load_view()
    assert len(view.topologies) == 120
    assert all(len(topology.live_workers) == 1 for topology in view.topologies.values())
    assert view.used_ports() == {"sup-1": set(range(120))}


def test_what_wakes_the_reader_of_a_view(
    zk_cluster: StormClusterState, other: StormClusterState
) -> None:
    publish(other, "wc-1-1")
    other.supervisor_heartbeat("sup-1", supervisor())
    beats = TaskBeats(topology_id="wc-1-1", topology_master=3, dead="1")
    node = WorkerNode(pid=2, token="w2", version=0, tasks="1-3", started_ms=1, status="running")
    changes = {
        "beats": lambda: other.write_beats("wc-1-1", beats, assignment_version=0),
        "base": lambda: as_storm(other).update_storm("wc-1-1", {"workers": 7}),
        "worker": lambda: other.remove_worker_node("wc-1-1", "sup-1", 6900),
        "worker back": lambda: other.write_worker_node(
            "wc-1-1", "sup-1", 6900, node, assignment_version=0
        ),
        "assignment": lambda: publish(other, "wc-1-1"),
        "topology": lambda: publish(other, "more-2-1", 6901),
        "supervisor": lambda: other.state.delete_node(paths.supervisor("sup-1")),
    }
    for change, make in changes.items():
        event = threading.Event()
        zk_cluster.load_view(wake=event.set)
        make()
        assert event.wait(30), change
    event = threading.Event()
    other.supervisor_heartbeat("sup-1", supervisor())
    zk_cluster.load_view(wake=event.set)
    other.supervisor_heartbeat("sup-1", supervisor(1))
    ping(zk_cluster.session)
    # A supervisor's own heartbeat is no news.
    assert not event.wait(0.2)
    eventually(lambda: zk_cluster.load_view().supervisors["sup-1"].count == 1, what="the beat")
