"""A tuple stamped in the future harms itself alone: honest tuples are not late because of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from storm_dagster.api import Spout, Topology, Window, WindowedBolt
from storm_dagster.core.dataplane.time_stamps import describe_stamp
from storm_dagster.core.dataplane.window_state import WindowPosition, WindowShape
from storm_dagster.core.dataplane.windowing import Windows
from storm_dagster.testing.topology_harness import TopologyHarness

NOW_MS = 1_794_999_960_000
DAY_MS = 86_400_000
FUTURE = {
    "microseconds": NOW_MS * 1000,
    "nanoseconds": NOW_MS * 1_000_000,
    "a clock ahead by a day": NOW_MS + DAY_MS,
}


class Clicks(Spout):
    outputs = ["user", "at"]


class Counts(WindowedBolt):
    """Clicks of each minute, by their own time."""

    window = Window.tumbling(secs=60)
    timestamp_field = "at"
    late_stream = "late"
    outputs = ["end", "clicks"]

    def process_window(self, window: Any) -> None:
        self.emit([window.end_ms, len(window)])


class PerMinute(Topology):
    clicks = Clicks.spec()
    counts = Counts.spec(inputs=[clicks])


def _clicks(first_ms: int, number: int) -> list[list[Any]]:
    return [["ann", first_ms + 1000 * index] for index in range(number)]


def _harness(state_dir: Path, start_ms: int = NOW_MS, **conf: Any) -> TopologyHarness:
    """A harness whose simulated time has a date, and which has the default bound."""
    harness = TopologyHarness(
        PerMinute,
        {"clicks": []},
        simulated=True,
        start_ms=start_ms,
        state_dir=state_dir,
        conf={"topology.message.timeout.secs": 5, **conf},
    )
    harness.run()
    return harness


@pytest.mark.parametrize("stamp", FUTURE.values(), ids=FUTURE)
def test_a_tuple_from_the_future_moves_no_watermark(stamp: int, tmp_path: Path) -> None:
    with _harness(tmp_path) as harness:
        harness.give("clicks", ["eve", stamp], *_clicks(NOW_MS, 40))
        harness.advance(2)
        harness.give("clicks", *_clicks(NOW_MS + 181_000, 1))
        result = harness.advance(70, timeout=120)
    assert sum(count for _, count in result.values("counts")) >= 40
    assert result.values("counts", "late") == [[["eve", stamp], "clicks", "default"]]
    ((component, error),) = result.errors
    assert component == "counts"
    assert "'at'" in str(error) and str(stamp) in str(error)


def test_zero_means_any_time(tmp_path: Path) -> None:
    key = "topology.windows.max.ahead.secs"
    with _harness(tmp_path, **{key: 0}) as harness:
        harness.give("clicks", ["eve", NOW_MS + DAY_MS], *_clicks(NOW_MS, 3))
        result = harness.advance(5)
    assert not result.errors
    assert [row[0][0] for row in result.values("counts", "late")] in ([], ["ann"] * 3)


def test_a_watermark_of_the_future_in_the_state_is_reset(tmp_path: Path) -> None:
    key = "topology.windows.max.ahead.secs"
    with _harness(tmp_path, **{key: 0}) as harness:
        harness.give("clicks", *_clicks(NOW_MS, 30), ["eve", NOW_MS + DAY_MS])
        before = harness.advance(5).values("counts")
    later_ms = NOW_MS + 120_000
    with _harness(tmp_path, later_ms) as harness:
        harness.give("clicks", *_clicks(later_ms, 40))
        harness.advance(10)
        harness.give("clicks", *_clicks(later_ms + 130_000, 1))
        result = harness.advance(20, timeout=120)
    fired = [end for end, _ in before]
    again = [end for end, _ in result.values("counts")]
    assert sum(count for _, count in result.values("counts")) == 40
    assert not result.values("counts", "late")
    assert fired and not set(fired) & set(again), "no window fires twice"


@pytest.mark.parametrize("last_end", [None, NOW_MS - 60_000, NOW_MS + DAY_MS])
def test_the_watermark_goes_back_to_a_window_before_now(last_end: int | None) -> None:
    shape = WindowShape(length_ms=60_000, slide_ms=60_000, event_time=True, max_ahead_ms=3_600_000)
    newest = [(("clicks", "default", 1), NOW_MS + DAY_MS)]
    position = WindowPosition(
        shape=shape.parts, watermark=NOW_MS + DAY_MS, newest=newest, last_end=last_end
    )
    windows = Windows(shape, (), position)
    assert windows.reset_ahead(NOW_MS) == NOW_MS + DAY_MS
    assert windows.watermark is not None
    assert NOW_MS - 60_000 <= windows.watermark <= NOW_MS
    assert windows.watermark % 60_000 == (last_end or 0) % 60_000 or last_end != NOW_MS - 60_000
    assert windows.reset_ahead(NOW_MS) is None
    windows.advance(0)
    assert windows.watermark <= NOW_MS, "the stamp that was too far ahead is forgotten"


def test_a_window_that_waits_says_why() -> None:
    shape = WindowShape(length_ms=60_000, slide_ms=60_000, event_time=True, lag_ms=2000)
    source = ("clicks", "default", 4)
    windows = Windows(shape, [source, ("other", "fast", 5)])
    windows.add("a", NOW_MS, source)
    windows.advance(0)
    assert "no stamp came yet from other[5] fast" in windows.waits_for()
    windows.add("b", NOW_MS, ("other", "fast", 5))
    windows.advance(1)
    assert "the lag of 2 s" in windows.waits_for()
    assert "next window is due at" in windows.waits_for()


@pytest.mark.parametrize(
    ("stamp", "words"),
    [
        (FUTURE["microseconds"], "it looks like microseconds"),
        (FUTURE["nanoseconds"], "it looks like nanoseconds"),
        (NOW_MS + 3 * 3_600_000, "3.0 hours ahead"),
        (1 << 57, "ahead"),
    ],
)
def test_the_error_names_the_unit(stamp: int, words: str) -> None:
    assert words in describe_stamp(stamp, NOW_MS)
