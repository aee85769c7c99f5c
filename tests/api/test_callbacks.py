"""A method that a worker would never run is refused when its component is declared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from storm_dagster.api import (
    BatchingBolt,
    Bolt,
    Spout,
    StatefulBolt,
    TicklessBatchingBolt,
    Topology,
    Tuple,
    Window,
    WindowedBolt,
    bolt,
    spout,
)
from storm_dagster.connectors import Rejected, Retry, SinkBolt, Source, SourceSpout
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.testing.topology_harness import run_topology


def generator(*_: Any) -> Iterator[Any]:
    yield [1]


async def coroutine(*_: Any) -> None:
    pass


async def async_generator(*_: Any) -> Any:
    yield [1]


FUNCTIONS = [generator, coroutine, async_generator]
METHODS: list[tuple[type[Any], str]] = [
    *((Spout, name) for name in ("next_tuple", "ack", "fail", "given_up", "initialize", "close")),
    *((Bolt, name) for name in ("process", "process_tick", "initialize", "close")),
    *((BatchingBolt, name) for name in ("process_batch", "group_key")),
    (TicklessBatchingBolt, "process_batch"),
    (WindowedBolt, "process_window"),
    (StatefulBolt, "merge_states"),
    (SinkBolt, "row_of"),
    (SourceSpout, "values"),
    (SourceSpout, "decode"),
]


class Target:
    """A sink."""

    def open(self, conf: Any, owner: str) -> int:
        return 0

    def write(self, rows: Any, token: int) -> None: ...

    def close(self) -> None: ...


class Numbers(Source):
    """A source."""


READER: Any = type("Reader", (Numbers,), {"read": lambda *_: [], "partitions": lambda _: []})()


def component(base: type[Any], **methods: Any) -> Any:
    needs: dict[str, Any] = {"outputs": ["n"], "sink": Target(), "source": READER, "window": None}
    needs["window"] = Window.tumbling(count=1)
    return type("Mine", (base,), {**needs, **methods})


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("base", "name"), METHODS)
def test_a_method_that_would_never_run_is_refused(
    base: type[Any], name: str, function: Any
) -> None:
    if (base, name, function) == (Bolt, "process", coroutine):
        return
    method = staticmethod(function) if name == "decode" else function
    with pytest.raises(InvalidTopology, match=f"^{name} of Mine .*none of its lines"):
        component(base, **{name: method}).spec()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["open", "write", "close"])
def test_a_method_of_a_sink_that_would_never_run_is_refused(name: str, function: Any) -> None:
    sink: Any = type("Mine", (Target,), {name: function})()
    source = component(Spout).spec(name="numbers")
    bolt_spec = component(SinkBolt, sink=sink).spec(name="sink", inputs=[source])
    topology = type("Sinks", (Topology,), {"numbers": source, "sink": bolt_spec})
    with pytest.raises(InvalidTopology, match=f"^{name} of Mine .*none of its lines"):
        topology.to_spec()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["open", "assign", "commit", "ack", "nack", "lag", "close"])
def test_a_method_of_a_source_that_would_never_run_is_refused(name: str) -> None:
    source = type("Mine", (Numbers,), {name: coroutine})()
    with pytest.raises(InvalidTopology, match=f"^{name} of Mine is async"):
        component(SourceSpout, source=source).spec()
    reading = type("Mine", (Numbers,), {"read": generator, "partitions": generator})()
    component(SourceSpout, source=reading).spec()


@spout(outputs=["n"])
def numbers() -> Iterator[int]:
    yield 1


@bolt(outputs=["n"])
def doubled(n: int) -> Iterator[int]:
    yield 2 * n


class Waits(Bolt):
    """An async bolt with methods of its own that the worker does not call."""

    outputs = ["n"]

    async def process(self, tup: Tuple) -> None:
        self.emit([*self.values(tup)])

    async def process_tick(self, tup: Tuple) -> None: ...

    def values(self, tup: Tuple) -> Iterator[int]:
        yield tup.values[0]


class Fine(Topology):
    numbers = numbers.spec()
    doubled = doubled.spec(inputs=[numbers])
    waits = Waits.spec(inputs=[doubled])


def test_functions_with_yield_and_async_bolts_run() -> None:
    assert run_topology(Fine, {"numbers": [[1], [2]]}).values("waits") == [[2], [4]]


class Wrong(SinkBolt):
    sink = Target()  # type: ignore[assignment]

    def row_of(self, tup: Tuple) -> Any:
        return [tup.values[0]]


class WrongRows(Topology):
    numbers = numbers.spec()
    wrong = Wrong.spec(inputs=[numbers])


def test_a_row_that_is_not_a_map_is_named() -> None:
    (_, error), *_ = run_topology(WrongRows, {"numbers": [[1]]}).errors
    assert "row_of of Wrong returned a value of type list: return a map" in str(error)


def test_results_of_a_sink_that_are_no_text_or_number_fail_no_tuple() -> None:
    assert Rejected({0: None, 1: 5}).rows == {0: "None", 1: "5"}  # type: ignore[dict-item]
    assert Retry(-1).after == 0.0
    for after in ("soon", None):
        with pytest.raises((TypeError, ValueError)):
            Retry(after)  # type: ignore[arg-type]
