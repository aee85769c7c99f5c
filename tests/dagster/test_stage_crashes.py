"""A submission's run is killed with ``kill -9`` in every stage; a run of that stage and the rest
completes it.

The run is a real process with a Dagster instance on disk. It is forked from one that has imported
Dagster, so that six of them cost little. Another nimbus leads before the stage runs again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from storm_dagster.core.invariants.rules import RULES, violations
from storm_dagster.defs.keys import STAGES
from storm_dagster.host.endpoints import cluster_conf
from storm_dagster.model.dagster_names import TOKEN_TAG
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.read.inspection import take_snapshot
from storm_rigs.stage.dagster_world import DagsterWorld

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper]

RUNS = r"""
import functools, json, os, signal, sys, traceback
import dagster as dg
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.defs.resources import operating
from storm_dagster.defs import build_storm_defs
from storm_dagster.defs.resources.spark import SparkResource

class PlainPlanner(SparkResource):
    def planner(self, cluster):
        return plan_placement

def run(order):
    def observer(point):
        if point == order["point"]:
            os.kill(os.getpid(), signal.SIGKILL)
    # The observer enters by the context that this program's steps are given.
    operating.OperationsContext = functools.partial(operating.OperationsContext, checkpoint=observer)
    defs = build_storm_defs(home=order["home"], blob_dir=order["blobs"], tick_secs=0.0,
                            resources={"spark": PlainPlanner()})
    with dg.DagsterInstance.local_temp(order["instance"]) as instance:
        instance.add_dynamic_partitions("storm_topologies", [order["name"]])
        defs.resolve_job_def("submit_topology").execute_in_process(
            instance=instance, partition_key=order["name"], tags=order["tags"],
            run_config={"ops": {"storm__topology_conf": {"config": {"handle": order["handle"]}}}})

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            run(json.loads(line))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitpid(pid, 0)[1], flush=True)
"""

LAST_STEP = dict(
    zip(
        STAGES,
        (
            "stage.newest",
            "store.stormcode.ser",
            "stage.tasks",
            "stage.placement",
            "publish",
            "activate",
        ),
        strict=True,
    )
)


@pytest.fixture(scope="module")
def runs() -> Iterator[subprocess.Popen[str]]:
    """Reads orders, one JSON document each; forks a process for each, and says how that ended."""
    with subprocess.Popen(
        [sys.executable, "-c", RUNS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        yield server
        assert server.stdin is not None
        server.stdin.close()


# The first and that of the placement are in every run.
_ALWAYS = {STAGES[0], STAGES[3]}


@pytest.mark.parametrize(
    "killed_in",
    [
        pytest.param(key, marks=() if key in _ALWAYS else pytest.mark.chaos, id=key.path[-1])
        for key in STAGES
    ],
)
def test_killed_in_a_stage_and_run_again_from_there(
    world: DagsterWorld, runs: subprocess.Popen[str], tmp_path: Path, killed_in: dg.AssetKey
) -> None:
    (tmp_path / "dagster").mkdir()
    order = {
        "home": str(world.home),
        "blobs": str(world.blobs.directory),
        "instance": str(tmp_path / "dagster"),
        "name": "wc",
        "handle": world.upload("h"),
        "tags": {TOKEN_TAG: "t"},
        "point": f"after.{LAST_STEP[killed_in]}",
    }
    assert runs.stdin is not None and runs.stdout is not None
    runs.stdin.write(json.dumps(order) + "\n")
    runs.stdin.flush()
    status = int(runs.stdout.readline())
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    check(world)
    before = {token: record.topology_id for token, record in (facts(world).tokens or {}).items()}
    world.lead()
    rest = dg.AssetSelection.assets(*STAGES[STAGES.index(killed_in) :]).without_checks()
    job = dg.define_asset_job("rest", selection=rest)
    with dg.DagsterInstance.local_temp(order["instance"]) as instance:
        assert instance.get_runs(), "the killed run is in Dagster's history"
        result = (
            dg.Definitions.merge(world.defs, dg.Definitions(jobs=[job]))
            .resolve_job_def("rest")
            .execute_in_process(
                instance=instance, partition_key="wc", tags={TOKEN_TAG: "t"}, raise_on_error=False
            )
        )
    assert result.success
    (topology,) = world.cluster.load_view().topologies.values()
    assert (topology.base.status, topology.base.token, topology.id) == ("ACTIVE", "t", before["t"])
    check(world)


def facts(world: DagsterWorld) -> Any:
    ctx = OperationsContext(
        cluster=world.cluster,
        blobs=world.blobs,
        conf=cluster_conf(world.home),
        planner=lambda batch: batch,  # type: ignore[arg-type,return-value]
    )
    return take_snapshot(ctx)


def check(world: DagsterWorld) -> None:
    heals = {rule.name for rule in RULES if rule.heals}
    assert [each.sentence for each in violations(facts(world)) if each.rule not in heals] == []
