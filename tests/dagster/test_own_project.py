"""Storm's definitions in somebody else's project: three lines, own names, and its parts used
alone.
"""

from __future__ import annotations

import dagster as dg
import pytest

import storm_dagster
from storm_dagster import StormAsset, StormTranslator, build_storm_defs
from storm_dagster.defs.keys import ACTIVE_TOPOLOGY, STAGES, SUPERVISORS
from storm_dagster.model.errors import InvalidRequest
from storm_rigs.dagster.dagster_results import tick_sensor
from storm_rigs.stage.dagster_world import DagsterWorld

pytestmark = pytest.mark.dagster


class Ours(StormTranslator):
    def get_asset_spec(self, asset: StormAsset) -> dg.AssetSpec:
        return asset.spec.replace_attributes(
            key=asset.spec.key.with_prefix("streams"),
            group_name=f"our_{asset.kind}",
            owners=["team:data"],
            tags={"domain": "streaming"},
        )


def test_three_lines_in_a_project_with_assets_of_its_own() -> None:
    @dg.asset(deps=[ACTIVE_TOPOLOGY])
    def report() -> None: ...

    merged = dg.Definitions.merge(dg.Definitions(assets=[report]), build_storm_defs())
    dg.Definitions.validate_loadable(merged)
    assert {"report", "storm/active_topology"} <= {
        spec.key.to_user_string() for spec in merged.resolve_all_asset_specs()
    }


def test_a_translator_renames_assets_checks_and_dependencies() -> None:
    defs = build_storm_defs(translator=Ours())
    dg.Definitions.validate_loadable(defs)
    specs = {spec.key: spec for spec in defs.resolve_all_asset_specs()}
    assert {key.path[0] for key in specs} == {"streams"}
    for before, key in zip((None, *STAGES), STAGES, strict=False):
        spec = specs[key.with_prefix("streams")]
        assert (spec.group_name, spec.owners, spec.tags["domain"]) == (
            "our_stage",
            ["team:data"],
            "streaming",
        )
        assert [dep.asset_key for dep in spec.deps] == (
            [before.with_prefix("streams")] if before else []
        )
    checks = [key for check in defs.asset_checks or [] for key in check.check_keys]
    assert checks
    assert {key.asset_key.path[0] for key in checks} == {"streams"}
    # The step names stay: nimbus and the command line launch with them.
    job = defs.resolve_job_def("submit_topology")
    assert "storm__topology_conf" in {node.name for node in job.all_node_defs}


def test_one_key_for_two_assets_is_refused() -> None:
    class Same(StormTranslator):
        def get_asset_spec(self, asset: StormAsset) -> dg.AssetSpec:
            return asset.spec.replace_attributes(key=dg.AssetKey("all"))

    with pytest.raises(InvalidRequest, match="the same key"):
        build_storm_defs(translator=Same())


@pytest.mark.zookeeper
def test_runs_checks_and_sensors_report_under_the_translated_keys(world: DagsterWorld) -> None:
    world.defs = build_storm_defs(
        home=str(world.home),
        blob_dir=str(world.home / "blobs"),
        tick_secs=0.0,
        resources={"spark": (world.defs.resources or {})["storm_spark"]},
        translator=Ours(),
    )
    assert world.submit("wc").success
    assert world.materializations(ACTIVE_TOPOLOGY.with_prefix("streams"))
    assert not world.materializations(ACTIVE_TOPOLOGY)
    result = tick_sensor("supervisor_sensor", world.instance, defs=world.defs)
    keys = {event.asset_key for event in result.asset_events}
    assert SUPERVISORS.with_prefix("streams") in keys
    assert {key.path[0] for key in keys} == {"streams"}
    # The checks run under the new keys as well.
    (blobs,) = [
        c
        for c in world.defs.asset_checks or []
        if "blobs_present" in {k.name for k in c.check_keys}
    ]
    outcome = dg.materialize(
        [blobs],
        instance=world.instance,
        resources=dict(world.defs.resources or {}),
        selection=dg.AssetSelection.checks(blobs),
    )
    (evaluation,) = outcome.get_asset_check_evaluations()
    assert evaluation.passed
    assert evaluation.asset_key.path[0] == "streams"


def test_sensors_and_schedules_stand_alone() -> None:
    defs = dg.Definitions(
        sensors=[
            storm_dagster.build_heartbeat_sensor(job=storm_dagster.build_reassign_job()),
        ],
        schedules=[
            storm_dagster.build_rebalance_schedule(cron_schedule="0 * * * *", topologies=["wc"])
        ],
        resources=storm_dagster.build_storm_resources(),
    )
    dg.Definitions.validate_loadable(defs)
    jobs = {job.name for job in defs.resolve_all_job_defs()}
    assert {"reassign_topologies", "ask_for_rebalance"} <= jobs


def test_every_public_name_is_there_and_listed() -> None:
    for name in storm_dagster.__all__:
        assert getattr(storm_dagster, name) is not None
        assert name in dir(storm_dagster)
