"""Nimbus as its HTTP clients see it: transfers, a summary of 10,000 tasks, a page of a 10 GB log, idle memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from cache import TASKS, TOPOLOGIES, _records

from storm_dagster.model.records import encode_record
from storm_dagster.model.run_file import RunFile
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.embedded import EmbeddedZooKeeper
from storm_dagster.zk.session import ZkSession

__all__ = ["report"]

LOG_BYTES = 10 * 2**30


def _pss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise LookupError(pid)


def _start(home: Path, zookeeper: str) -> tuple[subprocess.Popen[bytes], str]:
    host, _, port = zookeeper.rpartition(":")
    conf = {
        "storm.zookeeper.servers": [host],
        "storm.zookeeper.port": int(port),
        "nimbus.http.port": 0,
        "nimbus.thrift.port": 0,
    }
    pairs = [part for key, value in conf.items() for part in ("-c", f"{key}={json.dumps(value)}")]
    process = subprocess.Popen(
        [sys.executable, "-m", "storm_dagster", "nimbus", "--id", "n1", "--home", str(home), *pairs],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def url() -> str | None:
        record = RunFile.read(RunFile.path_of(home, "nimbus", "n1"))
        if record is None:
            return None
        base = f"http://127.0.0.1:{record.ports['http']}"
        return base if httpx.get(f"{base}/healthz", trust_env=False).json()["leader"] else None

    found = eventually(url, 60, "nimbus", ignore=(httpx.HTTPError,))
    assert found is not None
    return process, found


def _median_ms(ask: Callable[[], httpx.Response], samples: int, pause: float = 0.0) -> float:
    taken: list[float] = []
    for _ in range(samples):
        time.sleep(pause)
        began = time.perf_counter()
        ask().raise_for_status()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1000


def _transfers(http: httpx.Client, megabytes: int) -> tuple[float, float]:
    """(upload, download) in MB/s."""
    chunk = os.urandom(1 << 20)
    began = time.perf_counter()
    http.put("/v1/blobs/bench", content=(chunk for _ in range(megabytes))).raise_for_status()
    up = megabytes / (time.perf_counter() - began)
    began = time.perf_counter()
    with http.stream("GET", "/v1/blobs/bench") as answer:
        size = sum(len(part) for part in answer.iter_raw())
    down = size / 2**20 / (time.perf_counter() - began)
    http.delete("/v1/blobs/bench").raise_for_status()
    return up, down


def report(*, quick: bool = False) -> Iterator[tuple[str, str, str]]:
    """Rows of the benchmark."""
    samples = 5 if quick else 15
    with (
        tempfile.TemporaryDirectory(prefix="bench-nimbus-") as folder,
        EmbeddedZooKeeper(Path(folder) / "zookeeper", durable=False) as server,
    ):
        home = Path(folder) / "home"
        process, url = _start(home, server.address)
        try:
            with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
                time.sleep(5)
                yield "idle memory of nimbus (PSS)", "Storm: 1 GB heap", f"{_pss_mb(process.pid):.0f} MB"
                rates = [_transfers(http, 64 if quick else 256) for _ in range(3)]
                up, down = (statistics.median(rate) for rate in zip(*rates, strict=True))
                yield "upload over HTTP, hashed and stored, MB/s", "-", f"{up:,.0f}"
                yield "download over HTTP, MB/s", "-", f"{down:,.0f}"
                log = home / "logs" / "big.log"
                with log.open("wb") as stream:
                    stream.truncate(LOG_BYTES)
                page = _median_ms(
                    lambda: http.get("/logview", params={"cmd": "showLog", "log": "big.log"}), samples
                )
                yield "page (128 KiB) of a 10 GB log", "-", f"{page:.1f} ms"
                session = ZkSession.connect(server.address, root="/storm", session_timeout_ms=20_000)
                try:
                    state = ZooKeeperClusterState(session)
                    for number in range(TOPOLOGIES):
                        for path, record in _records(number).items():
                            state.create_node(path, encode_record(record))
                    eventually(
                        lambda: (
                            http.get("/api/v1/cluster/summary").json()["tasksTotal"] == TOPOLOGIES * TASKS
                        ),
                        60,
                        "the summary",
                    )
                    # Longer apart than a view is shared, so that each answer reads the cluster.
                    fresh = _median_ms(lambda: http.get("/api/v1/cluster/summary"), samples, 0.5)
                    shared = _median_ms(lambda: http.get("/api/v1/cluster/summary"), samples)
                    every = _median_ms(lambda: http.get("/api/v1/topology/summary"), samples, 0.5)
                finally:
                    session.close()
                size = f"{TOPOLOGIES} topologies, {TOPOLOGIES * TASKS:,} tasks"
                yield f"cluster summary, {size}", "-", f"{fresh:.0f} ms ({shared:.0f} ms within 0.2 s)"
                yield f"topology summary, {size}", "-", f"{every:.0f} ms"
                yield "nimbus with these (PSS)", "-", f"{_pss_mb(process.pid):.0f} MB"
        finally:
            process.terminate()
            process.wait(30)


if __name__ == "__main__":
    for row in report():
        print("| " + " | ".join(row) + " |")
