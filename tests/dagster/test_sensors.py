"""The sensors: what they ask for, what they remember, and what they never do twice."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import dagster as dg
import pytest
import yaml

from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.defs import build_storm_defs, keys
from storm_dagster.defs.healing import sensor_watch
from storm_dagster.defs.healing.memory import HealingCursor
from storm_dagster.defs.healing.sensor_watch import SensorWatch
from storm_dagster.defs.keys import PARTITIONS_NAME
from storm_dagster.defs.resources.spark import SparkResource
from storm_dagster.host.endpoints import cluster_conf
from storm_dagster.model import paths
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.placement import PlacementBatch, PlacementResult
from storm_dagster.model.records import encode_record
from storm_dagster.operations.context import OperationsContext, Planner
from storm_dagster.operations.live.healing_pause import pause_healing, resume_healing
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.dagster.dagster_results import SensorTick, run_config, shown, tick_sensor
from storm_rigs.stage.dagster_world import DagsterWorld

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper]


class NoSpark(SparkResource):
    """Fails whoever asks it for a plan: PySpark changes the environment of its process."""

    def planner(self, cluster: StormClusterState) -> Planner:
        def plan(batch: PlacementBatch) -> PlacementResult:
            raise AssertionError("PySpark was asked for a plan")

        return plan


def evaluate(
    world: DagsterWorld, sensor: str, cursor: str | None = None, defs: dg.Definitions | None = None
) -> SensorTick:
    return tick_sensor(sensor, world.instance, cursor, defs or world.defs)


def another_process() -> None:
    """The code server was replaced: only what stands in ZooKeeper is known."""
    HealingCursor._recent.clear()


def set_limits(world: DagsterWorld, **limits: object) -> None:
    path = world.home / "storm.yaml"
    conf = yaml.safe_load(path.read_text(encoding="utf-8"))
    conf.update(limits)
    path.write_text(yaml.safe_dump(conf), encoding="utf-8")


def running(world: DagsterWorld, *names: str, workers: int = 2) -> None:
    for name in names:
        assert world.submit(name, conf={"topology.workers": workers}).success
        world.run_workers(name)


def launch(world: DagsterWorld, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
    """Run what a sensor asked for, under its run key, as Dagster's daemon does."""
    assert request.job_name is not None and request.run_key is not None
    tags = {**request.tags, "dagster/run_key": request.run_key}
    return world.run(request.job_name, config=dict(request.run_config), tags=tags)


def test_a_healthy_cluster_asks_for_nothing(world: DagsterWorld) -> None:
    running(world, "wc")
    result = evaluate(world, "heartbeat_sensor")
    assert not result.run_requests
    assert result.skip_message
    memory = world.stored_memory(result.cursor)
    assert memory["liveness"]["boot_id"]
    assert set(memory["workers"]) == {world.topology("wc").id}


def test_beats_alone_write_nothing(world: DagsterWorld) -> None:
    running(world, "wc")
    first = evaluate(world, "heartbeat_sensor")
    due = evaluate(world, "lifecycle_sensor")
    written = {
        path: world.cluster.state.get_version(path)
        for path in ("/sensors/heartbeat_sensor", "/sensors/lifecycle_sensor")
    }
    for count in (2, 3, 4):
        for node in ("s1", "s2"):
            info = world.cluster.load_view().supervisors[node]
            beat = encode_record(info.model_copy(update={"count": count}))
            world.cluster.state.set_ephemeral_node(paths.supervisor(node), beat)
        first = evaluate(world, "heartbeat_sensor", first.cursor)
        due = evaluate(world, "lifecycle_sensor", due.cursor)
    assert {path: world.cluster.state.get_version(path) for path in written} == written
    assert len(first.cursor) < 200 and len(due.cursor) < 200


def test_a_silent_supervisor_is_found_over_ticks_of_no_length(world: DagsterWorld) -> None:
    set_limits(world, **{"nimbus.supervisor.timeout.secs": 1})
    cursor: str | None = None

    def silent() -> bool:
        nonlocal cursor
        result = evaluate(world, "heartbeat_sensor", cursor)
        cursor = result.cursor
        return "silent supervisors: s1, s2" in result.skip_message

    eventually(silent, what="the silent supervisors", interval=0.2)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lost_host_is_one_run_for_all_its_topologies(world: DagsterWorld, replaced: bool) -> None:
    running(world, "a", "b")
    cursor = evaluate(world, "heartbeat_sensor").cursor
    world.lose_host("s1")
    if replaced:
        another_process()
    (request,) = evaluate(world, "heartbeat_sensor", cursor).run_requests
    causes = run_config(request, "reassign_topologies_op")["causes"]
    assert {cause["name"] for cause in causes} == {"a", "b"}
    assert {cause["kind"] for cause in causes} == {"lost_host"}
    assert request.job_name == "reassign_topologies"
    assert "lost_host@s1" in str(request.run_key)
    assert str(request.run_key).endswith(":1")
    assert launch(world, request).success
    for name in ("a", "b"):
        assert {worker.node for worker in world.topology(name).assignment.workers} == {"s2"}


def test_a_repeated_tick_repeats_its_run_key_until_healed(
    world: DagsterWorld,
) -> None:
    running(world, "wc")
    cursor = evaluate(world, "heartbeat_sensor").cursor
    world.lose_host("s1")
    first = evaluate(world, "heartbeat_sensor", cursor)
    another_process()
    # The tick's answer was lost with the code server: the next one starts from the old cursor.
    again = evaluate(world, "heartbeat_sensor", cursor)
    assert [r.run_key for r in again.run_requests] == [r.run_key for r in first.run_requests]
    assert launch(world, first.run_requests[0]).success
    world.run_workers("wc")
    assert not evaluate(world, "heartbeat_sensor", first.cursor).run_requests


def let_a_minute_pass(world: DagsterWorld, cursor: str | None) -> str:
    """The cursor of a sensor whose last runs and back-offs are older."""
    assert cursor is not None
    memory = world.stored_memory(cursor)
    for attempt in memory["attempts"].values():
        attempt[1] -= 61
    for tries in memory["tries"].values():
        tries[1] -= 61
    return world.with_memory(cursor, memory)


def test_a_second_attempt_is_made_when_a_plan_places_the_tasks(world: DagsterWorld) -> None:
    running(world, "wc")
    cursor = evaluate(world, "heartbeat_sensor").cursor
    ports = tuple(w.port for w in world.topology("wc").assignment.workers if w.node == "s2")
    world.supervisor("s2", ports=ports)
    world.lose_host("s1")  # Nowhere to go: the first try fails.
    first = evaluate(world, "heartbeat_sensor", cursor)
    assert not launch(world, first.run_requests[0]).success
    assert not evaluate(world, "heartbeat_sensor", first.cursor).run_requests
    cursor = let_a_minute_pass(world, first.cursor)
    waiting = evaluate(world, "heartbeat_sensor", cursor)
    assert not waiting.run_requests
    assert "no plan would change 1 topologies that wait: wc" in waiting.skip_message
    world.supervisor("s3")
    second = evaluate(world, "heartbeat_sensor", cursor).run_requests
    cause, _, attempt = str(second[0].run_key).rpartition(":")
    assert attempt == "2"
    assert cause == str(first.run_requests[0].run_key).rpartition(":")[0]
    assert launch(world, second[0]).success
    assert "s3" in {worker.node for worker in world.topology("wc").assignment.workers}


def test_a_run_in_progress_is_not_doubled(world: DagsterWorld) -> None:
    running(world, "wc")
    cursor = evaluate(world, "heartbeat_sensor").cursor
    world.lose_host("s1")
    first = evaluate(world, "heartbeat_sensor", cursor)
    request = first.run_requests[0]
    job = world.defs.resolve_job_def("reassign_topologies")
    world.instance.create_run_for_job(
        job,
        run_config=request.run_config,
        tags=dict(request.tags),
        status=dg.DagsterRunStatus.STARTED,
    )
    memory = world.stored_memory(first.cursor)
    assert memory["attempts"]
    for attempt in memory["attempts"].values():
        attempt[1] = 0.0  # The back-off is over.
    cursor = world.with_memory(first.cursor, memory)
    assert not evaluate(world, "heartbeat_sensor", cursor).run_requests


def test_a_cause_that_comes_back_never_reuses_a_run_key(world: DagsterWorld) -> None:
    running(world, "wc")
    cursor = evaluate(world, "heartbeat_sensor").cursor
    seen: set[str | None] = set()
    for _ in range(3):
        world.lose_host("s1")
        result = evaluate(world, "heartbeat_sensor", cursor)
        (request,) = result.run_requests
        assert request.run_key not in seen
        seen.add(request.run_key)
        # The run finds no room, and the host comes back by itself: same assignment, healthy again.
        world.supervisor("s1")
        world.run_workers("wc")
        result = evaluate(world, "heartbeat_sensor", result.cursor)
        assert not result.run_requests
        cursor = let_a_minute_pass(world, result.cursor)


def test_another_boot_grants_one_full_timeout(world: DagsterWorld) -> None:
    running(world, "wc")
    result = evaluate(world, "heartbeat_sensor")
    world.lose_host("s1")
    memory = world.stored_memory(result.cursor)
    memory["liveness"]["boot_id"] = "another boot"
    cursor = world.with_memory(result.cursor, memory)
    assert not evaluate(world, "heartbeat_sensor", cursor).run_requests


def test_a_lost_memory_grants_one_full_timeout(world: DagsterWorld) -> None:
    running(world, "wc")
    result = evaluate(world, "heartbeat_sensor")
    another_process()
    world.cluster.state.delete_node("/sensors/heartbeat_sensor")
    world.lose_host("s1")
    granted = evaluate(world, "heartbeat_sensor", result.cursor)
    assert not granted.run_requests
    assert "judged after 30 s" in granted.skip_message


@pytest.mark.parametrize("cursor", ["", "nonsense", "[]", '{"memory": 3}', '{"looked_at": "x"}'])
def test_a_bad_cursor_restarts_cleanly(world: DagsterWorld, cursor: str) -> None:
    running(world, "wc")
    result = evaluate(world, "heartbeat_sensor", cursor)
    assert not result.run_requests
    assert json.loads(result.cursor)["looked_at"] is not None


def test_a_long_blind_sensor_grants_time(world: DagsterWorld) -> None:
    running(world, "wc")
    memory = json.loads(evaluate(world, "heartbeat_sensor").cursor)
    memory["looked_at"] -= 3600
    world.lose_host("s1")
    assert not evaluate(world, "heartbeat_sensor", json.dumps(memory)).run_requests


def test_a_restart_in_place_is_an_observation_and_no_run(world: DagsterWorld) -> None:
    running(world, "wc")
    cursor = evaluate(world, "heartbeat_sensor").cursor
    world.run_workers("wc", token="another")
    result = evaluate(world, "heartbeat_sensor", cursor)
    assert not result.run_requests
    (event,) = result.asset_events
    assert isinstance(event, dg.AssetObservation)
    assert (event.asset_key, event.partition) == (keys.ACTIVE_TOPOLOGY, "wc")
    assert shown(event)["restarts"] == 2
    assert not evaluate(world, "heartbeat_sensor", result.cursor).asset_events


def test_mass_loss_is_an_alarm_everywhere_until_it_is_over(
    world: DagsterWorld,
) -> None:
    for number in (3, 4):
        world.supervisor(f"s{number}")
    running(world, "wc", workers=4)
    healthy = evaluate(world, "heartbeat_sensor")
    assert "4 workers of 1 topologies live on 4 supervisors" in healthy.skip_message
    for number in (1, 2, 3):
        world.lose_host(f"s{number}")
    alarmed = evaluate(world, "heartbeat_sensor", healthy.cursor)
    assert not alarmed.run_requests
    assert "healing is frozen: 3 of 4 workers on 3 supervisors vanished" in alarmed.skip_message
    (event,) = alarmed.asset_events
    assert event.asset_key == keys.SUPERVISORS and str(event.description).startswith("ALARM")
    # It is said once, and its end as well.
    assert not evaluate(world, "heartbeat_sensor", alarmed.cursor).asset_events
    for number in (1, 2, 3):
        world.supervisor(f"s{number}")
    world.run_workers("wc")
    over = evaluate(world, "heartbeat_sensor", alarmed.cursor)
    assert [event.description for event in over.asset_events] == ["healing continues"]
    assert not over.run_requests


def test_in_a_pause_the_sensor_asks_for_nothing_and_says_why(world: DagsterWorld) -> None:
    running(world, "wc")
    cursor = evaluate(world, "heartbeat_sensor").cursor
    ctx = OperationsContext(
        cluster=world.cluster,
        blobs=world.blobs,
        conf=cluster_conf(world.home),
        planner=plan_placement,
    )
    pause_healing(ctx, secs=600, user="ann")
    world.lose_host("s1")
    paused = evaluate(world, "heartbeat_sensor", cursor)
    assert not paused.run_requests
    assert "healing is paused by ann until " in paused.skip_message
    assert "1 waits for it: topology 'wc': host" in paused.skip_message
    (event,) = paused.asset_events
    assert event.asset_key == keys.SUPERVISORS and "paused by ann" in str(event.description)
    # It is said once, and its end as well.
    another_process()
    quiet = evaluate(world, "heartbeat_sensor", paused.cursor)
    assert not quiet.run_requests and not quiet.asset_events
    resume_healing(ctx)
    resumed = evaluate(world, "heartbeat_sensor", quiet.cursor)
    assert len(resumed.run_requests) == 1
    assert [event.description for event in resumed.asset_events] == ["the pause of healing is over"]


def test_the_armed_sensor_holds_the_healer_node_and_wakes_at_once(world: DagsterWorld) -> None:
    running(world, "wc")
    defs = build_storm_defs(
        home=str(world.home), blob_dir=str(world.home / "blobs"), tick_secs=40.0
    )
    cursor = evaluate(world, "heartbeat_sensor").cursor
    found: list[SensorTick] = []
    thread = threading.Thread(
        target=lambda: found.append(evaluate(world, "heartbeat_sensor", cursor, defs)), daemon=True
    )
    thread.start()
    eventually(lambda: world.cluster.state.exists(paths.HEALER), what="the armed sensor")
    world.lose_host("s1")
    thread.join(timeout=30)
    assert found, "it waited for the tick's end"
    assert found[0].run_requests


def test_between_ticks_healer_is_held_until_one_is_overdue(
    world: DagsterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(world, "wc")
    evaluate(world, "heartbeat_sensor")
    assert world.cluster.state.exists(paths.HEALER), "the next tick is not overdue"
    monkeypatch.setattr(sensor_watch, "_OVERDUE_SECS", -1.0)
    evaluate(world, "heartbeat_sensor")
    eventually(lambda: not world.cluster.state.exists(paths.HEALER), what="the disarmed sensor")
    monkeypatch.undo()
    evaluate(world, "heartbeat_sensor")
    assert world.cluster.state.exists(paths.HEALER), "the sensor is evaluated once more"


def test_ticks_of_all_sensors_are_as_far_apart_as_configured() -> None:
    apart = build_storm_defs(sensor_interval_secs=30)
    assert {sensor.minimum_interval_seconds for sensor in apart.sensors or ()} == {30}
    with pytest.raises(InvalidRequest, match="choose 1 to 3600"):
        build_storm_defs(sensor_interval_secs=0)


def test_without_a_cluster_every_sensor_and_schedule_skips(tmp_path: Path) -> None:
    (tmp_path / "storm.yaml").write_text(
        "storm.zookeeper.port: 9\nstorm.zookeeper.connection.timeout: 200\nnimbus.seeds: ['127.0.0.1:9']\n",
        encoding="utf-8",
    )
    from storm_dagster.defs.resources.processes import NimbusResource

    nimbus = NimbusResource(home=str(tmp_path), patience_secs=0.0)
    defs = build_storm_defs(home=str(tmp_path), tick_secs=0.0, resources={"nimbus": nimbus})
    with dg.DagsterInstance.ephemeral() as instance:
        for name in ("heartbeat_sensor", "lifecycle_sensor", "supervisor_sensor", "leader_sensor"):
            assert tick_sensor(name, instance, defs=defs).skipped, name
        for name in ("rebalance_schedule", "inbox_cleanup_schedule"):
            schedule = defs.resolve_schedule_def(name)
            with dg.build_schedule_context(
                instance=instance, resources=dict(defs.resources or {})
            ) as context:
                data = schedule.evaluate_tick(context)
            assert data.skip_message, name
            assert not data.run_requests


def test_the_lifecycle_sensor_removes_a_killed_topology_and_its_key(world: DagsterWorld) -> None:
    running(world, "wc")
    first = evaluate(world, "lifecycle_sensor")
    from storm_dagster.operations.live import lifecycle

    ops = OperationsContext(
        cluster=world.cluster,
        blobs=world.blobs,
        conf=cluster_conf(world.home),
        planner=plan_placement,
    )
    lifecycle.kill(ops, "wc", 1)
    for worker in world.topology("wc").assignment.workers:
        world.cluster.state.delete_node(paths.worker(world.topology("wc").id, *worker.slot))
    cursor = first.cursor

    def removed() -> bool:
        nonlocal cursor
        result = evaluate(world, "lifecycle_sensor", cursor)
        cursor = result.cursor
        return "dropped key wc" in result.skip_message

    eventually(removed, what="the removal", interval=0.3)
    assert not world.instance.has_dynamic_partition(PARTITIONS_NAME, "wc")
    assert world.topology("wc") is None


def test_the_lifecycle_sensor_finishes_an_interrupted_activation(world: DagsterWorld) -> None:
    world.instance.add_dynamic_partitions(PARTITIONS_NAME, ["wc"])
    handle = world.upload("h")
    from storm_dagster.operations.submit import submission

    ops = OperationsContext(
        cluster=world.cluster,
        blobs=world.blobs,
        conf=cluster_conf(world.home),
        planner=plan_placement,
    )
    submission.stage_conf(ops, name="wc", token="t", handle=handle)
    submission.stage_code(ops, token="t")
    submission.stage_tasks(ops, token="t")
    submission.stage_assignment(ops, token="t")
    submission.publish_assignment(ops, token="t")
    assert world.topology("wc").base.status == "INACTIVE"
    cursor: str | None = None

    def active() -> bool:
        nonlocal cursor
        cursor = evaluate(world, "lifecycle_sensor", cursor).cursor
        return world.topology("wc").base.status == "ACTIVE"

    eventually(active, what="the activation", interval=0.5)


def test_the_lifecycle_sensor_ends_a_rebalance_without_spark_in_the_code_server(
    world: DagsterWorld,
) -> None:
    running(world, "wc")
    ops = OperationsContext(
        cluster=world.cluster,
        blobs=world.blobs,
        conf=cluster_conf(world.home),
        planner=plan_placement,
    )
    assert rebalance(ops, "wc", workers=1, wait_secs=1, waits_for_delay=False).outcome == "waiting"
    home = str(world.home)
    resources = {"spark": NoSpark(home=home)}
    defs = build_storm_defs(
        home=home, blob_dir=str(world.home / "blobs"), resources=resources, tick_secs=0.0
    )
    cursor: str | None = None

    def active() -> bool:
        nonlocal cursor
        cursor = evaluate(world, "lifecycle_sensor", cursor, defs).cursor
        return world.topology("wc").base.status == "ACTIVE"

    eventually(active, what="the end of the rebalance", interval=0.3)
    assert len(world.topology("wc").assignment.workers) == 1


def test_supervisors_are_observed_on_change_and_at_most_once_a_minute(world: DagsterWorld) -> None:
    first = evaluate(world, "supervisor_sensor")
    assert [event.asset_key for event in first.observations] == [keys.SUPERVISORS]
    live = shown(first.observations[0])
    assert (live["live"], live["slots_free"]) == (2, 8)
    assert first.checks
    assert all(check.passed for check in first.checks)
    assert evaluate(world, "supervisor_sensor", first.cursor).skipped
    world.supervisor("s3")
    assert evaluate(world, "supervisor_sensor", first.cursor).skipped  # too soon
    later = json.loads(first.cursor)
    later["at"] -= 61
    changed = evaluate(world, "supervisor_sensor", json.dumps(later))
    assert shown(changed.asset_events[0])["live"] == 3


def test_the_leader_is_observed_on_change(world: DagsterWorld) -> None:
    result = evaluate(world, "leader_sensor")
    (event,) = result.asset_events
    assert event.asset_key == keys.NIMBUS
    known = world.cluster.epoch()
    assert known is not None and shown(event)["epoch"] == known[0]
    assert evaluate(world, "leader_sensor", result.cursor).skipped


def test_one_interruption_of_the_connection_is_told_once(zk_cluster: StormClusterState) -> None:
    watch = SensorWatch(zk_cluster)
    watch._on_connection("CONNECTED")
    assert not watch.interrupted()
    watch._on_connection("SUSPENDED")
    assert watch.interrupted()
    assert not watch.interrupted(), "what is missing later is evidence again"
