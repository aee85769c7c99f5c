"""Statistics of a task: windows, counts by stream, and samples of latencies."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.model.latency import bucket_of
from storm_dagster.model.wire import TaskReport
from storm_dagster.worker.tasks.stats import TaskStats

MS = 1_000_000


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


def test_a_count_by_stream_begins_in_the_middle_of_a_window() -> None:
    stats = TaskStats()
    for second in range(0, 1200, 15):
        stats.snapshot(float(second))
    stats.count_stream("remote_bytes", "default", 5)
    stats.count_stream("remote_bytes", "default", 6)
    assert stats.by_stream()["remote_bytes"] == {"default": 11}
    assert stats.window_streams(1200.0)["600"]["remote_bytes"] == {"default": 11}


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


def test_a_reader_of_the_release_before_ignores_the_fields_that_it_lacks() -> None:
    old = msgspec.defstruct("TaskReport", [("status", str), ("stats", dict[str, float], {})])
    report = TaskReport(
        status="running", latencies={"600": {"execute": {"a:default": {-80: 1}}}}, waiting=4
    )
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=old)
    assert msgspec.structs.asdict(decoded)["status"] == "running"
