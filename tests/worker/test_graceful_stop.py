"""What a worker sends before it stops gracefully."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from storm_dagster.api import Grouping, TopologyBuilder
from storm_dagster.model.exit_codes import EXIT_SUPERSEDED
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.worker_processes import WorkerRig

CODE = '''
import os
# Half a second is enough on a machine that is not busy.
from storm_dagster.worker.runtime import loop
loop._DRAIN_SECS = 2.0
from pathlib import Path
from storm_dagster.api import BatchingBolt, Bolt, ReliableSpout, Spout, StatefulBolt

FOLDER = Path(os.environ["RIG_FOLDER"])


class Numbers(Spout):
    def initialize(self, conf, context):
        self.next, self.again = 0, []
        self.most = int(conf.get("rig.most", 1 << 60))
        self.acks = (FOLDER / "acked").open("a", buffering=1)

    def next_tuple(self):
        if self.again:
            n = self.again.pop()
        elif self.next < self.most and not (FOLDER / "enough").exists():
            n, self.next = self.next, self.next + 1
        else:
            return
        self.emit([n], tup_id=n)

    def ack(self, n):
        self.acks.write(f"{n}\\n")

    def fail(self, n):
        self.again.append(n)


class Total(StatefulBolt):
    """Without message_id: a number that is sent twice counts twice."""
    state_scope = "task"

    def initialize(self, conf, context):
        self.seen = (FOLDER / "counted").open("a", buffering=1)

    def process(self, tup):
        self.state[tup.values[0]] = self.state.get(tup.values[0], 0) + 1

    def close(self):
        for n, times in self.state.items():
            if times > 1:
                self.seen.write(f"{n} {times}\\n")
        self.seen.write(f"total {len(self.state)}\\n")
        self.emit(["bye"])


class Once(ReliableSpout):
    """One failure that counts makes a dead letter."""
    max_fails = 0

    def initialize(self, conf, context):
        self.next = 0
        self.acks = (FOLDER / "acked").open("a", buffering=1)
        self.letters = (FOLDER / "letters").open("a", buffering=1)

    def next_tuple(self):
        if not (FOLDER / "enough").exists():
            self.next += 1
            self.emit([self.next], tup_id=self.next)

    def ack(self, n):
        super().ack(n)
        self.acks.write(f"{n}\\n")

    def give_up(self, n, *_, **__):
        self.letters.write(f"{n}\\n")
        return True


class Holds(BatchingBolt):
    """Has tuples at any time."""
    ticks_between_batches = 1

    def process_batch(self, key, tups):
        for tup in tups:
            self.emit(tup.values)


class Last(Bolt):
    def process(self, tup):
        (FOLDER / "last").open("a").write(f"{tup.values[0]}\\n")
'''


def words(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


def make(rig_of: Callable[..., WorkerRig]) -> WorkerRig:
    builder = TopologyBuilder("stops")
    builder.set_spout("numbers", "rig_code:Numbers", outputs=["n"])
    builder.set_bolt(
        "total", "rig_code:Total", inputs={"numbers": Grouping.SHUFFLE}, outputs=["word"]
    )
    builder.set_bolt("last", "rig_code:Last", inputs="total")
    conf = {"topology.max.spout.pending": 1000, "topology.message.timeout.secs": 600}
    return rig_of(builder, CODE, {"last": "1", "total": "2", "numbers": "3"}, **conf)


@pytest.mark.zookeeper
@pytest.mark.parametrize(
    ("here", "there"),
    [
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (("1,3,8-9", "2"), ("3,8-9", "1-2"))
        ),
        *(("1,3,9", "2,8"), ("1,3,9", "2")),
    ],
)
def test_nothing_is_applied_twice_by_a_graceful_stop(
    rig_of: Callable[..., WorkerRig], here: str, there: str
) -> None:
    """A stateful bolt without ``message_id`` is stopped three times under load; its ``close``
    emits.
    """
    rig = make(rig_of)
    one, two = ("s1", free_port()), ("s2", free_port())
    slots = {one: here, two: there}
    if "8" not in here + there:
        slots["s3", free_port()] = "8"
    rig.assign(slots)
    for slot in slots:
        rig.start(*slot)
    for stop in range(1, 4):
        eventually(rig.running, timeout=90, what="both workers run")
        before = len(words(rig.folder / "acked"))
        eventually(
            lambda: len(words(rig.folder / "acked")) > before + 2000,  # noqa: B023
            what="numbers are acked",
        )
        if stop == 3:
            (rig.folder / "enough").touch()
            eventually(
                lambda: (
                    len(set(words(rig.folder / "acked")))
                    == max(map(int, words(rig.folder / "acked"))) + 1
                ),
                what="all numbers are acked",
            )
        rig.processes[two].terminate()
        assert rig.processes[two].wait(patience(30)) == 0
        eventually(
            lambda: words(rig.folder / "last") == ["bye"] * stop,  # noqa: B023
            timeout=60,
            what="the last emit",
        )
        if stop < 3:
            rig.start(*two)
    acked = Counter(words(rig.folder / "acked"))
    state = words(rig.folder / "counted")
    assert [line for line in state if not line.startswith("total")] == []
    assert state[-1] == f"total {len(acked)}"


@pytest.mark.zookeeper
def test_a_worker_whose_tasks_move_to_another_slot_closes_them(
    rig_of: Callable[..., WorkerRig],
) -> None:
    """As in a rebalance or a drain, which pause the spouts: no supervisor sends SIGTERM here."""
    rig = make(rig_of)
    one, two, three = ("s1", free_port()), ("s2", free_port()), ("s3", free_port())
    rig.assign({one: "1,3,8-9", two: "2"})
    for slot in (one, two):
        rig.start(*slot)
    eventually(rig.running, timeout=90, what="both workers run")
    acked = rig.folder / "acked"
    eventually(lambda: len(words(acked)) > 2000, what="numbers are acked")
    (rig.folder / "enough").touch()
    eventually(
        lambda: len(set(words(acked))) == max(map(int, words(acked))) + 1,
        what="all numbers are acked",
    )
    rig.assign({one: "1,3,8-9", three: "2"}, "REBALANCING")
    assert rig.processes[two].wait(patience(30)) == EXIT_SUPERSEDED
    assert words(rig.folder / "counted") == [f"total {len(set(words(acked)))}"]
    eventually(lambda: words(rig.folder / "last") == ["bye"], timeout=60, what="the last emit")


@pytest.mark.zookeeper
def test_the_last_acks_reach_a_spout_that_stops_at_the_same_time(
    rig_of: Callable[..., WorkerRig],
) -> None:
    rig = make(rig_of)
    one, two = ("s1", free_port()), ("s2", free_port())
    rig.assign({one: "1,3,8-9", two: "2"})
    for slot in (one, two):
        rig.start(*slot)
    eventually(rig.running, timeout=90, what="both workers run")
    eventually(lambda: len(words(rig.folder / "acked")) > 2000, what="numbers are acked")
    for slot in (one, two):
        rig.processes[slot].terminate()
    for slot in (one, two):
        assert rig.processes[slot].wait(patience(30)) == 0
    assert words(rig.folder / "counted") == [f"total {len(set(words(rig.folder / 'acked')))}"]


@pytest.mark.zookeeper
def test_a_reliable_spout_gives_up_nothing_while_workers_are_replaced(
    rig_of: Callable[..., WorkerRig],
) -> None:
    """As in a gray upgrade: one worker after the other stops under load, the acker's too."""
    builder = TopologyBuilder("replaced")
    builder.set_spout("once", "rig_code:Once", outputs=["n"])
    tick = {"topology.tick.tuple.freq.secs": 0.1}
    builder.set_bolt("holds", "rig_code:Holds", inputs="once", outputs=["n"], config=tick)
    builder.set_bolt("last", "rig_code:Last", inputs="holds")
    conf = {"topology.max.spout.pending": 200, "topology.message.timeout.secs": 600}
    rig = rig_of(builder, CODE, {"holds": "1", "last": "2", "once": "3"}, **conf)
    slots = [("s1", free_port()), ("s2", free_port()), ("s3", free_port())]
    rig.assign(dict(zip(slots, ["3,9", "1", "2,8"], strict=True)))
    for slot in slots:
        rig.start(*slot)
    for slot in (slots[1], slots[2], slots[1], slots[2]):
        eventually(rig.running, timeout=90, what="the workers run")
        before = len(words(rig.folder / "acked"))
        eventually(
            lambda: len(words(rig.folder / "acked")) > before + 300,  # noqa: B023
            what="numbers are acked",
        )
        rig.processes[slot].terminate()
        assert rig.processes[slot].wait(patience(30)) == 0
        rig.start(*slot)
    eventually(rig.running, timeout=90, what="the workers run")
    (rig.folder / "enough").touch()
    acked = rig.folder / "acked"
    eventually(
        lambda: {*words(acked)} == {str(n) for n in range(1, max(map(int, words(acked))) + 1)},
        what="all acks",
    )
    assert words(rig.folder / "letters") == []
