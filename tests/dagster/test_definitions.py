"""The code location: it loads without a cluster, cheaply, and shows forms that explain
themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from storm_dagster.defs import build_storm_defs
from storm_dagster.defs.keys import STAGES
from storm_dagster.testing.waiting import patience

pytestmark = pytest.mark.dagster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def defs() -> dg.Definitions:
    return build_storm_defs()


def test_everything_loads_without_a_cluster(defs: dg.Definitions) -> None:
    dg.Definitions.validate_loadable(defs)


def test_loading_imports_no_pyspark_and_no_pandas() -> None:
    code = (
        "import json, sys; from storm_dagster.defs import build_storm_defs; build_storm_defs().get_repository_def();"
        "print(json.dumps([m for m in ('pyspark', 'pandas', 'dagster_pyspark', 'pyarrow', 'zmq') if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=patience(120),
    )
    assert json.loads(done.stdout) == []


def test_the_six_assets_form_one_chain_in_one_group(defs: dg.Definitions) -> None:
    specs = {spec.key: spec for spec in defs.resolve_all_asset_specs()}
    assert [key.to_user_string() for key in STAGES] == [
        "storm/topology_conf",
        "storm/topology_code",
        "storm/task_info",
        "storm/assignment",
        "storm/published_assignment",
        "storm/active_topology",
    ]
    for before, key in zip((None, *STAGES), STAGES, strict=False):
        spec = specs[key]
        assert spec.group_name == "submission"
        assert spec.description
        assert spec.owners
        assert spec.kinds
        assert isinstance(spec.partitions_def, dg.DynamicPartitionsDefinition)
        assert spec.partitions_def.name == "storm_topologies"
        assert [dep.asset_key for dep in spec.deps] == ([before] if before else [])


def test_sensors_and_schedules_run_from_the_start(defs: dg.Definitions) -> None:
    sensors = {sensor.name: sensor for sensor in defs.sensors or []}
    schedules = {schedule.name: schedule for schedule in defs.schedules or []}
    assert sensors.keys() == {
        "heartbeat_sensor",
        "lifecycle_sensor",
        "supervisor_sensor",
        "leader_sensor",
    }
    assert schedules.keys() == {
        "rebalance_schedule",
        "inbox_cleanup_schedule",
        "prune_history_schedule",
    }
    assert all(s.default_status == dg.DefaultSensorStatus.RUNNING for s in sensors.values())
    assert all(s.default_status == dg.DefaultScheduleStatus.RUNNING for s in schedules.values())
    rebalance = schedules["rebalance_schedule"]
    assert (
        isinstance(rebalance, dg.ScheduleDefinition) and rebalance.cron_schedule == "*/10 * * * *"
    )


def test_resources_are_the_six_of_the_contract(defs: dg.Definitions) -> None:
    assert (defs.resources or {}).keys() == {
        "storm_zookeeper",
        "storm_blobstore",
        "storm_spark",
        "storm_nimbus",
        "storm_supervisors",
        "storm_workers",
    }


def test_the_submission_form_has_no_name_and_every_field_is_explained(defs: dg.Definitions) -> None:
    job = defs.resolve_job_def("submit_topology")
    (node,) = [node for node in job.all_node_defs if node.name == "storm__topology_conf"]
    assert isinstance(node, dg.OpDefinition)
    fields: Any = getattr(node.config_schema.config_type, "fields", None)
    assert set(fields) == {"target", "conf", "inactive", "allow_degraded", "handle", "token"}
    assert all(field.description and not field.is_required for field in fields.values())


def test_conf_with_null_values_passes_the_form(defs: dg.Definitions) -> None:
    from storm_dagster.defs.forms import SubmitConfig

    conf = {"topology.workers": 2, "mine.list": [1, None], "mine.null": None}
    run_config = {"ops": {"storm__topology_conf": {"config": {"conf": conf}}}}
    checked = dg.validate_run_config(defs.resolve_job_def("submit_topology"), run_config)
    assert SubmitConfig(**checked["ops"]["storm__topology_conf"]["config"]).conf == conf


def test_the_packaged_instance_settings_are_read_by_dagster(tmp_path: Path) -> None:
    text = (ROOT / "storm_dagster" / "defs" / "dagster.yaml").read_text(encoding="utf-8")
    (tmp_path / "dagster.yaml").write_text(text, encoding="utf-8")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert "Queued" not in type(instance.run_coordinator).__name__
        assert instance.get_settings("sensors")["use_threads"] is True


def test_docker_has_the_same_settings_over_postgres() -> None:
    own = yaml.safe_load(
        (ROOT / "storm_dagster" / "defs" / "dagster.yaml").read_text(encoding="utf-8")
    )
    docker = yaml.safe_load((ROOT / "docker" / "dagster.yaml").read_text(encoding="utf-8"))
    assert docker.pop("storage")["postgres"]["postgres_db"]["scheme"] == "postgresql+psycopg2"
    assert docker == own


@pytest.mark.parametrize("arguments", [["definitions", "validate", "-w", "workspace.yaml"]])
def test_dagster_validates_the_workspace(arguments: list[str], tmp_path: Path) -> None:
    env = {**os.environ, "DAGSTER_HOME": str(tmp_path), "DAGSTER_DISABLE_TELEMETRY": "yes"}
    done = subprocess.run(
        [sys.executable, "-m", "dagster", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=patience(150),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
