"""Launches of Dagster runs whose response gets lost: Dagster may have launched the run all the
same.
"""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from storm_dagster.model import paths
from storm_dagster.model.dagster_names import TOKEN_TAG
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.operation_record import OperationRecord
from storm_dagster.model.records import EpochRecord, StormBase, decode_record, encode_record
from storm_dagster.nimbus.dagster.transport import DagsterAccess, DagsterTransport, NoResponse
from storm_dagster.testing.waiting import patience
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.dagster_webserver import DagsterServer
from storm_rigs.stage.nimbus_thread import NimbusThread

TOPOLOGY = {
    "spouts": {
        "lines": {"object": {"python": "wc:Lines"}, "outputs": {"default": {"fields": ["line"]}}}
    },
    "bolts": {},
}

RUNS_WITH_TAG = """
query Runs($filter: RunsFilter!) {
  runsOrError(filter: $filter) { ... on Runs { results { runId } } }
}
"""


class LossyDagster:
    """A real Dagster webserver behind a relay that loses requests or responses by GraphQL
    operation.
    """

    def __init__(self, graphql_url: str) -> None:
        self.lost_requests: set[str] = set()
        """Operations, as ``LaunchRun``, whose requests never reach Dagster."""
        self.lost_responses: set[str] = set()
        """Operations whose requests reach Dagster and whose responses do not come back."""
        self.on_lost: Callable[[], object] = lambda: None
        """Called for each request that is lost."""
        base = graphql_url.removesuffix("/graphql")
        relay = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._respond(httpx.get(base + self.path, timeout=60, trust_env=False))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if relay._is_among(relay.lost_requests, body):
                    relay.on_lost()
                    return
                headers = {"Content-Type": "application/json"}
                response = httpx.post(
                    base + self.path, content=body, headers=headers, timeout=120, trust_env=False
                )
                if not relay._is_among(relay.lost_responses, body):
                    self._respond(response)

            def _respond(self, response: httpx.Response) -> None:
                self.send_response(response.status_code)
                self.send_header("Content-Type", response.headers["Content-Type"])
                self.end_headers()
                self.wfile.write(response.content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/graphql"

    @staticmethod
    def _is_among(operations: set[str], body: bytes) -> bool:
        query = json.loads(body).get("query", "")
        return any(f"Storm{operation}" in query for operation in operations)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@pytest.fixture
def lossy(dagster_server: DagsterServer) -> Iterator[LossyDagster]:
    relay = LossyDagster(dagster_server.url)
    yield relay
    relay.close()


@pytest.fixture
def nimbus(stage: Stage, lossy: LossyDagster) -> NimbusThread:
    patient = {"dagster.graphql.url": lossy.url, "dagster.graphql.timeout.secs": 20}
    return stage.nimbus(conf=patient).await_leading()


def upload(nimbus: NimbusThread) -> str:
    parts = {"archive": b"archive", "conf": b"{}", "topology": json.dumps(TOPOLOGY).encode()}
    with httpx.Client(base_url=nimbus.url, timeout=30, trust_env=False) as http:
        handle = http.post("/v1/uploads").json()["handle"]
        for part, content in parts.items():
            http.put(f"/v1/uploads/{handle}/{part}", content=content).raise_for_status()
        http.post(f"/v1/uploads/{handle}/finish").raise_for_status()
    return handle


def submit(nimbus: NimbusThread, name: str, token: str, handle: str) -> httpx.Response:
    document = {"name": name, "handle": handle, "token": token}
    return httpx.post(
        f"{nimbus.url}/v1/submit", json=document, timeout=patience(180), trust_env=False
    )


def runs_of(server: DagsterServer, token: str) -> list[str]:
    variables = {"filter": {"tags": [{"key": TOKEN_TAG, "value": token}]}}
    document = {"query": RUNS_WITH_TAG, "variables": variables}
    response = httpx.post(server.url, json=document, timeout=60, trust_env=False)
    return [run["runId"] for run in response.json()["data"]["runsOrError"]["results"]]


@pytest.fixture
def name() -> str:
    """A name and token of its own, since all tests share one Dagster."""
    return f"lost-{uuid.uuid4().hex[:8]}"


@pytest.mark.zookeeper
@pytest.mark.dagster
def test_a_run_is_returned_although_the_response_to_its_launch_is_lost(
    nimbus: NimbusThread, lossy: LossyDagster, dagster_server: DagsterServer, name: str
) -> None:
    lossy.lost_responses = {"LaunchRun"}
    response = submit(nimbus, name, name, upload(nimbus))
    assert response.status_code == 202, response.text
    assert runs_of(dagster_server, name) == [response.json()["run_id"]]


@pytest.mark.zookeeper
@pytest.mark.dagster
def test_a_repeated_submission_finds_the_run_that_no_response_told_of(
    nimbus: NimbusThread, lossy: LossyDagster, dagster_server: DagsterServer, name: str
) -> None:
    handle = upload(nimbus)
    lossy.lost_responses = {"LaunchRun", "FindRuns"}
    refused = submit(nimbus, name, name, handle)
    assert refused.status_code == 503
    assert f"--token {name}" in refused.json()["error"]["message"]
    lossy.lost_responses = set()
    repeated = submit(nimbus, name, name, handle)
    assert repeated.status_code == 202, repeated.text
    assert runs_of(dagster_server, name) == [repeated.json()["run_id"]]


@pytest.mark.zookeeper
@pytest.mark.dagster
def test_a_launch_that_never_reached_dagster_is_made_by_the_repetition(
    nimbus: NimbusThread, lossy: LossyDagster, dagster_server: DagsterServer, name: str
) -> None:
    handle = upload(nimbus)
    lossy.lost_requests = {"LaunchRun"}
    refused = submit(nimbus, name, name, handle)
    assert refused.status_code == 503
    assert f"--token {name}" in refused.json()["error"]["message"]
    assert runs_of(dagster_server, name) == []
    lossy.lost_requests = set()
    repeated = submit(nimbus, name, name, handle)
    assert repeated.status_code == 202, repeated.text
    assert runs_of(dagster_server, name) == [repeated.json()["run_id"]]


@pytest.mark.zookeeper
@pytest.mark.dagster
def test_a_later_leader_finds_the_run_that_the_former_one_launched(
    stage: Stage,
    nimbus: NimbusThread,
    lossy: LossyDagster,
    dagster_server: DagsterServer,
    name: str,
) -> None:
    handle = upload(nimbus)
    lossy.lost_responses = {"LaunchRun", "FindRuns"}
    refused = submit(nimbus, name, name, handle)
    assert refused.status_code == 503
    (launched,) = runs_of(dagster_server, name)
    nimbus.stop()
    lossy.lost_responses = set()
    patient = {"dagster.graphql.url": lossy.url, "dagster.graphql.timeout.secs": 20}
    later = stage.nimbus("n2", patient).await_leading()
    repeated = submit(later, name, name, handle)
    assert repeated.status_code == 202, repeated.text
    assert repeated.json()["run_id"] == launched
    assert runs_of(dagster_server, name) == [launched]


@pytest.mark.zookeeper
@pytest.mark.dagster
def test_a_change_whose_record_a_deposed_leader_cannot_abandon_may_take_place(
    nimbus: NimbusThread, lossy: LossyDagster, zk_conf: dict[str, object], name: str
) -> None:
    """Its caller must not read that nothing was done: the next leader launches the run."""
    state = StormClusterState.open(zk_conf)
    base = StormBase(
        name=name, launch_time_secs=1, status="ACTIVE", workers=1, executors={}, token="other"
    )
    state.state.create_node(paths.topology(f"{name}-1-100"), encode_record(base))

    def depose() -> None:
        record = EpochRecord(leader="127.0.0.1:1", http="http://127.0.0.1:1")
        state.state.set_data(paths.EPOCH, encode_record(record))

    lossy.lost_requests, lossy.on_lost = {"LaunchRun"}, depose
    try:
        response = nimbus.post(f"/v1/topologies/{name}/restart")
        assert response.status_code == 503, response.text
        assert response.json()["error"]["type"] == "Unavailable"
        assert "may still take place" in response.text and "storm-dagster list" in response.text
        assert "X-Storm-Not-Leading" not in response.headers
        (request,) = state.state.find_children(paths.OPERATIONS) or []
        raw = state.state.get_data(paths.operation(request))
        assert raw is not None
        record = decode_record(OperationRecord, raw, paths.operation(request))
        assert record.verb == "restart" and not record.is_abandoned
    finally:
        state.disconnect()


def test_a_request_dagster_may_have_read_differs_from_an_unsent_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/graphql"
        transport = DagsterTransport(lambda: DagsterAccess(url), timeout=0.3)
        with pytest.raises(NoResponse, match="did not answer within"):
            transport.graphql("Locations", {})
    with pytest.raises(Unavailable, match="does not answer") as refused:
        transport.graphql("Locations", {})
    assert not isinstance(refused.value, NoResponse)
    transport.close()
