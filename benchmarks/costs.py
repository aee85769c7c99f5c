"""Requests to ZooKeeper of idle supervisors (their real links), of the healing sensor and of a
nimbus that leads.

``python benchmarks/costs.py [SUPERVISORS] [TOPOLOGIES] [SECONDS]``: reads per second while only
heartbeats come, reads of one change, the CPU of the sensor, which has a process of its own, and
what is left when all topologies are gone.
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

from storm_rigs.stage.builder import Stage

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rigs"))

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.defs.healing import heartbeat_sensor, sensor_watch
from storm_dagster.model import paths
from storm_dagster.model.conf import default_conf
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.model.errors import Unavailable
from storm_dagster.operations.live import lifecycle
from storm_dagster.testing.waiting import eventually
from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper
from storm_rigs.servers.request_counts import RequestCounts, count_requests, server_metrics
from storm_rigs.stage.conf import zookeeper_conf
from storm_rigs.stage.records import World
from storm_rigs.stage.supervisor_link import LinkedSupervisor

CONF = {"topology.workers": 1, "topology.acker.executors": 0}


_LINKS = 50
"""Supervisors of one process: threads of more than these only wait for each other."""


def serve(pipe: Connection, counts: RequestCounts, runs: list[int]) -> None:
    """For each message the reads, CPU seconds and requested runs since the last one, until it is
    false.
    """
    while pipe.recv():
        pipe.send((counts.reads(), time.process_time(), sum(runs)))
        counts.reset()
        runs.clear()


def _no_code(cluster: Any, topology: Any) -> Any:
    """No topology waits for a placement here, so that none is planned."""
    raise Unavailable(f"the code of {topology.id} is not read here")


def sensor(conf: dict[str, Any], pipe: Connection) -> None:
    """Tick after tick in this process."""
    logging.disable(logging.CRITICAL)
    instance = SimpleNamespace(get_run_records=lambda **_: [])
    values, cursor, runs = {**default_conf(), **conf}, "", list[int]()
    limits = LivenessLimits.from_conf(values)
    with count_requests() as counts:
        asked = threading.Thread(target=serve, args=(pipe, counts, runs), daemon=True)
        asked.start()
        while asked.is_alive():
            context: Any = SimpleNamespace(cursor=cursor, instance=instance)
            tick = heartbeat_sensor._Tick(
                "heartbeat_sensor", context, limits, DagsterNames(), load=_no_code
            )
            with sensor_watch.open_watch(values, tick_secs=45.0, interval_secs=1.0) as watch:
                runs.append(len(tick.run(watch, time.monotonic() + 45.0)))
                tick.cursor.store(watch.cluster, tick.memory, tick.epoch)
            cursor = tick.cursor.after(tick.memory)


def supervise(
    conf: dict[str, Any], pipe: Connection, names: list[str], ports: tuple[int, ...]
) -> None:
    """The links of some supervisors; the first message is sent when all of them have read what they
    are to run.
    """
    logging.disable(logging.CRITICAL)
    with count_requests() as counts:
        links = [
            LinkedSupervisor({**conf, "supervisor.heartbeat.frequency.secs": 10}, name, ports)
            for name in names
        ]
        for each in links:
            each.link.start()
        eventually(
            lambda: all(each.link.desired is not None for each in links),
            timeout=600,
            what="all supervisors",
        )
        pipe.send(None)
        serve(pipe, counts, [])
        for each in links:
            each.link.close()


class Part:
    """A process of its own, which counts its requests to ZooKeeper."""

    def __init__(self, target: Any, conf: dict[str, Any], *more: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(conf, theirs, *more), daemon=True)
        self._process.start()

    def ask(self) -> tuple[int, float, int]:
        self.pipe.send(True)
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.send(False)
        self._process.join(60.0)
        self._process.terminate()


def beat(world: World, ids: list[str], stop: threading.Event) -> None:
    """The topology masters of all topologies, each every ten seconds; there may be more of them
    each time.
    """
    while not stop.wait(0.1):
        for path in [paths.taskbeats(each) for each in ids]:
            world.cluster.state.set_data(path, world.cluster.state.get_data(path) or b"")
            if stop.wait(9.9 / len(ids)):
                return


def measure(
    address: str,
    folder: Path,
    counts: RequestCounts,
    supervisors: int,
    topologies: int,
    secs: float,
) -> None:
    conf = {
        **zookeeper_conf(address, "/costs"),
        "storm.zookeeper.session.timeout": 20000,
        "task.cleanup.timeout.sec": 0,
    }
    logging.disable(logging.CRITICAL)
    with Stage(folder, conf, home=folder) as stage:
        nimbus = stage.nimbus().await_leading()
        cluster = stage.cluster
        world = World(cluster, LocalBlobStore(nimbus.folder / "blobs"), conf, time=int(time.time()))
        ports = tuple(range(6900, 6900 + 2 + 2 * topologies // supervisors))
        names = [f"sup{number}" for number in range(supervisors)]
        for name in names:
            # Registered, but not there yet: each would read each submission, which is not what is
            # measured.
            world.supervisor(name, ports)
        ids: list[str] = []
        stop = threading.Event()
        beating = threading.Thread(target=beat, args=(world, ids, stop), daemon=True)
        beating.start()
        for number in range(topologies):
            ids.append(world.submit(f"t{number}", conf=CONF))
            world.run_workers(ids[-1])
        links = [
            Part(supervise, conf, names[at : at + _LINKS], ports)
            for at in range(0, supervisors, _LINKS)
        ]
        for each in links:
            each.pipe.recv()
        healing = Part(sensor, conf)

        def of_supervisors() -> int:
            return sum(each.ask()[0] for each in links)

        # On a busy machine its process may need longer to begin; until then the leader looks in its
        # place.
        eventually(lambda: cluster.state.exists(paths.HEALER), timeout=600, what="an armed sensor")
        time.sleep(30.0)
        _, cpu, _ = healing.ask()
        of_supervisors()
        counts.reset()
        began = time.monotonic()
        time.sleep(secs)
        (reads, used, runs), took = healing.ask(), time.monotonic() - began
        of_nimbus = counts.reads() - counts.reads([cluster.session])
        print(f"{supervisors} supervisors, {topologies} topologies, idle for {took:.0f} s")
        idle = of_supervisors() / took / supervisors
        print(f"  reads/s of a supervisor  {idle:.2f}")
        print(f"  reads/s of the sensor    {reads / took:.2f}")
        print(f"  reads/s of the nimbus    {of_nimbus / took:.2f}")
        print(
            f"  CPU of the sensor        {100 * (used - cpu) / took:.1f} % of a core, {runs} runs requested"
        )
        began = time.monotonic()
        world.submit("one-more", conf=CONF)
        time.sleep(3.0)
        more = of_supervisors() / supervisors - idle * (time.monotonic() - began)
        print(f"  reads of a supervisor at a submission  {more:.2f}", flush=True)
        stop.set()
        beating.join()
        healing.end()
        for name in [*(f"t{number}" for number in range(topologies)), "one-more"]:
            found = world.named(name)
            lifecycle.kill(world.context(), name, wait_secs=0)
            for slot in found.live_workers:
                world.stop_worker(found.id, *slot)
            lifecycle.remove(world.context(), found.id)
        nimbus.stop()
        time.sleep(25.0)
        print(
            f"  watches left, one for each supervisor  {server_metrics(address)['zk_watch_count']}"
        )
        for each in links:
            each.end()


def main() -> None:
    supervisors, topologies, secs = (
        int(each) for each in (sys.argv[1:] + ["50", "200", "60"][len(sys.argv) - 1 :])
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedZooKeeper(Path(folder) / "zk", durable=False) as server,
    ):
        with count_requests() as counts:
            measure(server.address, Path(folder), counts, supervisors, topologies, secs)


if __name__ == "__main__":
    main()
