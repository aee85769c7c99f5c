"""Storm's REST of a nimbus that shows a word count, for all tests of a module.

Each good response to its client is compared with the description of its route.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from storm_dagster.api import Grouping, TopologyBuilder
from storm_dagster.testing.waiting import eventually
from storm_rigs.protocols.described_responses import DescribedResponses
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.served_topology import serve_topology
from storm_rigs.stage.storm_rest import StormRest

CODE = """
import math
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
            self.report_metric("share", math.nan)
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
def rest(module_stage: Stage) -> Iterator[StormRest]:
    """A word count on two workers, once every line is acked."""
    builder = TopologyBuilder("wc")
    builder.set_spout("lines", "rig_code:Lines", outputs=["line"])
    builder.set_bolt("split", "rig_code:Split", inputs="lines", par=2, outputs=["word"])
    builder.set_bolt(
        "count/all", "rig_code:Count", inputs={"split": Grouping.fields("word")}, par=1
    )
    tasks = {
        "split": "1-2",
        "count/all": "3",
        "__acker": "4",
        "__topology_master": "5",
        "lines": "6",
    }
    conf = {
        "topology.message.timeout.secs": 17,
        "task.heartbeat.frequency.secs": 0.5,
        "topology.debug": True,
        "topology.environment": {"API_TOKEN": "planted-secret"},
    }
    rig = module_stage.workers(builder, tasks, code=CODE, conf=conf)
    served = serve_topology(module_stage, rig, ["1,3-5", "2,6"])
    for port in served.ports:
        log = rig.folder / "logs/workers" / rig.topology_id / str(port) / "worker.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"log of {port}\n")
    with served.nimbus.client(timeout=30.0) as client:
        described = DescribedResponses(client.get("/openapi.json").json())
        client.event_hooks["response"].append(described.check)
        rest = StormRest(
            module_stage, served.nimbus, rig, served.service, served.ports, http=client
        )

        def all_acked() -> bool:
            stats = rest.get(f"/topology/{rig.topology_id}")["topologyStats"]
            return stats[-1]["acked"] >= 199

        eventually(all_acked, timeout=60, what="the word count")
        yield rest
