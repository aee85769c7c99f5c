"""Windows against a model that knows all tuples beforehand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.dataplane.keyed_state import Contents, Partitioning, encode_entry
from storm_dagster.core.dataplane.window_state import (
    HeldTuple,
    WindowPosition,
    WindowShape,
    window_shape,
)
from storm_dagster.core.dataplane.windowing import Windows
from storm_dagster.model.errors import InvalidTopology

END = 10**6

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 60)), st.tuples(st.just("clock"), st.just(0))
    )
)
SMALL = st.integers(1, 12)


def held(windows: Windows) -> list[HeldTuple]:
    """Everything that has been added and not finished, as a checkpoint has it."""
    found = [*windows._log, *(entry for _, _, entry in windows._early)]
    if windows._sessions is not None:
        found += [entry for entries in windows._sessions._open.values() for entry in entries]
    return [msgspec.structs.replace(entry) for entry in found]


def restarted(windows: Windows) -> Windows:
    """The same windows, from what a checkpoint has of them."""
    position = msgspec.msgpack.decode(
        msgspec.msgpack.encode(windows.position()), type=WindowPosition
    )
    return Windows(windows.shape, windows.sources, position, held(windows))


def run(
    shape: WindowShape, steps: list[tuple[str, int]], key: Any = None, restart: bool = False
) -> tuple[list[Any], list[Any], list[Any]]:
    """(panes, accepted (stamp, number), finished) of an event-time run that ends with everything
    flushed.
    """
    windows = Windows(shape)
    panes, accepted, finished = [], [], []

    def finish_panes() -> None:
        nonlocal windows
        while (pane := windows.due()) is not None:
            assert windows.due() is pane
            panes.append(
                (
                    pane.start_ms,
                    pane.end_ms,
                    list(pane.items),
                    list(pane.new),
                    list(pane.expired),
                    pane.key,
                )
            )
            windows.done()
        finished.extend(entry.item for entry in windows.take_finished())
        if restart:
            windows = restarted(windows)

    for number, (what, stamp) in enumerate(steps):
        if what == "add":
            if (
                windows.add((stamp, number), stamp, ("s",), key and key((stamp, number)))
                is not None
            ):
                accepted.append((stamp, number))
        else:
            windows.advance(0)
            finish_panes()
    windows.watermark = END
    finish_panes()
    # Kept for `expired` of the next window only.
    finished.extend(entry.item for entry in windows._log[: windows._start - windows._base])
    return panes, sorted(accepted), finished


def check_flow(panes: list[Any], finished: list[Any], accepted: list[Any]) -> None:
    """What ``new`` and ``expired`` say agrees with the contents, and every tuple is finished at
    most once.
    """
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
    assert set(accepted) <= set(finished), "what no window needs any more is not kept"


@given(STEPS, SMALL, SMALL)
def test_a_counted_window_holds_the_newest_tuples(
    steps: list[tuple[str, int]], length: int, slide: int
) -> None:
    panes, accepted, finished = run(
        WindowShape(length_count=length, slide_count=slide, event_time=True), steps
    )
    everything = accepted
    expected = [
        everything[max(0, until - length) : until]
        for until in range(slide, len(everything) + 1, slide)
    ]
    assert [pane[2] for pane in panes] == expected
    check_flow(panes, finished, accepted)


@given(STEPS, SMALL, SMALL)
def test_a_length_in_time_that_slides_by_count(
    steps: list[tuple[str, int]], length: int, slide: int
) -> None:
    panes, accepted, finished = run(
        WindowShape(length_ms=length, slide_count=slide, event_time=True), steps
    )
    expected = []
    for until in range(slide, len(accepted) + 1, slide):
        newest = accepted[until - 1][0]
        expected.append([item for item in accepted[:until] if item[0] > newest - length])
    assert [pane[2] for pane in panes] == expected
    check_flow(panes, finished, accepted)


@given(STEPS, SMALL, SMALL)
def test_a_length_in_tuples_that_slides_by_time(
    steps: list[tuple[str, int]], length: int, slide: int
) -> None:
    panes, accepted, finished = run(
        WindowShape(length_count=length, slide_ms=slide, event_time=True), steps
    )
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
def test_processing_time_loses_nothing(
    steps: list[tuple[int, bool]], length: int, slide: int
) -> None:
    windows = Windows(WindowShape(length_ms=length, slide_ms=slide))
    now, seen, finished = 1000, [], []

    def finish_panes() -> None:
        while (pane := windows.due()) is not None:
            assert pane.end_ms is not None and pane.end_ms <= now and pane.end_ms % slide == 0
            seen.extend(pane.new)
            windows.done()
        finished.extend(entry.item for entry in windows.take_finished())

    for number, (pause, look) in enumerate(steps):
        now += pause
        if look:
            windows.advance(now)
            finish_panes()
        assert windows.add(number, now) is not None
    now += length + 2 * slide
    windows.advance(now)
    finish_panes()
    # What the last window held stays for the next one's `expired`.
    assert sorted(finished + [entry.item for entry in windows._log]) == list(range(len(steps)))
    assert seen == sorted(seen) and len(seen) == len(set(seen))
    if slide <= length:
        assert seen == list(range(len(steps)))


def test_storms_own_example_gives_storms_windows() -> None:
    # docs/Windowing.md of Storm: length 20 s, slide 10 s, lag 5 s; seconds after 6:00:00.
    windows = Windows(WindowShape(length_ms=20, slide_ms=10, event_time=True, lag_ms=5))
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


def panes_now(windows: Windows) -> list[tuple[int | None, list[str]]]:
    windows.advance(0)
    found = []
    while (pane := windows.due()) is not None:
        found.append((pane.end_ms, pane.items))
        windows.done()
    return found


def test_the_watermark_waits_for_every_source() -> None:
    windows = Windows(
        WindowShape(length_ms=10, slide_ms=10, event_time=True), sources=["left", "right"]
    )
    windows.add("a", 35, "left")
    assert panes_now(windows) == []
    windows.add("b", 12, "right")
    assert panes_now(windows) == []
    windows.add("c", 30, "right")
    assert panes_now(windows) == [(20, ["b"]), (30, ["c"])]


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
        ({"window.length.count": 5, "late.tuple.stream": "late"}, "no timestamp field"),
        ({"window.length.count": 5, "window.session.gap.ms": 1}, "session"),
    ],
)
def test_shapes_that_cannot_work_are_refused(conf: dict[str, Any], words: str) -> None:
    full = {f"topology.bolts.{key}": value for key, value in conf.items()}
    with pytest.raises(InvalidTopology, match=words):
        window_shape(full, "bolt 'b'")


def test_a_window_may_exceed_message_timeout_and_pending_tuples() -> None:
    conf = {"topology.message.timeout.secs": 30, "topology.max.spout.pending": 10}
    window_shape({**conf, "topology.bolts.window.length.duration.ms": 60_000}, "bolt 'b'")
    window_shape({**conf, "topology.bolts.window.length.count": 60_000}, "bolt 'b'")


SHAPES = st.one_of(
    st.builds(WindowShape, length_ms=SMALL, slide_ms=SMALL, event_time=st.just(True)),
    st.builds(WindowShape, length_count=SMALL, slide_count=SMALL, event_time=st.just(True)),
    st.builds(WindowShape, length_ms=SMALL, slide_count=SMALL, event_time=st.just(True)),
    st.builds(WindowShape, length_count=SMALL, slide_ms=SMALL, event_time=st.just(True)),
    st.builds(WindowShape, gap_ms=SMALL, event_time=st.just(True)),
)


@given(STEPS, SHAPES)
def test_windows_that_are_restored_from_values_are_the_same_ones(
    steps: list[tuple[str, int]], shape: WindowShape
) -> None:
    keys = (lambda item: f"k{item[1] % 3}") if shape.gap_ms is not None else None
    assert run(shape, steps, keys, restart=True)[:2] == run(shape, steps, keys)[:2]


@given(st.lists(st.integers(0, 30), min_size=1), SMALL)
def test_a_pane_that_was_not_answered_comes_again_after_a_restart(
    stamps: list[int], count: int
) -> None:
    windows = Windows(WindowShape(length_count=count, slide_count=count))
    for number in stamps:
        windows.add(number, 0)
    pane = windows.due()
    assert windows.due() is pane
    again = restarted(windows).due()
    assert again == pane


def test_the_watermark_is_the_minimum_of_all_tasks_that_send() -> None:
    shape = WindowShape(length_ms=10, slide_ms=10, event_time=True, idle_ms=1000)
    windows = Windows(shape, sources=[("s", 1), ("s", 2), ("quiet", 3)])
    for at in range(100):
        assert windows.add("ahead", 5000 + at, ("s", 1)) is not None
        windows.advance(at)
    assert windows.watermark is None, "two have not sent anything yet"
    for at in range(100):
        assert windows.add("behind", at, ("s", 2)) is not None, (
            "it is not late because another task is ahead"
        )
        windows.advance(100 + at)
    windows.add("ahead", 6000, ("s", 1))
    windows.advance(999)
    assert windows.watermark is None
    windows.advance(1050)
    assert windows.watermark == 99, "the quiet one does not count; those that have sent do"
    windows.advance(2100)
    assert windows.watermark == 6000, "all are silent: nothing waits"


def test_a_silent_source_counts_again_when_it_sends() -> None:
    shape = WindowShape(length_ms=10, slide_ms=10, event_time=True, idle_ms=100)
    windows = Windows(shape, sources=[("a",), ("b",)])
    windows.add("x", 50, ("a",))
    windows.advance(0)
    windows.add("x", 60, ("a",))
    windows.advance(150)
    assert windows.watermark == 60
    assert windows.add("y", 20, ("b",)) is None, "late"
    windows.add("x", 90, ("a",))
    windows.advance(200)
    assert windows.watermark == 60
    windows.add("y", 80, ("b",))
    windows.advance(210)
    assert windows.watermark == 80


def contents_of(windows: Windows, owner: Any) -> Contents:
    contents = Contents(windows=windows.position())
    for entry in held(windows):
        contents.held[entry.number] = (owner(entry), encode_entry(entry))
    return contents


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)), max_size=40),
    SMALL,
    st.integers(1, 4),
)
def test_sessions_move_with_their_keys_to_another_number_of_tasks(
    clicks: list[tuple[int, int]], gap: int, tasks: int
) -> None:
    shape = WindowShape(gap_ms=gap, event_time=True)

    def panes(several: list[Windows]) -> list[Any]:
        found = []
        for windows in several:
            windows.watermark = END
            while (pane := windows.due()) is not None:
                found.append((pane.key, pane.start_ms, pane.end_ms, sorted(pane.items)))
                windows.done()
        return sorted(found)

    def filled() -> list[Windows]:
        two = [Windows(shape), Windows(shape)]
        for number, (stamp, key) in enumerate(clicks):
            two[key % 2].add([stamp, number], stamp, ("s",), key)
        return two

    division = Partitioning(tasks, by_key=True)
    moved = []
    for index in range(tasks):
        old = (
            (at, contents_of(windows, lambda entry: entry.key))
            for at, windows in enumerate(filled())
        )
        contents = division.share(index, old, lambda key, values: values[0])
        assert all(entry.key % tasks == index for entry in contents.entries())
        moved.append(Windows(shape, (), contents.windows, contents.entries()))
    assert panes(moved) == panes(filled())


@given(
    st.lists(st.integers(0, 60), max_size=30),
    st.lists(st.integers(0, 60), max_size=30),
    SMALL,
    SMALL,
)
def test_after_a_merge_tuples_of_both_tasks_count_once_per_window(
    left: list[int], right: list[int], length: int, slide: int
) -> None:
    """The tasks have evaluated their windows up to different ends."""
    shape = WindowShape(length_ms=length, slide_ms=slide, event_time=True)
    seen: dict[tuple[int, int], list[int]] = {}
    two = []

    def evaluate(windows: Windows, until: int) -> None:
        windows.watermark = until
        while (pane := windows.due()) is not None:
            assert pane.end_ms is not None
            for stamp, number in pane.items:
                seen.setdefault((stamp, number), []).append(pane.end_ms)
            windows.done()

    for task, (stamps, until) in enumerate(((left, 20), (right, 35))):
        windows = Windows(shape)
        for stamp in stamps:
            windows.add([stamp, task], stamp, ("s",))
        evaluate(windows, until)
        windows.take_finished()
        two.append(windows)
    old = ((at, contents_of(windows, lambda entry: 0)) for at, windows in enumerate(two))
    contents = Partitioning(1, by_key=True).share(0, old, lambda key, values: values[0])
    merged = Windows(shape, (), contents.windows, contents.entries())
    assert merged.watermark == 20
    evaluate(merged, END)
    times = {
        (stamp, task): stamps.count(stamp)
        for task, stamps in enumerate((left, right))
        for stamp in stamps
    }
    for (stamp, task), number in times.items():
        ends = [end for end in range(0, 61 + length + slide, slide) if end - length < stamp <= end]
        assert sorted(seen.get((stamp, task), [])) == sorted(ends * number)


TUMBLING = st.one_of(
    st.builds(lambda ms: WindowShape(length_ms=ms, slide_ms=ms, event_time=True), SMALL),
    st.builds(
        lambda count: WindowShape(length_count=count, slide_count=count, event_time=True), SMALL
    ),
    st.builds(lambda ms: WindowShape(gap_ms=ms, event_time=True), SMALL),
)


@given(STEPS, TUMBLING, SMALL)
def test_windows_of_another_shape_begin_with_what_was_in_none(
    steps: list[tuple[str, int]], before: WindowShape, length: int
) -> None:
    windows = Windows(before)
    unseen = []
    for number, (what, stamp) in enumerate(steps):
        if what == "add" and windows.add(number, stamp, ("s",), 0) is not None:
            unseen.append(number)
        windows.advance(0)
        while (pane := windows.due()) is not None:
            unseen = [one for one in unseen if one not in pane.new]
            windows.done()
    windows.take_finished()
    changed = Windows(
        WindowShape(length_ms=length, slide_ms=length, event_time=True),
        (),
        windows.position(),
        held(windows),
    )
    changed.watermark = END
    found = []
    while (pane := changed.due()) is not None:
        found += pane.items
        changed.done()
    assert sorted(found) == sorted(unseen), "nothing is lost, nothing comes twice"
