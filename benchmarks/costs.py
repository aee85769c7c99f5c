"""Requests to ZooKeeper of idle supervisors (their real links), of the healing sensor and of a nimbus' look at blobs.

``python benchmarks/costs.py [SUPERVISORS] [TOPOLOGIES] [SECONDS]``: reads per second while only heartbeats come, reads of
one change, and what is left when all topologies are gone.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rigs"))

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.defs.healing.heartbeat_sensor import _Watch
from storm_dagster.model import paths
from storm_dagster.operations.live import lifecycle
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.embedded_zookeeper import EmbeddedZooKeeper
from storm_rigs.request_counts import RequestCounts, count_requests, server_metrics
from storm_rigs.supervisor_links import LinkedSupervisor
from storm_rigs.world import World

CONF = {"topology.workers": 1, "topology.acker.executors": 0}


def beat(world: World, ids: list[str], stop: threading.Event) -> None:
    """The topology masters of all topologies, each every ten seconds."""
    found = [(paths.taskbeats(each), world.cluster.state.get_data(paths.taskbeats(each)) or b"") for each in ids]
    while not stop.is_set():
        for path, raw in found:
            world.cluster.state.set_data(path, raw)
            if stop.wait(10.0 / max(1, len(found))):
                return


def poll(watch: _Watch, stop: threading.Event) -> None:
    """The sensor between two limits."""
    while not stop.is_set():
        watch.poll()
        watch.wait(5.0)


def measure(address: str, folder: Path, counts: RequestCounts, supervisors: int, topologies: int, secs: float) -> None:
    host, _, port = address.rpartition(":")
    conf = {
        "storm.zookeeper.servers": [host],
        "storm.zookeeper.port": int(port),
        "storm.zookeeper.root": "/costs",
        "storm.zookeeper.session.timeout": 20000,
        "task.cleanup.timeout.sec": 0,
    }
    logging.disable(logging.WARNING)
    with StormClusterState.open(conf, create_root=True) as cluster, StormClusterState.open(conf) as sensor:
        world = World(cluster, LocalBlobStore(folder / "blobs"), conf)
        world.lead()
        ports = tuple(range(6900, 6900 + 2 + 2 * topologies // supervisors))
        links = [
            LinkedSupervisor({**conf, "supervisor.heartbeat.frequency.secs": 10}, f"sup{number}", ports)
            for number in range(supervisors)
        ]
        for each in links:
            each.link.start()
        eventually(lambda: len(cluster.state.get_children(paths.SUPERVISORS)) == supervisors, timeout=600, what="all")
        before = server_metrics(address)
        ids = [world.submit(f"t{number}", conf=CONF) for number in range(topologies)]
        for each in ids:
            world.run_workers(each)
        watch, stop = _Watch(sensor, aging_secs=18.0), threading.Event()
        threads = [
            threading.Thread(target=beat, args=(world, ids, stop)),
            threading.Thread(target=poll, args=(watch, stop)),
        ]
        for thread in threads:
            thread.start()
        time.sleep(20.0)
        counts.reset()
        cpu, began = time.process_time(), time.monotonic()
        time.sleep(secs)
        took = time.monotonic() - began
        sessions = [each.session for each in links]
        print(f"{supervisors} supervisors, {topologies} topologies, idle for {took:.0f} s")
        print(f"  reads/s of a supervisor  {counts.reads(sessions) / took / supervisors:.2f}")
        print(f"  reads/s of the sensor    {counts.reads([sensor.session]) / took:.2f}")
        print(f"  CPU of all of it         {(time.process_time() - cpu) / took:.2f} cores")
        counts.reset()
        world.submit("one-more", conf=CONF)
        time.sleep(3.0)
        print(f"  reads of a supervisor at a submission  {counts.reads(sessions) / supervisors:.2f}")
        stop.set()
        for thread in threads:
            thread.join()
        for name in [*(f"t{number}" for number in range(topologies)), "one-more"]:
            found = world.named(name)
            lifecycle.kill(world.context(), name, wait_secs=0)
            for slot in found.live_workers:
                world.stop_worker(found.id, *slot)
            lifecycle.remove(world.context(), found.id)
        time.sleep(3.0)
        watch.cluster.disconnect()
        after = server_metrics(address)
        print(f"  watches before and after  {before['zk_watch_count']}, {after['zk_watch_count']}")
        for each in links:
            each.link.close()


def main() -> None:
    supervisors, topologies, secs = (int(each) for each in (sys.argv[1:] + ["50", "200", "60"][len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as folder, EmbeddedZooKeeper(Path(folder) / "zk", durable=False) as server:
        with count_requests() as counts:
            measure(server.address, Path(folder), counts, supervisors, topologies, secs)


if __name__ == "__main__":
    main()
