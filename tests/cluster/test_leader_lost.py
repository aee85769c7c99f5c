"""The leading nimbus is killed during each asset of a submission: the command ends with its
topology, which exists once.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from storm_dagster.client import submit_target
from storm_dagster.model.dagster_names import STAGES, SUBMIT_JOB, TOKEN_TAG
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually, patience

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.dagster, pytest.mark.timeout(900)]

STEADY = f"{Path(__file__).parent / 'topologies' / 'steady.py'}:Steady"
RUNS = """
query Runs($filter: RunsFilter!) {
  runsOrError(filter: $filter) { ... on Runs { results { status } } }
}
"""


def kill_leader(cluster: LocalCluster) -> str:
    """Kill the leading nimbus, which `dev` starts again; its id."""
    with cluster.nimbus() as nimbus:
        leader = str(nimbus.get("/healthz")["id"])
    cluster.kill("nimbus", leader)
    return leader


def run_statuses(cluster: LocalCluster, token: str) -> list[str]:
    """Statuses of the runs of a token."""
    dagster = cluster.endpoints.dagster
    assert dagster is not None
    variables = {
        "filter": {"pipelineName": SUBMIT_JOB, "tags": [{"key": TOKEN_TAG, "value": token}]}
    }
    response = httpx.post(
        f"{dagster.url.rstrip('/')}/graphql",
        json={"query": RUNS, "variables": variables},
        timeout=30,
        trust_env=False,
    )
    return [run["status"] for run in response.json()["data"]["runsOrError"]["results"]]


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(stage, marks=pytest.mark.chaos if stage != "assignment" else [])
        for stage in STAGES
    ],
)
def test_a_submission_continues_when_its_leader_is_killed(
    shared_cluster: LocalCluster, stage: str
) -> None:
    cluster, name, token = shared_cluster, f"lost-{stage.replace('_', '-')}", f"token-{stage}"
    killed: list[str] = []

    def on_step(step: str, state: str) -> None:
        if step == stage and not killed:
            killed.append(kill_leader(cluster))

    with cluster.nimbus(patience(60)) as nimbus:
        change = submit_target(
            nimbus,
            STEADY,
            name=name,
            token=token,
            conf={"topology.workers": 1},
            home=cluster.home,
            timeout=patience(240),
            progress=on_step,
        )
    assert killed
    assert change.status == "ACTIVE"
    topologies = [row["id"] for row in cluster.topologies() if row["name"] == name]
    assert topologies == [change.id]
    statuses = run_statuses(cluster, token)
    assert statuses.count("SUCCESS") == 1
    # A run is lost with the leader only if nimbus is away for longer than its requests wait.
    assert len(statuses) <= 3
    cluster.cli("kill", name, "-w", "0")
    eventually(
        lambda: len(cluster.processes("nimbus")) == len(cluster.endpoints.nimbuses),
        120,
        "the nimbus that was killed",
    )
