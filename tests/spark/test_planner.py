"""Pinned sessions, lost sessions, servers out of reach, dagster-pyspark's resource, the plan verb
on Spark.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model import paths
from storm_dagster.model.errors import Corrupt, Unavailable
from storm_dagster.operations.read.plan_file import plan_text
from storm_dagster.security.spark_remote import (
    add_python_archive,
    host_and_port,
    remote_with_session,
)
from storm_dagster.spark.link import forget_session
from storm_dagster.spark.planner import (
    ClusterSessionIds,
    ConnectPlanner,
    FixedSessionIds,
    _ship_package,
    package_archive,
    pinned_id,
    plan_on_cluster,
)
from storm_dagster.spark.session import open_connect, within
from storm_dagster.spark.warm_up import WARM_BATCH, warm_planner
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.servers.ports import free_port
from storm_rigs.servers.spark_server import SparkServer


@pytest.fixture
def ids(zk_state: ZooKeeperClusterState) -> ClusterSessionIds:
    """Session ids in a real ZooKeeper."""
    zk_state.mkdirs(paths.SPARK_SESSIONS)
    return ClusterSessionIds(zk_state)


@pytest.mark.zookeeper
def test_all_processes_come_to_one_id(
    ids: ClusterSessionIds, zk_state: ZooKeeperClusterState
) -> None:
    first = pinned_id(ids)
    assert pinned_id(ClusterSessionIds(zk_state)) == first
    second = pinned_id(ids, gone=first)
    assert second != first
    # Another one that found the first id gone takes what was written meanwhile.
    assert pinned_id(ids, gone=first) == second
    assert zk_state.get_data_with_version(paths.spark_session("placement")) is not None


@pytest.mark.zookeeper
def test_only_one_of_two_writers_wins(ids: ClusterSessionIds) -> None:
    first, version = pinned_id(ids), 0
    assert ids.replace(str(uuid.uuid4()), version)
    assert not ids.replace(str(uuid.uuid4()), version)
    assert not ids.replace(str(uuid.uuid4()), None)
    kept = ids.read()
    assert kept is not None and kept[0] != first


@pytest.mark.zookeeper
def test_a_damaged_id_is_reported(ids: ClusterSessionIds, zk_state: ZooKeeperClusterState) -> None:
    zk_state.set_data(paths.spark_session("placement"), b"not an id")
    with pytest.raises(Corrupt, match="spark_sessions/placement"):
        ids.read()


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        ("sc://h:1", "sc://h:1/;session_id=I;user_id=storm"),
        ("sc://h:1/", "sc://h:1/;session_id=I;user_id=storm"),
        ("sc://h/;token=t;use_ssl=true", "sc://h/;token=t;use_ssl=true;session_id=I;user_id=storm"),
        ("sc://h:1/;user_id=me", "sc://h:1/;user_id=me;session_id=I"),
        ("sc://h:1/;session_id=J", "sc://h:1/;session_id=J"),
    ],
)
def test_a_url_takes_the_id_of_the_session(remote: str, expected: str) -> None:
    assert remote_with_session(remote, "I") == expected


def test_a_url_gives_host_and_port_or_is_refused() -> None:
    assert host_and_port("sc://h:15/;a=b") == ("h", 15)
    assert host_and_port("sc://h") == ("h", 15002)
    assert host_and_port("sc://[::1]:7") == ("[::1]", 7)
    with pytest.raises(Unavailable, match="write sc://host:port"):
        host_and_port("local[*]")


def test_a_port_on_which_nobody_listens_is_out_of_reach() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    planner = ConnectPlanner(f"sc://127.0.0.1:{port}", FixedSessionIds(str(uuid.uuid4())))
    with pytest.raises(Unavailable, match=r"out of reach .*storm-dagster daemon spark"):
        planner(WARM_BATCH)


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """A port that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    for connection in taken:
        connection.close()


def test_a_server_that_never_answers_is_given_up(deaf_port: int) -> None:
    planner = ConnectPlanner(
        f"sc://127.0.0.1:{deaf_port}", FixedSessionIds(str(uuid.uuid4())), deadline_secs=3.0
    )
    with pytest.raises(Unavailable, match="did not answer within 3 s"):
        planner(WARM_BATCH)


def test_errors_come_through_a_deadline() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(Unavailable, match="it failed"):
        within(5, "it", fail)
    assert within(5, "it", lambda: 7) == 7


def test_the_conf_names_no_spark() -> None:
    with pytest.raises(Unavailable, match=r"set spark\.remote"):
        plan_on_cluster(load_cluster_conf(), None, WARM_BATCH)


def test_a_classic_session_runs_its_functions_in_this_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spark takes ``python3`` of PATH otherwise, which may not have this package: seen with a
    cluster of `spark.master`.
    """
    monkeypatch.setenv("PYSPARK_PYTHON", "")
    monkeypatch.delenv("PYSPARK_PYTHON")
    seen: list[str | None] = []

    def refuse(where: Mapping[str, str]) -> SparkSession:
        seen.append(os.environ.get("PYSPARK_PYTHON"))
        raise Unavailable("enough was seen")

    with pytest.raises(Unavailable, match="enough"):
        plan_on_cluster({"spark.master": "local[1]"}, None, WARM_BATCH, open_session=refuse)
    assert seen == [sys.executable]


@pytest.mark.spark
@pytest.mark.zookeeper
@pytest.mark.timeout(300)
@pytest.mark.long
def test_the_planners_session_is_its_own_and_replaced_once_when_closed(
    spark_remote: str, ids: ClusterSessionIds, zk_connect: Callable[..., object]
) -> None:
    planner = ConnectPlanner(spark_remote, ids)
    first = planner(WARM_BATCH)
    assert first.placements == plan_placement(WARM_BATCH).placements
    # It is nobody else's default, and the next plan takes it.
    assert SparkSession.getActiveSession() is None
    assert first.session_secs > 0
    kept = ids.read()
    assert planner(WARM_BATCH).placements == first.placements
    assert kept is not None and ids.read() == kept
    # Somebody, or its age, ends the session on the server.
    other = open_connect(remote_with_session(spark_remote, kept[0]))
    other.range(1).collect()
    other.client.release_session()
    assert planner(WARM_BATCH).placements == first.placements
    fresh = ids.read()
    assert fresh is not None and fresh[0] != kept[0]
    # A process that starts now finds the old id replaced already.
    assert ConnectPlanner(spark_remote, ids)(WARM_BATCH).placements == first.placements
    assert ids.read() == fresh
    planner.close(release=True)


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_dagster_pyspark_opens_the_session_of_a_plan(spark_remote: str) -> None:
    from dagster_pyspark import LazyPySparkResource

    asked: list[Mapping[str, str]] = []
    sessions: list[SparkSession] = []

    def opened(spark_conf: Mapping[str, str]) -> SparkSession:
        asked.append(spark_conf)
        sessions.append(LazyPySparkResource(spark_config=dict(spark_conf)).spark_session)
        return sessions[-1]

    session_id = str(uuid.uuid4())
    planner = ConnectPlanner(spark_remote, FixedSessionIds(session_id), open_session=opened)
    assert planner(WARM_BATCH).planner == "pyspark"
    assert f"session_id={session_id}" in asked[0]["spark.remote"]
    # The resource hands out one session for ever; another id still gets a session of its own.
    other = ConnectPlanner(spark_remote, FixedSessionIds(str(uuid.uuid4())), open_session=opened)
    assert other(WARM_BATCH).planner == "pyspark"
    other.close(release=True)
    for session in sessions:
        session.stop()


@pytest.mark.spark
@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_a_process_ends_although_its_server_is_gone(tmp_path: Path) -> None:
    """pyspark's exit hook alone would go on asking the dead server for ten minutes."""
    with SparkServer(free_port(), tmp_path) as server:
        code = (
            "import sys, os, signal, uuid\n"
            "from storm_dagster.spark.planner import FixedSessionIds\n"
            "from storm_dagster.spark.planner import ConnectPlanner\n"
            "from storm_dagster.spark.warm_up import WARM_BATCH\n"
            "planner = ConnectPlanner(sys.argv[1], FixedSessionIds(str(uuid.uuid4())))\n"
            "planner(WARM_BATCH)\n"
            "os.kill(int(sys.argv[2]), signal.SIGKILL)\n"
        )
        command = [sys.executable, "-c", code, server.remote, str(server.process.pid)]
        assert subprocess.run(command, timeout=150, check=False).returncode == 0


@pytest.mark.spark
@pytest.mark.zookeeper
@pytest.mark.timeout(300)
@pytest.mark.long
def test_the_session_of_a_cluster_is_warmed_once_and_kept(
    spark_remote: str, zk_state: ZooKeeperClusterState
) -> None:
    cluster = StormClusterState.open(zk_state, create_root=True)
    conf = load_cluster_conf().with_values({"spark.remote": spark_remote}, "test")
    warm_planner(lambda batch: plan_on_cluster(conf, cluster, batch))
    kept = ClusterSessionIds(zk_state).read()
    assert plan_on_cluster(conf, cluster, WARM_BATCH).planner == "pyspark"
    assert ClusterSessionIds(zk_state).read() == kept


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_the_plan_verb_uses_the_clusters_spark(spark_remote: str) -> None:
    conf = load_cluster_conf().with_values({"spark.remote": spark_remote}, "test")
    text = """
supervisors: [{id: s1, ports: [1, 2]}]
topologies: [{name: wc, spouts: {lines: {parallelism: 2}}, conf: {topology.workers: 2}}]
---
supervisors: [{id: s1, ports: [1], used: [1]}]
topologies: [{name: wc, spouts: {lines: {parallelism: 2}}}]
"""
    first, second = plan_text(text, conf=conf)
    assert first["topologies"]["wc"]["status"] == "assigned"
    assert first["seconds"]["assign"] > 0
    assert second["topologies"]["wc"]["error"]["type"] == "Unavailable"


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_the_package_can_be_shipped_to_a_server_that_lacks_it(
    spark_remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = package_archive(tmp_path)
    assert archive == package_archive(tmp_path)
    session, before = open_connect(spark_remote), list(sys.path)
    add_python_archive(session, archive)
    # The same file again, as the next process would send it.
    add_python_archive(session, archive)
    # As a run does it, for a server that is not on loopback: nothing stays in the temporary folder.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    _ship_package(session, "sc://elsewhere:15002")
    assert list((tmp_path / "tmp").iterdir()) == []
    # The archive has a part of this package: a process that multiprocessing starts would import
    # from it.
    assert sys.path == before
    forget_session(session, release=True)
