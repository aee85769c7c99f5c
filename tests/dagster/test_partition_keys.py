"""The partition keys of topologies: `lifecycle_sensor` adds them, and drops them after the last
run.
"""

from __future__ import annotations

import dagster as dg
import pytest
from dagster._core.remote_origin import (
    GrpcServerCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)

from storm_dagster.defs import keys
from storm_dagster.defs.keys import PARTITIONS_NAME, UNFINISHED_STATUSES
from storm_dagster.defs.lifecycle.sensor import removed_by_leader
from storm_dagster.model.dagster_names import REBALANCE_JOB, SUBMIT_JOB
from storm_dagster.testing.waiting import eventually
from storm_rigs.dagster.dagster_results import SensorTick, step_failure, tick_sensor
from storm_rigs.stage.dagster_world import DagsterWorld
from storm_rigs.stage.nimbus_thread import NimbusThread

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper]

LOCATION = RemoteRepositoryOrigin(
    GrpcServerCodeLocationOrigin(host="localhost", port=1, location_name="here"), "__repository__"
)


def evaluate(world: DagsterWorld, cursor: str | None = None) -> SensorTick:
    """A tick of `lifecycle_sensor`."""
    return tick_sensor("lifecycle_sensor", world.instance, cursor, world.defs)


def running(world: DagsterWorld, name: str) -> None:
    """A topology of that name with live workers."""
    assert world.submit(name).success
    world.run_workers(name)


def test_the_sensor_adds_the_key_of_a_topology_that_lives(world: DagsterWorld) -> None:
    running(world, "wc")
    world.instance.delete_dynamic_partition(PARTITIONS_NAME, "wc")
    (request,) = evaluate(world).partition_requests
    assert isinstance(request, dg.AddDynamicPartitionsRequest)
    assert list(request.partition_keys) == ["wc"]


def has_key(world: DagsterWorld) -> bool:
    """True if `wc` is a partition key."""
    return world.instance.has_dynamic_partition(PARTITIONS_NAME, "wc")


def create_run(world: DagsterWorld, job: str, status: dg.DagsterRunStatus) -> dg.DagsterRun:
    """A run of the partition `wc` that has that status and does not go on."""
    return world.instance.create_run_for_job(
        world.defs.resolve_job_def(job),
        tags={"dagster/partition": "wc"},
        status=status,
        remote_job_origin=RemoteJobOrigin(LOCATION, job),
    )


def removed_between_two_ticks(world: DagsterWorld, leader: NimbusThread) -> str:
    """A topology `wc` that no tick sees alive; the cursor of the tick before."""
    cursor = evaluate(world).cursor
    running(world, "wc")
    old_id = world.topology("wc").id
    answer = leader.post("/v1/topologies/wc/kill", {"wait_secs": 0})
    assert answer.status_code == 202
    eventually(lambda: old_id in removed_by_leader(world.cluster), what="the removal")
    return cursor


@pytest.mark.parametrize("job", [SUBMIT_JOB, REBALANCE_JOB])
def test_the_key_of_a_removed_topology_goes_after_its_last_run(
    world: DagsterWorld, leader: NimbusThread, job: str
) -> None:
    cursor = removed_between_two_ticks(world, leader)
    for status in (*UNFINISHED_STATUSES, dg.DagsterRunStatus.CANCELING):
        run = create_run(world, job, status)
        cursor = evaluate(world, cursor).cursor
        assert has_key(world), status
        world.instance.delete_run(run.run_id)
    create_run(world, job, dg.DagsterRunStatus.FAILURE)
    free = evaluate(world, cursor)
    assert not has_key(world)
    # Prepared for the next submission of the name: the former removal is over.
    world.instance.add_dynamic_partitions(PARTITIONS_NAME, ["wc"])
    evaluate(world, free.cursor)
    assert has_key(world)


def test_a_run_launched_while_its_key_is_dropped_ends_with_not_alive(
    world: DagsterWorld, leader: NimbusThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sensor has found no run, and has not deleted the key yet."""
    cursor = removed_between_two_ticks(world, leader)
    delete = dg.DagsterInstance.delete_dynamic_partition
    queued: list[dg.DagsterRun] = []

    def launch_and_delete(instance: dg.DagsterInstance, definition: str, key: str) -> None:
        queued.append(create_run(world, REBALANCE_JOB, dg.DagsterRunStatus.QUEUED))
        delete(instance, definition, key)

    with monkeypatch.context() as patch:
        patch.setattr(dg.DagsterInstance, "delete_dynamic_partition", launch_and_delete)
        cursor = evaluate(world, cursor).cursor
    (run,) = queued
    assert has_key(world)
    # The run begins as Dagster's daemon begins it.
    result = world.run("rebalance_topology", tags=dict(run.tags))
    assert step_failure(result)[0] == "NotAlive"
    world.instance.delete_run(run.run_id)
    evaluate(world, cursor)
    assert not has_key(world)


def test_a_key_that_is_being_prepared_is_never_dropped(world: DagsterWorld) -> None:
    world.instance.add_dynamic_partitions(PARTITIONS_NAME, ["soon"])
    cursor: str | None = None
    for _ in range(3):
        result = evaluate(world, cursor)
        cursor = result.cursor
        assert world.instance.has_dynamic_partition(PARTITIONS_NAME, "soon")


@pytest.mark.usefixtures("leader")
def test_a_submission_lost_with_its_process_keeps_the_key_two_hours(
    world: DagsterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(world, "wc")
    cursor = evaluate(world).cursor
    config = {"ops": {"kill_topology_op": {"config": {"name": "wc", "wait_secs": 0}}}}
    assert world.run("kill_topology", config=config).success
    world.instance.add_dynamic_partitions(PARTITIONS_NAME, ["wc"])
    create_run(world, SUBMIT_JOB, dg.DagsterRunStatus.STARTED)
    cursor = evaluate(world, cursor).cursor
    evaluate(world, cursor)
    assert has_key(world)
    monkeypatch.setattr(keys, "_SILENT_SECS", 0.0)
    evaluate(world, cursor)
    assert not has_key(world)
