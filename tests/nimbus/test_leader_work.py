"""What the leader does: verbs that it executes, submissions and changes through Dagster, and the
rest by itself when Dagster is away.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model import paths
from storm_dagster.model.dagster_names import REQUEST_TAG, TOKEN_TAG
from storm_dagster.model.operation_record import OperationRecord, TokenRecord
from storm_dagster.model.records import (
    HEALING,
    Assignment,
    AssignmentChange,
    StormBase,
    SupervisorInfo,
    TopologyStatus,
    WorkerNode,
    decode_record,
    encode_record,
)
from storm_dagster.model.unreported import UnreportedEvents
from storm_dagster.nimbus.leadership import duties
from storm_dagster.nimbus.leadership.duties import (
    LeaderDuties,
    LeaderHealing,
    LeaderReports,
    LeaderTransitions,
)
from storm_dagster.nimbus.requests import accepted_operations
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.submit import publishing, submission
from storm_dagster.testing.cluster import run_cli
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.dagster_webserver import DagsterServer
from storm_rigs.stage.nimbus_thread import NimbusThread

pytestmark = pytest.mark.zookeeper

TOPOLOGY = {
    "spouts": {
        "lines": {"object": {"python": "wc:Lines"}, "outputs": {"default": {"fields": ["line"]}}}
    },
    "bolts": {
        "count": {
            "object": {"python": "wc:Count"},
            "parallelism": 2,
            "inputs": [{"component": "lines", "grouping": {"type": "shuffle"}}],
        }
    },
}


@pytest.fixture
def cluster(zk_conf: dict[str, object], stage: Stage) -> Iterator[Callable[[], StormClusterState]]:
    opened: list[StormClusterState] = []

    def connect() -> StormClusterState:
        if not opened:
            opened.append(StormClusterState.open(zk_conf))
        return opened[0]

    yield connect
    for state in opened:
        state.disconnect()


def post(
    nimbus: NimbusThread, path: str, document: Mapping[str, object] | None = None
) -> httpx.Response:
    return httpx.post(
        nimbus.url + path, json=document or {}, timeout=patience(180), trust_env=False
    )


def upload(
    nimbus: NimbusThread,
    topology: Mapping[str, object] = TOPOLOGY,
    conf: Mapping[str, object] | None = None,
) -> str:
    with httpx.Client(base_url=nimbus.url, timeout=patience(30), trust_env=False) as http:
        handle = http.post("/v1/uploads").json()["handle"]
        for part, body in (
            ("archive", b"archive"),
            ("conf", json.dumps(conf or {}).encode()),
            ("topology", json.dumps(topology).encode()),
        ):
            assert http.put(f"/v1/uploads/{handle}/{part}", content=body).status_code == 201
        assert http.post(f"/v1/uploads/{handle}/finish").status_code == 200
    return handle


def add_base(
    state: StormClusterState,
    topology_id: str,
    token: str = "other",
    status: TopologyStatus = "ACTIVE",
) -> None:
    base = StormBase(
        name=topology_id.rsplit("-", 2)[0],
        launch_time_secs=1,
        status=status,
        workers=1,
        executors={},
        token=token,
    )
    state.state.create_node(paths.topology(topology_id), encode_record(base))


def add_supervisor(
    state: StormClusterState, supervisor_id: str, ports: tuple[int, ...] = (1, 2)
) -> None:
    info = SupervisorInfo(host=supervisor_id, ports=ports, started=0, count=1, version="t")
    state.state.set_ephemeral_node(paths.supervisor(supervisor_id), encode_record(info))


def stages(
    nimbus: NimbusThread,
    state: StormClusterState,
    name: str,
    token: str,
    conf: Mapping[str, object] | None = None,
) -> str:
    """The six stages as a run makes them: blobs over HTTP, records in ZooKeeper. The topology's
    id.
    """
    handle = upload(nimbus, conf=conf)
    with NimbusBlobClient(nimbus.url) as blobs:
        ctx = OperationsContext(
            cluster=state, blobs=blobs, conf=load_cluster_conf(None, None), planner=plan_placement
        )
        submission.stage_conf(ctx, name=name, token=token, handle=handle)
        submission.stage_code(ctx, token=token)
        submission.stage_tasks(ctx, token=token)
        publishing.stage_assignment(ctx, token=token)
        publishing.publish_assignment(ctx, token=token)
        return publishing.activate_topology(ctx, token=token).topology_id


# -- through Dagster -------------------------------------------------------------------------------


@pytest.fixture
def with_dagster(stage: Stage, dagster_server: DagsterServer) -> NimbusThread:
    return stage.nimbus(
        dagster__graphql__url=dagster_server.url, dagster__graphql__timeout__secs=20
    ).await_leading()


@pytest.mark.dagster
def test_submission_is_one_run_per_token(
    with_dagster: NimbusThread, cluster: Callable[[], StormClusterState]
) -> None:
    nimbus = with_dagster
    handle = upload(nimbus)
    request = {
        "name": "wc",
        "handle": handle,
        "token": "tok-1",
        "inactive": False,
        "allow_degraded": False,
    }
    answers: list[httpx.Response] = []
    callers = [
        threading.Thread(target=lambda: answers.append(post(nimbus, "/v1/submit", request)))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert {answer.status_code for answer in answers} == {202}, [answer.text for answer in answers]
    assert len({answer.json()["run_id"] for answer in answers}) == 1, "the same token, the same run"
    assert answers[0].json()["token"] == "tok-1"
    run_id = answers[0].json()["run_id"]
    run = eventually(
        lambda: (found := nimbus.get(f"/v1/runs/{run_id}").json())["finished"] and found,
        timeout=90,
        what="the run",
    )
    assert run["status"] == "SUCCESS" and len(run["steps"]) == 6 and run["url"]
    # The topology that this token made is alive: the same answer. Another token: refused at once.
    add_base(cluster(), "wc-1-100", token="tok-1")
    again = post(nimbus, "/v1/submit", request)
    assert again.status_code == 202 and again.json()["run_id"] == run_id
    other = post(nimbus, "/v1/submit", {**request, "token": "tok-2"})
    assert other.status_code == 409 and other.json()["error"]["type"] == "AlreadyAlive"


def operation_of(state: StormClusterState, token: str) -> TokenRecord | None:
    """The record of an operation."""
    raw = state.state.get_data(paths.token(token))
    return None if raw is None else decode_record(TokenRecord, raw, paths.token(token))


@pytest.mark.dagster
def test_an_accepted_operation_has_a_record_before_its_run_begins(
    with_dagster: NimbusThread, cluster: Callable[[], StormClusterState]
) -> None:
    """The runs of this Dagster do nothing: what is in ZooKeeper is the leader's."""
    state = cluster()
    submitted = post(
        with_dagster,
        "/v1/submit",
        {"name": "early", "handle": upload(with_dagster), "token": "early-1"},
    )
    assert submitted.status_code == 202
    add_supervisor(state, "s1")
    stages(with_dagster, state, "runs", "runs-1")
    updated = post(
        with_dagster,
        "/v1/topologies/runs/update",
        {"handle": upload(with_dagster), "token": "early-2"},
    )
    assert updated.status_code == 202, updated.text
    epoch = with_dagster.health()["epoch"]
    for token, verb, name in (("early-1", "submit", "early"), ("early-2", "update", "runs")):
        record = operation_of(state, token)
        assert record is not None
        assert (record.verb, record.name, record.epoch) == (verb, name, epoch)
        assert record.started_secs > 0 and not record.published


def operations(nimbus: NimbusThread) -> list[tuple[str, str]]:
    """Verb and topology of each operation that the nimbus lists."""
    rows = nimbus.get("/v1/operations").json()["operations"]
    return [(row["verb"], row["topology"]) for row in rows]


@pytest.mark.dagster
def test_a_submission_is_listed_until_its_run_has_ended(
    with_dagster: NimbusThread, cluster: Callable[[], StormClusterState]
) -> None:
    """The runs of this Dagster do nothing: the topology never comes."""
    began = time.time()
    answer = post(
        with_dagster,
        "/v1/submit",
        {"name": "seen", "handle": upload(with_dagster), "token": "seen"},
    ).json()
    (row,) = with_dagster.get("/v1/operations").json()["operations"]
    assert (row["verb"], row["topology"], row["step"]) == ("submit", "seen", "topology_conf")
    assert row["run_id"] == answer["run_id"]
    # Ages are whole seconds.
    assert 0 <= row["age_secs"] <= time.time() - began + 1
    unknown = with_dagster.get("/v1/topologies/seen")
    assert unknown.status_code == 404 and "submitting (checks conf and topology)" in unknown.text
    assert "submitting" in with_dagster.get("/").text
    eventually(lambda: operations(with_dagster) == [], timeout=120, what="the end of the record")
    record = operation_of(cluster(), "seen")
    assert record is not None and record.ended and record.request == {}


@pytest.mark.dagster
def test_a_change_is_listed_until_its_run_has_ended(
    with_dagster: NimbusThread, cluster: Callable[[], StormClusterState]
) -> None:
    add_base(cluster(), "wc-1-100")
    answer = post(with_dagster, "/v1/topologies/wc/restart").json()
    document = with_dagster.get("/v1/topologies/wc").json()
    (row,) = document["operations"]
    assert (row["verb"], row["step"], row["run_id"]) == ("restart", "workers", answer["run_id"])
    eventually(lambda: operations(with_dagster) == [], timeout=120, what="the end of the record")
    assert cluster().state.find_children(paths.OPERATIONS) == []


def add_changed_assignment(
    cluster: StormClusterState, topology_id: str, action: str, at_secs: int
) -> None:
    """A topology whose newest change of its placement is the ``action``."""
    add_base(cluster, topology_id)
    assignment = Assignment(
        topology_id=topology_id,
        code_dir=topology_id,
        node_host={},
        workers=(),
        task_start_secs={},
        timestamp_ms=at_secs * 1000,
        history=(AssignmentChange(at_secs=at_secs, action=action),),
    )
    path = paths.assignment(topology_id)
    cluster.state.mkdirs(paths.ASSIGNMENTS)
    cluster.state.create_node(path, encode_record(assignment))


@pytest.mark.dagster
def test_a_leader_launches_what_a_lost_leader_accepted(
    dagster_server: DagsterServer,
    stage: Stage,
    cluster: Callable[[], StormClusterState],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first leader writes records, and is lost before it launches a run of them."""
    monkeypatch.setattr(accepted_operations, "_LATE_SECS", 2.0)
    first = stage.nimbus().await_leading()
    server = {"dagster__graphql__url": dagster_server.url, "dagster__graphql__timeout__secs": 20}
    later = stage.nimbus("n2", **server)
    eventually(
        lambda: later.health()["leader_http"],
        timeout=60,
        what="the follower",
        ignore=(AssertionError, httpx.HTTPError),
    )
    state = cluster()
    epoch = first.health()["epoch"]
    add_base(state, "wc-1-100")
    handle = upload(first)
    submitted = {"name": "lost", "handle": handle, "token": "lost-1"}
    started_secs = int(time.time())
    token = TokenRecord(
        topology_id="lost-7-100",
        name="lost",
        epoch=epoch,
        started_secs=started_secs,
        request=submitted,
    )
    state.state.create_node(paths.token("lost-1"), encode_record(token))
    add_changed_assignment(state, "healed-1-100", HEALING, started_secs + 1)
    add_changed_assignment(state, "moved-1-100", "rebalanced", started_secs + 1)
    for request, topology_id, more in (
        ("req-lost", "wc-1-100", {}),
        ("req-healed", "healed-1-100", {"name": "healed"}),
        ("req-moved", "moved-1-100", {"name": "moved"}),
        ("req-abandoned", "wc-1-100", {"is_abandoned": True}),
        ("req-old", "wc-1-100", {"started_secs": started_secs - 3600}),
        ("req-superseded", "wc-1-100", {"started_secs": started_secs - 30}),
        ("req-gone", "gone-1-100", {}),
    ):
        fields = {"name": "wc", "verb": "restart", "epoch": epoch, "started_secs": started_secs}
        change = OperationRecord(topology_id=topology_id, **{**fields, **more})
        state.state.create_node(paths.operation(request), encode_record(change))
    state.state.create_node(paths.operation("req-damaged"), b"{")
    first.stop()
    later.await_leading()

    def runs(tag: str, value: str) -> list[str]:
        tags = {"tags": [{"key": tag, "value": value}]}
        response = ask_dagster(dagster_server, _RUNS, filter=tags)
        return [run["runId"] for run in response["runsOrError"]["results"]]

    eventually(lambda: runs(TOKEN_TAG, "lost-1"), timeout=120, what="the run of the submission")
    eventually(lambda: runs(REQUEST_TAG, "req-lost"), timeout=120, what="the run of the restart")
    eventually(lambda: runs(REQUEST_TAG, "req-healed"), timeout=120, what="the run after a healing")
    # The runs of this Dagster do nothing.
    eventually(
        lambda: operations(later) == [], timeout=patience(180), what="the end of all records"
    )
    assert len(runs(TOKEN_TAG, "lost-1")) == len(runs(REQUEST_TAG, "req-lost")) == 1
    assert state.state.find_children(paths.OPERATIONS) == [], "the damaged one is deleted, too"
    for request in ("req-abandoned", "req-old", "req-superseded", "req-moved", "req-gone"):
        assert runs(REQUEST_TAG, request) == []
    record = operation_of(state, "lost-1")
    assert record is not None and record.ended and record.topology_id == "lost-7-100"


@pytest.mark.dagster
def test_a_leader_waits_for_what_is_missing_of_an_accepted_upload(
    with_dagster: NimbusThread, cluster: Callable[[], StormClusterState]
) -> None:
    """Parts come to followers one by one, and the former leader was lost before the last."""
    state = cluster()
    source, handle = upload(with_dagster), "a" * 32
    with NimbusBlobClient(with_dagster.url) as blobs:
        for part in ("conf", "topology"):
            blobs.put(f"upload.{handle}.{part}", blobs.read(f"upload.{source}.{part}"))
        for token, its_handle in (("half-1", handle), ("half-2", source)):
            record = TokenRecord(
                topology_id=f"{token}-100",
                name=token.replace("-", ""),
                epoch=0,
                started_secs=int(time.time()),
                request={"name": token.replace("-", ""), "handle": its_handle, "token": token},
            )
            state.state.create_node(paths.token(token), encode_record(record))

        def listed(token: str) -> Any:
            rows = with_dagster.get("/v1/operations").json()["operations"]
            return [row["run_id"] for row in rows if row["topology"] == token.replace("-", "")]

        def is_launched(token: str) -> bool:
            record = operation_of(state, token)
            assert record is not None
            return record.ended or listed(token) not in ([], [None])

        eventually(lambda: is_launched("half-2"), timeout=60, what="the run of a whole upload")
        waiting = operation_of(state, "half-1")
        assert waiting is not None and waiting.request and not waiting.ended
        assert blobs.exists(f"upload.{handle}.conf"), "what is there of the upload stays"
        blobs.put(f"upload.{handle}.archive", b"archive")
        eventually(lambda: is_launched("half-1"), timeout=60, what="the run of the late upload")


@pytest.mark.dagster
def test_an_update_is_one_run_per_token(
    with_dagster: NimbusThread,
    dagster_server: DagsterServer,
    cluster: Callable[[], StormClusterState],
) -> None:
    state = cluster()
    add_supervisor(state, "s1")
    stages(with_dagster, state, "twice", "twice-1")
    request = {"handle": upload(with_dagster), "token": "twice-2"}
    before = runs_of(dagster_server, "update_topology")
    answers = [post(with_dagster, "/v1/topologies/twice/update", request) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {202}, [answer.text for answer in answers]
    assert len({answer.json()["run_id"] for answer in answers}) == 1
    assert len(runs_of(dagster_server, "update_topology")) == len(before) + 1


def test_what_a_former_leader_accepted_by_thrift_gets_the_record(
    stage: Stage, cluster: Callable[[], StormClusterState]
) -> None:
    nimbus = stage.nimbus().await_leading()
    handle = upload(nimbus)
    pending = {"name": "old", "handle": handle, "token": "thrift-old", "inactive": True}
    with NimbusBlobClient(nimbus.url) as blobs:
        key = f"upload.{handle}.pending"
        blobs.put(key, json.dumps(pending).encode())
        record = eventually(
            lambda: operation_of(cluster(), "thrift-old"), timeout=60, what="the record"
        )
        assert record.request == pending and not record.ended
        eventually(lambda: not blobs.exists(key), timeout=60, what="the end of the former record")
    assert operations(nimbus) == [("submit", "old")]


def test_a_follower_says_by_a_header_that_it_did_nothing(stage: Stage) -> None:
    stage.nimbus().await_leading()
    follower = stage.nimbus("n2")
    refused = eventually(
        lambda: (
            (answer := post(follower, "/v1/submit", {"name": "wc", "handle": "0" * 32})).status_code
            == 503
            and answer
        ),
        timeout=60,
        what="the refusal",
        ignore=(AssertionError, httpx.HTTPError),
    )
    assert refused.headers["X-Storm-Not-Leading"] == "true"
    assert refused.json()["error"]["type"] == "Unavailable"


def test_a_refused_submission_leaves_no_record(
    stage: Stage, cluster: Callable[[], StormClusterState]
) -> None:
    nimbus = stage.nimbus().await_leading()
    request = {"name": "wc", "handle": upload(nimbus), "token": "refused-1"}
    assert post(nimbus, "/v1/submit", request).status_code == 503
    assert operation_of(cluster(), "refused-1") is None


@pytest.mark.dagster
def test_failed_run_tells_its_typed_error(with_dagster: NimbusThread) -> None:
    nimbus = with_dagster
    dagster_descriptions = post(nimbus, "/v1/topologies/wc/kill")
    assert (
        dagster_descriptions.status_code == 404
        and dagster_descriptions.json()["error"]["type"] == "NotAlive"
    )
    for document, status in (
        ({"name": "a/b", "handle": "0" * 32}, 400),
        ({"name": "wc", "handle": "0" * 32}, 404),
        ({"name": "wc", "handle": 7}, 400),
        ({"name": "wc", "handle": "/etc/passwd"}, 404),
        ({"name": "wc", "handle": "0" * 32, "token": "../x"}, 400),
        ({"name": "wc", "handle": "0" * 32, "jar": "/etc/passwd"}, 400),
        ({"name": "wc", "handle": "0" * 32, "inactive": "yes"}, 400),
    ):
        answer = post(nimbus, "/v1/submit", document)
        assert answer.status_code == status, (document, answer.text)
    assert nimbus.get("/v1/runs/none").status_code == 404


def ask_dagster(server: DagsterServer, query: str, **variables: object) -> Any:
    document = {"query": query, "variables": variables}
    return httpx.post(server.url, json=document, timeout=20, trust_env=False).json()["data"]


_OBSERVATIONS = """query($key: AssetKeyInput!) { assetOrError(assetKey: $key) { __typename
  ... on Asset {
    assetObservations(limit: 50) {
      partition description metadataEntries { label ... on TextMetadataEntry { text } }
    }
    assetMaterializations(limit: 50) { partition }
  } } }"""


def observations_of(server: DagsterServer, name: str) -> list[dict[str, str]]:
    """Metadata of the observations of a topology, newest first."""
    asset = ask_dagster(server, _OBSERVATIONS, key={"path": ["storm", "active_topology"]})
    observations = asset["assetOrError"].get("assetObservations") or []
    return [
        {entry["label"]: entry["text"] for entry in observation["metadataEntries"]}
        for observation in observations
        if observation["partition"] == name
    ]


_RUNS = """query($filter: RunsFilter!) { runsOrError(filter: $filter) { __typename
  ... on Runs { results { runId } } } }"""


def runs_of(server: DagsterServer, job: str) -> list[str]:
    response = ask_dagster(server, _RUNS, filter={"pipelineName": job})
    return [run["runId"] for run in response["runsOrError"]["results"]]


@pytest.mark.dagster
def test_what_the_leader_executes_is_an_asset_event_and_no_run(
    with_dagster: NimbusThread,
    dagster_server: DagsterServer,
    cluster: Callable[[], StormClusterState],
) -> None:
    before = runs_of(dagster_server, "kill_topology")
    add_base(cluster(), "noted-1-100")
    for verb, status in (("deactivate", "INACTIVE"), ("activate", "ACTIVE"), ("kill", "KILLED")):
        answer = post(with_dagster, f"/v1/topologies/noted/{verb}")
        assert answer.status_code == 202
        document = answer.json()
        assert document == {
            **document, "run_id": None, "id": "noted-1-100", "name": "noted", "status": status
        }  # fmt: skip
        assert (document["outcome"], document["moved"]) == ("changed", 0)
    # Killed again with no delay: it is removed at once, but not before the answer.
    killed = post(with_dagster, "/v1/topologies/noted/kill", {"wait_secs": 0}).json()
    assert killed["status"] == "KILLED"

    def is_reported() -> bool:
        observations = observations_of(dagster_server, "noted")
        return bool(observations) and observations[0]["status"] == "gone"

    eventually(is_reported, timeout=60, what="the event of the removal")
    observations = observations_of(dagster_server, "noted")
    changes = [(entry["verb"], entry["status"]) for entry in reversed(observations)]
    assert changes == [
        ("deactivate", "INACTIVE"),
        ("activate", "ACTIVE"),
        ("kill", "KILLED"),
        ("kill", "KILLED"),
        ("kill", "gone"),
    ]
    assert {entry["topology_id"] for entry in observations} == {"noted-1-100"}
    assert runs_of(dagster_server, "kill_topology") == before


@pytest.mark.dagster
def test_changes_are_runs(
    with_dagster: NimbusThread, cluster: Callable[[], StormClusterState]
) -> None:
    nimbus = with_dagster
    add_base(cluster(), "wc-1-100")
    answer = post(nimbus, "/v1/topologies/wc/restart")
    assert answer.status_code == 202
    document = answer.json()
    assert (document["id"], document["name"], document["status"]) == ("wc-1-100", "wc", "ACTIVE")
    run = eventually(
        lambda: (
            (found := nimbus.get(f"/v1/runs/{document['run_id']}").json())["finished"] and found
        ),
        timeout=90,
        what="the run",
    )
    assert run["job"] == "restart_topology" and run["status"] == "SUCCESS"
    for verb, body in (
        ("kill", {"wait_secs": -1}),
        ("kill", {"wait": 1}),
        ("activate", {"x": 1}),
        ("rebalance", {"workers": 0}),
        ("rebalance", {"executors": [1]}),
        ("rebalance", {"executors": {"count": "two"}}),
        ("rebalance", {"reassign": 1}),
        ("explode", {}),
    ):
        assert post(nimbus, f"/v1/topologies/wc/{verb}", body).status_code == 400, (verb, body)


# -- without Dagster -------------------------------------------------------------------------------


def test_without_dagster_submission_waits_and_lifecycle_goes_on(
    stage: Stage, cluster: Callable[[], StormClusterState]
) -> None:
    nimbus = stage.nimbus(
        nimbus__monitor__backstop__secs=2, task__cleanup__timeout__sec=1
    ).await_leading()
    state = cluster()
    handle = upload(nimbus)
    refused = post(nimbus, "/v1/submit", {"name": "wc", "handle": handle})
    assert (
        refused.status_code == 503 and "dagster.graphql.url" in refused.json()["error"]["message"]
    )
    add_supervisor(state, "s1")
    topology_id = stages(nimbus, state, "wc", "tok")
    assert nimbus.get(f"/v1/topologies/{topology_id}").json()["name"] == "wc"
    listed = nimbus.get("/v1/topologies").json()["topologies"]
    assert [(row["id"], row["status"], row["degraded"]) for row in listed] == [
        (topology_id, "ACTIVE", False)
    ]
    shown = nimbus.get("/v1/topologies/wc").json()
    assert shown["status"] == "ACTIVE" and {task["status"] for task in shown["tasks"]} == {
        "starting"
    }
    assert nimbus.get("/v1/topologies/wc/placement").status_code == 200
    assert nimbus.get("/v1/cluster").json()["supervisors"][0]["used"] == [1]

    def status() -> str:
        return nimbus.get("/v1/topologies/wc").json()["status"]

    for verb, expected in (("deactivate", "INACTIVE"), ("activate", "ACTIVE")):
        answer = post(nimbus, f"/v1/topologies/wc/{verb}")
        assert answer.status_code == 202 and answer.json()["run_id"] is None
        assert answer.json()["status"] == expected
        eventually(lambda wanted=expected: status() == wanted, what=expected)
    for verb in ("rebalance", "restart"):
        assert post(nimbus, f"/v1/topologies/wc/{verb}").status_code == 503
    killed = post(nimbus, "/v1/topologies/wc/kill", {"wait_secs": 1}).json()
    assert killed["run_id"] is None and killed["status"] == "KILLED"
    # No sensor is armed: the leader removes it when its delay has passed.
    eventually(
        lambda: nimbus.get("/v1/topologies/wc").status_code == 404, timeout=60, what="the removal"
    )
    eventually(
        lambda: state.state.get_children(paths.BLOBSTORE) == [],
        timeout=60,
        what="the removal of its blobs",
    )
    with NimbusBlobClient(nimbus.url) as blobs:
        eventually(
            lambda: not blobs.keys(topology_id),
            what="the end of their files, which are removed after their nodes",
        )


@pytest.mark.parametrize("verb", ["activate", "deactivate", "kill"])
def test_no_late_run_can_undo_what_the_leader_executed(
    stage: Stage, cluster: Callable[[], StormClusterState], verb: str
) -> None:
    """A Dagster that accepts connections and does not answer is asked for no run, which it could
    launch after a later change.
    """
    sent: list[bytes] = []

    def listen() -> None:
        with suppress(OSError):
            while True:
                connection, _ = late.accept()
                sent.append(connection.recv(65536) + connection.recv(65536))

    with socket.create_server(("127.0.0.1", 0)) as late:
        threading.Thread(target=listen, daemon=True).start()
        url = f"http://127.0.0.1:{late.getsockname()[1]}/graphql"
        nimbus = stage.nimbus(
            dagster__graphql__url=url, dagster__graphql__timeout__secs=1
        ).await_leading()
        add_base(cluster(), "wc-1-100")
        post(nimbus, "/v1/topologies/wc/deactivate")
        answer = post(nimbus, f"/v1/topologies/wc/{verb}")
        assert answer.status_code == 202 and answer.json()["run_id"] is None
        eventually(lambda: b"wc-1-100" in b"".join(sent), timeout=30, what="the report")
        assert b"launchRun" not in b"".join(sent)


def test_no_verb_of_the_leader_waits_for_dagster(
    stage: Stage, cluster: Callable[[], StormClusterState]
) -> None:
    """Dagster has its whole timeout to answer, and the client waits for half of it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/graphql"
        nimbus = stage.nimbus(
            dagster__graphql__url=url, dagster__graphql__timeout__secs=20
        ).await_leading()
        add_base(cluster(), "wc-1-100")
        for verb, status in (
            ("deactivate", "INACTIVE"), ("activate", "ACTIVE"), ("kill", "KILLED")
        ):  # fmt: skip
            address = f"{nimbus.url}/v1/topologies/wc/{verb}"
            answer = httpx.post(address, json={}, timeout=10, trust_env=False)
            assert answer.json()["status"] == status


@pytest.mark.parametrize("armed", [True, False])
def test_what_is_overdue_is_done_by_the_leader_whatever_the_sensor_does(
    stage: Stage, cluster: Callable[[], StormClusterState], armed: bool
) -> None:
    """A sensor that holds /healer says nothing of the one that should remove this topology."""
    nimbus = stage.nimbus(nimbus__monitor__backstop__secs=1).await_leading()
    if armed:
        cluster().state.set_ephemeral_node(paths.HEALER, b"")
    add_base(cluster(), "wc-1-100")
    assert post(nimbus, "/v1/topologies/wc/kill", {"wait_secs": 1}).json()["status"] == "KILLED"
    eventually(
        lambda: nimbus.get("/v1/topologies/wc").status_code == 404, timeout=60, what="the removal"
    )


def test_doctor_names_what_nobody_heals(
    stage: Stage, cluster: Callable[[], StormClusterState]
) -> None:
    nimbus = stage.nimbus().await_leading()
    add_supervisor(cluster(), "s1")
    cluster().state.create_node(paths.topology("wc-1-100"), b'{"v": 99}')
    conf = {"nimbus.seeds": [nimbus.url.removeprefix("http://")], "dagster.graphql.url": ""}
    (nimbus.home / "storm.yaml").write_text(json.dumps(conf))
    done = run_cli("doctor", "--json", "--conf-dir", str(nimbus.home), home=nimbus.home)
    found = [
        row
        for row in done.document["findings"]
        if row["check"] == "cluster" and row["state"] == "broken"
    ]
    assert any("/topology/wc-1-100" in row["found"] for row in found), done.document


def test_a_submission_keeps_its_write_budget(
    stage: Stage, cluster: Callable[[], StormClusterState]
) -> None:
    """At most 24 nodes, plus one per key and further nimbus; no blob in staging is registered."""
    nimbus = stage.nimbus().await_leading()
    state = cluster()
    add_supervisor(state, "s1")

    def nodes(path: str = "") -> list[str]:
        found = [path] if path else []
        for child in state.state.find_children(path or "/") or []:
            found += nodes(f"{path}/{child}")
        return found

    before = set(nodes())
    topology_id = stages(nimbus, state, "wc", "tok")
    created = set(nodes()) - before
    # Set besides: /counter, /assignments, and the status of the topology.
    assert len(created) + 3 <= 24, sorted(created)
    registered = {path for path in created if path.startswith(paths.BLOBSTORE + "/")}
    assert all(topology_id in path for path in registered) and len(registered) == 6


def lose_host(nimbus: NimbusThread, state: StormClusterState) -> Callable[[], bool]:
    """A topology on s1, whose host is lost; whether its tasks are on s2 now."""
    add_supervisor(state, "s1")
    topology_id = stages(nimbus, state, "wc", "tok")
    found = state.read_assignment(topology_id)
    assert found is not None
    (worker,) = found[0].workers
    record = WorkerNode(
        pid=1, token="t", version=0, tasks=worker.tasks, started_ms=0, status="running", code=""
    )
    state.state.mkdirs(paths.workers(topology_id))
    state.state.set_ephemeral_node(
        paths.worker(topology_id, "s1", worker.port), encode_record(record)
    )
    add_supervisor(state, "s2")
    state.state.delete_node(paths.supervisor("s1"))
    state.state.delete_node(paths.worker(topology_id, "s1", worker.port))

    def moved() -> bool:
        now = state.read_assignment(topology_id)
        return now is not None and {slot.node for slot in now[0].workers} == {"s2"}

    return moved


@pytest.mark.parametrize("armed", [False, True])
def test_the_leader_heals_what_stays_dead_whatever_the_sensor_does(
    stage: Stage, cluster: Callable[[], StormClusterState], armed: bool
) -> None:
    """Without a sensor, and beside one that holds its node and does nothing: its tick hangs, or its
    runs do not start.
    """
    nimbus = stage.nimbus(
        nimbus__monitor__backstop__secs=2,
        nimbus__task__launch__secs=2,
        nimbus__task__timeout__secs=2,
        nimbus__supervisor__timeout__secs=3600,
    ).await_leading()
    state = cluster()
    if armed:
        state.state.set_ephemeral_node(paths.HEALER, b"")
    moved = lose_host(nimbus, state)
    eventually(moved, timeout=120, what="the reassignment by the leader")
    assert nimbus.get("/v1/cluster").json()["healer"] is armed


def healing_nimbus(stage: Stage) -> NimbusThread:
    return stage.nimbus(
        nimbus__monitor__backstop__secs=1,
        nimbus__task__launch__secs=2,
        nimbus__task__timeout__secs=2,
        nimbus__supervisor__timeout__secs=3600,
    ).await_leading()


def test_the_leader_honors_a_pause_of_healing_and_ends_it_in_time(
    stage: Stage, cluster: Callable[[], StormClusterState]
) -> None:
    nimbus = healing_nimbus(stage)
    state = cluster()
    begun = post(nimbus, "/v1/healing/pause", {"secs": 600}).json()
    assert begun["by"] == "leader" and begun["pause"]["text"].startswith("healing is paused")
    moved = lose_host(nimbus, state)

    def pause() -> dict[str, Any] | None:
        return nimbus.get("/v1/cluster").json()["healing"]["pause"]

    eventually(lambda: (pause() or {}).get("waiting"), timeout=120, what="a cause that waits")
    assert not moved()
    assert nimbus.get("/v1/topologies").json()["healing_pause"] == begun["pause"]["text"]
    assert "storm_healing_paused 1.0" in nimbus.get("/metrics").text
    page = nimbus.get("/").text
    assert "healing is paused" in page and "1 cause waits" in page
    # Its successor ends by itself.
    post(nimbus, "/v1/healing/pause", {"secs": 1})
    eventually(moved, timeout=120, what="healing after the pause")
    assert pause() is None and "the leader heals" in nimbus.get("/").text


@pytest.mark.long
def test_verbs_pause_and_resume_healing_and_all_others_show_it(
    stage: Stage, cluster: Callable[[], StormClusterState]
) -> None:
    nimbus = healing_nimbus(stage)

    def text(*words: str) -> str:
        seed = f"nimbus.seeds=[{nimbus.url.removeprefix('http://')}]"
        done = run_cli(*words, "-c", seed, home=nimbus.home)
        return done.out + done.err

    assert "healing would be paused for 60 s" in text("pause-healing", "--for", "60", "--dry-run")
    assert "healing is not paused" in text("resume-healing", "--dry-run")
    assert text("pause-healing", "--for", "600").startswith("healing is paused until ")
    moved = lose_host(nimbus, cluster())
    for words in (("status",), ("list",), ("show", "wc"), ("explain", "wc"), ("doctor",)):
        assert "healing is paused until " in text(*words), words
    assert not moved()
    assert text("resume-healing") == "healing continues\n"
    assert text("resume-healing") == "healing was not paused\n"
    eventually(moved, timeout=120, what="healing after the pause")


_ROUNDS_OF = {
    "_finish_due": LeaderTransitions,
    "_advance_upgrades": LeaderDuties,
    "_clean": LeaderDuties,
    "_report": LeaderReports,
}
_ALWAYS = {("_finish_due", True), ("_clean", True)}


@pytest.mark.parametrize(
    ("duty", "hangs"),
    [
        pytest.param(duty, hangs, marks=() if (duty, hangs) in _ALWAYS else pytest.mark.long)
        for duty in ("_finish_due", "_advance_upgrades", "_clean", "_report")
        for hangs in (False, True)
    ],
)
def test_a_duty_that_fails_or_hangs_delays_no_other_duty(
    stage: Stage,
    cluster: Callable[[], StormClusterState],
    monkeypatch: pytest.MonkeyPatch,
    duty: str,
    hangs: bool,
) -> None:
    called, over = threading.Event(), threading.Event()

    def fail(*_: object) -> None:
        called.set()
        if hangs:
            over.wait(300)
        raise OSError(5, "Input/output error")

    fail.__name__ = duty
    monkeypatch.setattr(_ROUNDS_OF[duty], duty, fail)
    try:
        nimbus = stage.nimbus(
            nimbus__monitor__backstop__secs=1,
            nimbus__task__launch__secs=2,
            nimbus__task__timeout__secs=2,
            nimbus__supervisor__timeout__secs=3600,
            task__cleanup__timeout__sec=0,
        ).await_leading()
        state = cluster()
        assert called.wait(patience(120))
        eventually(lose_host(nimbus, state), timeout=120, what="the reassignment by the leader")
        if duty != "_finish_due":
            # Each kind of duty has a thread of its own, so that one that hangs delays no removal.
            add_base(state, "gone-7-100")
            post(nimbus, "/v1/topologies/gone/kill", {"wait_secs": 1})
            eventually(
                lambda: nimbus.get("/v1/topologies/gone").status_code == 404,
                timeout=120,
                what="the removal",
            )
    finally:
        over.set()


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error"),
        pytest.param(OSError(30, "Read-only file system"), marks=pytest.mark.long),
    ],
)
def test_a_disk_that_deletes_nothing_keeps_one_topology_and_no_other_duty(
    stage: Stage,
    cluster: Callable[[], StormClusterState],
    monkeypatch: pytest.MonkeyPatch,
    error: OSError,
) -> None:
    nimbus = stage.nimbus(
        nimbus__monitor__backstop__secs=1,
        nimbus__task__launch__secs=2,
        nimbus__task__timeout__secs=2,
        nimbus__supervisor__timeout__secs=3600,
        task__cleanup__timeout__sec=0,
    ).await_leading()
    state = cluster()
    add_supervisor(state, "s0")
    stages(nimbus, state, "stuck", "stuck")
    deleted, refused = LocalBlobStore.delete, threading.Event()

    def delete(store: LocalBlobStore, key: str) -> None:
        if key.startswith("stuck-"):
            refused.set()
            raise error
        deleted(store, key)

    monkeypatch.setattr(LocalBlobStore, "delete", delete)
    post(nimbus, "/v1/topologies/stuck/kill", {"wait_secs": 1})
    assert refused.wait(patience(120))
    add_base(state, "gone-7-100")
    post(nimbus, "/v1/topologies/gone/kill", {"wait_secs": 1})
    eventually(
        lambda: nimbus.get("/v1/topologies/gone").status_code == 404,
        timeout=120,
        what="the removal",
    )
    state.state.delete_node(paths.supervisor("s0"))
    eventually(lose_host(nimbus, state), timeout=120, what="the reassignment by the leader")
    monkeypatch.undo()
    eventually(
        lambda: nimbus.get("/v1/topologies/stuck").status_code == 404,
        timeout=120,
        what="the late removal",
    )


def test_a_backstop_of_a_former_conf_counts_as_20_seconds() -> None:
    def backstop(**conf: int) -> float:
        values = {key.replace("__", "."): value for key, value in conf.items()}
        member: Any = SimpleNamespace(
            conf=load_cluster_conf(None, None).with_values(values, "test")
        )
        return LeaderHealing(member)._backstop_secs

    assert backstop() == 20
    assert backstop(nimbus__monitor__backstop__secs=60) == 20
    assert backstop(nimbus__monitor__backstop__secs=3) == 3


def test_the_leader_removes_its_kills_and_leaves_healing_to_the_sensor(
    stage: Stage, cluster: Callable[[], StormClusterState], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duties, "MAX_BACKSTOP_SECS", 3600.0)
    nimbus = stage.nimbus(nimbus__monitor__backstop__secs=3600).await_leading()
    state = cluster()
    state.state.set_ephemeral_node(paths.HEALER, b"")
    add_base(state, "wc-1-100")
    add_base(state, "begun-2-100", status="INACTIVE")
    post(nimbus, "/v1/topologies/wc/kill", {"wait_secs": 1})
    assert nimbus.get("/v1/cluster").json()["healer"] is True
    eventually(
        lambda: nimbus.get("/v1/topologies/wc").status_code == 404, timeout=60, what="the removal"
    )
    assert nimbus.get("/v1/topologies/begun").json()["status"] == "INACTIVE"
    state.state.delete_node(paths.HEALER)
    eventually(
        lambda: nimbus.get("/v1/topologies/begun").json()["status"] == "ACTIVE",
        timeout=60,
        what="the activation by the leader",
    )


def test_a_removal_is_noted_once(
    stage: Stage, cluster: Callable[[], StormClusterState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view that was loaded before a removal has ended still shows the topology."""
    stage.nimbus("n1").await_leading()
    ctx = OperationsContext(
        cluster=cluster(),
        blobs=LocalBlobStore(stage.home / "none"),
        conf=load_cluster_conf(None, None),
        planner=plan_placement,
    )
    noted: list[str] = []
    monkeypatch.setattr(
        LeaderTransitions, "_note_due", lambda _, __, done: noted.append(done.topology_id)
    )
    member: Any = SimpleNamespace(conf=ctx.conf)
    transitions = LeaderTransitions(member)
    transitions._start_removal(ctx, "gone-1-100", "gone")
    transitions._removals["gone-1-100"].result(patience(60))
    assert noted == []
    add_base(cluster(), "killed-2-100", status="KILLED")
    transitions._start_removal(ctx, "killed-2-100", "killed")
    transitions._removals["killed-2-100"].result(patience(60))
    assert noted == ["killed-2-100"]


def test_a_new_leader_finishes_the_kill_of_the_old_one(
    stage: Stage, cluster: Callable[[], StormClusterState]
) -> None:
    first = stage.nimbus(nimbus__monitor__backstop__secs=1).await_leading()
    state = cluster()
    add_base(state, "wc-1-100")
    assert post(first, "/v1/topologies/wc/kill", {"wait_secs": 4}).json()["status"] == "KILLED"
    first.stop()
    second = stage.nimbus("n2", nimbus__monitor__backstop__secs=1).await_leading()
    eventually(
        lambda: second.get("/v1/topologies/wc").status_code == 404, timeout=60, what="the removal"
    )


def test_what_a_status_does_not_allow_and_dry_runs_change_nothing(
    stage: Stage, cluster: Callable[[], StormClusterState]
) -> None:
    nimbus = stage.nimbus().await_leading()
    state = cluster()
    add_base(state, "wc-1-100")
    base = state.state.get_data(paths.topology("wc-1-100"))
    for verb in ("activate", "deactivate", "kill", "restart"):
        answer = post(nimbus, f"/v1/topologies/wc/{verb}", {"dry_run": True}).json()
        assert (answer["dry_run"], answer["would"], answer["id"]) == (True, verb, "wc-1-100")
    for document, says in (
        ({"dry_run": 1}, "dry_run"),
        ({"wait_secs": -1}, "wait_secs"),
        ({"wait_secs": True}, "wait_secs"),
        ({"workers": 3}, "no field"),
    ):
        answered = post(nimbus, "/v1/topologies/wc/kill", document)
        assert answered.status_code == 400 and says in answered.json()["error"]["message"]
    assert state.state.get_data(paths.topology("wc-1-100")) == base
    assert post(nimbus, "/v1/topologies/nope/kill").status_code == 404
    post(nimbus, "/v1/topologies/wc/kill", {"wait_secs": 3600})

    def refusal() -> str:
        return post(nimbus, "/v1/submit", {"name": "wc", "handle": "h"}).json()["error"]["message"]

    # By the clock of the leader, which has seen the kill.
    eventually(lambda: re.search(r"its removal is due in (3\d\d\d) s", refusal()), timeout=30)
    for verb in ("activate", "deactivate", "rebalance"):
        answered = post(nimbus, f"/v1/topologies/wc/{verb}")
        assert answered.status_code == 409, answered.text
        assert answered.json()["error"]["type"] == "Conflict" and "is KILLED" in answered.text


@pytest.mark.dagster
@pytest.mark.long
def test_what_was_done_by_hand_is_reported_later_also_by_another_leader(
    dagster_server: DagsterServer, stage: Stage, cluster: Callable[[], StormClusterState]
) -> None:
    # The first leader has no Dagster in reach: what it does is kept.
    first = stage.nimbus(nimbus__monitor__backstop__secs=1).await_leading()
    state = cluster()
    add_base(state, "gone-1-100")
    assert post(first, "/v1/topologies/gone/kill", {"wait_secs": 0}).json()["run_id"] is None
    eventually(
        lambda: first.get("/v1/topologies/gone").status_code == 404, timeout=60, what="the removal"
    )
    add_base(state, "stays-2-100")
    assert post(first, "/v1/topologies/stays/deactivate").json()["run_id"] is None
    first.stop()
    second = stage.nimbus("n2", dagster__graphql__url=dagster_server.url).await_leading()

    def waiting() -> str:
        lines = second.get("/metrics").text.splitlines()
        return next(line for line in lines if line.startswith("storm_nimbus_unreported_deeds"))

    eventually(lambda: float(waiting().split()[-1]) == 0, timeout=60, what="both events reported")
    gone = [(entry["verb"], entry["status"]) for entry in observations_of(dagster_server, "gone")]
    assert gone == [("kill", "gone"), ("kill", "KILLED")]
    stays = [(entry["verb"], entry["status"]) for entry in observations_of(dagster_server, "stays")]
    assert stays == [("deactivate", "INACTIVE")]
    # Its partition key is removed by the code location, which finds it here.
    raw = state.state.get_data(paths.UNREPORTED)
    assert raw is not None
    assert decode_record(UnreportedEvents, raw, paths.UNREPORTED).removed == ("gone-1-100",)
