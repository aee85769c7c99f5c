"""Topologies as authors write them, and the errors for mistakes."""

from __future__ import annotations

from typing import Any

import pytest

import storm_dagster.api
from storm_dagster.api import (
    BatchingBolt,
    Bolt,
    GlobalStreamId,
    Grouping,
    ShellBolt,
    ShellSpout,
    Stream,
    TicklessBatchingBolt,
    Topology,
    TopologyBuilder,
    Window,
    WindowedBolt,
    bolt,
)
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.names import code_name
from storm_dagster.model.topology import decode_topology
from storm_dagster.worker.dataplane.routes import resolve
from storm_rigs.components import Words


class Count(Bolt):
    outputs = ["word", "count"]
    config = {"topology.tick.tuple.freq.secs": 2}

    def __init__(self, start: int = 0) -> None:
        self.start = start


class Two(Bolt):
    outputs = [Stream(["a"], "left"), Stream(["b"], "right", direct=True)]


class WordCount(Topology):
    config = {"topology.workers": 2}
    words = Words.spec(par=2)
    count = Count.spec(
        inputs={words: Grouping.fields("word")}, par=3, config={"my.key": 1}, args={"start": 5}
    )


def test_a_topology_class_becomes_its_document() -> None:
    spec = WordCount.to_spec()
    assert list(spec.spouts) == ["words"] and list(spec.bolts) == ["count"]
    assert spec.conf == {"topology.workers": 2}
    count = spec.bolts["count"]
    assert count.object.python == f"{__name__}:Count" and count.object.args == {"start": 5}
    assert count.parallelism == 3
    assert count.conf == {"topology.tick.tuple.freq.secs": 2, "my.key": 1}
    assert count.inputs[0].component == "words" and count.inputs[0].grouping.fields == ("word",)
    assert decode_topology(spec.to_json()) == spec


class Reporter(Bolt):
    assets = ["lake/clicks", "lake/sales"]


class TickingReporter(TicklessBatchingBolt, Reporter):
    config = {"topology.component.asset.metadata": {}}


def test_the_assets_of_a_bolt_are_declared_in_its_conf() -> None:
    conf = Reporter.spec().config
    assert conf == {
        "topology.component.assets": ["lake/clicks", "lake/sales"],
        # Defined elsewhere: no asset of its own is made of them.
        "topology.component.asset.metadata": {"lake/clicks": None, "lake/sales": None},
    }
    ticking = TickingReporter.spec(config={"topology.component.assets": ["lake/x"]}).config
    assert ticking["topology.component.assets"] == ["lake/x"], "a conf replaces the list"
    assert ticking["topology.component.asset.metadata"] == {}
    assert ticking["topology.tick.tuple.freq.secs"] == 2


@pytest.mark.parametrize("assets", ["lake/clicks", {"lake/clicks": 1}, [["lake", "clicks"]], None])
def test_assets_that_are_no_list_of_keys_are_refused(assets: object) -> None:
    wrong = type("Wrong", (Bolt,), {"assets": assets})
    with pytest.raises(InvalidTopology, match=r"Wrong\.assets must be a list of keys"):
        wrong.spec()


def test_the_builder_makes_the_same_document() -> None:
    builder = TopologyBuilder(config={"topology.workers": 2})
    words = builder.set_spout("words", Words, par=2)
    builder.set_bolt(
        "count",
        Count,
        inputs={words: Grouping.fields("word")},
        par=3,
        config={"my.key": 1},
        args={"start": 5},
    )
    assert builder.build() == WordCount.to_spec()


class Four(Bolt):
    par = 4
    config = {"topology.tasks": 8}


class FourLines(ShellSpout):
    par = 3
    outputs = ["line"]


def test_a_class_says_how_many_executors_it_has_unless_its_spec_does() -> None:
    class Pars(Topology):
        lines = FourLines.spec(command="lines.sh")
        by_class = Four.spec(inputs=[lines])
        by_spec = Four.spec(inputs=[lines], par=2, config={"topology.tasks": 2})

    builder = TopologyBuilder()
    builder.set_spout("lines", FourLines.spec(command="lines.sh"))
    builder.set_bolt("by_class", Four, inputs="lines")
    builder.set_bolt("by_spec", Four, inputs="lines", par=2, config={"topology.tasks": 2})
    for spec in (Pars.to_spec(), builder.build()):
        assert spec.spouts["lines"].parallelism == 3
        bolts = {
            name: (part.parallelism, part.conf["topology.tasks"])
            for name, part in spec.bolts.items()
        }
        assert bolts == {"by_class": (4, 8), "by_spec": (2, 2)}


def test_inheritance_names_and_streams() -> None:
    class Base(Topology):
        words = Words.spec()

    class Derived(Base):
        two = Two.spec(name="pair", inputs=[Base.words])
        left = Count.spec(inputs=[two["left"]])
        right = Count.spec(inputs={two["right"]: Grouping.DIRECT})

    spec = Derived.to_spec()
    assert list(spec.bolts) == ["pair", "left", "right"]
    assert spec.bolts["left"].inputs[0].stream == "left"
    assert spec.bolts["right"].inputs[0].component == "pair"
    assert spec.bolts["pair"].outputs["right"].direct


def test_shell_and_batching_components() -> None:
    class Mixed(Topology):
        words = ShellSpout.spec(command="python", script="words.py", outputs=["word"])
        split = ShellBolt.spec(
            command=["ruby", "-W0"], script="split.rb", inputs=[words], outputs=["w"]
        )
        batch = TicklessBatchingBolt.spec(inputs=[split])

    spec = Mixed.to_spec()
    assert spec.spouts["words"].object.shell == ("python", "words.py")
    assert spec.bolts["split"].object.shell == ("ruby", "-W0", "split.rb")
    assert spec.bolts["batch"].conf == {"topology.tick.tuple.freq.secs": 2}
    assert issubclass(TicklessBatchingBolt, BatchingBolt)


def nested() -> type[Bolt]:
    class Hidden(Bolt):
        pass

    return Hidden


class FromMain(Bolt):
    pass


FromMain.__module__ = "__main__"


def _builder() -> TopologyBuilder:
    builder = TopologyBuilder()
    builder.set_spout("words", Words)
    return builder


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"component": nested()}, "inside a function"),
        ({"component": FromMain}, "__main__"),
        ({"component": "no_colon"}, "module:name"),
        ({"component": lambda: None}, "class"),
        ({"inputs": "nobody"}, "nobody"),
        ({"inputs": None}, "no inputs"),
        ({"inputs": {"words": Grouping.fields("wrod")}}, "wrod"),
        ({"inputs": {"words": "shuffle"}}, "Grouping"),
        ({"inputs": [Words.spec()]}, "not part of this topology"),
        ({"par": 0}, "par"),
        ({"par": True}, "par"),
        ({"args": {"x": object()}}, "JSON"),
        ({"config": {1: 2}}, "strings"),
        ({"component_id": "__acker"}, "__"),
        ({"component_id": "a b"}, "a b"),
        ({"component_id": "words"}, "twice"),
        ({"component": Words}, "set_spout"),
        ({"outputs": "word"}, "list"),
        ({"outputs": ["a", "a"]}, "twice"),
        ({"outputs": ["a", Stream(["b"])]}, "mix"),
    ],
)
def test_mistakes_are_named(arguments: dict, says: str) -> None:
    builder = _builder()
    given = {"component_id": "bolt", "component": Count, "inputs": "words", **arguments}
    with pytest.raises(InvalidTopology, match=says):
        builder.set_bolt(given.pop("component_id"), given.pop("component"), **given)
        builder.build()


def test_a_custom_grouping_that_is_a_lambda_is_refused() -> None:
    with pytest.raises(InvalidTopology, match="lambda"):
        Grouping.custom(lambda context, component, stream, tasks: None)
    with pytest.raises(InvalidTopology, match="spout"):
        TopologyBuilder().build()


def test_two_attributes_with_one_id_are_refused() -> None:
    class Doubled(Topology):
        words = Words.spec()
        one = Count.spec(name="count", inputs=[words])
        two = Count.spec(name="count", inputs=[words])

    with pytest.raises(InvalidTopology, match="count"):
        Doubled.to_spec()


@pytest.mark.parametrize("name", ["SparkBolt", "SparkQuery", "SparkSpout", "ShellBolt", "JoinBolt"])
def test_a_component_of_the_library_is_named_by_its_public_package(name: str) -> None:
    """Modules of the package may move. Workers of each release know the public name."""
    component = getattr(storm_dagster.api, name)
    assert code_name(component, "a component") == f"storm_dagster.api:{name}"


@pytest.mark.parametrize(
    "former",
    [
        "storm_dagster.api.spark:SparkBolt",
        "storm_dagster.api.spark:SparkSpout",
        "storm_dagster.api.spark_bolt:SparkBolt",
        "storm_dagster.api.spark_fused:FusedBolt",
        "storm_dagster.api.spark_query:SparkQuery",
    ],
)
def test_workers_load_components_by_the_names_of_earlier_releases(former: str) -> None:
    assert resolve(former).__name__ == former.partition(":")[2]


class Reads(Bolt):
    outputs = ["word"]


def test_a_cycle_is_written_with_a_global_stream_id() -> None:
    class Cycle(Topology):
        numbers = Words.spec()
        first = Reads.spec(inputs=[numbers, GlobalStreamId("second", "default")])
        second = Reads.spec(inputs={first: Grouping.fields("word")})

    inputs = Cycle.to_spec().bolts["first"].inputs
    assert [(item.component, item.stream) for item in inputs] == [
        ("numbers", "default"),
        ("second", "default"),
    ]


def test_one_spec_or_stream_is_the_only_input() -> None:
    numbers = Words.spec()
    for inputs in (numbers, numbers["default"], GlobalStreamId("numbers")):
        reads = Reads.spec(inputs=inputs)
        spec = type("One", (Topology,), {"numbers": numbers, "reads": reads}).to_spec()
        assert [item.component for item in spec.bolts["reads"].inputs] == ["numbers"]


@pytest.mark.parametrize(
    "grouping", [Grouping, Grouping.fields, "shuffle", ["word"], ("word",), None, lambda: None]
)
def test_the_error_of_another_grouping_shows_the_line_to_write(grouping: Any) -> None:
    numbers = Words.spec()
    reads = Reads.spec(inputs={numbers: grouping})
    with pytest.raises(InvalidTopology, match=r"write Grouping\.SHUFFLE, or Grouping\.fields\("):
        type("Wrong", (Topology,), {"numbers": numbers, "reads": reads}).to_spec()


@pytest.mark.parametrize("fields", [(), (0,), ([],), ("",), (["word", None],)])
def test_a_fields_grouping_without_names_shows_the_line_to_write(fields: Any) -> None:
    with pytest.raises(InvalidTopology, match=r"write Grouping\.fields\('FIELD'\)"):
        Grouping.fields(*fields)


@pytest.mark.parametrize("kind", ["class", "instance", "number", "pair"])
def test_the_error_of_other_inputs_shows_the_line_to_write(kind: str) -> None:
    numbers = Words.spec()
    inputs: dict[str, Any] = {
        "class": Words,
        "instance": Words(),
        "number": 5,
        "pair": [(numbers, Grouping.SHUFFLE)],
    }
    reads = Reads.spec(inputs=inputs[kind])
    with pytest.raises(InvalidTopology, match=r"write the spec.*\{spec: Grouping\.fields\("):
        type("Wrong", (Topology,), {"numbers": numbers, "reads": reads}).to_spec()


def _twice(word: str) -> str:
    return word * 2


def test_outputs_may_be_one_stream() -> None:
    one: Any = Stream(["a"], "odd")
    assert list(Words.spec(outputs=one).streams()) == ["odd"]
    windowed = type("Windowed", (WindowedBolt,), {"window": Window.tumbling(count=1)})
    assert "odd" in windowed.spec(outputs=one).streams()  # type: ignore[attr-defined]
    assert list(bolt(outputs=one)(_twice).spec().streams()) == ["odd"]
    for outputs in ("word", 5):
        with pytest.raises(InvalidTopology, match=r"write outputs = \['"):
            Words.spec(outputs=outputs).streams()  # type: ignore[arg-type]
