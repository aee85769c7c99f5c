"""Windows in real workers: the worker of the windows is killed, and their counts are exact."""

from __future__ import annotations

import pytest

from storm_dagster.api import Grouping, Stream, TopologyBuilder
from storm_dagster.operations.live.worker_requests import ask_worker
from storm_dagster.testing.waiting import eventually
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.worker_processes import WorkerRig

pytestmark = [pytest.mark.zookeeper, pytest.mark.long]

TOTAL = 4000
CODE = '''
"""Numbered events, one in 10 ms of their own time; files tell what was acked and which windows came."""
import os, time
from pathlib import Path
from storm_dagster.api import Bolt, Spout, Window, WindowedBolt

FOLDER = Path(os.environ["RIG_FOLDER"])


class Events(Spout):
    def initialize(self, conf, context):
        self.acks = (FOLDER / "acked").open("a", buffering=1)
        self.total, self.next, self.again, self.ready, self.done = int(conf["rig.events"]), 0, [], 0.0, 0

    def next_tuple(self):
        if time.monotonic() < self.ready:
            return
        self.ready = time.monotonic() + 0.0005
        if self.again:
            n = self.again.pop()
        elif self.next < self.total:
            n, self.next = self.next, self.next + 1
        elif self.done == self.total:
            # Ends the last windows.
            n, self.done = self.total + 1000, 0
        else:
            return
        self.emit([f"k{n % 5}", n, 10 * (n + 1)], tup_id=n)

    def ack(self, n):
        self.done += 1
        self.acks.write(f"{n}\\n")

    def fail(self, n):
        self.again.append(n)


class Seconds(WindowedBolt):
    window = Window.tumbling(secs=1)
    timestamp_field = "at"
    late_stream = "late"
    message_id = "n"

    def process_window(self, window):
        self.emit([self.context.task_index, window.end_ms, len(window)])


class Sink(Bolt):
    def initialize(self, conf, context):
        self.file = (FOLDER / "windows").open("a", buffering=1)

    def process(self, tup):
        self.file.write(f"{tup.stream} {' '.join(map(str, tup.values))}\\n")
'''


@pytest.fixture
def rig(stage: Stage) -> WorkerRig:
    builder = TopologyBuilder("wc")
    builder.set_spout("events", "rig_code:Events", outputs=["key", "n", "at"])
    late = Stream(["late_tuple", "component", "stream"], name="late")
    seconds = builder.set_bolt(
        "seconds",
        "rig_code:Seconds",
        inputs={"events": Grouping.fields("key")},
        outputs=[Stream(["task", "end", "events"]), late],
        config={
            "topology.bolts.window.length.duration.ms": 1000,
            "topology.bolts.window.sliding.interval.duration.ms": 1000,
            "topology.bolts.tuple.timestamp.field.name": "at",
            "topology.bolts.late.tuple.stream": "late",
        },
    )
    builder.set_bolt("sink", "rig_code:Sink", inputs=[seconds, seconds["late"]])
    tasks = {"seconds": "1", "sink": "2", "__acker": "3", "__topology_master": "4", "events": "5"}
    # Few pending tuples: a window holds five times as many.
    conf = {
        "rig.events": TOTAL,
        "topology.message.timeout.secs": 2,
        "topology.max.spout.pending": 20,
    }
    return stage.workers(builder, tasks, code=CODE, conf=conf)


def lines(rig: WorkerRig, name: str) -> list[str]:
    path = rig.folder / name
    return path.read_text().splitlines() if path.exists() else []


def test_windowed_counts_are_exact_after_the_worker_of_the_windows_was_killed(
    rig: WorkerRig,
) -> None:
    one, two = ("s1", free_port()), ("s2", free_port())
    rig.assign({one: "2-5", two: "1"})
    rig.start(*one)
    rig.start(*two)
    for least in (500, 2000):
        eventually(
            lambda least=least: len(lines(rig, "acked")) > least,
            timeout=60,
            what="events are acked",
        )
        rig.processes[two].kill()
        rig.processes[two].wait()
        rig.start(*two)
    eventually(
        lambda: len(set(lines(rig, "acked"))) == TOTAL + 1, timeout=120, what="all events are acked"
    )
    expected = {f"default 0 {end} 100" for end in range(1000, 10 * TOTAL + 1, 1000)}
    eventually(
        lambda: len(set(lines(rig, "windows"))) >= len(expected),
        timeout=60,
        what="all windows have come",
    )
    # A result may come twice, with the same contents: (task, end) names it.
    assert set(lines(rig, "windows")) == expected
    reported = ask_worker("127.0.0.1", two[1], rig.live()[two].token, "stats", 20)["tasks"]["1"][
        "metrics"
    ]
    assert reported["watermark_ms"] >= 10 * TOTAL and reported["state_bytes"] > 0
