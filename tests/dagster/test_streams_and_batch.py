"""The example of streams and batch in one code location: its lineage, its daily assets on real
Spark, its gate.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storm_dagster.defs.resources.processes import NimbusResource
from storm_dagster.defs.resources.spark import SparkResource
from storm_rigs.dagster.dagster_results import materialized, shown

pytestmark = [pytest.mark.dagster, pytest.mark.spark, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def defs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark_remote: str) -> dg.Definitions:
    monkeypatch.setenv("STREAMS_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv("STORM_DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "storm.yaml").write_text(
        "nimbus.seeds: ['127.0.0.1:9']\n", encoding="utf-8"
    )
    loaded = dg.load_from_defs_folder(path_within_project=EXAMPLES / "streams_and_batch")
    resources = {
        "storm_spark": SparkResource(overrides={"spark.remote": spark_remote}),
        "storm_nimbus": NimbusResource(patience_secs=0.0),
    }
    return dg.Definitions.merge(loaded, dg.Definitions(resources=resources))


def land(lake: Path, day: str) -> None:
    """Files of the stream, with one duplicate view."""
    folder = lake / "clicks" / f"day={day}"
    folder.mkdir(parents=True)
    rows = [
        {"view": v, "user": 1, "page": p, "at": 0}
        for v, p in (("1", "/"), ("2", "/docs"), ("3", "/docs"))
    ]
    for number, part in enumerate((rows, rows[:1])):
        pq.write_table(pa.Table.from_pylist(part), folder / f"part-{number}.parquet")


def report(
    defs: dg.Definitions, instance: dg.DagsterInstance, day: str
) -> dg.ExecuteInProcessResult:
    return defs.resolve_job_def("daily_report").execute_in_process(
        instance=instance, partition_key=day, raise_on_error=False
    )


def made(result: dg.ExecuteInProcessResult) -> list[str]:
    keys = [event.asset_key for event in result.get_asset_materialization_events()]
    return [key.to_user_string() for key in keys if key is not None]


def test_one_lineage_from_the_spout_to_the_report(defs: dg.Definitions) -> None:
    dg.Definitions.validate_loadable(defs)
    upstream = {
        spec.key.to_user_string(): [dep.asset_key.to_user_string() for dep in spec.deps]
        for spec in defs.resolve_all_asset_specs()
    }
    path = ["lake/top_pages"]
    while upstream[path[-1]]:
        path += upstream[path[-1]]
    assert path == [
        "lake/top_pages",
        "lake/clicks_day",
        "topologies/clicks/landed",
        "topologies/clicks/pages",
        "topologies/clicks/views",
        "topologies/clicks",
    ]


def test_a_day_that_is_over_is_reported_each_view_once(
    defs: dg.Definitions, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    land(tmp_path / "lake", "2025-01-02")
    result = report(defs, instance, "2025-01-02")
    assert result.success
    assert made(result) == ["lake/clicks_day", "lake/top_pages"]
    day, top = materialized(result, "clicks_day"), materialized(result, "top_pages")
    assert (day["views"], day["came_twice"]) == (3, 1)
    assert [(row.data["page"], row.data["views"]) for row in top["top"]] == [("/docs", 2), ("/", 1)]


def today() -> str:
    return datetime.now(tz=timezone.utc).date().isoformat()


def test_a_stream_that_does_not_run_blocks_the_report_of_today(
    defs: dg.Definitions, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    def reported() -> tuple[str, dg.ExecuteInProcessResult]:
        land(tmp_path / "lake", today())
        return today(), report(defs, instance, today())

    day, result = reported()
    if day != today():
        # Its day was over when its report was made.
        day, result = reported()
    assert not result.success
    assert made(result) == ["lake/clicks_day"]
    (evaluation,) = result.get_asset_check_evaluations()
    assert not evaluation.passed
    assert "unknown" in str(shown(evaluation)["status"])


def test_an_hour_that_the_stream_completed_is_counted_each_view_once(
    defs: dg.Definitions, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    folder = tmp_path / "lake" / "clicks" / "day=2025-01-02"
    folder.mkdir(parents=True)
    begin = int(datetime(2025, 1, 2, 10, tzinfo=timezone.utc).timestamp() * 1000)
    stamps = {"1": begin - 1, "2": begin, "3": begin + 3_599_999, "4": begin + 3_600_000}
    rows = [{"view": view, "user": 1, "page": "/", "at": at} for view, at in stamps.items()]
    for number, part in enumerate((rows, rows[1:2])):
        pq.write_table(pa.Table.from_pylist(part), folder / f"part-{number}.parquet")
    key = dg.AssetKey(["lake", "pages_by_hour"])
    job = dg.define_asset_job("hour", selection=[key], executor_def=dg.in_process_executor)
    result = (
        dg.Definitions.merge(defs, dg.Definitions(jobs=[job]))
        .resolve_job_def("hour")
        .execute_in_process(instance=instance, partition_key="2025-01-02-10:00")
    )
    assert materialized(result, "pages_by_hour")["views"] == {"/": 2}
