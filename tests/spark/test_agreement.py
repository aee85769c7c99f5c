"""The PySpark assignment and its local planner give the same result, reasons included, on real
Spark.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model.placement import PlacementBatch
from storm_dagster.spark.assignment.pipeline import (
    TASKS_OF_GROUP,
    plan_many_with_spark,
    plan_with_spark,
)
from storm_dagster.spark.link import forget_session
from storm_dagster.spark.session import open_connect
from storm_rigs.placement.batch_recorder import RECORDED_BATCHES
from storm_rigs.placement.placement_clusters import generated_batch, small_topology, supervisor
from storm_rigs.placement.placement_invariants import placement_faults

pytestmark = pytest.mark.spark

TESTS = Path(__file__).parents[1]
CASES = ("test_jstorm_cases", "test_events", "test_requested_workers")
"""Modules whose batches are cases of JStorm and Storm, and of their issues, written by hand."""
CLUSTERS = 50 if os.environ.get("HYPOTHESIS_PROFILE") == "fuzz" else 5


@pytest.fixture(scope="module")
def session(spark_remote: str) -> Iterator[SparkSession]:
    opened = open_connect(spark_remote)
    yield opened
    forget_session(opened, release=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "tasks_of_group",
    [pytest.param(TASKS_OF_GROUP, marks=pytest.mark.long), 20],
    ids=["one stage", "several partitions"],
)
# An example takes seconds: it is many clusters at once.
@settings(max_examples=settings().max_examples // 50)
@given(seeds=st.lists(st.integers(0, 2**32), min_size=CLUSTERS, max_size=CLUSTERS, unique=True))
def test_both_planners_agree_on_generated_clusters(
    session: SparkSession, tasks_of_group: int, seeds: list[int]
) -> None:
    batches = [generated_batch(random.Random(seed)) for seed in seeds]
    results = plan_many_with_spark(session, batches, tasks_of_group)
    for seed, batch, result in zip(seeds, batches, results, strict=True):
        local = plan_placement(batch)
        assert result.placements == local.placements, f"seed {seed}"
        assert placement_faults(batch, result) == [], f"seed {seed}"
        assert (result.planner, local.planner) == ("pyspark", "python")


def recorded_batches(path: Path) -> list[PlacementBatch]:
    """The batches that the tests of ``CASES`` place, in order, without repetitions."""
    modules = [str(TESTS / "scheduling" / f"{name}.py") for name in CASES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    python_path = os.pathsep.join(
        [str(TESTS.parent), str(TESTS / "rigs"), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [*command, "-p", "storm_rigs.placement.batch_recorder", *modules],
        cwd=TESTS.parent,
        env={**os.environ, RECORDED_BATCHES: str(path), "PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    lines = path.read_text(encoding="utf-8").splitlines()
    return [PlacementBatch.model_validate_json(line) for line in dict.fromkeys(lines)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "tasks_of_group", [TASKS_OF_GROUP, 20], ids=["one stage", "several partitions"]
)
def test_both_planners_agree_on_the_cases_of_jstorm_and_storm(
    session: SparkSession, tasks_of_group: int, tmp_path: Path
) -> None:
    batches = recorded_batches(tmp_path / "batches.jsonl")
    results = plan_many_with_spark(session, batches, tasks_of_group)
    statuses: set[str] = set()
    for batch, result in zip(batches, results, strict=True):
        assert result.placements == plan_placement(batch).placements
        statuses.update(placement.status for placement in result.placements)
    assert statuses == {"assigned", "unchanged", "failed"}


@pytest.mark.long
def test_many_topologies_in_several_partitions(session: SparkSession) -> None:
    shape: dict[str, Any] = {
        "bolts": {"split": (8, ["lines"]), "count": (8, ["split"])},
        "spouts": {"lines": 3},
        "workers": 4,
    }
    topologies = tuple(small_topology(f"t{number:04d}", **shape) for number in range(600))
    supervisors = tuple(supervisor(number, range(6900, 6920)) for number in range(125))
    batch = PlacementBatch(supervisors=supervisors, topologies=topologies)
    result = plan_with_spark(session, batch)
    assert placement_faults(batch, result) == []
    assert result.placements == plan_placement(batch).placements
    assert result.assign_secs > 0


def test_one_topology_with_many_workers(session: SparkSession) -> None:
    topology = small_topology(
        bolts={"split": (700, ["lines"]), "count": (500, ["split"])},
        spouts={"lines": 300},
        workers=90,
        differ_node=("lines",),
    )
    supervisors = tuple(supervisor(number, range(6900, 6904)) for number in range(400))
    batch = PlacementBatch(supervisors=supervisors, topologies=(topology,))
    result = plan_with_spark(session, batch)
    assert result.placements == plan_placement(batch).placements
    assert result.placements[0].status == "failed"
    wide = topology.model_copy(update={"differ_node": (), "workers": 350})
    batch = PlacementBatch(supervisors=supervisors, topologies=(wide,))
    assert plan_with_spark(session, batch).placements == plan_placement(batch).placements


def test_an_empty_batch_has_an_empty_plan(session: SparkSession) -> None:
    batch = PlacementBatch(supervisors=(supervisor(1, [6900]),), topologies=())
    assert plan_with_spark(session, batch).placements == ()


def test_no_supervisor_at_all(session: SparkSession) -> None:
    topology = small_topology(bolts={}, spouts={"lines": 2})
    batch = PlacementBatch(supervisors=(), topologies=(topology,))
    result = plan_with_spark(session, batch)
    assert result.placements == plan_placement(batch).placements
    assert (
        result.placements[0].error
        == "topology 'wc' cannot be placed, no supervisor is alive: start one"
    )


@pytest.mark.parametrize("strategy", ["balanced", "even"])
def test_both_planners_rebalance_alike_when_a_host_has_joined(
    session: SparkSession, strategy: str
) -> None:
    """Onto the spread of a placement from nothing; then the plan moves no task."""
    topology = small_topology(
        bolts={},
        spouts={"spout": 23},
        ackers=0,
        workers=12,
        single_master=False,
        strategy=strategy,
    )
    former = tuple(supervisor(number, range(6900, 6904)) for number in range(3))
    joined = (*former, supervisor(3, range(6900, 6908)))
    first = PlacementBatch(supervisors=former, topologies=(topology,))
    workers = plan_placement(first).placements[0].workers
    for status in ("assigned", "unchanged"):
        rebalanced = topology.model_copy(update={"event": "rebalance", "old": workers})
        batch = PlacementBatch(supervisors=joined, topologies=(rebalanced,))
        (placement,) = plan_with_spark(session, batch).placements
        assert (placement,) == plan_placement(batch).placements
        assert placement.status == status
        workers = placement.workers
