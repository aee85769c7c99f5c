"""The leading nimbus is killed during each asset of a submission: the command ends with its
topology, which exists once.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from storm_dagster.model.dagster_names import STAGES, SUBMIT_JOB, TOKEN_TAG
from storm_dagster.testing.cluster import LocalCluster
from storm_rigs.chaos.lost_leader import submit_while_leader_dies

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.dagster, pytest.mark.timeout(900)]

STEADY = f"{Path(__file__).parent / 'topologies' / 'steady.py'}:Steady"
RUNS = """
query Runs($filter: RunsFilter!) {
  runsOrError(filter: $filter) { ... on Runs { results { status } } }
}
"""


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


@pytest.mark.chaos  # a case with one nimbus is in every run: tests/cli/test_lifecycle.py
@pytest.mark.parametrize("stage", STAGES)
def test_a_submission_continues_when_its_leader_is_killed(
    shared_cluster: LocalCluster, stage: str
) -> None:
    name = f"lost-{stage.replace('_', '-')}"
    token = f"token-{stage}"
    submit_while_leader_dies(shared_cluster, STEADY, name=name, token=token, stage=stage)
    statuses = run_statuses(shared_cluster, token)
    assert statuses.count("SUCCESS") == 1
    # A run is lost with the leader only if nimbus is away for longer than its requests wait.
    assert len(statuses) <= 3
    shared_cluster.cli("kill", name, "-w", "0")
