"""Windows against a model that knows all tuples beforehand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.windowing import Windows, WindowShape, window_shape
from storm_dagster.model.errors import InvalidTopology

END = 10**6

STEPS = st.lists(st.one_of(st.tuples(st.just("add"), st.integers(0, 60)), st.tuples(st.just("clock"), st.just(0))))
SMALL = st.integers(1, 12)


def run(shape: WindowShape, steps: list[tuple[str, int]], key: Any = None) -> tuple[list[Any], list[Any], list[Any]]:
    """(panes, accepted (stamp, number), finished) of an event-time run that ends with everything flushed."""
    windows: Windows[tuple[int, int]] = Windows(shape)
    panes, accepted, finished = [], [], []

    def finish_panes() -> None:
        while (pane := windows.due()) is not None:
            assert windows.due() is pane
            panes.append((pane.start_ms, pane.end_ms, list(pane.items), list(pane.new), list(pane.expired), pane.key))
            windows.done()
        finished.extend(windows.take_finished())

    for number, (what, stamp) in enumerate(steps):
        if what == "add":
            if windows.add((stamp, number), stamp, "s", key and key((stamp, number))):
                accepted.append((stamp, number))
        else:
            windows.advance(0)
            finish_panes()
    windows.watermark = END
    finish_panes()
    return panes, sorted(accepted), finished


def check_flow(panes: list[Any], finished: list[Any], accepted: list[Any]) -> None:
    """What ``new`` and ``expired`` say agrees with the contents, and every tuple is finished at most once."""
    before: list[Any] = []
    seen: set[Any] = set()
    for _, _, items, new, expired, _ in panes:
        assert [item for item in items if item not in seen] == new
        assert expired == [item for item in before if item not in items]
        before = items
        seen.update(items)
    assert len(finished) == len(set(finished))
    assert set(finished) <= set(accepted)


@given(STEPS, SMALL, SMALL, st.integers(0, 5))
def test_a_window_in_time_holds_what_lies_in_it(
    steps: list[tuple[str, int]], length: int, slide: int, lag: int
) -> None:
    shape = WindowShape(length_ms=length, slide_ms=slide, event_time=True, lag_ms=lag)
    panes, accepted, finished = run(shape, steps)
    expected = []
    for end in range(0, 61 + length + slide, slide):
        inside = [item for item in accepted if end - length < item[0] <= end]
        if inside:
            expected.append((end - length, end, inside))
    assert [pane[:3] for pane in panes] == expected
    check_flow(panes, finished, accepted)
    assert set(accepted) <= set(finished), "what no window needs any more is acked"


@given(STEPS, SMALL, SMALL)
def test_a_counted_window_holds_the_newest_tuples(steps: list[tuple[str, int]], length: int, slide: int) -> None:
    panes, accepted, finished = run(WindowShape(length_count=length, slide_count=slide, event_time=True), steps)
    everything = accepted
    expected = [everything[max(0, until - length) : until] for until in range(slide, len(everything) + 1, slide)]
    assert [pane[2] for pane in panes] == expected
    check_flow(panes, finished, accepted)


@given(STEPS, SMALL, SMALL)
def test_a_length_in_time_that_slides_by_count(steps: list[tuple[str, int]], length: int, slide: int) -> None:
    panes, accepted, finished = run(WindowShape(length_ms=length, slide_count=slide, event_time=True), steps)
    expected = []
    for until in range(slide, len(accepted) + 1, slide):
        newest = accepted[until - 1][0]
        expected.append([item for item in accepted[:until] if item[0] > newest - length])
    assert [pane[2] for pane in panes] == expected
    check_flow(panes, finished, accepted)


@given(STEPS, SMALL, SMALL)
def test_a_length_in_tuples_that_slides_by_time(steps: list[tuple[str, int]], length: int, slide: int) -> None:
    panes, accepted, finished = run(WindowShape(length_count=length, slide_ms=slide, event_time=True), steps)
    expected = []
    used = 0
    for end in range(0, 61 + slide, slide):
        until = len([item for item in accepted if item[0] <= end])
        if until > used:
            expected.append((end, accepted[max(0, until - length) : until]))
            used = until
    assert [(pane[1], pane[2]) for pane in panes] == expected
    check_flow(panes, finished, accepted)


@given(STEPS, SMALL, st.integers(1, 3))
def test_a_session_ends_with_a_gap(steps: list[tuple[str, int]], gap: int, keys: int) -> None:
    shape = WindowShape(gap_ms=gap, event_time=True)
    panes, accepted, finished = run(shape, steps, lambda item: f"k{item[1] % keys}")
    expected = []
    for key in range(keys):
        chain: list[Any] = []
        for item in [one for one in accepted if one[1] % keys == key]:
            if chain and item[0] - chain[-1][0] >= gap:
                expected.append((f"k{key}", chain[0][0], chain[-1][0] + gap, chain))
                chain = []
            chain = [*chain, item]
        if chain:
            expected.append((f"k{key}", chain[0][0], chain[-1][0] + gap, chain))
    found = [(pane[5], pane[0], pane[1], pane[2]) for pane in panes if pane[5] is not None]
    assert sorted(found) == sorted(expected)
    assert set(finished) == set(accepted)


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans())), SMALL, SMALL)
def test_processing_time_loses_nothing(steps: list[tuple[int, bool]], length: int, slide: int) -> None:
    windows: Windows[int] = Windows(WindowShape(length_ms=length, slide_ms=slide))
    now, seen, finished = 1000, [], []

    def finish_panes() -> None:
        while (pane := windows.due()) is not None:
            assert pane.end_ms is not None and pane.end_ms <= now and pane.end_ms % slide == 0
            seen.extend(pane.new)
            windows.done()
        finished.extend(windows.take_finished())

    for number, (pause, look) in enumerate(steps):
        now += pause
        if look:
            windows.advance(now)
            finish_panes()
        assert windows.add(number, now)
    now += length + 2 * slide
    windows.advance(now)
    finish_panes()
    assert sorted(finished) == list(range(len(steps))) and len(windows) == 0
    assert seen == sorted(seen) and len(seen) == len(set(seen))
    if slide <= length:
        assert seen == list(range(len(steps)))


def test_storms_own_example_gives_storms_windows() -> None:
    # docs/Windowing.md of Storm: length 20 s, slide 10 s, lag 5 s; seconds after 6:00:00.
    windows: Windows[str] = Windows(WindowShape(length_ms=20, slide_ms=10, event_time=True, lag_ms=5))
    for name, stamp in {"e1": 3, "e2": 5, "e3": 7, "e4": 18, "e5": 26, "e6": 36}.items():
        assert windows.add(name, stamp, "s")
    assert panes_now(windows) == [
        (10, ["e1", "e2", "e3"]),
        (20, ["e1", "e2", "e3", "e4"]),
        (30, ["e4", "e5"]),
    ]
    for name, stamp in {"e7": 7225, "e8": 7226, "e9": 7227, "e10": 7239}.items():
        assert windows.add(name, stamp, "s")
    # Storm's page leaves 8:00:20 - 8:00:40 to the next watermark as well.
    assert panes_now(windows) == [(40, ["e5", "e6"]), (50, ["e6"]), (7230, ["e7", "e8", "e9"])]
    assert not windows.add("late", 7000, "s")
    assert windows.add("in time", 7235, "s")


def panes_now(windows: Windows[str]) -> list[tuple[int | None, list[str]]]:
    windows.advance(0)
    found = []
    while (pane := windows.due()) is not None:
        found.append((pane.end_ms, pane.items))
        windows.done()
    return found


def test_the_watermark_waits_for_every_source() -> None:
    windows: Windows[str] = Windows(WindowShape(length_ms=10, slide_ms=10, event_time=True), sources=2)
    windows.add("a", 35, "left")
    assert panes_now(windows) == []
    windows.add("b", 12, "right")
    assert panes_now(windows) == []
    windows.add("c", 30, "right")
    assert panes_now(windows) == [(20, ["b"]), (30, ["c"])]


def test_a_window_that_fails_gives_its_tuples_back() -> None:
    windows: Windows[int] = Windows(WindowShape(length_count=4, slide_count=2))
    for number in range(2):
        windows.add(number, 0)
    assert windows.due() is not None
    assert windows.failed() == [0, 1]
    for number in range(2, 4):
        windows.add(number, 0)
    pane = windows.due()
    assert pane is not None and pane.items == [2, 3] and pane.new == [2, 3] and pane.expired == []


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({}, "no window length"),
        ({"window.length.count": 5, "window.length.duration.ms": 5}, "two window lengths"),
        (
            {
                "window.length.count": 5,
                "window.sliding.interval.count": 1,
                "window.sliding.interval.duration.ms": 1,
            },
            "two sliding intervals",
        ),
        (
            {"window.length.duration.ms": 20_000, "window.sliding.interval.duration.ms": 11_000},
            "message timeout",
        ),
        ({"window.length.count": 90, "window.sliding.interval.count": 20}, "topology.max.spout.pending"),
        ({"window.length.count": 5, "late.tuple.stream": "late"}, "no timestamp field"),
        ({"window.length.count": 5, "window.session.gap.ms": 1}, "session"),
    ],
)
def test_shapes_that_cannot_work_are_refused(conf: dict[str, Any], words: str) -> None:
    full = {f"topology.bolts.{key}": value for key, value in conf.items()}
    with pytest.raises(InvalidTopology, match=words):
        window_shape(full | {"topology.message.timeout.secs": 30, "topology.max.spout.pending": 100}, "bolt 'b'")


def test_a_window_longer_than_the_message_timeout_is_refused_at_submission() -> None:
    from storm_dagster.core.submission.validation import validate_topology
    from storm_dagster.model.conf import default_conf
    from storm_dagster.model.groupings import GroupingSpec
    from storm_dagster.model.topology import (
        ComponentObject,
        ComponentSpec,
        InputSpec,
        StreamSpec,
        TopologySpec,
    )

    spout = ComponentSpec(object=ComponentObject(python="m:S"), outputs={"default": StreamSpec(fields=("n",))})
    bolt = ComponentSpec(
        object=ComponentObject(python="m:B"),
        inputs=(InputSpec(component="s", grouping=GroupingSpec(type="shuffle")),),
        conf={"topology.bolts.window.length.duration.ms": 60_000},
    )
    spec = TopologySpec(name="t", spouts={"s": spout}, bolts={"b": bolt})
    with pytest.raises(InvalidTopology, match=r"bolt 'b': window length .* more than the message timeout of 30 s"):
        validate_topology(spec, default_conf())
    validate_topology(spec, {**default_conf(), "topology.message.timeout.secs": 90})
