"""A submission during one of whose assets the leading nimbus is killed."""

from __future__ import annotations

from storm_dagster.client import submit_target
from storm_dagster.client.changes import Change
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually, patience


def submit_while_leader_dies(
    cluster: LocalCluster, target: str, *, name: str, token: str, stage: str
) -> Change:
    """Submit with one worker, and kill the leader once, as soon as the run is at that asset.

    The submission ends with its only topology, and `dev` starts the nimbus again.
    """
    killed: list[str] = []

    def on_step(step: str, state: str) -> None:
        if step == stage and not killed:
            killed.append(_kill_leader(cluster))

    with cluster.nimbus(patience(60)) as nimbus:
        change = submit_target(
            nimbus,
            target,
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
    eventually(
        lambda: len(cluster.processes("nimbus")) == len(cluster.endpoints.nimbuses),
        120,
        "the nimbus that was killed",
    )
    return change


def _kill_leader(cluster: LocalCluster) -> str:
    """Kill the leading nimbus; its id."""
    with cluster.nimbus() as nimbus:
        leader = str(nimbus.get("/healthz")["id"])
    cluster.kill("nimbus", leader)
    return leader
