"""Every listener that an untrusted peer reaches, under attack: it lives, stays small, and answers
others meanwhile.

``FUZZ_SECS=1800 make fuzz ARGS="tests/security/test_fuzzed_listeners.py"`` attacks each for half an
hour.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from storm_dagster.api import Grouping, TopologyBuilder
from storm_dagster.api.spark.bridge import make_deliver
from storm_dagster.host.processes import RunFile
from storm_dagster.nimbus.thrift.idl import decoder
from storm_dagster.operations.live.worker_requests import ask_worker
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.protocols.fuzz_messages import (
    batch_messages,
    http_messages,
    thrift_messages,
    worker_messages,
)
from storm_rigs.protocols.fuzzing import (
    DEADLINE,
    SECS,
    Listener,
    fuzz,
    listening_process,
    tcp,
    within,
)
from storm_rigs.protocols.thrift_calls import encode_call
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.builder import Stage

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(SECS + 300)]

LOG_SERVICE = """
import sys
from pathlib import Path
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.supervisor.log_service import LogService

service = LogService(load_cluster_conf(None, {"supervisor.http.port": 0}), Path(sys.argv[1]), "s1")
service.start(lambda: ())
print(service.url, flush=True)
sys.stdin.read()
service.stop()
"""
ENDPOINT = """
import json, sys, threading, time
from storm_dagster.api.spark.bridge import BatchEndpoint

endpoint = BatchEndpoint("127.0.0.1")
ended = threading.Event()

def spout():
    while not ended.is_set():
        row = endpoint.take()
        if row is None:
            time.sleep(0.001)
        else:
            endpoint.ack(row[0])

thread = threading.Thread(target=spout)
thread.start()
print(json.dumps([endpoint.port, endpoint.secret.hex()]), flush=True)
sys.stdin.read()
ended.set()
thread.join()
endpoint.close()
"""
LOCATION = """
import dagster as dg

defs = dg.Definitions()
"""
WORDS = """
from storm_dagster.api import Bolt, Spout

class Lines(Spout):
    outputs = ["line"]

    def next_tuple(self):
        pass

class Split(Bolt):
    def process(self, tup):
        tup.values[0].split()
"""


def http_asker(url: str, *paths: str) -> Any:
    def ask() -> None:
        with httpx.Client(base_url=url, timeout=DEADLINE, trust_env=False) as client:
            for path in paths:
                answer = client.get(path)
                assert answer.status_code == 200, answer.text[:500]

    return ask


@pytest.fixture(scope="module")
def nimbus(zookeeper_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFile]:
    """A nimbus of its own process, which leads."""
    home = tmp_path_factory.mktemp("fuzzed")
    host, _, port = zookeeper_server.rpartition(":")
    conf = {
        "storm.zookeeper.servers": [host],
        "storm.zookeeper.port": int(port),
        "storm.zookeeper.root": f"/{home.name}-{os.getpid()}",
        "nimbus.http.port": 0,
        "nimbus.thrift.port": 0,
    }
    pairs = [part for key, value in conf.items() for part in ("-c", f"{key}={json.dumps(value)}")]
    command = [
        sys.executable,
        "-m",
        "storm_dagster",
        "daemon",
        "nimbus",
        "--home",
        str(home),
        "--id",
        "n1",
        *pairs,
    ]
    with (home / "out").open("wb") as out:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:

        def leads() -> RunFile | None:
            assert child.poll() is None, (home / "out").read_text()[-3000:]
            record = RunFile.read(RunFile.path_of(home, "nimbus", "n1"))
            if record is None:
                return None
            url = f"http://127.0.0.1:{record.ports['http']}/healthz"
            return record if httpx.get(url, trust_env=False, timeout=10).json()["leader"] else None

        yield eventually(leads, 60, "a leading nimbus", ignore=(httpx.HTTPError,))
    finally:
        child.terminate()
        child.wait(patience(30))


@pytest.mark.zookeeper
def test_nimbus_http(nimbus: RunFile) -> None:
    url = f"http://127.0.0.1:{nimbus.ports['http']}"
    paths = httpx.get(f"{url}/openapi.json", trust_env=False, timeout=30).json()["paths"]
    ask = http_asker(url, "/healthz", "/v1/topologies")
    fuzz(Listener("nimbus, HTTP", nimbus.pid, tcp(nimbus.ports["http"]), http_messages(paths), ask))


@pytest.mark.zookeeper
def test_nimbus_thrift(nimbus: RunFile) -> None:
    port = nimbus.ports["thrift"]
    call = encode_call("getNimbusConf", 5)

    def ask() -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as link:
            link.sendall(struct.pack("!i", len(call)) + call)
            stream = link.makefile("rb")
            (size,) = struct.unpack("!i", stream.read(4))
            assert decoder(stream.read(size)).read_message_begin() == ("getNimbusConf", 2, 5)

    fuzz(Listener("nimbus, Thrift", nimbus.pid, tcp(port), thrift_messages(), ask))


def test_log_pages_of_a_supervisor(tmp_path: Path) -> None:
    log = tmp_path / "logs/workers/wc-1-1700000000/6900/worker.log"
    log.parent.mkdir(parents=True)
    log.write_text("2026-01-01 INFO a line\n" * 200_000)
    with listening_process(LOG_SERVICE, str(tmp_path), folder=tmp_path) as (child, url):
        paths = httpx.get(f"{url}/openapi.json", trust_env=False, timeout=30).json()["paths"]
        # More often what costs most, with names that exist.
        well_known = http_messages({path: paths[path] for path in paths if "log" in path})
        page = "/api/v1/log?file=wc-1-1700000000/6900/worker.log&start=0&length=1000"

        def message(draw: Any) -> bytes:
            raw = http_messages(paths)(draw) if draw.random() < 0.3 else well_known(draw)
            return raw.replace(
                b"file=", b"file=workers%2Fwc-1-1700000000%2F6900%2Fworker.log&file=", 1
            )

        ask = http_asker(url, page)
        fuzz(Listener("log pages", child.pid, tcp(int(url.rpartition(":")[2])), message, ask))


@pytest.mark.zookeeper
def test_the_socket_of_a_worker(stage: Stage) -> None:
    builder = TopologyBuilder("wc")
    builder.set_spout("lines", "rig_code:Lines", outputs=["line"])
    builder.set_bolt("split", "rig_code:Split", inputs={"lines": Grouping.SHUFFLE})
    tasks = {"split": "1", "__acker": "2", "__topology_master": "3", "lines": "4"}
    # A worker whose session has ended answers no request: on a busy machine that would not be the
    # attack.
    stage.conf["storm.zookeeper.session.timeout"] = patience(20_000)
    rig = stage.workers(builder, tasks, code=WORDS)
    port = free_port()
    rig.assign({("s1", port): "1-4"})
    worker = rig.start("s1", port)
    eventually(rig.running, 60, "the worker")
    token = rig.live()["s1", port].token

    def ask() -> None:
        assert ask_worker("127.0.0.1", port, token, "ping", DEADLINE)

    fuzz(Listener("worker", worker.pid, tcp(port), worker_messages(token, token), ask))
    assert rig.running(), rig.log("s1", port)[-3000:]


class Batch:
    """The two calls that the shipped function makes on a DataFrame."""

    def __init__(self) -> None:
        import pyarrow

        self.table = pyarrow.table({"word": ["a", "b", "c"]})

    def select(self, *columns: str) -> Batch:
        return self

    def toArrow(self) -> Any:
        return self.table


def test_the_endpoint_of_sparks_batches(tmp_path: Path) -> None:
    with listening_process(ENDPOINT, folder=tmp_path) as (child, line):
        port, secret = json.loads(line)
        deliver = make_deliver("127.0.0.1", port, bytes.fromhex(secret), ("word",), 2)
        # Its libraries load at the first batch, on both sides.
        deliver(Batch(), 0)
        ask = lambda: within(lambda: deliver(Batch(), 0))  # noqa: E731
        fuzz(Listener("SparkSpout endpoint", child.pid, tcp(port), batch_messages, ask))
