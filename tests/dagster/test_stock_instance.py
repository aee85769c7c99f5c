"""On an instance that others use too: short ticks, a full queue, and partitions of another
cluster.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    GrpcServerCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    SensorInstigatorData,
)

from storm_dagster.defs import build_storm_defs
from storm_dagster.defs.healing import heartbeat_sensor
from storm_dagster.defs.instance_settings import (
    SETTINGS_CHECK,
    SHORT_TICK_SECS,
    read_settings,
    tick_limit,
)
from storm_dagster.defs.keys import PARTITIONS_NAME, SUPERVISORS
from storm_dagster.defs.lifecycle.sensor import name_marks
from storm_dagster.model import paths
from storm_dagster.model.instance_advice import instance_advice
from storm_dagster.testing.waiting import eventually
from storm_rigs.dagster.dagster_results import SensorTick, tick_sensor
from storm_rigs.stage.dagster_world import DagsterWorld, connection_waits, leading_nimbus

ELSEWHERE = RemoteRepositoryOrigin(
    GrpcServerCodeLocationOrigin(host="localhost", port=1, location_name="other"), "__repository__"
)
pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper]


def tick(
    world: DagsterWorld,
    name: str,
    cursor: str | None = None,
    tick_secs: float = 0.0,
    instance: dg.DagsterInstance | None = None,
) -> SensorTick:
    defs = world.defs
    if tick_secs:
        defs = build_storm_defs(
            home=str(world.home), blob_dir=str(world.home / "blobs"), tick_secs=tick_secs
        )
    return tick_sensor(name, instance or world.instance, cursor, defs)


def running(world: DagsterWorld, name: str) -> None:
    assert world.submit(name, conf={"topology.workers": 2}).success
    world.run_workers(name)


def queue_run(world: DagsterWorld, request: dg.RunRequest) -> dg.DagsterRun:
    """Run of the request in a full queue."""
    return world.instance.create_run_for_job(
        world.defs.resolve_job_def("reassign_topologies"),
        run_config=request.run_config,
        tags=dict(request.tags),
        status=dg.DagsterRunStatus.QUEUED,
        remote_job_origin=RemoteJobOrigin(ELSEWHERE, "reassign_topologies"),
    )


def test_where_sensors_share_a_thread_a_tick_is_short_and_says_why(world: DagsterWorld) -> None:
    running(world, "wc")
    with dg.DagsterInstance.ephemeral() as stock:
        context = dg.build_sensor_context(instance=stock)
        assert tick_limit(context, 50.0)[0] == SHORT_TICK_SECS
        result = tick(world, "heartbeat_sensor", tick_secs=50.0, instance=stock)
    said = result.skip_message
    assert (
        "2 workers of 1 topologies live" in said
        and "sensors.use_threads: true in dagster.yaml" in said
    )
    # It heals all the same.
    world.lose_host("s1")
    with dg.DagsterInstance.ephemeral() as stock:
        (request,) = tick(world, "heartbeat_sensor", result.cursor, 50.0, stock).run_requests
    assert request.tags["dagster/priority"] == "1000"


@pytest.mark.parametrize(
    ("settings", "waits_ms"),
    [({}, 2000), ({"sensors": {"use_threads": True}}, 15000)],
    ids=["stock", "threads"],
)
def test_without_zookeeper_no_tick_holds_up_the_sensors_that_share_its_thread(
    world: DagsterWorld, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], waits_ms: int
) -> None:
    waits = connection_waits(monkeypatch)
    with dg.DagsterInstance.ephemeral(settings=settings) as instance:
        for sensor in world.defs.sensors or ():
            before = len(waits)
            tick_sensor(sensor.name, instance, defs=world.defs)
            assert waits[before:] == [waits_ms], sensor.name


@pytest.mark.long
def test_behind_a_full_queue_the_leader_heals_before_the_run(
    world: DagsterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_sensor, "_MAX_QUEUE_SECS", 0.0)
    running(world, "wc")
    cursor = tick(world, "heartbeat_sensor").cursor
    world.lose_host("s1")
    first = tick(world, "heartbeat_sensor", cursor)
    (request,) = first.run_requests
    queued = queue_run(world, request)
    memory = world.stored_memory(first.cursor)
    for attempt in memory["attempts"].values():
        attempt[1] = 0.0  # The back-off is over.
    stuck = tick(world, "heartbeat_sensor", world.with_memory(first.cursor, memory))
    assert not stuck.run_requests
    assert "does not start: the leader heals" in stuck.skip_message

    # A waiting tick leaves the node to nobody, so that the leader's backstop comes; afterwards it
    # is held again.
    found: list[SensorTick] = []
    thread = threading.Thread(
        target=lambda: found.append(tick(world, "heartbeat_sensor", stuck.cursor, tick_secs=50.0)),
        daemon=True,
    )
    thread.start()
    for _ in range(10):
        time.sleep(0.1)
        assert not world.cluster.state.exists(paths.HEALER)
    assert world.run("reassign_topologies").success  # What the leader does.
    world.run_workers("wc")
    eventually(lambda: world.cluster.state.exists(paths.HEALER), what="the sensor that heals again")
    healed = world.topology("wc")
    assert {worker.node for worker in healed.assignment.workers} == {"s2"}

    late = world.run(
        str(request.job_name), config=dict(request.run_config), tags=dict(request.tags)
    )
    assert late.success
    assert world.topology("wc").assignment_at == healed.assignment_at
    world.instance.delete_run(queued.run_id)
    world.lose_host("s2")  # Ends the tick.
    thread.join(timeout=50)
    assert found


def test_a_queued_run_of_any_age_is_not_asked_for_again(
    world: DagsterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_sensor, "_MAX_QUEUE_SECS", 0.0)
    monkeypatch.setattr(heartbeat_sensor, "_MAX_RUN_SECS", 0.0)
    running(world, "wc")
    cursor = tick(world, "heartbeat_sensor").cursor
    world.lose_host("s1")
    job = world.defs.resolve_job_def("reassign_topologies")
    (request,) = tick(world, "heartbeat_sensor", cursor).run_requests
    run = queue_run(world, request)
    assert not tick(world, "heartbeat_sensor", cursor).run_requests
    # One that was started so long ago is dead.
    world.instance.delete_run(run.run_id)
    world.instance.create_run_for_job(
        job, run_config=request.run_config, status=dg.DagsterRunStatus.STARTED
    )
    assert tick(world, "heartbeat_sensor", cursor).run_requests


@pytest.mark.parametrize(
    ("text", "advised"),
    [
        ("", {"sensors.use_threads", "run_queue.dequeue_interval_seconds"}),
        (
            "sensors: {num_workers: 4}",
            {"sensors.use_threads", "run_queue.dequeue_interval_seconds"},
        ),
        ("sensors: {use_threads: true}\nrun_queue: {dequeue_interval_seconds: 1}", set()),
        (
            "sensors: {use_threads: true}\nrun_queue: {dequeue_interval_seconds: 1, max_concurrent_runs: 1}",
            {"concurrency.runs.max_concurrent_runs"},
        ),
        (
            "sensors: {use_threads: true}\nconcurrency: {runs: {max_concurrent_runs: 1}}",
            {"run_queue.dequeue_interval_seconds", "concurrency.runs.max_concurrent_runs"},
        ),
        (
            "sensors: {use_threads: true}\n"
            "run_coordinator: {module: dagster._core.run_coordinator, class: DefaultRunCoordinator}",
            set(),
        ),
    ],
)
def test_real_settings_are_read(tmp_path: Path, text: str, advised: set[str]) -> None:
    (tmp_path / "dagster.yaml").write_text(text, encoding="utf-8")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert {row.setting for row in instance_advice(read_settings(instance))} == advised


def test_the_check_of_the_settings_warns_and_is_evaluated_when_they_change(
    world: DagsterWorld,
) -> None:
    check = next(
        c for c in world.defs.asset_checks or [] if SETTINGS_CHECK in {k.name for k in c.check_keys}
    )
    with dg.DagsterInstance.ephemeral() as stock:
        outcome = dg.materialize([check], instance=stock, selection=dg.AssetSelection.checks(check))
        (evaluation,) = outcome.get_asset_check_evaluations()
        assert not evaluation.passed and evaluation.severity == dg.AssetCheckSeverity.WARN
        assert "sensors.use_threads" in str(evaluation.description)
        first = tick(world, "lifecycle_sensor", instance=stock)
        (event,) = first.checks
        assert len(first.asset_events) == 1
        assert (event.asset_key, event.check_name, event.passed) == (
            SUPERVISORS,
            SETTINGS_CHECK,
            False,
        )
        assert not tick(world, "lifecycle_sensor", first.cursor, instance=stock).asset_events
    (event,) = tick(world, "lifecycle_sensor", first.cursor).checks
    assert event.passed


def remember_elsewhere(instance: dg.DagsterInstance, cursor: str) -> None:
    """The state of another code location's sensor of the same name, as Dagster's daemon stores
    it.
    """
    origin = RemoteInstigatorOrigin(ELSEWHERE, "lifecycle_sensor")
    data = SensorInstigatorData(cursor=cursor)
    instance.add_instigator_state(
        InstigatorState(origin, InstigatorType.SENSOR, InstigatorStatus.DECLARED_IN_CODE, data)
    )


@pytest.mark.parametrize(
    ("alive_there", "dropped"),
    [(["wc"], False), (["other"], True), ([f"t{n}" for n in range(500)], False)],
)
def test_the_key_of_a_topology_that_lives_in_another_cluster_stays(
    world: DagsterWorld, alive_there: list[str], dropped: bool
) -> None:
    with dg.instance_for_test() as instance:
        world.instance = instance
        running(world, "wc")
        cursor = tick(world, "lifecycle_sensor").cursor
        # Above 400 topologies all names count as alive there.
        there = {"cluster": "another", "alive": name_marks(alive_there)}
        remember_elsewhere(instance, json.dumps(there))
        # Killed here, by a run and then in the eyes of the sensor.
        config = {"ops": {"kill_topology_op": {"config": {"name": "wc", "wait_secs": 0}}}}
        with leading_nimbus(world):
            assert world.run("kill_topology", config=config).success
        assert world.topology("wc") is None
        assert instance.has_dynamic_partition(PARTITIONS_NAME, "wc") is not dropped
        instance.add_dynamic_partitions(PARTITIONS_NAME, ["wc"])
        tick(world, "lifecycle_sensor", cursor)
        assert instance.has_dynamic_partition(PARTITIONS_NAME, "wc") is not dropped
