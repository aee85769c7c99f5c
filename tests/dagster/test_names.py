"""Beside other people's definitions: nothing of theirs changes, and two clusters do not meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from storm_dagster.defs import build_storm_defs
from storm_dagster.defs import defs as own_location
from storm_dagster.defs.binding import bind
from storm_dagster.defs.keys import ACTIVE_TOPOLOGY, PARTITIONS_NAME, STAGES
from storm_dagster.defs.resources.handles import ZooKeeperResource
from storm_dagster.defs.resources.operating import Handles
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.testing.waiting import patience
from storm_rigs.dagster.dagster_results import tick_sensor
from storm_rigs.stage.dagster_world import DagsterWorld, leading_nimbus

pytestmark = pytest.mark.dagster

STABLE = json.loads((Path(__file__).parent / "stable_names.json").read_text(encoding="utf-8"))


class Spark(dg.ConfigurableResource):
    """The one that the project has already."""


@dg.asset
def mine(spark: Spark) -> None: ...


@dg.op
def count() -> None: ...


@dg.job
def nightly() -> None:
    count()


def project(**others: Any) -> dg.Definitions:
    return dg.Definitions(
        assets=[mine],
        jobs=[nightly, dg.define_asset_job("mine_job", dg.AssetSelection.assets(mine))],
        resources={"spark": Spark()},
        **others,
    )


def executors(defs: dg.Definitions) -> dict[str, str]:
    repository = defs.get_repository_def()
    return {
        name: repository.get_job(name).executor_def.name
        for name in ("nightly", "mine_job", "__ASSET_JOB")
    }


def names_of(defs: dg.Definitions) -> dict[str, set[str]]:
    repository = defs.get_repository_def()
    jobs = [job for job in repository.get_all_jobs() if not job.name.startswith("__")]
    specs = list(defs.resolve_all_asset_specs())
    return {
        "assets": {spec.key.to_user_string() for spec in specs},
        "groups": {str(spec.group_name) for spec in specs},
        "checks": {
            f"{key.asset_key.to_user_string()}:{key.name}"
            for key in repository.asset_graph.asset_check_keys
        },
        "jobs": {job.name for job in jobs},
        "ops": {node.name for job in jobs for node in job.nodes},
        "sensors": {sensor.name for sensor in repository.sensor_defs},
        "schedules": {schedule.name for schedule in repository.schedule_defs},
        "resources": set(defs.resources or {}),
        "partitions": {
            str(spec.partitions_def.name)
            for spec in specs
            if isinstance(spec.partitions_def, dg.DynamicPartitionsDefinition)
        },
    }


def test_a_project_keeps_its_executor_its_resources_and_its_jobs() -> None:
    for own in (
        project(),
        project(executor=dg.multiprocess_executor),
        project(executor=dg.in_process_executor),
    ):
        merged = dg.Definitions.merge(own, build_storm_defs())
        dg.Definitions.validate_loadable(merged)
        assert executors(merged) == executors(own)
        assert isinstance((merged.resources or {})["spark"], Spark)
    ours = build_storm_defs()
    assert ours.executor is None
    assert all(key.startswith("storm_") for key in ours.resources or {})
    repository = ours.get_repository_def()
    jobs = [job for job in repository.get_all_jobs() if not job.name.startswith("__")]
    assert {job.executor_def.name for job in jobs} == {"in_process"}


def test_the_location_of_this_repository_keeps_every_name_and_default() -> None:
    defs = own_location()
    found = names_of(defs)
    assert {kind: sorted(set(STABLE[kind]) - found[kind]) for kind in found} == {
        kind: [] for kind in found
    }
    assert found["resources"] == set(STABLE["resources"])
    repository = defs.get_repository_def()
    assert repository.get_job("__ASSET_JOB").executor_def.name == STABLE["implicit_executor"]
    crons = {schedule.name: schedule.cron_schedule for schedule in repository.schedule_defs}
    assert STABLE["cron"].items() <= crons.items()
    for job, ops in STABLE["ops_of_jobs"].items():
        assert {node.name for node in repository.get_job(job).nodes} == set(ops), job
    ticking = [*repository.sensor_defs, *repository.schedule_defs]
    assert {item.default_status.value for item in ticking} == {"RUNNING"}


def test_a_cluster_has_only_names_of_its_own_and_as_many() -> None:
    plain, prod = names_of(build_storm_defs()), names_of(build_storm_defs(cluster="prod"))
    for kind, found in prod.items():
        assert len(found) == len(plain[kind]), kind
        assert not found & plain[kind], kind
        assert all("prod" in name for name in found), kind
    for kind in ("jobs", "ops", "sensors", "schedules", "groups", "partitions"):
        assert all(name.startswith("prod_") for name in prod[kind]), kind
    assert all(name.startswith("prod/") for name in prod["assets"] | prod["checks"])


def test_two_clusters_and_a_project_validate_as_one_location(tmp_path: Path) -> None:
    (tmp_path / "definitions.py").write_text(
        "import dagster as dg\n"
        "from storm_dagster import build_storm_defs\n"
        "@dg.asset(deps=[['storm', 'active_topology'], ['prod', 'storm', 'active_topology']])\n"
        "def report() -> None: ...\n"
        "defs = dg.Definitions.merge(\n"
        "    dg.Definitions(assets=[report], executor=dg.multiprocess_executor),\n"
        "    build_storm_defs(home='/srv/storm'),\n"
        "    build_storm_defs(cluster='prod', home='/srv/prod'),\n"
        ")\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "dagster", "definitions", "validate", "-f", "definitions.py"],
        cwd=tmp_path,
        env={**os.environ, "DAGSTER_HOME": str(tmp_path), "DAGSTER_DISABLE_TELEMETRY": "yes"},
        capture_output=True,
        text=True,
        timeout=patience(150),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_default_status_reaches_every_sensor_and_schedule() -> None:
    stopped = build_storm_defs(default_status=dg.DefaultSensorStatus.STOPPED).get_repository_def()
    ticking = [*stopped.sensor_defs, *stopped.schedule_defs]
    assert len(ticking) >= 7
    assert {item.default_status.value for item in ticking} == {"STOPPED"}


def test_resources_are_replaced_by_known_keys_and_others_refused() -> None:
    resource = ZooKeeperResource(home="/srv/else")
    for key in ("zookeeper", "storm_prod_zookeeper"):
        defs = build_storm_defs(cluster="prod", resources={key: resource})
        assert (defs.resources or {})["storm_prod_zookeeper"] is resource
        assert len(defs.resources or {}) == 6
    with pytest.raises(InvalidRequest, match="resources of your own"):
        build_storm_defs(resources={"warehouse": 1})


def test_a_wrong_name_of_a_cluster_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cluster='pro-d'"):
        build_storm_defs(cluster="pro-d")


def test_bound_functions_ask_for_the_keys_of_their_cluster() -> None:
    def sensor(
        context: dg.SensorEvaluationContext, names: DagsterNames, handles: Handles
    ) -> tuple[Any, ...]:
        return context, names, handles

    names = DagsterNames("prod")
    bound: Any = bind(sensor, names)
    made = dg.sensor(name="s", job_name="j")(bound)
    keys = {f"storm_prod_{key}" for key in ("zookeeper", "blobstore", "spark")}
    assert made.required_resource_keys == keys
    given = {key: object() for key in keys}
    context, told, handles = bound("context", **given)
    assert (context, told) == ("context", names)
    assert handles.zookeeper is given["storm_prod_zookeeper"]
    assert handles.spark is given["storm_prod_spark"]


@pytest.mark.zookeeper
def test_two_clusters_in_one_location_do_not_meet(
    world: DagsterWorld, prod_world: DagsterWorld
) -> None:
    merged = dg.Definitions.merge(project(), world.defs, prod_world.defs)
    world.defs = prod_world.defs = merged
    assert world.submit("wc", conf={"topology.workers": 1}).success
    assert prod_world.submit("wc", conf={"topology.workers": 2}).success
    assert len(world.topology("wc").assignment.workers) == 1
    assert len(prod_world.topology("wc").assignment.workers) == 2
    instance = world.instance
    assert instance.get_dynamic_partitions(PARTITIONS_NAME) == ["wc"]
    assert instance.get_dynamic_partitions("prod_storm_topologies") == ["wc"]
    for key in STAGES:
        assert len(world.materializations(key)) == 1
        assert len(world.materializations(key.with_prefix("prod"))) == 1

    # Rebalance, healing and the end of one leave the other alone.
    config = {"ops": {"prod__storm__assignment": {"config": {"workers": 1, "wait_secs": 0}}}}
    assert prod_world.run("rebalance_topology", partition="wc", config=config).success
    prod_world.run_workers("wc")
    cause = prod_world.topology("wc").assignment.workers[0]
    prod_world.cluster.state.delete_node(f"/supervisors/{cause.node}")
    before = world.topology("wc")
    heal = prod_world.run("reassign_topologies")
    assert heal.success
    assert world.topology("wc").assignment == before.assignment
    killed = {"ops": {"prod_kill_topology_op": {"config": {"name": "wc", "wait_secs": 0}}}}
    with leading_nimbus(prod_world):
        assert prod_world.run("kill_topology", config=killed).success
    assert prod_world.topology("wc") is None and world.topology("wc") is not None
    assert instance.get_dynamic_partitions(PARTITIONS_NAME) == ["wc"]
    assert instance.get_dynamic_partitions("prod_storm_topologies") == []
    observed = instance.fetch_observations(ACTIVE_TOPOLOGY.with_prefix("prod"), limit=5).records
    assert observed and not instance.fetch_observations(ACTIVE_TOPOLOGY, limit=5).records

    # Every sensor and check of the second cluster speaks of its own assets.
    result = tick_sensor("prod_supervisor_sensor", instance, defs=merged)
    assert {event.asset_key.path[0] for event in result.asset_events} == {"prod"}
