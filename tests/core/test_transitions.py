"""The table of statuses and events."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from storm_dagster.core.transitions import (
    DueMemory,
    apply_event,
    delay_of,
    due_actions,
    secs_until_removal,
)
from storm_dagster.model.errors import Conflict
from storm_dagster.model.records import StormBase, TopologyStatus
from storm_dagster.model.verbs import StatusEvent
from storm_dagster.model.view import ClusterView, TopologyView, Versioned
from storm_dagster.zk.sensor_memory import decode_memory, encode_memory

ALLOWED: dict[str, dict[str, str]] = {
    "ACTIVE": {
        "activate": "ACTIVE",
        "deactivate": "INACTIVE",
        "kill": "KILLED",
        "rebalance": "REBALANCING",
        "upgrade": "UPGRADING",
        "drain": "INACTIVE",
    },
    "INACTIVE": {
        "activate": "ACTIVE",
        "deactivate": "INACTIVE",
        "kill": "KILLED",
        "rebalance": "REBALANCING",
    },
    "KILLED": {"kill": "KILLED"},
    "REBALANCING": {"kill": "KILLED", "finish_rebalance": "ACTIVE"},
    "UPGRADING": {"kill": "KILLED", "end_upgrade": "ACTIVE", "rollback": "ROLLBACK"},
    "ROLLBACK": {"kill": "KILLED", "end_upgrade": "ACTIVE"},
}


def base(status: Any = "ACTIVE", **more: Any) -> StormBase:
    return StormBase(
        name="wc",
        launch_time_secs=0,
        status=status,
        workers=1,
        executors={"a": 1},
        token="t",
        **more,
    )


@pytest.mark.parametrize("status", get_args(TopologyStatus))
@pytest.mark.parametrize("event", get_args(StatusEvent))
def test_every_event_is_allowed_or_a_conflict_in_every_status(status: Any, event: Any) -> None:
    expected = ALLOWED[status].get(event)
    if expected is None:
        with pytest.raises(Conflict, match=f"is {status} and cannot be"):
            apply_event(base(status), event)
    else:
        assert apply_event(base(status), event, delay_secs=5).status == expected


def test_nothing_changes_gives_the_same_object() -> None:
    active = base("ACTIVE", wanted_status="ACTIVE")
    assert apply_event(active, "activate") is active
    inactive = base("INACTIVE", wanted_status="INACTIVE")
    assert apply_event(inactive, "deactivate") is inactive
    killed = apply_event(active, "kill", delay_secs=5)
    assert apply_event(killed, "kill", delay_secs=5) is killed
    assert apply_event(killed, "kill", delay_secs=9).delay_secs == 9


def test_an_inactive_topology_stays_inactive_through_a_rebalance() -> None:
    inactive = base("INACTIVE", wanted_status="INACTIVE")
    waiting = apply_event(inactive, "rebalance", delay_secs=3)
    assert (waiting.previous_status, waiting.delay_secs) == ("INACTIVE", 3)
    assert apply_event(waiting, "finish_rebalance") == inactive


def test_a_drain_is_undone_after_its_delay_unless_somebody_ends_it() -> None:
    active = base("ACTIVE", wanted_status="ACTIVE")
    drained = apply_event(active, "drain", delay_secs=7)
    assert (drained.status, drained.wanted_status, drained.delay_secs) == ("INACTIVE", "ACTIVE", 7)
    assert apply_event(drained, "activate") == active
    assert apply_event(drained, "deactivate") == apply_event(active, "deactivate")


def test_a_kill_during_a_rebalance_wins() -> None:
    killed = apply_event(apply_event(base(), "rebalance", delay_secs=3), "kill", delay_secs=1)
    assert (killed.status, killed.previous_status, killed.delay_secs) == (
        "KILLED",
        "REBALANCING",
        1,
    )
    with pytest.raises(Conflict):
        apply_event(killed, "finish_rebalance")


@pytest.mark.parametrize(("asked", "expected"), [(None, 30), (-1, 30), (0, 0), (7, 7)])
def test_a_delay_that_is_not_given_is_the_default(asked: int | None, expected: int) -> None:
    assert delay_of(asked, 30) == expected


def view(*bases: tuple[str, StormBase, int]) -> ClusterView:
    return ClusterView(
        cluster_id="c",
        epoch=1,
        assignments_version=1,
        supervisors={},
        topologies={
            topology_id: TopologyView(topology_id, part, Versioned(1, mzxid))
            for topology_id, part, mzxid in bases
        },
    )


def test_due_by_the_observers_clock() -> None:
    killed = base("KILLED", delay_secs=10)
    due, memory = due_actions(view(("k", killed, 5)), DueMemory(), boot_id="b", boot_now=100)
    assert due == []
    due, memory = due_actions(view(("k", killed, 5)), memory, boot_id="b", boot_now=109.9)
    assert due == []
    # A newer kill is a newer record: its delay begins again.
    due, memory = due_actions(view(("k", killed, 6)), memory, boot_id="b", boot_now=110)
    assert due == []
    due, memory = due_actions(view(("k", killed, 6)), memory, boot_id="b", boot_now=120)
    assert [(action.topology_id, action.action) for action in due] == [("k", "remove")]
    assert decode_memory(DueMemory, encode_memory(memory)) == memory
    assert due_actions(view(("k", killed, 6)), memory, boot_id="other", boot_now=9999)[0] == []


def test_the_observer_of_a_kill_knows_the_rest_of_its_delay() -> None:
    shown = view(("k", base("KILLED", delay_secs=10), 5))
    killed = shown.topologies["k"]
    _, memory = due_actions(shown, DueMemory(), boot_id="b", boot_now=100)
    assert secs_until_removal(memory, killed, boot_id="b", boot_now=104) == 6
    assert secs_until_removal(memory, killed, boot_id="b", boot_now=111) == -1
    # Not seen yet: another observer, another boot, and a newer kill.
    newer = view(("k", base("KILLED", delay_secs=99), 6)).topologies["k"]
    assert secs_until_removal(DueMemory(), killed, boot_id="b", boot_now=104) is None
    assert secs_until_removal(memory, killed, boot_id="other", boot_now=104) is None
    assert secs_until_removal(memory, killed, boot_id="b", boot_now=99) is None
    assert secs_until_removal(memory, newer, boot_id="b", boot_now=104) is None


def test_late_secs_leave_time_to_others_but_not_for_a_removal() -> None:
    shown = view(
        ("k", base("KILLED", delay_secs=10), 1),
        ("r", base("REBALANCING", delay_secs=10), 1),
        ("u", base("INACTIVE", wanted_status="ACTIVE", delay_secs=10), 1),
    )
    _, memory = due_actions(shown, DueMemory(), boot_id="b", boot_now=0, late_secs=10)

    def due(boot_now: float) -> list[str]:
        actions, _ = due_actions(shown, memory, boot_id="b", boot_now=boot_now, late_secs=10)
        return [action.action for action in actions]

    assert due(9.9) == []
    assert due(10) == due(19.9) == ["remove"]
    assert due(20) == ["remove", "finish_rebalance", "activate"]


def test_no_delay_is_due_at_once_and_quiet_ones_never() -> None:
    shown = view(
        ("a", base(), 1),
        ("i", base("INACTIVE", wanted_status="INACTIVE"), 1),
        ("k", base("KILLED", delay_secs=0), 1),
        ("r", base("REBALANCING", delay_secs=0), 1),
        ("u", base("INACTIVE", wanted_status="ACTIVE"), 1),
    )
    due, memory = due_actions(shown, DueMemory(), boot_id="b", boot_now=0)
    assert [(part.topology_id, part.action) for part in due] == [
        ("k", "remove"),
        ("r", "finish_rebalance"),
    ]
    due, _ = due_actions(shown, memory, boot_id="b", boot_now=5)
    assert [part.action for part in due] == ["remove", "finish_rebalance", "activate"]


@pytest.mark.parametrize(
    "garbage", [None, [], {"seen": 3}, {"boot_id": "b", "seen": {"x": [1]}}, "x"]
)
def test_a_bad_cursor_is_an_empty_memory(garbage: Any) -> None:
    assert decode_memory(DueMemory, json.dumps(garbage)) == DueMemory()
