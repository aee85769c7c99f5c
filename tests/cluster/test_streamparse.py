"""streamparse from PyPI, unchanged: its project, its submission, its components, against a real
cluster.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import streamparse.thrift as storm
from thriftpy2.protocol import TBinaryProtocolFactory
from thriftpy2.rpc import make_client
from thriftpy2.thrift import TApplicationException
from thriftpy2.transport import TFramedTransportFactory

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.testing.cluster import LocalCluster, run_cli
from storm_dagster.testing.waiting import eventually, patience

pytestmark = [
    pytest.mark.long,
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.timeout(600),
]

BIN = Path(sys.executable).parent
NAME = "wordcount"


@pytest.fixture(scope="module")
def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    return shared_cluster


def address(cluster: LocalCluster) -> str:
    """Address of the leader's Thrift service."""
    with cluster.nimbus() as nimbus:
        leader = nimbus.leader()
    return next(each.thrift for each in cluster.endpoints.nimbuses if each.http == leader)


def sparse(cluster: LocalCluster, *args: str, cwd: Path, check: bool = True) -> str:
    """Run ``sparse ARGS``; what it printed."""
    done = subprocess.run(
        [str(BIN / "sparse"), *args],
        cwd=cwd,
        # What streamparse's own documentation names: which nimbus, and that root may run it.
        env={
            **os.environ,
            "LEIN_ROOT": "1",
            "STREAMPARSE_NIMBUS": address(cluster),
            "PYTHONWARNINGS": "ignore",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def project(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``sparse quickstart``, its config for a cluster without SSH, and its ``src`` packed as a
    jar.
    """
    assert shutil.which("lein") is None, "this must work without Leiningen"
    parent = tmp_path_factory.mktemp("projects")
    sparse(cluster, "quickstart", NAME, cwd=parent)
    folder = parent / NAME
    config = json.loads((folder / "config.json").read_text())
    config["envs"]["prod"] |= {"use_ssh_for_nimbus": False, "use_virtualenv": False}
    (folder / "config.json").write_text(json.dumps(config))
    words = folder / "src" / "spouts" / "words.py"
    flood = "        word = next(self.words)"
    assert flood in words.read_text(), "the template has changed"
    # It emits as fast as it can, without ids: it would take the machine from the tests beside it.
    words.write_text(
        "import time\n" + words.read_text().replace(flood, f"        time.sleep(0.004)\n{flood}")
    )
    with zipfile.ZipFile(folder / "wordcount.jar", "w") as jar:
        jar.writestr("META-INF/MANIFEST.MF", "Manifest-Version: 1.0\n")
        for source in sorted((folder / "src").rglob("*.py")):
            jar.write(source, Path("resources") / source.relative_to(folder / "src"))
    return folder


@pytest.fixture
def connect(cluster: LocalCluster) -> Iterator[Callable[[], Any]]:
    """Makes clients as streamparse makes them, its seven seconds of patience included."""
    host, _, port = address(cluster).rpartition(":")
    made: list[Any] = []

    def make() -> Any:
        made.append(
            make_client(
                storm.Nimbus,
                host=host,
                port=int(port),
                proto_factory=TBinaryProtocolFactory(),
                trans_factory=TFramedTransportFactory(),
                timeout=7_000,
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def client(connect: Callable[[], Any]) -> Any:
    return connect()


@pytest.fixture(scope="module")
def submitted(cluster: LocalCluster, project: Path) -> str:
    """Output of ``sparse submit``; the topology runs."""

    def accepted() -> str | None:
        output = sparse(
            cluster, "submit", "-j", "wordcount.jar", "-o", "pystorm.log.level=info", cwd=project, check=False
        )  # fmt: skip
        if "did not answer within" in output:
            return None  # Dagster, on a loaded machine: nimbus says so, and a user tries again.
        assert "Submitting wordcount topology to nimbus...done" in output, output
        # Nimbus answers once the topology is published, or after 6 s: it is listed in both cases.
        listed = sparse(cluster, "list", cwd=project)
        assert NAME in [row["name"] for row in rows_of(listed)], listed
        return output

    output = eventually(accepted, 180, "a submission")
    assert output is not None
    cluster.wait_running(NAME, timeout=180)
    return output


def test_sparse_submits_and_lists(cluster: LocalCluster, project: Path, submitted: str) -> None:
    assert "Submitting wordcount topology to nimbus...done" in submitted
    row = rows_of(sparse(cluster, "list", cwd=project))[0]
    shown = cluster.show(NAME)
    assert (row["id"], row["name"], row["status"]) == (shown["id"], NAME, "ACTIVE")
    assert int(row["num_tasks"]) == len(shown["tasks"])


def test_sparse_lists_and_kills_a_topology_while_it_is_submitted(
    cluster: LocalCluster, project: Path, submitted: str
) -> None:
    """With streamparse's own defaults. The kill cancels the submission, or ends its topology if
    that is published by then.
    """
    name = "second"
    definition = project / "topologies" / f"{name}.py"
    shutil.copy(project / "topologies" / f"{NAME}.py", definition)

    def names() -> list[str]:
        return [row["name"] for row in rows_of(sparse(cluster, "list", cwd=project))]

    try:
        with ThreadPoolExecutor(1) as pool:
            submitting = pool.submit(
                sparse, cluster, "submit", "-j", "wordcount.jar", "-n", name, cwd=project, check=False
            )  # fmt: skip
            eventually(lambda: name in names(), 120, "the submission in the list")
            sparse(cluster, "kill", "-n", name, cwd=project)
            submitting.result()
        eventually(lambda: names() == [NAME], 120, "the end of it")
    finally:
        definition.unlink()


def test_sparse_submits_lists_and_kills_in_the_first_minute(project: Path, tmp_path: Path) -> None:
    """As soon as `dev` says that it is ready, while its Spark still starts."""
    cold = LocalCluster(tmp_path / "home")
    try:
        command = ["dev", "--detach", "--json", "--ports", "auto", "--home", str(cold.home)]
        run_cli(*command, timeout=patience(330)).check()
        sparse(cold, "submit", "-j", "wordcount.jar", cwd=project)
        assert [row["name"] for row in rows_of(sparse(cold, "list", cwd=project))] == [NAME]
        sparse(cold, "kill", "-n", NAME, "--wait", "0", cwd=project)

        def is_gone() -> bool:
            return "No topologies found" in sparse(cold, "list", cwd=project)

        eventually(is_gone, 120, "the end of it")
    finally:
        cold.stop()


def rows_of(printed: str) -> list[dict[str, str]]:
    """The rows of streamparse's list, whose cells are broken over several lines.

    Of several topologies a first table has the values that all have in common.
    """
    _, _, table = printed.rpartition("# Topology-specific values")
    lines = [line for line in table.splitlines() if line.startswith(("|", "+"))]
    rows: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("+"):
            rows.append([])
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[-1] = [
            above + cell for above, cell in zip(rows[-1] or [""] * len(cells), cells, strict=True)
        ]
    head, *found = [row for row in rows if row]
    return [dict(zip(head, row, strict=True)) for row in found]


def test_its_programs_count(cluster: LocalCluster, submitted: str) -> None:
    def counted() -> dict[str, Any] | None:
        shown = cluster.show(NAME)
        figures = shown["components"]
        spout, bolt = figures["word_spout"]["stats"], figures["count_bolt"]["stats"]
        enough = spout["emitted"] > 4_000 and bolt["executed"] > 4_000 and bolt["emitted"] > 4_000
        return shown if enough else None

    shown = eventually(counted, 60, "words counted", ignore=(StormDagsterError,))
    assert shown is not None
    bolts = [task for task in shown["tasks"] if task["component"] == "count_bolt"]
    assert len(bolts) == 2 and all(task["stats"]["executed"] > 0 for task in bolts)
    assert shown["errors"] == []

    workers = [psutil.Process(worker["pid"]) for worker in shown["workers"]]
    children = [child for worker in workers for child in worker.children(recursive=True)]
    lines = [" ".join(child.cmdline()) for child in children]
    assert (
        sum("streamparse_run" in line and "bolts.wordcount.WordCountBolt" in line for line in lines)
        == 2
    )
    assert (
        sum("streamparse_run" in line and "spouts.words.WordSpout" in line for line in lines) == 1
    )

    # The bolt logs how many words it has seen, in its own process, which names itself.
    pids = {child.pid for child in children}

    def logged() -> set[tuple[int, int]]:
        logs = (cluster.home / "logs" / "workers").glob(f"{shown['id']}/*/worker.log")
        text = "".join(log.read_text(errors="replace") for log in logs)
        return {
            (int(n.replace(",", "")), int(pid))
            for n, pid in re.findall(r"counted \[([\d,]+)\] words \[pid=(\d+)\]", text)
        }

    found = eventually(logged, 60, "the bolts' own counts in the workers' logs")
    assert {pid for _, pid in found} <= pids and all(number % 1000 == 0 for number, _ in found)


def test_every_answer_is_read_by_streamparse_s_types(
    client: Any, cluster: LocalCluster, submitted: str
) -> None:
    info = client.getClusterInfo()
    topology = next(row for row in info.topologies if row.name == NAME)
    shown = cluster.show(NAME)
    assert (topology.id, topology.status) == (shown["id"], "ACTIVE")
    assert topology.num_tasks == len(shown["tasks"]) and topology.num_workers == len(
        shown["workers"]
    )
    assert {row.supervisor_id for row in info.supervisors} >= {
        worker["node"] for worker in shown["workers"]
    }
    assert all(row.num_workers == 2 for row in info.supervisors)
    leader = client.getLeader()
    assert leader.isLeader and f"{leader.host}:{leader.port}" == address(cluster)
    assert [(row.host, row.port) for row in info.nimbuses if row.isLeader] == [
        (leader.host, leader.port)
    ]
    assert len(info.nimbuses) == len(cluster.endpoints.nimbuses)

    def with_figures() -> Any:
        got = client.getTopologyInfo(topology.id)
        bolts = [e for e in got.executors if e.component_id == "count_bolt" and e.stats is not None]
        return got if len(bolts) == 2 and all(e.stats.emitted[":all-time"] for e in bolts) else None

    got = eventually(with_figures, 30, "statistics")
    placed = {task["id"]: (task["host"], task["port"]) for task in shown["tasks"]}
    for executor in got.executors:
        assert placed[executor.executor_info.task_start] == (executor.host, executor.port)
    bolt = next(e for e in got.executors if e.component_id == "count_bolt")
    source = storm.GlobalStreamId(componentId="word_spout", streamId="default")
    assert set(bolt.stats.specific.bolt.executed) == {"600", "10800", "86400", ":all-time"}
    assert bolt.stats.specific.bolt.executed[":all-time"][source] > 0
    assert bolt.stats.specific.bolt.execute_ms_avg[":all-time"][source] > 0
    spout = next(e for e in got.executors if e.component_id == "word_spout")
    assert (
        spout.stats.specific.spout is not None and spout.stats.emitted[":all-time"]["default"] > 0
    )
    assert got.errors["count_bolt"] == []
    assert (
        client.getTopologyInfoWithOpts(topology.id, storm.GetInfoOptions(num_err_choice=2)).id
        == topology.id
    )

    page = client.getTopologyPageInfo(topology.id, ":all-time", False)
    assert set(page.id_to_spout_agg_stats) == {"word_spout"} and set(page.id_to_bolt_agg_stats) == {
        "count_bolt"
    }
    assert page.id_to_bolt_agg_stats["count_bolt"].common_stats.num_executors == 2
    assert page.topology_stats.window_to_emitted[":all-time"] > 0
    assert json.loads(page.topology_conf)["topology.name"] == NAME
    assert "__acker" in client.getTopologyPageInfo(topology.id, "600", True).id_to_bolt_agg_stats
    part = client.getComponentPageInfo(topology.id, "count_bolt", ":all-time", False)
    assert part.component_type == storm.ComponentType.BOLT and part.num_tasks == 2
    assert part.gsid_to_input_stats[source].specific_stats.bolt.executed > 0
    assert part.sid_to_output_stats["default"].common_stats.emitted > 0
    assert {e.exec_summary.executor_info.task_start for e in part.exec_stats} == {
        task["id"] for task in shown["tasks"] if task["component"] == "count_bolt"
    }
    node = shown["workers"][0]["node"]
    supervisor = client.getSupervisorPageInfo(node, None, True)
    assert [row.supervisor_id for row in supervisor.supervisor_summaries] == [node]
    assert any(row.topology_id == topology.id for row in supervisor.worker_summaries)

    submitted_as = client.getUserTopology(topology.id)
    assert submitted_as.bolts["count_bolt"].bolt_object.shell.execution_command == "streamparse_run"
    assert (
        "bolts.wordcount.WordCountBolt" in submitted_as.bolts["count_bolt"].bolt_object.shell.script
    )
    assert submitted_as.bolts["count_bolt"].common.inputs[source].fields == ["word"]
    whole = client.getTopology(topology.id)
    assert set(whole.bolts) >= {"count_bolt", "__acker", "__system"} and set(whole.spouts) == {
        "word_spout"
    }
    conf = json.loads(client.getTopologyConf(topology.id))
    assert conf["pystorm.log.level"] == "info" and conf["topology.workers"] >= 1
    assert json.loads(client.getNimbusConf())["storm.cluster.mode"] == "distributed"
    assert topology.id in client.getTopologyHistory(None).topo_ids
    assert client.isTopologyNameAllowed("other") is True
    assert client.isTopologyNameAllowed(NAME) is False


def test_code_blobs_are_seen_and_protected(
    client: Any, cluster: LocalCluster, project: Path, submitted: str
) -> None:
    jar = f"{cluster.show(NAME)['id']}-stormjar.jar"
    assert jar in client.listBlobs("").keys
    assert client.getBlobReplication(jar) == len(cluster.endpoints.nimbuses)
    begun = client.beginBlobDownload(jar)
    received = b"".join(iter(lambda: client.downloadBlobChunk(begun.session), b""))
    assert received == (project / "wordcount.jar").read_bytes() and begun.data_size == len(received)
    assert begun.version == client.getBlobMeta(jar).version
    for call in (lambda: client.deleteBlob(jar), lambda: client.beginUpdateBlob(jar)):
        with pytest.raises(storm.AuthorizationException, match="which exists"):
            call()


def test_names_that_are_taken_or_unknown(
    client: Any, cluster: LocalCluster, project: Path, submitted: str
) -> None:
    location = upload(client, (project / "wordcount.jar").read_bytes())
    topology = client.getUserTopology(cluster.show(NAME)["id"])
    with pytest.raises(storm.AlreadyAliveException, match="alive already"):
        client.submitTopology(NAME, location, "{}", topology)
    hot = json.dumps({"topology.hot.deploy.enable": True})
    with pytest.raises(TApplicationException, match="NotAlive: topology 'nobody'"):
        client.submitTopology("nobody", location, hot, topology)
    with pytest.raises(storm.NotAliveException):
        client.killTopology("nobody")
    with pytest.raises(storm.InvalidTopologyException, match="letters, digits"):
        client.submitTopology("../x", location, "{}", topology)


def upload(client: Any, raw: bytes) -> str:
    location = client.beginFileUpload()
    for start in range(0, len(raw), 307_200):
        client.uploadChunk(location, raw[start : start + 307_200])
    client.finishFileUpload(location)
    return location


def test_of_many_submissions_with_one_name_exactly_one_is_taken(
    cluster: LocalCluster, project: Path, submitted: str, connect: Callable[[], Any]
) -> None:
    first = connect()
    location = upload(first, (project / "wordcount.jar").read_bytes())
    topology = first.getUserTopology(cluster.show(NAME)["id"])

    def submit(_: int) -> str:
        try:
            connect().submitTopology("contested", location, '{"topology.workers": 1}', topology)
        except storm.AlreadyAliveException:
            return "refused"
        except TApplicationException as error:
            assert "did not answer within" in str(error), error
            return "no Dagster"
        return "taken"

    def round_of_submissions() -> list[str] | None:
        with ThreadPoolExecutor(40) as pool:
            results = list(pool.map(submit, range(40)))
        return results if "taken" in results else None

    results = eventually(round_of_submissions, 120, "one submission taken")
    assert results is not None and results.count("taken") == 1
    cluster.wait_running("contested", timeout=180)
    assert [row["name"] for row in cluster.topologies()].count("contested") == 1
    first.killTopologyWithOpts("contested", storm.KillOptions(wait_secs=0))
    eventually(lambda: [row["name"] for row in cluster.topologies()] == [NAME], 60, "the end of it")


def test_log_levels_of_running_workers(client: Any, cluster: LocalCluster, submitted: str) -> None:
    topology_id = cluster.show(NAME)["id"]
    assert client.getLogConfig(topology_id).named_logger_level == {}
    debug = storm.LogLevel(
        action=storm.LogLevelAction.UPDATE, target_log_level="debug", reset_log_level_timeout_secs=3
    )
    warn = storm.LogLevel(action=storm.LogLevelAction.UPDATE, target_log_level="WARN")
    client.setLogConfig(
        topology_id, storm.LogConfig(named_logger_level={"my.logger": debug, "ROOT": warn})
    )
    now = client.getLogConfig(topology_id).named_logger_level
    assert {name: level.target_log_level for name, level in now.items()} == {
        "my.logger": "DEBUG",
        "ROOT": "WARN",
    }
    assert now["my.logger"].reset_log_level_timeout_epoch > 0 and now["ROOT"].reset_log_level
    eventually(
        lambda: set(client.getLogConfig(topology_id).named_logger_level) == {"ROOT"},
        30,
        "the end of DEBUG",
    )
    # A restarted worker has what was changed before it began.
    victim = cluster.show(NAME)["workers"][0]
    os.kill(victim["pid"], signal.SIGKILL)

    def restarted() -> bool:
        workers = cluster.show(NAME)["workers"]
        return all(worker["pid"] not in (None, victim["pid"]) for worker in workers)

    eventually(restarted, 60, "the worker again", ignore=(StormDagsterError,))
    cluster.wait_running(NAME)
    with cluster.nimbus() as nimbus:
        results = nimbus.get(f"/api/v1/topology/{topology_id}/logconfig")
    assert {
        name: level["target_level"] for name, level in results["namedLoggerLevels"].items()
    } == {"ROOT": "WARN"}
    assert client.getLogConfig(topology_id).named_logger_level["ROOT"].target_log_level == "WARN"
    back = storm.LogLevel(action=storm.LogLevelAction.REMOVE)
    client.setLogConfig(topology_id, storm.LogConfig(named_logger_level={"ROOT": back}))
    assert client.getLogConfig(topology_id).named_logger_level == {}
    with pytest.raises(TApplicationException, match="not a log level"):
        loud = storm.LogLevel(action=storm.LogLevelAction.UPDATE, target_log_level="LOUD")
        client.setLogConfig(topology_id, storm.LogConfig(named_logger_level={"x": loud}))


def deployed(
    connect: Callable[[], Any], location: str, conf: dict[str, Any], topology: Any
) -> None:
    """Ask until Dagster takes it: a client of Storm would be told to try again, too."""

    def asked() -> bool:
        try:
            connect().submitTopology(NAME, location, json.dumps(conf), topology)
        except TApplicationException as error:
            if "is still being started" in str(error):
                # Dagster is slow. The launch continues after the response.
                return True
            assert "did not answer within" in str(error), error
            return False
        return True

    eventually(asked, 120, f"a deployment with {conf}", interval=1)


def test_hot_deploy_and_gray_upgrade_over_thrift(
    client: Any, connect: Callable[[], Any], cluster: LocalCluster, project: Path, submitted: str
) -> None:
    before = cluster.show(NAME)
    topology = client.getUserTopology(before["id"])
    location = upload(client, (project / "wordcount.jar").read_bytes())
    # A topology that is upgraded worker by worker has its topology master in a worker of its own.
    conf = {"topology.workers": 3, "topology.master.single.worker": True}
    deployed(connect, location, {**conf, "topology.hot.deploy.enable": True}, topology)

    def replaced() -> bool:
        # Its tasks may run before the last step of the update activates it.
        shown = cluster.show(NAME)
        return shown["id"] != before["id"] and shown["status"] == "ACTIVE"

    eventually(replaced, 180, "the topology replaced", ignore=(StormDagsterError,))
    after = cluster.wait_running(NAME, timeout=180)
    assert [row["name"] for row in cluster.topologies()] == [NAME]
    (old,) = {worker["version"] for worker in after["workers"]}

    newer = project / "newer.jar"
    shutil.copy(project / "wordcount.jar", newer)
    with zipfile.ZipFile(newer, "a") as jar:
        jar.writestr("resources/VERSION", "2")
    location = upload(client, newer.read_bytes())
    deployed(
        connect,
        location,
        {**conf, "topology.upgrade": True, "topology.upgrade.worker.num": 1},
        topology,
    )

    def one_upgraded() -> bool:
        shown = cluster.show(NAME)
        done = list((shown.get("upgrade") or {"workers": {}})["workers"].values())
        return done.count("upgraded") == 1 and all(
            task["status"] == "running" for task in shown["tasks"]
        )

    eventually(one_upgraded, 180, "one upgraded worker", ignore=(StormDagsterError,))
    versions = [worker["version"] for worker in cluster.show(NAME)["workers"]]
    assert versions.count(old) == len(versions) - 1 and len(set(versions)) == 2, (
        "both run side by side"
    )
    cluster.cli("rollback", NAME)
    eventually(
        lambda: {worker["version"] for worker in cluster.show(NAME)["workers"]} == {old}, 120,
        "the former code everywhere", ignore=(StormDagsterError,),
    )  # fmt: skip
    cluster.wait_running(NAME, timeout=120)


def test_thrift_turns_a_topology_off_and_on_and_rebalances_it(
    client: Any, cluster: LocalCluster, submitted: str
) -> None:
    def status() -> str:
        return next(row.status for row in client.getClusterInfo().topologies if row.name == NAME)

    def rebalanced() -> bool:
        try:
            client.rebalance(
                NAME, storm.RebalanceOptions(wait_secs=0, num_executors={"count_bolt": 3})
            )
        except TApplicationException as error:
            if "is REBALANCING" in str(error):
                return True  # the call before this one landed, only its answer did not
            assert "did not answer within" in str(error) or "is still being started" in str(
                error
            ), error
            return False  # Dagster, on a loaded machine: a user tries again.
        return True

    client.deactivate(NAME)
    eventually(lambda: status() == "INACTIVE", 30, "INACTIVE")
    client.activate(NAME)
    eventually(lambda: status() == "ACTIVE", 30, "ACTIVE")
    eventually(rebalanced, 120, "an accepted rebalance")
    eventually(
        lambda: (
            sum(task["component"] == "count_bolt" for task in cluster.wait_running(NAME)["tasks"])
            == 3
        ),
        60,
        "three bolts",
        ignore=(StormDagsterError,),
    )


def test_sparse_kills(cluster: LocalCluster, project: Path, submitted: str) -> None:
    children = [
        child.pid
        for worker in cluster.show(NAME)["workers"]
        for child in psutil.Process(worker["pid"]).children(recursive=True)
    ]
    sparse(cluster, "kill", "-n", NAME, "--wait", "0", cwd=project)
    eventually(lambda: cluster.topologies() == [], 60, "the end of the topology")
    assert "No topologies found" in sparse(cluster, "list", cwd=project)
    eventually(
        lambda: not any(psutil.pid_exists(pid) for pid in children), 30, "the end of its programs"
    )
