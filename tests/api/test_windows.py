"""Windowed bolts, in simulated time."""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.api import (
    Bolt,
    Grouping,
    Spout,
    Stream,
    Topology,
    Tuple,
    TupleWindow,
    Window,
    WindowedBolt,
)
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.testing.topology_harness import TopologyHarness


class Numbers(Spout):
    outputs = ["n"]


class Stamped(Spout):
    outputs = ["user", "at"]


class Sum(WindowedBolt):
    outputs = ["sum", "new", "expired"]

    def process_window(self, window: TupleWindow) -> None:
        self.emit(
            [
                sum(tup.values[0] for tup in window),
                len(window.new),
                sorted(tup.values[0] for tup in window.expired),
            ]
        )


class Tumbling(Topology):
    numbers = Numbers.spec()
    sums = Sum.spec(inputs=[numbers], window=Window.tumbling(count=3))


def test_a_tumbling_window_of_tuples() -> None:
    with TopologyHarness(Tumbling, {"numbers": [[n] for n in range(8)]}, simulated=True) as harness:
        result = harness.run()
        assert result.values("sums") == [[3, 3, []], [12, 3, [0, 1, 2]]]
        # The last two wait for a third one, and are not acked.
        assert sorted(result.acked["numbers"]) == [0, 1, 2, 3, 4, 5]
        harness.give("numbers", [100])
        assert harness.run().values("sums")[-1] == [113, 3, [3, 4, 5]]


class Sliding(Topology):
    numbers = Numbers.spec()
    sums = Sum.spec(inputs=[numbers], window=Window.sliding(secs=10, every_secs=5))


def test_a_sliding_window_in_time() -> None:
    with TopologyHarness(Sliding, {"numbers": []}, simulated=True) as harness:
        harness.advance(1)
        harness.give("numbers", [1], [2])
        harness.advance(5)
        harness.give("numbers", [10])
        result = harness.advance(5)
        assert result.values("sums") == [[3, 2, []], [13, 1, []]]
        assert sorted(result.acked["numbers"]) == [0, 1], "acked when no window needs them any more"
        result = harness.advance(10)
        assert result.values("sums")[2:] == [[10, 0, [1, 2]]]
        assert sorted(result.acked["numbers"]) == [0, 1, 2]
        assert len(harness.advance(60).values("sums")) == 3, "an empty window is not evaluated"


class Visits(WindowedBolt):
    window = Window.session(gap_secs=10, key="user")
    timestamp_field = "at"
    lag_secs = 2
    late_stream = "late"
    outputs = ["user", "visits", "start", "end"]

    def process_window(self, window: TupleWindow) -> None:
        self.emit([window.key, len(window), window.start_ms, window.end_ms])


class Sessions(Topology):
    clicks = Stamped.spec()
    visits = Visits.spec(inputs={clicks: Grouping.fields("user")})


def test_sessions_by_key_in_event_time_with_late_tuples() -> None:
    clicks = [["ann", 1_000], ["bob", 2_000], ["ann", 6_000], ["bob", 30_000], ["ann", 29_000]]
    with TopologyHarness(Sessions, {"clicks": clicks}, simulated=True) as harness:
        assert harness.run().values("visits") == []
        assert harness.advance(1).values("visits") == [["bob", 1, 2_000, 12_000], ["ann", 2, 1_000, 16_000]]
        harness.give("clicks", ["eve", 20_000], ["ann", 28_500])
        result = harness.advance(1)
        assert result.values("visits", "late") == [[["eve", 20_000], "clicks", "default"]]
        assert 5 in result.acked["clicks"]
        harness.give("clicks", ["zoe", 60_000])
        assert harness.advance(1).values("visits")[2:] == [
            ["ann", 2, 28_500, 39_000],
            ["bob", 1, 30_000, 40_000],
        ]


class Fragile(Sum):
    tries = 0

    def process_window(self, window: TupleWindow) -> None:
        type(self).tries += 1
        if type(self).tries <= 3:
            raise ValueError("not yet")
        super().process_window(window)


class Failing(Topology):
    numbers = Numbers.spec()
    sums = Fragile.spec(inputs=[numbers], window=Window.tumbling(secs=1))


def test_a_window_that_raises_is_tried_again_then_its_tuples_fail_and_are_replayed() -> None:
    Fragile.tries = 0
    with TopologyHarness(Failing, {"numbers": [[1], [2]]}, replays=1, simulated=True) as harness:
        result = harness.advance(3)
        assert [str(error) for _, error in result.errors] == ["not yet"] * 3
        assert sorted(result.failed["numbers"]) == [0, 1]
        assert result.values("sums") == [[3, 2, []]]
        assert sorted(result.acked["numbers"]) == [0, 1]


class Breaks(Bolt):
    def process(self, tup: Tuple) -> None:
        raise ValueError("downstream")


class Downstream(Topology):
    numbers = Numbers.spec()
    sums = Sum.spec(inputs=[numbers], window=Window.tumbling(count=2))
    breaks = Breaks.spec(inputs=[sums])


def test_what_a_window_emits_hangs_on_all_its_tuples() -> None:
    with TopologyHarness(Downstream, {"numbers": [[1], [2], [3]]}, simulated=True) as harness:
        result = harness.run()
        assert sorted(result.failed["numbers"]) == [0, 1]
        assert result.acked["numbers"] == []
        harness.advance(31)
        assert sorted(harness.run().failed["numbers"]) == [0, 1, 2], "what never filled a window times out"


def test_the_window_stands_in_the_conf_under_storms_names() -> None:
    part = Sessions.to_spec().bolts["visits"]
    assert part.conf == {
        "topology.bolts.window.session.gap.ms": 10_000,
        "topology.bolts.window.session.key": "user",
        "topology.bolts.tuple.timestamp.field.name": "at",
        "topology.bolts.tuple.timestamp.max.lag.ms": 2_000,
        "topology.bolts.late.tuple.stream": "late",
    }
    assert part.outputs["late"].fields == ("late_tuple", "component", "stream")
    sliding = Visits.spec(window=Window.sliding(secs=10, every=5)).config
    assert sliding["topology.bolts.window.length.duration.ms"] == 10_000
    assert sliding["topology.bolts.window.sliding.interval.count"] == 5
    assert "topology.bolts.window.session.gap.ms" not in sliding


@pytest.mark.parametrize(
    "make",
    [
        lambda: Window.tumbling(),
        lambda: Window.tumbling(count=1, secs=1),
        lambda: Window.tumbling(count=0),
        lambda: Window.sliding(secs=5, every=1, every_secs=1),
        lambda: Window.session(gap_secs=0),
    ],
)
def test_impossible_windows_are_refused(make: Any) -> None:
    with pytest.raises(InvalidTopology):
        make()


class NoSuchField(Topology):
    numbers = Numbers.spec()
    visits = Visits.spec(inputs=[numbers])


def test_a_missing_time_field_is_reported_when_the_task_opens() -> None:
    with TopologyHarness(NoSuchField, {"numbers": []}, simulated=True) as harness:
        with pytest.raises(TimeoutError):
            harness.run(timeout=0.3)
        assert "needs field 'at' of every tuple" in str(harness.errors[0][1])


class BadStamps(Topology):
    clicks = Stamped.spec(outputs=[Stream(["user", "at"])])
    visits = Visits.spec(inputs=[clicks])


def test_a_stamp_that_is_no_number_fails_its_tuple() -> None:
    with TopologyHarness(BadStamps, {"clicks": [["ann", "noon"]]}, simulated=True) as harness:
        result = harness.run()
        assert result.failed["clicks"] == [0]
        assert "milliseconds since 1970" in str(result.errors[0][1])


class BlockingSum(Sum):
    blocking = True


class BlockingTumbling(Topology):
    numbers = Numbers.spec()
    sums = BlockingSum.spec(inputs=[numbers], window=Window.tumbling(count=2))


def test_a_windowed_bolt_that_blocks_has_its_thread() -> None:
    with TopologyHarness(BlockingTumbling, {"numbers": [[n] for n in range(4)]}) as harness:
        result = harness.run()
        assert result.values("sums") == [[1, 2, []], [5, 2, [0, 1]]]
        assert sorted(result.acked["numbers"]) == [0, 1, 2, 3]
