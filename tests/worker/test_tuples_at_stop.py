"""However a task or a worker stops in good order: what it has not finished is lost, which is no
failure of the tuples.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from storm_dagster.api import (
    BatchingBolt,
    Bolt,
    ShellBolt,
    Spout,
    StatefulBolt,
    TopologyBuilder,
    Tuple,
)
from storm_dagster.core.dataplane.acking import AckerResult, AckTracker
from storm_dagster.model.names import ACKER
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_dagster.worker.dataplane.tree import Tree
from storm_dagster.worker.tasks.runner import Runner
from storm_rigs.components import AsyncHoldBolt, HoldBolt
from storm_rigs.stage.local_workers import LocalWorkers

COUNT = 5


class Numbers(Spout):
    outputs = ["n"]
    verdicts: ClassVar[dict[int, list[str]]] = {}

    def initialize(self, conf: Any, context: Any) -> None:
        self.n = 0

    def next_tuple(self) -> None:
        if self.n < COUNT:
            self.n += 1
            self.emit([self.n], tup_id=self.n)

    def ack(self, tup_id: int) -> None:
        self.verdicts.setdefault(tup_id, []).append("acked")

    def fail(self, tup_id: int) -> None:
        self.verdicts.setdefault(tup_id, []).append("failed")

    def _lost(self, tup_id: int) -> None:
        self.verdicts.setdefault(tup_id, []).append("lost")


class Blocks(Bolt):
    """Stays in its first call: the others wait for the thread."""

    blocking = True
    gate: ClassVar[threading.Event] = threading.Event()

    def process(self, tup: Tuple) -> None:
        self.gate.wait(60)


class Batches(BatchingBolt):
    """Waits for a tick that does not come."""


class BlockingBatches(Batches):
    blocking = True


class Saves(StatefulBolt):
    """Acks with a checkpoint."""

    def process(self, tup: Tuple) -> None:
        self.state[tup.values[0]] = 1


class Reports(Bolt):
    """Its tuples wait for Dagster."""

    def process(self, tup: Tuple) -> None:
        self.dagster.materialize(f"n/{tup.values[0]}")


KEEPS = """
import json, os, sys
def read():
    lines = iter(sys.stdin.readline, "end\\n")
    return json.loads("".join(lines))
first = read()
open(os.path.join(first["pidDir"], str(os.getpid())), "w").close()
print(json.dumps({"pid": os.getpid()}) + "\\nend", flush=True)
while True:
    if read().get("stream") == "__heartbeat":
        print('{"command": "sync"}\\nend', flush=True)
"""


def holds_all(runner: Runner) -> bool:
    """Whether the task has all numbers, and none is acked."""
    waiting = getattr(runner, "in_flight", 0)
    held = waiting if isinstance(waiting, int) else len(waiting)
    return max(held, len(runner.unacked), len(runner.shared.events.outbox)) >= COUNT


def move(workers: LocalWorkers, slots: dict[str, int]) -> None:
    workers.place(2, {**slots, "bolt": 2})


def reopen(workers: LocalWorkers, slots: dict[str, int]) -> None:
    workers.engines[slots["bolt"]].close_tasks([workers.runner("bolt").task_id], reopen=True)


def restart(workers: LocalWorkers, slots: dict[str, int]) -> None:
    workers.runner("bolt").restart()
    workers.engines[slots["bolt"]]._starting = True


def stop(workers: LocalWorkers, slots: dict[str, int]) -> None:
    workers.engines[1].close()
    workers.transports[1].flush(workers.engines[1].cannot_travel)
    workers.place(2, slots, gone=1)


@pytest.fixture
def workers_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LocalWorkers]]:
    made: list[LocalWorkers] = []
    monkeypatch.setattr(Numbers, "verdicts", {})
    monkeypatch.setattr(Blocks, "gate", threading.Event())
    script = tmp_path / "keeps.py"
    script.write_text(KEEPS)

    def make(bolt: type[Bolt], slots: dict[str, int], conf: dict[str, Any]) -> LocalWorkers:
        builder = TopologyBuilder("stops")
        builder.set_spout("numbers", Numbers)
        if bolt is ShellBolt:
            spec = ShellBolt.spec(command=sys.executable, script=str(script), inputs="numbers")
            builder.set_bolt("bolt", spec, inputs="numbers")
        else:
            builder.set_bolt("bolt", bolt, inputs="numbers")
        made.append(
            LocalWorkers(builder, slots, {"supervisor.worker.shutdown.sleep.secs": 0.5, **conf})
        )
        return made[-1]

    yield make
    Blocks.gate.set()
    for one in made:
        one.close()


PLACES = {
    "one worker": {"numbers": 0, "bolt": 0, ACKER: 0},
    "acker at the spout": {"numbers": 0, "bolt": 1, ACKER: 0},
    "acker at the bolt": {"numbers": 0, "bolt": 1, ACKER: 1},
    "three workers": {"numbers": 0, "bolt": 1, ACKER: 2},
}
BOLTS = [HoldBolt, Blocks, AsyncHoldBolt, Batches, BlockingBatches, ShellBolt, Reports]
CASES = [
    (bolt, way, place)
    for bolt in BOLTS
    for way in (move, reopen, restart, stop)
    # A program that is replaced may have ended by one of its tuples; reports to Dagster outlive a
    # restart.
    if way is not restart or bolt not in (ShellBolt, Reports)
    for place in (["one worker", "three workers"] if way is not stop else list(PLACES)[1:])
]


@pytest.mark.parametrize(("bolt", "way", "place"), CASES)
def test_a_stop_is_no_failure_of_a_tuple(
    workers_of: Callable[..., LocalWorkers], bolt: type[Bolt], way: Callable[..., None], place: str
) -> None:
    slots = PLACES[place]
    workers = workers_of(bolt, {"idle": 2, "other": 1, **slots}, {})

    def delivered() -> bool:
        workers.turn()
        return holds_all(workers.runner("bolt"))

    eventually(delivered, interval=0.001, what="the bolt has all numbers")
    assert not Numbers.verdicts
    way(workers, slots)
    Blocks.gate.set()
    stopped = 1 if way is stop else None

    def told() -> bool:
        workers.turn(stopped)
        return len(Numbers.verdicts) == COUNT

    eventually(told, interval=0.001, what="the spout knows of all numbers")
    verdicts = [one for each in Numbers.verdicts.values() for one in each]
    assert len(verdicts) == COUNT and "failed" not in verdicts
    assert verdicts.count("lost") >= (COUNT - 1 if bolt is Blocks else COUNT)


class Poison(Bolt):
    """Ends its task at 3."""

    def process(self, tup: Tuple) -> None:
        if tup.values[0] == 3:
            sys.exit("three")


class KeepsPoison(Poison):
    auto_ack = False


class BlockingPoison(Poison):
    blocking = True


class SavesPoison(Saves):
    def process(self, tup: Tuple) -> None:
        super().process(tup)
        Poison.process(self, tup)  # type: ignore[arg-type]


def verdicts_of(
    bolt: type[Bolt], tmp_path: Path, prepare: Callable[[TopologyHarness], None]
) -> dict[int, list[str]]:
    Numbers.verdicts = {}
    builder = TopologyBuilder("stops")
    builder.set_spout("numbers", Numbers)
    builder.set_bolt("bolt", bolt, inputs="numbers")
    with TopologyHarness(builder, state_dir=tmp_path) as harness:
        prepare(harness)
        harness.run(timeout=30)
        return Numbers.verdicts


@pytest.mark.parametrize("bolt", [Poison, KeepsPoison, BlockingPoison, SavesPoison])
def test_a_tuple_that_ends_its_task_has_failed(bolt: type[Bolt], tmp_path: Path) -> None:
    verdicts = verdicts_of(bolt, tmp_path, lambda harness: None)
    assert verdicts[3] == ["failed"]
    if bolt is SavesPoison:
        assert verdicts[1] == verdicts[2] == ["lost"], "they were processed, and not saved"


def test_a_checkpoint_that_cannot_be_saved_is_no_failure_of_its_tuples(tmp_path: Path) -> None:
    def prepare(harness: TopologyHarness) -> None:
        runner = next(one for one in harness.engine.runners.values() if one.component == "bolt")
        # The clock stands still, so that no checkpoint is due before the log is closed.
        now = harness.shared.clock()
        while runner.state is None or not runner.state.state.changed:
            harness.engine.run(now)
        runner.state.log.close()

    verdicts = verdicts_of(Saves, tmp_path, prepare)
    assert verdicts and {one for each in verdicts.values() for one in each} <= {"lost", "acked"}
    assert ["lost"] in verdicts.values()


@pytest.mark.long
def test_a_bolt_that_never_acks_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner.__new__(Runner)
    runner.unacked, runner._unacked_check, runner._max_unacked, runner.conf = [], (0.0, 0), 32, {}
    most = 0
    for n in range(400_000):
        monkeypatch.setattr("storm_dagster.worker.tasks.runner.time.monotonic", lambda n=n: n / 100)
        runner.note_unacked(Tuple(n, "numbers", "default", 1, [n], Tree(1, n, 0)))
        most = max(most, len(runner.unacked))
    assert most < 15_000, "a hundred a second for 30 s, and some times as long"
    assert [tup.id for tup in runner.unacked][-3000:] == list(range(397_000, 400_000))
    for tup in runner.unacked:
        tup._tree = None
    runner._max_unacked = 0
    runner.note_unacked(Tuple(1, "numbers", "default", 1, [1], Tree(1, 1, 0)))
    assert len(runner.unacked) == 1


def test_an_acker_passes_a_loss_on_also_before_it_knows_the_spout() -> None:
    acker, result = AckTracker(10.0), AckerResult()
    acker.apply(0.0, inits=[(1, 5, 7), (2, 5, 7)], fails=[2], losses=[1, 2, 3], into=result)
    assert (result.acked, result.failed, result.lost) == ({}, {7: [2]}, {7: [1], 0: [2, 3]})
