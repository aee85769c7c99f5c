"""Events from a worker to Dagster through the leader: taken, pulled or forwarded, acknowledged."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.core.event_log import EventSource
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model import paths
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.names import topology_name_of
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.event_logs import EventReport, take_events
from storm_dagster.testing.cluster import run_cli
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.operations.acting import submit
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.dagster_webserver import DagsterServer
from storm_rigs.stage.nimbus_thread import NimbusThread
from storm_rigs.stage.records import Records

pytestmark = pytest.mark.zookeeper

OWNER = "shop:default"
DECLARED = {"declared.code.version": "v1", "declared.owner": OWNER}
MATERIALIZATIONS = """
query {
  assetOrError(assetKey: {path: ["lake", "%s"]}) {
    ... on Asset { assetMaterializations { metadataEntries { label ... on IntMetadataEntry { intValue } ... on TextMetadataEntry { text } } } }
  }
}
"""


class Cluster:
    """A leading nimbus, and the records of a topology with one worker."""

    def __init__(self, stage: Stage, nimbus: NimbusThread) -> None:
        self.nimbus = nimbus
        self.state: StormClusterState = stage.cluster
        self.token = ""

    def context(self, blobs: NimbusBlobClient) -> OperationsContext:
        """The context of a run, which stores blobs over HTTP."""
        conf = load_cluster_conf(None, None)
        return OperationsContext(self.state, blobs, conf, plan_placement)

    def deploy(self, name: str, conf: Mapping[str, object] | None = None) -> str:
        """Submit a topology, and run its worker; its id."""
        with NimbusBlobClient(self.nimbus.url) as blobs:
            # The parts of an upload are blobs.
            records: Any = Records(self.state, blobs)  # type: ignore[arg-type]
            records.supervisor("s1")
            handle = records.upload(f"handle-{name}", conf=conf)
            submit(self.context(blobs), name=name, token=f"token-{name}", handle=handle)
        (topology_id,) = [
            entry for entry in self.state.active_storms() if topology_name_of(entry) == name
        ]
        records.run_workers(topology_id)
        self.token = next(iter(self.state.live_workers(topology_id).values())).token
        return topology_id

    def report(self, topology: str, *documents: dict[str, Any]) -> dict[str, Any]:
        """Report events as the worker does; the response."""
        response = httpx.post(
            f"{self.nimbus.url}/v1/topologies/{topology}/events",
            json={"events": list(documents)},
            headers={"Authorization": f"Bearer {self.token}"},
            timeout=60,
            trust_env=False,
        )
        assert response.status_code == 200, response.text
        return response.json()

    def pull(self, name: str, owner: str = OWNER, **query: Any) -> httpx.Response:
        parameters = httpx.QueryParams({"owner": owner, **query})
        return self.nimbus.get(f"/v1/topologies/{name}/events?{parameters}")

    def acknowledge(
        self, name: str, log: str, number: int, owner: str = OWNER, **undefined: str
    ) -> httpx.Response:
        body = {"log": log, "owner": owner, "number": number, "undefined": undefined}
        return self.nimbus.post(f"/v1/topologies/{name}/events/taken", body)


def document(number: int, asset: str = "words", **reporter: Any) -> dict[str, Any]:
    """An event in a worker's request."""
    event = DagsterEvent.make(
        "wc/count", "materialization", ["lake", asset], metadata={"number": number}
    )
    return {**msgspec.json.decode(msgspec.json.encode(event)), **reporter}


COUNT = {"component": "count", "task": 4}


@pytest.fixture
def leading(stage: Stage) -> Callable[..., Cluster]:
    """Makes the cluster of a nimbus that leads."""

    def make(nimbus_id: str = "n1", **conf: Any) -> Cluster:
        return Cluster(stage, stage.nimbus(nimbus_id, **conf).await_leading())

    return make


def test_a_code_location_pulls_what_a_worker_reported(leading: Callable[..., Cluster]) -> None:
    cluster = leading()
    topology_id = cluster.deploy("wc", DECLARED)
    empty = cluster.pull("wc").json()
    assert (empty["log"], empty["events"], empty["waiting"], empty["owner"]) == (None, [], 0, OWNER)
    assert cluster.nimbus.get("/v1/topologies/wc").json()["events"] is None

    first, second, third = document(1, **COUNT), document(2, **COUNT), document(3)
    invalid = {**document(4), "kind": "rumor"}
    answer = cluster.report(topology_id, first, invalid, second)
    assert answer["stored"] == [first["id"], second["id"]] and answer["problem"] is None
    assert list(answer["refused"]) == [invalid["id"]] and not answer["full"]
    assert cluster.report("wc", third)["stored"] == [third["id"]]

    page = cluster.pull("wc").json()
    assert [(row["number"], row["component"], row["task"]) for row in page["events"]] == [
        (1, "count", 4),
        (2, "count", 4),
        (3, None, None),
    ]
    assert {row["topology"] for row in page["events"]} == {topology_id}
    assert page["events"][0]["event"] == {
        key: value for key, value in first.items() if key not in COUNT
    }
    assert (page["waiting"], page["owner"], page["declared"]) == (3, OWNER, True)
    log = page["log"]
    later = cluster.pull("wc", log=log, after=1, limit=1).json()
    assert [row["number"] for row in later["events"]] == [2]

    other = cluster.pull("wc", owner="other:default")
    assert other.status_code == 409 and "is owned by 'shop:default'" in other.text
    assert cluster.acknowledge("wc", log, 3, owner="other:default").status_code == 409
    assert cluster.acknowledge("wc", "b" * 32, 3).status_code == 409
    wrong: dict[str, Any]
    for wrong in ({"limit": 0}, {"limit": 201}, {"after": "x"}):
        assert cluster.pull("wc", **wrong).status_code == 400, wrong
    assert cluster.nimbus.get("/v1/topologies/wc/events").status_code == 409, "no owner"
    assert cluster.pull("no%2Fname").status_code in (400, 404)

    unproven = [
        cluster.nimbus.post(f"/v1/topologies/{name}/events", {"events": []})
        for name in ("wc", "absent")
    ]
    assert [answer.status_code for answer in unproven] == [401, 401]
    assert unproven[0].text == unproven[1].text, "a stranger learns no name"

    reason = "is for an asset that no code location defines, the nearest is lake/word"
    for _ in range(2):
        answer = cluster.acknowledge("wc", log, 2, **{"2": reason})
        assert answer.json() == {"waiting": 1}, "repeating it has no effect"
    (error,) = cluster.nimbus.get("/v1/topologies/wc").json()["errors"]
    assert (error["component"], error["task"], error["count"]) == ("count", 4, 1)
    assert error["error"] == f"the materialization of 'lake/words' {reason}"

    shown = cluster.nimbus.get("/v1/topologies/wc").json()["events"]
    assert (shown["waiting"], shown["owner"], shown["dropped"]) == (1, OWNER, 0)
    assert cluster.nimbus.get("/v1/cluster").json()["events"] == {"wc": shown}
    assert 'storm_topology_events_waiting{topology="wc"} 1.0' in cluster.nimbus.get("/metrics").text
    page_text = cluster.nimbus.get("/topologies/wc").text
    assert "1 event waits for the code location of its owner" in page_text


def test_the_events_of_a_topology_that_is_gone_can_be_pulled(
    leading: Callable[..., Cluster],
) -> None:
    cluster = leading()
    topology_id = cluster.deploy("wc", DECLARED)
    cluster.report("wc", document(1, **COUNT))
    cluster.state.state.delete_node(paths.topology(topology_id))
    eventually(lambda: cluster.nimbus.get("/v1/topologies/wc").status_code == 404, what="its end")
    page = cluster.pull("wc").json()
    assert [row["number"] for row in page["events"]] == [1] and page["owner"] == OWNER
    assert cluster.pull("wc", owner="other:default").status_code == 409
    assert cluster.acknowledge("wc", page["log"], 1, **{"1": "x"}).json() == {"waiting": 0}


@pytest.mark.long
def test_requests_of_one_second_are_stored_together(leading: Callable[..., Cluster]) -> None:
    cluster = leading()
    cluster.deploy("wc", DECLARED)
    answers: list[dict[str, Any]] = []

    def report(worker: int) -> None:
        answers.extend(cluster.report("wc", document(10 * worker + place)) for place in range(5))

    began_at = time.monotonic()
    threads = [threading.Thread(target=report, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began_at
    assert len(answers) == 20 and all(answer["stored"] for answer in answers)
    version = cluster.state.state.get_version(paths.event_log("wc"))
    assert version is not None and version + 1 <= seconds + 1, "at most one commit a second"
    assert cluster.pull("wc").json()["waiting"] == 20


def test_any_location_pulls_the_events_of_a_topology_without_an_owner(
    leading: Callable[..., Cluster],
) -> None:
    cluster = leading()
    cluster.deploy("wc", {"declared.code.version": "v1"})
    cluster.report("wc", document(1, **COUNT))
    for owner in ("", OWNER):
        page = cluster.pull("wc", owner=owner).json()
        assert (page["owner"], page["declared"], len(page["events"])) == (None, True, 1)
    assert cluster.acknowledge("wc", page["log"], 1, owner="").json() == {"waiting": 0}


@pytest.mark.long
def test_doctor_warns_of_events_that_wait_for_long(leading: Callable[..., Cluster]) -> None:
    cluster = leading()
    topology_id = cluster.deploy("wc", DECLARED)
    event = DagsterEvent.make("wc/count", "materialization", "lake/words")
    with NimbusBlobClient(cluster.nimbus.url) as blobs:
        ctx = replace(cluster.context(blobs), now_secs=lambda: int(time.time()) - 700)
        source = EventSource(topology_id, declared=True, owner=OWNER)
        take_events(ctx, "wc", source, [EventReport(topology_id, "count", 4, event)])
    home = cluster.nimbus.home
    conf = {
        "nimbus.seeds": [cluster.nimbus.url.removeprefix("http://")],
        "dagster.graphql.url": "",
    }
    (home / "storm.yaml").write_text(json.dumps(conf))
    done = run_cli("doctor", "--json", "--conf-dir", str(home), home=home)
    (warning,) = [
        row for row in done.document["findings"] if row["found"].startswith("topology wc: 1 event")
    ]
    assert warning["state"] == "warning" and "the oldest for 12 min" in warning["found"]
    assert repr(OWNER) in warning["found"] and "topology_events_sensor" in warning["mend"]
    shown = run_cli("show", "wc", "--conf-dir", str(home), home=home)
    assert "1 event waits for the code location of its owner" in shown.out


@pytest.mark.dagster
def test_events_wait_for_the_clusters_dagster_and_go_in_order(
    leading: Callable[..., Cluster], dagster_server: DagsterServer
) -> None:
    """Dagster is away at first, and nimbus is restarted meanwhile."""
    away = leading(dagster__graphql__url="http://127.0.0.1:9/graphql")
    topology_id = away.deploy("wc")
    for number in range(3):
        assert away.report("wc", document(number, "ordered", **COUNT))["problem"] is None
    # An event that Dagster refuses: one of a nimbus of another release, perhaps.
    check = DagsterEvent.make("wc/count", "check", "lake/ordered", check="x", passed=True)
    refused = msgspec.structs.replace(check, passed=None)
    with NimbusBlobClient(away.nimbus.url) as blobs:
        report = EventReport(topology_id, "count", 4, refused)
        take_events(away.context(blobs), "wc", EventSource(topology_id), [report])
    away.report("wc", document(3, "ordered", **COUNT))
    pulled = away.pull("wc").json()
    assert (pulled["declared"], pulled["events"], pulled["waiting"]) == (False, [], 5)
    assert away.acknowledge("wc", pulled["log"], 5).status_code == 409
    away.nimbus.stop()

    back = leading(dagster__graphql__url=dagster_server.url, dagster__graphql__timeout__secs=20)
    eventually(lambda: back.pull("wc").json()["waiting"] == 0, 60, "the forwarding")
    answer = httpx.post(
        dagster_server.url,
        json={"query": MATERIALIZATIONS % "ordered"},
        timeout=60,
        trust_env=False,
    ).json()
    newest_first = answer["data"]["assetOrError"]["assetMaterializations"]
    entries = [
        {
            entry["label"]: entry.get("intValue", entry.get("text"))
            for entry in one["metadataEntries"]
        }
        for one in newest_first
    ]
    assert [entry["number"] for entry in reversed(entries)] == [0, 1, 2, 3]
    assert {entry["storm/topology"] for entry in entries} == {topology_id}
    (error,) = back.nimbus.get("/v1/topologies/wc").json()["errors"]
    assert (error["component"], error["task"]) == ("count", 4)
    assert error["error"].startswith("the check of 'lake/ordered' was refused: Dagster answered")


@pytest.mark.long
@pytest.mark.dagster
def test_many_events_of_one_topology_do_not_hold_up_those_of_another(
    leading: Callable[..., Cluster], dagster_server: DagsterServer
) -> None:
    cluster = leading(dagster__graphql__url=dagster_server.url, dagster__graphql__timeout__secs=20)
    busy_id = cluster.deploy("busy")
    cluster.deploy("calm")
    events = [
        DagsterEvent.make("wc/count", "materialization", "lake/busy", metadata={"number": number})
        for number in range(1000)
    ]
    reports = [EventReport(busy_id, "count", 4, event) for event in events]
    with NimbusBlobClient(cluster.nimbus.url) as blobs:
        take_events(cluster.context(blobs), "busy", EventSource(busy_id), reports)

    def waiting(name: str) -> int:
        log = cluster.state.event_log(name)
        return -1 if log is None else log.waiting

    eventually(lambda: 0 < waiting("busy") < 1000, 60, "the forwarding of the first page")
    cluster.report("calm", document(1, "calm", **COUNT))
    eventually(lambda: waiting("calm") == 0, 60, "the event of the other topology")
    assert waiting("busy") > 0, "its event did not wait for all of the first one"


@pytest.mark.long
def test_a_new_leader_has_what_the_former_one_took(stage: Stage) -> None:
    conf = {"topology.min.replication.count": 2}
    first = stage.nimbus("n1", conf).await_leading()
    second = stage.nimbus("n2", conf).await_serving()
    cluster = Cluster(stage, first)
    cluster.deploy("wc", DECLARED)
    for number in range(3):
        cluster.report("wc", document(number, **COUNT))
    before = cluster.pull("wc").json()
    first.stop()
    cluster.nimbus = second.await_leading()
    after = eventually(
        lambda: (found := cluster.pull("wc")).status_code == 200 and found.json(),
        what="the events at the new leader",
    )
    assert (after["log"], after["events"]) == (before["log"], before["events"])
    assert len(after["events"]) == 3
    # Two nimbuses must hold what is taken.
    stage.nimbus("n1", conf).await_serving()
    eventually(lambda: cluster.report("wc", document(9, **COUNT))["stored"], 60, "a taken event")
    assert cluster.pull("wc").json()["waiting"] == 4
