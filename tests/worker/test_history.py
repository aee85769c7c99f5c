"""Rates of what flows now, and the rings of the topology master, from reports with known
counters.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from storm_dagster.model.latency import bucket_of
from storm_dagster.model.wire import HistoryQuery, TaskReport, WorkerReport
from storm_dagster.worker.engine.history import COLUMNS, TopologyHistory

MS = 1_000_000


def report(
    secs: float, rate: float, *, port: int = 1, pid: int = 7, busy_ms: float = 1.0, **of: Any
) -> WorkerReport:
    """A spout that emitted ``rate`` tuples a second for ``secs``, and a bolt that executed them in
    ``busy_ms`` each.
    """
    number = int(secs * rate)
    bolt = TaskReport(
        status="running",
        component="split",
        stats={"acked": number},
        streams={"executed": {"lines:default": number, "__system:__tick": 99}},
        latencies={":all-time": {"execute": {"lines:default": {bucket_of(busy_ms * MS): number}}}},
        busy_ns=int(number * busy_ms * MS),
        timed=number,
        waiting=of.get("waiting", 0),
    )
    spout = TaskReport(
        status="running",
        component="lines",
        stats={"acked": number, "failed": number // 10},
        streams={"emitted": {"default": number, "__ack_init": number}},
        held_ms=int(secs * 250),
        metrics={"lag": of.get("lag", 40)},
    )
    master = TaskReport(status="running", component="__topology_master")
    tasks = {f"{port}1": bolt, f"{port}2": spout, f"{port}3": master}
    system: dict[str, int | float] = {"uptime_ms": int(secs * 1000)}
    return WorkerReport("s", "h", port, pid, 1, int(secs), 1, "running", tasks, system)


def test_rates_are_of_each_workers_own_clock() -> None:
    history = TopologyHistory()
    for secs in (0.0, 3.0, 6.5, 9.0, 12.0, 15.0):
        # The second worker's reports come late and unevenly: its clock counts.
        history.receive("s:1", report(100 + secs, 200), secs)
        history.receive("s:2", report(500 + secs, 100, port=2), secs + secs % 2)
    flow = history.flow(15.0)
    assert set(flow["components"]) == {"lines", "split"}
    split, lines = flow["components"]["split"], flow["components"]["lines"]
    assert split["rate"] == pytest.approx(300, rel=0.02) and lines["rate"] == pytest.approx(
        300, rel=0.02
    )
    assert lines["failed"] == pytest.approx(30, rel=0.05) and lines["acked"] == pytest.approx(
        300, rel=0.02
    )
    assert split["capacity"] == pytest.approx(0.2, rel=0.02), (
        "the busiest task: 200 tuples of 1 ms a second"
    )
    assert lines["held"] == pytest.approx(0.25, rel=0.02) and lines["lag"] == 80
    assert flow["edges"] == {"split": {"lines:default": pytest.approx(300, rel=0.02)}}
    assert flow["tasks"]["11"] == {
        "rate": pytest.approx(200, rel=0.02),
        "busy": pytest.approx(0.2, rel=0.02),
    }
    assert split["p50_ms"] == pytest.approx(1, rel=0.05) and lines["p50_ms"] is None


def test_what_changes_is_seen_within_ten_seconds() -> None:
    history, slow = TopologyHistory(), 20.0
    history.receive("s:1", report(100, 40), 0.0)
    for secs in (3.0, 6.0, 9.0, 12.0):
        found = report(100 + secs, 40)
        number = int(secs * 40)
        found.tasks["11"].busy_ns += int(number * (slow - 1) * MS)
        history.receive("s:1", found, secs)
    assert history.flow(12.0)["components"]["split"]["capacity"] == pytest.approx(0.8, rel=0.05)


def test_a_new_process_begins_at_zero_and_counts_as_a_restart() -> None:
    history = TopologyHistory()
    history.receive("s:1", report(1000, 100), 0.0)
    history.receive("s:1", report(1010, 100), 10.0)
    history.receive("s:1", report(5, 100, pid=8), 20.0)
    assert history.flow(20.0)["components"]["split"]["rate"] == pytest.approx(100)
    assert (history.restarts("s:1", 20.0), history.restarts("s:2", 20.0)) == (1, 0)
    assert history.restarts("s:1", 700.0) == 0


def test_planned_starts_are_no_restarts() -> None:
    history = TopologyHistory()
    for second, (pid, started_for) in enumerate([(1, "a:0"), (2, "b:0"), (3, "b:1"), (4, "b:1")]):
        planned = report(1, 100, pid=pid)
        planned.started_for = started_for
        history.receive("s:1", planned, float(second))
    # Only the last process replaced one of the same code and request.
    assert history.restarts("s:1", 5.0) == 1


def test_restarts_of_a_slot_are_remembered_within_bounds() -> None:
    history = TopologyHistory()
    for pid in range(1000):
        history.receive("s:1", report(1, 100, pid=pid), float(pid))
    assert history.restarts("s:1", 1000.0) == 100 and history.restarts("s:1", 5000.0) == 0
    history.forget({"s:2"})
    assert history.restarts("s:1", 1000.0) == 0, "the slot is another topology's now"


def test_a_task_that_was_opened_again_counts_from_zero() -> None:
    history = TopologyHistory()
    history.receive("s:1", report(1000, 100), 0.0)
    later = report(1010, 0)
    later.tasks["11"] = report(4, 100).tasks["11"]
    history.receive("s:1", later, 10.0)
    flow = history.flow(10.0)
    assert flow["components"]["split"]["rate"] == pytest.approx(40)
    assert flow["edges"]["split"]["lines:default"] == pytest.approx(40)


def test_a_silent_worker_and_one_that_left_have_no_rates() -> None:
    history = TopologyHistory()
    for secs in (0.0, 10.0):
        history.receive("s:1", report(100 + secs, 100), secs)
        history.receive("s:2", report(100 + secs, 100, port=2), secs)
    history.forget({"s:1"})
    assert history.flow(10.0)["components"]["split"]["rate"] == pytest.approx(100)
    assert history.flow(60.0)["components"] == {}


def filled(seconds: int) -> TopologyHistory:
    history = TopologyHistory()
    for secs in range(0, seconds, 5):
        history.receive("s:1", report(1000 + secs, 100, waiting=secs % 7), float(secs))
        history.advance(float(secs), 1_700_000_000.0 + secs, {"lines"})
    return history


def test_an_hour_has_ten_second_rows_and_a_day_five_minute_rows() -> None:
    history = filled(2 * 3600)
    hour = history.rows(HistoryQuery())
    assert hour["columns"] == ["time", *COLUMNS] and hour["interval"] == 10
    times = [row[0] for row in hour["rows"]]
    assert len(times) == 360 and {b - a for a, b in pairwise(times)} == {10}
    last = dict(zip(hour["columns"], hour["rows"][-1], strict=True))
    assert (
        last["rate"] == pytest.approx(100)
        and last["capacity"] == pytest.approx(0.1)
        and last["lag"] == 40
    )
    day = history.rows(HistoryQuery(component="split", day=True))
    assert day["interval"] == 300 and len(day["rows"]) == 24
    assert day["rows"][0][1] == pytest.approx(100)
    assert history.rows(HistoryQuery(component="no"))["rows"] == []
    assert len(json.dumps(hour)) < 64_000


def test_the_summary_tells_by_how_much_the_lag_grows() -> None:
    history = TopologyHistory()
    for secs in range(0, 90, 5):
        history.receive("s:1", report(1000 + secs, 100, lag=1_000_000 + 12 * secs), float(secs))
        history.advance(float(secs), 1_700_000_000.0 + secs, {"lines"})
        if secs == 10:
            assert "lag_rate" not in history.summary(), "two rows are no trend"
    assert history.summary()["lag_rate"] == pytest.approx(12)
    assert len(json.dumps(history.summary(), separators=(",", ":")) + "f" * 30) <= 128


def test_the_hourly_trend_has_thirty_characters_scaled_to_the_maximum() -> None:
    assert TopologyHistory().trend() == ""
    assert filled(2 * 3600).trend() == "f" * 30
    # Two minutes of the double rate, then nothing for six, then the former rate.
    history, number, at = TopologyHistory(), 0, 0.0
    for secs, rate in ((120, 200), (360, None), (120, 100)):
        for _ in range(0, secs, 10):
            at += 10.0
            if rate is not None:
                number += 10 * rate
                history.receive("s:1", report(at, number / at), at)
                history.advance(at, 1_699_999_990.0 + at, {"lines"})
    assert 1_700_000_000 % 120 == 80
    trend = history.trend()
    assert len(trend) == 30 and trend.startswith("." * 24) and trend.strip(".")[0] in "ef", trend
    assert trend[-1] in "789" and ".." in trend.strip("."), trend


def test_time_in_which_nothing_was_heard_is_a_gap() -> None:
    history = filled(100)
    history.advance(100.0, 1_700_000_500.0, {"lines"})
    times = [row[0] for row in history.rows(HistoryQuery())["rows"]]
    assert max(b - a for a, b in pairwise(times)) > 300


def test_a_large_topology_has_rings_of_some_components_only() -> None:
    history = TopologyHistory()
    for secs in (0.0, 10.0):
        wide = report(100 + secs, 10)
        wide.tasks |= {
            str(n): TaskReport(status="running", component=f"bolt{n}") for n in range(100, 200)
        }
        history.receive("s:1", wide, secs)
    history.advance(10.0, 1_700_000_000.0, {"lines"})
    names = ["", "lines", "split", *(f"bolt{n}" for n in range(100, 200))]
    assert sum(bool(history.rows(HistoryQuery(component=name))["rows"]) for name in names) == 65


def test_a_worker_of_the_release_before_has_rates_without_capacity() -> None:
    history = TopologyHistory()
    for secs in (0.0, 10.0):
        old = report(100 + secs, 100)
        old.system.clear()
        for task in old.tasks.values():
            task.busy_ns = task.timed = task.held_ms = 0
        history.receive("s:1", old, secs)
    split = history.flow(10.0)["components"]["split"]
    assert split["rate"] == pytest.approx(100) and split["capacity"] == 0
