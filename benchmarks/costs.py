"""Requests to ZooKeeper of idle supervisors (their real links), of the healing sensor and of a nimbus that leads.

``python benchmarks/costs.py [SUPERVISORS] [TOPOLOGIES] [SECONDS]``: reads per second while only heartbeats come, reads of
one change, the CPU of the sensor, which has a process of its own, and what is left when all topologies are gone.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rigs"))

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.core.liveness.detection import LivenessLimits
from storm_dagster.defs.healing import heartbeat_sensor
from storm_dagster.model import paths
from storm_dagster.model.conf import default_conf
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.operations.live import lifecycle
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.embedded_zookeeper import EmbeddedZooKeeper
from storm_rigs.nimbuses import Nimbuses
from storm_rigs.request_counts import RequestCounts, count_requests, server_metrics
from storm_rigs.supervisor_links import LinkedSupervisor
from storm_rigs.world import World

CONF = {"topology.workers": 1, "topology.acker.executors": 0}


def sensor(conf: dict[str, Any], pipe: Connection) -> None:
    """Tick after tick in this process; for each message reads, CPU seconds and requested runs since the last one."""
    logging.disable(logging.CRITICAL)
    instance = SimpleNamespace(get_run_records=lambda **_: [])
    values, cursor, runs, over = {**default_conf(), **conf}, "", 0, threading.Event()
    limits = LivenessLimits.from_conf(values)
    with count_requests() as counts:

        def answer() -> None:
            nonlocal runs
            while pipe.recv():
                pipe.send((counts.reads(), time.process_time(), runs))
                counts.reset()
                runs = 0
            over.set()

        threading.Thread(target=answer, daemon=True).start()
        while not over.is_set():
            context: Any = SimpleNamespace(cursor=cursor, instance=instance)
            tick = heartbeat_sensor._Tick("heartbeat_sensor", context, limits, DagsterNames())
            with heartbeat_sensor._kept_watch(values) as watch:
                runs += len(tick.run(watch, time.monotonic() + 45.0))
                tick.cursor.store(watch.cluster, tick.memory, tick.epoch)
            cursor = tick.cursor.after(tick.memory)


def beat(world: World, ids: list[str], stop: threading.Event) -> None:
    """The topology masters of all topologies, each every ten seconds; there may be more of them each time."""
    while not stop.wait(0.1):
        for path in [paths.taskbeats(each) for each in ids]:
            world.cluster.state.set_data(path, world.cluster.state.get_data(path) or b"")
            if stop.wait(9.9 / len(ids)):
                return


def measure(address: str, folder: Path, counts: RequestCounts, supervisors: int, topologies: int, secs: float) -> None:
    host, _, port = address.rpartition(":")
    conf = {
        "storm.zookeeper.servers": [host],
        "storm.zookeeper.port": int(port),
        "storm.zookeeper.root": "/costs",
        "storm.zookeeper.session.timeout": 20000,
        "task.cleanup.timeout.sec": 0,
    }
    logging.disable(logging.CRITICAL)
    nimbuses = Nimbuses(conf, folder)
    nimbus = nimbuses.start()
    nimbus.await_leading()
    with StormClusterState.open(conf) as cluster:
        world = World(cluster, LocalBlobStore(nimbus.folder / "blobs"), conf, time=int(time.time()))
        ports = tuple(range(6900, 6900 + 2 + 2 * topologies // supervisors))
        links = [
            LinkedSupervisor({**conf, "supervisor.heartbeat.frequency.secs": 10}, f"sup{number}", ports)
            for number in range(supervisors)
        ]
        for each in links:
            each.link.start()
        eventually(lambda: len(cluster.state.get_children(paths.SUPERVISORS)) == supervisors, timeout=600, what="all")
        before = server_metrics(address)
        pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        child = multiprocessing.get_context("spawn").Process(target=sensor, args=(conf, theirs), daemon=True)
        child.start()
        ids: list[str] = []
        stop = threading.Event()
        beating = threading.Thread(target=beat, args=(world, ids, stop), daemon=True)
        beating.start()
        for number in range(topologies):
            ids.append(world.submit(f"t{number}", conf=CONF))
            world.run_workers(ids[-1])

        def ask() -> tuple[int, float, int]:
            pipe.send(True)
            return pipe.recv()

        time.sleep(30.0)
        _, cpu, _ = ask()
        counts.reset()
        began = time.monotonic()
        time.sleep(secs)
        (reads, used, runs), took = ask(), time.monotonic() - began
        sessions = [each.session for each in links]
        of_supervisors = counts.reads(sessions)
        of_nimbus = counts.reads() - of_supervisors - counts.reads([cluster.session])
        print(f"{supervisors} supervisors, {topologies} topologies, idle for {took:.0f} s")
        print(f"  reads/s of a supervisor  {of_supervisors / took / supervisors:.2f}")
        print(f"  reads/s of the sensor    {reads / took:.2f}")
        print(f"  reads/s of the nimbus    {of_nimbus / took:.2f}")
        print(f"  CPU of the sensor        {100 * (used - cpu) / took:.1f} % of a core, {runs} runs requested")
        counts.reset()
        world.submit("one-more", conf=CONF)
        time.sleep(3.0)
        print(f"  reads of a supervisor at a submission  {counts.reads(sessions) / supervisors:.2f}")
        stop.set()
        beating.join()
        pipe.send(False)
        child.terminate()
        child.join()
        for name in [*(f"t{number}" for number in range(topologies)), "one-more"]:
            found = world.named(name)
            lifecycle.kill(world.context(), name, wait_secs=0)
            for slot in found.live_workers:
                world.stop_worker(found.id, *slot)
            lifecycle.remove(world.context(), found.id)
        nimbus.stop()
        time.sleep(25.0)
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
