"""A submission is one run with six steps and six materializations, all or nothing."""

from __future__ import annotations

import base64
import re
from typing import Any

import dagster as dg
import pytest

from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.defs import keys
from storm_dagster.defs.keys import PARTITIONS_NAME, STAGES
from storm_dagster.host.endpoints import cluster_conf
from storm_dagster.model.dagster_names import TOKEN_TAG
from storm_dagster.model.removed_keys import REMOVED_KEYS
from storm_dagster.model.run_result import RunResult
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.submit.sweeping import delete_blobs
from storm_rigs.dagster.dagster_results import materialized, shown, step_failure
from storm_rigs.stage.dagster_world import DagsterWorld

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper]

WIDE = {
    "spouts": {
        "s": {
            "object": {"python": "wc:S"},
            "parallelism": 30,
            "outputs": {"default": {"fields": ["x"]}},
        }
    },
    "bolts": {},
}


def test_a_submission_has_six_steps_and_ends_active(world: DagsterWorld) -> None:
    result = world.submit("wc", conf={"topology.workers": 3, "topology.acker.executors": 1})
    assert result.success
    steps = [
        event.step_key for event in result.all_events if event.event_type_value == "STEP_SUCCESS"
    ]
    assert steps == [key.to_python_identifier() for key in STAGES]
    assert [event.asset_key for event in result.get_asset_materialization_events()] == list(STAGES)
    topology = world.topology("wc")
    assert topology.base.status == "ACTIVE"
    assert len(topology.assignment.workers) == 3


def test_the_metadata_shows_what_a_person_wants(world: DagsterWorld) -> None:
    result = world.submit("wc", conf={"topology.workers": 2, "db.password": "hunter2"})
    conf, code = materialized(result, "topology_conf"), materialized(result, "topology_code")
    assert conf["conf"]["topology.workers"] == 2
    assert "hunter2" not in str(conf)
    assert re.fullmatch(r"wc-\d+-\d+", conf["topology_id"])
    assert conf["token"] == "token-wc"
    assert {record.data["key"] for record in code["blobs"]} == {
        f"{conf['topology_id']}-{part}"
        for part in ("stormjar.jar", "stormconf.ser", "stormcode.ser")
    }
    assert all(re.fullmatch("[0-9a-f]{64}", record.data["sha256"]) for record in code["blobs"])
    tasks, planned = materialized(result, "task_info"), materialized(result, "assignment")
    assert tasks["tasks"] == 7  # 1 line, 2 split, 2 count, acker, topology master
    assert planned["workers"] == 2
    assert planned["tasks"] == 7
    assert sum(record.data["count"] for record in planned["assignment"]) == 7
    assert "count" in "".join(record.data["components"] for record in planned["assignment"])
    picture = re.search(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", planned["tasks_on_slots"])
    assert picture is not None
    assert "host-s1" in base64.b64decode(picture[1]).decode()
    published = materialized(result, "published_assignment")
    paths = {record.data["path"]: record.data["version"] for record in published["zookeeper"]}
    assert paths[f"/assignments/{conf['topology_id']}"] == 0
    assert published["planner"] == "python"
    assert materialized(result, "active_topology")["status"] == "ACTIVE"
    for asset in (key.path[-1] for key in STAGES):
        assert materialized(result, asset)["seconds"] >= 0


def test_warnings_of_conf_and_placement_are_tags_of_the_run(world: DagsterWorld) -> None:
    key = min(REMOVED_KEYS)
    conf = {key: "old", "isolation.scheduler.machines": ["s1", "nowhere"]}
    result = world.submit("wc", conf=conf)
    assert result.success
    run = world.instance.get_run_by_id(result.run_id)
    assert run is not None
    removed, isolated = RunResult.of_tags(run.tags).warnings
    assert key in removed
    assert "topology 'wc': no supervisor is registered on nowhere" in isolated


def test_an_unregistered_name_materializes_nothing(world: DagsterWorld) -> None:
    handle = world.upload("h")
    result = world.run(
        "submit_topology",
        config={"ops": {"storm__topology_conf": {"config": {"handle": handle}}}},
        tags={"dagster/partition": "outsider"},
    )
    assert not result.success
    assert step_failure(result)[0] == "InvalidRequest"
    assert "not a registered partition" in step_failure(result)[1]
    assert result.get_asset_materialization_events() == []
    assert world.topology("outsider") is None


def test_a_key_that_the_end_of_a_namesake_took_is_added_again(world: DagsterWorld) -> None:
    handle = world.upload("again")
    result = world.run(
        "submit_topology",
        config={
            "ops": {"storm__topology_conf": {"config": {"handle": handle, "token": "t-again"}}}
        },
        tags={"dagster/partition": "again", TOKEN_TAG: "t-again"},
    )
    assert result.success
    assert world.instance.has_dynamic_partition(PARTITIONS_NAME, "again")


def test_a_topology_that_breaks_a_rule_fails_and_stores_nothing(
    world: DagsterWorld,
) -> None:
    result = world.submit("bad", topology={"spouts": {}, "bolts": {}})
    assert step_failure(result)[0] == "InvalidTopology"
    assert result.get_asset_materialization_events() == []
    assert world.blobs.keys("staging") == []


def test_too_few_slots_fail_before_anything_is_visible(world: DagsterWorld) -> None:
    result = world.submit("big", topology=WIDE, conf={"topology.workers": 20})
    kind, message = step_failure(result)
    assert kind == "Unavailable"
    assert "8 are free (s1: 4, s2: 4)" in message
    assert world.topology("big") is None
    materialized = [event.asset_key for event in result.get_asset_materialization_events()]
    assert materialized == list(STAGES[:3])


def test_a_reexecution_finds_nothing_staged_and_names_the_remedy(world: DagsterWorld) -> None:
    """Nimbus removes upload and staged parts when the command of a failed submission ends."""
    failed = world.submit("big", topology=WIDE, conf={"topology.workers": 20})
    run = world.instance.get_run_by_id(failed.run_id)
    assert run is not None and not failed.success
    topology_id = materialized(failed, "topology_conf")["topology_id"]
    ops = OperationsContext(
        cluster=world.cluster,
        blobs=world.blobs,
        conf=cluster_conf(world.home),
        planner=plan_placement,
    )
    delete_blobs(ops, topology_id, "big", "token-big")
    for key in world.blobs.keys("upload."):
        world.blobs.delete(key)
    # "Re-execute from failure": the steps that have not succeeded, with the tags of the run.
    from_failure = world.defs.resolve_job_def("submit_topology").execute_in_process(
        instance=world.instance,
        partition_key="big",
        asset_selection=list(STAGES[3:]),
        tags={TOKEN_TAG: run.tags[TOKEN_TAG]},
        raise_on_error=False,
    )
    kind, message = step_failure(from_failure)
    assert kind == "NotAlive"
    assert "submission 'token-big' of topology 'big' has no staged record" in message
    assert "submit the topology again, or re-execute all steps" in message
    # "Re-execute all": the run of a command names an upload.
    everything = world.run(
        "submit_topology", partition="big", config=dict(run.run_config), tags=dict(run.tags)
    )
    kind, message = step_failure(everything)
    assert kind == "NotAlive" and "upload 'handle-big' does not exist" in message
    assert "submit or upload again" in message
    assert world.submit("big").success


def test_a_repeated_submission_with_the_same_token_is_the_same_topology(
    world: DagsterWorld,
) -> None:
    first = materialized(world.submit("wc"), "topology_conf")["topology_id"]
    again = world.submit("wc")
    assert again.success
    assert materialized(again, "topology_conf")["topology_id"] == first
    assert materialized(again, "published_assignment")["already_published"] is True


def test_a_taken_name_is_refused(world: DagsterWorld) -> None:
    world.submit("wc")
    handle = world.upload("other")
    result = world.run(
        "submit_topology",
        partition="wc",
        config={"ops": {"storm__topology_conf": {"config": {"handle": handle}}}},
        tags={TOKEN_TAG: "another-token"},
    )
    assert step_failure(result)[0] == "AlreadyAlive"


def test_any_stage_runs_again_alone_from_what_is_staged(world: DagsterWorld) -> None:
    world.submit("wc")
    for key in STAGES:
        job = dg.define_asset_job("alone", selection=dg.AssetSelection.assets(key).without_checks())
        result = (
            dg.Definitions.merge(world.defs, dg.Definitions(jobs=[job]))
            .resolve_job_def("alone")
            .execute_in_process(instance=world.instance, partition_key="wc", raise_on_error=False)
        )
        assert result.success, key
    assert len(world.cluster.load_view().topologies) == 1


def test_the_run_remembers_its_token(world: DagsterWorld) -> None:
    world.instance.add_dynamic_partitions(PARTITIONS_NAME, ["wc"])
    handle = world.upload("h")
    result = world.run(
        "submit_topology",
        partition="wc",
        config={"ops": {"storm__topology_conf": {"config": {"handle": handle, "token": "mine"}}}},
    )
    assert result.success
    run = world.instance.get_run_by_id(result.run_id)
    assert run is not None
    assert run.tags[TOKEN_TAG] == "mine"


def test_an_inactive_submission_stays_inactive(world: DagsterWorld) -> None:
    result = world.submit("quiet", inactive=True)
    assert materialized(result, "active_topology")["status"] == "INACTIVE"
    assert world.topology("quiet").base.status == "INACTIVE"


def test_a_replanned_publication_shows_the_newer_assignment(
    world: DagsterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    from storm_dagster.operations.submit import submission as stages

    plan = stages.stage_assignment

    def plan_then_lose_a_supervisor(ctx: OperationsContext, *, token: str) -> Any:
        report = plan(ctx, token=token)
        world.lose_supervisor(report.placement.workers[0].node)
        return report

    monkeypatch.setattr(stages, "stage_assignment", plan_then_lose_a_supervisor)
    result = world.submit("wc", conf={"topology.workers": 1})
    assert result.success
    assert materialized(result, "published_assignment")["replanned"] == 1
    newest, _ = [m for m in world.materializations(keys.ASSIGNMENT) if m.partition == "wc"]
    supervisor = world.topology("wc").assignment.workers[0].node
    assert shown(newest)["assignment"][0].data["supervisor"] == supervisor
