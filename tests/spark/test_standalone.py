"""A Spark standalone cluster of pyspark's jars: its command lines, its secret, what the command
line refuses.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from storm_dagster.cli.dev.options import DevOptions
from storm_dagster.cli.dev.plan import ClusterPlan
from storm_dagster.cli.dev.ports import choose_ports
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.host.endpoints import DevFile
from storm_dagster.model.errors import Unavailable
from storm_dagster.security.spark_remote import derived_spark_token, spark_token, standalone_secret
from storm_dagster.spark import server
from storm_dagster.spark.server import (
    settings_of,
    spark_connect_command,
    standalone_command,
    standalone_environment,
)
from storm_dagster.testing.cluster import run_cli

MASTER = "spark://127.0.0.1:7077"


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def settings(command: list[str]) -> dict[str, str]:
    lines = Path(option(command, "--properties-file")).read_text(encoding="utf-8").splitlines()
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


@pytest.mark.parametrize("role", ["master", "worker"])
def test_master_and_worker_authenticate_on_loopback_and_show_no_page(
    role: Literal["master", "worker"], tmp_path: Path
) -> None:
    folder = tmp_path / role
    command = standalone_command(role, folder, "planted", port=7077, worker=(MASTER, 2, "512m"))
    assert command[1] == f"org.apache.spark.deploy.{role}.{role.title()}"
    assert (
        option(command, "--host"),
        option(command, "--port"),
        option(command, "--webui-port"),
    ) == (*("127.0.0.1", "7077", "0"),)
    path = Path(option(command, "--properties-file"))
    assert path.stat().st_mode & 0o777 == 0o600 and "planted" not in str(command)
    found = settings(command)
    assert found["spark.authenticate"] == found["spark.network.crypto.enabled"] == "true"
    assert (
        found["spark.authenticate.secret"] == "planted"
        and found["spark.master.rest.enabled"] == "false"
    )
    assert found["spark.ui.filters"] == "org.apache.spark.ui.JWSFilter", "every request is refused"
    if role == "worker":
        assert command[-1] == MASTER and option(command, "--work-dir") == str(folder)
        assert (option(command, "--cores"), option(command, "--memory")) == ("2", "512m")
    asked = standalone_command(role, folder, "planted", ui_port=8080)
    assert option(asked, "--webui-port") == "8080" and "spark.ui.filters" not in settings(asked)
    environment = standalone_environment(folder)
    # Spark's web UI listens there.
    assert environment["SPARK_LOCAL_IP"] == "127.0.0.1" and "PYSPARK_PYTHON" in environment


def test_a_page_that_cannot_be_closed_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "spark_home", lambda: tmp_path / "pyspark")
    with pytest.raises(
        Unavailable,
        match="pyspark has no jjwt jars, which close Spark's web UI: use a newer one, or --ui-port",
    ):
        standalone_command("master", tmp_path / "master", "planted")
    assert list(tmp_path.iterdir()) == []
    assert (
        option(
            standalone_command("master", tmp_path / "master", "planted", ui_port=8080),
            "--webui-port",
        )
        == "8080"
    )


def test_the_connect_server_uses_the_master_of_the_conf(tmp_path: Path) -> None:
    given = {"spark.connect.master": MASTER}
    assert settings_of(given) == {}
    conf = {"spark.authenticate.secret": "planted"}
    command = spark_connect_command(15999, tmp_path, conf=conf, master=MASTER)
    assert option(command, "--master") == MASTER and "planted" not in str(command)
    found = settings(command)
    assert (
        found["spark.authenticate.secret"] == "planted"
        and found["spark.network.crypto.enabled"] == "true"
    )
    alone = spark_connect_command(15999, tmp_path)
    assert option(
        alone, "--master"
    ) == "local[*]" and "spark.network.crypto.enabled" not in settings(alone)
    assert load_cluster_conf(tmp_path)["spark.connect.master"] == "local[*]"


def test_the_secret_is_the_clusters_or_that_of_one_home(tmp_path: Path) -> None:
    conf = load_cluster_conf(tmp_path)
    (tmp_path / "other").mkdir()
    own = standalone_secret(conf, tmp_path)
    assert own == standalone_secret(conf, tmp_path) != standalone_secret(conf, tmp_path / "other")
    assert own != spark_token(conf, tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("a secret of the cluster\n", encoding="utf-8")
    secret.chmod(0o600)
    shared = load_cluster_conf(tmp_path, {"storm.secret.file": str(secret)})
    derived = standalone_secret(shared, tmp_path)
    assert derived == standalone_secret(shared, tmp_path / "other") != own
    assert derived != derived_spark_token(shared), "who may use Spark is no member of its cluster"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["worker"], "spark.connect.master is 'local[*]'"),
        (["master", "--cores", "2"], "--cores is not an option of `daemon spark master`"),
        (["--port", "7077"], "--port is not an option of `daemon spark connect`"),
        (
            ["worker", "--warm-up", "sc://127.0.0.1:9"],
            "--warm-up is not an option of `daemon spark worker`",
        ),
        (["master", "--host", "0.0.0.0"], "storm.bind.external=true and storm.secret.file"),
    ],
)
def test_what_cannot_be_meant_is_refused(args: list[str], said: str, tmp_path: Path) -> None:
    done = run_cli("daemon", "spark", "--json", *args, home=tmp_path)
    assert done.code == 2 and said in done.document["error"]["message"]


def plan(home: Path, **options: Any) -> ClusterPlan:
    chosen, conf = DevOptions(ports="auto", **options), load_cluster_conf(home)
    return ClusterPlan(
        home, chosen, conf, choose_ports(chosen, conf, home), conf_dir=None, overrides={}
    )


def test_dev_starts_a_master_and_workers_only_when_asked(tmp_path: Path) -> None:
    without = plan(tmp_path)
    assert without.ports.spark_master == 0 and "spark.connect.master" not in str(
        without.spark_daemon().argv
    )
    planned = plan(tmp_path, spark_workers=2)
    DevFile(conf={}, ports=planned.ports.to_document()).write(tmp_path)
    url = f"spark://127.0.0.1:{planned.ports.spark_master}"
    assert (
        planned.ports.spark_master in planned.ports.all()
        and plan(tmp_path, spark_workers=1).ports == planned.ports
    )
    for spec in (planned.spark_daemon(), planned.spark_worker_daemon(1)):
        assert f'spark.connect.master="{url}"' in spec.argv
    assert (planned.spark_worker_daemon(1).role, planned.spark_worker_daemon(1).id) == (
        "spark-worker",
        "2",
    )
    assert option(list(planned.spark_master_daemon().argv), "--port") == str(
        planned.ports.spark_master
    )


def test_workers_beside_a_spark_of_ones_own_are_refused(tmp_path: Path) -> None:
    args = [
        "dev",
        "--json",
        "--dry-run",
        "--spark-workers",
        "2",
        "-c",
        "spark.remote=sc://127.0.0.1:9",
    ]
    done = run_cli(*args, home=tmp_path)
    assert (
        done.code == 2
        and "--spark-workers is for dev's own Spark" in done.document["error"]["message"]
    )


def test_a_server_plans_partitions_for_the_cpus_that_it_may_use(tmp_path: Path) -> None:
    program = (
        "import json, os, sys; from pathlib import Path\n"
        "from storm_dagster.spark.server import spark_connect_command\n"
        "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "print(json.dumps(spark_connect_command(15002, Path(sys.argv[1]), class_data=())))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert settings(json.loads(done.stdout))["spark.sql.shuffle.partitions"] == "2"
