"""Verbs on a whole cluster: submit, show, deactivate, activate, rebalance, kill, jar."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from storm_dagster.api import TaskState
from storm_dagster.model.errors import AlreadyAlive, InvalidTopology, NotAlive, StormDagsterError
from storm_dagster.testing.cluster import LocalCluster, run_cli
from storm_dagster.testing.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.dagster, pytest.mark.timeout(600)]

WORDCOUNT = Path(__file__).parents[2] / "examples" / "wordcount.py"
SMALL = ["--conf", "wordcount.files=3", "--conf", "wordcount.limit=300"]
TASK_STATS = {
    *("emitted", "transferred", "executed", "acked", "failed"),
    *("execute_ms", "process_ms", "complete_ms"),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("verbs") / "home") as made:
        yield made


def test_submit_waits_until_all_tasks_run(cluster: LocalCluster) -> None:
    done = cluster.cli("submit", str(WORDCOUNT), "--name", "wc", "--conf", "topology.workers=2", *SMALL)
    assert set(done) == {"id", "name", "status", "run_id", "seconds"}
    assert done["name"] == "wc" and done["status"] == "ACTIVE" and done["id"].startswith("wc-")
    shown = cluster.cli("show", "wc")
    assert shown["id"] == done["id"] and len(shown["workers"]) == 2
    assert {"id", "name", "status", "uptime_secs", "workers", "tasks", "components", "errors"} <= set(shown)
    assert all(task["status"] == "running" and set(task["stats"]) >= TASK_STATS for task in shown["tasks"])
    row = cluster.cli("list")["topologies"][0]
    assert set(row) >= {"id", "name", "status", "uptime_secs", "workers", "executors", "tasks"}
    assert row["workers"] == 2 and row["tasks"] == len(shown["tasks"])


def test_it_counts(cluster: LocalCluster) -> None:
    def done() -> bool:
        finished = False
        for path in cluster.home.glob("**/wc/lines/*.sqlite3"):
            state = TaskState(path)
            finished = state.get("total", 0) > 0 and state.get("done") == state.get("total")
            state.close()
        return finished

    eventually(done, 60, "all lines acked", interval=0.2)
    assert cluster.cli("errors", "wc")["errors"] == []


def test_the_same_token_is_the_same_topology_and_another_is_refused(cluster: LocalCluster) -> None:
    with pytest.raises(AlreadyAlive):
        cluster.cli("submit", str(WORDCOUNT), "--name", "wc", *SMALL)


def test_a_wrong_conf_is_refused_before_anything_runs(cluster: LocalCluster) -> None:
    done = cluster.cli("submit", str(WORDCOUNT), "--name", "x", "--conf", "topology.wrokers=2", check=False)
    assert done.code == 2 and "topology.workers" in done.document["error"]["message"]
    with pytest.raises(InvalidTopology):
        cluster.cli("submit", str(WORDCOUNT), "--name", "12345", *SMALL)


def test_deactivate_and_activate(cluster: LocalCluster) -> None:
    assert cluster.cli("deactivate", "wc", "--dry-run")["dry_run"] is True
    assert cluster.show("wc")["status"] == "ACTIVE"
    assert cluster.cli("deactivate", "wc")["status"] == "INACTIVE"
    assert cluster.cli("activate", "wc")["status"] == "ACTIVE"


def test_rebalance(cluster: LocalCluster) -> None:
    done = cluster.cli("rebalance", "wc", "-n", "3", "-w", "0", "-e", "split=3")
    assert done["status"] == "ACTIVE"
    shown = cluster.show("wc")
    assert len(shown["workers"]) == 3
    assert sum(task["component"] == "split" for task in shown["tasks"]) == 3


def test_human_output(cluster: LocalCluster) -> None:
    for args in (["list"], ["show", "wc"], ["supervisors"], ["nimbuses"], ["status"], ["explain", "wc"]):
        done = run_cli(*args, home=cluster.home).check()
        assert done.out.strip() and "Traceback" not in done.err


def test_kill(cluster: LocalCluster) -> None:
    assert cluster.cli("kill", "wc", "-w", "0")["status"] == "KILLED"
    assert cluster.topologies() == []
    with pytest.raises(NotAlive):
        cluster.cli("show", "wc")
    with pytest.raises(StormDagsterError):
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
