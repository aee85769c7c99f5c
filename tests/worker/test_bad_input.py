"""Mistakes of components: reported with component, task and remedy; tuples replayed; workers
alive.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from storm_dagster.api import Bolt, Grouping, Spout, Stream, Topology, TopologyBuilder, Tuple
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.wire import MAX_FRAME_BYTES
from storm_dagster.testing.topology_harness import TopologyHarness, run_topology
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.components import DiscardBolt, Numbers
from storm_rigs.operations.storm_client import as_storm
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.worker_processes import WorkerRig
from storm_rigs.worker.first_error import first_error

CODE = f"""
import os, time
from pathlib import Path
from storm_dagster.api import Bolt, Spout

FOLDER = Path(os.environ["RIG_FOLDER"])
KINDS = ["stream", "few", "many", "text", "object", "huge", "raise", "block"]


class Kinds(Spout):
    def initialize(self, conf, context):
        self.waiting = KINDS.copy()
        self.acks = (FOLDER / "acked").open("a", buffering=1)
        self.fails = (FOLDER / "failed").open("a", buffering=1)

    def next_tuple(self):
        if self.waiting:
            kind = self.waiting.pop()
            self.emit([kind], tup_id=kind)

    def ack(self, kind):
        self.acks.write(kind + "\\n")

    def fail(self, kind):
        self.fails.write(kind + "\\n")
        self.waiting.append(kind)


class Wrong(Bolt):
    def initialize(self, conf, context):
        if not (FOLDER / "started").exists():
            (FOLDER / "started").touch()
            raise OSError("the database is not there yet")
        self.seen = set()

    def process(self, tup):
        kind = tup.values[0]
        if kind in self.seen:
            self.emit([kind])
            return
        self.seen.add(kind)
        if kind == "stream":
            self.emit([kind], stream="elsewhere")
        elif kind == "few":
            self.emit([])
        elif kind == "many":
            self.emit([kind, 2])
        elif kind == "text":
            self.emit(kind)
        elif kind == "object":
            self.emit([object()])
        elif kind == "huge":
            self.emit([bytes({MAX_FRAME_BYTES} + 1)])
        elif kind == "raise":
            raise KeyError("no such customer")
        else:
            time.sleep(2.5)
            raise TimeoutError("the service did not answer")


class Sink(Bolt):
    def process(self, tup):
        pass
"""

REMEDIES = {
    "the database is not there yet": "OSError",
    "declares: 'default'; add it to outputs": "'elsewhere'",
    # Two tuples, of 0 and of 2 values, raise it in one line: one record, which counts.
    "values on stream 'default', which has 1 fields (word): emit a value for each": "component 'wrong'",
    "wrap it in [ ]": "str 'text'",
    "emit text, numbers, bytes, lists, maps": "task 1: field 'word' of stream 'default' is of type object, which cannot travel",
    "send a reference to it (a path, a key)": f"over the limit of {MAX_FRAME_BYTES}",
    "no such customer": "KeyError",
    "set blocking = True on its class": "component 'wrong' has not returned for",
    "the service did not answer": "TimeoutError",
}


@pytest.mark.zookeeper
def test_everything_wrong_is_shown_once_and_replayed_and_the_worker_lives(
    rig_of: Callable[..., WorkerRig],
) -> None:
    builder = TopologyBuilder("bad")
    builder.set_spout("kinds", "rig_code:Kinds", outputs=["kind"])
    builder.set_bolt("wrong", "rig_code:Wrong", inputs="kinds", outputs=["word"])
    builder.set_bolt("sink", "rig_code:Sink", inputs={"wrong": Grouping.GLOBAL})
    rig = rig_of(
        builder,
        CODE,
        {"wrong": "1", "sink": "2", "kinds": "3"},
        **{
            "topology.max.error.report.per.interval": 100,
            "topology.message.timeout.secs": 20,
            "worker.blocked.report.secs": 1,
            "worker.heartbeat.frequency.secs": 0.3,
        },
    )
    one, two = ("s1", free_port()), ("s2", free_port())
    rig.assign({one: "1,3,8-9", two: "2"})
    rig.start(*one)
    rig.start(*two)

    def lines(name: str) -> list[str]:
        path = rig.folder / name
        return sorted(path.read_text().split()) if path.exists() else []

    kinds = ["block", "few", "huge", "many", "object", "raise", "stream", "text"]
    eventually(
        lambda: lines("acked") == kinds, timeout=90, what="every tuple is processed in the end"
    )
    assert lines("failed") == kinds, "each failed once, and was not left to time out"
    assert all(process.poll() is None for process in rig.processes.values())

    def shown() -> list[Any]:
        return as_storm(rig.cluster).errors(rig.topology_id)

    eventually(lambda: len(shown()) >= len(REMEDIES), what="all errors are recorded")
    errors = shown()
    for remedy, reason in REMEDIES.items():
        found = [error for error in errors if remedy in error.error and reason in error.error]
        assert len(found) == 1, (remedy, [error.error[:200] for error in errors])
        assert found[0].task == 1
    assert len(errors) == len(REMEDIES)
    (counted,) = [error.count for error in errors if "emit a value for each" in error.error]
    assert counted == 2
    (blocked,) = [error.error for error in errors if "It is at:" in error.error]
    line = 1 + CODE.splitlines().index("            time.sleep(2.5)")
    assert f'rig_code.py", line {line}, in process' in blocked and "time.sleep(2.5)" in blocked


class Emits(Bolt):
    outputs = [Stream(["n"]), Stream(["n"], name="chosen", direct=True)]

    def process(self, tup: Tuple) -> None:
        n = tup.values[0]
        if n == 0:
            self.emit([n], direct_task=99, stream="chosen")
        elif n == 1:
            self.emit([n], stream="chosen")
        elif n == 2:
            self.emit([{1, 2, object()}])
        else:
            self.emit([n])


class Direct(Topology):
    numbers = Numbers.spec()
    emits = Emits.spec(inputs=[numbers])
    reads = Emits.spec(inputs={emits["chosen"]: Grouping.DIRECT}, outputs=["n"])


def test_receivers_that_do_not_exist_and_values_that_could_not_travel() -> None:
    conf = {"topology.testing.always.try.serialize": True}
    result = run_topology(Direct, {"numbers": [[0], [1], [2], [3]]}, conf=conf)
    assert sorted(result.failed["numbers"]) == [0, 1, 2] and result.acked["numbers"] == [3]
    texts = sorted(str(error) for _, error in result.errors)
    for words in ("cannot be sent to task 99", "name the receiving task", "cannot travel"):
        assert any(words in text for text in texts), (words, texts)


class Mistaken(Bolt):
    """Makes each mistake once, and none when the tuple is replayed."""

    outputs = ["word"]

    def initialize(self, conf: Any, context: Any) -> None:
        self.seen: set[str] = set()

    def process(self, tup: Tuple) -> None:
        kind = tup.values[0]
        if kind in self.seen:
            self.emit([kind])
            return
        self.seen.add(kind)
        if kind == "raise":
            raise KeyError("no such customer")
        wrong: dict[str, Any] = {"few": [], "many": [kind, 2], "text": kind, "object": [object()]}
        self.emit(wrong.get(kind, [kind]), stream="elsewhere" if kind == "stream" else None)


class MistakenBlocking(Mistaken):
    blocking = True


class MistakenAsync(Mistaken):
    async def process(self, tup: Tuple) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().process(tup)


@pytest.mark.parametrize("bolt", [Mistaken, MistakenBlocking, MistakenAsync])
def test_each_mistake_is_reported_once_and_replayed_whatever_runs_the_bolt(
    bolt: type[Bolt],
) -> None:
    builder = TopologyBuilder("mistaken")
    builder.set_spout("kinds", Numbers, outputs=["kind"])
    builder.set_bolt("wrong", bolt, inputs="kinds")
    said = {
        "few": "component 'wrong' emits 0 values on stream 'default', which has 1 fields (word)",
        "many": "component 'wrong' emits 2 values on stream 'default', which has 1 fields (word)",
        "text": "wrap it in [ ]",
        "object": ": field 'word' of stream 'default' is of type object, which cannot travel",
        "stream": "component 'wrong' emits on stream 'elsewhere' but declares: 'default'; add it to outputs",
        "raise": "no such customer",
    }
    conf = {"topology.testing.always.try.serialize": True}
    with TopologyHarness(
        builder, {"kinds": [[kind] for kind in said]}, conf=conf, replays=1
    ) as harness:
        result = harness.run(timeout=30)
    everything = list(range(len(said)))
    assert (
        sorted(result.failed["kinds"]) == everything and sorted(result.acked["kinds"]) == everything
    )
    assert sorted(result.values("wrong")) == sorted([kind] for kind in said)
    for text in said.values():
        assert sum(text in str(error) for _, error in result.errors) == 1, (text, result.errors)
    assert len(result.errors) == len(said)


class Chain(Spout):
    """Emits the next number when the one before is acked, and raises now and then."""

    outputs = ["n"]

    def initialize(self, conf: Any, context: Any) -> None:
        self.acked: list[int] = []
        self.started = False

    def next_tuple(self) -> None:
        if not self.started:
            self.started = True
            self.emit([0], tup_id=0)

    def ack(self, tup_id: int) -> None:
        self.acked.append(tup_id)
        if tup_id < 20:
            self.emit([tup_id + 1], tup_id=tup_id + 1)
        if tup_id == 7:
            raise ValueError("in ack")


class Chained(Topology):
    chain = Chain.spec()
    takes = DiscardBolt.spec(inputs=[chain])


class BlockingChain(Chain):
    blocking = True


class BlockingChained(Topology):
    chain = BlockingChain.spec()
    takes = DiscardBolt.spec(inputs=[chain])


@pytest.mark.parametrize("ackers", [0, 1])
@pytest.mark.parametrize("topology", [Chained, BlockingChained])
def test_a_spout_may_emit_in_ack_and_survives_raising_there(
    topology: type[Topology], ackers: int
) -> None:
    with TopologyHarness(topology, conf={"topology.acker.executors": ackers}) as harness:
        deadline = time.monotonic() + patience(20)
        while time.monotonic() < deadline:
            harness.run()
            if len(harness.tasks("chain")[0].acked) == 21:
                break
        assert harness.tasks("chain")[0].acked == list(range(21))
        assert [str(error) for _, error in harness.errors] == ["in ack"]


class NeverStarts(Bolt):
    def initialize(self, conf: Any, context: Any) -> None:
        raise ConnectionError("prepare")

    def process(self, tup: Tuple) -> None:
        pass


class HalfStarted(Topology):
    numbers = Numbers.spec()
    never = NeverStarts.spec(inputs=[numbers])


def test_tuples_for_a_task_that_never_starts_time_out_and_are_replayed() -> None:
    conf = {"topology.message.timeout.secs": 5}
    with TopologyHarness(HalfStarted, {"numbers": [[1]]}, simulated=True, conf=conf) as harness:
        for _ in range(200):
            harness.clock.secs += 0.1  # type: ignore[union-attr]
            harness.engine.run(harness.shared.clock())
        assert harness.tasks("numbers")[0].failed == [0]
        tries = len(harness.errors)
        assert 3 <= tries <= 6, "tried again, less and less often"
        assert all(str(error) == "prepare" for _, error in harness.errors)


class RaisesAtOne(Bolt):
    def process(self, tup: Tuple) -> None:
        if tup.values == [1]:
            raise ValueError("one is no number")


class OneRaises(Topology):
    numbers = Numbers.spec()
    raises = RaisesAtOne.spec(inputs=[numbers])


def test_a_tuple_that_fails_does_not_count_as_acked() -> None:
    with TopologyHarness(OneRaises, {"numbers": [[0], [1], [2], [3]]}) as harness:
        result = harness.run(timeout=60)
        assert result.failed["numbers"] == [1] and sorted(result.acked["numbers"]) == [0, 2, 3]
        runners = harness.engine.runners.values()
        stats = next(runner.stats for runner in runners if runner.component == "raises")
        assert (stats.executed, stats.acked, stats.failed) == (4, 3, 1)


class Typed(Bolt):
    outputs = {"word": str, "count": int, "share": float, "rest": object}

    def process(self, tup: Tuple) -> None:
        named = self.named(tup)
        self.emit(["word", named["n"], 1, None])


class TypedBlocking(Typed):
    blocking = True


class TypedStreams(Topology):
    numbers = Numbers.spec()
    typed = Typed.spec(inputs=[numbers])
    blocking = TypedBlocking.spec(inputs=[numbers])


def test_values_of_typed_streams_are_checked() -> None:
    given = {"numbers": [[1], ["2"], [True], [None]]}
    result = run_topology(TypedStreams, given)
    assert result.acked["numbers"] == [0] and sorted(result.failed["numbers"]) == [1, 2, 3]
    texts = [str(error) for _, error in result.errors]
    for component in ("typed", "blocking"):
        assert (
            f"component '{component}' emits '2' (str) as field 'count' of stream 'default', which is declared int: "
            "convert it, or declare another type"
        ) in texts
    with pytest.raises(InvalidTopology, match="not a field type"):
        Stream({"word": complex})


def broken_grouping(context: Any, component: str, stream: str, tasks: list[int]) -> Any:
    raise LookupError("no table of regions")


def wrong_grouping(context: Any, component: str, stream: str, tasks: list[int]) -> Any:
    return lambda values: 4711


class BrokenGrouping(Topology):
    numbers = Numbers.spec()
    takes = DiscardBolt.spec(inputs={numbers: Grouping.custom("bad_groupings:broken_grouping")})


class WrongGrouping(Topology):
    numbers = Numbers.spec()
    emits = Emits.spec(inputs=[numbers])
    takes = DiscardBolt.spec(inputs={emits: Grouping.custom("bad_groupings:wrong_grouping")})


def test_custom_groupings_that_cannot_be_made_or_choose_unknown_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("bad_groupings")
    module.__dict__.update(broken_grouping=broken_grouping, wrong_grouping=wrong_grouping)
    monkeypatch.setitem(sys.modules, "bad_groupings", module)
    with TopologyHarness(BrokenGrouping, {"numbers": [[3]]}, simulated=True) as harness:
        name, error = first_error(harness)
        assert (name, str(error)) == ("numbers", "no table of regions") and len(harness.errors) == 1
    result = run_topology(WrongGrouping, {"numbers": [[3]]})
    assert result.failed["numbers"] == [0]
    assert "a custom grouping chose [4711], the target tasks are [2]" in str(result.errors[0][1])
