"""A nimbus, a supervisor's HTTP service and two real workers of a word count, for all tests of a
module.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any, Literal

import httpx
import pytest

from storm_dagster.api import Grouping, TopologyBuilder
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model import paths
from storm_dagster.model.records import ComponentTasks, SupervisorInfo, TaskTable, encode_record
from storm_dagster.supervisor.log_service import LogService
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.nimbuses import Nimbuses
from storm_rigs.ports import free_port
from storm_rigs.rest_stage import Stage
from storm_rigs.worker_rig import WorkerRig

CODE = """
import time
from storm_dagster.api import Bolt, Spout


class Lines(Spout):
    outputs = ["line"]

    def initialize(self, conf, context):
        self.number = 0

    def next_tuple(self):
        if self.number < 200:
            self.number += 1
            self.emit(["a b a"], tup_id=self.number)
            self.report_metric("lag", 200 - self.number)
            self.report_metric("lag_by_partition", {"orders[0]": [200 - self.number, 1.5]})


class Split(Bolt):
    outputs = ["word"]

    def process(self, tup):
        for word in tup.values[0].split():
            self.emit([word])


class Count(Bolt):
    def initialize(self, conf, context):
        self.complained = False

    def process(self, tup):
        if tup.values[0] == "b" and not self.complained:
            self.complained = True
            raise ValueError("<b>boom</b>")
"""


@pytest.fixture(scope="module")
def stage(
    zookeeper_server: str,
    make_lasting_nimbuses: Callable[..., Nimbuses],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    host, _, port = zookeeper_server.rpartition(":")
    zk_conf: dict[str, Any] = {
        "storm.zookeeper.servers": [host],
        "storm.zookeeper.port": int(port),
        "storm.zookeeper.root": f"/t-{uuid.uuid4().hex[:12]}",
        "storm.zookeeper.session.timeout": 4000,
    }
    nimbus = make_lasting_nimbuses(zk_conf).start().await_leading()
    cluster = StormClusterState.open({**zk_conf, "storm.zookeeper.session.timeout": 30_000})
    builder = TopologyBuilder("wc")
    builder.set_spout("lines", "rig_code:Lines", outputs=["line"])
    builder.set_bolt("split", "rig_code:Split", inputs="lines", par=2, outputs=["word"])
    builder.set_bolt(
        "count/all", "rig_code:Count", inputs={"split": Grouping.fields("word")}, par=1
    )
    kinds: dict[str, tuple[Literal["bolt", "spout"], str]] = {
        "split": ("bolt", "1-2"),
        "count/all": ("bolt", "3"),
        "__acker": ("bolt", "4"),
        "__topology_master": ("bolt", "5"),
        "lines": ("spout", "6"),
    }
    table = TaskTable(
        components={
            name: ComponentTasks(type=kind, tasks=tasks) for name, (kind, tasks) in kinds.items()
        }
    )
    folder = tmp_path_factory.mktemp("rig")
    conf = {
        "topology.message.timeout.secs": 17,
        "task.heartbeat.frequency.secs": 0.5,
        "topology.environment": {"API_TOKEN": "planted-secret"},
    }
    rig = WorkerRig(
        folder, cluster, zk_conf, builder.build(), table, conf=conf, code={"rig_code.py": CODE}
    )
    supervisor_conf = load_cluster_conf(None, {**zk_conf, "supervisor.http.port": 0})
    service = LogService(supervisor_conf, folder, "s1")
    service.start(lambda: ())
    ports = (free_port(), free_port())
    for used in ports:
        log = folder / "logs/workers" / rig.topology_id / str(used) / "worker.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"log of {used}\n")
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
    with httpx.Client(base_url=nimbus.url, timeout=30, trust_env=False) as client:
        for key, path in (("stormconf.ser", "stormconf.ser"), ("stormcode.ser", "stormcode.ser")):
            client.put(
                f"/v1/blobs/{rig.topology_id}-{key}", content=(rig.code_dir / path).read_bytes()
            )
        client.put(f"/v1/blobs/{rig.topology_id}-stormjar.jar", content=b"jar")
        rig.assign({("s1", ports[0]): "1,3-5", ("s1", ports[1]): "2,6"})
        for used in ports:
            rig.start("s1", used)
        eventually(rig.running, timeout=60, what="the workers")
        made = Stage(nimbus.url, client, nimbus, rig, cluster, service.url, folder / "logs")

        def all_acked() -> bool:
            stats = made.get(f"/topology/{rig.topology_id}")["topologyStats"]
            return stats[-1]["acked"] >= 199

        eventually(all_acked, timeout=60, what="the word count")
        yield made
    rig.stop()
    service.stop()
    cluster.disconnect()
