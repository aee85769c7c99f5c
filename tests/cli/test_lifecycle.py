"""Verbs on a whole cluster whose Spark still starts: submit, show, deactivate, activate, rebalance, kill, jar, stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from storm_dagster.api import TaskState
from storm_dagster.model.errors import AlreadyAlive, InvalidRequest, InvalidTopology, NotAlive, Unavailable
from storm_dagster.testing.cluster import LocalCluster, run_cli
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.chaos.workload import files_below
from storm_rigs.processes import processes_of

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.dagster, pytest.mark.timeout(600)]

WORDCOUNT = Path(__file__).parents[2] / "examples" / "wordcount.py"
SMALL = ["--conf", "wordcount.files=3", "--conf", "wordcount.limit=300"]
SECRET, PASSWORD = "planted-secret-of-the-cluster-4711", "planted-zookeeper-password"
TASK_STATS = {*("emitted", "transferred", "executed", "acked", "failed"), *("execute_ms", "process_ms", "complete_ms")}


class ReadyCluster(LocalCluster):
    """Ready, and no more: a submission waits for Spark by itself."""

    def _warm(self) -> bool:
        return True


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    home = tmp_path_factory.mktemp("verbs") / "home"
    home.mkdir(mode=0o700)
    # A secured cluster: every verb, run, worker and Spark job below proves itself, and the logs tell all they can.
    (home / "storm.yaml").touch(mode=0o600)
    (home / "storm.yaml").write_text(
        f"storm.secret: {SECRET}\nstorm.zookeeper.auth.payload: storm:{PASSWORD}\nstorm.log.level: DEBUG\n"
    )
    with ReadyCluster(home) as made:
        yield made


def test_submit_waits_until_all_tasks_run(cluster: LocalCluster) -> None:
    # Dagster's first run of a busy machine may be launched too late: then the same token is sent again.
    command = (str(WORDCOUNT), "--name", "wc", "--token", "first", "--conf", "topology.workers=2", *SMALL)
    done = eventually(lambda: cluster.cli("submit", *command), 300, "the first submission", ignore=(Unavailable,))
    assert set(done) == {"id", "name", "status", "run_id", "seconds"}
    assert done["name"] == "wc" and done["status"] == "ACTIVE" and done["id"].startswith("wc-")
    shown = cluster.cli("show", "wc")
    assert shown["id"] == done["id"] and len(shown["workers"]) == 2
    assert {"id", "name", "status", "uptime_secs", "workers", "tasks", "components", "errors"} <= set(shown)
    assert all(task["status"] == "running" and set(task["stats"]) >= TASK_STATS for task in shown["tasks"])
    assert cluster.cli("explain", "wc")["planner"] == "pyspark"
    row = cluster.cli("list")["topologies"][0]
    assert set(row) >= {"id", "name", "status", "uptime_secs", "workers", "executors", "tasks"}
    assert row["workers"] == 2 and row["tasks"] == len(shown["tasks"])


def test_pages_and_pictures_show_the_topology(cluster: LocalCluster) -> None:
    svg = cluster.cli("visualize", "wc")["svg"]
    assert svg.startswith("<svg ") and all(f">{name}<" in svg for name in ("lines", "split", "count"))
    with cluster.nimbus() as nimbus:
        assert 'href="/topologies/wc"' in nimbus.request("GET", "/").text
        for path in ("/topologies/wc", "/topologies/wc/placement", "/hosts"):
            assert "split" in nimbus.request("GET", path).text, path
        jobs = nimbus.request("GET", "/topologies/wc").text
    assert f"{cluster.endpoints.dagster.url.rstrip('/')}/locations/storm/jobs/rebalance_topology/playground" in jobs


def test_every_line_is_acked_and_no_task_fails(cluster: LocalCluster) -> None:
    def done() -> bool:
        finished = False
        for path in files_below(cluster.home, "wc/lines/*.sqlite3"):
            state = TaskState(path)
            finished = state.get("total", 0) > 0 and state.get("done") == state.get("total")
            state.close()
        return finished

    eventually(done, 60, "all lines acked", interval=0.2)
    assert cluster.cli("errors", "wc")["errors"] == []


def _family(cluster: LocalCluster) -> list[psutil.Process]:
    found: dict[int, psutil.Process] = {}
    for record in cluster.processes():
        try:
            process = psutil.Process(record.pid)
            found |= {each.pid: each for each in (process, *process.children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def test_everything_listens_on_loopback_only(cluster: LocalCluster) -> None:
    """ZooKeeper, Spark, nimbus, supervisors, workers and Dagster, each with every socket it has."""
    sockets: dict[int, str] = {}
    for process in _family(cluster):
        try:
            links = process.net_connections(kind="inet")
        except psutil.Error:
            continue
        sockets |= {link.laddr.port: link.laddr.ip for link in links if link.status == psutil.CONN_LISTEN}
    ours = cluster.endpoints
    expected = {int(ours.zookeeper.rpartition(":")[2]), int(ours.nimbuses[0].thrift.rpartition(":")[2])}
    expected |= {int(url.rpartition(":")[2]) for url in (ours.nimbuses[0].http, ours.dagster.url, ours.spark.remote)}
    expected |= {worker["port"] for worker in cluster.show("wc")["workers"]}
    assert expected <= set(sockets)
    assert {port: ip for port, ip in sockets.items() if ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")} == {}


def test_no_secret_is_seen_by_others(cluster: LocalCluster) -> None:
    token = (cluster.home / "spark.token").read_text().split()[0]
    for process in _family(cluster):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        assert not any(secret in line for secret in (SECRET, PASSWORD, token)), line
    assert cluster.home.stat().st_mode & 0o077 == 0
    for path in files_below(cluster.home, "*"):
        try:
            raw, mode = path.read_bytes() if path.is_file() else b"", path.stat().st_mode
        except FileNotFoundError:
            continue  # a heartbeat that was just replaced
        if path.name in ("storm.yaml", "SPEC.json", "spark.token"):
            assert mode & 0o077 == 0, path
        else:
            assert not any(secret.encode() in raw for secret in (SECRET, PASSWORD, token)), path
    specs = list(files_below(cluster.home, "workers/*/SPEC.json"))
    assert specs and not any(SECRET in spec.read_text() for spec in specs), "user code never gets the secret"
    for verb in (["conf"], ["conf", "storm.secret"], ["status"], ["show", "wc"]):
        shown = str(cluster.cli(*verb))
        assert SECRET not in shown and PASSWORD not in shown


def test_other_users_of_the_same_machine_are_refused(cluster: LocalCluster) -> None:
    """Another user of the machine reaches loopback too, and knows neither secret nor token."""
    assert httpx.get(f"{cluster.endpoints.nimbuses[0].http}/v1/topologies", trust_env=False).status_code == 401
    zookeeper = cluster.conf.with_values({"storm.zookeeper.auth.payload": None}, "outsider")
    with pytest.raises(InvalidRequest, match="credentials"):
        StormClusterState.open(zookeeper)
    program = (
        "from storm_dagster.spark.session import open_connect; import sys;"
        "print(open_connect(sys.argv[1]).range(3).count())"
    )
    for home, expected in ((cluster.home.parent, False), (cluster.home, True)):
        done = subprocess.run(
            [sys.executable, "-c", program, str(cluster.endpoints.spark.remote)],
            env={**os.environ, "STORM_DAGSTER_HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.stdout.strip() == "3") == expected, done.stderr[-2000:]
        assert expected or "UNAUTHENTICATED" in done.stderr.upper(), done.stderr[-2000:]


def test_the_same_token_is_the_same_topology_and_another_is_refused(cluster: LocalCluster) -> None:
    with pytest.raises(AlreadyAlive):
        cluster.cli("submit", str(WORDCOUNT), "--name", "wc", *SMALL)


def test_a_wrong_conf_is_refused_before_anything_runs(cluster: LocalCluster) -> None:
    done = cluster.cli("submit", str(WORDCOUNT), "--name", "x", "--conf", "topology.wrokers=2", check=False)
    assert done.code == 2 and "topology.workers" in done.document["error"]["message"]
    with pytest.raises(InvalidTopology):
        cluster.cli("submit", str(WORDCOUNT), "--name", "12345", *SMALL)


def test_a_topology_is_deactivated_and_activated_again(cluster: LocalCluster) -> None:
    assert cluster.cli("deactivate", "wc", "--dry-run")["dry_run"] is True
    assert cluster.show("wc")["status"] == "ACTIVE"
    assert cluster.cli("deactivate", "wc")["status"] == "INACTIVE"
    assert cluster.cli("activate", "wc")["status"] == "ACTIVE"


def test_a_rebalance_changes_workers_and_executors(cluster: LocalCluster) -> None:
    done = cluster.cli("rebalance", "wc", "-n", "3", "-w", "0", "-e", "split=3")
    assert done["status"] == "ACTIVE"
    shown = cluster.show("wc")
    assert len(shown["workers"]) == 3
    assert sum(task["component"] == "split" for task in shown["tasks"]) == 3


def test_output_for_people_has_no_traceback(cluster: LocalCluster) -> None:
    for args in (["list"], ["show", "wc"], ["supervisors"], ["nimbuses"], ["status"], ["explain", "wc"]):
        done = run_cli(*args, home=cluster.home).check()
        assert done.out.strip() and "Traceback" not in done.err


def test_a_killed_topology_is_gone_with_its_workers(cluster: LocalCluster) -> None:
    assert cluster.cli("kill", "wc", "-w", "0")["status"] == "KILLED"
    assert cluster.topologies() == []
    with pytest.raises(NotAlive):
        cluster.cli("show", "wc")
    with pytest.raises(NotAlive):
        cluster.cli("kill", "wc")
    eventually(lambda: not cluster.processes("worker"), 60, "the end of its workers")


def test_a_program_submits_itself(cluster: LocalCluster, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "app.jar", "w") as bundle:
        bundle.write(WORDCOUNT, "wordcount.py")
        bundle.writestr(
            "main.py",
            "import sys\nfrom storm_dagster import submit_topology\nfrom wordcount import WordCount\n"
            "conf = {'wordcount.files': 2, 'wordcount.limit': 50}\n"
            "first = submit_topology('one', conf, WordCount, token='t-one')\n"
            "again = submit_topology('one', conf, WordCount, token='t-one', wait=False)\n"
            "print(first.id, first.status, again.sent)\n",
        )
    done = run_cli("jar", str(tmp_path / "app.jar"), "main", home=cluster.home).check()
    topology_id, status, sent = done.out.split()
    assert status == "ACTIVE" and sent == "False"
    assert cluster.show("one")["id"] == topology_id
    cluster.cli("kill", "one", "-w", "0")


def test_an_interrupt_ends_everything(cluster: LocalCluster) -> None:
    """The last test of this cluster."""
    assert len(processes_of(cluster.home)) >= 8
    cluster.kill("dev", number=signal.SIGINT)
    eventually(lambda: not processes_of(cluster.home), 60, "the end of every process")
    assert not (cluster.home / "cluster.json").exists()
