"""Latencies from the samples of a task to the percentiles of its component, and to Prometheus."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from storm_dagster.core.snapshot.topology import TopologySnapshot
from storm_dagster.core.snapshot.windows import task_windows
from storm_dagster.model.latency import (
    bucket_of,
    merge_latencies,
    percentiles,
    prometheus_buckets,
    subtract_latencies,
)
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StormBase,
    TaskTable,
    WorkerSlot,
)
from storm_dagster.model.view import TopologyView, Versioned
from storm_dagster.model.wire import TaskReport, WorkerReport
from storm_dagster.nimbus.http.metrics import component_metrics
from storm_dagster.operations.read.status import load_document
from storm_dagster.worker.engine.system import TopologyMasterTable
from storm_dagster.worker.tasks.stats import TaskStats
from storm_rigs.operations.snapshots import snapshot_alone

MS = 1_000_000


@pytest.mark.parametrize("spread", [0.1, 1.0, 2.5])
def test_a_percentile_is_off_by_less_than_five_percent(spread: float) -> None:
    rng = random.Random(7)
    values = sorted(rng.lognormvariate(0, spread) * MS for _ in range(20_000))
    buckets: dict[int, int] = {}
    for value in values:
        buckets[bucket_of(value)] = buckets.get(bucket_of(value), 0) + 1
    found = percentiles(buckets)
    assert found["sampled"] == len(values)
    for name, share in (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99)):
        assert found[name] * MS == pytest.approx(values[int(share * len(values)) - 1], rel=0.05), (
            name
        )


def test_buckets_merge_and_subtract_and_leave_their_operands_alone() -> None:
    one, two = (
        {"execute": {"a:default": {-80: 3, -72: 1}}},
        {"execute": {"a:default": {-80: 1}, "b:default": {-64: 5}}},
    )
    both = merge_latencies([one, two])
    assert both == {"execute": {"a:default": {-80: 4, -72: 1}, "b:default": {-64: 5}}}
    assert subtract_latencies(both, two)["execute"]["a:default"] == one["execute"]["a:default"]
    assert one["execute"]["a:default"] == {-80: 3, -72: 1} and two["execute"]["a:default"] == {
        -80: 1
    }
    assert percentiles({}) == {} and bucket_of(0) == bucket_of(1)


@pytest.mark.parametrize("nanos", [1, 900, 2**-10 * 1e9, 2**-10 * 1e9 + 1, 37 * MS, 250e9, 1e15])
def test_every_value_is_at_most_its_bound(nanos: float) -> None:
    counts, _ = prometheus_buckets({bucket_of(nanos): 1})
    for bound, number in counts:
        assert number == (nanos <= float(bound) * 1e9), bound


def test_a_window_has_only_its_own_samples() -> None:
    stats = TaskStats()
    assert stats.window_latencies(0.0) == {}
    for second in range(0, 1200, 15):
        stats.snapshot(float(second))
        stats.time_inputs((2 if second < 590 else 64) * MS * 10, {"a:default": 10})
    found = stats.window_latencies(1200.0)
    assert set(found) == {"600", ":all-time"}, (
        "the task is younger than three hours: everything counts"
    )
    assert len(found[":all-time"]["execute"]["a:default"]) == 2
    assert list(found["600"]["execute"]["a:default"]) == [bucket_of(64 * MS)]
    stats.time_inputs(MS, {"a:default": 1})
    assert sum(found[":all-time"]["execute"]["a:default"].values()) == 800, (
        "a report does not change afterwards"
    )


@given(st.sampled_from([0.0, 0.05, 0.3, 1.0]), st.lists(st.integers(0, 90), max_size=20))
def test_samples_of_whole_passes_are_those_of_one_tuple_after_another(
    rate: float, passes: list[int]
) -> None:
    one, all_at_once = TaskStats(rate), TaskStats(rate)
    for number in passes:
        tuples = range(number)
        assert list(all_at_once.take_samples(tuples)) == [
            tup for tup in tuples if one.take_sample()
        ]


def test_each_stream_has_its_own_latency() -> None:
    stats = TaskStats()
    stats.time_inputs(30 * MS, {"a:default": 20, "b:side": 10})
    stats.time_tree(500 * MS, "lines")
    assert stats.latencies["execute"] == {
        "a:default": {bucket_of(MS): 20},
        "b:side": {bucket_of(MS): 10},
    }
    assert stats.latencies["complete"] == {"lines": {bucket_of(500 * MS): 1}}
    assert (stats.execute_ns, stats.timed, stats.completed) == (30 * MS, 30, 1)


def test_a_report_without_latencies_is_read_as_before() -> None:
    windows = task_windows(
        {"stats": {"executed": 3}, "streams": {"executed": {"a:default": 3}}}, "bolt"
    )
    assert all(one.latencies == {} and one.percentiles() == {} for one in windows.values())
    old = msgspec.defstruct("TaskReport", [("status", str), ("stats", dict[str, float], {})])
    report = TaskReport(
        status="running", latencies={"600": {"execute": {"a:default": {-80: 1}}}}, waiting=4
    )
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=old)
    assert msgspec.structs.asdict(decoded)["status"] == "running", (
        "a reader of the release before ignores the new fields"
    )


def snapshot_of(*tasks: TaskReport) -> TopologySnapshot:
    """The page of a topology whose topology master heard of these tasks, by way of both
    encodings.
    """
    report = WorkerReport(
        node="s1",
        host="h1",
        port=6900,
        pid=1,
        count=1,
        uptime_secs=100,
        version=1,
        status="running",
        tasks={str(number): task for number, task in enumerate(tasks, 1)},
        system={"back_pressure": 1},
    )
    table = TopologyMasterTable("wc-1-1", 9)
    table.receive(msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=WorkerReport), 0.0)
    view = TopologyView(
        id="wc-1-1",
        base=StormBase(
            name="wc",
            launch_time_secs=1,
            status="ACTIVE",
            workers=1,
            executors={"count": 2, "lines": 1},
            token="t",
        ),
        base_at=Versioned(0, 1),
        tasks=TaskTable(
            components={
                "count": ComponentTasks(type="bolt", tasks="1-2"),
                "lines": ComponentTasks(type="spout", tasks="3"),
            }
        ),
        assignment=Assignment(
            topology_id="wc-1-1",
            code_dir="wc-1-1",
            node_host={"s1": "h1"},
            workers=(WorkerSlot(node="s1", host="h1", port=6900, tasks="1-3"),),
            task_start_secs={"1-3": 1},
            timestamp_ms=1,
        ),
    )
    return snapshot_alone(view, json.loads(json.dumps(table.document())), now_secs=100)


def reported(
    component: str, *, waiting: int = 0, metrics: dict[str, float] | None = None, **of: float
) -> TaskReport:
    """A task with samples: milliseconds by input or output stream."""
    stats = TaskStats()
    for key, millis in of.items():
        for _ in range(100):
            if component == "lines":
                stats.time_tree(int(millis * MS), key)
            else:
                stats.time_inputs(int(millis * MS), {f"lines:{key}": 1})
    return TaskReport(
        status="running",
        component=component,
        uptime_secs=100,
        latencies=stats.window_latencies(0.0),
        waiting=waiting,
        metrics=metrics or {},
    )


LAGS = {
    "lag": 12,
    "lag_by_partition": {"orders[1]": [0, None], "orders[0]": [12, 1.5], "x": "y", "z": [1, "2"]},
}


def test_a_component_is_the_merger_of_its_tasks() -> None:
    page = snapshot_of(
        reported("count", waiting=3, fast=1.0),
        reported("count", waiting=4, fast=1.0, slow=100.0),
        reported("lines", default=20.0, metrics=LAGS),
    )
    count = load_document(page.components["count"])
    assert (count["waiting"], count["lag"]) == (7, None)
    assert (
        set(count["latency"]) == {"execute", "process"}
        and count["latency"]["execute"]["sampled"] == 300
    )
    assert count["latency"]["execute"]["p50_ms"] == pytest.approx(1, rel=0.05), (
        "a mean would be 34 ms"
    )
    assert count["latency"]["execute"]["p95_ms"] == pytest.approx(100, rel=0.05)
    assert count["stream_latency"]["lines:fast"]["process"]["p99_ms"] == pytest.approx(1, rel=0.05)
    assert count["stream_latency"]["lines:slow"]["process"]["p50_ms"] == pytest.approx(
        100, rel=0.05
    )
    lines = load_document(page.components["lines"])
    assert lines["lag_by_partition"] == {"orders[0]": (12, 1.5), "orders[1]": (0, None)}, (
        "what is no lag is left out"
    )
    assert lines["lag"] == 12 and lines["latency"]["complete"]["p50_ms"] == pytest.approx(
        20, rel=0.05
    )
    assert page.back_pressure == 1


def test_prometheus_gets_histograms_by_component() -> None:
    page = snapshot_of(
        reported("count", waiting=3, fast=1.0),
        reported("count", slow=100.0),
        reported("lines", default=20.0, metrics=LAGS),
    )

    class Once:
        def collect(self) -> object:
            return component_metrics([page])

    registry = CollectorRegistry()
    registry.register(Once())  # type: ignore[arg-type]
    families = {
        one.name: one for one in text_string_to_metric_families(generate_latest(registry).decode())
    }
    execute = families["storm_component_execute_latency_seconds"]
    assert execute.type == "histogram"
    values = {
        (one.name.rpartition("_")[2], one.labels.get("le", "")): one.value
        for one in execute.samples
    }
    assert values["count", ""] == values["bucket", "+Inf"] == 200
    assert values["bucket", repr(2.0**-9)] == 100 and values["bucket", repr(2.0**-3)] == 200
    assert values["sum", ""] == pytest.approx(10.1, rel=0.05)
    assert {one.labels["component"] for one in execute.samples} == {"count"}
    complete = families["storm_component_complete_latency_seconds"]
    assert {one.labels["component"] for one in complete.samples} == {"lines"}
    loads = {
        (name, one.labels["component"]): one.value
        for name in ("waiting_tuples", "lag", "capacity")
        for one in families[f"storm_component_{name}"].samples
    }
    behind = {
        (one.name.rpartition("_")[2], one.labels["partition"]): one.value
        for name in ("storm_source_lag_records", "storm_source_lag_seconds")
        for one in families[name].samples
    }
    assert behind == {
        ("records", "orders[0]"): 12,
        ("records", "orders[1]"): 0,
        ("seconds", "orders[0]"): 1.5,
    }
    assert loads == {
        ("waiting_tuples", "count"): 3,
        ("waiting_tuples", "lines"): 0,
        ("lag", "lines"): 12,
        ("capacity", "count"): 0,
    }
