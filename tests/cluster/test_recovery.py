"""Healing on a whole cluster: drains, frozen workers and hosts, mass loss, a cluster without
Dagster, a restart.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from storm_dagster.client.uploads import upload
from storm_dagster.host.processes import RunFile
from storm_dagster.model.errors import (
    AlreadyAlive,
    Conflict,
    InvalidRequest,
    NotAlive,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.packaging.archive import bundle_target
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.chaos.workload import WordCount, task_states

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.dagster, pytest.mark.timeout(900)]

WORDCOUNT = Path(__file__).parents[2] / "examples" / "wordcount.py"
SLOW = Path(__file__).parent / "topologies" / "slow.py"
FILES, LIMIT = 12, 5_000
WORDS = WordCount(WORDCOUNT, files=FILES, limit=LIMIT)


@pytest.fixture(scope="module")
def expected() -> Counter[str]:
    """The counts, computed without us."""
    return WORDS.expected


@pytest.fixture(scope="module")
def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    return shared_cluster


def submit(cluster: LocalCluster, name: str, *, rate: int = 250) -> dict[str, Any]:
    cluster.cli("submit", *WORDS.submit_arguments(name, rate=rate))
    return cluster.wait_running(name)


def some(cluster: LocalCluster, name: str, lines: int = 200) -> None:
    eventually(
        lambda: WORDS.progress(cluster, name)[0] >= lines,
        60,
        f"{lines} lines of {name}",
        interval=0.1,
    )


def exact(cluster: LocalCluster, name: str, expected: Counter[str]) -> None:
    """Every word is counted, once."""

    eventually(lambda: WORDS.finished(cluster, name), 180, f"all lines of {name}", interval=0.2)
    assert WORDS.counts(cluster, name) == expected


def pids(document: dict[str, Any]) -> dict[str, int]:
    return {f"{worker['node']}:{worker['port']}": worker["pid"] for worker in document["workers"]}


def gone(pid: int) -> bool:
    """Ended, or only waiting for its stopped parent to notice."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ask_dagster(cluster: LocalCluster, query: str) -> Any:
    dagster = cluster.endpoints.dagster
    assert dagster is not None
    url = f"{dagster.url.rstrip('/')}/graphql"
    return httpx.post(url, json={"query": query}, timeout=30, trust_env=False).json()["data"]


def heal_runs(cluster: LocalCluster) -> list[str]:
    """Run ids of all reassignments."""
    query = '{ runsOrError(filter: {pipelineName: "reassign_topologies"}) { ... on Runs { results { runId } } } }'
    return [run["runId"] for run in ask_dagster(cluster, query)["runsOrError"]["results"]]


def daemons(cluster: LocalCluster, *roles: str, ids: set[str] | None = None) -> list[RunFile]:
    return [p for p in cluster.processes() if p.role in roles and (ids is None or p.id in ids)]


def freeze(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.suspend()


def thaw(processes: list[psutil.Process]) -> None:
    """Let them go on; one that has ended meanwhile (a worker whose lease is gone ends itself) is no
    matter.
    """
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def family(record: RunFile) -> list[psutil.Process]:
    """The process and its children, workers excepted (they lead sessions of their own)."""
    process = psutil.Process(record.pid)
    session = os.getsid(record.pid)
    return [process, *(c for c in process.children(recursive=True) if os.getsid(c.pid) == session)]


def hosts(cluster: LocalCluster, document: dict[str, Any], nodes: set[str]) -> list[psutil.Process]:
    """Supervisors and workers of those nodes: what stands still when their machines do."""
    supervisors = [psutil.Process(p.pid) for p in daemons(cluster, "supervisor", ids=nodes)]
    return supervisors + [
        psutil.Process(w["pid"]) for w in document["workers"] if w["node"] in nodes
    ]


def owners(cluster: LocalCluster, name: str) -> bool:
    """Whether every task runs, each in exactly one live worker."""
    document = cluster.show(name)
    tasks = [task for worker in document["workers"] if worker["pid"] for task in worker["tasks"]]
    running = all(task["status"] == "running" for task in document["tasks"])
    return running and sorted(tasks) == sorted(task["id"] for task in document["tasks"])


def wait_until_stable(cluster: LocalCluster, name: str, *, without: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    def moved() -> bool:
        document = cluster.show(name)
        return owners(cluster, name) and not {task["node"] for task in document["tasks"]} & without

    eventually(moved, 150, f"{name} running elsewhere", ignore=(StormDagsterError,), interval=0.2)


def tally(cluster: LocalCluster) -> tuple[int, int, int]:
    (state,) = [
        (int(s.get("sent", 0)), int(s.get("acked", 0)), int(s.get("failed", 0)))
        for s in task_states(cluster, "slow", "numbers")
    ]
    return state


@pytest.mark.long
def test_blobs_and_the_blacklist_are_operated_by_verbs(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    content = tmp_path / "content"
    content.write_bytes(bytes(range(256)) * 400)
    stored = cluster.cli("blob", "put", "mine", str(content))
    assert stored["size"] == 102_400
    assert [blob["key"] for blob in cluster.cli("blob", "list", "min")["blobs"]] == ["mine"]
    copy = tmp_path / "copy"
    cluster.cli("blob", "cat", "mine", "-o", str(copy))
    assert copy.read_bytes() == content.read_bytes()
    for key, doing in (
        ("staging.t.record", "put"),
        ("upload.x.conf", "put"),
        ("wc-1-100-stormjar.jar", "put"),
    ):
        with pytest.raises(InvalidRequest):
            cluster.cli("blob", doing, key, str(content))
    assert cluster.cli("blob", "delete", "mine")["deleted"] is True
    with pytest.raises(Conflict, match="does not exist"):
        cluster.cli("blob", "delete", "mine")
    assert cluster.cli("blacklist", "add", "h1", "h2", "--dry-run")["dry_run"] is True
    assert cluster.cli("blacklist", "list")["hosts"] == []
    listed = cluster.cli("blacklist", "add", "h1", "h2")["hosts"]
    assert [row["host"] for row in listed] == ["h1", "h2"] and listed[0]["supervisors"] == []
    assert [row["host"] for row in cluster.cli("blacklist", "remove", "h1")["hosts"]] == ["h2"]
    with pytest.raises(InvalidRequest):
        cluster.cli("blacklist", "add", "../x")
    cluster.cli("blacklist", "remove", "h2")


@pytest.mark.long
def test_a_drained_host_is_empty(cluster: LocalCluster) -> None:
    """A supervisor of another host beside those of the cluster; all that runs there moves, and
    nothing else.
    """
    (like, *_) = daemons(cluster, "supervisor")
    argv = ["s9" if word == like.id else word for word in psutil.Process(like.pid).cmdline()]
    with contextlib.ExitStack() as bound:
        probes = [bound.enter_context(socket.create_server(("127.0.0.2", 0))) for _ in range(5)]
        http, *slots = (probe.getsockname()[1] for probe in probes)
    extra = [
        f"supervisor.http.port={http}",
        f"supervisor.slots.ports={slots}",
        "storm.local.hostname=127.0.0.2",
    ]
    argv += [word for each in extra for word in ("-c", each)]
    process = subprocess.Popen(argv, env=psutil.Process(like.pid).environ())
    try:
        eventually(
            lambda: "s9" in {one["id"] for one in cluster.cli("status")["supervisors"]},
            30,
            "s9",
        )
        submit(cluster, "drained", rate=50)
        before = cluster.show("drained")
        assert "127.0.0.2" in {worker["host"] for worker in before["workers"]}
        planned = cluster.cli("blacklist", "add", "127.0.0.2", "--drain", "--dry-run")
        assert planned["drained"] == ["drained"] and cluster.cli("blacklist", "list")["hosts"] == []
        done = cluster.cli("blacklist", "add", "127.0.0.2", "--drain", "-w", "1")
        assert (done["drained"], done["empty"], done["hosts"][0]["used"]) == (["drained"], True, 0)
        after = cluster.show("drained")
        assert "127.0.0.2" not in {worker["host"] for worker in after["workers"]}
        assert all(task["status"] == "running" for task in after["tasks"])
        stays = {slot: pid for slot, pid in pids(before).items() if not slot.startswith("s9:")}
        assert stays.items() <= pids(after).items()
        cluster.cli("blacklist", "remove", "127.0.0.2")
        cluster.cli("kill", "drained", "-w", "0")
    finally:
        process.terminate()
        process.wait(patience(30))


@pytest.mark.long  # in one process they are in every run: tests/operations/test_duplicate_names.py
def test_of_a_hundred_clients_with_one_name_exactly_one_is_taken(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    bundle = bundle_target(str(SLOW), (), folder=tmp_path, home=cluster.home)
    with cluster.nimbus() as nimbus:
        uploaded = upload(
            nimbus, archive=bundle.archive, conf={"topology.workers": 1}, topology=bundle.topology
        )

    def submit(number: int) -> str:
        request = {"name": "contested", "handle": uploaded.handle, "token": f"contested-{number}"}
        with cluster.nimbus() as nimbus:
            try:
                return f"taken {nimbus.post('/v1/submit', request)['run_id']}"
            except AlreadyAlive:
                return "refused"
            except Unavailable as error:
                # Dagster, on a loaded machine: nimbus says so, and a client tries again.
                return f"unavailable {error.message}"

    def round_of_submissions() -> Counter[str] | None:
        with ThreadPoolExecutor(50) as clients:
            results = Counter(clients.map(submit, range(100)))
        return results if any(answer.startswith("taken") for answer in results) else None

    results = eventually(round_of_submissions, 120, "one submission taken")
    assert results is not None
    assert [times for answer, times in results.items() if answer.startswith("taken")] == [1], (
        results
    )
    assert results["refused"] >= 50, results
    cluster.wait_running("contested", timeout=120)
    assert [row["name"] for row in cluster.topologies()] == ["contested"]
    cluster.cli("kill", "contested", "-w", "0")


@pytest.mark.long
def test_deactivate_and_kill_let_what_is_in_flight_finish(cluster: LocalCluster) -> None:
    topology_id = cluster.cli("submit", f"{SLOW}:Slow", "--name", "slow")["id"]
    with pytest.raises(Conflict, match="is alive"):
        cluster.cli("blob", "delete", f"{topology_id}-stormjar.jar")
    for arguments, kind, says in (
        (
            ("rebalance", "slow", "-n", "9", "-e", "count=20"),
            Unavailable,
            "needs 9 slots, 8 are free",
        ),
        (("rebalance", "slow", "-e", "nosuch=2"), InvalidRequest, "no component 'nosuch'"),
        (("rebalance", "slow", "-e", "count=0"), InvalidRequest, "1 or more"),
        (("rebalance", "slow", "-n", "-1"), InvalidRequest, "-1"),
        (("kill", "nosuch"), NotAlive, "nosuch"),
    ):
        with pytest.raises(kind, match=says):
            cluster.cli(*arguments)
    plan = cluster.cli("rebalance", "slow", "-n", "4", "--dry-run")["plan"]
    assert len(plan["workers"]) == 4 and plan["outcome"] == "planned"
    assert len(cluster.show("slow")["workers"]) == 3
    eventually(lambda: tally(cluster)[1] > 500, 60, "tuples on their way", ignore=(ValueError,))
    cluster.cli("deactivate", "slow")
    eventually(lambda: tally(cluster)[0] == tally(cluster)[1], 30, "everything that was sent acked")
    sent, _, failed = tally(cluster)
    assert failed == 0
    with pytest.raises(Conflict):
        # Inactive ones stay inactive through a rebalance, and two changes at once are refused.
        cluster.cli("rebalance", "slow", "-n", "2", "-w", "5", "--no-wait")
        eventually(lambda: cluster.show("slow")["status"] == "REBALANCING", 60, "the rebalance")
        cluster.cli("activate", "slow")
    eventually(lambda: cluster.show("slow")["status"] == "INACTIVE", 60, "the end of the rebalance")
    wait_until_stable(cluster, "slow")
    assert len(cluster.show("slow")["workers"]) == 2 and tally(cluster) == (sent, sent, 0)
    cluster.cli("activate", "slow")
    eventually(lambda: tally(cluster)[1] > sent + 500, 60, "more tuples")
    cluster.cli("kill", "slow", "-w", "3")
    sent, acked, failed = tally(cluster)
    assert (acked, failed) == (sent, 0), "a drained topology loses nothing"


@pytest.mark.chaos
def test_a_frozen_worker_is_replaced(cluster: LocalCluster, expected: Counter[str]) -> None:
    before = submit(cluster, "hung")
    some(cluster, "hung")
    master = next(task for task in before["tasks"] if task["component"] == "__topology_master")
    # The worker of the topology master: it is healed as well.
    victim = next(worker for worker in before["workers"] if master["id"] in worker["tasks"])
    os.kill(victim["pid"], signal.SIGSTOP)
    slot = f"{victim['node']}:{victim['port']}"
    eventually(
        lambda: pids(cluster.show("hung")).get(slot) not in (None, victim["pid"]),
        120, "another worker in its slot", ignore=(StormDagsterError,), interval=0.2,
    )  # fmt: skip
    assert gone(victim["pid"])
    wait_until_stable(cluster, "hung")
    exact(cluster, "hung", expected)
    cluster.cli("kill", "hung", "-w", "0")


@pytest.mark.chaos
def test_a_frozen_host_is_healed_once_and_its_workers_end_on_waking(
    cluster: LocalCluster, expected: Counter[str]
) -> None:
    before = submit(cluster, "frozen")
    some(cluster, "frozen")
    runs = set(heal_runs(cluster))
    node = before["workers"][0]["node"]
    host = hosts(cluster, before, {node})
    freeze(host)
    try:
        wait_until_stable(cluster, "frozen", without={node})
        assert len(set(heal_runs(cluster)) - runs) == 1, "one cause is one run"
        # The workers wake before their supervisor: nobody but they themselves can end them.
        thaw(host[1:])
        eventually(lambda: all(gone(process.pid) for process in host[1:]), 60, "their own end")
        assert owners(cluster, "frozen")
    finally:
        thaw(host)
    exact(cluster, "frozen", expected)
    assert len(set(heal_runs(cluster)) - runs) == 1
    cluster.cli("kill", "frozen", "-w", "0")


@pytest.mark.chaos
def test_mass_loss_freezes_healing_and_raises_an_alarm(
    cluster: LocalCluster, expected: Counter[str]
) -> None:
    before = submit(cluster, "mass")
    some(cluster, "mass")
    runs = heal_runs(cluster)
    nodes = sorted({worker["node"] for worker in before["workers"]})[:3]
    assert len(nodes) == 3
    lost = hosts(cluster, before, set(nodes))
    freeze(lost)
    try:
        alarm = eventually(lambda: cluster.cli("status")["alarm"], 60, "the alarm", interval=0.5)
        assert "3 of 4 workers on 3 supervisors vanished" in alarm
    finally:
        thaw(lost)
    # What came back is what was there: nothing moved.
    eventually(lambda: owners(cluster, "mass"), 60, "all tasks again", ignore=(StormDagsterError,))
    assert pids(cluster.show("mass")) == pids(before)
    eventually(
        lambda: cluster.cli("status")["alarm"] is None, 60, "the end of the alarm", interval=0.5
    )
    query = """{ assetOrError(assetKey: {path: ["storm", "cluster", "supervisors"]}) {
      ... on Asset { assetObservations(limit: 50) { description } } } }"""

    def reported() -> bool:
        seen = ask_dagster(cluster, query)["assetOrError"]["assetObservations"]
        texts = [event["description"] or "" for event in seen]
        return any("ALARM" in text for text in texts) and "healing continues" in texts

    eventually(reported, 60, "the alarm and its end at the asset", interval=0.5)
    assert heal_runs(cluster) == runs
    exact(cluster, "mass", expected)
    cluster.cli("kill", "mass", "-w", "0")


@pytest.mark.chaos
def test_without_dagster_the_leader_heals_and_obeys(
    cluster: LocalCluster, expected: Counter[str]
) -> None:
    before = submit(cluster, "alone")
    some(cluster, "alone")
    runs = heal_runs(cluster)
    roles = ("dagster-daemon", "dagster-webserver", "dagster-code")
    dagster = [process for record in daemons(cluster, *roles) for process in family(record)]
    node = before["workers"][0]["node"]
    host = hosts(cluster, before, {node})
    freeze(dagster)
    try:
        logs = [cluster.home / "logs" / f"nimbus-{nimbus}.log" for nimbus in ("n1", "n2")]
        said = "the leader reassigns dead tasks itself"
        eventually(lambda: any(said in log.read_text() for log in logs), 60, "the backstop")
        freeze(host)
        wait_until_stable(cluster, "alone", without={node})
        with pytest.raises(Unavailable):
            cluster.cli("rebalance", "alone", "-n", "2")
        assert cluster.cli("deactivate", "alone")["run_id"] is None
        assert cluster.cli("activate", "alone")["run_id"] is None
    finally:
        thaw(dagster)
        thaw(host)
    exact(cluster, "alone", expected)
    query = """{ assetOrError(assetKey: {path: ["storm", "assignment"]}) {
      ... on Asset { assetMaterializations(limit: 50) { description } } } }"""

    def reported() -> bool:
        seen = ask_dagster(cluster, query)["assetOrError"]["assetMaterializations"]
        return any("reassigned by the leader" in (event["description"] or "") for event in seen)

    eventually(
        reported, 90, "what the leader did, in Dagster", ignore=(httpx.HTTPError,), interval=0.5
    )
    assert heal_runs(cluster) == runs, "Dagster, back again, has nothing to heal"
    cluster.cli("kill", "alone", "-w", "0")


@pytest.mark.chaos
def test_a_cluster_that_is_stopped_and_started_goes_on_where_it_was(
    cluster: LocalCluster, expected: Counter[str]
) -> None:
    before = submit(cluster, "again")
    some(cluster, "again")
    runs = heal_runs(cluster)
    cluster.stop()
    cluster.start()
    wait_until_stable(cluster, "again")
    after = {task["id"]: (task["node"], task["port"]) for task in cluster.show("again")["tasks"]}
    assert after == {task["id"]: (task["node"], task["port"]) for task in before["tasks"]}
    exact(cluster, "again", expected)
    assert heal_runs(cluster) == runs, "a start is no loss"
