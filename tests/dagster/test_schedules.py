"""Schedules launch a run only when there is something to do."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest

from storm_dagster.defs import keys
from storm_dagster.defs.keys import PARTITIONS_NAME
from storm_dagster.defs.observe.history import load_inbox_memory
from storm_dagster.defs.scheduled_runs import assignment_tags, earlier_request
from storm_dagster.model import paths
from storm_dagster.model.records import encode_record
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.dagster.dagster_results import materialized, shown
from storm_rigs.stage.dagster_world import DagsterWorld

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper]


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """On disk: a schedule's context takes no other."""
    with dg.instance_for_test() as made:
        yield made


def tick(world: DagsterWorld, name: str) -> Any:
    schedule = world.defs.resolve_schedule_def(name)
    with dg.build_schedule_context(
        instance=world.instance,
        resources=dict(world.defs.resources or {}),
        repository_def=world.defs.get_repository_def(),
    ) as context:
        return schedule.evaluate_tick(context)


def test_a_balanced_cluster_is_not_rebalanced(world: DagsterWorld) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    world.run_workers("wc")
    data = tick(world, "rebalance_schedule")
    assert not data.run_requests
    assert "wc: it is balanced" in data.skip_message


def crowded(world: DagsterWorld, **conf: Any) -> None:
    """A topology whose four workers stand on one of two supervisors."""
    world.lose_supervisor("s2")
    world.submit("wc", conf={"topology.workers": 4, **conf})
    world.run_workers("wc")
    world.supervisor("s2")


def test_a_topology_that_can_spread_better_is_rebalanced_once(world: DagsterWorld) -> None:
    crowded(world)
    (request,) = tick(world, "rebalance_schedule").run_requests
    assert request.partition_key == "wc"
    # Two of the four workers move, no more.
    assert (request.run_config, request.tags["storm/moved_tasks"]) == ({}, "3")
    # A tick that Dagster repeats has no second run.
    (again,) = tick(world, "rebalance_schedule").run_requests
    assert request.run_key == again.run_key
    job = world.defs.resolve_job_def("rebalance_topology")
    run = world.instance.create_run_for_job(
        job, tags=request.tags, status=dg.DagsterRunStatus.STARTED
    )
    skipped = str(tick(world, "rebalance_schedule").skip_message)
    assert "a run for this assignment is under way" in skipped
    # Nor is one requested at every tick after a run that had no effect.
    world.instance.report_run_failed(run)
    skipped = str(tick(world, "rebalance_schedule").skip_message)
    assert f"run {run.run_id} for this assignment has not changed it" in skipped


def test_an_hour_or_an_assignment_later_a_run_may_be_requested_again(world: DagsterWorld) -> None:
    crowded(world)
    topology = world.topology("wc")
    assert topology is not None and topology.assignment_at is not None
    job = world.defs.resolve_job_def("rebalance_topology")
    run = world.instance.create_run_for_job(job, tags=assignment_tags(topology))
    world.instance.report_run_failed(run)
    made_at = time.time()
    assert "has not changed it" in earlier_request(world.instance, topology, made_at + 3500)
    assert earlier_request(world.instance, topology, made_at + 3601) == ""
    assignment_at = replace(topology.assignment_at, version=topology.assignment_at.version + 1)
    changed = replace(topology, assignment_at=assignment_at)
    assert earlier_request(world.instance, changed, made_at) == ""


def test_a_recent_placement_is_not_moved_and_ticks_read_once(
    world: DagsterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowded(world)
    world.submit("other")
    reads: list[object] = []
    load_view = StormClusterState.load_view
    monkeypatch.setattr(
        StormClusterState, "load_view", lambda state: reads.append(state) or load_view(state)
    )
    assert tick(world, "rebalance_schedule").run_requests
    assert len(reads) == 1
    monkeypatch.undo()
    topology = world.topology("wc")
    assert topology is not None and topology.assignment is not None
    placed = topology.assignment
    again = placed.model_copy(update={"timestamp_ms": int(time.time() * 1000)})
    world.cluster.state.set_data(paths.assignment(placed.topology_id), encode_record(again))
    message = tick(world, "rebalance_schedule").skip_message
    assert re.search(r"wc: it was placed \d+ s ago: it is rebalanced again after 600 s", message)


def test_a_gain_below_the_threshold_moves_nothing_and_says_so(world: DagsterWorld) -> None:
    crowded(world, **{"topology.rebalance.threshold": 1.0})
    data = tick(world, "rebalance_schedule")
    assert not data.run_requests
    assert "imbalance 1.00 would become 0.00" in data.skip_message
    assert "topology.rebalance.threshold 1" in data.skip_message


def test_a_host_that_just_came_gets_no_task_of_a_schedule(world: DagsterWorld) -> None:
    crowded(world)
    world.supervisor("s2", present_secs=599)
    assert "wc: it is balanced" in tick(world, "rebalance_schedule").skip_message
    world.supervisor("s2", present_secs=600)
    assert tick(world, "rebalance_schedule").run_requests


def test_a_scheduled_run_moves_nothing_of_a_topology_that_is_no_longer_steady(
    world: DagsterWorld,
) -> None:
    """A worker dies between the tick and its run: healing comes first."""
    crowded(world)
    (request,) = tick(world, "rebalance_schedule").run_requests
    topology = world.topology("wc")
    assert topology is not None and topology.assignment is not None
    worker = topology.assignment.workers[0]
    world.stop_worker(topology.id, worker.node, worker.port)
    result = world.run("rebalance_topology", partition="wc", tags=request.tags)
    assert result.success
    metadata = materialized(result, "published_assignment")
    assert metadata["outcome"] == "unchanged"
    assert "1 of its workers do not live, healing comes first" in metadata["reason"]


def test_a_topology_with_dead_workers_is_left_to_the_healer(world: DagsterWorld) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    message = tick(world, "rebalance_schedule").skip_message
    assert "2 of its workers do not live, healing comes first" in message


def test_garbage_is_remembered_and_cleaned_only_when_it_is_old_enough(world: DagsterWorld) -> None:
    world.upload("forgotten")
    data = tick(world, "inbox_cleanup_schedule")
    assert not data.run_requests
    memory = load_inbox_memory(world.instance)
    assert any("upload.forgotten" in key for key in memory)
    assert world.blobs.exists("upload.forgotten.archive")


def test_cleaning_removes_what_was_garbage_for_its_time(world: DagsterWorld) -> None:
    from storm_dagster.defs.observe.history import observation
    from storm_dagster.host.clock import boot_clock

    world.upload("forgotten")
    world.submit("wc")
    tick(world, "inbox_cleanup_schedule")
    memory = {
        key: (since - 10_000 if "forgotten" in key else since)
        for key, since in load_inbox_memory(world.instance).items()
    }
    assert all(since <= boot_clock() for since in memory.values())
    world.instance.report_runless_asset_event(observation(memory, None, 0))
    assert len(tick(world, "inbox_cleanup_schedule").run_requests) == 1
    assert world.run("clean_inbox").success
    assert not world.blobs.exists("upload.forgotten.archive")
    assert world.topology("wc") is not None
    newest = world.instance.fetch_observations(keys.INBOX, limit=1).records[0].asset_observation
    assert shown(newest)["removed"] == 3


def test_the_partition_key_is_needed_for_a_rebalance(world: DagsterWorld) -> None:
    world.submit("wc")
    world.run_workers("wc")
    world.instance.delete_dynamic_partition(PARTITIONS_NAME, "wc")
    assert not tick(world, "rebalance_schedule").run_requests
