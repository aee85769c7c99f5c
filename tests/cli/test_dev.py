"""``dev`` and ``stop`` with real daemons: ready means ready, and no process is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from storm_dagster.cli.dev.ending import family
from storm_dagster.model import paths
from storm_dagster.model.endpoints import ClusterFile
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.processes import RunFile
from storm_dagster.model.records import StormBase, encode_record
from storm_dagster.testing.cluster import LocalCluster, run_cli
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.ensemble import server_mode
from storm_rigs.processes import processes_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
# An address where nothing listens: then dev starts no Spark of its own, which these tests do not need.
NO_SPARK = {"spark.remote": "sc://127.0.0.1:9"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("dev") / "home", zookeepers=3, conf=NO_SPARK) as made:
        yield made


def test_ready_means_that_everything_answers(cluster: LocalCluster) -> None:
    endpoints = cluster.endpoints
    with cluster.nimbus(patience=0.0) as nimbus:
        assert nimbus.leader() == endpoints.nimbuses[0].http
        seen = nimbus.get("/v1/cluster")
    assert {row["id"] for row in seen["supervisors"]} == {"s1", "s2"}
    servers = endpoints.zookeeper.split(",")
    modes = [server_mode(server.rpartition(":")[0], int(server.rpartition(":")[2])) for server in servers]
    assert sorted(map(str, modes)) == ["follower", "follower", "leader"]
    assert endpoints.dagster is not None
    query = {"query": "{ repositoriesOrError { ... on RepositoryConnection { nodes { location { name } } } } }"}
    answer = httpx.post(f"{endpoints.dagster.url}/graphql", json=query, trust_env=False).json()
    assert answer["data"]["repositoriesOrError"]["nodes"] == [{"location": {"name": "storm"}}]
    document = json.loads((cluster.home / "cluster.json").read_text())
    assert set(document) == {
        *("zookeeper", "zookeeper_root", "nimbuses", "supervisors", "dagster", "spark", "zookeeper_pid")
    }


def test_status_tells_what_runs(cluster: LocalCluster) -> None:
    document = cluster.cli("status")
    assert document["running"] and document["leader"] == cluster.endpoints.nimbuses[0].http
    roles = {row["role"] for row in document["processes"] if row["alive"]}
    assert {"dev", "zookeeper", "nimbus", "supervisor", "dagster-webserver", "dagster-daemon"} <= roles


def test_doctor_finds_it_well(cluster: LocalCluster) -> None:
    findings = cluster.cli("doctor", check=False).document["findings"]
    # Spark was left out on purpose.
    assert [row["check"] for row in findings if row["state"] == "broken"] == ["Spark"]


def test_a_sensor_that_cannot_be_there_yet_is_no_trouble(cluster: LocalCluster) -> None:
    findings = cluster.cli("doctor", check=False).document["findings"]
    (row,) = [row for row in findings if row["check"] == "cluster"]
    assert row["state"] == "ok"
    assert "no healing sensor" not in run_cli("status", home=cluster.home).out


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("dagster.location", "elsewhere", ["dagster.location is 'elsewhere'", "'storm'"]),
        ("dagster.repository", "other", ["dagster.repository is 'other'", "__repository__"]),
        ("dagster.graphql.url", "http://127.0.0.1:9/graphql", ["http://127.0.0.1:9/graphql", "set dagster.gr"]),
        ("dagster.graphql.url", "{url}/nothing", ["/nothing", "dagster.graphql.url is the webserver's address"]),
    ],
)  # fmt: skip
def test_doctor_names_what_is_wrong_with_dagster(cluster: LocalCluster, key: str, value: str, said: list[str]) -> None:
    assert cluster.endpoints.dagster is not None
    given = f"{key}={value.format(url=cluster.endpoints.dagster.url)}"
    done = cluster.cli("doctor", "-c", given, check=False)
    (row,) = [row for row in done.document["findings"] if row["check"] == "Dagster"]
    assert done.code == 4 and row["state"] == "broken"
    assert all(words in row["found"] for words in said), row


def test_doctor_asks_whether_the_invariants_hold(cluster: LocalCluster) -> None:
    sound = cluster.cli("doctor", "--invariants", "--settle", "1")
    assert sound["ok"] and sound["violations"] == [] and sound["looks"] >= 2
    assert set(sound["rules"].values()) == {f"I{number}" for number in range(1, 9)}
    base = StormBase(name="ghost", launch_time_secs=0, status="ACTIVE", workers=1, executors={"a": 1}, token="nobody")
    path = paths.topology("ghost-1-1700000000")
    with StormClusterState.open(cluster.conf.values) as state:
        state.state.create_node(path, encode_record(base))
        try:
            done = cluster.cli("doctor", "--invariants", "--settle", "1", check=False)
        finally:
            state.state.delete_node(path)
    assert done.code == 6 and not done.document["ok"]
    found = {(row["invariant"], row["rule"]): row for row in done.document["violations"]}
    assert {("I3", "base_implies_published"), ("I4", "blobs_present")} <= found.keys()
    ghost = found["I3", "base_implies_published"]
    assert ghost["thing"] == "topology ghost-1-1700000000"
    assert "no task table and no assignment" in ghost["reason"] and "submit it again" in ghost["remedy"]


def test_a_second_dev_is_refused(cluster: LocalCluster) -> None:
    done = cluster.cli("dev", "--home", str(cluster.home), "--ports", "auto", check=False)
    assert done.code == 3 and done.document["error"]["type"] == "Conflict"
    assert "storm-dagster stop" in done.document["error"]["message"]


def test_conf_given_to_dev_reaches_clients(cluster: LocalCluster) -> None:
    conf = cluster.cli("conf", "spark.remote")["conf"]["spark.remote"]
    assert conf["value"] == NO_SPARK["spark.remote"]


def test_a_daemon_that_dies_is_started_again_on_its_ports(cluster: LocalCluster) -> None:
    before = cluster.endpoints
    for role in ("nimbus", "zookeeper"):
        old = cluster.kill(role)

        def restarted(role: str = role, old: RunFile = old) -> bool:
            new = cluster.processes(role)
            return bool(new) and new[0].pid != old.pid

        eventually(restarted, 30, f"a new {role}")

    def leads() -> bool:
        with cluster.nimbus(patience=0.0) as nimbus:
            try:
                return nimbus.get("/healthz")["leader"]
            except Unavailable:
                return False

    eventually(leads, 60, "a leader again")
    after = cluster.endpoints
    assert after.zookeeper == before.zookeeper and after.nimbuses[0].http == before.nimbuses[0].http
    eventually(lambda: cluster.endpoints.nimbuses[0].pid != before.nimbuses[0].pid, 10, "the new pid in the file")


def test_stop_ends_what_a_killed_dev_left(cluster: LocalCluster) -> None:
    """The last test of this cluster."""
    cluster.kill("dev")
    assert len(family(cluster.home, RunFile.read_all(cluster.home))) >= 6
    done = cluster.cli("dev", "--home", str(cluster.home), "--ports", "auto", check=False)
    assert done.code == 3 and "earlier cluster" in done.document["error"]["message"]
    assert cluster.cli("stop")["ended"] >= 6
    assert processes_of(cluster.home) == []
    assert list((cluster.home / "run").iterdir()) == []
    assert ClusterFile.read(cluster.home) is None


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(tmp_path: Path, number: int) -> None:
    """Also for a ``dev &`` of a script, to whose children the shell gives an ignored SIGINT."""
    home = tmp_path / "home"
    pid_file = tmp_path / "pid"
    out = tmp_path / "out"
    options = f"--json --ports auto --home {home} -c spark.remote={NO_SPARK['spark.remote']} --supervisors 1"
    script = (
        f"{sys.executable} -m storm_dagster dev {options} > {out} 2> {tmp_path / 'err'} & echo $! > {pid_file}; wait"
    )
    shell = subprocess.Popen(["bash", "-c", script], start_new_session=True)
    try:
        eventually(lambda: out.exists() and out.read_text().rstrip().endswith("}"), 200, "the cluster", interval=0.2)
        assert json.loads(out.read_text())["supervisors"][0]["id"] == "s1"
        assert len(processes_of(home)) >= 5
        os.kill(int(pid_file.read_text()), number)
        shell.wait(60)
        assert processes_of(home) == []
        assert not (home / "cluster.json").exists()
    finally:
        if shell.poll() is None:
            shell.terminate()
            shell.wait()
        run_cli("stop", home=home)
