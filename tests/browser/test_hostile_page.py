"""A page of another origin in a real browser, on the machine of a local cluster: it changes nothing
and reads nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page

from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually

pytestmark = [
    pytest.mark.browser,
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).parents[2]
NAME = "guarded"
MUTATION = (
    'mutation { addDynamicPartition(partitionsDefName: "storm_topologies", partitionKey: "forged", repositorySelector: '
    '{repositoryName: "__repository__", repositoryLocationName: "storm"}) { __typename } }'
)
STATE = """
{ runsOrError(limit: 100) { ... on Runs { results { runId } } }
  partitionSetsOrError: assetNodes { assetKey { path } }
  sensorsOrError(repositorySelector: {repositoryName: "__repository__", repositoryLocationName: "storm"})
    { ... on Sensors { results { name sensorState { status } } } } }
"""
PARTITIONS = """
{ assetNodeOrError(assetKey: {path: ["storm", "active_topology"]}) { ... on AssetNode { partitionKeys } } }
"""
# Each attack ends by itself, whatever becomes of it. What the page could read of an answer is in
# `read`.
SCRIPT = """
const [web, nimbus, supervisor, id, mutation] = %s;
const read = [], tried = [];
const soon = (promise) => Promise.race([promise.catch(() => null), new Promise((go) => setTimeout(go, 4000))]);
const graphql = web + "/graphql", query = "?query=" + encodeURIComponent(mutation);
const body = JSON.stringify({query: mutation});
const verbs = ["/v1/topologies/guarded/kill", "/v1/topologies/guarded/deactivate", `/api/v1/topology/${id}/kill/0`,
               `/api/v1/topology/${id}/deactivate`, `/api/v1/topology/${id}/rebalance/0`, "/v1/uploads", "/v1/blacklist"];
const posts = [graphql, graphql + query, web + "/report_asset_materialization/forged", ...verbs.map((verb) => nimbus + verb)];
const gets = [graphql + query, ...verbs.map((verb) => nimbus + verb), nimbus + "/v1/topologies",
              supervisor + "/logview?cmd=showConf", supervisor + "/v1/workers", web + "/server_info"];

function image(url) {
  return new Promise((go) => { const it = new Image(); it.onload = it.onerror = go; it.src = url; });
}
function script(url) {
  return new Promise((go) => {
    const it = document.createElement("script"); it.onload = it.onerror = go; it.src = url; document.head.append(it);
  });
}
function frame(url) {
  return new Promise((go) => {
    const it = document.createElement("iframe"); it.onload = it.onerror = () => {
      try { const text = it.contentDocument && it.contentDocument.body.innerText; if (text) read.push([url, text]); } catch (e) {}
      go();
    };
    it.src = url; document.body.append(it);
  });
}
let forms = 0;
function form(url, type) {
  return new Promise((go) => {
    const name = "answer" + forms++, into = document.createElement("iframe"), it = document.createElement("form");
    into.name = name; it.target = name; it.method = "POST"; it.enctype = type; it.action = url;
    const field = document.createElement("input");
    // As text/plain the name and the value make up a JSON document.
    [field.name, field.value] = type === "text/plain" ? [body.slice(0, -1) + ', "x": "', '"}'] : ["query", mutation];
    it.append(field); document.body.append(into, it); into.onload = go; it.submit();
  });
}
async function asked(url, how) {
  const answer = await fetch(url, how);
  if (answer.type !== "opaque") read.push([url, await answer.text()]);
}
function socket(url) {
  return new Promise((go) => {
    const it = new WebSocket(url.replace("http", "ws"), "graphql-ws");
    it.onopen = () => { read.push([url, "open"]); it.send(JSON.stringify({type: "connection_init"}));
                        it.send(JSON.stringify({id: "1", type: "start", payload: {query: mutation}})); };
    it.onmessage = (event) => read.push([url, event.data]);
    it.onerror = it.onclose = go;
  });
}
async function attack() {
  const all = [];
  for (const url of gets) {
    all.push(image(url), script(url), frame(url), asked(url), asked(url, {mode: "no-cors", credentials: "include"}));
    all.push(new Promise((go) => { const it = new EventSource(url); it.onmessage = (e) => read.push([url, e.data]);
                                   it.onerror = () => { it.close(); go(); }; }));
  }
  for (const url of posts) {
    for (const type of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]) {
      all.push(form(url, type), asked(url, {method: "POST", mode: "no-cors", body, headers: {"Content-Type": type}}));
    }
    all.push(asked(url, {method: "POST", body, headers: {"Content-Type": "application/json"}}));
    all.push(asked(url, {method: "DELETE"}), asked(url, {method: "PUT", body}));
    navigator.sendBeacon(url, new Blob([body], {type: "text/plain"}));
  }
  for (const url of [graphql, nimbus + "/v1/topologies", supervisor + "/logview"]) all.push(socket(url));
  await Promise.all(all.map(soon));
  return {read, attacks: all.length};
}
"""


@pytest.fixture
def hostile(cluster: LocalCluster) -> Iterator[str]:
    """Address of another origin on this machine, whose page attacks the cluster."""
    targets = [
        dagster_url(cluster),
        leader_url(cluster),
        supervisor_url(cluster),
        cluster.show(NAME)["id"],
        MUTATION,
    ]
    page = f"<!DOCTYPE html><html><body><script>{SCRIPT % json.dumps(targets)}</script></body></html>".encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/" else 404)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            if self.path == "/":
                self.wfile.write(page)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join()


def dagster_url(cluster: LocalCluster) -> str:
    dagster = cluster.endpoints.dagster
    assert dagster is not None
    return dagster.url.rstrip("/")


def leader_url(cluster: LocalCluster) -> str:
    urls = [nimbus.http.rstrip("/") for nimbus in cluster.endpoints.nimbuses]
    return next(
        url for url in urls if httpx.get(f"{url}/healthz", trust_env=False).json()["leader"]
    )


def supervisor_url(cluster: LocalCluster) -> str:
    with cluster.nimbus() as nimbus:
        rows = nimbus.get("/v1/cluster")["supervisors"]
    return str(rows[0]["http"]).rstrip("/")


@pytest.fixture(scope="module")
def cluster(browser: object, shared_cluster: LocalCluster) -> LocalCluster:
    shared_cluster.cli("submit", str(ROOT / "examples" / "wordcount.py"), "--name", NAME)
    shared_cluster.wait_running(NAME)
    return shared_cluster


def dagster(cluster: LocalCluster, query: str) -> Any:
    answer = httpx.post(f"{dagster_url(cluster)}/graphql", json={"query": query}, trust_env=False)
    document = answer.json()
    assert "errors" not in document, document
    return document["data"]


def state(cluster: LocalCluster) -> Any:
    """What an attack could have changed."""
    shown = cluster.show(NAME)
    with cluster.nimbus() as nimbus:
        blobs = nimbus.get("/v1/blobs")
        blacklist = nimbus.get("/v1/blacklist")
    return {
        "topology": [
            shown["id"],
            shown["status"],
            sorted((w["node"], w["port"], w["pid"]) for w in shown["workers"]),
        ],
        "topologies": sorted(row["name"] for row in cluster.topologies()),
        "blobs": blobs,
        "blacklist": blacklist,
        "dagster": dagster(cluster, STATE),
        "partitions": dagster(cluster, PARTITIONS),
    }


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_page_of_another_origin_changes_and_reads_nothing(
    page: Page, hostile: str, cluster: LocalCluster, name: str
) -> None:
    before = state(cluster)
    answered: list[int] = []
    page.on("response", lambda response: answered.append(response.status))
    page.goto(hostile.replace("127.0.0.1", name))
    done = page.evaluate("attack()")
    assert done["read"] == [] and done["attacks"] > 100
    # They arrived: services refused them, most of them before the browser did.
    assert answered.count(400) > 30, answered
    assert state(cluster) == before


def test_what_it_tried_works_for_a_program(cluster: LocalCluster) -> None:
    """The requests are right; who makes them decides."""
    dagster(cluster, MUTATION)
    assert "forged" in dagster(cluster, PARTITIONS)["assetNodeOrError"]["partitionKeys"]
    dagster(
        cluster,
        MUTATION.replace("addDynamicPartition", "deleteDynamicPartitions").replace(
            'partitionKey: "forged"', 'partitionKeys: ["forged"]'
        ),
    )
    nimbus, topology_id = leader_url(cluster), cluster.show(NAME)["id"]
    answer = httpx.post(
        f"{nimbus}/api/v1/topology/{topology_id}/kill/0",
        trust_env=False,
        timeout=60,
        follow_redirects=True,
    )
    assert answer.status_code == 200, answer.text
    eventually(lambda: not cluster.topologies(), 60, "the topology gone")
