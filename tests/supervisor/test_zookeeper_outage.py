"""An outage of ZooKeeper restarts nothing, and the slots go on without it."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.host.processes import start_ticks
from storm_dagster.model.records import Assignment, WorkerSlot
from storm_dagster.supervisor.daemon import run
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.operations.storm_client import as_storm
from storm_rigs.servers.blob_server import BlobServer
from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.conf import zookeeper_conf

pytestmark = pytest.mark.zookeeper


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedZooKeeper]:
    server = EmbeddedZooKeeper(tmp_path / "zk", free_port(), durable=False)
    server.start()
    yield server
    server.stop()


def test_an_outage_restarts_nothing(
    server: EmbeddedZooKeeper,
    tmp_path: Path,
    blob_server: BlobServer,
    stand_in: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="storm_dagster")
    home = tmp_path / "home"
    home.mkdir()
    keys = {
        **zookeeper_conf(server.address),
        "storm.zookeeper.session.timeout": patience(1000),
        "nimbus.seeds": [blob_server.url.removeprefix("http://")],
        "supervisor.heartbeat.frequency.secs": 1,
        "supervisor.worker.shutdown.sleep.secs": 0.5,
        "supervisor.worker.timeout.secs": patience(30),
    }
    blob_server.put_code("wc-1-1", {"topology.python": stand_in})
    cluster = StormClusterState.open(
        {**keys, "storm.zookeeper.session.timeout": patience(30_000)}, create_root=True
    )
    as_storm(cluster).set_assignment(
        "wc-1-1",
        Assignment(
            topology_id="wc-1-1",
            code_dir="wc-1-1",
            node_host={"s1": "127.0.0.1"},
            workers=(WorkerSlot(node="s1", host="127.0.0.1", port=6900, tasks="1"),),
            task_start_secs={},
            timestamp_ms=1,
        ),
    )
    stop = threading.Event()
    daemon = threading.Thread(
        target=run, args=(load_cluster_conf(None, keys), home, "s1", stop, (6900,)), daemon=True
    )
    daemon.start()

    def pids() -> list[int]:
        try:
            text = (home / "starts").read_text()
        except FileNotFoundError:
            return []
        # A line that is being written may be seen without its end.
        complete = text.rpartition("\n")[0]
        return [json.loads(line)["pid"] for line in complete.splitlines()]

    try:
        eventually(lambda: as_storm(cluster).supervisor_info("s1"), what="a heartbeat")
        eventually(lambda: "-> running" in caplog.text, what="the worker")
        server.stop()
        eventually(lambda: "out of reach" in caplog.text, what="the outage being noticed")
        (first,) = pids()
        assert start_ticks(first) is not None
        # A crash during the outage is mended without ZooKeeper.
        os.kill(first, signal.SIGKILL)
        eventually(lambda: len(pids()) == 2, what="the restart during the outage")
        server.start()
        eventually(lambda: "can be read again" in caplog.text, what="the end of the outage")
        assert len(pids()) == 2 and start_ticks(pids()[1]) is not None
        fresh = StormClusterState.open(keys)
        eventually(lambda: as_storm(fresh).supervisor_info("s1"), what="the heartbeat again")
        fresh.disconnect()
    finally:
        stop.set()
        daemon.join(timeout=patience(20))
        cluster.disconnect()
        for pid in pids():
            arguments = Path(f"/proc/{pid}/cmdline")
            if arguments.exists() and str(home).encode() in arguments.read_bytes():
                os.kill(pid, signal.SIGKILL)
    assert not daemon.is_alive()
