"""The snapshot of a running topology: statuses, statistics, latencies, lag, workers.

Each fact is proven here, once; the golden documents of nimbus prove the formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from storm_dagster.core.snapshot.statuses import not_running
from storm_dagster.core.snapshot.stream_metrics import stream_metrics
from storm_dagster.core.snapshot.topology import snapshot_topology
from storm_dagster.core.snapshot.upgrades import failed_upgrade
from storm_dagster.core.snapshot.windows import (
    WINDOWS,
    Totals,
    check_window,
    split_input,
    task_windows,
)
from storm_dagster.model.latency import bucket_of
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    GrayUpgrade,
    StormBase,
    SupervisorInfo,
    TaskBeats,
    TaskError,
    TaskTable,
    WorkerNode,
    WorkerSlot,
)
from storm_dagster.model.view import ClusterView, TopologyView, Versioned
from storm_dagster.model.wire import WorkerReport
from storm_dagster.worker.engine.system import TopologyMasterTable
from storm_rigs.operations.snapshots import snapshot_alone


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
    assert not page.reported
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
                    "latencies": {"600": {"complete": {"default": {-45: 4}}}},
                    "waiting": 9,
                }
            },
        },
        WorkerReport,
    )
    table.receive(report, 1.0)
    # As it travels to nimbus.
    entry = json.loads(json.dumps(table.document()))["tasks"]["5"]
    windows = task_windows(entry, "spout")
    assert windows["600"].emitted == {"default": 2} and windows["600"].acked == {"default": 1}
    assert windows["86400"].emitted == {"default": 5}
    assert windows["600"].latencies == {"complete": {"default": {-45: 4}}}
    assert entry["waiting"] == 9


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


def cluster(
    *supervisors: str, restarting: tuple[int, ...] = (), **fields: Any
) -> tuple[ClusterView, TopologyView]:
    """A view with these supervisors and the topology, which has these fields."""
    placed = replace(topology(), **fields)
    infos = {
        node: SupervisorInfo(
            host=f"h{node}", ports=(6900,), started=1, count=1, version="1", restarting=restarting
        )
        for node in supervisors
    }
    view = ClusterView(
        cluster_id="c",
        epoch=0,
        assignments_version=0,
        supervisors=infos,
        topologies={placed.id: placed},
    )
    return view, placed


def node(status: str, tasks: str = "1-5") -> dict[str, Any]:
    """The field of a topology whose worker has a node of that status."""
    record = WorkerNode.model_validate(
        {
            "pid": 7,
            "token": "t",
            "version": 0,
            "tasks": tasks,
            "started_ms": 1_080_000,
            "status": status,
        }
    )
    return {"live_workers": {("s1", 6900): record}}


PLACED = 1  # epoch seconds, as in `topology`
WITHOUT_ASSIGNMENT: dict[str, Any] = {"assignment": None, "assignment_at": None}
DEAD_1: dict[str, Any] = {
    "beats": TaskBeats(topology_id="wc-1-1", topology_master=4, dead="1", version=0),
    "beats_at": Versioned(0, 2),
}


@pytest.mark.parametrize(
    ("view_of", "age_secs", "entry", "status"),
    [
        (lambda: cluster("s1", **WITHOUT_ASSIGNMENT), 60, None, "unassigned"),
        (lambda: cluster("s1"), 120, None, "starting"),
        (lambda: cluster("s1"), 121, None, "dead"),
        (lambda: cluster("s1", restarting=(6900,)), 500, None, "starting"),
        (lambda: cluster(restarting=(6900,)), 60, None, "dead"),
        (lambda: cluster("s1", **node("starting")), 500, None, "starting"),
        (lambda: cluster("s1", **node("running")), 500, None, "running"),
        (lambda: cluster("s1", **node("paused")), 500, None, "running"),
        (lambda: cluster("s1", **node("running", "2-5")), 500, None, "starting"),
        (lambda: cluster("s1", **node("running")), 500, "starting", "starting"),
        (lambda: cluster("s1", **node("starting")), 500, "running", "running"),
        (lambda: cluster("s1", **node("running"), **DEAD_1), 500, "running", "dead"),
        (lambda: cluster("s1", **DEAD_1), 60, None, "starting"),
    ],
)
def test_the_status_of_a_task(
    view_of: Callable[[], tuple[ClusterView, TopologyView]],
    age_secs: int,
    entry: str | None,
    status: str,
) -> None:
    view, placed = view_of()
    report = {"tasks": {"1": told("count", status=entry)}} if entry is not None else None
    now_secs = PLACED + age_secs
    page = snapshot_topology(view, placed, report, now_secs=now_secs, launch_secs=120)
    assert page.tasks[1].status == status
    assert (1 in page.down) == (status in ("dead", "unassigned"))
    if entry is None:
        # `list` counts without a report, and comes to the same number.
        assert not_running(view, placed, now_secs, 120) == len(page.down)


def test_a_worker_has_its_process_and_the_time_of_its_placement() -> None:
    view, placed = cluster("s1", **node("running"))
    (worker,) = snapshot_topology(view, placed, now_secs=1090).workers
    assert (worker.pid, worker.state, worker.started_secs) == (7, "running", 1080.0)
    assert (worker.uptime_secs, worker.placed_secs) == (10, PLACED)
    report = {"workers": {"s1:6900": {"uptime_secs": 12.9, "silent_secs": 0.5}}}
    (worker,) = snapshot_topology(view, placed, report, now_secs=1090).workers
    assert (worker.uptime_secs, worker.silent_secs, worker.reported) == (12, 0.5, True)
    (worker,) = snapshot_topology(*cluster("s1"), report, now_secs=1090).workers
    assert (worker.pid, worker.state, worker.uptime_secs) == (None, "dead", 0)
    assert worker.started_secs is None


def buckets(millis: float, count: int) -> dict[int, int]:
    return {bucket_of(millis * 1e6): count}


def test_latencies_of_a_component_are_the_buckets_of_its_tasks() -> None:
    """A mean of the tasks' percentiles, or a mean, would be of no tuple at all."""
    fast, slow = "lines:default", "lines:side"
    first = {"600": {"execute": {fast: buckets(1, 100)}}}
    second = {"600": {"execute": {fast: buckets(1, 100), slow: buckets(100, 100)}}}
    trees = {"600": {"complete": {"default": buckets(20, 10)}}}
    tasks = {
        "1": told("count", latencies=first),
        "3": told("count", latencies=second),
        "5": told("lines", latencies=trees),
    }
    page = snapshot_alone(topology(), {"tasks": tasks}, now_secs=1090)
    recent = page.components["count"].recent
    execute = recent.percentiles()["execute"]
    assert execute["sampled"] == 300
    assert execute["p50_ms"] == pytest.approx(1, rel=0.05)
    assert execute["p95_ms"] == pytest.approx(100, rel=0.05)
    assert recent.stream_percentiles(fast)["execute"]["p99_ms"] == pytest.approx(1, rel=0.05)
    assert recent.stream_percentiles(slow)["execute"]["p50_ms"] == pytest.approx(100, rel=0.05)
    complete = page.components["lines"].recent.percentiles()
    assert set(complete) == {"complete"}
    assert complete["complete"]["p50_ms"] == pytest.approx(20, rel=0.05)


def test_a_report_without_latencies_has_no_percentiles() -> None:
    entry = told("count", stats={"executed": 3}, streams={"executed": {"a:default": 3}})
    for stats in task_windows(entry, "bolt").values():
        assert stats.latencies == {} and stats.percentiles() == {}


def test_queues_lag_and_back_pressure_add_up() -> None:
    lags = {"orders[1]": [0, None], "orders[0]": [12, 1.5], "x": "y", "z": [1, "2"]}
    tasks = {
        "1": told("count", waiting=3),
        "3": told("count", waiting=4),
        "5": told("lines", metrics={"lag": 12, "lag_by_partition": lags}),
    }
    workers = {"s1:6900": {"system": {"back_pressure": 1}}}
    page = snapshot_alone(topology(), {"tasks": tasks, "workers": workers}, now_secs=1090)
    count, lines = page.components["count"], page.components["lines"]
    assert (count.waiting, count.lag) == (7, None)
    assert lines.lag == 12
    assert lines.lag_by_partition == {"orders[0]": (12, 1.5), "orders[1]": (0, None)}
    assert page.back_pressure == 1


def upgraded(status: str = "ACTIVE", **record: Any) -> TopologyView:
    """A topology on h1:6700 whose last upgrade has that record."""
    slot = WorkerSlot(node="s1", host="h1", port=6700, tasks="1")
    assignment = Assignment(
        topology_id="wc-1-1",
        code_dir="wc-1-1",
        node_host={"s1": "h1"},
        workers=(slot,),
        task_start_secs={},
        timestamp_ms=1,
    )
    values = {"expires": 1, "code_dir": "wc-1-1.2", "rollback": True, "ended_secs": 90, **record}
    base = StormBase.model_validate(
        {
            "name": "wc",
            "launch_time_secs": 1,
            "status": status,
            "workers": 1,
            "executors": {},
            "token": "t",
            "last_upgrade": GrayUpgrade(**values),
        }
    )
    return TopologyView("wc-1-1", base, Versioned(0, 0), assignment=assignment)


def supervisor(name: str, host: str) -> SupervisorInfo:
    return SupervisorInfo(
        host=host, ports=(6700, 6701), started=1, count=1, version="1", http=f"http://{name}:8000"
    )


def test_a_failed_upgrade_keeps_its_reason_and_the_log_of_its_worker() -> None:
    supervisors = {"s0": supervisor("s0", "h1"), "s1": supervisor("s1", "h1")}
    view = ClusterView("c", 0, 0, supervisors, {})
    reason = "h1:6700: count[7]: ValueError: no file (wc.py, line 3)"
    failed = failed_upgrade(view, upgraded(reason=reason, failed_worker="h1:6700"))
    assert failed is not None
    assert (failed.code, failed.reason, failed.ended_secs) == ("wc-1-1.2", reason, 90)
    assert failed.log == "http://s1:8000/api/v1/log?file=wc-1-1%2F6700%2Fworker.log"
    # The worker was moved since, or the record of an older release names none.
    moved = failed_upgrade(view, upgraded(reason=reason, failed_worker="h1:6701"))
    assert moved is not None and moved.log.startswith("http://s0:8000/")
    former = failed_upgrade(view, upgraded(reason=reason))
    assert former is not None and (former.worker, former.log) == ("", "")


@pytest.mark.parametrize(
    ("status", "record"),
    [
        ("ACTIVE", {"reason": None}),
        ("ACTIVE", {"rollback": False}),
        ("UPGRADING", {"reason": "it failed"}),
    ],
)
def test_an_upgrade_that_was_asked_back_or_completed_has_not_failed(
    status: str, record: dict[str, Any]
) -> None:
    assert failed_upgrade(ClusterView("c", 0, 0, {}, {}), upgraded(status, **record)) is None
