"""Windowed bolts, in simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

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
from storm_rigs.components import Numbers
from storm_rigs.worker.first_error import first_error


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
        # The last two wait for a third one, in a checkpoint.
        assert sorted(result.acked["numbers"]) == list(range(8))
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
        assert sorted(result.acked["numbers"]) == [0, 1, 2]
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
        assert harness.advance(1).values("visits") == [
            ["bob", 1, 2_000, 12_000],
            ["ann", 2, 1_000, 16_000],
        ]
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


def test_a_window_that_raises_is_tried_again_until_it_succeeds() -> None:
    Fragile.tries = 0
    with TopologyHarness(Failing, {"numbers": [[1], [2]]}, simulated=True) as harness:
        result = harness.advance(2)
        assert [str(error) for _, error in result.errors] == ["not yet"] * 3
        assert result.values("sums") == [[3, 2, []]]
        assert sorted(result.acked["numbers"]) == [0, 1]


def test_a_window_that_raises_is_evaluated_by_the_version_that_comes_after(tmp_path: Path) -> None:
    Fragile.tries = -(10**9)
    with TopologyHarness(
        Failing, {"numbers": [[1], [2]]}, state_dir=tmp_path, simulated=True
    ) as harness:
        assert harness.advance(5).values("sums") == []
    with TopologyHarness(
        Failing, {"numbers": [[5]]}, state_dir=tmp_path, simulated=True, start_ms=9_001
    ) as harness:
        Fragile.tries = 3
        assert harness.advance(5).values("sums") == [[3, 2, []], [5, 1, [1, 2]]]


class Consumes(Sum):
    """Empties the lists of its window, and raises the first time of each."""

    seen: ClassVar[list[Any]] = []

    def process_window(self, window: TupleWindow) -> None:
        lists = (window.tuples, window.new, window.expired)
        self.seen.append([[each.pop().values[0] for _ in [*each]] for each in lists])
        if len(self.seen) % 2:
            raise ValueError("not yet")


class Consuming(Topology):
    numbers = Numbers.spec()
    sums = Consumes.spec(inputs=[numbers], window=Window.tumbling(count=2))


def test_a_retried_window_has_its_tuples_though_code_changed_its_lists() -> None:
    Consumes.seen = []
    with TopologyHarness(Consuming, {"numbers": [[1], [2], [3], [4]]}, simulated=True) as harness:
        harness.advance(1)
    first, second = [[2, 1], [2, 1], []], [[4, 3], [4, 3], [2, 1]]
    assert Consumes.seen == [first, first, second, second]


class GivesUp(Fragile):
    window_tries = 2


class GivingUp(Topology):
    numbers = Numbers.spec()
    sums = GivesUp.spec(inputs=[numbers], window=Window.tumbling(secs=1))


def test_a_window_is_given_up_after_window_tries() -> None:
    GivesUp.tries = -(10**9)
    with TopologyHarness(GivingUp, {"numbers": [[1], [2]]}, simulated=True) as harness:
        assert len(harness.advance(5).errors) == 2
        GivesUp.tries = 3
        harness.give("numbers", [7])
        assert harness.advance(5).values("sums") == [[7, 1, [1, 2]]]


class Breaks(Bolt):
    broken = 3
    seen: ClassVar[list[Any]] = []

    def process(self, tup: Tuple) -> None:
        type(self).broken -= 1
        if self.broken >= 0:
            raise ValueError("downstream")
        self.seen.append(tup.values)


class Downstream(Topology):
    numbers = Numbers.spec()
    sums = Sum.spec(inputs=[numbers], window=Window.tumbling(count=2))
    breaks = Breaks.spec(inputs=[sums])


def test_what_a_window_emits_is_sent_until_its_tree_is_complete(tmp_path: Path) -> None:
    Breaks.broken, Breaks.seen = 3, []
    with TopologyHarness(
        Downstream, {"numbers": [[1], [2], [3]]}, state_dir=tmp_path, simulated=True
    ) as harness:
        result = harness.run()
        assert sorted(result.acked["numbers"]) == [0, 1, 2] and not result.failed["numbers"]
        harness.advance(0.2)
        assert Breaks.seen == []
    # The rest of the tries after a restart.
    with TopologyHarness(
        Downstream, {"numbers": [[5]]}, state_dir=tmp_path, simulated=True
    ) as harness:
        harness.advance(1)
        assert sorted(Breaks.seen) == [[3, 2, []], [8, 2, [1, 2]]]
        harness.advance(60)
    with TopologyHarness(
        Downstream, {"numbers": []}, state_dir=tmp_path, simulated=True
    ) as harness:
        harness.advance(60)
        assert len(Breaks.seen) == 2, "each tree was completed once"


class Lossy(Breaks):
    """Neither acks nor fails its first tuple."""

    auto_ack = False

    def process(self, tup: Tuple) -> None:
        self.seen.append(tup.values)
        if len(self.seen) > 1:
            self.ack(tup)


class Timing(Topology):
    numbers = Numbers.spec()
    sums = Sum.spec(inputs=[numbers], window=Window.tumbling(count=2))
    lossy = Lossy.spec(inputs=[sums])


def test_what_a_window_emits_is_sent_again_after_the_message_timeout() -> None:
    Breaks.seen = []
    with TopologyHarness(Timing, {"numbers": [[1], [2]]}, simulated=True) as harness:
        harness.advance(29)
        assert Breaks.seen == [[3, 2, []]]
        harness.advance(60)
        assert Breaks.seen == [[3, 2, []]] * 2


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
        assert "needs field 'at' of every tuple" in str(first_error(harness)[1])


class BadStamps(Topology):
    clicks = Stamped.spec(outputs=[Stream(["user", "at"])])
    visits = Visits.spec(inputs=[clicks])


@pytest.mark.parametrize("stamp", ["noon", True, 1e30, 10**20, float("nan"), float("inf")])
def test_a_stamp_that_is_no_time_fails_its_tuple(stamp: Any) -> None:
    with TopologyHarness(BadStamps, {"clicks": [["ann", stamp]]}, simulated=True) as harness:
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


# -- windows and the message timeout, which have nothing to do with each other ---------------------


class Clicks(WindowedBolt):
    window = Window.session(gap_secs=20, key="user")
    outputs = ["user", "clicks"]

    def process_window(self, window: TupleWindow) -> None:
        self.emit([window.key, [tup.values[1] for tup in window]])


class LongSessions(Topology):
    clicks = Stamped.spec()
    visits = Clicks.spec(inputs={clicks: Grouping.fields("user")})


def test_a_session_longer_than_the_message_timeout_is_emitted_once() -> None:
    with TopologyHarness(LongSessions, {"clicks": []}, replays=99, simulated=True) as harness:
        harness.run()
        for number in range(11):
            harness.give("clicks", ["ann", number])
            harness.advance(10)
        result = harness.advance(300)
        assert result.values("visits") == [["ann", list(range(11))]]
        assert result.failed["clicks"] == [] and len(result.acked["clicks"]) == 11


class TenSecs(WindowedBolt):
    window = Window.tumbling(secs=10)
    timestamp_field = "at"
    outputs = ["end", "users"]

    def process_window(self, window: TupleWindow) -> None:
        self.emit([window.end_ms, [tup.values[0] for tup in window]])


class EventTime(Topology):
    clicks = Stamped.spec()
    others = Stamped.spec()
    tens = TenSecs.spec(inputs=[clicks], par=1)


def test_one_event_in_a_long_silence_is_held_once() -> None:
    with TopologyHarness(
        EventTime, {"clicks": [["ann", 1_000]], "others": []}, replays=99, simulated=True
    ) as harness:
        result = harness.advance(100)
        assert result.acked["clicks"] == [0] and result.failed["clicks"] == []
        harness.give("clicks", ["bob", 11_000])
        assert harness.advance(2).values("tens") == [[10_000, ["ann"]]]


class Tens(Topology):
    numbers = Numbers.spec()
    sums = Sum.spec(inputs=[numbers], window=Window.tumbling(count=10))


def test_a_counted_window_that_fills_slowly_holds_no_replays() -> None:
    with TopologyHarness(Tens, {"numbers": []}, replays=99, simulated=True) as harness:
        harness.run()
        for number in range(10):
            harness.give("numbers", [2**number])
            harness.advance(10)
        assert harness.run().values("sums") == [[1023, 10, []]]


class LateLost(Topology):
    clicks = Stamped.spec()
    visits = Visits.spec(inputs={clicks: Grouping.fields("user")})
    lost = Lossy.spec(inputs=[visits["late"]])


def test_late_tuples_are_kept_until_their_tree_is_complete(tmp_path: Path) -> None:
    Breaks.seen = []
    given = {"clicks": [["ann", 100_000]]}
    with TopologyHarness(LateLost, given, state_dir=tmp_path, simulated=True) as harness:
        harness.advance(1)
        harness.give("clicks", ["bob", 5])
        assert sorted(harness.run().acked["clicks"]) == [0, 1]
        assert Breaks.seen == [[["bob", 5], "clicks", "default"]]
    with TopologyHarness(LateLost, {"clicks": []}, state_dir=tmp_path, simulated=True) as harness:
        harness.advance(1)
        assert Breaks.seen == [[["bob", 5], "clicks", "default"]] * 2, "from the checkpoint"


def test_a_replayed_tuple_of_an_open_session_is_not_late(tmp_path: Path) -> None:
    """A session longer than the message timeout, a restart in the middle, and every tuple a second
    time.
    """
    clicks = [["ann", 5_000 * number] for number in range(1, 20)]

    class Once(Visits):
        message_id = "at"

    class Topo(Topology):
        clicks = Stamped.spec()
        visits = Once.spec(inputs={clicks: Grouping.fields("user")})

    globals().update(Once=Once)
    Once.__qualname__ = "Once"
    with TopologyHarness(Topo, {"clicks": clicks}, state_dir=tmp_path, simulated=True) as harness:
        assert harness.advance(40).values("visits") == []
    with TopologyHarness(Topo, {"clicks": clicks}, state_dir=tmp_path, simulated=True) as harness:
        harness.advance(1)
        harness.give("clicks", ["zoe", 500_000])
        harness.advance(28)
        assert harness.run().values("visits") == [], (
            "what was in flight has the message timeout to come again"
        )
        result = harness.advance(6)
        assert (
            result.values("visits") == [["ann", 19, 5_000, 105_000]]
            and result.values("visits", "late") == []
        )


class Wide(Topology):
    numbers = Numbers.spec()
    sums = Sum.spec(inputs=[numbers], window=Window.tumbling(count=50))


def test_few_pending_tuples_do_not_stop_a_window() -> None:
    conf = {"topology.max.spout.pending": 4}
    with TopologyHarness(Wide, {"numbers": [[1]] * 100}, conf=conf, simulated=True) as harness:
        assert [sums for sums, *_ in harness.run().values("sums")] == [50, 50]


class TwoTasks(Topology):
    clicks = Stamped.spec()
    others = Stamped.spec()
    tens = TenSecs.spec(inputs=[clicks, others])


def test_a_silent_input_holds_windows_for_the_idle_timeout_only() -> None:
    given = {"clicks": [["ann", 1_000], ["ann", 12_000]], "others": []}
    with TopologyHarness(TwoTasks, given, simulated=True) as harness:
        assert harness.advance(9).values("tens") == []
        assert harness.advance(3).values("tens") == [[10_000, ["ann"]]]
    conf = {"topology.bolts.watermark.idle.timeout.ms": 2_000}
    with TopologyHarness(TwoTasks, given, conf=conf, simulated=True) as harness:
        assert harness.advance(4).values("tens") == [[10_000, ["ann"]]]


class TaskIds(Sum):
    def process_window(self, window: TupleWindow) -> None:
        self.emit([1, 2, 3], need_task_ids=True)


class Odd(Sum):
    def process_window(self, window: TupleWindow) -> None:
        self.emit([object(), 2, 3])


@pytest.mark.parametrize(
    ("bolt", "says"), [(TaskIds, "emit without need_task_ids"), (Odd, "cannot travel")]
)
def test_what_a_window_cannot_emit_is_refused_in_process_window(bolt: Any, says: str) -> None:
    class Topo(Topology):
        numbers = Numbers.spec()
        sums = bolt.spec(inputs=[numbers], window=Window.tumbling(count=1))

    with TopologyHarness(Topo, {"numbers": [[1]]}, simulated=True) as harness:
        result = harness.run()
        assert says in str(result.errors[0][1]) and result.values("sums") == []


class Picky(Sum):
    failing: ClassVar[int] = 1

    def process(self, tup: Tuple) -> None:
        super().process(tup)
        if tup.values[0] in (2, 3) and self.failing > 0:
            type(self).failing -= 1
            if tup.values[0] == 3:
                raise ValueError("after it was added")
            self.fail(tup)


class Picked(Topology):
    numbers = Numbers.spec()
    sums = Picky.spec(inputs=[numbers], window=Window.tumbling(count=4))


def test_a_tuple_that_fails_after_it_was_added_is_held_once() -> None:
    Picky.failing = 2
    with TopologyHarness(
        Picked, {"numbers": [[1], [2], [3], [4]]}, replays=1, simulated=True
    ) as harness:
        result = harness.run()
        assert sorted(result.failed["numbers"]) == [1, 2]
        assert result.values("sums") == [[10, 4, []]]


class ByName(WindowedBolt):
    outputs: ClassVar[Any] = ["sum"]

    def process_window(self, window: TupleWindow) -> None:
        self.emit([sum(tup.values.n for tup in window)])


class Names(Topology):
    numbers = Numbers.spec()
    sums = ByName.spec(inputs=[numbers], window=Window.tumbling(count=3))


def test_tuples_of_a_restored_window_have_their_fields_as_attributes(
    tmp_path: Path,
) -> None:
    with TopologyHarness(
        Names, {"numbers": [[1], [2]]}, state_dir=tmp_path, simulated=True
    ) as harness:
        harness.advance(2)
    with TopologyHarness(
        Names, {"numbers": [[3]]}, state_dir=tmp_path, simulated=True, start_ms=3_001
    ) as harness:
        found = harness.advance(2)
    assert found.values("sums") == [[6]] and not found.errors
