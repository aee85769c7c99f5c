"""Components as functions: what is yielded is emitted and anchored; fields and types are checked
when it is built.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from storm_dagster.api import (
    Bolt,
    Emit,
    Grouping,
    Spout,
    Stream,
    Topology,
    TopologyContext,
    Tuple,
    bolt,
    spout,
)
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.testing import run_topology
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually

TEXT = ["a b a", "c", "b a"]


@spout(outputs=["line"])
def lines(context: TopologyContext, times: int = 1) -> Iterator[str]:
    """Every line, ``times`` times."""
    assert context.component == "lines"
    for _ in range(times):
        yield from TEXT


@bolt(outputs=["word", "times"])
def words(line: str, least: int = 1) -> Iterator[tuple[str, int]]:
    for word, times in Counter(line.split()).items():
        if times >= least:
            yield word, times


@bolt(outputs=["word", "times"])
async def later(line: str) -> AsyncIterator[tuple[str, int]]:
    for word, times in Counter(line.split()).items():
        await asyncio.sleep(0)
        yield word, times


@bolt(outputs=["length"])
async def length(line: str) -> int:
    await asyncio.sleep(0)
    return len(line)


@bolt(outputs=[Stream(["even"]), Stream(["odd"], name="odd")])
def sort(times: int, tup: Tuple) -> Any:
    assert tup.values[1] == times
    return (times,) if times % 2 == 0 else Emit("odd", times)


@bolt
def check(word: str) -> None:
    if word == "c":
        raise ValueError("no c")


TRIES: list[int] = []


@spout(outputs=["n"])
def polled() -> Iterator[Any]:
    TRIES.append(1)
    yield 0
    yield 1
    if len(TRIES) == 1:
        raise ConnectionError("the first time")
    yield 2


class Words(Topology):
    lines = lines.spec(args={"times": 2})
    words = words.spec(inputs=[lines], par=2)
    sort = sort.spec(inputs=[words])


def test_what_is_yielded_is_emitted() -> None:
    with TopologyHarness(Words) as harness:
        found = harness.run()
    assert sorted(found.values("lines")) == sorted([[line] for line in TEXT] * 2)
    counted: Counter[str] = Counter()
    for word, times in found.values("words"):
        counted[word] += times
    assert counted == {"a": 6, "b": 4, "c": 2}
    assert found.values("sort") == [[2]] * 2 and len(found.values("sort", "odd")) == 8
    assert not found.errors


@pytest.mark.parametrize(
    ("made", "expected"), [(later, [["a", 2], ["b", 1], ["c", 1]]), (length, [[5], [1]])]
)
def test_async_functions_are_bolts(made: type[Bolt], expected: list[Any]) -> None:
    topology = type(
        "T", (Topology,), {"lines": (source := lines.spec()), "out": made.spec(inputs=[source])}
    )
    assert sorted(run_topology(topology, {"lines": [["a b a"], ["c"]]}).values("out")) == sorted(
        expected
    )


def test_a_tuple_whose_function_raises_fails_and_is_emitted_again() -> None:
    class Checked(Topology):
        config = {"topology.dead.letter.tries": 0}
        lines = lines.spec()
        words = words.spec(inputs=[lines])
        check = check.spec(inputs=[words])

    found = run_topology(Checked, {"lines": [["a"], ["c"], ["b"]]})
    assert found.acked["lines"] == [0, 2] and found.failed["lines"] == [1]
    assert [(component, str(error)) for component, error in found.errors] == [("check", "no c")]
    with TopologyHarness(Checked) as harness:
        emitted = Counter(str(values[0]) for values in harness.run().values("lines"))
    assert emitted == Counter({"a b a": 1, "b a": 1, "c": 4}), (
        "three times more, then it is a dead letter"
    )


def test_a_generator_that_has_raised_begins_again() -> None:
    class Polled(Topology):
        numbers = polled.spec()

    TRIES.clear()
    with TopologyHarness(Polled) as harness:
        found = eventually(
            lambda: result if len((result := harness.run()).values("numbers")) >= 5 else None, 20
        )
    assert found.values("numbers")[:5] == [[0], [1], [0], [1], [2]]
    assert [str(error) for _, error in harness.errors] == ["the first time"]


def test_a_function_is_a_component_class_with_its_own_name() -> None:
    assert issubclass(words, Bolt) and issubclass(lines, Spout)
    assert (words.__name__, words.__module__) == (
        "words",
        __name__,
    ) and lines.__doc__ == "Every line, ``times`` times."
    assert list(words.function("b b")) == [("b", 2)], "it can be tested as the function that it is"
    spec = Words.to_spec()
    assert (
        spec.bolts["words"].object.python == f"{__name__}:words"
        and spec.bolts["words"].parallelism == 2
    )
    assert spec.bolts["words"].outputs["default"].types == ("str", "int"), "from its annotation"
    assert spec.spouts["lines"].outputs["default"].types == ("str",)
    assert run_topology(Words, {"lines": [["x y"]]}, conf={}).values("words") == [
        ["x", 1],
        ["y", 1],
    ]


def test_arguments_are_those_with_a_default() -> None:
    class Often(Topology):
        lines = lines.spec()
        words = words.spec(inputs=[lines], args={"least": 2})

    assert run_topology(Often, {"lines": [["a b a"]]}).values("words") == [["a", 2]]
    with pytest.raises(
        InvalidTopology, match=r"words has no argument 'most' with a default.*: least"
    ):
        words.spec(args={"most": 3})


@bolt(outputs=["out"])
def missing(text: str) -> str:
    return text


@bolt
def other_type(line: int) -> None: ...


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (
            missing,
            r"bolt 'it': missing\(\) has the parameter 'text', but stream 'default' of 'lines' has the fields: line",
        ),
        (
            other_type,
            r"bolt 'it': parameter 'line' of other_type\(\) is int, but in stream .* it is str",
        ),
    ],
)
def test_a_field_that_is_not_there_or_has_another_type_is_named(
    made: type[Bolt], error: str
) -> None:
    class Wrong(Topology):
        lines = lines.spec()
        it = made.spec(inputs={lines: Grouping.SHUFFLE})

    with pytest.raises(InvalidTopology, match=error):
        Wrong.to_spec()


def _everything(*line: str) -> None: ...


def _plain() -> str:
    return ""


def _reads(line: str) -> Iterator[str]:
    yield line


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: bolt(_everything), r"_everything has the parameter \*line.*: name each field"),
        (lambda: spout(_plain), "@spout _plain is not a generator function"),
        (lambda: spout(outputs=["line"])(_reads), "@spout _reads: parameter 'line' has no default"),
    ],
)
def test_a_function_that_cannot_be_one_is_refused(make: Callable[[], Any], error: str) -> None:
    with pytest.raises(InvalidTopology, match=error):
        make()


def test_values_of_a_wrong_number_or_type_are_a_component_error() -> None:
    class Short(Topology):
        lines = lines.spec()
        short = short.spec(inputs=[lines])

    found = run_topology(Short, {"lines": [["x"]]})
    assert found.failed["lines"] == [0] and "times" in str(found.errors[0][1])


@bolt(outputs={"word": str, "times": int})
def short(line: str) -> Any:
    return (line, "not a number")


@bolt(outputs=["word"])
def by_name(tup: Tuple) -> str:
    return tup.values.line.upper()


def test_a_whole_tuple_has_its_fields_as_attributes() -> None:
    class Named(Topology):
        lines = lines.spec()
        by_name = by_name.spec(inputs=[lines])

    assert run_topology(Named, {"lines": [["a"]]}).values("by_name") == [["A"]]
