"""Savings of nimbus's read cache: the view of a cluster of 300 topologies and 10,000 tasks, with
and without it.
"""

from __future__ import annotations

import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from storm_dagster.model import paths
from storm_dagster.model.records import (
    Assignment,
    StormBase,
    TaskBeats,
    TaskTable,
    WorkerNode,
    WorkerSlot,
    encode_record,
)
from storm_dagster.model.view import ClusterView
from storm_dagster.zk.cached_state import CachedReads
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.disk_cache import open_disk_cache
from storm_dagster.zk.root import create_cluster_root
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.view_loading import load_view

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rigs"))

from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper

TOPOLOGIES, TASKS, WORKERS = 300, 34, 4


def _records(number: int) -> dict[str, Any]:
    """The nodes of one topology."""
    topology_id = f"t{number}-{number}-1"
    nodes = {f"s{(number + k) % 100}": 6900 + (number + k) // 100 for k in range(WORKERS)}
    share = [list(range(1 + k, TASKS + 1, WORKERS)) for k in range(WORKERS)]
    workers = tuple(
        WorkerSlot.model_validate(
            {"node": node, "host": node, "port": port, "tasks": ",".join(map(str, tasks))}
        )
        for (node, port), tasks in zip(nodes.items(), share, strict=True)
    )
    live = {
        paths.workers(topology_id) + f"/{node}-{port}": WorkerNode(
            pid=1, token="t" * 32, version=0, tasks="1", started_ms=1, status="running"
        )
        for node, port in nodes.items()
    }
    return {
        paths.topology(topology_id): StormBase(
            name=f"t{number}",
            launch_time_secs=1,
            status="ACTIVE",
            workers=WORKERS,
            executors={"a": 30},
            token="t",
        ),
        paths.tasks(topology_id): TaskTable.model_validate(
            {"components": {"a": {"type": "bolt", "tasks": f"1-{TASKS}"}}}
        ),
        paths.assignment(topology_id): Assignment(
            topology_id=topology_id,
            code_dir=topology_id,
            node_host={node: node for node in nodes},
            workers=workers,
            task_start_secs={f"1-{TASKS}": 1},
            timestamp_ms=1,
        ),
        paths.taskbeats(topology_id): TaskBeats(topology_id=topology_id, topology_master=1),
        **live,
    }


def _packets(address: str) -> int:
    """Packets that the server has received so far."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as link:
        link.sendall(b"mntr")
        text = b""
        while part := link.recv(65536):
            text += part
    figures = dict(line.split("\t", 1) for line in text.decode().splitlines() if "\t" in line)
    return int(figures["zk_packets_received"])


def _measure(load: Callable[[], ClusterView], address: str, samples: int) -> tuple[float, float]:
    """Median seconds of one view, and requests to ZooKeeper for it."""
    load()
    before, took = _packets(address), []
    for _ in range(samples):
        began = time.perf_counter()
        view = load()
        took.append(time.perf_counter() - began)
        assert len(view.topologies) == TOPOLOGIES
    return statistics.median(took), (_packets(address) - before) / samples


def report(*, quick: bool = False) -> Iterator[tuple[str, str, str]]:
    """Rows of the benchmark."""
    samples = 5 if quick else 15
    with (
        tempfile.TemporaryDirectory(prefix="bench-cache-") as folder,
        EmbeddedZooKeeper(Path(folder) / "zookeeper", durable=False) as server,
    ):
        session = ZkSession(server.address, root="/bench", session_timeout_ms=20_000)
        try:
            plain = ZooKeeperClusterState(session)
            create_cluster_root(plain, "bench")
            for number in range(TOPOLOGIES):
                for path, record in _records(number).items():
                    plain.create_node(path, encode_record(record))
            without, asked = _measure(lambda: load_view(plain, "bench"), server.address, samples)
            cached = CachedReads(plain, open_disk_cache(Path(folder) / "cache", None, reset=True))
            with_cache, asked_less = _measure(
                lambda: cached.load_view("bench"), server.address, samples
            )
            metrics = cached.metrics
            share = metrics.memory / max(1, metrics.memory + metrics.disk + metrics.zookeeper)
            cached.close()
            restarted = CachedReads(
                plain, open_disk_cache(Path(folder) / "cache", None, reset=False)
            )
            began = time.perf_counter()
            restarted.load_view("bench")
            first = time.perf_counter() - began
            restarted.close()
        finally:
            session.close()
    yield (
        f"view of {TOPOLOGIES} topologies, {TOPOLOGIES * TASKS:,} tasks (behind getClusterInfo, list, status)",
        f"without the cache {without * 1000:.0f} ms, {asked:,.0f} reads of ZooKeeper",
        f"{with_cache * 1000:.0f} ms, {asked_less:,.0f} reads ({share:.1%} of cacheable ones from memory; "
        f"first one after a restart with the disk level {first * 1000:.0f} ms)",
    )


if __name__ == "__main__":
    for row in report():
        print("| " + " | ".join(row) + " |")
