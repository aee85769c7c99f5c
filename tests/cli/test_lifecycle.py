"""``dev``, verbs on its cluster while Spark still starts, and ``stop``: ready means ready, and no
process is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from kazoo.client import KazooClient

from storm_dagster.cli.dev.ending import family
from storm_dagster.host.endpoints import ClusterFile, DevFile
from storm_dagster.host.processes import RunFile
from storm_dagster.model import paths
from storm_dagster.model.errors import (
    AlreadyAlive,
    InvalidRequest,
    InvalidTopology,
    NotAlive,
    Unavailable,
)
from storm_dagster.model.records import StormBase, encode_record
from storm_dagster.security.settings import zookeeper_payload, zookeeper_tls
from storm_dagster.testing.cluster import LocalCluster, run_cli
from storm_dagster.testing.task_state import read_task_states
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.chaos.lost_leader import submit_while_leader_dies
from storm_rigs.chaos.workload import files_below
from storm_rigs.servers.ensemble import server_mode
from storm_rigs.servers.processes import processes_of

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.dagster, pytest.mark.timeout(600)]

WORDCOUNT = Path(__file__).parents[2] / "examples" / "wordcount.py"
STEADY = f"{WORDCOUNT.parents[1]}/tests/cluster/topologies/steady.py:Steady"
ALONE = ["--conf", "topology.master.single.worker=true"]
SMALL = ["--conf", "wordcount.files=3", "--conf", "wordcount.limit=300"]
SECRET, PASSWORD = "planted-secret-of-the-cluster-4711", "planted-zookeeper-password"
GIVEN = "nimbus.monitor.backstop.secs"
TASK_STATS = {
    *("emitted", "transferred", "executed", "acked", "failed"),
    *("execute_ms", "process_ms", "complete_ms"),
}


class ReadyCluster(LocalCluster):
    """Ready, and no more: a submission waits for Spark by itself."""

    def _warm(self) -> bool:
        return True


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    home = tmp_path_factory.mktemp("verbs") / "home"
    home.mkdir(mode=0o700)
    # A secured cluster: every verb, run, worker and Spark job below proves itself, and the logs
    # tell all they can.
    (home / "storm.yaml").touch(mode=0o600)
    (home / "storm.yaml").write_text(
        f"storm.secret: {SECRET}\nstorm.zookeeper.auth.payload: storm:{PASSWORD}\nstorm.log.level: DEBUG\n"
    )
    with ReadyCluster(home, zookeepers=3, conf={GIVEN: 25}, timeout=400) as made:
        yield made


def test_ready_means_that_everything_answers(cluster: LocalCluster) -> None:
    endpoints = cluster.endpoints
    with cluster.nimbus(patience=0.0) as nimbus:
        assert nimbus.leader() == endpoints.nimbuses[0].http
        seen = nimbus.get("/v1/cluster")
    assert {row["id"] for row in seen["supervisors"]} == {"s1", "s2"}

    tls = zookeeper_tls(cluster.conf)

    def modes() -> list[str]:
        servers = [server.rpartition(":") for server in endpoints.zookeeper.split(",")]
        return sorted(str(server_mode(host, int(port), tls=tls)) for host, _, port in servers)

    # Each is asked for a second; Spark starts meanwhile.
    eventually(
        lambda: modes() == ["follower", "follower", "leader"], 60, "the modes of all servers"
    )
    assert endpoints.dagster is not None
    token = cluster.cli("token", "create", "--scope", "admin", "--expires", "1h")["token"]
    query = {
        "query": "{ repositoriesOrError { ... on RepositoryConnection { nodes { location { name } } } } }"
    }
    url, headers = f"{endpoints.dagster.url}/graphql", {"Authorization": f"Bearer {token}"}
    answer = httpx.post(url, json=query, headers=headers, timeout=60, trust_env=False).json()
    assert answer["data"]["repositoriesOrError"]["nodes"] == [{"location": {"name": "storm"}}]
    document = json.loads((cluster.home / "cluster.json").read_text())
    assert set(document) == {
        *(
            "zookeeper",
            "zookeeper_tls",
            "zookeeper_root",
            "nimbuses",
            "supervisors",
            "dagster",
            "spark",
            "zookeeper_pid",
        )
    }


def test_another_client_reaches_zookeeper_by_the_files_of_home(cluster: LocalCluster) -> None:
    """As ``docs/http.md`` shows it."""
    document = json.loads((cluster.home / "cluster.json").read_text())
    payload = zookeeper_payload(cluster.conf)
    assert payload is not None
    user = payload.splitlines()[0]
    tls = document["zookeeper_tls"]
    client = KazooClient(
        document["zookeeper"],
        timeout=30,
        use_ssl=True,
        ca=tls["ca"],
        certfile=tls["certificate"],
        keyfile=tls["key"],
        auth_data=[("digest", user)],
    )
    client.start(30)
    try:
        node = client.get(f"{document['zookeeper_root']}/cluster_id")
        assert node is not None
        assert node[0].decode() == (cluster.home / "cluster_id").read_text().strip()
    finally:
        client.stop()
        client.close()


def test_status_has_the_tables_that_were_verbs(cluster: LocalCluster) -> None:
    status = cluster.cli("status")
    for table in ("nimbuses", "supervisors"):
        former = run_cli(table, "--json", home=cluster.home).check()
        assert former.document.keys() == {table}
        fields = {frozenset(row) for row in former.document[table]}
        assert fields == {frozenset(row) for row in status[table]} and fields
        assert "use `storm-dagster status`" in former.err
    for_people = run_cli("status", home=cluster.home).check().out
    nimbuses, _, rest = for_people.partition("nimbuses\n")[2].partition("supervisors\n")
    assert all(row["http"] in nimbuses for row in status["nimbuses"]) and "leader" in nimbuses
    assert all(f"{row['id']} " in rest for row in status["supervisors"])
    assert all(f"{row['cpu']} % ({row['cpu_source']})" in rest for row in status["supervisors"])


def test_status_tells_what_runs(cluster: LocalCluster) -> None:
    document = cluster.cli("status")
    assert document["running"] and document["leader"] == cluster.endpoints.nimbuses[0].http
    roles = {row["role"] for row in document["processes"] if row["alive"]}
    assert {
        "dev",
        "zookeeper",
        "nimbus",
        "supervisor",
        "dagster-webserver",
        "dagster-daemon",
    } <= roles


def test_a_sensor_that_cannot_be_there_yet_is_no_trouble(cluster: LocalCluster) -> None:
    findings = cluster.cli("doctor", check=False).document["findings"]
    (row,) = [row for row in findings if row["check"] == "cluster"]
    assert row["state"] == "ok"
    assert "no healing sensor" not in run_cli("status", home=cluster.home).out


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("dagster.location", "elsewhere", ["dagster.location is 'elsewhere'", "'storm'"]),
        (
            "dagster.graphql.url",
            "http://127.0.0.1:9/graphql",
            ["http://127.0.0.1:9/graphql", "set dagster.gr"],
        ),
        *(
            pytest.param(*more, marks=pytest.mark.long)
            for more in (
                (
                    "dagster.graphql.url",
                    "{url}/nothing",
                    ["/nothing", "dagster.graphql.url is the webserver's address"],
                ),
            )
        ),
    ],
)
def test_doctor_names_what_is_wrong_with_dagster(
    cluster: LocalCluster, key: str, value: str, said: list[str]
) -> None:
    assert cluster.endpoints.dagster is not None
    given = f"{key}={value.format(url=cluster.endpoints.dagster.url)}"

    def named() -> bool:
        done = cluster.cli("doctor", "-c", given, check=False)
        (row,) = [row for row in done.document["findings"] if row["check"] == "Dagster"]
        assert done.code == 4 and row["state"] == "broken"
        return all(words in row["found"] for words in said)

    # A Dagster that takes longer than doctor waits is named otherwise.
    eventually(named, 120, f"words {said}")


def test_doctor_asks_whether_the_invariants_hold(cluster: LocalCluster) -> None:
    sound = cluster.cli("doctor", "--invariants", "--settle", "1")
    assert sound["ok"] and sound["violations"] == [] and sound["looks"] >= 2
    assert set(sound["rules"].values()) == {f"I{number}" for number in range(1, 9)}
    base = StormBase(
        name="ghost",
        launch_time_secs=0,
        status="ACTIVE",
        workers=1,
        executors={"a": 1},
        token="nobody",
    )
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
    assert (
        "no task table and no assignment" in ghost["reason"]
        and "submit it again" in ghost["remedy"]
    )


def test_a_second_dev_is_refused(cluster: LocalCluster) -> None:
    done = cluster.cli("dev", "--home", str(cluster.home), "--ports", "auto", check=False)
    assert done.code == 3 and done.document["error"]["type"] == "Conflict"
    assert "storm-dagster stop" in done.document["error"]["message"]


def test_conf_given_to_dev_reaches_clients(cluster: LocalCluster) -> None:
    assert cluster.cli("conf", GIVEN)["conf"][GIVEN]["value"] == 25


def test_submit_waits_until_all_tasks_run(cluster: LocalCluster) -> None:
    # Dagster's first run of a busy machine may be launched too late: then the same token is sent
    # again.
    command = (
        str(WORDCOUNT),
        "--name",
        "wc",
        "--token",
        "first",
        "--conf",
        "topology.workers=2",
        *SMALL,
        *ALONE,
    )
    done = eventually(
        lambda: cluster.cli("submit", *command), 300, "the first submission", ignore=(Unavailable,)
    )
    kept = {"id", "name", "status", "run_id", "seconds"}
    assert set(done) == kept | {"outcome", "moved", "summary", "warnings"}
    assert done["name"] == "wc" and done["status"] == "ACTIVE" and done["id"].startswith("wc-")
    shown = cluster.cli("show", "wc")
    assert shown["id"] == done["id"] and len(shown["workers"]) == 3, (
        "its own two, and the topology master's"
    )
    assert {
        "id",
        "name",
        "status",
        "uptime_secs",
        "workers",
        "tasks",
        "components",
        "errors",
    } <= set(shown)
    assert all(
        task["status"] == "running" and set(task["stats"]) >= TASK_STATS for task in shown["tasks"]
    )
    assert cluster.cli("explain", "wc")["planner"] == "pyspark"
    row = cluster.cli("list")["topologies"][0]
    assert set(row) >= {"id", "name", "status", "uptime_secs", "workers", "executors", "tasks"}
    assert row["workers"] == 3 and row["tasks"] == len(shown["tasks"])


def test_pages_and_pictures_show_the_topology(cluster: LocalCluster) -> None:
    svg = cluster.cli("visualize", "wc")["svg"]
    assert svg.startswith("<svg ") and all(
        f">{name}<" in svg for name in ("lines", "split", "count")
    )
    with cluster.nimbus() as nimbus:
        assert 'href="/topologies/wc"' in nimbus.request("GET", "/").text
        for path in ("/topologies/wc", "/topologies/wc/placement", "/hosts"):
            assert "split" in nimbus.request("GET", path).text, path
        jobs = nimbus.request("GET", "/topologies/wc").text
    assert (
        f"{cluster.endpoints.dagster.url.rstrip('/')}/locations/storm/jobs/rebalance_topology/playground"
        in jobs
    )


def test_every_line_is_acked_and_no_task_fails(cluster: LocalCluster) -> None:
    def done() -> bool:
        states = read_task_states(cluster.home, "wc", "lines").values()
        return bool(states) and all(
            state.get("total", 0) > 0 and state.get("done") == state.get("total")
            for state in states
        )

    eventually(done, 60, "all lines acked", interval=0.2)
    assert cluster.cli("errors", "wc")["errors"] == []


def test_doctor_finds_it_well(cluster: LocalCluster) -> None:
    def broken() -> list[dict[str, object]]:
        findings = cluster.cli("doctor", check=False).document["findings"]
        return [row for row in findings if row["state"] == "broken"]

    # It gives each service a second or two, of which a busy machine may need more.
    eventually(lambda: not broken(), 120, "nothing broken")


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
        sockets |= {
            link.laddr.port: link.laddr.ip for link in links if link.status == psutil.CONN_LISTEN
        }
    ours = cluster.endpoints
    expected = {
        int(ours.zookeeper.rpartition(":")[2]),
        int(ours.nimbuses[0].thrift.rpartition(":")[2]),
    }
    expected |= {
        int(url.rpartition(":")[2])
        for url in (ours.nimbuses[0].http, ours.dagster.url, ours.spark.remote)
    }
    expected |= {worker["port"] for worker in cluster.show("wc")["workers"]}
    assert expected <= set(sockets)
    assert {
        port: ip
        for port, ip in sockets.items()
        if ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")
    } == {}


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
    assert specs and not any(SECRET in spec.read_text() for spec in specs), (
        "user code never gets the secret"
    )
    for verb in (["conf"], ["conf", "storm.secret"], ["status"], ["show", "wc"]):
        shown = str(cluster.cli(*verb))
        assert SECRET not in shown and PASSWORD not in shown


def test_other_users_of_the_same_machine_are_refused(cluster: LocalCluster) -> None:
    """Another user of the machine reaches loopback too, and knows neither secret nor token."""
    url = f"{cluster.endpoints.nimbuses[0].http}/v1/topologies"
    assert httpx.get(url, timeout=60, trust_env=False).status_code == 401
    zookeeper = cluster.conf.with_values({"storm.zookeeper.auth.payload": None}, "outsider")
    with pytest.raises(InvalidRequest, match="credentials"):
        StormClusterState.open(zookeeper)
    program = (
        "from storm_dagster.security.spark_remote import with_spark_token; import sys;"
        "from storm_dagster.spark.session import open_connect;"
        "print(open_connect(with_spark_token(sys.argv[1], sys.argv[1:])).range(3).count())"
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
    done = cluster.cli(
        "submit", str(WORDCOUNT), "--name", "x", "--conf", "topology.wrokers=2", check=False
    )
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
    assert len(shown["workers"]) == 4
    assert sum(task["component"] == "split" for task in shown["tasks"]) == 3


def test_an_upgrade_replaces_one_worker_and_then_the_others(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    def workers(status: str) -> list[dict[str, Any]] | None:
        """Those of the topology's own tasks, once it has that status and each shows the version of
        its code.
        """
        shown = cluster.show("wc")
        master = next(
            task["id"] for task in shown["tasks"] if task["component"] == "__topology_master"
        )
        found = [worker for worker in shown["workers"] if master not in worker["tasks"]]
        return (
            found
            if shown["status"] == status and all(worker["version"] for worker in found)
            else None
        )

    def versions(status: str) -> list[str]:
        found = eventually(
            lambda: workers(status), 120, f"wc {status}", ignore=(Unavailable,), interval=0.2
        )
        return [worker["version"] for worker in found or ()]

    (old,) = set(versions("ACTIVE"))
    newer = tmp_path / "wordcount.py"
    newer.write_text(WORDCOUNT.read_text() + "\nVERSION = 2\n")
    assert cluster.cli("gray-upgrade", "wc", str(newer), "-n", "1")["status"] == "UPGRADING"
    assert sorted(version == old for version in versions("UPGRADING")) == [False, True, True]
    # One that was not upgraded comes back with the former code.
    victim = next(worker for worker in workers("UPGRADING") or () if worker["version"] == old)
    os.kill(victim["pid"], signal.SIGKILL)

    def again() -> bool:
        same = [worker for worker in workers("UPGRADING") or () if worker["port"] == victim["port"]]
        return [worker["version"] for worker in same] == [old] and same[0]["pid"] not in (
            None,
            victim["pid"],
        )

    eventually(again, 60, "the killed worker with the former code", ignore=(Unavailable,))
    cluster.cli("gray-upgrade", "wc", "-n", "9")
    assert old not in versions("ACTIVE")


def test_output_for_people_has_no_traceback(cluster: LocalCluster) -> None:
    for args in (
        ["list"],
        ["show", "wc"],
        ["status"],
        ["explain", "wc"],
    ):
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


def test_a_submission_outlives_a_kill_of_the_only_nimbus(cluster: LocalCluster) -> None:
    """At each of its assets, and with a follower: ``cluster/test_leader_lost.py``."""
    submit_while_leader_dies(cluster, STEADY, name="lost", token="t-lost", stage="assignment")
    cluster.cli("kill", "lost", "-w", "0")


@pytest.mark.long
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
    eventually(
        lambda: cluster.endpoints.nimbuses[0].pid != before.nimbuses[0].pid,
        10,
        "the new pid in the file",
    )


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
    # The next dev of this HOME takes the same ports.
    remembered = DevFile.read(cluster.home)
    assert remembered.conf[GIVEN] == 25 and remembered.ports["webserver"]
    assert (cluster.home / "dev.json").stat().st_mode & 0o777 == 0o600
