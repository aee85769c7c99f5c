"""What the code of a topology may write into its nodes: the worst valid and the worst invalid
content costs other topologies nothing.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.snapshot.statuses import LAUNCH_SECS, not_running
from storm_dagster.model import paths
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.records import (
    ComponentTasks,
    TaskError,
    TaskTable,
    WorkerNode,
    encode_record,
)
from storm_dagster.model.view import ClusterView
from storm_dagster.security.zookeeper_access import CREATE, WRITE, worker_permissions
from storm_dagster.zk.task_errors import KEPT_ERRORS
from storm_dagster.zk.worker_bounds import MAX_FORMER_WORKERS, bounded_names, max_total_bytes
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper

ALL = "1-10000000"
SINGLES = ",".join(str(2 * number + 1) for number in range(60_000))
"""As many runs as a node of half a MiB holds."""


@pytest.fixture
def world(stage: Stage) -> World:
    return stage.world()


def node(tasks: str, **more: Any) -> bytes:
    """The record of a worker."""
    fields = {"pid": 1, "token": "t", "version": 0, "started_ms": 1, "status": "running"}
    return json.dumps({"v": 1, **fields, "tasks": tasks, **more}).encode()


def beats(topology_id: str, **more: Any) -> bytes:
    """The record of a topology master."""
    return json.dumps({"v": 1, "topology_id": topology_id, "topology_master": 1, **more}).encode()


def write(world: World, path: str, content: bytes) -> None:
    world.cluster.state.set_data(path, content)


def running(world: World) -> tuple[str, str]:
    """Ids of two topologies with workers: one of an attacker, one of another user."""
    world.supervisor("s1")
    world.supervisor("s2")
    ids = (world.submit("evil"), world.submit("good"))
    for topology_id in ids:
        world.run_workers(topology_id)
    return ids


def worker_path(view: ClusterView, topology_id: str) -> str:
    (slot,) = [worker.slot for worker in view.topologies[topology_id].workers][:1]
    return paths.worker(topology_id, slot.node, slot.port)


@pytest.mark.parametrize(
    "content",
    [
        node(ALL),
        node("1", dead=ALL),
        node(SINGLES),
        node("1", future="x" * 60_000),
        b"{",
        b"[" * 500_000,
        b"\xff" * 400_000,
        node("3-1"),
    ],
    ids=("all", "dead", "singles", "unknown", "cut", "deep", "bytes", "descending"),
)
def test_a_record_of_a_worker_costs_other_topologies_nothing(world: World, content: bytes) -> None:
    evil, good = running(world)
    view = world.cluster.load_view()
    write(world, worker_path(view, evil), content)
    after = world.cluster.load_view()
    assert after.topologies[good] == view.topologies[good]
    attacked = after.topologies.get(evil)
    if attacked is not None and attacked.tasks is not None:
        tasks = attacked.tasks.component_of().keys()
        # The ids of the topology's own tasks are all that is expanded.
        for record in attacked.live_workers.values():
            assert attacked.own_tasks(record.tasks) <= tasks
            assert attacked.own_tasks(record.dead) <= tasks
        assert not_running(after, attacked, world.time, LAUNCH_SECS) <= len(tasks)


@pytest.mark.parametrize("dead", [ALL, SINGLES, "2-1", "x" * 400_000])
def test_heartbeats_report_the_topologys_own_tasks_at_most(world: World, dead: str) -> None:
    evil, good = running(world)
    before = world.cluster.load_view().topologies[good]
    write(world, paths.taskbeats(evil), beats(evil, dead=dead))
    view = world.cluster.load_view()
    assert view.topologies[good] == before
    attacked = view.topologies[evil]
    assert attacked.tasks is not None
    assert attacked.dead_tasks <= attacked.tasks.component_of().keys()


@pytest.mark.parametrize(
    "more",
    [
        {"trend": "f" * 400_000},
        {"summary": {f"k{number}": 1.0 for number in range(20_000)}},
        {"future": "x" * 400_000},
    ],
    ids=("trend", "summary", "unknown"),
)
def test_oversized_heartbeats_are_left_out(world: World, more: dict[str, Any]) -> None:
    evil, good = running(world)
    before = world.cluster.load_view().topologies[good]
    write(world, paths.taskbeats(evil), beats(evil, **more))
    view = world.cluster.load_view()
    assert view.topologies[evil].beats is None
    assert list(view.corrupt) == [paths.taskbeats(evil)]
    assert view.topologies[good] == before


def test_of_invented_workers_a_few_are_read_beside_the_real_ones(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    evil, good = running(world)
    before = world.cluster.load_view()
    for number in range(5 * MAX_FORMER_WORKERS):
        write(world, paths.worker(evil, "aaa", number + 1), node(ALL))
    for _ in range(2):
        view = world.cluster.load_view()
        live = view.topologies[evil].live_workers
        own = before.topologies[evil].live_workers
        assert own.keys() <= live.keys()
        assert len(live) == len(own) + MAX_FORMER_WORKERS
        assert view.topologies[good] == before.topologies[good]
    named = [record for record in caplog.records if "nodes more than" in record.getMessage()]
    assert len(named) == 1


def test_records_beyond_the_topologys_size_are_not_decoded(world: World) -> None:
    evil, good = running(world)
    before = world.cluster.load_view().topologies[good]
    for number in range(MAX_FORMER_WORKERS):
        write(world, paths.worker(evil, "zzz", number + 1), node(SINGLES))
    view = world.cluster.load_view()
    assert evil not in view.topologies
    assert any("is not decoded" in text for text in view.corrupt.values())
    assert view.topologies[good] == before


def test_of_errors_the_newest_of_each_component_are_read(world: World) -> None:
    evil, _ = running(world)
    folder = paths.task_errors(evil, "split")
    record = TaskError(task=1, host="h", port=1, time=1, error="e")
    for number in range(5 * KEPT_ERRORS):
        write(world, f"{folder}/e{number:010d}", encode_record(record))
    for number in range(60):
        write(world, f"{paths.task_errors(evil, f'invented-{number}')}/e0", encode_record(record))
    write(world, f"{folder}/e9999999999", b"x" * 400_000)
    errors = world.cluster.errors_by_component(evil)
    assert len(errors["split"]) <= 2 * KEPT_ERRORS
    assert len(errors) <= 20


@pytest.mark.parametrize("time", [10**15, -1, 253_402_300_800])
def test_an_error_of_no_time_is_left_out(world: World, time: int) -> None:
    evil, _ = running(world)
    fields = {"v": 1, "task": 1, "host": "h", "port": 1, "time": time, "error": "e"}
    path = f"{paths.task_errors(evil, 'split')}/e0000000000"
    write(world, path, json.dumps(fields).encode())
    assert world.cluster.errors_by_component(evil) == {}


def test_this_file_names_every_node_that_a_worker_may_write() -> None:
    """A new such node needs a bound of its own."""
    writable = {
        path
        for path in (
            *(function("*") for function in _FUNCTIONS),
            paths.worker("*", "*", 1),
            paths.task_errors("*", "*"),
            f"{paths.task_errors('*', '*')}/e0",
            *paths.FIRST_LEVEL,
        )
        if worker_permissions(path)[1] & (WRITE | CREATE)
    }
    assert writable == {
        paths.state_home("*"),
        paths.taskbeats("*"),
        paths.metrics("*"),
        paths.workers("*"),
        paths.worker("*", "*", 1),
        paths.task_errors("*"),
        paths.task_errors("*", "*"),
        f"{paths.task_errors('*', '*')}/e0",
    }


_FUNCTIONS = (
    paths.supervisor,
    paths.workers,
    paths.topology,
    paths.log_levels,
    paths.state_home,
    paths.assignment,
    paths.assignment_backup,
    paths.tasks,
    paths.taskbeats,
    paths.task_errors,
    paths.metrics,
    paths.blob,
    paths.blob_max_sequence,
    paths.gray_upgrade,
    paths.token,
    paths.operation,
    paths.spark_session,
    paths.sensor_memory,
    paths.deploy,
)


@pytest.mark.parametrize("content", [b"{", b'{"v":1,"marker":"m","openings":{}}', b"x" * 400_000])
@pytest.mark.parametrize("path", [paths.state_home, paths.metrics])
def test_state_homes_and_metric_names_are_no_part_of_the_view(
    world: World, path: Any, content: bytes
) -> None:
    evil, _ = running(world)
    before = world.cluster.load_view()
    write(world, path(evil), content)
    assert world.cluster.load_view() == before


@pytest.mark.parametrize("workers", [2, 64])
@pytest.mark.parametrize("tasks", [1, 1000, 60_000])
def test_the_own_records_of_a_topology_are_always_decoded(tasks: int, workers: int) -> None:
    """The longest ones: no two tasks of a worker have ids in a row, and all of them are dead."""
    table = TaskTable(components={"b": ComponentTasks(type="bolt", tasks=f"1-{tasks}")})
    total_bytes = 0
    for number in range(workers):
        ranges = encode_ranges(range(1 + number, tasks + 1, workers))
        record = WorkerNode(
            pid=2**22, token="t" * 32, version=2**31, tasks=ranges, dead=ranges,
            started_ms=2**41, status="running",
        )  # fmt: skip
        total_bytes += len(encode_record(record))
    assert total_bytes <= max_total_bytes(table, workers)


_NAMES = st.lists(st.text("abc", min_size=1, max_size=3), unique=True)


@given(names=_NAMES, expected=_NAMES, extra=st.integers(0, 4))
def test_all_expected_nodes_are_read_and_few_others(
    names: list[str], expected: list[str], extra: int
) -> None:
    """However many nodes a worker invents, they displace none that is expected."""
    read = bounded_names("/folder-of-a-test", names, expected, extra)
    assert len(set(read)) == len(read) and set(read) <= set(names)
    assert set(names) & set(expected) <= set(read)
    others = set(names) - set(expected)
    assert len(set(read) - set(expected)) == min(extra, len(others))
