"""Real workers that write numbers to a sink exactly once, and are killed meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from storm_dagster.api import Grouping, TopologyBuilder
from storm_dagster.testing.waiting import eventually
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.builder import Stage

_CODE = '''
"""What is not acked is read again after a restart. A number may come twice anyway."""
import os
from pathlib import Path
from storm_dagster.api import Spout
from storm_dagster.connectors import FileSink, KafkaSink, PostgresSink, SinkBolt

FOLDER = Path(os.environ["RIG_FOLDER"])


class Numbers(Spout):
    def initialize(self, conf, context):
        path = FOLDER / "acked"
        self.done = set(map(int, path.read_text().split())) if path.exists() else set()
        self.acks = path.open("a", buffering=1)
        self.total = int(conf["rig.total"])
        self.next, self.again = 0, []

    def next_tuple(self):
        for _ in range(50):
            if self.again:
                n = self.again.pop()
            else:
                while self.next in self.done:
                    self.next += 1
                n, self.next = self.next, self.next + 1
            if n >= self.total:
                return
            self.emit([n % 50, n], tup_id=n)

    def ack(self, n):
        self.acks.write(f"{n}\\n")

    def fail(self, n):
        self.again.append(n)


class Table(SinkBolt):
    record_id = "n"
    exactly_once = True
    batch_rows = 200
    batch_secs = 0.2


class InTable(Table):
    sink = PostgresSink("numbers")


class InFiles(Table):
    sink = FileSink(str(FOLDER / "out"))


class InTopic(Table):
    sink = KafkaSink(os.environ.get("RIG_TOPIC", ""))
'''


def _tasks(sinks: str) -> dict[str, str]:
    return {"table": sinks, "__acker": "5", "__topology_master": "6", "numbers": "7"}


class SinkRig:
    """A spout of ``total`` numbers, and two tasks of a sink in two workers. ``kind``: the class.

    Rows go to the table ``numbers``, to files in ``out``, or to the topic ``RIG_TOPIC``.
    """

    def __init__(self, stage: Stage, total: int, conf: Mapping[str, Any], kind: str) -> None:
        builder = TopologyBuilder("wc")
        builder.set_spout("numbers", "rig_code:Numbers", outputs=["key", "n"])
        builder.set_bolt(
            "table", f"rig_code:{kind}", inputs={"numbers": Grouping.fields("key")}, par=2,
            config={"topology.tick.tuple.freq.secs": 0.1},
        )  # fmt: skip
        settings = {
            **conf,
            "rig.total": total,
            "topology.message.timeout.secs": 3,
            "topology.max.spout.pending": 2000,
            "task.refresh.poll.secs": 2,
        }
        self.total = total
        self.rig = stage.workers(builder, _tasks("1-2"), code=_CODE, conf=settings)

    def run(self, written: Callable[[], int], kills: int) -> None:
        """Write all numbers while workers are killed ``kills`` times; the last time a third task of
        the sink begins.
        """
        rig, total = self.rig, self.total
        one, two = ("s1", free_port()), ("s2", free_port())
        rig.assign({one: "1,5-7", two: "2"})
        rig.start(*one)
        rig.start(*two)
        for kill in range(kills):
            least = total * (kill + 1) // (kills + 2)
            eventually(
                lambda least=least: written() > least, timeout=300, what=f"{least} rows are written"
            )
            last = kill == kills - 1
            for slot in (one, two) if last else (two,):
                rig.processes[slot].kill()
                rig.processes[slot].wait()
            if last:
                rig.set_tasks(_tasks("1-3"))
                rig.assign({one: "1,5-7", two: "2,3"})
            for slot in (one, two) if last else (two,):
                rig.start(*slot)
        path = rig.folder / "acked"
        eventually(
            lambda: len(set(path.read_text().split())) >= total,
            timeout=600,
            what="all numbers are acked",
        )
