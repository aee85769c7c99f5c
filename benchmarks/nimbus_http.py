"""Nimbus as its clients see it: transfers, summaries of 10,000 tasks, a page of a 10 GB log,
memory.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
from cache import TASKS, TOPOLOGIES, _records
from dataplane import pss_mb
from tables import Row, run
from thriftpy2.protocol import TCyBinaryProtocolFactory
from thriftpy2.rpc import make_client
from thriftpy2.transport import TCyFramedTransportFactory

from storm_dagster.host.processes import RunFile
from storm_dagster.model.records import encode_record
from storm_dagster.nimbus.thrift.idl import load_idl
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.session import ZkSession

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rigs"))

from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper

_LOG_BYTES = 10 * 2**30


def start_nimbus(home: Path, zookeeper: str) -> tuple[subprocess.Popen[bytes], str, int]:
    """The process, the address of its HTTP service, the port of its Thrift service."""
    host, _, port = zookeeper.rpartition(":")
    conf = {
        "storm.zookeeper.servers": [host],
        "storm.zookeeper.port": int(port),
        "nimbus.http.port": 0,
        "nimbus.thrift.port": 0,
    }
    pairs = [part for key, value in conf.items() for part in ("-c", f"{key}={json.dumps(value)}")]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "storm_dagster",
            "daemon",
            "nimbus",
            "--id",
            "n1",
            "--home",
            str(home),
            *pairs,
        ],
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
    record = RunFile.read(RunFile.path_of(home, "nimbus", "n1"))
    assert record is not None
    return process, found, record.ports["thrift"]


def _thrift(port: int) -> Any:
    """A client as Storm's tools make theirs."""
    return make_client(
        load_idl().Nimbus,
        host="127.0.0.1",
        port=port,
        proto_factory=TCyBinaryProtocolFactory(),
        trans_factory=TCyFramedTransportFactory(),
        timeout=60_000,
    )


def _get(http: httpx.Client, path: str, **params: str) -> Callable[[], object]:
    return lambda: http.get(path, params=params).raise_for_status()


def _median_ms(ask: Callable[[], object], samples: int, pause: float = 0.0) -> float:
    taken: list[float] = []
    for _ in range(samples):
        time.sleep(pause)
        began = time.perf_counter()
        ask()
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


def _thrift_transfers(client: Any, megabytes: int) -> tuple[float, float]:
    """(upload, download) in MB/s, in chunks of the size that Storm's clients use, each answered."""
    chunk = os.urandom(307_200)
    chunks = megabytes * 2**20 // len(chunk)
    began = time.perf_counter()
    location = client.beginFileUpload()
    for _ in range(chunks):
        client.uploadChunk(location, chunk)
    client.finishFileUpload(location)
    up = chunks * len(chunk) / 2**20 / (time.perf_counter() - began)
    meta = load_idl().SettableBlobMeta(acl=[])
    session = client.beginCreateBlob("bench", meta)
    for _ in range(chunks):
        client.uploadBlobChunk(session, chunk)
    client.finishBlobUpload(session)
    began, size = time.perf_counter(), 0
    session = client.beginBlobDownload("bench").session
    while part := client.downloadBlobChunk(session):
        size += len(part)
    down = size / 2**20 / (time.perf_counter() - began)
    client.deleteBlob("bench")
    return up, down


def report(*, quick: bool = False) -> Iterator[Row]:
    """Rows of the benchmark."""
    samples = 5 if quick else 15
    with (
        tempfile.TemporaryDirectory(prefix="bench-nimbus-") as folder,
        EmbeddedZooKeeper(Path(folder) / "zookeeper", durable=False) as server,
    ):
        home = Path(folder) / "home"
        process, url, thrift_port = start_nimbus(home, server.address)
        try:
            with (
                httpx.Client(base_url=url, timeout=60, trust_env=False) as http,
                closing(_thrift(thrift_port)) as client,
            ):
                time.sleep(5)
                yield (
                    "idle memory of nimbus (PSS)",
                    "Storm: 1 GB heap",
                    f"{pss_mb(process.pid):.0f} MB",
                )
                yield from _transfer_rows(http, client, 64 if quick else 256)
                yield _log_row(http, home, samples)
                yield from _summary_rows(http, client, server.address, samples)
                yield "nimbus with these (PSS)", "-", f"{pss_mb(process.pid):.0f} MB"
        finally:
            process.terminate()
            process.wait(30)


def _transfer_rows(http: httpx.Client, client: Any, megabytes: int) -> Iterator[Row]:
    for way, transfer in (
        ("HTTP", lambda: _transfers(http, megabytes)),
        ("Thrift (chunks of 300 KiB)", lambda: _thrift_transfers(client, megabytes)),
    ):
        rates = [transfer() for _ in range(3)]
        up, down = (statistics.median(rate) for rate in zip(*rates, strict=True))
        yield f"upload over {way}, hashed and stored, MB/s", "-", f"{up:,.0f}"
        yield f"download over {way}, MB/s", "-", f"{down:,.0f}"


def _log_row(http: httpx.Client, home: Path, samples: int) -> Row:
    log = home / "logs" / "big.log"
    with log.open("wb") as stream:
        stream.truncate(_LOG_BYTES)
    newest = _median_ms(_get(http, "/logview", cmd="showLog", log="big.log"), samples)
    middle = _median_ms(
        _get(http, "/logview", cmd="showLog", log="big.log", pos=str(_LOG_BYTES // 2)), samples
    )
    return "page of a 10 GB log: newest, middle", "-", f"{newest:.1f} ms, {middle:.1f} ms"


def _summary_rows(http: httpx.Client, client: Any, zookeeper: str, samples: int) -> Iterator[Row]:
    session = ZkSession(zookeeper, root="/storm", session_timeout_ms=20_000)
    try:
        state = ZooKeeperClusterState(session)
        for number in range(TOPOLOGIES):
            for path, record in _records(number).items():
                state.create_node(path, encode_record(record))

        def complete() -> bool:
            return http.get("/api/v1/cluster/summary").json()["tasksTotal"] == TOPOLOGIES * TASKS

        eventually(complete, 60, "the summary")
        size = f"{TOPOLOGIES} topologies, {TOPOLOGIES * TASKS:,} tasks"
        for metric, ask in (
            ("getClusterInfo (Thrift)", client.getClusterInfo),
            ("cluster summary (HTTP)", _get(http, "/api/v1/cluster/summary")),
            ("topology summary (HTTP)", _get(http, "/api/v1/topology/summary")),
        ):
            # Longer apart than a view is shared, so that each response reads the cluster.
            fresh, shared = _median_ms(ask, samples, 0.5), _median_ms(ask, samples)
            yield f"{metric}, {size}", "-", f"{fresh:.0f} ms ({shared:.0f} ms within 0.2 s)"
    finally:
        session.close()


if __name__ == "__main__":
    run("nimbus", __doc__, lambda quick: report(quick=quick))
