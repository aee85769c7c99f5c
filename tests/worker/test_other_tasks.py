"""Changes of the number of tasks with real workers: all input is read and counted once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from storm_dagster.api import Grouping, Stream, TopologyBuilder
from storm_dagster.api.specs import StreamOf
from storm_dagster.testing.waiting import eventually
from storm_rigs.operations.storm_client import as_storm
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.worker_processes import WorkerRig

PARTITIONS, LINES = 4, 200

CODE = f"""
import os, time
from pathlib import Path
from storm_dagster.api import Bolt, Spout

FOLDER = Path(os.environ["RIG_FOLDER"])


class Partitions(Spout):
    '''Deals partitions by task index. What is not acked is read again, after fail() gave it back.'''
    outputs = ["partition", "line"]

    def initialize(self, conf, context):
        tasks = context.component_tasks(context.component)
        self.mine = [p for p in range({PARTITIONS}) if p % len(tasks) == context.task_index]
        self.log("reads %s of %d tasks" % (self.mine, len(tasks)))
        self.todo = [(p, n) for n in range({LINES}) for p in self.mine if not self.done(p, n).exists()]
        self.todo.reverse()
        self.open = set()

    def done(self, partition, line):
        return FOLDER / "done" / f"{{partition}}-{{line}}"

    def next_tuple(self):
        if self.todo:
            time.sleep(0.002)
            line = self.todo.pop()
            self.open.add(line)
            self.emit(list(line), tup_id=line)

    def ack(self, line):
        self.open.remove(line)
        self.done(*line).touch()

    def fail(self, line):
        self.open.remove(line)
        self.todo.append(line)

    def close(self):
        (FOLDER / "closed").open("a").write(f"{{len(self.open)}}\\n")


class Blocking(Partitions):
    blocking = True


class Route(Bolt):
    '''Names the receiver, from a list made when it was opened.'''
    outputs = ["partition", "line"]

    def initialize(self, conf, context):
        self.targets = context.component_tasks("count")

    def process(self, tup):
        partition, line = tup.values
        self.emit([partition, line], stream="chosen", direct_task=self.targets[line % len(self.targets)])


class Count(Bolt):
    '''Checks that what it gets is its own by the index that it was opened with, and counts each line once.'''
    def initialize(self, conf, context):
        self.index, self.tasks = context.task_index, len(context.component_tasks(context.component))

    def process(self, tup):
        partition, line = tup.values
        if line % self.tasks != self.index:
            raise ValueError(f"line {{line}} is not of number {{self.index}} of {{self.tasks}}")
        (FOLDER / "counted" / f"{{partition}}-{{line}}").touch()
"""


@pytest.fixture(params=["Partitions", "Blocking"])
def rig(
    request: pytest.FixtureRequest, rig_of: Callable[..., WorkerRig], tmp_path: Path
) -> WorkerRig:
    for folder in ("done", "counted"):
        (tmp_path / folder).mkdir()
    builder = TopologyBuilder("wc")
    builder.set_spout("lines", f"rig_code:{request.param}", outputs=["partition", "line"])
    builder.set_bolt(
        "route",
        "rig_code:Route",
        inputs="lines",
        outputs=[Stream(["partition", "line"], name="chosen", direct=True)],
    )
    builder.set_bolt(
        "count", "rig_code:Count", inputs={StreamOf("route", "chosen"): Grouping.DIRECT}
    )
    return rig_of(
        builder,
        CODE,
        {"lines": "1-2", "route": "4", "count": "5-6"},
        **{"topology.max.spout.pending": 20},
    )


def number_of_tasks(rig: WorkerRig, lines: str, count: str) -> None:
    """Write the task table of a rebalance."""
    tasks = {name: part.tasks for name, part in rig.table.components.items()}
    rig.set_tasks({**tasks, "lines": lines, "count": count})


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.zookeeper
@pytest.mark.parametrize(
    ("lines", "count", "slots"),
    [("1", "5", ("1,4,8-9", "5")), ("1-3", "5-7", ("1,3-4,7-9", "2,5-6"))],
    ids=["fewer", "more"],
)
def test_all_input_is_read_with_another_number_of_tasks(
    rig: WorkerRig, lines: str, count: str, slots: tuple[str, str]
) -> None:
    one, two = ("s1", free_port()), ("s2", free_port())
    rig.assign({one: "1,4,6,8-9", two: "2,5"})
    rig.start(*one)
    rig.start(*two)
    done, counted = rig.folder / "done", rig.folder / "counted"
    eventually(lambda: len(names(done)) > 100, what="a part of the input is read")
    number_of_tasks(rig, lines, count)
    rig.assign({one: slots[0], two: slots[1]})
    everything = {f"{partition}-{line}" for partition in range(PARTITIONS) for line in range(LINES)}
    eventually(lambda: names(done) >= everything, timeout=60, what="all of the input is read")
    assert names(done) == names(counted) == everything
    closed = (rig.folder / "closed").read_text().split()
    assert closed == ["0"] * len(closed), "the closed ones were notified of all pending tuples"
    # Tuples under way meanwhile may reach a task that they are not for any more: those fail, and
    # come again.
    shown = [error.error for error in as_storm(rig.cluster).errors(rig.topology_id)]
    assert [text for text in shown if "cannot be sent to task" in text] == []
