"""Hostile values in every method of the API, in every kind of component: each tuple is acked or
failed, once.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storm_dagster.api import (
    BatchingBolt,
    Bolt,
    Grouping,
    ShellBolt,
    Spout,
    StatefulBolt,
    Stream,
    TopologyBuilder,
    Tuple,
    Window,
    WindowedBolt,
)
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import patience
from storm_rigs.components import DiscardBolt, Numbers

pytestmark = pytest.mark.fuzz

try:
    import numpy
except ImportError:
    numpy: Any = None


class Hostile:
    """Raises wherever it is looked at."""

    def _refuse(self, *_: Any) -> Any:
        raise LookupError("do not look at me")

    __repr__ = __str__ = __hash__ = __eq__ = __len__ = __iter__ = __float__ = __index__ = (
        __bool__
    ) = _refuse  # type: ignore[assignment]


class Zone(datetime.tzinfo):
    def utcoffset(self, dt: Any) -> Any:
        raise ArithmeticError("no such zone")


def endless() -> Any:
    loop: list[Any] = []
    loop.append({"again": loop})
    return loop


def deep() -> Any:
    value: Any = 0
    for _ in range(3000):
        value = [value]
    return value


MAKE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "nan": lambda: math.nan,
    "infinity": lambda: -math.inf,
    "huge": lambda: 2**70,
    "negative": lambda: -1,
    "task": lambda: 2,
    "surrogate": lambda: "\udc80",
    "null": lambda: "a\0b",
    "bytes": lambda: b"\xff\x00",
    "endless": endless,
    "deep": deep,
    "hostile": Hostile,
    "object": object,
    "set": lambda: {1, "a"},
    "map": lambda: {(1, 2): [3], None: {}},
    "zone": lambda: datetime.datetime(2026, 1, 1, tzinfo=Zone()),
    "class": lambda: Hostile,
    "function": lambda: deep,
    "error": lambda: ValueError("an error"),
    "error of errors": lambda: ValueError(Hostile()),
    "empty": list,
    "text": lambda: "default",
    "tuple": lambda: ("a", 1.5, True),
}
if numpy is not None:
    MAKE |= {
        "numpy integer": lambda: numpy.int64(3),
        "numpy float": lambda: numpy.float32("nan"),
        "numpy array": lambda: numpy.zeros(3),
    }

Act = Callable[[Any, Any, Any], Any]
ACTS: dict[str, Act] = {
    "emit": lambda it, v, tup: it.emit([v]),
    "emit it": lambda it, v, tup: it.emit(v),
    "emit two": lambda it, v, tup: it.emit([v, v]),
    "emit on": lambda it, v, tup: it.emit([1], stream=v),
    "emit to": lambda it, v, tup: it.emit([1], stream="chosen", direct_task=v),
    "emit and ask": lambda it, v, tup: it.emit([v], need_task_ids=True),
    "log": lambda it, v, tup: it.log(v),
    "log at": lambda it, v, tup: it.log("text", v),
    "metric": lambda it, v, tup: it.report_metric("m", v),
    "metric named": lambda it, v, tup: it.report_metric(v, 1),
    "raise_exception": lambda it, v, tup: it.raise_exception(v),
    "raise": lambda it, v, tup: _raise(v),
    "exit": lambda it, v, tup: _raise(SystemExit(v)),
    "cancel": lambda it, v, tup: _raise(asyncio.CancelledError()),
    "tasks": lambda it, v, tup: it.context.component_tasks(v),
    "fields": lambda it, v, tup: it.context.source_fields("numbers", v),
    "outputs": lambda it, v, tup: it.context.output_fields(v),
    "item": lambda it, v, tup: it.context[v],
    "task state get": lambda it, v, tup: it.context.state.get(v),
    "task state save": lambda it, v, tup: it.context.state.save({"k": v}, applied=[v]),
    "task state key": lambda it, v, tup: it.context.state.save({v: 1}),
}
BOLT_ACTS: dict[str, Act] = {
    **ACTS,
    "anchored": lambda it, v, tup: it.emit([1], anchors=v),
    "anchored to": lambda it, v, tup: it.emit([1], anchors=[v, tup]),
    "ack": lambda it, v, tup: it.ack(v),
    "fail": lambda it, v, tup: it.fail(v),
    "ack twice": lambda it, v, tup: (it.ack(tup), it.ack(tup)),
    "fail then ack": lambda it, v, tup: (it.fail(tup), it.ack(tup)),
    "named": lambda it, v, tup: it.named(v),
    "materialize": lambda it, v, tup: it.dagster.materialize(v),
    "observe": lambda it, v, tup: it.dagster.observe("lake/a", metadata={"v": v}, anchors=v),
    "state set": lambda it, v, tup: it.state.__setitem__("k", v),
    "state key": lambda it, v, tup: it.state.__setitem__(v, 1),
    "state get": lambda it, v, tup: it.state.get(v),
    "state delete": lambda it, v, tup: it.state.__delitem__(v),
}


def _raise(error: Any) -> None:
    raise error


class Acts(Bolt):
    outputs = [Stream(["v"]), Stream(["v"], name="chosen", direct=True)]
    given: ClassVar[list[tuple[str, Any]]] = []

    def process(self, tup: Tuple) -> Any:
        name, value = self.given[tup.values[0]]
        BOLT_ACTS[name](self, value, tup)


class ActsBlocking(Acts):
    blocking = True


class ActsAsync(Acts):
    async def process(self, tup: Tuple) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(0)
        super().process(tup)


class ActsStateful(Acts, StatefulBolt):
    pass


class ActsStatefulBlocking(ActsStateful):
    blocking = True


class ActsBatching(Acts, BatchingBolt):
    def process(self, tup: Tuple) -> None:
        BatchingBolt.process(self, tup)

    def group_key(self, tup: Tuple) -> Any:
        return tup.values[0]

    def process_batch(self, key: Any, tups: list[Tuple]) -> None:
        Acts.process(self, tups[0])


class ActsWindowed(WindowedBolt):
    outputs = Acts.outputs
    window = Window.tumbling(count=1)
    window_tries = 1

    def process_window(self, window: Any) -> None:
        Acts.process(self, window.tuples[0])  # type: ignore[arg-type]

    given: ClassVar[list[tuple[str, Any]]] = Acts.given


PROGRAM = """
import json, os, sys
def read():
    lines = iter(sys.stdin.readline, "end\\n")
    return json.loads("".join(lines) or sys.exit())
def send(message):
    sys.stdout.write(json.dumps(message) + "\\nend\\n")
    sys.stdout.flush()
first = read()
open(os.path.join(first["pidDir"], str(os.getpid())), "w").close()
send({"pid": os.getpid()})
while True:
    message = read()
    if isinstance(message, dict):
        send({"command": "sync"} if message["stream"] == "__heartbeat" else {"command": "ack", "id": message["id"]})
"""


class Program(ShellBolt):
    command = "python3"
    script = "program.py"


def values() -> Any:
    # Made for each example: what cannot be shown cannot be an argument of a test either.
    return st.sampled_from(sorted(MAKE))


def acts(of: dict[str, Act]) -> Any:
    return st.lists(st.tuples(st.sampled_from(sorted(of)), values()), min_size=1, max_size=8)


KINDS = [
    Acts,
    ActsBlocking,
    ActsAsync,
    ActsStateful,
    ActsStatefulBlocking,
    ActsBatching,
    ActsWindowed,
    Program,
]
FEW = settings(max_examples=max(4, settings().max_examples // 5))


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(plan=acts(BOLT_ACTS), travels=st.booleans())
def test_every_tuple_is_acked_or_failed_once_whatever_its_bolt_does(
    kind: Any, plan: list[tuple[str, str]], travels: bool
) -> None:
    Acts.given[:] = [(name, MAKE[value]()) for name, value in plan]
    shell = kind is Program
    # Programs and the checkpoints of threads need real time.
    real = shell or kind is ActsStatefulBlocking
    with tempfile.TemporaryDirectory() as folder:
        scripts = Path(folder) / "resources"
        scripts.mkdir()
        (scripts / "program.py").write_text(PROGRAM)
        builder = TopologyBuilder("hostile")
        builder.set_spout("numbers", Numbers, outputs=["n"])
        builder.set_bolt("acts", Acts if shell else kind, inputs="numbers")
        builder.set_bolt("takes", DiscardBolt, inputs={"acts": Grouping.fields("v")}, par=2)
        if shell:
            builder.set_bolt("program", Program.spec(inputs={"acts": Grouping.SHUFFLE}))
        indices = list(range(len(plan)))
        with TopologyHarness(
            builder,
            {"numbers": [[index] for index in indices]},
            conf={"topology.testing.always.try.serialize": travels},
            state_dir=Path(folder),
            archive=Path(folder),
            simulated=not real,
        ) as harness:
            harness.run(timeout=60)
            harness.tick("acts")
            result = harness.run(timeout=60)
            assert set(harness.engine.statuses().values()) == {"running"}
            assert all(
                harness.engine.stats()[str(task)].errors < 100 for task in harness.engine.runners
            )
        assert sorted(result.acked["numbers"] + result.failed["numbers"]) == indices
        assert all(component in ("acts", "program") for component, _ in result.errors)


class Source(Spout):
    """Emits what the plan says; the ledger is the class's, since the task may restart."""

    outputs = Acts.outputs
    plan: ClassVar[list[tuple[str, Any]]] = []
    at: ClassVar[list[int]] = [0]
    emitted: ClassVar[list[int]] = []
    heard: ClassVar[list[int]] = []

    def next_tuple(self) -> None:
        if self.at[0] < len(self.plan):
            index = self.at[0]
            self.at[0] += 1
            name, value = self.plan[index]
            if name == "tracked":
                self.emit([value], tup_id=[index, value])
                self.emitted.append(index)
            else:
                ACTS[name](self, value, None)

    def ack(self, tup_id: Any) -> None:
        self.heard.append(tup_id[0])
        raise ValueError("in ack")

    def fail(self, tup_id: Any) -> None:
        self.heard.append(tup_id[0])
        raise ValueError("in fail")


class SourceBlocking(Source):
    blocking = True


@pytest.mark.parametrize("kind", [Source, SourceBlocking])
@FEW
@given(plan=acts({**ACTS, "tracked": ACTS["emit"]}), par=st.sampled_from([1, 2]))
def test_every_tuple_of_a_spout_is_heard_of_once(
    kind: Any, plan: list[tuple[str, str]], par: int
) -> None:
    Source.plan[:] = [(name, MAKE[value]()) for name, value in [*plan, ("tracked", "task")]]
    Source.at[:], Source.emitted[:], Source.heard[:] = [0], [], []
    builder = TopologyBuilder("hostile")
    builder.set_spout("source", kind)
    builder.set_bolt("takes", DiscardBolt, inputs={"source": Grouping.fields("v")}, par=par)
    with tempfile.TemporaryDirectory() as folder:
        with TopologyHarness(builder, simulated=True, state_dir=Path(folder)) as harness:
            deadline = time.monotonic() + patience(60)
            while Source.at[0] < len(Source.plan) or not set(Source.emitted) <= set(Source.heard):
                assert time.monotonic() < deadline, (Source.at, Source.emitted, Source.heard)
                harness.run(timeout=60)
                harness.clock.secs += 0.1  # type: ignore[union-attr]
    assert len(set(Source.heard)) == len(Source.heard), "no tuple is heard of twice"
    assert set(Source.emitted) <= set(Source.heard)
