"""Guarantees between two tasks in different workers: order, flat memory, even load."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from storm_dagster.api import Bolt, Grouping, Topology, TopologyBuilder, Tuple
from storm_dagster.operations.live.worker_requests import ask_worker
from storm_dagster.testing.topology_harness import run_topology
from storm_dagster.testing.waiting import eventually
from storm_rigs.components import Numbers
from storm_rigs.operations.storm_client import as_storm
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.worker_processes import WorkerRig

CODE = '''
import os, time
from pathlib import Path
from storm_dagster.api import Bolt, Spout

FOLDER = Path(os.environ["RIG_FOLDER"])


class Numbers(Spout):
    def initialize(self, conf, context):
        self.n, self.most = 0, int(conf.get("rig.most", 1 << 60))

    def next_tuple(self):
        for _ in range(20):
            if self.n < self.most:
                self.emit([self.n, "x" * 200])
                self.n += 1


class InOrder(Bolt):
    def initialize(self, conf, context):
        self.next = 0

    def process(self, tup):
        if tup.values[0] != self.next:
            raise ValueError(f"expected {self.next}, got {tup.values[0]}")
        self.next += 1
        if self.next % 1000 == 0:
            (FOLDER / "reached").write_text(str(self.next))


class Slow(Bolt):
    def process(self, tup):
        time.sleep(0.0005)


class Uneven(Bolt):
    """The first task is slow."""
    def initialize(self, conf, context):
        self.pause = 0.02 if context.task_index == 0 else 0.0

    def process(self, tup):
        if self.pause:
            time.sleep(self.pause)
'''


def start(rig: WorkerRig, mine: str, other: str) -> tuple[tuple[str, int], tuple[str, int]]:
    one, two = ("s1", free_port()), ("s2", free_port())
    rig.assign({one: mine, two: other})
    rig.start(*one)
    rig.start(*two)
    eventually(rig.running, timeout=90, what="both workers run")
    return one, two


def numbers(bolt: str, par: int = 1) -> TopologyBuilder:
    builder = TopologyBuilder("numbers")
    builder.set_spout("numbers", "rig_code:Numbers", outputs=["n", "text"])
    builder.set_bolt("bolt", f"rig_code:{bolt}", inputs={"numbers": Grouping.SHUFFLE}, par=par)
    return builder


@pytest.mark.zookeeper
def test_tuples_between_two_tasks_keep_their_order(rig_of: Callable[..., WorkerRig]) -> None:
    rig = rig_of(numbers("InOrder"), CODE, {"bolt": "1", "numbers": "3"}, **{"rig.most": 100_000})
    start(rig, "3,8-9", "1")
    reached = rig.folder / "reached"
    eventually(
        lambda: reached.exists() and reached.read_text() == "100000",
        timeout=60,
        what="all tuples arrive",
    )
    assert as_storm(rig.cluster).errors(rig.topology_id) == []


@pytest.mark.zookeeper
def test_memory_stays_flat_behind_a_slow_bolt_without_acks(
    rig_of: Callable[..., WorkerRig],
) -> None:
    rig = rig_of(numbers("Slow"), CODE, {"bolt": "1", "numbers": "3"})
    one, _ = start(rig, "3,8-9", "1")

    def executed() -> int:
        node = rig.live()[one]
        tasks = ask_worker("127.0.0.1", one[1], node.token, "stats", 20)["tasks"]
        return int(tasks.get("1", {}).get("stats", {}).get("executed", 0))

    def memory() -> int:
        return sum(
            psutil.Process(process.pid).memory_info().rss for process in rig.processes.values()
        )

    eventually(lambda: executed() > 500, what="some tuples are executed")
    before = memory()
    eventually(lambda: executed() > 4000, timeout=60, what="more tuples are executed")
    # A spout that is not held back makes over 100,000 of these in that time, 300 bytes and more
    # each.
    assert memory() - before < 15 << 20
    waiting = [
        worker["system"]["waiting_tuples"]
        for worker in ask_worker("127.0.0.1", one[1], rig.live()[one].token, "stats", 20)[
            "workers"
        ].values()
    ]
    # Half a queue, and what was on its way through the sockets when back pressure was heard of.
    assert len(waiting) == 2 and max(waiting) < 200_000


@pytest.mark.zookeeper
def test_shuffle_spares_a_task_that_cannot_keep_up(rig_of: Callable[..., WorkerRig]) -> None:
    rig = rig_of(
        numbers("Uneven", par=2), CODE, {"bolt": "1-2", "numbers": "3"}, **{"rig.most": 40_000}
    )
    one, _ = start(rig, "2-3,8-9", "1")

    def executed() -> dict[str, int]:
        tasks = ask_worker("127.0.0.1", one[1], rig.live()[one].token, "stats", 20)["tasks"]
        return {
            task: int(tasks.get(task, {}).get("stats", {}).get("executed", 0))
            for task in ("1", "2")
        }

    eventually(
        lambda: executed()["2"] > 4 * executed()["1"] > 0,
        timeout=60,
        what="the quick task gets most",
    )


class Passes(Bolt):
    outputs = ["n"]

    def process(self, tup: Tuple) -> None:
        self.emit(tup.values)


class Blocks(Passes):
    blocking = True


class Debugged(Topology):
    numbers = Numbers.spec()
    passes = Passes.spec(inputs=[numbers])
    blocks = Blocks.spec(inputs=[passes])


def test_debug_logs_every_tuple(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, logger="storm_dagster.component")
    run_topology(Debugged, {"numbers": [[42]]})
    assert not [one for one in caplog.records if one.name == "storm_dagster.component"]
    run_topology(Debugged, {"numbers": [[42]]}, conf={"topology.debug": True})
    for words in (
        "numbers-4 emits [42]",
        "passes-1 received",
        "passes-1 emits [42]",
        "blocks-2 received",
        "blocks-2 emits",
    ):
        assert any(words in message for message in caplog.messages), (words, caplog.messages)
