"""Kill, activate, deactivate, restart, rebalance, reassign: what the jobs do to the cluster and
what they leave behind.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.defs import build_storm_defs, keys
from storm_dagster.defs.keys import PARTITIONS_NAME
from storm_dagster.defs.lifecycle import jobs
from storm_dagster.defs.resources.handles import ClusterHandle
from storm_dagster.model import paths
from storm_dagster.model.conf import HIDDEN
from storm_dagster.model.dagster_names import RECORDED_TAG, REQUEST_TAG
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.operation_record import OperationRecord
from storm_dagster.model.placement import PlacementBatch, PlacementResult
from storm_dagster.model.records import decode_record, encode_record
from storm_dagster.model.unreported import UnreportedEvents
from storm_dagster.model.verbs import VERBS
from storm_dagster.nimbus.dagster.run_documents import run_document
from storm_dagster.operations.context import OperationsContext, Planner
from storm_dagster.operations.live import lifecycle
from storm_dagster.testing.waiting import eventually
from storm_rigs.dagster.dagster_results import materialized, shown, step_failure
from storm_rigs.stage.dagster_world import DagsterWorld, PlainPlanner

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper]


def op(job: str, **config: Any) -> dict[str, Any]:
    return {"ops": {f"{job}_op": {"config": config}}}


def failure_type(result: dg.ExecuteInProcessResult) -> str:
    return step_failure(result)[0]


def observed(world: DagsterWorld, name: str) -> list[Any]:
    records = world.instance.fetch_observations(keys.ACTIVE_TOPOLOGY, limit=20).records
    return [
        shown(record.asset_observation)["verb"]
        for record in records
        if record.asset_observation and record.asset_observation.partition == name
    ]


def leader_events(world: DagsterWorld) -> list[tuple[str, str]]:
    """Verb and status of each change that the leader notes for Dagster, oldest first."""
    raw = world.cluster.state.get_data(paths.UNREPORTED)
    assert raw is not None
    events = decode_record(UnreportedEvents, raw, paths.UNREPORTED).events
    return [(event.metadata["verb"], event.metadata["status"]) for event in events]


@pytest.mark.usefixtures("leader")
def test_jobs_turn_a_topology_off_and_on(world: DagsterWorld) -> None:
    world.submit("wc")
    assert world.run("deactivate_topology", config=op("deactivate_topology", name="wc")).success
    assert world.topology("wc").base.status == "INACTIVE"
    assert world.run("activate_topology", config=op("activate_topology", name="wc")).success
    assert world.topology("wc").base.status == "ACTIVE"
    assert observed(world, "wc") == ["activate", "deactivate"]
    assert leader_events(world) == [("deactivate", "INACTIVE"), ("activate", "ACTIVE")]


@pytest.mark.parametrize(
    "verb", [row.name for row in VERBS.values() if row.executed_by == "leader"]
)
def test_without_a_leader_a_job_fails_and_changes_nothing(world: DagsterWorld, verb: str) -> None:
    """The run does not wait for one, and does not execute the verb in the place of the leader."""
    world.submit("wc")
    before = world.topology("wc").base
    job = VERBS[verb].job
    result = world.run(job, config=op(job, name="wc"))
    assert failure_type(result) == "Unavailable"
    assert "no leading nimbus" in step_failure(result)[1]
    assert world.topology("wc").base == before


@pytest.mark.usefixtures("leader")
def test_a_verb_that_the_leader_refuses_fails_with_its_error(world: DagsterWorld) -> None:
    world.submit("wc")
    assert world.run("kill_topology", config=op("kill_topology", name="wc", wait_secs=900)).success
    result = world.run("activate_topology", config=op("activate_topology", name="wc"))
    assert failure_type(result) == "Conflict"
    assert world.topology("wc").base.status == "KILLED"


def test_a_run_of_a_former_leader_executes_its_request_once(world: DagsterWorld) -> None:
    """A leader of a former release launches it for a verb, and executes the verb itself when
    Dagster is late. No leader answers here: the run asks none, because that one would launch the
    next.
    """
    world.submit("wc")
    record = encode_record(UnreportedEvents(requests=("done-by-the-leader",)))
    world.cluster.state.mkdirs(paths.UNREPORTED)
    world.cluster.state.set_data(paths.UNREPORTED, record)
    config = op("deactivate_topology", name="wc")
    assert world.run(
        "deactivate_topology", config=config, tags={REQUEST_TAG: "done-by-the-leader"}
    ).success
    assert world.topology("wc").base.status == "ACTIVE"
    assert world.run("deactivate_topology", config=config, tags={REQUEST_TAG: "another"}).success
    assert world.topology("wc").base.status == "INACTIVE"


@pytest.mark.parametrize("verb", ["restart", "rebalance"])
def test_of_two_runs_of_one_request_the_second_changes_nothing(
    world: DagsterWorld, verb: str
) -> None:
    """A leader launched one, and was lost; the next leader launched the other."""
    world.submit("wc")
    record = OperationRecord(
        topology_id=world.topology("wc").id,
        name="wc",
        verb=verb,
        epoch=0,
        started_secs=1,
        run_id="the-other-run",
    )
    world.cluster.state.mkdirs(paths.OPERATIONS)
    world.cluster.state.create_node(paths.operation("taken"), encode_record(record))
    before = world.topology("wc").assignment
    tags = {REQUEST_TAG: "taken", RECORDED_TAG: "true"}

    def run(tags: dict[str, str]) -> dg.ExecuteInProcessResult:
        if verb == "rebalance":
            return world.run("rebalance_topology", partition="wc", tags=tags)
        return world.run("restart_topology", config=op("restart_topology", name="wc"), tags=tags)

    result = run(tags)
    assert failure_type(result) == "Conflict" and "the-other-run" in step_failure(result)[1]
    result = run({**tags, REQUEST_TAG: "gone"})
    assert failure_type(result) == "Conflict" and "is gone" in step_failure(result)[1]
    assert world.topology("wc").assignment == before
    assert world.cluster.state.exists(paths.operation("taken"))
    free = record.model_copy(update={"run_id": ""})
    world.cluster.state.create_node(paths.operation("free"), encode_record(free))
    assert run({**tags, REQUEST_TAG: "free"}).success
    assert not world.cluster.state.exists(paths.operation("free"))


@pytest.mark.usefixtures("leader")
@pytest.mark.parametrize("wait_secs", [0, 1])
def test_kill_waits_for_the_end_and_drops_the_partition_key(
    world: DagsterWorld, wait_secs: int
) -> None:
    world.submit("wc")
    result = world.run("kill_topology", config=op("kill_topology", name="wc", wait_secs=wait_secs))
    assert result.success
    assert world.topology("wc") is None
    assert not world.instance.has_dynamic_partition(PARTITIONS_NAME, "wc")
    assert observed(world, "wc") == ["kill"]
    assert [m.partition for m in world.materializations(keys.ACTIVE_TOPOLOGY)] == ["wc"]


@pytest.mark.usefixtures("leader")
def test_a_later_submission_of_the_name_shows_the_old_history(world: DagsterWorld) -> None:
    world.submit("wc")
    world.run("kill_topology", config=op("kill_topology", name="wc", wait_secs=0))
    world.instance.add_dynamic_partitions(PARTITIONS_NAME, ["wc"])
    handle = world.upload("again")
    config = {"ops": {"storm__topology_conf": {"config": {"handle": handle, "token": "second"}}}}
    assert world.run("submit_topology", partition="wc", config=config).success
    assert len(world.materializations(keys.ACTIVE_TOPOLOGY)) == 2


def test_an_unknown_name_is_not_alive(world: DagsterWorld) -> None:
    result = world.run("kill_topology", config=op("kill_topology", name="nobody"))
    assert failure_type(result) == "NotAlive"


def test_restart_keeps_id_and_places(world: DagsterWorld) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    before = world.topology("wc")
    assert world.run("restart_topology", config=op("restart_topology", name="wc")).success
    after = world.topology("wc")
    assert (after.id, after.base) == (before.id, before.base)
    assert after.assignment.workers == before.assignment.workers and after.assignment.restarts == 1


def test_a_restart_is_done_when_every_worker_is_a_new_process(
    world: DagsterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    world.run_workers("wc")
    monkeypatch.setattr(jobs, "_MAX_START_SECS", 0.5)
    config = op("restart_topology", name="wc")
    assert failure_type(world.run("restart_topology", config=config)) == "Unavailable"
    monkeypatch.setattr(jobs, "_MAX_START_SECS", 60.0)

    def replace() -> None:
        eventually(lambda: world.topology("wc").assignment.restarts == 2, what="the restart")
        world.run_workers("wc", token="of-new-processes")

    supervisors = threading.Thread(target=replace)
    supervisors.start()
    assert world.run("restart_topology", config=config).success
    supervisors.join()


def test_update_runs_new_code_and_wrong_code_keeps_the_old(
    world: DagsterWorld,
) -> None:
    world.submit("wc", conf={"topology.workers": 1})
    before = world.topology("wc")
    wrong = world.upload("wrong", topology={"spouts": {}, "bolts": {}})
    result = world.run("update_topology", config=op("update_topology", name="wc", handle=wrong))
    assert failure_type(result) == "InvalidTopology"
    assert world.topology("wc") == before
    handle = world.upload("new", conf={"topology.workers": 3})
    assert world.run(
        "update_topology", config=op("update_topology", name="wc", handle=handle)
    ).success
    after = world.topology("wc")
    assert after.id != before.id
    assert len(after.assignment.workers) == 3
    assert len(world.materializations(keys.ACTIVE_TOPOLOGY)) == 2
    nothing = world.run("update_topology", config=op("update_topology", name="wc"))
    assert failure_type(nothing) == "InvalidRequest"


def test_an_update_lists_its_changes_without_secrets(world: DagsterWorld) -> None:
    world.submit("wc", conf={"topology.workers": 1, "db.password": "hunter1"})
    conf = {
        "topology.workers": 3,
        "topology.bolt.parallelism": {"count": 4},
        "db.password": "hunter2",
    }
    handle = world.upload("new", conf=conf)
    result = world.run("update_topology", config=op("update_topology", name="wc", handle=handle))
    assert result.success
    changes = {
        "db.password": (HIDDEN, HIDDEN),
        "parallelism.count": ("2", "4"),
        "topology.bolt.parallelism": ("{}", '{"count": 4}'),
        "topology.workers": ("1", "3"),
    }
    (published, _) = world.materializations(keys.PUBLISHED_ASSIGNMENT)
    rows = [record.data for record in shown(published)["changes"]]
    listed = {row["key"]: (row["old"], row["new"]) for row in rows}
    assert {key: listed[key] for key in changes} == changes
    log = "\n".join(entry.user_message for entry in world.instance.all_logs(result.run_id))
    for key, (old, new) in changes.items():
        assert f"the update of wc changes {key}: {old} -> {new}" in log
    assert "hunter" not in log + str(published)


def test_rebalance_materializes_plan_and_assignment_of_the_partition(world: DagsterWorld) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    world.run_workers("wc")
    config = {
        "ops": {
            "storm__assignment": {
                "config": {"workers": 3, "executors": {"count": 4}, "wait_secs": 0}
            }
        }
    }
    result = world.run("rebalance_topology", partition="wc", config=config)
    assert result.success
    events = result.get_asset_materialization_events()
    assert [event.asset_key for event in events] == [keys.ASSIGNMENT, keys.PUBLISHED_ASSIGNMENT]
    assert {event.partition for event in events} == {"wc"}
    topology = world.topology("wc")
    assert len(topology.assignment.workers) == 3
    assert len(topology.tasks.components["count"].ids) == 4
    assert topology.base.status == "ACTIVE"
    assert materialized(result, "assignment")["outcome"] == "planned"
    published = materialized(result, "published_assignment")
    assert (published["outcome"], published["workers"]) == ("assigned", 3)


def test_a_rebalance_of_a_killed_topology_ends_with_not_alive(
    world: DagsterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster stores no result without the partition key, which is dropped with the topology."""
    world.submit("wc")

    def kill() -> None:
        world.instance.delete_dynamic_partition(PARTITIONS_NAME, "wc")
        conf = ClusterHandle(home=str(world.home)).conf()
        ctx = OperationsContext(
            cluster=world.cluster, blobs=world.blobs, conf=conf, planner=plan_placement
        )
        lifecycle.kill(ctx, "wc", 0)

    def planner(_: PlainPlanner, cluster: object) -> Planner:
        def plan(batch: PlacementBatch) -> PlacementResult:
            result = plan_placement(batch)
            kill()
            return result

        return plan

    monkeypatch.setattr(PlainPlanner, "planner", planner)
    tags = {"dagster/partition": "wc", REQUEST_TAG: "r"}
    assert failure_type(world.run("rebalance_topology", tags=tags)) == "NotAlive"
    assert not world.instance.has_dynamic_partition(PARTITIONS_NAME, "wc")
    # A run that begins without the key fails in Dagster; nimbus says why.
    (failure,) = world.run("rebalance_topology", tags=tags).get_step_failure_events()
    error = failure.step_failure_data.error
    assert error is not None
    event = {"stepKey": failure.step_key, "error": {"message": error.message}}
    document = run_document({"runId": "r", "status": "FAILURE"}, [event], None)
    assert document["error"]["type"] == "NotAlive"


def test_a_submission_keeps_its_key_when_a_namesake_drops_it(
    world: DagsterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planner(_: PlainPlanner, cluster: object) -> Planner:
        def plan(batch: PlacementBatch) -> PlacementResult:
            world.instance.delete_dynamic_partition(PARTITIONS_NAME, "wc")
            return plan_placement(batch)

        return plan

    monkeypatch.setattr(PlainPlanner, "planner", planner)
    assert world.submit("wc").success
    assert world.instance.has_dynamic_partition(PARTITIONS_NAME, "wc")


def test_a_rebalance_that_does_not_fit_is_refused_and_changes_nothing(world: DagsterWorld) -> None:
    world.submit("wc")
    before = world.topology("wc").assignment
    config = {
        "ops": {"storm__assignment": {"config": {"executors": {"nonsense": 2}, "wait_secs": 0}}}
    }
    result = world.run("rebalance_topology", partition="wc", config=config)
    assert failure_type(result) == "InvalidRequest"
    assert world.topology("wc").assignment == before


def causes_of(world: DagsterWorld, node: str) -> list[Cause]:
    return [
        Cause(
            topology_id=topology.id,
            name=topology.base.name,
            generation=topology.assignment_at.version,
            kind="lost_host",
            node=node,
            host=worker.host,
            port=worker.port,
            tasks=worker.ids,
        )
        for topology in world.cluster.load_view().topologies.values()
        if topology.assignment is not None and topology.assignment_at is not None
        for worker in topology.assignment.workers
        if worker.node == node
    ]


def test_reassign_logs_one_materialization_for_each_topology_and_asset(world: DagsterWorld) -> None:
    for name in ("a", "b"):
        world.submit(name, conf={"topology.workers": 2})
        world.run_workers(name)
    causes = causes_of(world, "s1")
    assert {cause.name for cause in causes} == {"a", "b"}
    world.lose_supervisor("s1")
    for cause in causes:
        world.cluster.state.delete_node(f"/workers/{cause.topology_id}/s1-{cause.port}")
    result = world.run(
        "reassign_topologies",
        config=op("reassign_topologies", causes=[cause.to_json() for cause in causes]),
    )
    assert result.success
    for name in ("a", "b"):
        assignment = world.topology(name).assignment
        assert {worker.node for worker in assignment.workers} == {"s2"}
        assert (assignment.history[0].action, assignment.history[0].run) == (
            "healed",
            result.run_id,
        )
    logged = [
        (event.asset_key, event.step_materialization_data.materialization.partition)
        for event in result.all_events
        if event.event_type_value == "ASSET_MATERIALIZATION"
    ]
    assert sorted(logged) == sorted(
        (key, name) for key in (keys.ASSIGNMENT, keys.PUBLISHED_ASSIGNMENT) for name in ("a", "b")
    )


def test_reassign_by_hand_heals_what_is_dead_now(world: DagsterWorld) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    world.run_workers("wc")
    lost = causes_of(world, "s1")
    world.lose_supervisor("s1")
    for cause in lost:
        world.cluster.state.delete_node(f"/workers/{cause.topology_id}/s1-{cause.port}")
    assert world.run("reassign_topologies", config=op("reassign_topologies")).success
    assert {worker.node for worker in world.topology("wc").assignment.workers} == {"s2"}


def test_an_overtaken_cause_is_void(world: DagsterWorld) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    world.run_workers("wc")
    cause = causes_of(world, "s1")[0]
    old = Cause(**{**cause.__dict__, "generation": 99})
    before = world.topology("wc").assignment
    assert world.run(
        "reassign_topologies", config=op("reassign_topologies", causes=[old.to_json()])
    ).success
    assert world.topology("wc").assignment == before


def test_a_reassignment_without_room_fails_so_that_it_is_tried_again(world: DagsterWorld) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    world.run_workers("wc")
    causes = [*causes_of(world, "s1"), *causes_of(world, "s2")]
    for node in ("s1", "s2"):
        world.lose_supervisor(node)
    for cause in causes:
        world.cluster.state.delete_node(f"/workers/{cause.topology_id}/{cause.node}-{cause.port}")
    config = op("reassign_topologies", causes=[cause.to_json() for cause in causes])
    result = world.run("reassign_topologies", config=config)
    assert failure_type(result) == "Unavailable"


def test_every_job_has_a_described_form() -> None:
    defs = build_storm_defs()
    jobs = {job.name: job for job in defs.resolve_all_job_defs() if not job.name.startswith("__")}
    assert jobs.keys() >= {
        "submit_topology",
        "kill_topology",
        "activate_topology",
        "deactivate_topology",
        "restart_topology",
        "update_topology",
        "rebalance_topology",
        "reassign_topologies",
    }
    for job in jobs.values():
        assert job.description, job.name
        assert job.executor_def is dg.in_process_executor, job.name
        for node in job.all_node_defs:
            schema = getattr(node, "config_schema", None)
            fields = getattr(schema.config_type, "fields", {}) if schema else {}
            for name, field in fields.items():
                assert field.description, f"{job.name}: {name} has no description"


def test_a_run_that_a_former_leader_queued_behind_a_job_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leader of the release before launches a second run, which a full queue does not start."""
    monkeypatch.setattr(jobs, "MAX_QUEUED_SECS", 0.0)
    with dg.DagsterInstance.ephemeral() as instance:
        job = build_storm_defs().resolve_job_def("kill_topology")
        queued = instance.create_run_for_job(job, run_config=op("kill_topology", name="wc"))
        context: Any = SimpleNamespace(instance=instance)
        config: Any = SimpleNamespace(name="wc")
        unused: Any = None
        run = jobs._VerbRun(VERBS["kill"], context, config, unused, unused, unused, unused)
        check = run._refuse_full_queue()
        check({"run_id": queued.run_id, "status": "STARTED"})
        check({"run_id": "of-another-dagster", "status": "QUEUED"})
        with pytest.raises(Unavailable, match=queued.run_id) as refused:
            check({"run_id": queued.run_id, "status": "QUEUED"})
    assert "kill of 'wc'" in refused.value.message
    assert "max_concurrent_runs" in refused.value.message
