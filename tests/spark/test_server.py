"""The embedded server: its command line, its environment, its life."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from storm_dagster.model.errors import Unavailable
from storm_dagster.spark.link import forget_session
from storm_dagster.spark.server import (
    settings_of,
    spark_connect_command,
    spark_environment,
    sweep_local_dir,
)
from storm_dagster.spark.session import open_connect
from storm_rigs.servers.ports import free_port
from storm_rigs.servers.spark_server import SparkServer, wait_until_ready


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


def test_the_settings_bind_to_loopback_and_stand_in_a_private_file(tmp_path: Path) -> None:
    given = {"spark.a": "b", "spark.hadoop.fs.s3a.secret.key": "planted\\n"}
    command = spark_connect_command(15999, tmp_path / "spark", memory="512m", conf=given)
    assert command[0].endswith("bin/spark-submit")
    assert command[-1] == "spark-internal"
    path = Path(command[command.index("--properties-file") + 1])
    settings = path.read_text().splitlines()
    assert command[command.index("--driver-memory") + 1] == "512m"
    for setting in (
        "spark.connect.grpc.binding.address=127.0.0.1",
        "spark.connect.grpc.binding.port=15999",
        "spark.driver.bindAddress=127.0.0.1",
        "spark.ui.enabled=false",
        "spark.authenticate=true",
        f"spark.local.dir={tmp_path}/spark",
        "spark.a=b",
        r"spark.hadoop.fs.s3a.secret.key=planted\\n",
    ):
        assert setting in settings
    assert "planted" not in str(command) and path.stat().st_mode & 0o777 == 0o600
    assert any(f'"-Djava.io.tmpdir={tmp_path}/spark"' in each for each in settings), (
        "Spark's own would stay in /tmp"
    )


def test_the_python_daemon_has_no_port_with_a_short_path() -> None:
    with TemporaryDirectory(dir="/tmp") as short:
        # Spark itself refuses what is longer than 60.
        most, long = (Path(short) / ("d" * (length - len(short) - 1)) for length in (60, 61))
        for folder, master, enabled in (
            (most, "local[*]", True),
            (long, "spark://127.0.0.1:1", False),
        ):
            command = spark_connect_command(15999, folder, master=master)
            settings = (
                Path(command[command.index("--properties-file") + 1]).read_text().splitlines()
            )
            assert ("spark.python.unix.domain.socket.enabled=true" in settings) is enabled
            assert (f"spark.python.unix.domain.socket.dir={folder}" in settings) is enabled


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.skipif(
    sys.platform != "linux", reason="a folder has a short name where there is /proc"
)
def test_the_python_daemon_has_no_port_with_a_long_path(tmp_path: Path) -> None:
    from storm_dagster.spark.warm_up import warm_up

    folder = tmp_path / ("d" * 100)
    with SparkServer(free_port(), folder) as server:
        warm_up(server.remote)
        children = psutil.Process(server.process.pid).children(recursive=True)
        daemons = [
            child
            for child in children
            if "storm_dagster.spark.python_daemon" in " ".join(child.cmdline())
        ]
        assert daemons
        for child in children:
            assert [
                one for one in child.net_connections("inet") if one.status == psutil.CONN_LISTEN
            ] == []
        assert any(child.net_connections("unix") for child in daemons)
        sockets = [one for one in folder.iterdir() if one.is_socket()]
        assert sockets and all(folder.stat().st_uid == os.geteuid() for one in sockets)


def test_what_killed_servers_left_is_removed(tmp_path: Path) -> None:
    for name in ("artifacts-1", "spark-1", "blockmgr-1", "warehouse"):
        (tmp_path / "spark" / name / "x").mkdir(parents=True)
    sweep_local_dir(tmp_path / "spark")
    sweep_local_dir(tmp_path / "new")
    assert [each.name for each in (tmp_path / "spark").iterdir()] == ["warehouse"] and (
        tmp_path / "new"
    ).is_dir()


def test_the_environment_lets_python_workers_import_this_package(tmp_path: Path) -> None:
    environment = spark_environment(
        tmp_path, {"PYTHONPATH": "/a", "SPARK_REMOTE": "sc://elsewhere", "PATH": os.environ["PATH"]}
    )
    root, *rest = environment["PYTHONPATH"].split(os.pathsep)
    assert (Path(root) / "storm_dagster" / "spark" / "assignment" / "groups.py").is_file()
    assert rest == ["/a"]
    assert environment["PYSPARK_PYTHON"] == sys.executable
    assert "SPARK_REMOTE" not in environment


def test_java_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(Unavailable, match="Java 17"):
        spark_connect_command(15999, tmp_path)


def test_a_server_that_ends_at_once_is_reported() -> None:
    with subprocess.Popen(["false"]) as process:
        with pytest.raises(Unavailable, match="ended with code 1 while it started"):
            wait_until_ready(1, process, timeout_secs=20)


def test_what_runs_in_python_workers_is_light() -> None:
    """Beside pyarrow, tasks are placed by the standard library alone: a server elsewhere may have
    no more than that.
    """
    code = (
        "import sys, pyarrow; before = set(sys.modules); "
        "from storm_dagster.spark.assignment import groups; "
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(names - sys.stdlib_module_names - {'storm_dagster'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.spark
def test_its_python_processes_import_the_installed_package_and_no_archive_of_sources(
    spark_remote: str,
) -> None:
    """What Python imports from an archive it compiles each time."""
    session: Any = open_connect(spark_remote)

    def places(batches: Any) -> Any:
        import sys

        import pyarrow
        import pyspark

        yield pyarrow.RecordBatch.from_pydict({"place": [pyspark.__file__, *sys.path]})

    found = [row.place for row in session.range(1).mapInArrow(places, "place string").collect()]
    forget_session(session, release=True)
    import pyspark

    assert found[0] == pyspark.__file__
    assert not [place for place in found if place.endswith("pyspark.zip") and Path(place).exists()]


@pytest.mark.spark
@pytest.mark.long
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
