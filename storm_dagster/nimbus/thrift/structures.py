"""Conversion between a StormTopology and a TopologySpec.

Clients submit a StormTopology, and read one to draw it.

Shell components, which streamparse and Storm's multilang libraries declare, run unchanged.
Components that only a JVM could run are refused by name: serialized Java objects are never read. A
Python component has no counterpart in Storm's union: it becomes a ``JavaObject`` whose class name
is ``python:module:QualName`` and whose one argument is its JSON.
"""

import json
from typing import Any

from pydantic import ValidationError

from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.groupings import GROUPINGS, GroupingSpec
from storm_dagster.model.topology import (
    DEFAULT_STREAM,
    ComponentObject,
    ComponentSpec,
    InputSpec,
    StreamSpec,
    TopologySpec,
)
from storm_dagster.nimbus.thrift.idl import load_idl


def read_topology_struct(topology: Any, name: str) -> TopologySpec:
    """Read the topology in a StormTopology structure.

    :class:`InvalidTopology` names the part that cannot run here.
    """
    if topology is None:
        raise InvalidTopology(
            f"topology {name!r} was submitted without a topology: send a StormTopology"
        )
    if topology.state_spouts:
        raise InvalidTopology(
            f"topology {name!r} has state spouts ({', '.join(sorted(topology.state_spouts))}): "
            "use spouts"
        )
    if topology.worker_hooks:
        raise InvalidTopology(
            f"topology {name!r} has worker hooks, which are serialized Java objects: remove them"
        )
    archives = [*(topology.dependency_jars or ()), *(topology.dependency_artifacts or ())]
    if archives:
        raise InvalidTopology(
            f"topology {name!r} depends on {len(archives)} further archives ({archives[0]!r:.80}): "
            "put their files into its own archive"
        )
    try:
        spouts = {
            component_id: _read_component(f"spout {component_id!r}", spout.spout_object, spout)
            for component_id, spout in (topology.spouts or {}).items()
        }
        bolts = {
            component_id: _read_component(f"bolt {component_id!r}", bolt.bolt_object, bolt)
            for component_id, bolt in (topology.bolts or {}).items()
        }
        return TopologySpec(name=name, spouts=spouts, bolts=bolts)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "topology"
        raise InvalidTopology(f"topology {name!r}: {place}: {first['msg']}") from None


def _read_component(title: str, component: Any, declaration: Any) -> ComponentSpec:
    """Read a SpoutSpec or a Bolt; ``component`` is its ComponentObject."""
    common = declaration.common
    if common is None:
        raise InvalidTopology(
            f"{title} has no ComponentCommon: its inputs and streams are not declared"
        )
    # The order decides which of several errors is reported.
    component_object = _read_object(title, component)
    conf = read_conf(common.json_conf, title)
    inputs: list[InputSpec] = []
    for source, grouping in (common.inputs or {}).items():
        subscription = InputSpec(
            component=source.componentId or "",
            stream=source.streamId or DEFAULT_STREAM,
            grouping=_read_grouping(title, grouping),
        )
        inputs.append(subscription)
    outputs = {
        stream: StreamSpec(fields=tuple(info.output_fields or ()), direct=bool(info.direct))
        for stream, info in (common.streams or {}).items()
    }
    parallelism = common.parallelism_hint
    return ComponentSpec(
        object=component_object,
        parallelism=1 if parallelism is None else parallelism,
        conf=conf,
        inputs=tuple(inputs),
        outputs=outputs,
    )


def _read_object(title: str, component: Any) -> ComponentObject:
    """Read a ComponentObject; :class:`InvalidTopology` unless it is a shell component."""
    if component is not None and component.shell is not None:
        command = component.shell.execution_command
        if not command:
            raise InvalidTopology(
                f"{title} is a shell component without a command: give its execution_command"
            )
        script = component.shell.script
        # Storm passes the whole script as one argument, and streamparse_run splits it.
        return ComponentObject(shell=(command, script) if script else (command,))
    if component is None or (component.java_object is None and component.serialized_java is None):
        raise InvalidTopology(
            f"{title} is of an unknown kind: only shell components can be submitted over Thrift"
        )
    if component.java_object is None:
        kind = "a serialized Java object"
    else:
        kind = f"the Java class {component.java_object.full_class_name!r:.200}"
    raise InvalidTopology(
        f"{title} is {kind}, which cannot run here: use a shell component, or submit a Python "
        "topology with `storm-dagster submit`"
    )


def read_conf(text: str | None, title: str) -> dict[str, Any]:
    """Read the conf of a topology or component, as clients send it.

    :class:`InvalidTopology`, which names it by ``title``, unless it is a JSON object.
    """
    if not text:
        return {}
    try:
        conf = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidTopology(f"the conf of {title} is not valid JSON: {error}") from None
    if conf is None:
        return {}
    if not isinstance(conf, dict):
        raise InvalidTopology(
            f"the conf of {title} must be a JSON object, got {type(conf).__name__}"
        )
    return conf


def _read_grouping(title: str, grouping: Any) -> GroupingSpec:
    """Read a Grouping; ``title`` names the component in errors.

    :class:`InvalidTopology` if it has no counterpart in :data:`GROUPINGS`.
    """
    custom = getattr(grouping, "custom_object", None)
    fields = getattr(grouping, "fields", None) or ()
    if custom is not None and not fields:
        strings = [argument.string_arg for argument in custom.args_list or ()]
        fields = strings if all(strings) else ()
    for name, rule in GROUPINGS.items():
        # ``storm`` is the name of the union's member, and of a custom grouping its Java class.
        member, _, java_class = rule.storm.partition(":")
        value = getattr(grouping, member, None)
        if value is None or (java_class and java_class != value.full_class_name):
            continue
        # Storm's global grouping is a fields grouping without fields: only one of the two fits.
        if bool(fields) == (rule.needs == "fields"):
            return GroupingSpec(type=name, fields=tuple(fields))
    if custom is not None:
        java_classes = [rule.storm.partition(":")[2] for rule in GROUPINGS.values()]
        supported = " and ".join(f"{name} with field names" for name in java_classes if name)
        raise InvalidTopology(
            f"{title} is grouped by the Java class {custom.full_class_name!r:.200}, which cannot "
            f"run here: of custom groupings only {supported} has a counterpart"
        )
    if getattr(grouping, "custom_serialized", None) is not None:
        raise InvalidTopology(
            f"{title} has a grouping that is a serialized Java object, which cannot run here: "
            "use one of Storm's"
        )
    raise InvalidTopology(
        f"{title} has a grouping of an unknown kind: "
        "use fields, global, shuffle, all, none, direct or local-or-shuffle"
    )


def changes_a_topology(json_conf: object) -> bool:
    """True if JStorm's keys in a submission's conf change the running topology.

    False for a conf that cannot be read, which the submission refuses.
    """
    try:
        conf = read_conf(json_conf, "the conf") if isinstance(json_conf, str) else {}
    except InvalidTopology:
        return False
    return bool(conf.get("topology.upgrade") or conf.get("topology.hot.deploy.enable"))


def topology_struct(spec: TopologySpec) -> Any:
    """Make a StormTopology; components stay in their order."""
    idl = load_idl()
    return idl.StormTopology(
        spouts={
            component_id: idl.SpoutSpec(
                spout_object=_object_struct(spout), common=_common_struct(spout)
            )
            for component_id, spout in spec.spouts.items()
        },
        bolts={
            component_id: idl.Bolt(bolt_object=_object_struct(bolt), common=_common_struct(bolt))
            for component_id, bolt in spec.bolts.items()
        },
        state_spouts={},
    )


def _object_struct(component: ComponentSpec) -> Any:
    idl = load_idl()
    shell = component.object.shell
    if shell is not None:
        command, *script = shell
        return idl.ComponentObject(
            shell=idl.ShellComponent(execution_command=command, script=" ".join(script))
        )
    python = str(component.object.python)
    return idl.ComponentObject(java_object=_python_struct(python, component.object.args))


def _python_struct(name: str, args: dict[str, Any]) -> Any:
    """JavaObject in place of a Python class or function.

    Its one argument is the JSON of ``args``; without ``args`` it has none.
    """
    idl = load_idl()
    arguments: list[Any] = []
    if args:
        arguments.append(idl.JavaObjectArg(string_arg=json.dumps(args)))
    return idl.JavaObject(full_class_name=f"python:{name}", args_list=arguments)


def _common_struct(component: ComponentSpec) -> Any:
    """Make a ComponentCommon: inputs, streams, parallelism and conf."""
    idl = load_idl()
    groupings: dict[Any, Any] = {}
    for subscription in component.inputs:
        source = idl.GlobalStreamId(
            componentId=subscription.component, streamId=subscription.stream
        )
        groupings[source] = _grouping_struct(subscription.grouping)
    streams = {
        stream: idl.StreamInfo(output_fields=list(spec.fields), direct=spec.direct)
        for stream, spec in component.outputs.items()
    }
    return idl.ComponentCommon(
        inputs=groupings,
        streams=streams,
        parallelism_hint=component.parallelism,
        json_conf=json.dumps(component.conf),
    )


def _grouping_struct(grouping: GroupingSpec) -> Any:
    """Make a Grouping.

    A grouping that Storm does not have is a custom one whose class is ``python:`` and its name.
    """
    idl = load_idl()
    rule = GROUPINGS[grouping.type]
    if not rule.storm:
        python = _python_struct(grouping.object or grouping.type, grouping.args)
        return idl.Grouping(custom_object=python)
    member, _, java_class = rule.storm.partition(":")
    if java_class:
        arguments = [idl.JavaObjectArg(string_arg=field) for field in grouping.fields]
        java = idl.JavaObject(full_class_name=java_class, args_list=arguments)
        return idl.Grouping(custom_object=java)
    if member == "fields":
        return idl.Grouping(fields=list(grouping.fields))
    return idl.Grouping(**{member: idl.NullStruct()})
