"""A topology that is being submitted, as clients of Storm and of nimbus see it and cancel it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from thriftpy2.thrift import TApplicationException

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.client.http import NimbusClient
from storm_dagster.client.verbs import kill_topology
from storm_dagster.model.errors import NotAlive
from storm_dagster.operations.submit import submission
from storm_dagster.operations.submit.staging import allocate_topology_id, read_client_token
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.stage.nimbus_thread import NimbusThread
from storm_rigs.stage.records import World

# Made when it is imported, from the definition file of Storm: no type checker knows what it has.
storm = importlib.import_module("streamparse.thrift")


@pytest.fixture
def world(nimbus: NimbusThread) -> Iterator[World]:
    """The cluster of the nimbus, as a run sees it."""
    blobs = LocalBlobStore(nimbus.home / "nimbus" / nimbus.id / "blobs")
    with StormClusterState.open(nimbus.conf) as cluster:
        world = World(cluster, blobs, dict(nimbus.conf.values))
        world.supervisor("s1")
        yield world
        world.lose_supervisor("s1")


def accept(world: World, name: str, token: str) -> str:
    """A submission whose run has placed its tasks; its topology id."""
    ctx = world.context()
    handle = world.upload(f"handle-{token}")
    record, _ = allocate_topology_id(
        ctx, token, name, ctx.current_epoch(), request={"handle": handle}, user="ada"
    )
    submission.stage_conf(ctx, name=name, token=token, handle=handle)
    submission.stage_code(ctx, token=token)
    submission.stage_tasks(ctx, token=token)
    submission.stage_assignment(ctx, token=token)
    return record.topology_id


def test_a_topology_that_is_being_submitted_is_listed_without_tasks(
    nimbus: NimbusThread, world: World
) -> None:
    topology_id = accept(world, "listed", "t-listed")
    client = nimbus.thrift_client()

    def row() -> Any:
        rows = [row for row in client.getClusterInfo().topologies if row.name == "listed"]
        return rows[0] if rows else None

    listed = eventually(row, 10, "the submission in the list")
    assert (listed.id, listed.status, listed.owner) == (topology_id, "STARTING", "ada")
    assert (listed.num_tasks, listed.num_executors, listed.num_workers) == (0, 0, 0)
    with closing(nimbus.thrift_client(ours=True)) as newer:
        for info in (
            client.getTopologyInfo(topology_id),
            client.getTopologyInfoWithOpts(topology_id, storm.GetInfoOptions()),
            newer.getTopologyInfoByName("listed"),
            newer.getTopologySummaryByName("listed"),
            newer.getTopologyPageInfo(topology_id, ":all-time", False),
        ):
            assert (info.id, info.name, info.status) == (topology_id, "listed", "STARTING")
        assert newer.getTopologyInfoByName("listed").executors == []
    rows = nimbus.get("/api/v1/topology/summary").json()["topologies"]
    assert [(row["id"], row["status"], row["tasksTotal"]) for row in rows] == [
        (topology_id, "STARTING", 0)
    ]
    for reference in (topology_id, "listed"):
        page = nimbus.get(f"/api/v1/topology/{reference}").json()
        assert (page["id"], page["status"], page["workers"]) == (topology_id, "STARTING", [])
    submission.publish_assignment(world.context(), token="t-listed")
    published = eventually(
        lambda: client.getTopologyInfo(topology_id).status == "INACTIVE", 10, "its publication"
    )
    assert published
    assert [row.name for row in client.getClusterInfo().topologies].count("listed") == 1
    client.killTopologyWithOpts("listed", storm.KillOptions(wait_secs=0))
    eventually(lambda: client.getClusterInfo().topologies == [], 60, "the end of it")


def by_thrift(nimbus: NimbusThread, name: str) -> None:
    nimbus.thrift_client().killTopology(name)


def by_thrift_with_options(nimbus: NimbusThread, name: str) -> None:
    nimbus.thrift_client().killTopologyWithOpts(name, storm.KillOptions(wait_secs=5))


def by_storm_rest(nimbus: NimbusThread, name: str) -> None:
    answer = nimbus.post(f"/api/v1/topology/{name}/kill/0")
    assert answer.status_code == 200 and answer.json()["topologyOperation"] == "kill"


def by_http(nimbus: NimbusThread, name: str) -> None:
    asked = nimbus.post(f"/v1/topologies/{name}/kill", {"dry_run": True}).json()
    assert (asked["status"], asked["would"]) == ("STARTING", "kill")
    answer = nimbus.post(f"/v1/topologies/{name}/kill")
    assert answer.status_code == 202
    document = answer.json()
    assert (document["name"], document["status"], document["run_id"]) == (name, "CANCELLED", None)
    text = f"{document['id']}, which was submitting (publishes the assignment) for "
    assert document["cancelled"].startswith(text)


def by_client(nimbus: NimbusThread, name: str) -> None:
    with NimbusClient([nimbus.url]) as client:
        change = kill_topology(client, name)
    assert (change.name, change.status) == (name, "CANCELLED")
    assert change.to_document()["cancelled"] == change.cancelled != ""


@pytest.mark.parametrize(
    "kill", [by_thrift, by_thrift_with_options, by_storm_rest, by_http, by_client]
)
def test_a_kill_by_every_entrance_cancels_a_submission(
    nimbus: NimbusThread, world: World, kill: Callable[[NimbusThread, str], None]
) -> None:
    name = kill.__name__
    token = f"t-{name}"
    topology_id = accept(world, name, token)
    kill(nimbus, name)
    stored = read_client_token(world.context(), token)
    assert stored is not None and stored[0].cancelled_by == "kill"
    client = nimbus.thrift_client()
    assert client.getClusterInfo().topologies == []
    with pytest.raises(storm.NotAliveException):
        client.getTopologyInfo(topology_id)
    with pytest.raises(storm.NotAliveException):
        client.killTopology(name)
    with pytest.raises(NotAlive, match="cancelled by kill"):
        submission.publish_assignment(world.context(), token=token)
    answer = nimbus.post("/v1/submit", {"name": name, "token": token, "handle": "0" * 32})
    assert answer.status_code == 404 and "cancelled by kill" in answer.text


def test_the_parts_of_a_cancelled_submission_are_deleted_without_a_dagster(
    nimbus: NimbusThread, world: World
) -> None:
    topology_id = accept(world, "parts", "t-parts")
    nimbus.thrift_client().killTopology("parts")

    def left() -> list[str]:
        return [
            key for key in world.blobs.keys("") if "t-parts" in key.split(".") or topology_id in key
        ]

    eventually(lambda: left() == [], 90, "the deletion of its parts")


def test_other_questions_about_a_starting_topology_are_not_alive(
    nimbus: NimbusThread, world: World
) -> None:
    topology_id = accept(world, "asked", "t-asked")
    client = nimbus.thrift_client()
    for call in (client.getTopologyConf, client.getTopology, client.getUserTopology):
        with pytest.raises((storm.NotAliveException, TApplicationException), match="not alive"):
            call(topology_id)
    client.killTopology("asked")
