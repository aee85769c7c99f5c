"""What runs on Spark: the placement of a submission, and the roll-up of statistics."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from storm_dagster.defs import build_storm_defs
from storm_dagster.defs.handles import ZooKeeperResource
from storm_dagster.defs.metrics_rollup import recent_points, write_rollup
from storm_dagster.defs.spark_resource import SparkResource
from storm_dagster.defs.stats_picture import stats_picture

pytestmark = [pytest.mark.dagster, pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture
def spark_resource(tmp_path: Path, spark_remote: str) -> dict[str, Any]:
    """The real resource, pointed at the test's server."""
    return {"spark": SparkResource(home=str(tmp_path / "home"), overrides={"spark.remote": spark_remote})}


def metadata(result, asset):
    for event in result.get_asset_materialization_events():
        if event.asset_key.path[-1] == asset:
            return event.step_materialization_data.materialization.metadata
    raise AssertionError(f"{asset} was not materialized")


@pytest.mark.zookeeper
def test_a_submission_is_planned_with_pyspark(world) -> None:
    result = world.submit("wc", conf={"topology.workers": 3})
    assert result.success
    for asset in ("assignment", "published_assignment"):
        assert metadata(result, asset)["planner"].value == "pyspark"
    assert metadata(result, "assignment")["assign_seconds"].value > 0
    assert len(world.topology("wc").assignment.workers) == 3
    # A second run in another process would attach to the same session: its id stands in ZooKeeper.
    again = world.submit("second")
    assert metadata(again, "assignment")["planner"].value == "pyspark"


def test_a_submission_without_spark_is_unavailable_and_never_uses_the_twin(world) -> None:
    spark = SparkResource(home=str(world.home), overrides={"spark.remote": "sc://127.0.0.1:9"})
    world.defs = build_storm_defs(
        home=str(world.home), blob_dir=str(world.home / "blobs"), resources={"spark": spark}
    )
    result = world.submit("wc")
    assert not result.success
    (failed,) = [event for event in result.all_events if event.event_type_value == "STEP_FAILURE"]
    assert failed.step_key == "storm__assignment"
    assert failed.event_specific_data.user_failure_data.metadata["error_type"].value == "Unavailable"
    assert world.topology("wc") is None


def test_the_session_for_users_is_dagster_pysparks(tmp_path: Path, spark_remote: str) -> None:
    from dagster_pyspark import LazyPySparkResource

    (tmp_path / "storm.yaml").write_text(yaml.safe_dump({"spark.remote": spark_remote}), encoding="utf-8")
    resource = SparkResource(home=str(tmp_path)).pyspark()
    assert isinstance(resource, LazyPySparkResource)
    assert resource.spark_session.range(5).count() == 5


def test_samples_are_rolled_up_by_the_hour(tmp_path: Path, spark_remote: str) -> None:
    session = (
        SparkResource(home=str(tmp_path), overrides={"spark.remote": spark_remote}).pyspark().spark_session
    )

    def sample(hour: int, minute: int, executed: int) -> tuple[Any, ...]:
        at = datetime.datetime(2026, 1, 1, hour, minute, tzinfo=datetime.timezone.utc)
        return ("wc-1-1", "wc", "count", 2, at, 0, 0, executed, executed, 0, 1.5, 0.0)

    write_rollup(session, [sample(10, 0, 100)], tmp_path / "m")
    write_rollup(session, [sample(10, 30, 160)], tmp_path / "m")
    # The worker was restarted and counts from zero again.
    newest = write_rollup(session, [sample(11, 0, 40)], tmp_path / "m")
    hourly = session.read.parquet(str(tmp_path / "m" / "hourly")).orderBy("hour").collect()
    assert [row["executed"] for row in hourly] == [160, 40]
    assert [row["samples"] for row in hourly] == [2, 1]
    assert [row["executed"] for row in newest] == [40]
    points = sorted(recent_points(session, tmp_path / "m"), key=lambda one: one.at)
    assert [round(point.per_second, 4) for point in points] == [round(60 / 1800, 4), round(40 / 1800, 4)]
    assert {(point.series, point.latency_ms) for point in points} == {("wc / count", 1.5)}
    drawn = ElementTree.fromstring(stats_picture(points, "over <time> & more"))
    assert any("wc / count" in (text.text or "") for text in drawn.iter("{http://www.w3.org/2000/svg}text"))
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == 4, (
        "two samples in each of two panels"
    )
    assert ElementTree.fromstring(stats_picture([], "nothing yet")) is not None


def test_zookeeper_is_found_by_its_handle(world) -> None:
    with ZooKeeperResource(home=str(world.home)).cluster() as cluster:
        assert cluster.cluster_id() == world.cluster.cluster_id()
