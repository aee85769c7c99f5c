"""A stock project takes our package in and takes it out again: what is its own stays what it was,
run by run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from storm_dagster.testing.waiting import patience
from storm_rigs.dagster.newcomer import PACKAGE, NewcomerProject, inventory

pytestmark = pytest.mark.dagster

TOPOLOGY = dg.AssetKey(["topologies", "clicks"])


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewcomerProject:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    return NewcomerProject(tmp_path / "project")


@pytest.fixture
def stock(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """An instance without `dagster.yaml`."""
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.from_config(str(tmp_path / "dagster")) as instance:
        assert not (tmp_path / "dagster" / "dagster.yaml").exists()
        yield instance


def events_of(defs: dg.Definitions, job: str, instance: dg.DagsterInstance) -> Counter[str]:
    result = defs.resolve_job_def(job).execute_in_process(instance=instance)
    assert result.success
    return Counter(event.event_type_value for event in result.all_events)


def test_all_that_is_the_projects_own_stays(
    project: NewcomerProject, stock: dg.DagsterInstance, tmp_path: Path
) -> None:
    alone = project.load()
    had, events = inventory(alone), events_of(alone, "prices_job", stock)
    assert had["jobs"]["nightly"] == had["jobs"]["__ASSET_JOB"] == "ours"

    project.add_storm(tmp_path / "home", deploy="hot", schedule={"deploy": "* * * * *"})
    merged = project.load()
    dg.Definitions.validate_loadable(merged)
    # As Dagster itself loads it, which takes only one `Definitions` of a module.
    loaded = subprocess.run(
        [
            sys.executable,
            "-m",
            "dagster",
            "definitions",
            "validate",
            "-m",
            f"{PACKAGE}.definitions",
        ],
        cwd=project.root,
        env={
            **os.environ,
            "DAGSTER_HOME": str(tmp_path / "dagster"),
            "DAGSTER_DISABLE_TELEMETRY": "yes",
        },
        capture_output=True,
        text=True,
        timeout=patience(150),
        check=False,
    )
    assert loaded.returncode == 0, loaded.stdout + loaded.stderr
    has = inventory(merged)
    for kind, names in had.items():
        assert {name: has[kind].get(name) for name in names} == names
    assert {"deploy_clicks", "kill_clicks", "submit_topology"} <= has["jobs"].keys()
    assert has["jobs"]["deploy_clicks"] == "in_process"
    assert events_of(merged, "prices_job", stock) == events

    project.remove_storm()
    assert inventory(project.load()) == had


def test_eager_assets_follow_their_own_dependencies_and_deploys(
    project: NewcomerProject, stock: dg.DagsterInstance, tmp_path: Path
) -> None:
    project.add_storm(tmp_path / "home")
    defs = project.load()
    cursor: Any = None

    def requested() -> set[str]:
        nonlocal cursor
        result = dg.evaluate_automation_conditions(defs, stock, cursor=cursor)
        cursor = result.cursor
        keys = {
            key
            for key, subset in ((r.key, r.true_subset) for r in result.results)
            if not subset.is_empty
        }
        for key in keys:  # As the run that was asked for.
            stock.report_runless_asset_event(dg.AssetMaterialization(key))
        return {key.to_user_string() for key in keys}

    assert requested() == set()
    stock.report_runless_asset_event(dg.AssetMaterialization("prices"))
    assert requested() == {"price_report"}
    for version in ("first", "second"):
        tags = {"dagster/data_version": version}
        stock.report_runless_asset_event(dg.AssetMaterialization(TOPOLOGY, tags=tags))
        assert requested() == {"clicks_report"}
        for _ in range(2):
            # What the sensor records while nothing changes.
            stock.report_runless_asset_event(dg.AssetObservation(TOPOLOGY, metadata={"runs": True}))
            assert requested() == set()
