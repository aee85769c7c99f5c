"""A topology to look at: a nimbus, a supervisor's HTTP service and two real workers of a shop, one
of whose bolts can be made slow.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from storm_dagster.api import Grouping, TopologyBuilder
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model import paths
from storm_dagster.model.records import ComponentTasks, SupervisorInfo, TaskTable, encode_record
from storm_dagster.supervisor.log_service import LogService
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.nimbuses import Nimbuses, RunningNimbus
from storm_rigs.ports import free_port
from storm_rigs.worker_rig import WorkerRig

MARKUP = "<script>alert('x')</script><b>bold</b>"
"""In names, errors and logs: text everywhere."""
RATE = 40
"""Tuples per second of each of the two spouts."""

CODE = """
import time
from pathlib import Path

from storm_dagster.api import Bolt, Spout

SLOW = Path(__file__).with_name("slow")


class Source(Spout):
    outputs = ["item"]

    def initialize(self, conf, context):
        self.began, self.number = time.monotonic(), 0

    def next_tuple(self):
        due = (time.monotonic() - self.began) * 40
        if self.number < due:
            self.number += 1
            self.emit([self.number], tup_id=self.number)
        self.report_metric("lag", int(due - self.number))


class Pass(Bolt):
    outputs = ["item"]

    def process(self, tup):
        self.emit(tup.values)


class Enrich(Pass):
    def process(self, tup):
        if SLOW.exists():
            time.sleep(0.05)
        self.emit(tup.values)


class Score(Pass):
    def process(self, tup):
        time.sleep(0.001)
        if tup.values[0] % 20 == 0:
            self.emit(tup.values)


class End(Bolt):
    def process(self, tup):
        if tup.values[0] == 40:
            raise ValueError("<script>alert('x')</script><b>bold</b>")
"""
_KINDS: dict[str, tuple[Literal["bolt", "spout"], str]] = {
    "parse": ("bolt", "1-2"),
    "enrich": ("bolt", "3-4"),
    "sessions": ("bolt", "5"),
    "score": ("bolt", "6"),
    "__acker": ("bolt", "8"),
    "__topology_master": ("bolt", "9"),
    "clicks": ("spout", "10"),
    "orders": ("spout", "11"),
}


@dataclass
class Shop:
    """What runs."""

    nimbus: RunningNimbus
    """The one that leads."""
    nimbuses: Nimbuses
    rig: WorkerRig
    cluster: StormClusterState
    ports: tuple[int, int]

    def get(self, path: str) -> httpx.Response:
        return self.nimbus.get(path)

    def slow_down(self, slow: bool = True) -> None:
        """Let ``enrich`` sleep 50 ms for each tuple, or no longer."""
        switch = self.rig.code_dir / "code" / "slow"
        switch.touch() if slow else switch.unlink()

    def findings(self) -> list[dict[str, str]]:
        return self.get("/v1/topologies/shop").json()["findings"]


@contextlib.contextmanager
def open_shop(
    folder: Path,
    zookeeper: str,
    nimbuses: Callable[[dict[str, Any]], Nimbuses],
    last: str = "alerts<b>",
) -> Iterator[Shop]:
    """Start everything, and stop it. ``last`` names the bolt at the end."""
    host, _, port = zookeeper.rpartition(":")
    zk_conf: dict[str, Any] = {
        "storm.zookeeper.servers": [host],
        "storm.zookeeper.port": int(port),
        "storm.zookeeper.root": f"/t-{uuid.uuid4().hex[:12]}",
        "storm.zookeeper.session.timeout": 4000,
        "dagster.graphql.url": "http://127.0.0.1:1/graphql",
    }
    members = nimbuses(zk_conf)
    nimbus = members.start().await_leading()
    cluster = StormClusterState.open({**zk_conf, "storm.zookeeper.session.timeout": 30_000})
    builder = TopologyBuilder("shop")
    builder.set_spout("clicks", "rig_code:Source", outputs=["item"])
    builder.set_spout("orders", "rig_code:Source", outputs=["item"])
    shuffle = Grouping.SHUFFLE
    builder.set_bolt(
        "parse",
        "rig_code:Pass",
        inputs={"clicks": shuffle, "orders": shuffle},
        par=2,
        outputs=["item"],
    )
    builder.set_bolt(
        "enrich",
        "rig_code:Enrich",
        inputs={"parse": Grouping.fields("item")},
        par=2,
        outputs=["item"],
    )
    builder.set_bolt("sessions", "rig_code:Pass", inputs={"parse": shuffle}, outputs=["item"])
    builder.set_bolt(
        "score", "rig_code:Score", inputs={"enrich": shuffle, "sessions": shuffle}, outputs=["item"]
    )
    builder.set_bolt(last, "rig_code:End", inputs={"score": shuffle})
    kinds = {**_KINDS, last: ("bolt", "7")}
    table = TaskTable(
        components={
            name: ComponentTasks(type=kind, tasks=tasks) for name, (kind, tasks) in kinds.items()
        }
    )
    conf = {
        "topology.message.timeout.secs": 30,
        "task.heartbeat.frequency.secs": 1,
        "topology.acker.executors": 1,
    }
    code = {"rig_code.py": CODE}
    # Old enough for findings.
    launched = int(time.time()) - 60
    topology_id = f"shop-1-{launched}"
    rig = WorkerRig(
        folder,
        cluster,
        zk_conf,
        builder.build(),
        table,
        topology_id=topology_id,
        conf=conf,
        code=code,
        name="shop",
        launched=launched,
    )
    service = LogService(
        load_cluster_conf(None, {**zk_conf, "supervisor.http.port": 0}), folder, "s1"
    )
    service.start(lambda: ())
    ports = (free_port(), free_port())
    info = SupervisorInfo(
        host="127.0.0.1",
        ports=(*ports, 1),
        started=0,
        count=1,
        version="t",
        http=service.url,
        cpu=400,
        memory_mb=4096,
    )
    cluster.state.set_ephemeral_node(paths.supervisor("s1"), encode_record(info))
    reasons = {
        "reasons": {"3": f"the least loaded worker {MARKUP}"},
        "worker_reasons": {},
        "warnings": [],
    }
    with httpx.Client(base_url=nimbus.url, timeout=30, trust_env=False) as client:
        for key in ("stormconf.ser", "stormcode.ser"):
            client.put(
                f"/v1/blobs/{rig.topology_id}-{key}", content=(rig.code_dir / key).read_bytes()
            )
        client.put(f"/v1/blobs/{rig.topology_id}-stormjar.jar", content=b"jar")
        client.put(
            f"/v1/blobs/{rig.topology_id}-placement.json", content=json.dumps(reasons).encode()
        )
    try:
        rig.assign({("s1", ports[0]): "1,3,5,7-10", ("s1", ports[1]): "2,4,6,11"})
        for used in ports:
            rig.start("s1", used)
        eventually(rig.running, timeout=60, what="the workers")
        yield Shop(nimbus, members, rig, cluster, ports)
    finally:
        rig.stop()
        service.stop()
        cluster.disconnect()
