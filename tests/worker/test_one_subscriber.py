"""Streams with one subscriber, as most topologies have them: the shortest way of a tuple. The test
harness adds a subscriber of its own to every stream, so these tests place an engine without it.
"""

from __future__ import annotations

from decimal import Decimal
from enum import Enum
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storm_dagster.api import Bolt, Grouping, Stream, TopologyBuilder
from storm_dagster.api.specs import StreamOf
from storm_dagster.host.resolve import load_plugin
from storm_dagster.model.conf import default_conf
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.names import ACKER
from storm_dagster.model.slot import Slot
from storm_dagster.model.values import REGISTER_KEY, register_classes
from storm_dagster.worker.dataplane.routes import Placement
from storm_dagster.worker.engine.native import NativeEngine
from storm_dagster.worker.tasks.shared import Shared
from storm_rigs.components import QueueSpout

SLOT = Slot("a", 1)


class Word(str, Enum):
    RED = "red"


class Emits(Bolt):
    """Emits what it receives, and spoils its list afterwards."""

    outputs = [
        Stream(["key"], name="1"),
        Stream(["key", "b"], name="2"),
        Stream(["key", "b", "c"], name="3"),
    ]

    def process(self, tup: Any) -> None:
        for stream, values in tup.values[0]:
            mine = list(values)
            self.emit(mine, stream=stream)
            mine[:] = [None] * len(mine)


class Sink(Bolt):
    received: list[tuple[int, str, list[Any]]] = []

    def initialize(self, conf: Any, context: Any) -> None:
        self.task = context.task_id

    def process(self, tup: Any) -> None:
        Sink.received.append((self.task, tup.stream, tup.values))


def run(emitted: list[Any], readers: int = 7) -> list[BaseException]:
    """Emit all of these (stream, values) for one tuple of the spout; the errors."""
    QueueSpout.reset([emitted])
    Sink.received = []
    builder = TopologyBuilder("short")
    builder.set_spout("given", QueueSpout)
    builder.set_bolt("emits", Emits, inputs="given")
    for width in "123":
        builder.set_bolt(
            f"sink{width}",
            Sink,
            inputs={StreamOf("emits", width): Grouping.fields("key")},
            par=readers,
        )
    spec = builder.to_spec()
    names = [name for name, _, part in spec.components() for _ in range(part.parallelism)] + [ACKER]
    components = dict(enumerate(names, 1))
    errors: list[BaseException] = []
    registered = {REGISTER_KEY: [f"{__name__}:Word"]}
    conf = {
        **default_conf(),
        **spec.conf,
        **registered,
        "topology.testing.always.try.serialize": False,
    }
    shared = Shared(
        conf=conf, owns=lambda: True, wake=lambda: None, report=lambda *a: errors.append(a[2])
    )
    engine = NativeEngine(
        topology_id="short-1-0", spec=spec, conf=conf, shared=shared, transport=None, slot=SLOT
    )
    mine = frozenset(components)
    engine.place(Placement(0, dict.fromkeys(components, SLOT), {}, components, mine, mine))
    engine.activate(True)
    for _ in range(6):
        engine.run(shared.clock())
    assert all(route.only for runner in engine.runners.values() for route in runner.routes.values())
    engine.close()
    register_classes([], load_plugin)
    return errors


KEYS = st.sampled_from(
    [
        1,
        1.0,
        True,
        Decimal(1),
        "red",
        Word.RED,
        "blue",
        None,
        b"a",
        (1, 2),
        [1, 2],
        0.5,
        Decimal("0.5"),
    ]
)
TUPLES = st.one_of(
    st.tuples(st.just("1"), st.tuples(KEYS)),
    st.tuples(st.just("2"), st.tuples(KEYS, KEYS)),
    st.tuples(st.just("3"), st.tuples(KEYS, KEYS, KEYS)),
)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(st.lists(TUPLES, max_size=20))
def test_values_arrive_as_they_were_and_equal_keys_at_one_task(emitted: list[Any]) -> None:
    assert run(emitted) == []
    assert (len(QueueSpout.acked), QueueSpout.failed) == (1, [])
    for width in "123":
        sent = [list(values) for stream, values in emitted if stream == width]
        received = [(task, values) for task, stream, values in Sink.received if stream == width]
        shown = [
            sorted(repr((values, [*map(type, values)])) for values in some)
            for some in (sent, [v for _, v in received])
        ]
        assert shown[0] == shown[1]
        for task, values in received:
            assert all(other == task for other, others in received if others[0] == values[0])


@pytest.mark.parametrize(
    ("stream", "values"),
    [("1", []), ("1", [1, 2]), ("2", [1]), ("2", [1, 2, 3]), ("3", [1]), ("3", [])],
)
def test_a_wrong_number_of_values_is_refused(stream: str, values: list[Any]) -> None:
    (error,) = run([("1", ["before"]), (stream, values)])
    assert isinstance(error, InvalidRequest)
    assert (
        f"component 'emits' emits {len(values)} values on stream {stream!r}, which has {stream} fields"
        in str(error)
    )
    assert (QueueSpout.acked, len(QueueSpout.failed)) == ([], 1)


def test_a_tree_taken_in_parts_is_acked_once_after_the_last() -> None:
    assert run([("1", [number]) for number in range(5_000)], readers=3) == []
    assert len(Sink.received) == 5_000 and (QueueSpout.acked, QueueSpout.failed) == ([1], [])
