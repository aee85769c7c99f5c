"""New code for a word count that runs: worker by worker, taken back by hand and by itself, and all
at once.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.client import upload
from storm_dagster.model.errors import (
    Conflict,
    InvalidRequest,
    InvalidTopology,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.model.topology import TopologySpec
from storm_dagster.packaging.archive import Archive, hash_file
from storm_dagster.testing.cluster import LocalCluster, run_cli
from storm_dagster.testing.waiting import eventually
from storm_rigs.chaos.workload import WordCount

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.dagster, pytest.mark.timeout(900)]

WORDCOUNT = Path(__file__).parents[2] / "examples" / "wordcount.py"
FILES, LIMIT = 12, 5_000
WORDS = WordCount(WORDCOUNT, files=FILES, limit=LIMIT)
# The whole source of what a worker runs differs by these lines; what it does to data does not.
NEWER = "\nVERSION = 2\n"
DEADLY = """
def _die(self, conf, context):
    import os

    os._exit(7)


LineSpout.initialize = split.initialize = CountBolt.initialize = _die
"""
BROKEN = """
def _raise(self, conf, context):
    raise LookupError("no dictionary")


LineSpout.initialize = split.initialize = CountBolt.initialize = _raise
"""


@pytest.fixture(scope="module")
def expected() -> Counter[str]:
    """The counts, computed without us."""
    return WORDS.expected


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Targets: the word count, another version of it, one whose workers end as soon as they start,
    and one whose tasks cannot be opened.
    """
    made = {}
    versions = (("old", ""), ("new", NEWER), ("deadly", DEADLY), ("broken", BROKEN))
    for version, more in versions:
        folder = tmp_path_factory.mktemp(version)
        (folder / "wordcount.py").write_text(WORDCOUNT.read_text() + more)
        made[version] = str(folder / "wordcount.py")
    return made


@pytest.fixture(scope="module")
def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    # Its second nimbus takes over from the first, which one of the tests kills.
    return shared_cluster


CONF = (
    *("--conf", "topology.workers=3", "--conf", "topology.master.single.worker=true"),
    *("--conf", f"wordcount.files={FILES}", "--conf", f"wordcount.limit={LIMIT}"),
    *("--conf", "topology.message.timeout.secs=8"),
)


def submit(cluster: LocalCluster, name: str, target: str, rate: int) -> dict[str, Any]:
    rated = (*CONF, "--conf", f"wordcount.lines.per.second={rate}")
    # With a token it may be asked for again: the first launch of a fresh Dagster can take its time.
    eventually(
        lambda: cluster.cli("submit", target, "--name", name, "--token", name, *rated),
        180, f"the submission of {name}", ignore=(Unavailable,),
    )  # fmt: skip
    return cluster.wait_running(name)


def wait_for_some(cluster: LocalCluster, name: str, lines: int) -> None:
    eventually(
        lambda: WORDS.progress(cluster, name)[0] >= lines,
        90,
        f"{lines} lines of {name}",
        interval=0.1,
    )


def wait_for_all(cluster: LocalCluster, name: str) -> None:
    eventually(lambda: WORDS.finished(cluster, name), 240, f"all lines of {name}", interval=0.2)


def versions(document: dict[str, Any]) -> dict[str, str]:
    """``host:port`` -> version of the code, the topology master's worker left out."""
    master = next(
        task["id"] for task in document["tasks"] if task["component"] == "__topology_master"
    )
    return {
        f"{worker['host']}:{worker['port']}": worker["version"]
        for worker in document["workers"]
        if master not in worker["tasks"]
    }


def executed(document: dict[str, Any]) -> dict[str, int]:
    """Version -> tuples that its tasks executed."""
    found: Counter[str] = Counter()
    of = versions(document)
    for task in document["tasks"]:
        version = of.get(f"{task['host']}:{task['port']}")
        if version is not None:
            found[version] += task["stats"]["executed"] + task["stats"]["emitted"]
    return dict(found)


def wait_until_stable(cluster: LocalCluster, name: str, status: str = "ACTIVE") -> dict[str, Any]:
    """The topology once it has that status and every worker shows a version."""

    def look() -> dict[str, Any] | None:
        document = cluster.show(name)
        whole = all(worker["version"] for worker in document["workers"])
        return document if document["status"] == status and whole else None

    found = eventually(look, 120, f"{name} {status}", ignore=(StormDagsterError,), interval=0.2)
    assert found is not None
    return found


@pytest.mark.long
def test_worker_by_worker_while_both_versions_count_and_the_leader_dies(
    cluster: LocalCluster, code: dict[str, str], expected: Counter[str]
) -> None:
    (old,) = set(versions(submit(cluster, "gray", code["old"], rate=100)).values())
    wait_for_some(cluster, "gray", 100)
    for wrong, error in (
        (("-n", "1"), InvalidRequest),
        (("-w", "nobody:1", code["new"]), InvalidRequest),
        (("-p", "nothing", code["new"]), InvalidRequest),
        (("-n", "1", f"{WORDCOUNT.parent}/nothing.py"), StormDagsterError),
    ):
        with pytest.raises(error):
            cluster.cli("gray-upgrade", "gray", *wrong)
    assert cluster.show("gray")["status"] == "ACTIVE"

    answer = cluster.cli("gray-upgrade", "gray", code["new"], "-n", "1", *CONF)
    assert answer["status"] == "UPGRADING"
    now = versions(wait_until_stable(cluster, "gray", "UPGRADING"))
    (first,) = (address for address, version in now.items() if version != old)
    new = now[first]
    assert first == min(
        now, key=lambda address: (address.rpartition(":")[0], int(address.rpartition(":")[2]))
    )
    assert answer["upgrade"]["workers"][first] == "upgraded"

    before = eventually(
        lambda: found if set(found := executed(cluster.show("gray"))) == {old, new} else None,
        60, "figures of both versions", ignore=(StormDagsterError,),
    )  # fmt: skip
    assert before is not None

    def both_go_on() -> bool:
        figures = executed(cluster.show("gray"))
        return all(figures.get(version, 0) > before[version] for version in (old, new))

    eventually(both_go_on, 60, "both versions at work", ignore=(StormDagsterError,), interval=0.3)

    # A worker that was not upgraded comes back with the former code.
    victim = next(
        w for w in cluster.show("gray")["workers"] if w["version"] == old and len(w["tasks"]) > 1
    )
    os.kill(victim["pid"], signal.SIGKILL)

    def again() -> bool:
        workers = cluster.show("gray")["workers"]
        same = next(
            w for w in workers if (w["node"], w["port"]) == (victim["node"], victim["port"])
        )
        return same["pid"] not in (None, victim["pid"]) and same["version"] == old

    eventually(again, 60, "the killed worker with the former code", ignore=(StormDagsterError,))
    assert cluster.show("gray")["status"] == "UPGRADING"
    with pytest.raises(Conflict):
        cluster.cli("gray-upgrade", "gray", code["new"], "-n", "1")

    # The rest, with the leader gone right after it accepted.
    cluster.cli("gray-upgrade", "gray", "-n", "9", "--no-wait")
    with cluster.nimbus() as nimbus:
        leader = nimbus.get("/healthz")["id"]
    cluster.kill("nimbus", leader)
    after = wait_until_stable(cluster, "gray")
    assert set(versions(after).values()) == {new} and "upgrade" not in after
    wait_for_all(cluster, "gray")
    assert WORDS.counts(cluster, "gray") == expected, "no line may be lost or counted twice"
    cluster.cli("kill", "gray", "-w", "0")


@pytest.mark.long
def test_taken_back_by_itself_and_by_hand_then_replaced_at_once(
    cluster: LocalCluster, code: dict[str, str], expected: Counter[str], tmp_path: Path
) -> None:
    before = submit(cluster, "back", code["old"], rate=80)
    (old,) = set(versions(before).values())
    with pytest.raises(InvalidTopology, match="was rolled back, the former code runs again"):
        cluster.cli("gray-upgrade", "back", code["deadly"], "-p", "split", "-n", "1", *CONF)
    after = wait_until_stable(cluster, "back")
    assert set(versions(after).values()) == {old} and "upgrade" not in after
    assert any("exit code 7" in error["error"] for error in after["errors"])

    # The run of an upgrade whose tasks cannot be opened quotes the cause, which stays.
    cause = r"LookupError: no dictionary \(wordcount\.py, line \d+\)"
    with pytest.raises(InvalidTopology, match=cause):
        cluster.cli("gray-upgrade", "back", code["broken"], "-p", "split", "-n", "1", *CONF)
    after = wait_until_stable(cluster, "back")
    assert set(versions(after).values()) == {old} and "upgrade" not in after
    assert re.search(cause, after["failed_upgrade"]["reason"])
    assert after["history"][0]["action"] == "upgrade rolled back"

    # Two of the three workers split; the third keeps the former code, so that the upgrade stays
    # under way.
    cluster.cli("gray-upgrade", "back", code["new"], "-p", "split", *CONF)
    assert len(set(versions(wait_until_stable(cluster, "back", "UPGRADING")).values())) == 2
    assert cluster.cli("rollback", "back")["status"] == "ACTIVE"
    assert set(versions(wait_until_stable(cluster, "back")).values()) == {old}
    with pytest.raises(Conflict, match="no upgrade is under way"):
        cluster.cli("rollback", "back")

    # A hot deploy with an archive that is none leaves everything as it is.
    broken = tmp_path / "broken.zip"
    broken.write_bytes(b"PK\x03\x04 but not for long")
    running = cluster.wait_running("back")
    with cluster.nimbus() as nimbus:
        spec = TopologySpec.model_validate(
            {"spouts": {"lines": {"object": {"python": "wordcount:LineSpout"}}}}
        )
        archive = Archive(broken, hash_file(broken), broken.stat().st_size, 1)
        handle = upload(nimbus, archive=archive, conf={}, topology=spec).handle
        run_id = nimbus.post("/v1/topologies/back/update", {"handle": handle, "token": "broken"})[
            "run_id"
        ]
        run = eventually(
            lambda: found if (found := nimbus.get(f"/v1/runs/{run_id}"))["finished"] else None,
            120, "the end of the run", ignore=(StormDagsterError,),
        )  # fmt: skip
    assert (
        run is not None and run["status"] == "FAILURE" and run["error"]["type"] == "InvalidTopology"
    )
    now = cluster.show("back")
    assert (now["id"], now["status"]) == (running["id"], "ACTIVE")
    assert [w["pid"] for w in now["workers"]] == [w["pid"] for w in running["workers"]]

    # And one that is whole takes its place, and goes on where it stood. What it changes in the conf
    # is shown first.
    changed = (
        "--conf",
        "topology.message.timeout.secs=9",
        "--conf",
        "wordcount.lines.per.second=null",
    )
    shown = (
        run_cli("update", "back", code["new"], *changed, "--dry-run", home=cluster.home).check().out
    )
    assert shown.splitlines()[:2] == [
        "topology.message.timeout.secs: 8 -> 9",
        "wordcount.lines.per.second: 80 -> null",
    ]
    done = cluster.cli("update", "back", code["new"], *changed)
    assert done["conf"] == {
        "topology.message.timeout.secs": {"old": 8, "new": 9},
        "wordcount.lines.per.second": {"old": 80, "new": None},
    }
    assert done["id"] != running["id"] and done["status"] == "ACTIVE"
    assert old not in versions(cluster.show("back")).values()
    wait_for_all(cluster, "back")
    assert WORDS.counts(cluster, "back") == expected
    cluster.cli("kill", "back", "-w", "0")
