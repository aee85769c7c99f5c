"""``dev --spark-workers``: placements run on executors of a standalone cluster that outlives its
parts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from storm_dagster.security.spark_remote import with_spark_token
from storm_dagster.spark.link import forget_session
from storm_dagster.spark.session import open_connect
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually
from storm_rigs.servers.ports import free_port
from storm_rigs.servers.processes import processes_of

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.spark, pytest.mark.timeout(900)]
WORDCOUNT = Path(__file__).parents[2] / "examples" / "wordcount.py"
SMALL = ("--conf", "wordcount.files=2", "--conf", "wordcount.limit=100")


def executors(cluster: LocalCluster) -> set[str]:
    """Folders of the Spark workers whose executors run the tasks of one job."""

    def where(batches: Iterator[Any]) -> Iterator[Any]:
        import time

        import pandas

        for _ in batches:
            time.sleep(0.5)
        yield pandas.DataFrame({"cwd": [os.getcwd()]})

    spark = cluster.endpoints.spark
    assert spark is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORM_DAGSTER_HOME", str(cluster.home))
        session = open_connect(with_spark_token(spark.remote, [spark.remote]))
    try:
        rows = session.range(0, 8, 1, 8).mapInPandas(where, "cwd string").collect()
    finally:
        forget_session(session, release=True)
    return {Path(row.cwd).relative_to(cluster.home / "spark").parts[0] for row in rows}


def replaced(cluster: LocalCluster, role: str, id: str) -> None:
    """Kill a part, and wait for the one that dev starts in its place."""
    old = cluster.kill(role, id)

    def new() -> bool:
        return any(each.id == id and each.pid != old.pid for each in cluster.processes(role))

    eventually(new, 60, f"another {role} {id}", interval=0.2)


def test_placements_run_on_the_workers_also_after_a_part_was_killed(tmp_path: Path) -> None:
    both = {"worker-1", "worker-2"}
    with LocalCluster(tmp_path / "home", supervisors=1, spark_workers=2, timeout=400) as cluster:
        home = cluster.home
        assert {each.id for each in cluster.processes("spark-worker")} == {"1", "2"}
        eventually(lambda: executors(cluster) == both, 120, "executors of both workers")
        # A submission is never placed without Spark.
        cluster.cli("submit", str(WORDCOUNT), "--name", "one", *SMALL)
        cluster.wait_running("one")
        replaced(cluster, "spark-worker", "1")
        cluster.cli("submit", str(WORDCOUNT), "--name", "two", *SMALL)
        cluster.wait_running("two")
        eventually(lambda: executors(cluster) == both, 120, "an executor of the new worker")
        # Another master knows the application still: it gives it the executor of another worker.
        replaced(cluster, "spark-master", "0")
        replaced(cluster, "spark-worker", "2")
        eventually(lambda: executors(cluster) == both, 180, "executors from the new master")
        secrets = [path.read_text() for path in home.glob("spark/**/spark.properties")]
        (secret,) = {
            line for text in secrets for line in text.splitlines() if "authenticate.secret" in line
        }
        assert len(secrets) == 4 and not any(
            secret.partition("=")[2] in line for line in processes_of(home)
        )
        log = (home / "logs" / "dev-0.out").read_text(encoding="utf-8", errors="replace")
    assert processes_of(home) == [], log
    assert list((home / "run").iterdir()) == []


def test_who_lacks_the_secret_does_not_join(tmp_path: Path) -> None:
    """Nor is anybody served by the web UI of a part that was not asked for one."""
    port, page = free_port(), free_port()
    master = f"spark.connect.master=spark://127.0.0.1:{port}"
    with ExitStack() as stack:

        def start(home: Path, *args: str) -> tuple[subprocess.Popen[bytes], Path]:
            output = tmp_path / f"{home.name}-{args[0]}.out"
            command = [
                sys.executable,
                "-m",
                "storm_dagster",
                "daemon",
                "spark",
                *args,
                "--home",
                str(home),
            ]
            with output.open("wb") as stream:
                process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            return process, output

        start(tmp_path / "own", "master", "--port", str(port), "--ui-port", str(page))

        def members() -> list[dict[str, Any]]:
            return httpx.get(f"http://127.0.0.1:{page}/json/", trust_env=False, timeout=10).json()[
                "workers"
            ]

        eventually(
            lambda: members() == [], 90, "the master", ignore=(httpx.HTTPError,), interval=0.5
        )
        worker, _ = start(
            tmp_path / "own", "worker", "-c", master, "--cores", "1", "--memory", "256m"
        )
        _, refused = start(
            tmp_path / "other", "worker", "-c", master, "--cores", "1", "--memory", "512m"
        )
        eventually(
            lambda: "Failed to connect to master" in refused.read_text(),
            90,
            "a refusal",
            interval=0.5,
        )
        eventually(members, 90, "the worker with the secret", interval=0.5)
        assert [(each["cores"], each["memory"]) for each in members()] == [(1, 256)]
        listening = [
            each.laddr
            for each in psutil.Process(worker.pid).net_connections()
            if each.status == "LISTEN"
        ]
        assert {each.ip for each in listening} <= {"127.0.0.1", "::ffff:127.0.0.1"}
        answers: list[int] = []
        for each in listening:
            try:
                answers.append(
                    httpx.get(
                        f"http://127.0.0.1:{each.port}/", trust_env=False, timeout=10
                    ).status_code
                )
            except httpx.HTTPError:
                continue  # the port of its messages
        assert answers == [403]
