"""Replay of the trees that a killed worker had parts of, long before their timeout."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.api import Stream, TopologyBuilder
from storm_dagster.core.dataplane.acking import AckerResult, AckTracker
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.slot import Slot
from storm_dagster.operations.live.worker_requests import ask_worker
from storm_dagster.testing.waiting import eventually
from storm_dagster.worker.engine.acks import WorkerBits
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.worker_processes import WorkerRig

SECS = 15.0
"""Ten times what a replay may take; the message timeout is far above it."""

CODE = '''
import os
from pathlib import Path
from storm_dagster.api import Bolt, Spout

FOLDER = Path(os.environ["RIG_FOLDER"])


class Numbers(Spout):
    """Odd numbers go left, and from there to the end; even ones go right."""

    def initialize(self, conf, context):
        self.next, self.again = 0, []
        self.acks = (FOLDER / "acked").open("a", buffering=1)
        self.fails = (FOLDER / "failed").open("a", buffering=1)

    def next_tuple(self):
        if self.again:
            n = self.again.pop()
        else:
            n, self.next = self.next, self.next + 1
        self.emit([n], tup_id=n, stream="left" if n % 2 else "right")

    def ack(self, n):
        self.acks.write(f"{n}\\n")

    def fail(self, n):
        self.fails.write(f"{n}\\n")
        self.again.append(n)


class Forward(Bolt):
    def process(self, tup):
        self.emit([tup.values[0]])


class End(Bolt):
    def process(self, tup):
        pass
'''
WORKERS = {"spout": 4, "left": 1, "right": 2, "end": 3}
"""Worker -> its task. The spout's has the topology master too; each test gives one of them the
acker.
"""


def tasks_of(name: str, acker: str) -> str:
    """Task ranges of a worker."""
    return encode_ranges(
        [WORKERS[name], *([8] if name == acker else []), *([9] if name == "spout" else [])]
    )


class Numbers:
    """The topology on four workers, and what its spout saw."""

    def __init__(self, rig: WorkerRig, acker: str) -> None:
        self.rig = rig
        self.slots = {name: (f"s-{name}", free_port()) for name in WORKERS}
        rig.assign({slot: tasks_of(name, acker) for name, slot in self.slots.items()})
        for slot in self.slots.values():
            rig.start(*slot)
        eventually(rig.running, timeout=90, what="all workers run")

    def ids(self, name: str) -> list[int]:
        path = Path(self.rig.folder / name)
        # The last line may be half written.
        return [int(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def kill(self, *names: str) -> None:
        """``kill -9`` at once, and new workers in their slots."""
        for name in names:
            process = self.rig.processes[self.slots[name]]
            process.send_signal(signal.SIGKILL)
        for name in names:
            self.rig.processes[self.slots[name]].wait()
            self.rig.start(*self.slots[name])

    def system(self) -> dict[str, Any]:
        """The counters of the spout's worker."""
        slot = self.slots["spout"]
        workers = ask_worker("127.0.0.1", slot[1], self.rig.live()[slot].token, "stats", 20)[
            "workers"
        ]
        return workers[f"{slot[0]}:{slot[1]}"]["system"]


@pytest.fixture
def numbers_of(rig_of: Callable[..., WorkerRig]) -> Callable[..., Numbers]:
    def make(acker: str) -> Numbers:
        builder = TopologyBuilder("numbers")
        streams = [Stream(["n"], name="left"), Stream(["n"], name="right")]
        numbers = builder.set_spout("numbers", "rig_code:Numbers", outputs=streams)
        builder.set_bolt("left", "rig_code:Forward", inputs=numbers["left"], outputs=["n"])
        builder.set_bolt("right", "rig_code:End", inputs=numbers["right"])
        builder.set_bolt("end", "rig_code:End", inputs="left")
        tasks = {"left": "1", "right": "2", "end": "3", "numbers": "4"}
        conf = {"topology.max.spout.pending": 200, "topology.message.timeout.secs": 600}
        running = Numbers(rig_of(builder, CODE, tasks, **conf), acker)
        eventually(lambda: len(running.ids("acked")) > 2000, timeout=SECS, what="numbers are acked")
        return running

    return make


@pytest.mark.long
@pytest.mark.zookeeper
@pytest.mark.parametrize(
    ("acker", "killed", "failed"),
    [
        ("spout", ["left"], "odd"),
        ("spout", ["end"], "odd"),  # The spout's worker sent nothing to it.
        ("left", ["end"], "odd"),
        ("right", ["end"], "odd"),
        ("end", ["end"], "all"),
        ("right", ["right"], "all"),
        ("spout", ["left", "end"], "odd"),
        ("end", ["left", "right"], "all"),
    ],
)
def test_trees_of_killed_workers_are_replayed_at_once(
    numbers_of: Callable[..., Numbers], acker: str, killed: list[str], failed: str
) -> None:
    numbers = numbers_of(acker)
    assert numbers.ids("failed") == []
    numbers.kill(*killed)
    eventually(lambda: numbers.ids("failed"), timeout=SECS, what="what was in flight fails")
    sent = max(numbers.ids("acked"))
    eventually(
        lambda: set(range(sent + 400)) <= set(numbers.ids("acked")),
        timeout=SECS,
        what="all that was in flight is acked, and more",
    )
    if failed == "odd":
        assert all(n % 2 for n in numbers.ids("failed"))
    counted = numbers.system()["replayed_trees"]
    # The others failed because the new worker got tuples for the killed one.
    assert 0 < counted <= len(numbers.ids("failed"))


@pytest.mark.long
@pytest.mark.zookeeper
def test_a_killed_spout_goes_on_at_once(numbers_of: Callable[..., Numbers]) -> None:
    numbers = numbers_of("left")
    numbers.kill("spout")
    before = len(numbers.ids("acked"))
    eventually(
        lambda: len(numbers.ids("acked")) > before + 1000,
        timeout=SECS,
        what="numbers are acked again",
    )


@pytest.mark.long
@pytest.mark.zookeeper
def test_trees_of_a_lost_slot_are_replayed_elsewhere(numbers_of: Callable[..., Numbers]) -> None:
    numbers = numbers_of("spout")
    sent = max(numbers.ids("acked"))
    lost = numbers.slots["left"]
    process = numbers.rig.processes.pop(lost)
    process.kill()
    process.wait()
    rest = {slot: tasks_of(name, "spout") for name, slot in numbers.slots.items() if name != "left"}
    rest[numbers.slots["right"]] = "1-2"
    numbers.rig.assign(rest)
    eventually(
        lambda: set(range(sent + 400)) <= set(numbers.ids("acked")),
        timeout=2 * SECS,
        what="all that was in flight is acked, and more",
    )


A, B = Slot("a", 1), Slot("b", 2)


def test_a_replaced_worker_has_new_bits() -> None:
    workers = WorkerBits(10.0)
    assert workers.place([A, B], {"ta": A}, 0.0) == 0
    first, waiting = workers.of_slot(A), workers.of_slot(B)
    assert (
        first[0] == "ta"
        and waiting[0] == ""
        and first[1]
        and waiting[1]
        and not first[1] & waiting[1]
    )
    assert workers.place([A, B], {"ta": A, "tb": B}, 1.0) == 0
    # Tuples that waited for the worker are the worker's.
    assert workers.of_slot(B) == ("tb", waiting[1])
    assert workers.place([A, B], {"ta2": A, "tb": B}, 2.0) == first[1]
    assert workers.of_slot(A)[1] not in (0, first[1], waiting[1])
    assert workers.bit_of("ta", 2.0) == 0 and list(workers.tokens_of(first[1])) == ["ta"]
    second = workers.of_slot(A)[1]
    assert workers.place([B], {"ta2": A}, 3.0) == second | waiting[1]


def test_bits_of_lost_workers_are_used_again_after_a_while() -> None:
    workers = WorkerBits(10.0)
    for number in range(1000):
        workers.place([A], {f"t{number}": A}, float(number))
        assert workers.of_slot(A)[1] < 1 << 13


def test_a_worker_reported_before_it_is_known_keeps_its_bit() -> None:
    workers = WorkerBits(10.0)
    workers.place([A], {}, 0.0)
    bit = workers.bit_of("ta", 0.0)
    assert bit and workers.place([A], {"ta": A}, 1.0) == 0
    assert workers.place([A], {}, 2.0) & bit


def test_a_worker_that_comes_back_is_not_lost_any_more() -> None:
    workers = WorkerBits(10.0)
    workers.place([A], {"ta": A}, 0.0)
    assert workers.place([A], {}, 1.0) and workers.bit_of("ta", 1.0) == 0
    assert workers.place([A], {"ta": A}, 2.0) == 0 and workers.bit_of("ta", 2.0)


def test_an_acker_fails_the_open_trees_of_a_lost_worker() -> None:
    acker, result = AckTracker(10.0), AckerResult()
    acker.apply(0.0, inits=[(1, 5, 7), (2, 5, 7), (3, 5, 7)])
    acker.apply(0.0, acks=[(4, 9)])
    acker.touch([1, 3, 4, 99], 2)
    acker.touch([2], 4)
    acker.apply(0.0, acks=[(3, 5)], into=result)
    acker.lose(acker.touching(2), result)
    assert (result.acked, result.lost, result.failed) == ({7: [3]}, {7: [1], 0: [4]}, {})
    assert acker.touching(4) == [2]
