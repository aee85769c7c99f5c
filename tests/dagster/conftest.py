"""Worlds of Dagster: a real cluster state, a local blob store and a real Dagster instance for each
test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from storm_rigs.stage.builder import Stage
from storm_rigs.stage.dagster_world import (
    DagsterWorld,
    PlainPlanner,
    dagster_world,
    leading_nimbus,
)
from storm_rigs.stage.nimbus_thread import NimbusThread


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
    stage: Stage, instance: dg.DagsterInstance, spark_resource: dict[str, Any]
) -> DagsterWorld:
    """The cluster of a code location without a name of its own."""
    return dagster_world(stage, instance, spark_resource)


@pytest.fixture
def leader(world: DagsterWorld) -> Iterator[NimbusThread]:
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
    with Stage(tmp_path, conf, home=tmp_path / "prod") as stage:
        yield dagster_world(stage, instance, spark_resource, "prod")
