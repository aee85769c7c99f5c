"""Figures by window and stream, from what workers report to what pages show."""

from __future__ import annotations

import msgspec

from storm_dagster.core.snapshot.stream_metrics import stream_metrics
from storm_dagster.core.snapshot.windows import (
    WINDOWS,
    Totals,
    check_window,
    split_input,
    task_windows,
)
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StormBase,
    TaskError,
    TaskTable,
    WorkerSlot,
)
from storm_dagster.model.view import TopologyView, Versioned
from storm_dagster.model.wire import WorkerReport
from storm_dagster.worker.engine.system import TopologyMasterTable
from storm_dagster.worker.tasks.stats import TaskStats
from storm_rigs.operations.snapshots import snapshot_alone


class OneRoute:
    """What a route counts."""

    def __init__(self) -> None:
        self.emitted = self.transferred = 0


def test_a_window_shows_only_what_came_in_it() -> None:
    stats, route = TaskStats(), OneRoute()
    stats.routes["default"] = route
    for second in range(0, 1200, 15):
        stats.snapshot(float(second))
        route.emitted += 10
        route.transferred += 20
        stats.executed_by["a:default"] = stats.executed_by.get("a:default", 0) + 1
    streams = stats.window_streams(1200.0)
    assert streams["600"]["emitted"]["default"] in range(
        400, 431
    )  # 600 s and at most one snapshot more
    assert streams["600"]["executed"]["a:default"] in range(40, 44)
    assert "10800" not in streams, "the task is younger than three hours: everything counts"
    assert stats.by_stream()["emitted"]["default"] == 800
    assert stats.windows(1200.0)["600"]["emitted"] == streams["600"]["emitted"]["default"]


def told(component: str, **entry: object) -> dict[str, object]:
    return {"component": component, "status": "running", "uptime_secs": 100, "stats": {}, **entry}


def test_statistics_of_a_bolt_belong_to_its_inputs() -> None:
    entry = told(
        "count",
        stats={
            "executed": 30,
            "acked": 29,
            "failed": 1,
            "execute_ms": 0.5,
            "process_ms": 0.5,
            "complete_ms": 0,
        },
        streams={
            "emitted": {"default": 7, "__metrics": 2},
            "transferred": {"default": 7},
            "executed": {"split:default": 20, "b:x:side": 10},
        },
    )
    windows = task_windows(entry, "bolt")
    assert set(windows) == set(WINDOWS)
    life = windows[":all-time"]
    assert sum(life.acked.values()) == 29 and set(life.acked) == {"split:default", "b:x:side"}
    assert sum(life.failed.values()) == 1
    assert life.execute_ms == {"split:default": 0.5, "b:x:side": 0.5}
    assert life.totals().execute_ns == 30 * 500_000
    assert (life.totals().emitted, life.totals(include_sys=True).emitted) == (7, 9)
    assert split_input("b:x:side") == ("b:x", "side")
    assert check_window("600") == "600" and check_window("7") == check_window(None) == ":all-time"


def topology() -> TopologyView:
    return TopologyView(
        id="wc-1-1",
        base=StormBase(
            name="wc",
            launch_time_secs=1000,
            status="ACTIVE",
            workers=1,
            executors={"count": 2},
            token="t",
        ),
        base_at=Versioned(0, 1),
        tasks=TaskTable(
            components={
                "count": ComponentTasks(type="bolt", tasks="1-3"),
                "__acker": ComponentTasks(type="bolt", tasks="4"),
                "lines": ComponentTasks(type="spout", tasks="5"),
            }
        ),
        assignment=Assignment(
            topology_id="wc-1-1",
            code_dir="wc-1-1",
            node_host={"s1": "h1"},
            workers=(
                WorkerSlot(
                    node="s1", host="h1", port=6900, tasks="1-5", memory_bytes=2**21, cpu=10
                ),
            ),
            task_start_secs={"1-5": 1},
            timestamp_ms=1,
        ),
        assignment_at=Versioned(0, 1),
    )


def test_a_topology_is_the_sum_of_its_executors() -> None:
    half = {"executed": 100, "acked": 100, "execute_ms": 3.0, "process_ms": 3.0}
    tasks = {
        "1": told("count", stats=half, streams={"executed": {"lines:default": 100}}),
        "2": told(
            "count", stats={**half, "execute_ms": 1.0}, streams={"executed": {"lines:default": 300}}
        ),
        "4": told(
            "__acker",
            stats={"executed": 9, "acked": 9},
            streams={"emitted": {"__ack_ack": 4}, "transferred": {"__ack_ack": 4}},
        ),
        "5": told(
            "lines",
            stats={"acked": 50, "failed": 2, "complete_ms": 4.0},
            streams={"emitted": {"default": 60}, "transferred": {"default": 180}},
        ),
    }
    error = TaskError(task=1, host="h1", port=6900, time=5, error="boom")
    page = snapshot_alone(topology(), {"tasks": tasks}, now_secs=1090, errors=[("count", error)])
    assert (page.uptime_secs, page.tasks_total, page.executors_total, page.workers_total) == (
        90,
        5,
        4,
        1,
    )
    totals = page.totals(":all-time")
    assert totals == Totals(
        emitted=60, transferred=180, acked=50, failed=2, complete_ns=50 * 4_000_000
    )
    assert totals.complete_ms == 4.0
    assert page.totals("600", include_sys=True).emitted == 64
    count = page.components["count"]
    assert [one.id for one in count.executors] == ["[1-2]", "[3-3]"]
    assert count.windows["600"].execute_ms == {"lines:default": (3.0 * 100 + 1.0 * 300) / 400}
    assert count.capacity == (400 * 1.5) / (100 * 1000)
    assert count.errors == (error,)
    assert (
        not count.executors[1].reported and count.executors[1].windows["600"].totals().executed == 0
    )
    (worker,) = page.workers
    assert (worker.executors, worker.tasks_by_component, worker.memory_mb) == (
        4,
        {"count": 3, "__acker": 1, "lines": 1},
        2.0,
    )


def test_every_reader_has_the_same_mean_which_is_weighted_by_tuples() -> None:
    """Few slow tuples of one task, many fast ones of another: a mean of means would be 5.5 ms."""
    tasks = {
        "1": told(
            "count",
            stats={"executed": 10, "acked": 10, "execute_ms": 10.0},
            streams={"executed": {"lines:default": 10}},
        ),
        "2": told(
            "count",
            stats={"executed": 90, "acked": 90, "execute_ms": 1.0},
            streams={"executed": {"lines:default": 90}},
        ),
    }
    count = snapshot_alone(topology(), {"tasks": tasks}, now_secs=1090).components["count"]
    assert count.totals.execute_ms == 1.9
    assert count.windows[":all-time"].totals().execute_ms == 1.9
    assert count.windows["600"].execute_ms == {"lines:default": 1.9}


def test_a_silent_topology_master_means_zeros_and_says_so() -> None:
    page = snapshot_alone(topology(), None, now_secs=1001)
    assert not page.answered
    assert page.totals(":all-time").emitted == 0
    assert page.components["lines"].executors[0].host == "h1"


def test_what_the_topology_master_gives_is_what_is_read() -> None:
    table = TopologyMasterTable("wc-1-1", 4)
    report = msgspec.convert(
        {
            "node": "s1",
            "host": "h1",
            "port": 6900,
            "pid": 1,
            "count": 1,
            "uptime_secs": 100,
            "version": 1,
            "status": "running",
            "tasks": {
                "5": {
                    "status": "running",
                    "component": "lines",
                    "stats": {"acked": 3},
                    "windows": {"600": {"acked": 1}},
                    "streams": {"emitted": {"default": 5}},
                    "window_streams": {"600": {"emitted": {"default": 2}}},
                }
            },
        },
        WorkerReport,
    )
    table.receive(report, 1.0)
    windows = task_windows(table.document()["tasks"]["5"], "spout")
    assert windows["600"].emitted == {"default": 2} and windows["600"].acked == {"default": 1}
    assert windows["86400"].emitted == {"default": 5}


def test_a_figure_of_streams_is_summed_over_tasks_and_hides_the_systems() -> None:
    tasks = {
        "1": told("count", streams={"remote_bytes": {"default": 5, "__peers": 9}}),
        "3": told("count", streams={"remote_bytes": {"default": 7, "side": 1}}),
        "5": told("lines", streams={"emitted": {"default": 60}}),
    }
    page = snapshot_alone(topology(), {"tasks": tasks}, now_secs=1090)
    assert stream_metrics(page.components["count"]) == {
        "default": {"remote_bytes": 12},
        "side": {"remote_bytes": 1},
    }
    assert stream_metrics(page.components["lines"]) == {}, "a worker that does not count them"


def test_a_count_by_stream_begins_in_the_middle_of_a_window() -> None:
    stats = TaskStats()
    for second in range(0, 1200, 15):
        stats.snapshot(float(second))
    stats.count_stream("remote_bytes", "default", 5)
    stats.count_stream("remote_bytes", "default", 6)
    assert stats.by_stream()["remote_bytes"] == {"default": 11}
    assert stats.window_streams(1200.0)["600"]["remote_bytes"] == {"default": 11}
