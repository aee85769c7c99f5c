"""Seconds that ``doctor`` takes for a cluster of 200 topologies, half of which lost their workers.

A real nimbus and a real ZooKeeper server. Supervisors, topologies and workers are records; in the
place of each topology master is a socket that counts connections and never answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
from nimbus_http import start_nimbus
from pages import Cluster, Masters
from tables import Row, run

from storm_dagster.model import paths
from storm_dagster.testing.cluster import run_cli
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.session import ZkSession

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rigs"))

from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper

TOPOLOGIES = 200


def _silence_half(state: ZooKeeperClusterState, ids: list[str]) -> None:
    """Remove the workers of every second topology."""
    for topology_id in ids[::2]:
        folder = paths.workers(topology_id)
        for name in state.find_children(folder) or ():
            state.delete_node(f"{folder}/{name}")


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def report(*, quick: bool = False) -> Iterator[Row]:
    """Rows of the benchmark."""
    samples = 3 if quick else 7
    with (
        tempfile.TemporaryDirectory(prefix="bench-doctor-") as folder,
        EmbeddedZooKeeper(Path(folder) / "zookeeper", durable=False) as server,
        contextlib.closing(Masters(TOPOLOGIES)) as masters,
    ):
        home = Path(folder) / "home"
        process, url, _ = start_nimbus(home, server.address)
        session = ZkSession(server.address, root="/storm", session_timeout_ms=20_000)
        try:
            state = ZooKeeperClusterState(session)
            with contextlib.closing(Cluster(state, masters)) as cluster:
                _silence_half(state, cluster.ids)
                host, _, port = server.address.rpartition(":")
                conf = {
                    "nimbus.seeds": [url.removeprefix("http://")],
                    "storm.zookeeper.servers": [host],
                    "storm.zookeeper.port": int(port),
                    "dagster.graphql.url": "",
                }
                client = Path(folder) / "client"
                client.mkdir()
                (client / "storm.yaml").write_text(json.dumps(conf), encoding="utf-8")
                with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
                    eventually(
                        lambda: http.get("/v1/problems").json()["topologies"] == TOPOLOGIES,
                        60,
                        "the topologies",
                    )
                    yield from _measure(http, process.pid, client, samples)
                yield "- requests to topology masters", "aim: 0", f"{masters.asked}"
                cores = os.cpu_count()
                load = f"{os.getloadavg()[0]:.1f}"
                yield f"- load of the machine of {cores} cores", "-", load
        finally:
            session.close()
            process.terminate()
            process.wait(30)


def _measure(http: httpx.Client, pid: int, client: Path, samples: int) -> Iterator[Row]:
    nimbus = psutil.Process(pid)
    verb_secs: list[float] = []
    request_secs: list[float] = []
    cpu_began = _cpu(nimbus)
    for _ in range(samples):
        began = time.monotonic()
        done = run_cli("doctor", "--json", "--conf-dir", str(client), home=client)
        verb_secs.append(time.monotonic() - began)
        texts = [row["found"] for row in done.document["findings"]]
        assert "and 50 more topologies have tasks that do not run" in texts, texts
    cpu_secs = (_cpu(nimbus) - cpu_began) / samples
    for _ in range(samples):
        time.sleep(0.3)  # A view is shared for 0.2 s.
        began = time.monotonic()
        http.get("/v1/problems").raise_for_status()
        request_secs.append(time.monotonic() - began)
    median = sorted(verb_secs)[samples // 2]
    request = sorted(request_secs)[samples // 2]
    yield (
        f"`doctor` at {TOPOLOGIES} topologies, half of them without workers",
        "aim: 5 s",
        f"{median:.1f} s",
    )
    yield "- its request to nimbus; CPU of nimbus", "-", f"{request:.2f} s; {cpu_secs:.2f} s"


if __name__ == "__main__":
    run("doctor", __doc__, lambda quick: report(quick=quick))
