"""The embedded server: its command line, its environment, its life."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from storm_dagster.model.conf import load_cluster_conf
from storm_dagster.model.errors import Unavailable
from storm_dagster.spark.server import (
    SparkServer,
    run,
    settings_of,
    spark_connect_command,
    spark_environment,
    wait_until_ready,
)
from storm_dagster.testing.waiting import eventually


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_server_takes_the_clusters_spark_conf_but_not_where_it_listens() -> None:
    conf = {
        "spark.jars.packages": "g:a:1",
        "spark.sql.ansi.enabled": False,
        "spark.connect.port": 15999,
        "spark.connect.grpc.binding.address": "0.0.0.0",
        "spark.remote": None,
        "storm.zookeeper.root": "/storm",
    }
    assert settings_of(conf) == {"spark.jars.packages": "g:a:1", "spark.sql.ansi.enabled": "false"}


def test_the_command_binds_to_loopback() -> None:
    command = spark_connect_command(15999, memory="512m", local_dir=Path("/x"), conf={"spark.a": "b"})
    assert command[0].endswith("bin/spark-submit")
    assert command[-1] == "spark-internal"
    assert command[command.index("--driver-memory") + 1] == "512m"
    for setting in (
        "spark.connect.grpc.binding.address=127.0.0.1",
        "spark.connect.grpc.binding.port=15999",
        "spark.driver.bindAddress=127.0.0.1",
        "spark.ui.enabled=false",
        "spark.local.dir=/x",
        "spark.a=b",
    ):
        assert setting in command


def test_the_environment_lets_python_workers_import_this_package() -> None:
    environment = spark_environment(
        {"PYTHONPATH": "/a", "SPARK_REMOTE": "sc://elsewhere", "PATH": os.environ["PATH"]}
    )
    root, *rest = environment["PYTHONPATH"].split(os.pathsep)
    assert (Path(root) / "storm_dagster" / "spark" / "assignment" / "place.py").is_file()
    assert rest == ["/a"]
    assert environment["PYSPARK_PYTHON"] == sys.executable
    assert "SPARK_REMOTE" not in environment


def test_java_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(Unavailable, match="Java 17"):
        spark_connect_command(15999)


def test_a_server_that_ends_at_once_is_reported() -> None:
    with subprocess.Popen(["false"]) as process:
        with pytest.raises(Unavailable, match="ended with code 1 while it started"):
            wait_until_ready(1, process, timeout_secs=20)


def test_what_runs_in_python_workers_is_light() -> None:
    """Neither the driver's side nor pydantic is imported where tasks are placed."""
    code = (
        "import sys; from storm_dagster.spark.assignment import allot, demand, place; "
        "print([name for name in ('pyspark', 'pandas', 'pydantic', 'dagster') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.spark
def test_its_python_daemon_has_its_libraries_loaded(spark_server: SparkServer) -> None:
    from storm_dagster.spark.warm_up import warm_up

    warm_up(spark_server.remote)
    commands = []
    for child in psutil.Process(spark_server.process.pid).children(recursive=True):
        try:
            commands.append(" ".join(child.cmdline()))
        except psutil.Error:
            continue  # it ended just now
    assert any("storm_dagster.spark.python_daemon" in command for command in commands), commands


@pytest.mark.spark
@pytest.mark.timeout(400)
def test_it_is_kept_running_until_told_to_stop(tmp_path: Path) -> None:
    stop = threading.Event()
    port = _free_port()
    codes: list[int] = []
    conf = load_cluster_conf()
    daemon = threading.Thread(target=lambda: codes.append(run(conf, tmp_path, stop, port)))
    daemon.start()

    def child() -> psutil.Process | None:
        for process in psutil.Process().children():
            try:
                if f"spark.connect.grpc.binding.port={port}" in " ".join(process.cmdline()):
                    return process
            except psutil.Error:
                continue
        return None

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        eventually(listens, timeout=120, what="the server's port")
        first = child()
        assert first is not None
        # Its Python daemon comes with the first job of the warm-up: the start is over.
        eventually(lambda: first.children(recursive=True), timeout=120, what="the first job")
        first.kill()
        eventually(
            lambda: (other := child()) is not None and other.pid != first.pid and listens(),
            timeout=120,
            what="another server in place of the killed one",
        )
    finally:
        stop.set()
        daemon.join(90)
    assert codes == [0]
    assert not listens()
    assert child() is None
