"""Work on Spark: the placement of a submission, and sessions of users."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession

from storm_dagster.api import SparkBolt, TopologyBuilder
from storm_dagster.defs import build_storm_defs
from storm_dagster.defs.resources.handles import ZooKeeperResource
from storm_dagster.defs.resources.spark import SparkResource
from storm_dagster.testing.waiting import patience
from storm_rigs.dagster.dagster_results import materialized, step_failure
from storm_rigs.servers.fault_proxy import FaultProxy
from storm_rigs.servers.spark_server import SparkServer
from storm_rigs.stage.dagster_world import DagsterWorld

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


@pytest.mark.zookeeper
def test_a_submission_with_a_key_that_spark_refuses_fails(
    world: DagsterWorld, spark_remote: str
) -> None:
    builder = TopologyBuilder("keys")
    builder.set_spout("numbers", "keys:Numbers", outputs=["n"])
    builder.set_bolt("totals", SparkBolt, inputs="numbers", args={"function": "keys:totals"})
    document = builder.build().model_dump(mode="json")
    keys = {"topology.spark.conf": {"spark.executor.memory": "4g"}}
    refused = world.submit(
        "keys", topology=document, conf={**keys, "topology.spark.remote": spark_remote}
    )
    kind, message = step_failure(refused)[:2]
    assert kind == "InvalidTopology"
    assert "bolt 'totals': topology.spark.conf: spark.executor.memory: 4g is refused" in message
    assert world.topology("keys") is None
    # A server that is away is not waited for: the component reports the key.
    away = {**keys, "topology.spark.remote": "sc://127.0.0.1:9"}
    assert world.submit("away", topology=document, conf=away).success


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
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), url], check=True, timeout=patience(120)
    )
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
                process.communicate(timeout=patience(100))
            finally:
                process.kill()
    assert process.returncode == 0


def test_zookeeper_is_found_by_its_handle(world: DagsterWorld) -> None:
    with ZooKeeperResource(home=str(world.home)).cluster() as cluster:
        assert cluster.cluster_id() == world.cluster.cluster_id()
