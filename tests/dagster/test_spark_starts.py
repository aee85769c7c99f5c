"""A placement that is asked for while `dev` starts Spark: it waits, and healing does not. No server
is needed.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from threading import Event, Thread
from typing import Literal

import pytest

from storm_dagster.defs.resources import spark
from storm_dagster.defs.resources.spark import SparkResource
from storm_dagster.host.endpoints import ClusterFile, SparkEndpoint
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.placement import PlacementBatch
from storm_dagster.spark import session
from storm_dagster.spark.session import await_start
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.placement.placement_clusters import small_topology, supervisor
from storm_rigs.servers.ports import free_ports

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper, pytest.mark.timeout(100)]


def write(home: Path, remote: str, starting: bool) -> None:
    """The file that `dev` writes, before and after Spark is ready."""
    server = SparkEndpoint(remote=remote, starting=starting)
    ClusterFile(zookeeper="127.0.0.1:2181", zookeeper_root="/storm", spark=server).write(home)


def batch(event: Literal["new", "monitor"]) -> PlacementBatch:
    topology = small_topology(bolts={}, spouts={"words": 1}, event=event)
    return PlacementBatch(supervisors=(supervisor(1, [6900]),), topologies=(topology,))


def test_a_placement_waits_for_a_spark_that_starts_and_healing_does_not(
    tmp_path: Path, zk_cluster: StormClusterState
) -> None:
    remote = f"sc://127.0.0.1:{free_ports(1)[0]}"
    write(tmp_path, remote, starting=True)
    plan = SparkResource(home=str(tmp_path), overrides={"spark.remote": remote}).planner(zk_cluster)
    with pytest.raises(Unavailable, match="out of reach"):
        plan(batch("monitor"))
    started_when_asked: Future[bool] = Future()

    def submit() -> None:
        """What is left of a placement when nothing listens: the error, and whether `dev` was ready
        by then.
        """
        try:
            plan(batch("new"))
        except Unavailable:
            cluster = ClusterFile.read(tmp_path)
            started_when_asked.set_result(
                cluster is not None and cluster.spark is not None and not cluster.spark.starting
            )
        except BaseException as error:
            started_when_asked.set_exception(error)

    placement = Thread(target=submit)
    placement.start()
    # Healing has its answer while the file still says that Spark starts, again and again.
    for _ in range(50):
        with pytest.raises(Unavailable, match="out of reach"):
            plan(batch("monitor"))
    assert not started_when_asked.done()
    write(tmp_path, remote, starting=False)
    placement.join(60)
    assert started_when_asked.result(0), "it was asked only after the file had changed"


@pytest.mark.parametrize("file", ["none", "without Spark", "another Spark"])
def test_nothing_is_waited_for_that_dev_does_not_start(tmp_path: Path, file: str) -> None:
    """Each call would last two minutes, and end this test."""
    if file == "without Spark":
        ClusterFile(zookeeper="127.0.0.1:2181", zookeeper_root="/storm").write(tmp_path)
    elif file == "another Spark":
        write(tmp_path, "sc://127.0.0.1:1", starting=True)
    await_start("sc://127.0.0.1:2", tmp_path)


def test_a_placement_waits_for_a_spark_that_was_lost_and_starts_again(
    tmp_path: Path, zk_cluster: StormClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_NOTICE_SECS", 60.0)
    monkeypatch.setattr(spark, "_MAX_RESTARTS", 1)
    remote = f"sc://127.0.0.1:{free_ports(1)[0]}"
    write(tmp_path, remote, starting=False)
    plan = SparkResource(home=str(tmp_path), overrides={"spark.remote": remote}).planner(zk_cluster)
    failed = Event()

    def submit() -> None:
        with pytest.raises(Unavailable, match="out of reach"):
            plan(batch("new"))
        failed.set()

    placement = Thread(target=submit)
    placement.start()
    assert not failed.wait(0.5), "it waits for dev to notice that the server is lost"
    write(tmp_path, remote, starting=True)
    assert not failed.wait(0.5), "it waits for the server"
    write(tmp_path, remote, starting=False)
    # No server listens here: the one repetition ends with the same error.
    placement.join(60)
    assert failed.is_set()
