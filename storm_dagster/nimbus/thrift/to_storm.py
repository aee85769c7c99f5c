"""A topology of ours as a StormTopology, for clients that draw it.

A shell component is what it was submitted as. A Python component has no counterpart in Storm's union: it is shown
as a ``JavaObject`` whose class name is ``python:module:QualName`` and whose one argument is its JSON.
"""

from __future__ import annotations

import json
from typing import Any

from storm_dagster.model.groupings import GROUPINGS, GroupingSpec
from storm_dagster.model.topology import ComponentSpec, TopologySpec
from storm_dagster.nimbus.thrift.idl import load_idl


def topology_struct(spec: TopologySpec) -> Any:
    """The structure; components in their order."""
    idl = load_idl()
    return idl.StormTopology(
        spouts={
            component_id: idl.SpoutSpec(spout_object=_object(part), common=_common(part))
            for component_id, part in spec.spouts.items()
        },
        bolts={
            component_id: idl.Bolt(bolt_object=_object(part), common=_common(part))
            for component_id, part in spec.bolts.items()
        },
        state_spouts={},
    )


def _object(part: ComponentSpec) -> Any:
    idl = load_idl()
    if part.object.shell is not None:
        command, *script = part.object.shell
        shell = idl.ShellComponent(execution_command=command, script=" ".join(script))
        return idl.ComponentObject(shell=shell)
    return idl.ComponentObject(java_object=_python(str(part.object.python), part.object.args))


def _python(name: str, args: dict[str, Any]) -> Any:
    idl = load_idl()
    given = [idl.JavaObjectArg(string_arg=json.dumps(args))] if args else []
    return idl.JavaObject(full_class_name=f"python:{name}", args_list=given)


def _common(part: ComponentSpec) -> Any:
    idl = load_idl()
    return idl.ComponentCommon(
        inputs={
            idl.GlobalStreamId(componentId=item.component, streamId=item.stream): _grouping(item.grouping)
            for item in part.inputs
        },
        streams={
            stream: idl.StreamInfo(output_fields=list(info.fields), direct=info.direct)
            for stream, info in part.outputs.items()
        },
        parallelism_hint=part.parallelism,
        json_conf=json.dumps(part.conf),
    )


def _grouping(grouping: GroupingSpec) -> Any:
    idl = load_idl()
    rule = GROUPINGS[grouping.type]
    if not rule.storm:
        return idl.Grouping(custom_object=_python(grouping.object or grouping.type, grouping.args))
    member, _, java = rule.storm.partition(":")
    if java:
        fields = [idl.JavaObjectArg(string_arg=field) for field in grouping.fields]
        return idl.Grouping(custom_object=idl.JavaObject(full_class_name=java, args_list=fields))
    return idl.Grouping(**{member: list(grouping.fields) if member == "fields" else idl.NullStruct()})
