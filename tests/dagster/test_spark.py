"""Work on Spark: the placement of a submission, and the roll-up of statistics."""

from __future__ import annotations

import datetime
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from pyspark.sql import SparkSession

from storm_dagster.defs import build_storm_defs, keys
from storm_dagster.defs.observe.metrics_rollup import drop_older, roll_up_hour
from storm_dagster.defs.resources.handles import ZooKeeperResource
from storm_dagster.defs.resources.spark import SparkResource
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.model.errors import Unavailable
from storm_rigs.dagster_results import materialized, shown, step_failure
from storm_rigs.dagster_world import DagsterWorld
from storm_rigs.fault_proxy import FaultProxy
from storm_rigs.spark_server import SparkServer

pytestmark = [pytest.mark.dagster, pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture
def spark_resource(tmp_path: Path, spark_remote: str) -> dict[str, Any]:
    """The real resource, pointed at the test's server."""
    return {
        "spark": SparkResource(
            home=str(tmp_path / "home"), overrides={"spark.remote": spark_remote}
        )
    }


@pytest.mark.zookeeper
def test_a_submission_is_planned_with_pyspark(world: DagsterWorld) -> None:
    result = world.submit("wc", conf={"topology.workers": 3})
    assert result.success
    for asset in ("assignment", "published_assignment"):
        assert materialized(result, asset)["planner"] == "pyspark"
    assert materialized(result, "assignment")["assign_seconds"] > 0
    assert len(world.topology("wc").assignment.workers) == 3
    # A second run in another process would attach to the same session: its id stands in ZooKeeper.
    again = world.submit("second")
    assert materialized(again, "assignment")["planner"] == "pyspark"


def test_a_submission_without_spark_is_unavailable_and_never_uses_the_local_planner(
    world: DagsterWorld,
) -> None:
    spark = SparkResource(home=str(world.home), overrides={"spark.remote": "sc://127.0.0.1:9"})
    world.defs = build_storm_defs(
        home=str(world.home), blob_dir=str(world.home / "blobs"), resources={"spark": spark}
    )
    result = world.submit("wc")
    assert not result.success
    (failed,) = [event for event in result.all_events if event.event_type_value == "STEP_FAILURE"]
    assert failed.step_key == "storm__assignment"
    assert step_failure(result)[0] == "Unavailable"
    assert world.topology("wc") is None


def test_the_session_for_users_is_dagster_pysparks(tmp_path: Path, spark_remote: str) -> None:
    from dagster_pyspark import LazyPySparkResource

    (tmp_path / "storm.yaml").write_text(
        yaml.safe_dump({"spark.remote": spark_remote}), encoding="utf-8"
    )
    resource = SparkResource(home=str(tmp_path)).pyspark()
    assert isinstance(resource, LazyPySparkResource)
    assert resource.spark_session.range(5).count() == 5


@pytest.mark.long
def test_a_users_process_that_ends_leaves_a_session_that_the_url_names(
    tmp_path: Path, spark_remote: str
) -> None:
    """Others use it too."""
    url = f"{spark_remote}/;session_id={uuid.uuid4()};user_id=me"
    code = (
        "import sys\n"
        "from storm_dagster.defs.resources.spark import SparkResource\n"
        "session = SparkResource(home=sys.argv[1], overrides={'spark.remote': sys.argv[2]}).pyspark().spark_session\n"
        "session.sql('set planted = 4711').collect()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), url], check=True, timeout=120)
    again = SparkSession.builder.remote(url).create()
    try:
        assert again.conf.get("planted") == "4711"
    finally:
        again.client.close()


@pytest.mark.long
def test_a_users_process_ends_although_its_spark_server_is_gone(
    tmp_path: Path, spark_server: SparkServer
) -> None:
    """pyspark's exit hook alone would go on asking the dead server for ten minutes."""
    code = (
        "import sys\n"
        "from storm_dagster.defs.resources.spark import SparkResource\n"
        "resource = SparkResource(home=sys.argv[1], overrides={'spark.remote': sys.argv[2]})\n"
        "print(resource.pyspark().spark_session.range(5).count(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with FaultProxy("127.0.0.1", spark_server.port) as link:
        command = [sys.executable, "-c", code, str(tmp_path), f"sc://127.0.0.1:{link.port}"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == "5\n"
            link.close()
            try:
                process.communicate(timeout=100)
            finally:
                process.kill()
    assert process.returncode == 0


TEN = datetime.datetime(2026, 1, 1, 10, tzinfo=datetime.timezone.utc)


def sample(hour: datetime.datetime, executed: int, component: str = "count") -> tuple[Any, ...]:
    at = hour + datetime.timedelta(hours=1)
    return ("wc-1-1", "wc", component, 2, at, 0, 0, executed, executed, 0, 1.5, 0.0)


def after(hours: int) -> datetime.datetime:
    return TEN + datetime.timedelta(hours=hours)


@pytest.fixture
def session(tmp_path: Path, spark_remote: str) -> Any:
    return (
        SparkResource(home=str(tmp_path), overrides={"spark.remote": spark_remote})
        .pyspark()
        .spark_session
    )


def test_an_hour_is_what_counters_grew_by_and_a_repetition_changes_nothing(
    tmp_path: Path, session: Any
) -> None:
    root = tmp_path / "m"

    def executed(hour: datetime.datetime, *rows: tuple[Any, ...]) -> dict[str, int]:
        found = roll_up_hour(session, root, hour, list(rows) or None).collect()
        return {row["component"]: row["executed"] for row in found}

    assert executed(TEN, sample(TEN, 100)) == {"count": 100}
    assert executed(after(1), sample(after(1), 160), sample(after(1), 7, "new")) == {
        "count": 60,
        "new": 7,
    }
    # A worker was restarted and counts from zero again.
    assert executed(after(2), sample(after(2), 40)) == {"count": 40}
    # Repeated, with whatever is counted now: the sample of the hour stands.
    assert executed(after(1), sample(after(1), 9999)) == {"count": 60, "new": 7}
    assert executed(after(1)) == {"count": 60, "new": 7}
    whole = session.read.parquet(str(root / "hourly"))
    assert {(row["hour"], row["component"]): row["executed"] for row in whole.collect()} == {
        ("2026-01-01-10", "count"): 100,
        ("2026-01-01-11", "count"): 60,
        ("2026-01-01-11", "new"): 7,
        ("2026-01-01-12", "count"): 40,
    }
    with pytest.raises(
        Unavailable, match="no sample was taken at the end of hour 2026-01-01 20:00"
    ):
        roll_up_hour(session, root, after(10), None)


@pytest.mark.long
def test_two_hours_are_read_and_old_ones_dropped(tmp_path: Path, session: Any) -> None:
    root = tmp_path / "m"
    for hours in range(5):
        roll_up_hour(session, root, after(hours), [sample(after(hours), 10 * hours)])
    for hours in (0, 1, 2):  # What would fail to be read, is not.
        for part in (root / "samples" / f"hour=2026-01-01-{10 + hours}").glob("*.parquet"):
            part.write_bytes(b"damaged")
    assert [row["executed"] for row in roll_up_hour(session, root, after(4), None).collect()] == [
        10
    ]
    drop_older(session, root, after(3))
    for kind in ("samples", "hourly"):
        assert sorted(part.name for part in (root / kind).iterdir()) == [
            "hour=2026-01-01-13",
            "hour=2026-01-01-14",
        ]


@pytest.mark.long
def test_the_run_of_an_hour_shows_it_and_keeps_the_retention(
    world: DagsterWorld, spark_remote: str, session: Any
) -> None:
    conf = world.home / "storm.yaml"
    conf.write_text(
        conf.read_text(encoding="utf-8")
        + f"spark.remote: {spark_remote}\ndagster.metrics.retention.hours: 2\n",
        encoding="utf-8",
    )
    world.defs = build_storm_defs(home=str(world.home), resource_prefix="")
    root = world.home / "metrics"
    for hours in range(4):
        roll_up_hour(session, root, after(hours), [sample(after(hours), 3600 * hours)])
    assert world.run("roll_up_metrics", partition="2026-01-01-13:00").success
    (made,) = world.materializations(keys.TOPOLOGY_STATS)
    assert made.partition == "2026-01-01-13:00"
    assert shown(made)["executed"] == 3600
    assert shown(made)["executed_per_sec"] == 1.0
    assert len(dg.serialize_value(made)) < 4_000
    assert len(list((root / "samples").iterdir())) == 3
    failed = world.run("roll_up_metrics", partition="2026-01-01-20:00")
    assert not failed.success
    (event,) = [event for event in failed.all_events if event.event_type_value == "STEP_FAILURE"]
    assert "no sample was taken" in str(event.event_specific_data)


def test_clusters_that_share_a_home_have_hours_of_their_own(
    world: DagsterWorld, spark_remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots: list[Path] = []

    def record(session: Any, root: Path, hour: datetime.datetime, rows: Any) -> Any:
        roots.append(root)
        return roll_up_hour(session, root, hour, rows)

    monkeypatch.setattr("storm_dagster.defs.observe.metrics_rollup.roll_up_hour", record)
    for cluster in (None, "east", "west"):
        defs = build_storm_defs(
            cluster=cluster,
            home=str(world.home),
            conf_dir=str(world.home),
            overrides={"spark.remote": spark_remote},
        )
        world.defs, world.names = defs, DagsterNames(cluster)
        world.run("roll_up_metrics", partition="2026-01-01-20:00")
    assert roots == [world.home / "metrics" / name for name in ("", "east", "west")]


def test_zookeeper_is_found_by_its_handle(world: DagsterWorld) -> None:
    with ZooKeeperResource(home=str(world.home)).cluster() as cluster:
        assert cluster.cluster_id() == world.cluster.cluster_id()
