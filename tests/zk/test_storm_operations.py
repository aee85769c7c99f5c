"""The operations of Storm's ``StormClusterState`` on a real server: records, merges, callbacks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import (
    Conflict,
    Corrupt,
    Fenced,
    InvalidRequest,
    NotAlive,
    UnknownSubtree,
)
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StormBase,
    SupervisorInfo,
    TaskBeats,
    TaskTable,
    WorkerBeat,
    WorkerSlot,
    encode_record,
)
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_dagster.zk.storm_operations import StormOperations
from storm_rigs.operations.beats import read_beats

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(60)]


def base(name: str, **fields: object) -> StormBase:
    values: dict[str, object] = {
        "name": name,
        "launch_time_secs": 1,
        "status": "ACTIVE",
        "workers": 2,
        "executors": {"a": 1, "b": 2},
        "token": "t",
    }
    return StormBase.model_validate({**values, **fields})


def assignment(topology_id: str, *ports: int, tasks: str = "1-3") -> Assignment:
    return Assignment(
        topology_id=topology_id,
        code_dir=topology_id,
        node_host={"s1": "h1"},
        workers=tuple(
            WorkerSlot(node="s1", host="h1", port=port, tasks=tasks if port == ports[0] else "")
            for port in ports
        ),
        task_start_secs={tasks: 5},
        timestamp_ms=7,
    )


def supervisor(host: str, count: int = 0) -> SupervisorInfo:
    return SupervisorInfo(host=host, ports=(6900, 6901), started=1, count=count, version="0.1.0")


@pytest.fixture
def zk_cluster(zk_conf: dict[str, object]) -> Iterator[StormOperations]:
    """A new cluster as Storm's tools see it."""
    cluster = StormOperations.open(zk_conf, create_root=True)
    yield cluster
    cluster.disconnect()


@pytest.fixture
def other(zk_cluster: StormOperations, zk_conf: dict[str, object]) -> Iterator[StormOperations]:
    """A second client of the same cluster."""
    cluster = StormOperations.open(zk_conf)
    yield cluster
    cluster.disconnect()


def test_assignments_are_kept_by_topology_and_raise_the_version(
    zk_cluster: StormOperations,
) -> None:
    first, second, third = (
        assignment("storm1", 1),
        assignment("storm1", 1, 2),
        assignment("storm3", 3),
    )
    assert zk_cluster.assignments() == []
    assert zk_cluster.set_assignment("storm1", first) == 0
    assert zk_cluster.assignment_info("storm1") == first
    assert zk_cluster.assignment_info("storm3") is None
    assert zk_cluster.set_assignment("storm1", second) == 1
    zk_cluster.set_assignment("storm3", third)
    assert zk_cluster.assignments() == ["storm1", "storm3"]
    assert zk_cluster.assignment_info("storm1") == second
    assert zk_cluster.assignment_info("storm3") == third
    assert zk_cluster.state.get_version(paths.ASSIGNMENTS) == 3, (
        "every write raises the assignments version"
    )


def test_a_removed_topology_is_active_no_more(zk_cluster: StormOperations) -> None:
    assert zk_cluster.active_storms() == []
    zk_cluster.activate_storm("storm1", base("one"))
    zk_cluster.activate_storm("storm2", base("two"))
    for kept in (paths.state_home("storm1"), paths.log_levels("storm1")):
        zk_cluster.state.transaction().create(kept, b"{}").commit()
    assert zk_cluster.active_storms() == ["storm1", "storm2"]
    zk_cluster.remove_storm_base("storm1")
    zk_cluster.remove_storm_base("storm1")
    assert zk_cluster.active_storms() == ["storm2"]
    assert zk_cluster.storm_base("storm1") is None
    assert zk_cluster.storm_base("storm2") == base("two")


def test_the_ten_newest_errors_of_each_component_stay(zk_cluster: StormOperations) -> None:
    now = 1000

    def report(component: str, task: int, text: str) -> None:
        zk_cluster.report_error("a", task, text, component=component, host="h", port=1, time=now)

    def texts(task: int) -> list[str]:
        return [error.error for error in zk_cluster.errors("a", task)]

    assert zk_cluster.errors("a") == []
    report("1", 1, "RuntimeException")
    assert texts(1) == ["RuntimeException"]
    now += 1
    report("1", 1, "IllegalArgument")
    assert texts(1) == ["IllegalArgument", "RuntimeException"]
    for _ in range(10):
        report("2", 2, "RuntimeException")
        now += 2
    assert texts(2) == ["RuntimeException"] * 10
    for _ in range(5):
        report("2", 2, "IllegalArgument")
        now += 2
    assert texts(2) == ["IllegalArgument"] * 5 + ["RuntimeException"] * 5
    assert zk_cluster.error_topologies() == ["a"]
    assert [error.task for error in zk_cluster.errors("a")] == [2] * 10 + [1] * 2
    assert {
        component: len(errors) for component, errors in zk_cluster.errors_by_component("a").items()
    } == {
        "1": 2,
        "2": 10,
    }
    zk_cluster.teardown_topology_errors("a")
    zk_cluster.teardown_topology_errors("a")
    assert zk_cluster.error_topologies() == []


def test_supervisors_are_listed_until_their_session_ends(
    zk_cluster: StormOperations, other: StormOperations
) -> None:
    assert zk_cluster.supervisors() == []
    other.supervisor_heartbeat("2", supervisor("two"))
    zk_cluster.supervisor_heartbeat("1", supervisor("one"))
    for view in (zk_cluster, other):
        assert view.supervisors() == ["1", "2"]
        assert view.supervisor_info("2") == supervisor("two")
    assert zk_cluster.supervisor_info("3") is None
    other.disconnect()
    assert zk_cluster.supervisors() == ["1"]


def test_a_supervisor_beats_on_after_its_session_expired(
    zk_cluster: StormOperations, zk_expire: Callable[[ZkSession], None]
) -> None:
    zk_cluster.supervisor_heartbeat("1", supervisor("one", 1))
    held = zk_cluster.session.session_id
    zk_expire(zk_cluster.session)
    eventually(lambda: zk_cluster.session.session_id not in (0, held), what="a new session")
    assert zk_cluster.supervisors() == []
    zk_cluster.supervisor_heartbeat("1", supervisor("one", 2))
    zk_cluster.supervisor_heartbeat("1", supervisor("one", 3))
    info = zk_cluster.supervisor_info("1")
    assert info is not None
    assert info.count == 3
    assert zk_cluster.state.owned(paths.supervisor("1"))


def test_component_ids_with_reserved_characters(zk_cluster: StormOperations) -> None:
    for component in ("a/b%2F", ".", "..", "(x)#:$<>"):
        zk_cluster.report_error("t", 1, "bad", component=component)
        assert list(zk_cluster.errors_by_component("t")) == [component]
        zk_cluster.teardown_topology_errors("t")


def test_the_component_of_an_error_is_looked_up(zk_cluster: StormOperations) -> None:
    table = TaskTable(components={"count": ComponentTasks(type="bolt", tasks="1-2")})
    zk_cluster.state.set_data(paths.tasks("t"), encode_record(table))
    zk_cluster.report_error("t", 2, "bad")
    assert list(zk_cluster.errors_by_component("t")) == ["count"]
    with pytest.raises(InvalidRequest):
        zk_cluster.report_error("t", 9, "bad")
    assert zk_cluster.read_tasks("t") == table


def test_errors_of_a_group_are_one_record_with_a_count(zk_cluster: StormOperations) -> None:
    def report(text: str, group: str, now: int, count: int = 1) -> None:
        zk_cluster.report_error("t", 1, text, component="c", time=now, count=count, group=group)

    report("", "a", 1)
    assert zk_cluster.errors("t") == []
    report("a1", "a", 1)
    for n in range(9):
        report(f"other {n}", f"other {n}", 2 + n)
    report("a2", "a", 20, count=6)
    report("", "a", 21)
    newest, *others = zk_cluster.errors("t")
    assert (newest.error, newest.count, newest.time) == ("a2", 8, 21)
    assert [one.error for one in others] == [f"other {n}" for n in range(8, -1, -1)] and {
        one.count for one in others
    } == {1}
    # What occurred last stays, however long it has been known.
    report("new", "new", 22)
    assert [one.error for one in zk_cluster.errors("t")] == [
        "new",
        "a2",
        *(f"other {n}" for n in range(8, 0, -1)),
    ]


def test_a_report_reads_few_errors_and_removes_others_step_by_step(
    zk_cluster: StormOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = paths.task_errors("t", "c")
    for _ in range(70):
        zk_cluster.state.create_sequential(f"{folder}/e", b"of another client")
    read_sizes: list[int] = []
    get_many = zk_cluster.state.get_many

    def count_reads(names: Sequence[str], *args: Any) -> Any:
        read_sizes.append(len(names))
        return get_many(names, *args)

    monkeypatch.setattr(zk_cluster.state, "get_many", count_reads)
    for n in range(4):
        zk_cluster.report_error("t", 1, f"bad {n}", component="c", time=n + 1)
    assert read_sizes == [20, 20, 10, 10]
    assert len(zk_cluster.state.find_children(folder) or ()) == 10
    assert [one.error for one in zk_cluster.errors("t")] == ["bad 3", "bad 2", "bad 1", "bad 0"]


def test_a_huge_error_is_shortened(zk_cluster: StormOperations) -> None:
    zk_cluster.report_error("t", 1, "start" + "x" * 3_000_000 + "end", component="c")
    (error,) = zk_cluster.errors("t", 1)
    assert error.error.startswith("start")
    assert error.error.endswith("end")
    assert len(error.error) < 40_000


def test_update_merges_and_refuses_what_is_unknown(zk_cluster: StormOperations) -> None:
    zk_cluster.activate_storm("s", base("n"))
    zk_cluster.update_storm("s", {"status": "INACTIVE", "executors": {"b": 5, "c": 1}})
    found = zk_cluster.storm_base("s")
    assert found is not None
    assert (found.status, found.executors, found.workers) == (
        "INACTIVE",
        {"a": 1, "b": 5, "c": 1},
        2,
    )
    version = zk_cluster.state.get_version(paths.topology("s"))
    zk_cluster.update_storm("s", {"status": "INACTIVE"})
    assert zk_cluster.state.get_version(paths.topology("s")) == version, (
        "nothing changed, nothing written"
    )
    for wrong in ({"colour": "red"}, {"status": "SLEEPING"}, {"workers": "2"}):
        with pytest.raises(InvalidRequest):
            zk_cluster.update_storm("s", wrong)
    with pytest.raises(NotAlive):
        zk_cluster.update_storm("absent", {"workers": 1})


def test_concurrent_updates_lose_nothing(
    zk_cluster: StormOperations, other: StormOperations
) -> None:
    zk_cluster.activate_storm("s", base("n", executors={}))

    def update(cluster: StormOperations, prefix: str) -> None:
        for number in range(10):
            cluster.update_storm("s", {"executors": {f"{prefix}{number}": number}})

    threads = [
        threading.Thread(target=update, args=pair) for pair in ((zk_cluster, "x"), (other, "y"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found = zk_cluster.storm_base("s")
    assert found is not None
    assert len(found.executors) == 20


def test_writes_of_another_epoch_are_fenced(zk_cluster: StormOperations) -> None:
    zk_cluster.activate_storm("s", base("n"), epoch=0)
    for write in (
        lambda: zk_cluster.activate_storm("s", base("m"), epoch=4),
        lambda: zk_cluster.update_storm("s", {"workers": 9}, epoch=4),
        lambda: zk_cluster.set_assignment("s", assignment("s", 1), epoch=4),
        lambda: zk_cluster.remove_storm("s", epoch=4),
        lambda: zk_cluster.remove_storm_base("s", epoch=4),
        lambda: zk_cluster.remove_storm_base("absent", epoch=4),
    ):
        with pytest.raises(Fenced):
            write()
    assert zk_cluster.storm_base("s") == base("n")
    assert zk_cluster.assignments() == []
    assert zk_cluster.blacklist() == frozenset()


def test_remove_storm_leaves_nothing_but_the_backup(zk_cluster: StormOperations) -> None:
    zk_cluster.activate_storm("n-1-1", base("n"))
    zk_cluster.set_assignment("n-1-1", assignment("n-1-1", 1))
    zk_cluster.state.set_data(paths.assignment_backup("n"), b"{}")
    zk_cluster.state.set_data(paths.tasks("n-1-1"), encode_record(TaskTable(components={})))
    zk_cluster.setup_heartbeats("n-1-1")
    zk_cluster.report_error("n-1-1", 1, "e", component="c")
    zk_cluster.state.set_data(paths.metrics("n-1-1"), b"{}")
    zk_cluster.state.set_data(paths.gray_upgrade("n-1-1", "conf"), b"{}")
    zk_cluster.state.set_ephemeral_node(paths.worker("n-1-1", "s1", 1), b"{}")
    assignments_version = zk_cluster.state.get_version(paths.ASSIGNMENTS)
    zk_cluster.remove_storm("n-1-1")
    zk_cluster.remove_storm("n-1-1")
    for folder in (
        *(paths.TOPOLOGY, paths.ASSIGNMENTS, paths.TASKS, paths.TASKBEATS, paths.TASKERRORS),
        *(paths.METRICS, paths.GRAY_UPGRADE, paths.WORKERS),
    ):
        assert zk_cluster.state.get_children(folder) == []
    assert zk_cluster.state.get_children(paths.ASSIGNMENTS_BAK) == ["n"]
    assert zk_cluster.state.get_version(paths.ASSIGNMENTS) == (assignments_version or 0) + 1


def test_worker_heartbeats_merge(zk_cluster: StormOperations, other: StormOperations) -> None:
    beat = WorkerBeat(count=1, silent_ms=0, uptime_secs=3)
    assert zk_cluster.get_worker_heartbeat("t", "s1", 6900) is None
    zk_cluster.remove_worker_heartbeat("t", "s1", 6900)
    assert zk_cluster.heartbeat_storms() == []
    threads = [
        threading.Thread(target=cluster.worker_heartbeat, args=("t", f"s-{number}", 6900, beat))
        for number, cluster in enumerate([zk_cluster, other] * 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found = read_beats(zk_cluster, "t")
    assert found is not None
    assert sorted(found.workers) == [f"s-{number}:6900" for number in range(6)]
    assert zk_cluster.get_worker_heartbeat("t", "s-3", 6900) == beat
    assert zk_cluster.heartbeat_storms() == ["t"]
    zk_cluster.remove_worker_heartbeat("t", "s-3", 6900)
    assert zk_cluster.get_worker_heartbeat("t", "s-3", 6900) is None
    assert other.get_worker_heartbeat("t", "s-2", 6900) == beat
    zk_cluster.setup_heartbeats("t")
    assert other.get_worker_heartbeat("t", "s-2", 6900) == beat, "an existing record stays"
    zk_cluster.teardown_heartbeats("t")
    zk_cluster.teardown_heartbeats("t")
    assert zk_cluster.heartbeat_storms() == []


def test_executor_beats_ignore_stale_workers_and_dead_tasks(zk_cluster: StormOperations) -> None:
    assert zk_cluster.executor_beats("t", {(1, 1): ("s1", 1)}) == {}
    zk_cluster.set_assignment(
        "t",
        Assignment(
            topology_id="t",
            code_dir="t",
            node_host={"s1": "h"},
            workers=(
                WorkerSlot(node="s1", host="h", port=1, tasks="1-3"),
                WorkerSlot(node="s1", host="h", port=2, tasks="4-5"),
            ),
            task_start_secs={"1-5": 1},
            timestamp_ms=1,
        ),
    )
    beat = WorkerBeat(count=4, silent_ms=5, uptime_secs=6)
    record = TaskBeats(
        topology_id="t", topology_master=5, workers={"s1:1": beat, "s1:3": beat}, dead="3"
    )
    zk_cluster.state.set_data(paths.taskbeats("t"), encode_record(record))
    asked = {
        (1, 2): ("s1", 1),
        (3, 3): ("s1", 1),
        (4, 4): ("s1", 1),
        (5, 5): ("s1", 2),
        (6, 6): ("s1", 3),
    }
    assert zk_cluster.executor_beats("t", asked) == {(1, 2): beat}


def test_setup_heartbeats_names_the_topology_master(zk_cluster: StormOperations) -> None:
    table = TaskTable(components={"__topology_master": ComponentTasks(type="bolt", tasks="7")})
    zk_cluster.state.set_data(paths.tasks("t"), encode_record(table))
    zk_cluster.setup_heartbeats("t")
    found = read_beats(zk_cluster, "t")
    assert found is not None
    assert (found.topology_master, found.workers) == (7, {})
    changed = found.model_copy(update={"dead": "1"})
    with pytest.raises(Conflict):
        zk_cluster.write_beats("t", changed, assignment_version=0)
    zk_cluster.set_assignment("t", assignment("t", 1))
    assert zk_cluster.write_beats("t", changed, assignment_version=0) == 1
    zk_cluster.set_assignment("t", assignment("t", 2))
    with pytest.raises(Conflict):
        zk_cluster.write_beats("t", found, assignment_version=0)
    again = read_beats(zk_cluster, "t")
    assert again == changed
    assert zk_cluster.heartbeat_storms() == ["t"]


def test_callbacks_are_one_shot_by_kind_and_path(
    zk_cluster: StormOperations, other: StormOperations
) -> None:
    calls: list[object] = []
    zk_cluster.set_assignment("t", assignment("t", 1))
    zk_cluster.activate_storm("t", base("n"))
    zk_cluster.assignments(lambda: calls.append("assignments"))
    zk_cluster.assignment_info("t", lambda topology_id: calls.append(("assignment", topology_id)))
    zk_cluster.assignment_info("u", lambda topology_id: calls.append(("assignment", topology_id)))
    zk_cluster.storm_base("t", lambda topology_id: calls.append(("base", topology_id)))
    zk_cluster.supervisors(lambda: calls.append("supervisors"))
    other.set_assignment("t", assignment("t", 2))
    eventually(lambda: calls == [("assignment", "t")], what="the first callback")
    other.set_assignment("t", assignment("t", 3))
    other.update_storm("t", {"workers": 3})
    eventually(lambda: calls == [("assignment", "t"), ("base", "t")], what="the second callback")
    other.supervisor_heartbeat("s", supervisor("h"))
    eventually(lambda: calls[2:] == ["supervisors"], what="the third callback")
    other.set_assignment("u", assignment("u", 4))
    eventually(lambda: len(calls) == 5, what="the rest")
    assert sorted(map(str, calls[3:])) == ["('assignment', 'u')", "assignments"]


def test_a_later_callback_replaces_the_earlier_and_a_wake_does_not(
    zk_cluster: StormOperations, other: StormOperations
) -> None:
    calls: list[str] = []
    zk_cluster.supervisors(lambda: calls.append("first"))
    zk_cluster.supervisors(lambda: calls.append("second"))
    woken = [threading.Event(), threading.Event()]
    for event in woken:
        zk_cluster.load_view(wake=event.set)
    other.supervisor_heartbeat("s", supervisor("h"))
    for event in woken:
        assert event.wait(30)
    eventually(lambda: calls == ["second"], what="the callback")


def test_a_callback_without_arguments_serves_for_a_path_too(
    zk_cluster: StormOperations, other: StormOperations
) -> None:
    event = threading.Event()
    zk_cluster.storm_base("t", event.set)
    other.activate_storm("t", base("n"))
    assert event.wait(30)


def test_an_event_of_an_unknown_subtree_is_an_error(zk_cluster: StormOperations) -> None:
    with pytest.raises(UnknownSubtree):
        zk_cluster.watches.dispatch("data-changed", "/strange/node")
    with pytest.raises(UnknownSubtree):
        zk_cluster.watches.dispatch("data-changed", "/")
    zk_cluster.watches.dispatch("data-changed", "/taskbeats/t")
    # From the connection the daemon's loop is woken instead, and goes on.
    event = threading.Event()
    zk_cluster.supervisors(event.set)
    zk_cluster.state.get_data("/strange", watch=True)
    zk_cluster.state.set_data("/strange", b"")
    assert event.wait(30)


def test_a_reconnection_issues_every_callback(
    zk_cluster: StormOperations, other: StormOperations, zk_expire: Callable[[ZkSession], None]
) -> None:
    interruptions = (lambda: zk_cluster.session.drop_link(), lambda: zk_expire(zk_cluster.session))
    for number, interrupt in enumerate(interruptions):
        first, second = threading.Event(), threading.Event()
        zk_cluster.supervisors(first.set)
        zk_cluster.read_assignment("t", second.set)
        interrupt()
        assert first.wait(patience(30))
        assert second.wait(patience(30))
        eventually(lambda: zk_cluster.session.connected, what="a connection")
        # The watches that are given again work on the new link.
        third = threading.Event()
        zk_cluster.supervisors(third.set)
        other.supervisor_heartbeat(f"s{number}", supervisor("h"))
        assert third.wait(30)


def test_damaged_records_are_corrupt(zk_cluster: StormOperations) -> None:
    for raw in (b"", b"{", b"\x80\x04K\x01.", b'{"v":1,"name":"x","extra":1}', b'{"v":2}'):
        zk_cluster.state.set_data(paths.topology("t"), raw)
        if raw:
            with pytest.raises(Corrupt, match="/topology/t"):
                zk_cluster.storm_base("t")
        else:
            assert zk_cluster.storm_base("t") is None


STORM = [
    "assignments",
    "assignment_info",
    "active_storms",
    "storm_base",
    "get_worker_heartbeat",
    "executor_beats",
    "supervisors",
    "supervisor_info",
    "setup_heartbeats",
    "teardown_heartbeats",
    "teardown_topology_errors",
    "heartbeat_storms",
    "error_topologies",
    "worker_heartbeat",
    "remove_worker_heartbeat",
    "supervisor_heartbeat",
    "activate_storm",
    "update_storm",
    "remove_storm_base",
    "set_assignment",
    "remove_storm",
    "report_error",
    "errors",
    "disconnect",
]


def test_all_of_storms_operations_are_there_and_daemons_hold_no_unguarded_one() -> None:
    assert len(STORM) == 24
    assert [name for name in STORM if not callable(getattr(StormOperations, name, None))] == []
    held = [name for name in STORM if hasattr(StormClusterState, name)]
    assert held == [
        "assignment_info", "active_storms", "storm_base", "supervisor_heartbeat", "report_error", "disconnect"
    ]  # fmt: skip
