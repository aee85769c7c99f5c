"""A StormTopology that a client submits, as our topology, and ours as a StormTopology, for clients
that draw it.

Shell components, which is what streamparse and Storm's multilang libraries declare, run as they
are. What only a JVM could run is refused, by name: serialized Java objects are never read. A Python
component has no counterpart in Storm's union: it is shown as a ``JavaObject`` whose class name is
``python:module:QualName`` and whose one argument is its JSON.
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
    """The topology in a StormTopology structure; :class:`InvalidTopology` names what cannot run
    here.
    """
    if topology is None:
        raise InvalidTopology(
            f"topology {name!r} was submitted without a topology: send a StormTopology"
        )
    if topology.state_spouts:
        raise InvalidTopology(
            f"topology {name!r} has state spouts ({', '.join(sorted(topology.state_spouts))}): use spouts"
        )
    if topology.worker_hooks:
        raise InvalidTopology(
            f"topology {name!r} has worker hooks, which are serialized Java objects: remove them"
        )
    if needed := [*(topology.dependency_jars or ()), *(topology.dependency_artifacts or ())]:
        raise InvalidTopology(
            f"topology {name!r} depends on {len(needed)} further archives ({needed[0]!r:.80}): put what it needs into its own"
        )
    try:
        spouts, bolts = (
            {
                component_id: _component(
                    component_id, kind, getattr(spec, f"{kind}_object"), spec.common
                )
                for component_id, spec in (getattr(topology, f"{kind}s") or {}).items()
            }
            for kind in ("spout", "bolt")
        )
        return TopologySpec(name=name, spouts=spouts, bolts=bolts)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "topology"
        raise InvalidTopology(f"topology {name!r}: {where}: {first['msg']}") from None


def _component(component_id: str, kind: str, component: Any, common: Any) -> ComponentSpec:
    where = f"{kind} {component_id!r}"
    if common is None:
        raise InvalidTopology(
            f"{where} has no ComponentCommon: its inputs and streams are not declared"
        )
    parallelism = common.parallelism_hint
    return ComponentSpec(
        object=_object(where, component),
        parallelism=1 if parallelism is None else parallelism,
        conf=read_conf(common.json_conf, where),
        inputs=tuple(
            InputSpec(
                component=source.componentId or "",
                stream=source.streamId or DEFAULT_STREAM,
                grouping=_grouping(where, grouping),
            )
            for source, grouping in (common.inputs or {}).items()
        ),
        outputs={
            stream: StreamSpec(fields=tuple(info.output_fields or ()), direct=bool(info.direct))
            for stream, info in (common.streams or {}).items()
        },
    )


def _object(where: str, component: Any) -> ComponentObject:
    if component is not None and component.shell is not None:
        command = component.shell.execution_command
        if not command:
            raise InvalidTopology(
                f"{where} is a shell component without a command: give its execution_command"
            )
        script = component.shell.script
        # Storm hands the whole script over as one argument, and streamparse_run splits it.
        return ComponentObject(shell=(command, script) if script else (command,))
    if component is None or (component.java_object is None and component.serialized_java is None):
        raise InvalidTopology(
            f"{where} is of an unknown kind: only shell components can be submitted over Thrift"
        )
    java = component.java_object
    kind = (
        "a serialized Java object"
        if java is None
        else f"the Java class {java.full_class_name!r:.200}"
    )
    raise InvalidTopology(
        f"{where} is {kind}, which cannot run here: use a shell component, or submit a Python topology with "
        "`storm-dagster submit`"
    )


def read_conf(text: str | None, where: str) -> dict[str, Any]:
    """The conf of a topology or component as clients send it; :class:`InvalidTopology` unless it is
    a JSON object.
    """
    if not text:
        return {}
    try:
        conf = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidTopology(f"the conf of {where} is not valid JSON: {error}") from None
    if conf is None:
        return {}
    if not isinstance(conf, dict):
        raise InvalidTopology(
            f"the conf of {where} must be a JSON object, got {type(conf).__name__}"
        )
    return conf


def _grouping(where: str, given: Any) -> GroupingSpec:
    custom = getattr(given, "custom_object", None)
    fields = getattr(given, "fields", None) or ()
    if custom is not None and not fields:
        strings = [argument.string_arg for argument in custom.args_list or ()]
        fields = strings if all(strings) else ()
    for name, rule in GROUPINGS.items():
        member, _, java = rule.storm.partition(":")
        value = getattr(given, member, None)
        same = value is not None and (not java or java == value.full_class_name)
        if same and bool(fields) == (rule.needs == "fields"):
            return GroupingSpec(type=name, fields=tuple(fields))
    if custom is not None:
        known = [rule.storm.partition(":")[2] for rule in GROUPINGS.values()]
        ours = " and ".join(f"{java} with field names" for java in known if java)
        raise InvalidTopology(
            f"{where} is grouped by the Java class {custom.full_class_name!r:.200}, which cannot run here: of custom "
            f"groupings only {ours} has a counterpart"
        )
    if getattr(given, "custom_serialized", None) is not None:
        raise InvalidTopology(
            f"{where} has a grouping that is a serialized Java object, which cannot run here: use one of Storm's"
        )
    raise InvalidTopology(
        f"{where} has a grouping of an unknown kind: use fields, global, shuffle, all, none, direct or local-or-shuffle"
    )


def changes_a_topology(json_conf: object) -> bool:
    """Whether a submission with this conf changes the topology that runs, by JStorm's keys."""
    try:
        conf = read_conf(json_conf, "the conf") if isinstance(json_conf, str) else {}
    except InvalidTopology:
        return False
    return bool(conf.get("topology.upgrade") or conf.get("topology.hot.deploy.enable"))


def topology_struct(spec: TopologySpec) -> Any:
    """The structure; components in their order."""
    idl = load_idl()
    return idl.StormTopology(
        spouts={
            component_id: idl.SpoutSpec(
                spout_object=_shown_object(part), common=_shown_common(part)
            )
            for component_id, part in spec.spouts.items()
        },
        bolts={
            component_id: idl.Bolt(bolt_object=_shown_object(part), common=_shown_common(part))
            for component_id, part in spec.bolts.items()
        },
        state_spouts={},
    )


def _shown_object(part: ComponentSpec) -> Any:
    idl = load_idl()
    if part.object.shell is not None:
        command, *script = part.object.shell
        return idl.ComponentObject(
            shell=idl.ShellComponent(execution_command=command, script=" ".join(script))
        )
    return idl.ComponentObject(java_object=_python(str(part.object.python), part.object.args))


def _python(name: str, args: dict[str, Any]) -> Any:
    idl = load_idl()
    given = [idl.JavaObjectArg(string_arg=json.dumps(args))] if args else []
    return idl.JavaObject(full_class_name=f"python:{name}", args_list=given)


def _shown_common(part: ComponentSpec) -> Any:
    idl = load_idl()
    return idl.ComponentCommon(
        inputs={
            idl.GlobalStreamId(componentId=item.component, streamId=item.stream): _shown_grouping(
                item.grouping
            )
            for item in part.inputs
        },
        streams={
            stream: idl.StreamInfo(output_fields=list(info.fields), direct=info.direct)
            for stream, info in part.outputs.items()
        },
        parallelism_hint=part.parallelism,
        json_conf=json.dumps(part.conf),
    )


def _shown_grouping(grouping: GroupingSpec) -> Any:
    idl = load_idl()
    rule = GROUPINGS[grouping.type]
    if not rule.storm:
        return idl.Grouping(custom_object=_python(grouping.object or grouping.type, grouping.args))
    member, _, java = rule.storm.partition(":")
    if java:
        fields = [idl.JavaObjectArg(string_arg=field) for field in grouping.fields]
        return idl.Grouping(custom_object=idl.JavaObject(full_class_name=java, args_list=fields))
    return idl.Grouping(
        **{member: list(grouping.fields) if member == "fields" else idl.NullStruct()}
    )
