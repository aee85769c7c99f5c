"""Seconds without accepted submissions after the leader was killed, and the effect on running
workers.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tables import Row, run

from storm_dagster.client.uploads import upload
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.packaging.archive import bundle_target
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually

SENTENCES = str(Path(__file__).with_name("sentences.py"))


def _workers(cluster: LocalCluster, name: str) -> dict[str, int]:
    shown = cluster.wait_running(name)
    return {f"{worker['node']}:{worker['port']}": worker["pid"] for worker in shown["workers"]}


def report(folder: Path, *, quick: bool) -> Iterator[Row]:
    """The rows, on a cluster of its own with three nimbuses."""
    taken: list[float] = []
    restarted = 0
    with LocalCluster(folder / "home", nimbuses=3, supervisors=2, slots=4) as cluster:
        session = cluster.conf["storm.zookeeper.session.timeout"] / 1000
        cluster.cli("submit", SENTENCES, "--name", "steady", "--conf", "bench.rate=100")
        before = _workers(cluster, "steady")
        with tempfile.TemporaryDirectory() as work:
            bundle = bundle_target(SENTENCES, (), folder=Path(work), home=cluster.home)
            for number in range(2 if quick else 5):
                with cluster.nimbus() as nimbus:
                    leader = nimbus.get("/healthz")["id"]
                cluster.kill("nimbus", leader)
                began = time.monotonic()
                # A client that knows nothing of what happened, and asks until it is answered.
                with cluster.nimbus(patience=120) as nimbus:

                    def accepted(nimbus=nimbus, number=number) -> bool:
                        done = upload(
                            nimbus,
                            archive=bundle.archive,
                            conf={"bench.rate": 0.001},
                            topology=bundle.topology,
                        )
                        # With its token, what is asked again stays one submission.
                        request = {
                            "name": f"next-{number}",
                            "handle": done.handle,
                            "token": f"next-{number}",
                        }
                        answer = nimbus.post("/v1/submit", request)
                        return bool(answer["run_id"])

                    eventually(accepted, 120, "an accepted submission", ignore=(StormDagsterError,))
                taken.append(time.monotonic() - began)
                cluster.wait_running(f"next-{number}", timeout=120)
                cluster.cli("kill", f"next-{number}", "-w", "0")
                now = _workers(cluster, "steady")
                restarted += sum(1 for slot, pid in before.items() if now.get(slot) != pid)
                before = now
                eventually(
                    lambda: len(cluster.processes("nimbus")) == 3, 60, "three nimbuses again"
                )
    yield (
        f"leader kill -9 -> a submission is accepted again (session {session:g} s)",
        "Storm: session 20 s + sync; aim: session + 2 s",
        f"{statistics.median(taken):.2f} s",
    )
    yield (
        "workers restarted by it",
        "Storm: often all; aim: 0",
        f"{restarted} in {len(taken)} changes of leader",
    )


def _rows(quick: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        yield from report(Path(folder), quick=quick)


if __name__ == "__main__":
    run("leader", __doc__, _rows)
