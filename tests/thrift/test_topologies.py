"""StormTopology structures: what runs here, what is refused, and the way back."""

from __future__ import annotations

import importlib
import json

import pytest
from thriftpy2.thrift import TPayload

from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.groupings import GroupingSpec
from storm_dagster.model.topology import (
    ComponentObject,
    ComponentSpec,
    InputSpec,
    StreamSpec,
    TopologySpec,
)
from storm_dagster.nimbus.thrift.structures import read_topology_struct, topology_struct

# Made when it is imported, from the definition file of Storm: no type checker knows what it has.
storm = importlib.import_module("streamparse.thrift")

SHELL = storm.ComponentObject(
    shell=storm.ShellComponent(execution_command="streamparse_run", script="-s json a.B")
)


def common(grouping: TPayload | None = None, **more: object) -> TPayload:
    inputs = (
        {}
        if grouping is None
        else {storm.GlobalStreamId(componentId="s", streamId="default"): grouping}
    )
    streams = {"default": storm.StreamInfo(output_fields=["word"], direct=False)}
    return storm.ComponentCommon(inputs=inputs, streams=streams, **more)


def topology(bolt: TPayload = SHELL, **more: object) -> TPayload:
    shuffle = storm.Grouping(shuffle=storm.NullStruct())
    bolts = {"b": storm.Bolt(bolt_object=bolt, common=more.pop("common", common(shuffle)))}
    spouts = {"s": storm.SpoutSpec(spout_object=SHELL, common=common())}
    made = storm.StormTopology(spouts=spouts, bolts=bolts, state_spouts={})
    for key, value in more.items():
        setattr(made, key, value)
    return made


def test_a_shell_component_keeps_its_command_conf_and_parallelism() -> None:
    part = common(
        storm.Grouping(fields=["word"]),
        parallelism_hint=3,
        json_conf='{"topology.tick.tuple.freq.secs": 5}',
    )
    spec = read_topology_struct(topology(common=part), "x")
    bolt = spec.bolts["b"]
    assert bolt.object.shell == ("streamparse_run", "-s json a.B")
    assert bolt.parallelism == 3 and bolt.conf == {"topology.tick.tuple.freq.secs": 5}
    assert bolt.inputs == (
        InputSpec(component="s", grouping=GroupingSpec(type="fields", fields=("word",))),
    )
    assert spec.spouts["s"].outputs == {"default": StreamSpec(fields=("word",))}
    assert spec.spouts["s"].parallelism == 1


@pytest.mark.parametrize(
    ("grouping", "wanted"),
    [
        (storm.Grouping(fields=[]), "global"),
        (storm.Grouping(shuffle=storm.NullStruct()), "shuffle"),
        (storm.Grouping(all=storm.NullStruct()), "all"),
        (storm.Grouping(none=storm.NullStruct()), "none"),
        (storm.Grouping(direct=storm.NullStruct()), "direct"),
        (storm.Grouping(local_or_shuffle=storm.NullStruct()), "local_or_shuffle"),
    ],
)  # fmt: skip
def test_each_grouping_of_storm_is_read_as_ours(grouping: TPayload, wanted: str) -> None:
    spec = read_topology_struct(topology(common=common(grouping)), "x")
    assert spec.bolts["b"].inputs[0].grouping.type == wanted


def java(name: str, *strings: str) -> TPayload:
    return storm.JavaObject(
        full_class_name=name, args_list=[storm.JavaObjectArg(string_arg=s) for s in strings]
    )


def test_storm_s_partial_key_grouping_is_ours() -> None:
    custom = storm.Grouping(
        custom_object=java("org.apache.storm.grouping.PartialKeyGrouping", "word")
    )
    spec = read_topology_struct(topology(common=common(custom)), "x")
    assert spec.bolts["b"].inputs[0].grouping == GroupingSpec(type="partial_key", fields=("word",))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: topology(storm.ComponentObject(serialized_java=b"\xac\xed\x00\x05sr")), "serialized Java object"),
        (lambda: topology(storm.ComponentObject(java_object=java("a.b.Bolt"))), "Java class 'a.b.Bolt'"),
        (lambda: topology(storm.ComponentObject()), "unknown kind"),
        (lambda: topology(storm.ComponentObject(shell=storm.ShellComponent(script="x"))), "without a command"),
        (lambda: topology(common=common(storm.Grouping(custom_serialized=b"\xac\xed"))), "serialized Java object"),
        (lambda: topology(common=common(storm.Grouping(custom_object=java("a.G")))), "Java class 'a.G'"),
        (lambda: topology(common=common(storm.Grouping())), "unknown kind"),
        (lambda: topology(common=common(json_conf="{")), "not valid JSON"),
        (lambda: topology(common=common(json_conf="[1]")), "must be a JSON object"),
        (lambda: topology(common=None), "no ComponentCommon"),
        (lambda: topology(worker_hooks=[b"x"]), "worker hooks"),
        (lambda: topology(dependency_jars=["other-1-2-stormjar.jar"]), "depends on 1 further archives"),
        (lambda: topology(state_spouts={"x": storm.StateSpoutSpec()}), "state spouts"),
        (lambda: None, "without a topology"),
    ],
)  # fmt: skip
def test_what_cannot_run_here_is_refused_by_name(made, why: str) -> None:
    value = made()
    for missing in ("worker_hooks", "dependency_jars", "dependency_artifacts"):
        if value is not None and not hasattr(value, missing):
            setattr(value, missing, None)
    with pytest.raises(InvalidTopology, match=why):
        read_topology_struct(value, "x")


def test_the_way_back_is_read_by_streamparse_s_types() -> None:
    spec = TopologySpec(
        name="x",
        spouts={
            "s": ComponentSpec(
                object=ComponentObject(python="m:Spout", args={"n": 1}), parallelism=2
            )
        },
        bolts={
            "b": ComponentSpec(
                object=ComponentObject.model_validate({"shell": ["python", "b.py"]}),
                conf={"k": 1},
                outputs={"default": StreamSpec(fields=("a",)), "d": StreamSpec(direct=True)},
                inputs=tuple(
                    InputSpec(component="s", stream=grouping.type, grouping=grouping)
                    for grouping in (
                        GroupingSpec(type="fields", fields=("w",)),
                        GroupingSpec(type="partial_key", fields=("w",)),
                        *(
                            GroupingSpec(type=t)
                            for t in ("global", "shuffle", "all", "none", "direct")
                        ),
                        GroupingSpec(type="local_or_shuffle"),
                        GroupingSpec(type="custom", object="m:choose"),
                    )
                ),
            )
        },
    )
    from thriftpy2.utils import deserialize, serialize

    struct = deserialize(storm.StormTopology(), serialize(topology_struct(spec)))
    bolt = struct.bolts["b"]
    assert bolt.bolt_object.shell.script == "b.py" and json.loads(bolt.common.json_conf) == {"k": 1}
    assert bolt.common.streams["d"].direct is True
    groupings = {source.streamId: grouping for source, grouping in bolt.common.inputs.items()}
    assert groupings["fields"].fields == ["w"] and groupings["global"].fields == []
    assert groupings["custom"].custom_object.full_class_name == "python:m:choose"
    assert groupings["local_or_shuffle"].local_or_shuffle is not None
    shown = struct.spouts["s"].spout_object.java_object
    assert shown.full_class_name == "python:m:Spout" and json.loads(
        shown.args_list[0].string_arg
    ) == {"n": 1}
    assert struct.spouts["s"].common.parallelism_hint == 2
    # What has a counterpart comes back as it was.
    del struct.bolts["b"].common.inputs[storm.GlobalStreamId(componentId="s", streamId="custom")]
    struct.spouts["s"].spout_object = SHELL
    for missing in ("worker_hooks", "dependency_jars", "dependency_artifacts"):
        setattr(struct, missing, None)
    again = read_topology_struct(struct, "x").bolts["b"]
    assert again.inputs == spec.bolts["b"].inputs[:-1] and again.object == spec.bolts["b"].object
