"""A running word count, and what is done to it: workers, supervisors, hosts and ZooKeeper die or
freeze.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually
from storm_rigs.chaos.workload import WordCount, task_states

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.dagster, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
WORDCOUNT = ROOT / "examples" / "wordcount.py"
FLAKY = Path(__file__).parent / "topologies" / "flaky.py"
FILES, LIMIT = 12, 6_000
WORDS = WordCount(WORDCOUNT, files=FILES, limit=LIMIT)


@pytest.fixture(scope="module")
def expected() -> Counter[str]:
    """The counts, computed without us."""
    return WORDS.expected


@pytest.fixture(scope="module")
def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    # The tests come in the order of the harm that they do: the last one takes a host away.
    return shared_cluster


def submit(cluster: LocalCluster, name: str, *, rate: int = 500) -> dict[str, Any]:
    # Messages time out soon, so that what a dead worker held is replayed within the test's
    # patience.
    return cluster.cli("submit", *WORDS.submit_arguments(name, rate=rate))


def wait_for_some(cluster: LocalCluster, name: str, lines: int) -> None:
    eventually(
        lambda: WORDS.progress(cluster, name)[0] >= lines,
        60,
        f"{lines} lines of {name}",
        interval=0.1,
    )


def wait_for_all(cluster: LocalCluster, name: str) -> None:
    eventually(
        lambda: WORDS.finished(cluster, name),
        120,
        f"all lines of {name} ({WORDS.progress(cluster, name)})",
        interval=0.2,
    )


def pids(document: dict[str, Any]) -> dict[str, int]:
    return {f"{worker['node']}:{worker['port']}": worker["pid"] for worker in document["workers"]}


# tests/cli/test_lifecycle.py and tests/worker/test_state_processes.py kill one in every run
@pytest.mark.long
def test_a_worker_killed_while_counting_costs_no_count(
    cluster: LocalCluster, expected: Counter[str]
) -> None:
    submit(cluster, "worker")
    wait_for_some(cluster, "worker", 500)
    before = cluster.show("worker")
    victim = next(
        w
        for w in before["workers"]
        if any(t["component"] == "count" and t["id"] in w["tasks"] for t in before["tasks"])
    )
    os.kill(victim["pid"], signal.SIGKILL)

    def again() -> bool:
        now = cluster.show("worker")
        same = next(
            (
                w
                for w in now["workers"]
                if (w["node"], w["port"]) == (victim["node"], victim["port"])
            ),
            None,
        )
        return same is not None and same["pid"] not in (None, victim["pid"])

    eventually(again, 30, "the worker in its old slot", ignore=(StormDagsterError,), interval=0.1)
    wait_for_all(cluster, "worker")
    assert WORDS.counts(cluster, "worker") == expected
    cluster.cli("kill", "worker", "-w", "0")


@pytest.mark.chaos
def test_a_supervisor_killed_alone_moves_nothing_and_adopts_its_workers(
    cluster: LocalCluster, expected: Counter[str]
) -> None:
    submit(cluster, "supervisor")
    wait_for_some(cluster, "supervisor", 200)
    before = pids(cluster.wait_running("supervisor"))
    killed = cluster.kill("supervisor")
    eventually(
        lambda: any(p.pid != killed.pid for p in cluster.processes("supervisor") if p.id == killed.id),
        60, "dev starting the supervisor again", interval=0.2,
    )  # fmt: skip
    wait_for_all(cluster, "supervisor")
    assert pids(cluster.show("supervisor")) == before, "no worker may have been restarted or moved"
    assert WORDS.counts(cluster, "supervisor") == expected
    cluster.cli("kill", "supervisor", "-w", "0")


@pytest.mark.chaos
def test_a_zookeeper_outage_pauses_and_restarts_nothing(
    cluster: LocalCluster, expected: Counter[str]
) -> None:
    submit(cluster, "zookeeper")
    wait_for_some(cluster, "zookeeper", 200)
    shown = cluster.wait_running("zookeeper")
    before = pids(shown)
    placed = {task["id"]: (task["node"], task["port"]) for task in shown["tasks"]}
    zookeeper = next(iter(cluster.processes("zookeeper")))
    group = [psutil.Process(zookeeper.pid), *psutil.Process(zookeeper.pid).children(recursive=True)]
    for process in group:
        process.suspend()
    time.sleep(9)  # longer than two sessions, so that every lease has certainly ended
    for process in group:
        process.resume()
    wait_for_all(cluster, "zookeeper")
    assert WORDS.counts(cluster, "zookeeper") == expected
    eventually(
        lambda: pids(cluster.show("zookeeper")) == before,
        60,
        "the same workers",
        ignore=(StormDagsterError,),
    )
    after = {
        task["id"]: (task["node"], task["port"]) for task in cluster.show("zookeeper")["tasks"]
    }
    assert after == placed, "nothing may move because ZooKeeper was away"
    cluster.cli("kill", "zookeeper", "-w", "0")


@pytest.mark.long
def test_a_bolt_that_raises_now_and_then_is_replayed_counted_and_shown(
    cluster: LocalCluster,
) -> None:
    cluster.cli("submit", f"{FLAKY}:Flaky", "--name", "flaky")

    def all_acked() -> bool:
        return any(
            state.get("acked") == 3_000 for state in task_states(cluster, "flaky", "numbers")
        )

    eventually(all_acked, 60, "every number acked", interval=0.2)

    def shown() -> bool:
        document = cluster.show("flaky")
        spout = next(task for task in document["tasks"] if task["component"] == "numbers")
        return spout["stats"]["acked"] == 3_000 and spout["stats"]["failed"] == 3

    eventually(shown, 30, "the statistics", ignore=(StormDagsterError,), interval=0.3)
    errors = cluster.cli("errors", "flaky")["errors"]
    assert errors and all("I do not like" in error["error"] for error in errors)
    assert {error["component"] for error in errors} == {"picky"}
    cluster.cli("kill", "flaky", "-w", "0")


@pytest.mark.chaos  # a frozen host is in every run
def test_a_lost_host_is_healed_by_the_sensor(cluster: LocalCluster, expected: Counter[str]) -> None:
    submit(cluster, "host", rate=300)
    wait_for_some(cluster, "host", 300)
    before = cluster.wait_running("host")
    lost = before["workers"][0]["node"]
    # A host that is gone takes along whoever would start its daemons again.
    cluster.kill("dev")
    cluster.kill("supervisor", lost)
    for worker in before["workers"]:
        if worker["node"] == lost:
            os.kill(worker["pid"], signal.SIGKILL)

    def moved() -> bool:
        now = cluster.show("host")
        return all(task["node"] != lost and task["status"] == "running" for task in now["tasks"])

    eventually(moved, 90, "its tasks running elsewhere", ignore=(StormDagsterError,), interval=0.2)
    wait_for_all(cluster, "host")
    assert WORDS.counts(cluster, "host") == expected
    kept = {task["id"] for task in before["tasks"] if task["node"] != lost}
    after = {task["id"]: (task["node"], task["port"]) for task in cluster.show("host")["tasks"]}
    for task in before["tasks"]:
        if task["id"] in kept:
            assert after[task["id"]] == (task["node"], task["port"]), (
                "a task that lived must not move"
            )
