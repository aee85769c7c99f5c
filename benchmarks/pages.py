"""Cost of looking at the list of 300 topologies: CPU of a nimbus while browsers show it, and
requests to topology masters.

A real nimbus, a real ZooKeeper server and five headless Chromiums. Records are rewritten as often
as 100 supervisors and 300 topology masters do it. In the place of each topology master is a socket
that counts connections.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from nimbus_http import start_nimbus
from playwright.sync_api import Page, sync_playwright
from tables import Row, run

from storm_dagster.model import paths
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StormBase,
    SupervisorInfo,
    TaskBeats,
    TaskTable,
    WorkerBeat,
    WorkerNode,
    WorkerSlot,
    encode_record,
)
from storm_dagster.model.slot import Slot
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.session import ZkSession

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rigs"))

from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper

TOPOLOGIES, TASKS, WORKERS, SUPERVISORS, BROWSERS = 300, 34, 4, 100, 5
_PERIOD_SECS = 10.0
"""Between two heartbeats of a topology master, and of a supervisor."""
_TABLE = TaskTable(
    components={
        "lines": ComponentTasks(type="spout", tasks="1-4"),
        "split": ComponentTasks(type="bolt", tasks="5-16"),
        "count": ComponentTasks(type="bolt", tasks="17-32"),
        "__acker": ComponentTasks(type="bolt", tasks="33"),
        "__topology_master": ComponentTasks(type="bolt", tasks="34"),
    }
)


class Masters:
    """Sockets in the place of topology masters. ``asked`` counts the connections."""

    def __init__(self, topologies: int = TOPOLOGIES) -> None:
        self.asked = 0
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(topologies)]
        self.ports = [one.getsockname()[1] for one in self._listeners]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        poll = select.poll()
        by_file = {one.fileno(): one for one in self._listeners}
        for number in by_file:
            poll.register(number, select.POLLIN)
        while not self._over.is_set():
            for number, _ in poll.poll(500):
                by_file[number].accept()[0].close()
                self.asked += 1

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for one in self._listeners:
            one.close()


class Cluster:
    """Records of supervisors, topologies and their workers; beats in a thread."""

    def __init__(self, state: ZooKeeperClusterState, masters: Masters) -> None:
        topologies = len(masters.ports)
        self._state = state
        self._began = int(time.time()) - 7200
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self.ids = [f"topology-{number:03}-{number}-{self._began}" for number in range(topologies)]
        self._slots = [
            {
                f"s{(number + k) % SUPERVISORS:03}": masters.ports[number]
                if k == 0
                else 100 + number
                for k in range(WORKERS)
            }
            for number in range(topologies)
        ]
        # Held by the sensors of Dagster: the leader leaves healing to them.
        state.set_ephemeral_node(paths.HEALER, b"{}")
        for number in range(SUPERVISORS):
            state.set_ephemeral_node(paths.supervisor(f"s{number:03}"), self._supervisor(number, 0))
        for number, topology_id in enumerate(self.ids):
            for path, record in self._records(number, topology_id).items():
                state.create_node(path, encode_record(record))
        self._thread.start()

    def _supervisor(self, number: int, count: int) -> bytes:
        name = f"s{number:03}"
        ports = tuple(sorted(slots[name] for slots in self._slots if name in slots))
        info = SupervisorInfo(
            host="127.0.0.1", ports=ports, started=self._began, count=count, version="1"
        )
        return encode_record(info)

    def _records(self, number: int, topology_id: str) -> dict[str, Any]:
        slots = self._slots[number]
        # The last task is the topology master's, in the first slot.
        shares = [
            ",".join(str(task) for task in range(TASKS - k, 0, -WORKERS)[::-1])
            for k in range(WORKERS)
        ]
        workers = tuple(
            WorkerSlot(node=node, host="127.0.0.1", port=port, tasks=share)
            for (node, port), share in zip(slots.items(), shares, strict=True)
        )
        live = {
            paths.worker(topology_id, one.node, one.port): WorkerNode(
                pid=1,
                token="t" * 32,
                version=0,
                tasks=one.tasks,
                started_ms=self._began * 1000,
                status="running",
            )
            for one in workers
        }
        executors = {"lines": 4, "split": 12, "count": 16}
        return {
            paths.tasks(topology_id): _TABLE,
            **live,
            paths.assignment(topology_id): Assignment(
                topology_id=topology_id,
                code_dir=topology_id,
                node_host=dict.fromkeys(slots, "127.0.0.1"),
                workers=workers,
                task_start_secs={f"1-{TASKS}": self._began},
                timestamp_ms=self._began * 1000,
            ),
            paths.taskbeats(topology_id): self._beats(number, 0),
            paths.topology(topology_id): StormBase(
                name=f"topology-{number:03}",
                launch_time_secs=self._began,
                status="ACTIVE",
                workers=WORKERS,
                executors=executors,
                token="t",
            ),
        }

    def _beats(self, number: int, count: int) -> TaskBeats:
        rate = 1000.0 + number + count % 7
        return TaskBeats(
            topology_id=self.ids[number],
            topology_master=TASKS,
            workers={
                Slot(node, port).key: WorkerBeat(
                    count=count, silent_ms=700 + k, uptime_secs=count * 10
                )
                for k, (node, port) in enumerate(self._slots[number].items())
            },
            version=0,
            trend="8899aabbccddeeff00112233445566"[count % 15 :] + "7" * (count % 15),
            summary={
                "rate": rate,
                "failed": 0.2,
                "p95_ms": 12.25,
                "capacity": 0.312,
                "lag": 17_000.0 + count,
            },
        )

    def _beat(self) -> None:
        """One round of heartbeats after the other, spread evenly over the period."""
        due, count = time.monotonic(), 0
        while True:
            count += 1
            for number, topology_id in enumerate(self.ids):
                due += _PERIOD_SECS / len(self.ids)
                if self._over.wait(max(0.0, due - time.monotonic())):
                    return
                self._state.set_data(
                    paths.taskbeats(topology_id), encode_record(self._beats(number, count))
                )
                if number < SUPERVISORS:
                    self._state.set_data(
                        paths.supervisor(f"s{number:03}"), self._supervisor(number, count)
                    )

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def _store_code(http: httpx.Client, ids: list[str]) -> None:
    """The blobs of each topology, without which the pages call it degraded."""
    for topology_id in ids:
        for key in ("stormjar.jar", "stormcode.ser", "stormconf.ser"):
            http.put(f"/v1/blobs/{topology_id}-{key}", content=b"{}").raise_for_status()


def _share(
    process: psutil.Process, secs: float, wait: Callable[[float], object] = time.sleep
) -> float:
    """Processor time of the process per second, while ``wait`` waits for so long."""

    def used() -> float:
        times = process.cpu_times()
        return times.user + times.system

    before, began = used(), time.monotonic()
    wait(secs)
    return (used() - before) / (time.monotonic() - began)


@contextlib.contextmanager
def _browsers(url: str) -> Iterator[list[Page]]:
    """Chromiums that show the list."""
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright, contextlib.ExitStack() as stack:
        pages: list[Page] = []
        for _ in range(BROWSERS):
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=options
            )
            stack.callback(browser.close)
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            pages.append(page)
            page.set_default_timeout(120_000)
            page.goto(url)
            page.wait_for_function(f"document.querySelectorAll('tbody tr').length === {TOPOLOGIES}")
        yield pages


def report(*, quick: bool = False) -> Iterator[Row]:
    """Rows of the benchmark."""
    secs = 20.0 if quick else 120.0
    with (
        tempfile.TemporaryDirectory(prefix="bench-pages-") as folder,
        EmbeddedZooKeeper(Path(folder) / "zookeeper", durable=False) as server,
        contextlib.closing(Masters()) as masters,
    ):
        process, url, _ = start_nimbus(Path(folder) / "home", server.address)
        session = ZkSession(server.address, root="/storm", session_timeout_ms=20_000)
        try:
            with contextlib.closing(Cluster(ZooKeeperClusterState(session), masters)) as cluster:
                nimbus = psutil.Process(process.pid)
                with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
                    _store_code(http, cluster.ids)
                    eventually(
                        lambda: http.get("/").text.count("<tr data-key") == TOPOLOGIES,
                        60,
                        "the list",
                    )
                    size = len(http.get("/").content) / 1024
                time.sleep(15.0)
                size_text = f"{TOPOLOGIES} topologies of {TASKS} tasks"
                idle = _share(nimbus, secs)
                yield (
                    f"nimbus, {size_text}, without a reader: % of a core",
                    "-",
                    f"{100 * idle:.1f}",
                )
                asked, served = masters.asked, 0

                def count(_: object) -> None:
                    nonlocal served
                    served += 1

                with _browsers(url) as pages:
                    pages[0].wait_for_timeout(10_000)
                    for page in pages:
                        page.on("response", count)
                    looked = _share(
                        nimbus, secs, lambda secs: pages[0].wait_for_timeout(secs * 1000)
                    )
                load, shown = (
                    os.getloadavg()[0],
                    f"{served / secs:.2f} pages of {size:.0f} KiB a second",
                )
                yield (
                    f"- {BROWSERS} browsers show the list, {shown}",
                    "aim: 10",
                    f"{100 * looked:.1f}",
                )
                yield (
                    "- its requests to topology masters",
                    "aim: 0",
                    f"{masters.asked - asked}",
                )
                yield f"- load of the machine of {os.cpu_count()} cores", "-", f"{load:.1f}"
        finally:
            session.close()
            process.terminate()
            process.wait(30)


if __name__ == "__main__":
    run("pages", __doc__, lambda quick: report(quick=quick))
