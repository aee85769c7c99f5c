"""Owner of a declared topology: its name in each way of loading, and what another owner's sensor,
schedules and runs leave alone.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from storm_dagster.defs.declared.owner import declared_owner
from storm_dagster.defs.keys import PARTITIONS_NAME
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.testing.waiting import patience
from storm_rigs.dagster.dagster_results import step_failure
from storm_rigs.dagster.declared_location import CODE, DeclaredLocation
from storm_rigs.stage.dagster_world import DagsterWorld

pytestmark = pytest.mark.dagster

DEV = {"DAGSTER_IS_DEV_CLI": "1"}
CLOUD = {"DAGSTER_CLOUD_DEPLOYMENT_NAME": "prod"}


def on_host(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setenv("LOGNAME", "ana")


@pytest.mark.parametrize(
    ("deployment", "environ", "owner"),
    [
        (None, {}, "shop:default"),
        (None, DEV, "shop:local-ana@laptop"),
        (None, {**DEV, **CLOUD}, "shop:prod"),
        ("staging", {**DEV, **CLOUD}, "shop:staging"),
        ("", CLOUD, "shop:prod"),
    ],
)
def test_the_owner_is_the_module_and_its_deployment(
    monkeypatch: pytest.MonkeyPatch, deployment: str | None, environ: dict[str, str], owner: str
) -> None:
    on_host(monkeypatch, "Laptop.example.net")
    assert declared_owner("shop", deployment, environ) == owner


def test_a_code_server_keeps_its_owner_under_another_host_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owners: set[str] = set()
    for host in ("7f3a1c", "0b2d9e"):
        on_host(monkeypatch, host)
        owners.add(declared_owner("shop", None, {}))
    assert owners == {"shop:default"}


def test_a_developer_keeps_the_owner_in_another_network(monkeypatch: pytest.MonkeyPatch) -> None:
    owners: set[str] = set()
    for host in ("laptop.home.lan", "laptop.office.example.net", "laptop"):
        on_host(monkeypatch, host)
        owners.add(declared_owner("shop", None, DEV))
    assert owners == {"shop:local-ana@laptop"}


def test_a_deployment_with_spaces_is_refused_with_its_source() -> None:
    with pytest.raises(InvalidRequest, match="DAGSTER_CLOUD_DEPLOYMENT_NAME"):
        declared_owner("shop", None, {"DAGSTER_CLOUD_DEPLOYMENT_NAME": "a b"})


# -- a project, loaded in each way -----------------------------------------------------------------
DEFINITIONS = """
import os
from pathlib import Path
import dagster as dg


@dg.definitions
def defs():
    loaded = dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
    (spec,) = [spec for spec in loaded.resolve_all_asset_specs() if spec.key.path[-1] == "shop-a"]
    with open(os.environ["OWNER_FILE"], "a") as stream:
        print(spec.metadata["owner"], file=stream)
    return loaded
"""
YAML = """
type: storm_dagster.StormTopologyComponent
attributes:
  name: "shop-{{ env.SHOP_BRANCH }}"
  target: wc_code.py:Wc
  default_status: "{{ env('SHOP_STATUS', 'RUNNING') }}"
  schedule: {deploy: "*/10 * * * *"}
"""
PACKAGE = "owner_test_shop"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project of `dg` with one declared topology, whose name the environment completes."""
    place = tmp_path / PACKAGE / "defs" / "shop"
    place.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(
        f'[project]\nname = "{PACKAGE}"\nversion = "0"\n\n[tool.dg]\ndirectory_type = "project"\n\n'
        f'[tool.dg.project]\nroot_module = "{PACKAGE}"\n',
        encoding="utf-8",
    )
    for folder in (tmp_path / PACKAGE, place.parent):
        (folder / "__init__.py").touch()
    (tmp_path / PACKAGE / "definitions.py").write_text(DEFINITIONS, encoding="utf-8")
    (place / "wc_code.py").write_text(CODE, encoding="utf-8")
    (place / "defs.yaml").write_text(YAML, encoding="utf-8")
    (tmp_path / "workspace.yaml").write_text(
        f"load_from:\n  - python_module: {PACKAGE}.definitions\n", encoding="utf-8"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SHOP_BRANCH", "a")
    monkeypatch.setenv("OWNER_FILE", str(tmp_path / "owners"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for module in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[module]


def load(project: Path) -> dg.Definitions:
    return dg.load_from_defs_folder(path_within_project=project)


def test_name_and_status_may_come_from_the_environment(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_STATUS", "STOPPED")
    monkeypatch.setenv("DAGSTER_CLOUD_DEPLOYMENT_NAME", "pr-7")
    defs = load(project)
    specs = {spec.key: spec for spec in defs.resolve_all_asset_specs()}
    spec = specs[dg.AssetKey(["topologies", "shop-a"])]
    assert spec.metadata["owner"] == f"{PACKAGE}:pr-7"
    statuses = {sensor.default_status for sensor in defs.sensors or []}
    assert statuses == {dg.DefaultSensorStatus.STOPPED}
    (schedule,) = defs.schedules or []
    assert isinstance(schedule, dg.ScheduleDefinition)
    assert schedule.default_status == dg.DefaultScheduleStatus.STOPPED


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        ["dagster", "definitions", "validate", "-m", f"{PACKAGE}.definitions"],
        ["dagster", "definitions", "validate", "-f", f"{PACKAGE}/definitions.py"],
        ["dagster", "definitions", "validate", "-w", "workspace.yaml"],
        ["dg", "check", "defs"],
    ],
    ids=lambda command: command[-2],
)
def test_each_way_of_loading_gives_the_same_owner(project: Path, command: list[str]) -> None:
    program, *arguments = command
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(project), os.environ.get("PYTHONPATH", "")]),
        "DAGSTER_DISABLE_TELEMETRY": "yes",
        "DAGSTER_CLOUD_DEPLOYMENT_NAME": "prod",
    }
    done = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *arguments],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    owners = (project / "owners").read_text().split()
    assert set(owners) == {f"{PACKAGE}:prod"}


# -- a topology of another owner -------------------------------------------------------------------
@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """On disk: a schedule's context takes no other."""
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as made:
        yield made


Locate = Callable[..., DeclaredLocation]


@pytest.fixture
def locate(world: DagsterWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Locate:
    """Makes the code location of an owner on the cluster of ``world``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(owner: str, **options: Any) -> DeclaredLocation:
        blobs = world.home / "blobs"
        folder = tmp_path / owner.replace(":", "-")
        return DeclaredLocation(
            folder, world.home, world.instance, owner, blob_dir=blobs, **options
        )

    return make


def deploy(world: DagsterWorld, location: DeclaredLocation, owner: str | None) -> None:
    """The topology runs as a deploy of ``owner`` leaves it; ``None``: of the former release."""
    conf: dict[str, Any] = {"declared.code.version": location.version()}
    if owner is not None:
        conf["declared.owner"] = owner
    world.instance.add_dynamic_partitions(PARTITIONS_NAME, ["wc"])
    assert world.submit("wc", conf=conf).success
    world.run_workers("wc")


@pytest.mark.zookeeper
def test_another_owners_sensor_and_schedules_never_deploy(
    world: DagsterWorld, locate: Locate
) -> None:
    deploy(world, locate("shop:prod"), "shop:prod")
    branch = locate("shop:branch", code=CODE + "\n# changed\n")
    result = branch.tick()
    assert not result.run_requests
    assert not [
        event for event in result.asset_events if isinstance(event, dg.AssetMaterialization)
    ]
    checks = {
        event.check_name: event
        for event in result.asset_events
        if isinstance(event, dg.AssetCheckEvaluation)
    }
    check = checks["as_declared"]
    assert not check.passed and check.severity == dg.AssetCheckSeverity.ERROR
    assert "owned by shop:prod" in str(check.description) and "take_over" in str(check.description)
    for schedule in ("deploy_wc_schedule", "rebalance_wc_schedule"):
        assert "owned by shop:prod" in str(branch.schedule(schedule).skip_message)


@pytest.mark.long
@pytest.mark.zookeeper
def test_another_owners_runs_are_refused_with_owner_and_remedy(
    world: DagsterWorld, locate: Locate
) -> None:
    deploy(world, locate("shop:prod"), "shop:prod")
    branch = locate("shop:branch", code=CODE + "\n# changed\n")
    take_over = {"ops": {"deploy_wc_op": {"config": {"take_over": True}}}}
    by_schedule = {"dagster/schedule_name": "deploy_wc_schedule"}
    refused = [
        branch.run("deploy_wc"),
        branch.run("submit_wc"),
        branch.run("kill_wc"),
        # Only a user takes a topology over.
        branch.run("deploy_declared", take_over, by_schedule),
    ]
    for result in refused:
        kind, message = step_failure(result)
        assert kind == "Conflict"
        assert "owned by shop:prod" in message and "take_over" in message
    assert not branch.tick().run_requests


@pytest.mark.long
@pytest.mark.zookeeper
def test_the_owner_and_a_first_deploy_after_an_upgrade_are_free(
    world: DagsterWorld, locate: Locate
) -> None:
    deploy(world, locate("shop:prod"), None)
    prod = locate("shop:prod", code=CODE + "\n# changed\n")
    (request,) = prod.tick().run_requests or []
    assert request.job_name == "deploy_declared"


@pytest.mark.zookeeper
def test_a_new_instance_of_the_same_owner_goes_on_deploying(
    world: DagsterWorld, locate: Locate, tmp_path: Path
) -> None:
    deploy(world, locate("shop:local-ana@laptop"), "shop:local-ana@laptop")
    changed = locate("shop:local-ana@laptop", code=CODE + "\n# changed\n")
    (tmp_path / "new").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "new")) as changed.instance:
        (request,) = changed.tick().run_requests or []
    assert request.job_name == "deploy_declared"
