"""The example of streams and batch in the layout of its README: a local cluster, and the project in
a Dagster of its own beside it. The hour that a bolt reports starts a batch asset of the project.
"""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually
from storm_rigs.dagster.dagster_results import shown
from storm_rigs.stage.stock_dagster import StockDagster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.long,
    pytest.mark.timeout(1200),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
CLICKS = dg.AssetKey(["lake", "clicks"])
HOUR_PARTITION = "dagster/partition"


def test_a_bolt_starts_a_batch_asset_of_the_project_that_declared_it(tmp_path: Path) -> None:
    env = {
        "STORM_DAGSTER_HOME": str(tmp_path / "home"),
        "STREAMS_LAKE": str(tmp_path / "lake"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    module = "streams_and_batch.definitions"
    with (
        LocalCluster(tmp_path / "home") as cluster,
        StockDagster(EXAMPLES, module, tmp_path / "dagster", env=env) as project,
    ):
        project.wait_success(project.launch("submit_clicks"))
        cluster.wait_running("clicks")

        def reported() -> dg.AssetMaterialization | None:
            event = project.instance.get_latest_materialization_event(CLICKS)
            return None if event is None else event.asset_materialization

        hour = eventually(reported, 300, "an hour of clicks", interval=1.0)
        assert str(shown(hour)["storm/topology"]).startswith("clicks-")
        runs = dg.RunsFilter(tags={HOUR_PARTITION: str(hour.partition)})
        eventually(
            lambda: project.instance.get_run_records(runs), 240, "a run of lake/pages_by_hour"
        )
        assert cluster.show("clicks")["errors"] == []
