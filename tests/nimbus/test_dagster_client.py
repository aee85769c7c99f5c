"""Launching and reading runs over GraphQL, against a real webserver."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.dagster_names import TOKEN_TAG, DagsterNames, storage_problem
from storm_dagster.model.errors import InvalidRequest, KeyNotFound, Misconfigured, Unavailable
from storm_dagster.nimbus.dagster.client import (
    REPOSITORY,
    DagsterClient,
    location_problem,
)
from storm_dagster.nimbus.dagster.run_documents import run_document
from storm_dagster.nimbus.dagster.transport import DagsterAccess, DagsterTransport
from storm_dagster.testing.waiting import eventually
from storm_rigs.stage.dagster_webserver import DagsterServer

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.dagster

STEPS = [
    "topology_conf",
    "topology_code",
    "task_info",
    "assignment",
    "published_assignment",
    "active_topology",
]


DELETE_KEY = """
mutation Delete($selector: RepositorySelector!, $key: String!) {
  deleteDynamicPartitions(
    repositorySelector: $selector, partitionsDefName: "storm_topologies", partitionKeys: [$key]
  ) { __typename }
}
"""
ADD_KEY = """
mutation Add($selector: RepositorySelector!, $key: String!) {
  addDynamicPartition(
    repositorySelector: $selector, partitionsDefName: "storm_topologies", partitionKey: $key
  ) { __typename }
}
"""


def at(url: str | None, timeout: float = 20.0) -> DagsterClient:
    access = DagsterAccess(url) if url else None
    return DagsterClient(DagsterTransport(lambda: access, timeout=timeout))


@pytest.fixture
def client(dagster_server: DagsterServer) -> Iterator[DagsterClient]:
    client = at(dagster_server.url)
    yield client
    client.close()


def submit(client: DagsterClient, name: str, token: str, handle: str = "h") -> str:
    client.add_partition(name)
    config = {"ops": {"storm__topology_conf": {"config": {"handle": handle, "token": token}}}}
    return client.launch("submit_topology", config, {"dagster/partition": name, TOKEN_TAG: token})


def finished(client: DagsterClient, run_id: str) -> dict[str, Any]:
    def done() -> dict[str, Any] | None:
        document = client.run(run_id)
        return document if document["finished"] else None

    return eventually(done, timeout=90, what=f"run {run_id}") or {}


def test_submission_runs_six_steps(client: DagsterClient) -> None:
    run_id = submit(client, "wc", "token-1")
    document = finished(client, run_id)
    assert document["status"] == "SUCCESS" and document["error"] is None
    assert [step["name"] for step in document["steps"]] == STEPS
    assert {step["status"] for step in document["steps"]} == {"SUCCESS"}
    assert document["url"].endswith(f"/runs/{run_id}") and document["job"] == "submit_topology"
    found = client.find_run(TOKEN_TAG, "token-1", job="submit_topology")
    assert found is not None and found.run_id == run_id and not found.failed
    assert client.find_run(TOKEN_TAG, "unknown") is None
    client.add_partition("wc")  # known already
    client.report(["storm", "active_topology"], "wc", "killed by the leader while Dagster was away")


def change_key(server: DagsterServer, mutation: str, key: str) -> str:
    """Change the partition keys of the topologies; the type of Dagster's response."""
    selector = {"repositoryLocationName": "storm", "repositoryName": REPOSITORY}
    document = {"query": mutation, "variables": {"selector": selector, "key": key}}
    response = httpx.post(server.url, json=document, timeout=60, trust_env=False)
    ((_, result),) = response.json()["data"].items()
    return result["__typename"]


def test_a_key_dropped_before_its_run_exists_is_there_after_the_launch(
    client: DagsterClient, dagster_server: DagsterServer
) -> None:
    def drop_key() -> None:
        deleted = change_key(dagster_server, DELETE_KEY, "late")
        assert deleted == "DeleteDynamicPartitionsSuccess"

    run_id = client.launch_once(
        "submit_topology",
        {"ops": {"storm__topology_conf": {"config": {"handle": "h", "token": "t-late"}}}},
        {TOKEN_TAG: "t-late"},
        identity=TOKEN_TAG,
        partition="late",
        before_launch=drop_key,
    )
    assert change_key(dagster_server, ADD_KEY, "late") == "DuplicateDynamicPartitionError"
    client.terminate(run_id)


@pytest.mark.long
def test_a_named_cluster_launches_its_own_jobs_under_plain_words(
    dagster_server: DagsterServer,
) -> None:
    client = DagsterClient(
        DagsterTransport(lambda: DagsterAccess(dagster_server.url), timeout=90.0),
        names=DagsterNames("prod"),
    )
    try:
        client.add_partition("wc")
        config = {"ops": {client.names.stage_op("topology_conf"): {"config": {"handle": "h"}}}}
        run_id = client.launch(
            "submit_topology", config, {"dagster/partition": "wc", TOKEN_TAG: "prod-1"}
        )
        document = finished(client, run_id)
        assert document["job"] == "prod_submit_topology"
        assert [step["name"] for step in document["steps"]] == STEPS
        # It is the real job: it looked for its cluster.
        assert (
            document["error"]["type"] == "Unavailable"
            and "127.0.0.1:9" in document["error"]["message"]
        )
        found = client.find_run(TOKEN_TAG, "prod-1", job="submit_topology")
        assert found is not None and found.run_id == run_id and found.failed
        assert client.find_run("dagster/priority", "100", job="submit_topology") == found
        client.report(
            ["storm", "active_topology"], "wc", "killed by the leader while Dagster was away"
        )
        client.report_observation(
            ["storm", "active_topology"], "wc", "kill: wc-1-1 is gone", {"verb": "kill"}
        )
        kill = {"ops": {client.names.name("kill_topology_op"): {"config": {"name": "wc"}}}}
        assert (
            finished(client, client.launch("kill_topology", kill, {}))["job"]
            == "prod_kill_topology"
        )
    finally:
        client.close()


@pytest.mark.long
def test_typed_failure_of_a_step(client: DagsterClient) -> None:
    document = finished(client, submit(client, "typed", "t-typed", "typed-failure"))
    assert document["status"] == "FAILURE"
    assert document["error"] == {
        "type": "Unavailable",
        "message": "topology needs 4 slots, 3 are free",
    }
    assert document["steps"][0]["status"] == "FAILURE"


def test_plain_failure_of_a_step(client: DagsterClient) -> None:
    document = finished(client, submit(client, "plain", "t-plain", "plain-failure"))
    assert document["error"]["type"] == "StormDagsterError"
    assert (
        "topology_conf" in document["error"]["message"]
        and "something broke" in document["error"]["message"]
    )
    found = client.find_run(TOKEN_TAG, "t-plain")
    assert found is not None and found.failed


def test_op_job_with_config(client: DagsterClient) -> None:
    config = {"ops": {"kill_topology_op": {"config": {"name": "wc", "wait_secs": 1}}}}
    run_id = client.launch("kill_topology", config, {"storm/topology": "wc"})
    assert finished(client, run_id)["status"] == "SUCCESS"


def test_what_dagster_refuses_is_typed(client: DagsterClient) -> None:
    with pytest.raises(InvalidRequest, match="kill_topology"):
        client.launch(
            "kill_topology", {"ops": {"kill_topology_op": {"config": {"nonsense": 1}}}}, {}
        )
    with pytest.raises(Unavailable, match="no_such_job"):
        client.launch("no_such_job", {}, {})
    for unknown in ("00000000-0000-0000-0000-000000000000", "../x", "a b"):
        with pytest.raises(KeyNotFound):
            client.run(unknown)


def test_a_wrong_location_names_the_key_and_the_locations(dagster_server: DagsterServer) -> None:
    access = DagsterAccess(dagster_server.url)
    transport = DagsterTransport(lambda: access, timeout=20)
    client = DagsterClient(transport, location="strom")
    words = r"dagster\.location is 'strom'.*it has: 'storm'.*set dagster\.location"
    with pytest.raises(Misconfigured, match=words):
        client.add_partition("x")
    with pytest.raises(Misconfigured, match=words):
        client.launch("kill_topology", {}, {})
    transport.close()


def test_a_location_without_our_definitions_names_what_it_has() -> None:
    loaded = {"__typename": "RepositoryLocation", "repositories": [{"name": "mine"}]}
    entry = {"name": "storm", "locationOrLoadError": loaded}
    selector = {"repositoryLocationName": "storm", "repositoryName": REPOSITORY}
    problem = location_problem("launching", [entry], **selector)
    assert isinstance(problem, Misconfigured)
    assert "has no repository '__repository__' (it has: mine)" in problem.message
    assert "dagster.location" in problem.message
    loaded["repositories"] = [{"name": "mine"}, {"name": REPOSITORY}]  # type: ignore[assignment]
    assert location_problem("launching", [entry], **selector) is None


def test_a_location_that_does_not_load_now_is_asked_again() -> None:
    loads = {"name": "storm", "locationOrLoadError": None}
    broken = {
        "name": "storm",
        "locationOrLoadError": {"__typename": "PythonError", "message": "no module x"},
    }
    selector = {"repositoryLocationName": "storm", "repositoryName": "__repository__"}
    assert location_problem("launching", [loads], **selector) is None
    trouble = location_problem("launching", [broken], **selector)
    assert isinstance(trouble, Unavailable) and "no module x" in trouble.message


def test_no_dagster_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"dagster\.graphql\.url"):
        at(None).add_partition("x")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(Unavailable, match="does not answer"):
        at(f"http://127.0.0.1:{port}/graphql").add_partition("x")


def test_a_silent_dagster_is_unavailable() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        kept: list[socket.socket] = []
        accepting = threading.Thread(target=lambda: kept.append(listener.accept()[0]))
        accepting.start()
        client = at(f"http://127.0.0.1:{listener.getsockname()[1]}/graphql", timeout=0.3)
        with pytest.raises(Unavailable, match="did not answer within"):
            client.add_partition("x")
        accepting.join()
        kept[0].close()
        client.close()


def test_steps_not_begun_are_pending() -> None:
    run = {
        "runId": "r",
        "status": "STARTED",
        "executionPlan": {
            "steps": [{"key": "storm__topology_conf"}, {"key": "storm__topology_code"}]
        },
        "stepStats": [
            {
                "stepKey": "storm__topology_conf",
                "status": "SUCCESS",
                "startTime": 1.0,
                "endTime": 1.5,
            }
        ],
    }
    document = run_document(run, [], None)
    assert document["steps"] == [
        {"name": "topology_conf", "status": "SUCCESS", "seconds": 0.5},
        {"name": "topology_code", "status": "PENDING", "seconds": None},
    ]
    assert document["finished"] is False and document["error"] is None


def test_cancelled_run_says_so() -> None:
    document = run_document({"runId": "r", "status": "CANCELED"}, [], None)
    assert document["finished"] and document["error"]["message"].startswith(
        "the run was canceled: repeat the request"
    )


def test_a_run_whose_process_was_killed_is_asked_for_again() -> None:
    killed = {"message": "The run's process (pid 7) was killed by SIGKILL.", "stepKey": None}
    error = run_document({"runId": "r", "status": "FAILURE"}, [killed], None)["error"]
    assert error["type"] == "Unavailable"
    assert error["message"].startswith(
        "The run's process (pid 7) was killed by SIGKILL: repeat the request"
    )
    broken = {"error": {"message": "no module named nothing"}, "message": "Run failed"}
    error = run_document({"runId": "r", "status": "FAILURE"}, [broken, killed], None)["error"]
    assert error == {"type": "StormDagsterError", "message": "no module named nothing"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            [
                {
                    "message": "(psycopg2.OperationalError) server closed the connection unexpectedly\n\n"
                    "[SQL: SELECT daemon_heartbeats.body \nFROM daemon_heartbeats]\n"
                    "(Background on this error at: https://sqlalche.me/e/21/e3q8)"
                }
            ],
            "(psycopg2.OperationalError) server closed the connection unexpectedly",
        ),
        (
            "sqlalchemy.exc.OperationalError: (sqlite3.OperationalError) unable to open database file",
            "sqlalchemy.exc.OperationalError: (sqlite3.OperationalError) unable to open database file",
        ),
        (
            [
                {
                    "message": "no such job",
                    "extensions": {"errorInfo": {"stack": ["sqlite3.connect"]}},
                }
            ],
            None,
        ),
        ({"data": {"runsOrError": {"__typename": "Runs"}}}, None),
    ],
    ids=["postgres", "sqlite", "another error", "no error"],
)
def test_a_lost_storage_is_known_by_the_words_of_its_database(
    answer: object, words: str | None
) -> None:
    assert storage_problem(answer) == words


EVENTS = """
query Events {
  assetOrError(assetKey: {path: ["lake", "clicks"]}) {
    ... on Asset {
      assetMaterializations(limit: 10) { partition description metadataEntries { label ... on IntMetadataEntry { intValue } } }
      assetObservations(limit: 10) { partition }
    }
  }
}
"""


def test_events_of_bolts_are_stored_or_refused_for_good_or_for_now(
    client: DagsterClient, dagster_server: DagsterServer
) -> None:
    made = DagsterEvent.make(
        "wc/count",
        "materialization",
        "lake/clicks",
        partition="2026-11-21-10:00",
        metadata={"rows": 9},
        description="whole",
    )
    seen = DagsterEvent.make("wc/count", "observation", "lake/clicks", partition="2026-11-21-11:00")
    check = DagsterEvent.make(
        "wc/count", "check", "lake/clicks", check="in_order", passed=False, severity="WARN"
    )
    for event in (made, seen, check):
        client.report_event(event, {"storm/topology": "wc-1-1", "storm/event": event.id})
    answer = httpx.post(
        dagster_server.url, json={"query": EVENTS}, timeout=60, trust_env=False
    ).json()
    asset = answer["data"]["assetOrError"]
    (found,) = asset["assetMaterializations"]
    assert (found["partition"], found["description"]) == ("2026-11-21-10:00", "whole")
    assert {"storm/topology", "storm/event", "rows"} == {
        entry["label"] for entry in found["metadataEntries"]
    }
    assert [
        entry["intValue"] for entry in found["metadataEntries"] if entry["label"] == "rows"
    ] == [9]
    assert asset["assetObservations"] == [{"partition": "2026-11-21-11:00"}]
    loud: Any = msgspec.structs.replace(check, severity="LOUD")
    with pytest.raises(InvalidRequest, match="report_asset_check/ with 400"):
        client.report_event(loud, {})
    away = DagsterClient(DagsterTransport(lambda: DagsterAccess("http://127.0.0.1:9/graphql")))
    with pytest.raises(Unavailable, match="does not answer"):
        away.report_event(seen, {})
    away.close()
    with pytest.raises(Unavailable, match="no Dagster is configured"):
        DagsterClient(DagsterTransport(lambda: None)).report_event(seen, {})


def test_a_step_without_its_partition_key_ends_because_of_a_kill() -> None:
    """As Dagster words it for a step whose key was dropped before it stored its result."""
    failure = {
        "stepKey": "storm__assignment",
        "error": {
            "message": "dagster._core.errors.DagsterInvalidInvocationError: Partition range ledger "
            "to ledger is\n                not a valid range. Nonexistent partition keys:\n"
            "                ['ledger']\n"
        },
    }
    error = run_document({"runId": "r", "status": "FAILURE"}, [failure], None)["error"]
    assert error["type"] == "NotAlive"
    assert error["message"].startswith("topology 'ledger' was killed while its run was under way")
