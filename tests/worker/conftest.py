"""A rig that starts real workers, and the topology that most tests run on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from storm_dagster.api import Grouping, TopologyBuilder
from storm_dagster.testing.waiting import patience
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.worker_processes import WorkerRig

CODE = '''
"""Lines are numbered; a file tells how many there are, another one what was acked."""
import os, time
from collections import Counter
from pathlib import Path
from storm_dagster.api import Bolt, Spout

FOLDER = Path(os.environ["RIG_FOLDER"])


class Lines(Spout):
    outputs = ["id", "text"]

    def initialize(self, conf, context):
        self.total = int(conf.get("rig.lines", 1000))
        self.next = context.task_index
        self.step = len(context.component_tasks(context.component))
        self.again = []
        self.acks = (FOLDER / f"acked-{context.task_id}").open("a", buffering=1)
        self.fails = (FOLDER / f"failed-{context.task_id}").open("a", buffering=1)
        self.pause = float(conf.get("rig.pause", 0))
        self.ready = 0.0
        done = {int(text) for text in (FOLDER / f"acked-{context.task_id}").read_text().split()}
        self.done = done
        self.log(f"{len(done)} lines are acked")

    def next_tuple(self):
        if self.pause and time.monotonic() < self.ready:
            return
        self.ready = time.monotonic() + self.pause
        if self.again:
            line = self.again.pop()
        else:
            while self.next in self.done:
                self.next += self.step
            line = self.next
            if line >= self.total:
                return
            self.next += self.step
        self.emit([line, f"a b c w{line % 7} a"], tup_id=line)

    def ack(self, line):
        self.acks.write(f"{line}\\n")

    def fail(self, line):
        self.fails.write(f"{line}\\n")
        self.again.append(line)


class Split(Bolt):
    outputs = ["word", "line", "n"]

    def process(self, tup):
        line, text = tup.values
        for word, n in Counter(text.split()).items():
            self.emit([word, line, n])


class Count(Bolt):
    auto_ack = False

    def process(self, tup):
        word, line, n = tup.values
        state = self.context.state
        key = f"{line}:{word}"
        if not state.applied(key):
            state.save({word: state.get(word, 0) + n}, applied=[key])
        self.report_metric("newest", line)
        self.ack(tup)


class Poison(Bolt):
    outputs = ["word", "line", "n"]
    seen = set()

    def process(self, tup):
        line, text = tup.values
        if line % 100 == 13 and line not in self.seen:
            self.seen.add(line)
            raise ValueError(f"poison {line}")
        for word, n in Counter(text.split()).items():
            self.emit([word, line, n])
'''


@pytest.fixture
def make_rig(stage: Stage) -> Callable[..., WorkerRig]:
    """Makes the rig of a word count: tasks 1-2 split, 3-4 count, 5 acker, 6 topology master, 7
    lines.
    """

    def make(conf: Mapping[str, Any] | None = None, splitter: str = "Split") -> WorkerRig:
        builder = TopologyBuilder("wc")
        builder.set_spout("lines", "rig_code:Lines", outputs=["id", "text"])
        builder.set_bolt(
            "split", f"rig_code:{splitter}", inputs="lines", par=2, outputs=["word", "line", "n"]
        )
        builder.set_bolt(
            "count", "rig_code:Count", inputs={"split": Grouping.fields("word")}, par=2
        )
        tasks = {
            "split": "1-2",
            "count": "3-4",
            "__acker": "5",
            "__topology_master": "6",
            "lines": "7",
        }
        settings = {
            "topology.message.timeout.secs": 5,
            "task.heartbeat.frequency.secs": 0.5,
            "task.refresh.poll.secs": 2,
            "nimbus.task.timeout.secs": patience(3),
            **(conf or {}),
        }
        return stage.workers(builder, tasks, code=CODE, conf=settings)

    return make


@pytest.fixture
def rig_of(stage: Stage) -> Callable[..., WorkerRig]:
    """Makes a rig of any topology: builder, code, task ranges of its components (acker 8, master
    9), conf.
    """

    def make(
        builder: TopologyBuilder, code: str, tasks: Mapping[str, str], **conf: Any
    ) -> WorkerRig:
        settings = {"task.heartbeat.frequency.secs": 0.5, "task.refresh.poll.secs": 2, **conf}
        system = {"__acker": "8", "__topology_master": "9"}
        return stage.workers(builder, {**tasks, **system}, code=code, conf=settings)

    return make
