"""Worlds of Dagster: a real cluster state, a local blob store and a real Dagster instance for each
test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.dagster_world import DagsterWorld, PlainPlanner, leading_nimbus, make_world
from storm_rigs.nimbuses import RunningNimbus


@pytest.fixture
def spark_resource() -> dict[str, Any]:
    """Planner of :func:`world`; tests of the PySpark planner override it."""
    return {"spark": PlainPlanner()}


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """A Dagster instance in memory."""
    with dg.DagsterInstance.ephemeral(settings={"sensors": {"use_threads": True}}) as made:
        yield made


@pytest.fixture
def world(
    tmp_path: Path,
    instance: dg.DagsterInstance,
    zk_conf: dict[str, object],
    zk_cluster: StormClusterState,
    spark_resource: dict[str, Any],
) -> DagsterWorld:
    """The cluster of a code location without a name of its own."""
    return make_world(tmp_path / "home", instance, zk_conf, zk_cluster, spark_resource)


@pytest.fixture
def leader(world: DagsterWorld) -> Iterator[RunningNimbus]:
    """A real nimbus that leads the cluster of ``world``."""
    with leading_nimbus(world) as nimbus:
        yield nimbus


@pytest.fixture
def prod_world(
    tmp_path: Path,
    instance: dg.DagsterInstance,
    zk_conf: dict[str, object],
    spark_resource: dict[str, Any],
) -> Iterator[DagsterWorld]:
    """Another cluster in the same instance, called ``prod``."""
    conf = {**zk_conf, "storm.zookeeper.root": f"{zk_conf['storm.zookeeper.root']}-prod"}
    cluster = StormClusterState.open(conf, create_root=True)
    yield make_world(tmp_path / "prod", instance, conf, cluster, spark_resource, "prod")
    cluster.disconnect()
