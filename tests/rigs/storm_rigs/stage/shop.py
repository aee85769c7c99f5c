"""A topology to look at: a nimbus, a supervisor's HTTP service and two real workers of a shop, one
of whose bolts can be made slow.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import httpx

from storm_dagster.api import Grouping, TopologyBuilder
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.served_topology import ServedTopology, serve_topology

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
_TASKS = {
    "parse": "1-2",
    "enrich": "3-4",
    "sessions": "5",
    "score": "6",
    "__acker": "8",
    "__topology_master": "9",
    "clicks": "10",
    "orders": "11",
}
_CONF = {
    "topology.message.timeout.secs": 30,
    "task.heartbeat.frequency.secs": 1,
    "topology.acker.executors": 1,
}
_REASONS = {
    "reasons": {"3": f"the least loaded worker {MARKUP}"},
    "worker_reasons": {},
    "warnings": [],
}


@dataclass
class Shop(ServedTopology):
    """The topology ``shop`` on two workers."""

    def get(self, path: str) -> httpx.Response:
        """The leader's response."""
        return self.nimbus.get(path)

    def slow_down(self, slow: bool = True) -> None:
        """Let ``enrich`` sleep 50 ms for each tuple, or no longer."""
        switch = self.rig.code_dir / "code" / "slow"
        switch.touch() if slow else switch.unlink()

    def findings(self) -> list[dict[str, str]]:
        """Findings of the diagnosis."""
        return self.get("/v1/topologies/shop").json()["findings"]


def open_shop(stage: Stage, last: str = "alerts<b>") -> Shop:
    """Start it; it ends with the stage. ``last`` names the bolt at the end."""
    stage.conf["dagster.graphql.url"] = "http://127.0.0.1:1/graphql"
    shuffle = Grouping.SHUFFLE
    item = ["item"]
    builder = TopologyBuilder("shop")
    builder.set_spout("clicks", "rig_code:Source", outputs=item)
    builder.set_spout("orders", "rig_code:Source", outputs=item)
    sources = {"clicks": shuffle, "orders": shuffle}
    builder.set_bolt("parse", "rig_code:Pass", inputs=sources, par=2, outputs=item)
    by_item = {"parse": Grouping.fields("item")}
    builder.set_bolt("enrich", "rig_code:Enrich", inputs=by_item, par=2, outputs=item)
    builder.set_bolt("sessions", "rig_code:Pass", inputs={"parse": shuffle}, outputs=item)
    both = {"enrich": shuffle, "sessions": shuffle}
    builder.set_bolt("score", "rig_code:Score", inputs=both, outputs=item)
    builder.set_bolt(last, "rig_code:End", inputs={"score": shuffle})
    # Old enough for findings.
    launched = int(time.time()) - 60
    tasks = {**_TASKS, last: "7"}
    rig = stage.workers(builder, tasks, code=CODE, conf=_CONF, name="shop", launched=launched)
    blobs = {"placement.json": json.dumps(_REASONS).encode()}
    served = serve_topology(stage, rig, ["1,3,5,7-10", "2,4,6,11"], blobs)
    return Shop(stage, served.nimbus, rig, served.service, served.ports)
