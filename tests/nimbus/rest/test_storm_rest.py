"""Storm's REST as its users know it: paths, keys, types and formats, filled by real workers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from storm_dagster.nimbus.http.storm.formats import pretty_secs
from storm_dagster.testing.cluster import run_cli
from storm_dagster.testing.waiting import eventually
from storm_rigs.stage.storm_rest import StormRest

pytestmark = pytest.mark.zookeeper

DECIMALS = re.compile(r"[0-9]+\.[0-9]{3}")


def test_uptimes_as_storm_writes_them() -> None:
    expected = {
        0: "0s",
        59: "59s",
        60: "1m 0s",
        3600: "1h 0m 0s",
        86400: "1d 0h 0m 0s",
        685_752: "7d 22h 29m 12s",
    }
    assert {secs: pretty_secs(secs) for secs in expected} == expected


def test_the_cluster_is_summed_up_as_storm_does(rest: StormRest) -> None:
    summary = rest.get("/cluster/summary")
    assert (summary["supervisors"], summary["topologies"], summary["tasksTotal"]) == (1, 1, 6)
    assert (summary["slotsTotal"], summary["slotsUsed"], summary["slotsFree"]) == (3, 2, 1)
    assert (summary["executorsTotal"], summary["totalMem"], summary["totalCpu"]) == (
        6,
        4096.0,
        400.0,
    )
    assert rest.get("/cluster/configuration")["storm.zookeeper.root"].startswith("/t-")
    (row,) = rest.get("/supervisor/summary")["supervisors"]
    assert (row["id"], row["host"], row["slotsTotal"], row["slotsUsed"]) == (
        "s1",
        "127.0.0.1",
        3,
        2,
    )
    assert re.fullmatch(r"[0-9]+d [0-9]+h [0-9]+m [0-9]+s", row["uptime"])
    for query in ({"id": "s1"}, {"host": "127.0.0.1"}, {"id": "s1", "host": "ignored"}):
        page = rest.get("/supervisor", **query)
        assert [one["id"] for one in page["supervisors"]] == ["s1"]
        assert {one["topologyName"] for one in page["workers"]} == {"wc"} and len(
            page["workers"]
        ) == 2
    (nimbus,) = rest.get("/nimbus/summary")["nimbuses"]
    assert nimbus["status"] == "Leader" and int(nimbus["nimbusUpTimeSeconds"]) >= 0
    assert rest.get("/history/summary") == {"topo-history": [rest.id]}
    (owner,) = rest.get("/owner-resources")["owners"]
    assert (owner["totalTopologies"], owner["totalTasks"], owner["memoryGuarantee"]) == (
        1,
        6,
        "N/A",
    )


def test_the_page_of_a_topology_has_storms_figures(rest: StormRest) -> None:
    (row,) = rest.get("/topology/summary")["topologies"]
    assert (row["id"], row["name"], row["status"], row["replicationCount"]) == (
        rest.id,
        "wc",
        "ACTIVE",
        1,
    )
    assert (row["tasksTotal"], row["workersTotal"], row["executorsTotal"]) == (6, 2, 6)
    page = rest.get(f"/topology/{rest.id}")
    assert (page["msgTimeout"], page["windowHint"], page["replicationCount"]) == (17, "All time", 1)
    windows = [one["window"] for one in page["topologyStats"]]
    assert windows == ["600", "10800", "86400", ":all-time"]
    assert [one["windowPretty"] for one in page["topologyStats"]] == [
        "10m 0s",
        "3h 0m 0s",
        "1d 0h 0m 0s",
        "All time",
    ]
    life = page["topologyStats"][-1]
    assert life["acked"] + life["failed"] >= 200 and DECIMALS.fullmatch(life["completeLatency"])
    (spout,) = page["spouts"]
    assert (spout["spoutId"], spout["tasks"], spout["executors"]) == ("lines", 1, 1)
    assert spout["emitted"] >= 200 and spout["lastError"] == "" and spout["errorPort"] is None
    bolts = {one["boltId"]: one for one in page["bolts"]}
    assert set(bolts) == {"split", "count/all"}
    assert (
        bolts["count/all"]["executed"] >= 600
        and bolts["count/all"]["encodedBoltId"] == "count%2Fall"
    )
    assert "boom" in bolts["count/all"]["lastError"]
    for name in ("capacity", "executeLatency", "processLatency"):
        assert DECIMALS.fullmatch(bolts["split"][name])
    with_system = rest.get(f"/topology/{rest.id}", sys=1, window="600")
    assert {"__acker", "__topology_master"} <= {one["boltId"] for one in with_system["bolts"]}
    assert with_system["windowHint"] == "10m 0s"
    assert page["configuration"]["topology.environment"] == {"API_TOKEN": "*****"}
    pairs = rest.get(f"/topology-workers/{rest.id}")["hostPortList"]
    assert len(pairs) == 2 and {pair["host"] for pair in pairs} == {"127.0.0.1"}
    assert sum(one["executorsTotal"] for one in page["workers"]) == 6
    # The link of a worker leads to its log.
    log = httpx.get(page["workers"][0]["workerLogLink"], trust_env=False, timeout=20)
    assert log.status_code == 200 and f"log of {page['workers'][0]['port']}" in log.text


def test_the_page_of_a_component_has_its_streams_executors_and_errors(rest: StormRest) -> None:
    spout = rest.get(f"/topology/{rest.id}/component/lines")
    assert spout["componentType"] == "spout" and len(spout["spoutSummary"]) == 4
    (output,) = spout["outputStats"]
    assert output["stream"] == "default" and output["emitted"] >= 200 and output["acked"] >= 199
    bolt = rest.get(f"/topology/{rest.id}/component/{quote('count/all', safe='')}")
    assert (bolt["id"], bolt["tasks"], bolt["topologyId"]) == ("count/all", 1, rest.id)
    (read,) = bolt["inputStats"]
    assert (read["component"], read["stream"]) == ("split", "default") and read["executed"] >= 600
    (executor,) = bolt["executorStats"]
    assert (
        executor["id"] == "[3-3]"
        and executor["host"] == "127.0.0.1"
        and executor["executed"] >= 600
    )
    (error,) = bolt["componentErrors"]
    assert "<b>boom</b>" in error["error"] and error["time"] > 1_600_000_000_000
    split = rest.get(f"/topology/{rest.id}/component/split", window="600")
    assert [one["id"] for one in split["executorStats"]] == ["[1-1]", "[2-2]"]
    assert sum(one["emitted"] for one in split["executorStats"]) == split["boltStats"][0]["emitted"]
    (errors,) = rest.get(f"/topology/{rest.id}/get-errors")["topologyErrors"]
    assert errors["component"] == "count/all"


def test_the_pages_agree_that_all_tuples_are_logged(rest: StormRest) -> None:
    """The share is in percent; ``topology.debug`` logs each tuple."""
    page = rest.get(f"/topology/{rest.id}")
    component = rest.get(f"/topology/{rest.id}/component/split")
    assert (page["debug"], page["samplingPct"]) == (True, 100.0)
    assert (component["debug"], component["samplingPct"]) == (True, 100.0)


def test_metrics_lag_and_graph_name_every_component(rest: StormRest) -> None:
    metrics = rest.get(f"/topology/{rest.id}/metrics")
    (spout,) = metrics["spouts"]
    assert spout["emitted"][0]["stream_id"] == "default"
    count = next(one for one in metrics["bolts"] if one["id"] == "count/all")
    assert count["executed"][0]["component_id"] == "split"
    lag = rest.get(f"/topology/{rest.id}/lag")["lines"]["spoutLagResult"]
    assert (lag["totalLag"], lag["partitions"]) == (0, {"orders[0]": [0, 1.5]})
    shown = rest.http.get(f"/v1/topologies/{rest.id}").json()["components"]
    assert (
        shown["lines"]["lag_by_partition"] == {"orders[0]": [0, 1.5]}
        and not shown["split"]["lag_by_partition"]
    )
    assert "orders[0]" in rest.http.get("/topologies/wc", headers={"Accept": "text/html"}).text
    graph = rest.get(f"/topology/{rest.id}/visualization")
    assert set(graph) == {"lines", "split", "count/all"}
    (edge,) = graph["count/all"][":inputs"]
    assert (edge[":component"], edge[":grouping"]) == ("split", "fields")
    assert graph["split"][":transferred"]["default"] >= 600
    table = rest.get(f"/topology/{rest.id}/visualization-init")["visualizationTable"]
    assert table == [[{":stream": "default", ":sani-stream": "default", ":checked": True}]]


def test_stacks_of_a_worker_come_as_json_and_as_text(rest: StormRest) -> None:
    port = rest.get(f"/topology-workers/{rest.id}")["hostPortList"][0]["port"]
    answer = rest.get(f"/topology/{rest.id}/profiling/dumpjstack/127.0.0.1:{port}")
    assert answer["status"] == "ok" and any(
        "worker/runtime/loop.py" in "".join(s) for s in answer["stacks"].values()
    )
    text = rest.http.get("/logview", params={"cmd": "jstack", "workerPort": port}).text
    assert (
        f"pid {rest.rig.processes[('s1', port)].pid}" in text and "worker/runtime/loop.py" in text
    )
    assert rest.http.get("/logview", params={"cmd": "jstack", "workerPort": 1}).status_code == 404
    assert (
        rest.get(f"/topology/{rest.id}/profiling/dumpheap/127.0.0.1:{port}")["status"] == "disabled"
    )


def test_errors_have_storms_form(rest: StormRest) -> None:
    for method, path, status, kind in (
        ("GET", "/topology/none-1-1", 404, "NotAlive"),
        ("GET", f"/topology/{rest.id}/component/none", 404, "KeyNotFound"),
        ("GET", "/supervisor", 400, "InvalidRequest"),
        ("GET", "/supervisor?id=none", 404, "KeyNotFound"),
        ("POST", "/topology/none-1-1/activate", 404, "NotAlive"),
        ("POST", f"/topology/{rest.id}/kill/-1", 400, "InvalidRequest"),
        ("POST", f"/topology/{rest.id}/kill/soon", 400, "InvalidRequest"),
        ("POST", f"/topology/{rest.id}/debug/enable/10", 400, "InvalidRequest"),
    ):
        answer = rest.http.request(method, f"/api/v1{path}")
        assert answer.status_code == status, answer.text
        assert set(answer.json()) == {"error", "errorMessage"} and answer.json()["error"] == kind
    wrong = rest.http.post(
        f"/api/v1/topology/{rest.id}/rebalance/0",
        json={"rebalanceOptions": {"numWorkers": "many"}},
    )
    assert wrong.status_code == 400


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "http://203.0.113.9"}, False),
        ({"Origin": "http://127.0.0.1:1"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "SELF"}, True),
        ({"Host": "evil.example"}, False),
        ({"Host": ""}, False),
        ({"Host": "localhost"}, True),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "SELF"}, True),
    ],
)
def test_another_sites_page_changes_nothing(
    rest: StormRest, headers: dict[str, str], allowed: bool
) -> None:
    sent = {name: rest.url if value == "SELF" else value for name, value in headers.items()}
    answer = rest.http.post("/api/v1/topology/none-1-1/kill/0", headers=sent)
    # An allowed request gets as far as the topology, which does not exist.
    assert answer.status_code == (404 if allowed else 400), answer.text
    assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_a_link_from_elsewhere_may_be_followed_but_not_embedded(rest: StormRest) -> None:
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert rest.http.get("/api/v1/cluster/summary", headers=followed).status_code == 200
    embedded = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert rest.http.get("/api/v1/cluster/summary", headers=embedded).status_code == 400
    jsonp = rest.http.get("/api/v1/cluster/summary?callback=steal")
    assert jsonp.headers["content-type"] == "application/json" and "steal" not in jsonp.text


def test_actions_without_dagster_are_the_leaders(rest: StormRest) -> None:
    answer = rest.http.post(f"/api/v1/topology/{rest.id}/deactivate")
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "topologyOperation": "deactivate",
        "topologyId": rest.id,
        "status": "success",
    }
    assert rest.get(f"/topology/{rest.id}")["status"] == "INACTIVE"
    assert rest.http.post(f"/api/v1/topology/{rest.id}/activate").status_code == 200
    rebalance = rest.http.post(
        f"/api/v1/topology/{rest.id}/rebalance/0", json={"rebalanceOptions": {"numWorkers": 2}}
    )
    assert rebalance.status_code == 503 and "Dagster" in rebalance.json()["errorMessage"]


def test_levels_of_loggers_are_changed_and_reset(rest: StormRest) -> None:
    path = f"/api/v1/topology/{rest.id}/logconfig"

    def change(level: dict[str, Any]) -> httpx.Response:
        return rest.http.post(path, json={"namedLoggerLevels": {"my.module": level}})

    changed = change({"target_level": "DEBUG", "timeout": 60})
    assert changed.status_code == 200, changed.text
    assert changed.json()["namedLoggerLevels"]["my.module"]["target_level"] == "DEBUG"
    assert change({"target_level": 7}).status_code == 400
    assert change({"target_level": None}).status_code == 200
    eventually(
        lambda: rest.get(f"/topology/{rest.id}/logconfig") == {"namedLoggerLevels": {}},
        timeout=20,
        what="the level of the conf",
    )


def test_a_metric_that_is_not_a_number_is_shown_as_such(rest: StormRest) -> None:
    """JSON has no NaN, and gets a text; Prometheus has it."""
    reported = rest.get(f"/topology/{rest.id}/metrics")["reported"]
    (shares,) = [row["metrics"]["share"] for row in reported if "share" in row["metrics"]]
    assert shares == "NaN"
    text = rest.http.get("/metrics").text
    (line,) = [line for line in text.splitlines() if 'metric="share"' in line]
    assert line.endswith(" NaN")


def test_prometheus_gets_figures_of_topologies_and_slots(rest: StormRest) -> None:
    text = rest.http.get("/metrics").text
    assert 'storm_topology_emitted_total{topology="wc"}' in text
    acked = re.search(r'storm_topology_acked_total\{topology="wc"\} ([0-9.e+]+)', text)
    assert acked is not None and float(acked[1]) >= 199
    assert 'storm_topologies{status="ACTIVE"} 1.0' in text
    assert re.search(r"storm_nimbus_blobs [0-9.]+", text) and "storm_slots_total 3.0" in text
    assert 'storm_topology_workers{topology="wc"} 2.0' in text
    for metric in ("execute_latency_seconds_count", "capacity", "waiting_tuples"):
        assert f'storm_component_{metric}{{component="count/all",topology="wc"}}' in text, metric
    assert (
        'storm_component_complete_latency_seconds_bucket{component="lines",le="+Inf",topology="wc"}'
        in text
    )


def test_bytes_between_workers_are_shown_by_stream(rest: StormRest) -> None:
    """Two workers: at least one of the streams between lines, split and count leaves its worker."""

    def sent() -> dict[str, int]:
        components = rest.http.get("/v1/topologies/wc").json()["components"]
        return {
            f"{name} {stream}": figures["remote_bytes"]
            for name, part in components.items()
            for stream, figures in part["streams"].items()
        }

    eventually(lambda: sum(sent().values()) > 0, 30, "bytes between the two workers")
    assert all("__" not in key for key in sent())
    text = rest.http.get("/metrics").text
    assert "storm_stream_remote_bytes_total{" in text
    page = rest.http.get("/topologies/wc").text
    assert "bytes to other workers" in page


def test_a_supervisor_serves_health_workers_conf_and_logs(rest: StormRest) -> None:
    with httpx.Client(base_url=rest.supervisor, timeout=20, trust_env=False) as http:
        assert http.get("/healthz").json()["id"] == "s1"
        assert http.get("/v1/workers").json() == {"workers": []}
        assert http.post("/v1/workers/6900/restart").status_code == 404
        assert http.post("/v1/workers/x/restart").status_code == 400
        assert (
            http.post(
                "/v1/workers/6900/restart", headers={"Origin": "http://evil.example"}
            ).status_code
            == 400
        )
        conf = http.get("/logview?cmd=showConf").json()
        assert conf["supervisor.http.port"] == 0
        listed = http.get("/logview", params={"cmd": "listDir", "dir": "workers"}).json()
        assert f"workers/{rest.id}" in listed
        assert http.get("/openapi.json").json()["info"]["title"] == "storm_dagster supervisor"


def test_logs_of_another_host_come_from_its_supervisor(rest: StormRest, tmp_path: Path) -> None:
    ports = [pair["port"] for pair in rest.get(f"/topology-workers/{rest.id}")["hostPortList"]]
    seeds = f"nimbus.seeds=[{rest.url.removeprefix('http://')}]"
    # This machine goes by another name than the workers' host.
    elsewhere = ("-c", seeds, "-c", "storm.local.hostname=localhost")
    done = run_cli("logs", "wc", "-n", "5", "--json", *elsewhere, home=tmp_path).check()
    rows = done.document["logs"]
    assert [row["port"] for row in rows] == ports
    for row in rows:
        assert row["lines"] == [f"log of {row['port']}"] and row["log"].startswith(rest.supervisor)
    one = run_cli(
        "logs", "wc", "--worker", f"127.0.0.1:{ports[0]}", *elsewhere, home=tmp_path
    ).check()
    assert one.out == f"log of {ports[0]}\n"
