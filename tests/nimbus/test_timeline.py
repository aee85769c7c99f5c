"""The timeline of a topology: what was changed, why, by which run, and what came back by itself."""

from __future__ import annotations

from collections.abc import Sequence

from storm_dagster.core.snapshot.topology import TopologySnapshot
from storm_dagster.model.records import (
    Assignment,
    AssignmentChange,
    StormBase,
    TaskError,
    WorkerNode,
    WorkerSlot,
)
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import TopologyView, Versioned
from storm_dagster.nimbus.http.pages.facts import timeline
from storm_rigs.operations.snapshots import snapshot_alone

PLACED = 1_700_000_000


def snapshot(
    history: tuple[AssignmentChange, ...] = (),
    errors: Sequence[tuple[str, TaskError]] = (),
    started_secs: int = PLACED + 3,
) -> TopologySnapshot:
    slot = WorkerSlot(node="s1", host="h1", port=6700, tasks="1-2")
    assignment = Assignment(
        topology_id="wc-1-1",
        code_dir="wc-1-1",
        node_host={"s1": "h1"},
        workers=(slot,),
        task_start_secs={"1-2": PLACED},
        timestamp_ms=PLACED * 1000,
        history=history,
    )
    base = StormBase(
        name="wc", launch_time_secs=PLACED, status="ACTIVE", workers=1, executors={}, token="t"
    )
    node = WorkerNode(
        pid=77, token="t", version=0, tasks="1-2", started_ms=started_secs * 1000, status="running"
    )
    at = Versioned(0, 0)
    topology = TopologyView(
        "wc-1-1",
        base,
        at,
        assignment=assignment,
        assignment_at=at,
        live_workers={Slot("s1", 6700): node},
    )
    return snapshot_alone(topology, now_secs=PLACED + 900, errors=errors)


def url(run: str) -> str:
    return f"http://dagster/runs/{run}"


def test_a_healing_says_why_how_long_and_by_which_run() -> None:
    healed = AssignmentChange(
        at_secs=PLACED,
        action="healed",
        why="worker h2:6700 did not come back",
        moved=2,
        outage_secs=31,
        run="r1",
    )
    submitted = AssignmentChange(at_secs=PLACED - 50, action="submitted", why="as wc-1-1")
    found = timeline(snapshot((healed, submitted)), url)
    assert [event.action for event in found] == ["healed", "submitted"]
    assert (
        found[0].text == "worker h2:6700 did not come back, 2 tasks moved, silent for 31 s before"
    )
    assert found[0].run == "http://dagster/runs/r1" and found[1].run is None


def test_a_process_replaced_in_its_slot_is_shown_as_such() -> None:
    assert timeline(snapshot(), url) == []
    (event,) = timeline(snapshot(started_secs=PLACED + 600), url)
    assert event.action == "started" and event.text == "worker h1:6700 in its place, process 77"
    assert event.at_secs == PLACED + 600


def test_errors_and_changes_are_ordered_by_time_page_by_page() -> None:
    change = AssignmentChange(at_secs=PLACED + 20, action="rebalanced")
    errors = [
        (
            "split",
            TaskError(
                task=2, host="h1", port=6700, time=PLACED + at, error="Traceback\nValueError: x\n"
            ),
        )
        for at in range(0, 100, 10)
    ]
    found = timeline(snapshot((change,), errors), url)
    assert [event.at_secs - PLACED for event in found] == [
        90,
        80,
        70,
        60,
        50,
        40,
        30,
        20,
        20,
        10,
        0,
    ]
    assert found[0].text == "split[2] on h1:6700: ValueError: x"
    assert len(timeline(snapshot((change,), errors * 10), url)) == 40
