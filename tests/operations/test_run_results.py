"""Results of verbs: outcome, tasks that moved, warnings, and the assignment that is in force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.model.run_result import MOVED_TAG, RunResult
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.read.run_results import (
    lifecycle_result,
    moved_tasks,
    rebalance_result,
)
from storm_dagster.operations.submit import submission
from storm_rigs.stage.records import World


@pytest.mark.zookeeper
def test_a_rebalance_without_effect_says_that_all_is_even(world: World) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    answer = rebalance_result(rebalance(world.context(), "wc"))
    assert (answer.outcome, answer.moved) == ("unchanged", 0)
    assert answer.summary == "nothing to move: 2 workers on 2 hosts are even"


@pytest.mark.zookeeper
def test_a_rebalance_without_effect_names_the_limits_of_its_slots(world: World) -> None:
    conf = {"topology.workers": 2, "isolation.scheduler.machines": ["s1"]}
    world.submit("wc", conf=conf)
    answer = rebalance_result(rebalance(world.context(), "wc"))
    assert (answer.outcome, answer.moved) == ("unchanged", 0)
    expected = (
        "nothing to move: 2 workers on 1 host, isolation.scheduler.machines leaves 1 of 2 hosts"
    )
    assert answer.summary == expected


@pytest.mark.zookeeper
def test_hosts_without_effect_are_warnings_of_rebalance_and_update(world: World) -> None:
    conf = {"topology.workers": 2, "isolation.scheduler.machines": ["s1", "s9"]}
    world.submit("wc", conf=conf)
    expected = "no supervisor is registered on s9 of its isolation.scheduler.machines"
    (warning,) = rebalance_result(rebalance(world.context(), "wc")).warnings
    assert expected in warning
    world.upload("new", conf=conf)
    result = lifecycle.update(world.context(), "wc", token="new", handle="new")
    assert [expected in warning for warning in result.warnings] == [True]


@pytest.mark.zookeeper
def test_a_rebalance_says_how_many_tasks_moved(world: World) -> None:
    world.submit("wc")
    before = world.assignment("wc")
    report = rebalance(world.context(), "wc", workers=2, wait_secs=0)
    answer = rebalance_result(report)
    assert answer.outcome == "assigned" and answer.moved
    assert answer.moved == moved_tasks(before, world.assignment("wc"))
    assert answer.summary == f"{answer.moved} tasks moved: 2 workers on 2 hosts"


@pytest.mark.zookeeper
def test_activating_an_active_topology_says_that_nothing_was_done(world: World) -> None:
    world.submit("wc")
    answer = lifecycle_result("activate", lifecycle.activate(world.context(), "wc"))
    assert (answer.outcome, answer.moved) == ("unchanged", 0)
    assert answer.summary == "nothing to do: it is ACTIVE already"
    answer = lifecycle_result("deactivate", lifecycle.deactivate(world.context(), "wc"))
    assert (answer.outcome, answer.moved) == ("changed", 0)


@pytest.mark.zookeeper
def test_the_assignment_stage_of_a_running_topology_has_the_one_in_force(world: World) -> None:
    world.submit("wc", "t1", conf={"topology.workers": 3})
    rebalance(world.context(), "wc", workers=2, wait_secs=0)
    report = submission.stage_assignment(world.context(), token="t1")
    assert report.in_force == world.assignment("wc")
    assert len(report.placement.workers) == 3


@given(
    st.builds(
        RunResult,
        outcome=st.none() | st.text(min_size=1),
        moved=st.none() | st.integers(0, 10**6),
        summary=st.text(),
        warnings=st.lists(st.text(max_size=300), max_size=20).map(tuple),
    )
)
def test_a_result_is_read_from_the_tags_of_its_run(result: RunResult) -> None:
    read = RunResult.of_tags(result.to_tags())
    if result.outcome is None:
        assert read.moved is None  # A planned number is not the result.
    else:
        assert read == result
    assert RunResult.of_document(result.to_document()) == result


def test_warnings_are_added_once() -> None:
    first = RunResult("changed").with_warnings(["a", "b" * 999])
    again = RunResult.of_tags(first.to_tags()).with_warnings(["b" * 999, "c", "c"])
    assert again == RunResult("changed", warnings=("a", "b" * 300, "c"))


def test_many_warnings_are_bounded_and_counted() -> None:
    result = RunResult(warnings=tuple(f"warning {number}" for number in range(30)))
    *first, last = RunResult.of_tags(result.to_tags()).warnings
    assert len(first) == 20 and last.startswith("and 10 more")
    assert RunResult.of_tags({MOVED_TAG: "x", "storm/warnings": "{"}) == RunResult()
